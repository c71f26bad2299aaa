"""Train and compare arms x seeds: one study, one report. The section `study` of the config lists the differences.

The modules of experiments/studies, in the order of their use, are listed in experiments/studies/study.py.
"""

import contextlib
import json
import pathlib
import time
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from experiments.dry_run import dry_run, topology
from experiments.engine import config as configs, disk, errors, log, mesh, run as single, signals, workdir
from experiments.studies import (
    plan,
    programs,
    progress,
    results,
    run_folders,
    sentences,
    statistics,
    study as studies,
    tuning,
)

REPORTED = 60.0  # seconds of a program after which the report is written before the next one is trained


def config() -> dict[str, dict]:
    """Return the settings of a study: arms x seeds, in each condition. All other settings are common to all runs."""
    return {
        "study": {
            "experiment": ("", "of the runs: language, vision, synthetic, translation, masked_image"),
            "arms": (
                [],
                'what is compared: [["tied", {"model.score": "tied"}], ...], a name and the settings that differ;'
                " never train.growth, nan or keep_best, which must be as they are here: a run that goes wrong "
                "stops alone",
            ),
            "conditions": ([], "written like arms: separate comparisons, for example on other data; []: a single one"),
            "seeds": ([0, 1, 2, 3, 4], "the same for all arms: differences are paired by seed"),
            "metric": ("eval/loss", "what is compared: eval/loss, eval/accuracy, ...; a condition may have its own"),
            "threshold": (0.0, "the step at which the metric first reaches this is reported; 0: none; may differ too"),
            "margin": (
                0.0,
                'the verdict is "equal" if the interval lies within this, 0: never; a condition may have its own',
            ),
            "tune": (
                [],
                "settings that each arm chooses for itself, on a part of the training part: a grid of values, as "
                '[["optim.learning_rate", [1e-3, 3e-3]], ["optim.ema", [0.0, 0.99]]]; an arm may have more, by '
                'its "study.tune"',
            ),
            "tune_seeds": ([1000, 1001, 1002], "over which that is decided, others than study.seeds"),
            "keep_weights": (False, "the last checkpoint of every run stays in its folder, which can be opened"),
            "looks": (
                1,
                "how often a verdict is read, with more seeds each time: more looks widen the intervals",
            ),
        }
    }


SEVERAL = (
    "a study does not run as one of several processes: start it on each machine without --coordinator and "
    "--distributed, with the same --workdir"
)


def run(
    settings: configs.Settings,
    folder: pathlib.Path | None,
    earlier: pathlib.Path | None,
    device: str,
    chips: Sequence[Any] | None = None,
    target: topology.Topology | None = None,
    file: str | None = None,
) -> single.Result | None:
    """Train the runs that are not finished, and write the report. Without a folder, show the plan alone.

    Every run has a folder, <condition>/<arm>/seed_<seed>. Arms and seeds may be added later. Several processes, also on
    several machines, may work in the same folder: each program is trained by one of them.
    earlier: the folder of a study with a known spread, for the power of the seeds. device, chips: arguments of
    single.make_mesh. target, file: arguments of dry_run.compile_and_report. Raises UserError for a changed `seed` and
    for several processes.
    """
    study, seed = studies.read(settings), settings.seed
    errors.refuse((seed != settings.defaults()["seed"], f"seed = {seed}: a study has study.seeds in its place"))
    devices = single.make_mesh(settings, device, seeds=settings.mesh.seed, chips=chips)
    errors.refuse((jax.process_count() > 1, SEVERAL))
    measure, keep_weights = log.SYMMETRY in settings.log, settings.study.keep_weights
    session = programs.Session(study, devices, signals.Requests(), measure, keep_weights, printed=set())
    if folder is None:
        checked = show_plan(settings, session, earlier)
        if target:
            largest = max(checked, key=lambda job: job.step)  # to compile it takes a minute on two cores
            print(f"  of these {len(checked)} programs the one of most FLOPs is compiled", flush=True)
            dry_run.compile_and_report(programs.requests(largest, devices), target, file)
        return None
    with single.file_errors(folder), session.requests.collect():
        try:
            train_study(settings, session, folder)
        except (errors.Interrupted, errors.RunError) as error:
            error.args = (f"{error}; {report_what_is_finished(settings, session, folder)}",)
            raise
        files = write_report(folder, devices)
        print("\n".join(["", results.format_text(folder, study), "", *(f"  {file}" for file in files)]))
        session.requests.raise_if_requested("stopped after the last run: the report holds all of them")
    figures = [file for file in files if file.suffix == ".png"]
    return single.Result(folder, json.loads((folder / "report.json").read_bytes()), figures=figures)


def show_plan(
    settings: configs.Settings, session: programs.Session, earlier: pathlib.Path | None
) -> list[programs.Checked]:
    """Print and return the programs, first the ones that choose settings, and print the power of the seeds."""
    trials = group(studies.runs(settings, tuning.trials(session.study)), session, tuning=True)
    checked = check_all(trials + group(studies.runs(settings, session.study), session), session)
    for job in checked:
        print(job, flush=True)
    if trials:
        print(f"  the first {len(trials)} are trained to choose settings; the others then have the chosen ones")
    study = session.study
    conditions = results.analyse(earlier, study).conditions if earlier else statistics.analyse(study, [])
    print(sentences.describe_power(study, conditions, earlier))
    return checked


def train_study(settings: configs.Settings, session: programs.Session, folder: pathlib.Path) -> None:
    """Train the runs that choose settings, then the runs that are compared. All are checked before the first begins."""
    study, place = session.study, folder / tuning.FOLDER
    tried = studies.runs(settings, tuning.trials(study))
    trials = group(tried, session, tuning=True)
    waiting = check_all(run_folders.unfinished(trials, place), session)
    runs = studies.runs(settings, study, {} if waiting else tuning.chosen(folder, study))
    later = check_all(run_folders.unfinished(group(runs, session), folder), session)
    with workdir.lock(folder, wait=workdir.PATIENCE):
        workdir.open_run(folder, settings.to_dict())
        plan.record(folder, study)
        sources = workdir.keep_sources(folder, settings.sources(), workdir.read_commit()[1])
    if trials:
        run_folders.enter_runs(disk.folder(folder, tuning.FOLDER), trials, waiting, session)
    if waiting:
        print(f"first {len(tried)} runs in {len(trials)} programs, to choose settings")
        train_all(place, waiting, session._replace(keep_weights=False), sources)
        runs = studies.runs(settings, study, tuning.chosen(folder, study))
        later = check_all(run_folders.unfinished(group(runs, session), folder), session)
    for choice in tuning.read(folder, study):
        print(choice, flush=True)
    run_folders.enter_runs(folder, group(runs, session), later, session)
    done = sum(run_folders.is_finished(folder, run) for run in runs)
    print(f"{len(runs)} runs in {len(group(runs, session))} programs, {done} of them finished before")
    train_all(folder, later, session, sources)
    run_folders.remove_checkpoints(place / "checkpoints", tried)
    run_folders.remove_checkpoints(folder / "checkpoints", runs)


def group(runs: list[studies.Run], session: programs.Session, *, tuning: bool = False) -> list[studies.Program]:
    """Group the runs into programs with rows that the devices can share."""
    return studies.programs(runs, tuning=tuning, spread=session.devices.shape.get(mesh.SEED, 1))


def check_all(waiting: list[studies.Program], session: programs.Session) -> list[programs.Checked]:
    """Check that these programs can be trained, and print their experiments' lines about the data, each once."""
    checked = []
    for program in waiting:
        session.requests.raise_if_requested()
        checked.append(programs.check(program, session))
        for line in [line for line in checked[-1].lines if line not in session.printed]:
            session.printed.add(line)
            log.say(line, end="\n")
    return checked


def write_report(folder: pathlib.Path, devices: Mesh) -> list[pathlib.Path]:
    """Write the report of the runs that are finished so far, and return its files."""
    with workdir.lock(folder, wait=workdir.PATIENCE):
        return results.write_report(folder, mesh.describe(devices))


def report_what_is_finished(settings: configs.Settings, session: programs.Session, folder: pathlib.Path) -> str:
    """Write the report of a study that stops early, if a run is finished. Return a sentence on what it holds."""
    runs = studies.runs(settings, session.study)
    done = sum(run_folders.is_finished(folder, run) for run in runs)
    if not done:
        return "no run of the study is finished, and there is no report yet"
    write_report(folder, session.devices)
    return f"{folder / 'report.md'} holds the {done} of {len(runs)} runs that are finished"


def train_all(
    folder: pathlib.Path, waiting: list[programs.Checked], session: programs.Session, sources: dict[str, str]
) -> None:
    """Train these programs, except those that other processes train; wait for these. sources: SHA-256 by name."""
    every, done, busy = len(waiting), 0, 0
    with contextlib.closing(progress.Progress(waiting)) as line:
        while waiting:
            session.requests.raise_if_requested()
            job, *waiting = waiting
            with contextlib.ExitStack() as locks:
                try:
                    for run in job.program.runs:
                        locks.enter_context(workdir.lock(folder / run.name))
                except workdir.InUse as error:
                    waiting, busy = [*waiting, job], busy + 1
                    if busy == len(waiting):  # all of them
                        line.say(f"waiting for {job.program.name}: {error}")
                    if busy >= len(waiting):
                        time.sleep(workdir.PAUSE)
                    continue
                busy, unfinished = 0, run_folders.unfinished([job.program], folder)
                if [program.folder for program in unfinished] != [job.program.folder]:  # another process trained a part
                    rest = check_all(unfinished, session)
                    line.replace(job, rest)
                    waiting, every = rest + waiting, every + len(rest) - 1
                    continue
                line.begin(job)
                line.say(str(job))
                began = time.perf_counter()
                programs.train(job, folder, session, sources, line)
            session.requests.raise_if_requested()
            done, took = done + 1, time.perf_counter() - began
            line.say(f"  {done} of {every} done, in {took:.1f} s")
            if took > REPORTED and waiting and not job.program.tuning:
                write_report(folder, session.devices)

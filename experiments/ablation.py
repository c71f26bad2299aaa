"""Studies: train several arms, which differ in some settings, with several seeds each, and write one report.

experiments/studies/study.py lists the modules of experiments/studies in the order of their use.
"""

import contextlib
import json
import pathlib
import time
from collections.abc import Sequence
from typing import Any

import jax

from experiments.config import errors, settings as configs
from experiments.devices import mesh as meshes
from experiments.dry_run import dry_run as dry_runs, topology as topologies
from experiments.engine import run as runs, signals
from experiments.folder import log, workdir as workdirs
from experiments.studies import plan, programs, results, run_folders, sentences, statistics, study as studies, tuning
from experiments.studies.progress import Progress

REPORT_SECONDS = 60.0  # after a program that took longer, the report is written before the next program is trained


def config() -> dict[str, dict]:
    """Return the settings of a study of arms x seeds in each condition.

    The runs share all settings that no arm or condition changes.
    """
    return {
        "study": {
            "experiment": ("", "the experiment that every run trains: language, vision, ..."),
            "arms": (
                [],
                'the models to compare, each a name and the settings that differ: [["tied", {"model.score": "tied"}], '
                "...]; the last is the reference. train.growth, train.nan and train.keep_best keep their defaults in a "
                "study; if a run diverges, only this run stops",
            ),
            "conditions": ([], "separate comparisons, written like arms, such as on different data; []: only one"),
            "seeds": ([0, 1, 2, 3, 4], "seeds of every arm; differences between arms are paired by seed"),
            "metric": ("eval/loss", "metric to compare: eval/loss, eval/accuracy, ...; a condition can change it"),
            "threshold": (0.0, "report the step at which the metric reaches this; 0: none; a condition can change it"),
            "margin": (0.0, 'an interval within plus or minus this is "equal"; 0: none is; a condition can change it'),
            "tune": (
                [],
                "grid of settings of which each arm first chooses the best, on a tuning split of the training data: "
                '[["optim.learning_rate", [1e-3, 3e-3]], ["optim.ema", [0.0, 0.99]]]; an arm adds others by its '
                '"study.tune"',
            ),
            "tune_seeds": ([1000, 1001, 1002], "seeds of the tuning runs; none may be in study.seeds"),
            "keep_weights": (False, "keep the last checkpoint of every run in its folder, for the tools to open"),
            "looks": (1, "planned number of verdicts, each over more seeds; more verdicts widen the intervals"),
        }
    }


def run(
    settings: configs.Settings,
    folder: pathlib.Path | None,
    earlier_study: pathlib.Path | None,
    device: str,
    devices: Sequence[Any] | None = None,
    target: topologies.Topology | None = None,
    json_file: str | None = None,
) -> runs.Result | None:
    """Train the runs that are not finished, and write the report. If the folder is None, only print the plan.

    Several processes, also on several machines, can work in the same folder: each program is trained by one of them.
    Return the folder, its report.json and the figures; None if only the plan is printed. earlier_study: the folder of a
    study, whose standard deviations over seeds give the power of this study. device: "any", "cpu", "gpu" or "tpu".
    devices: JAX devices in place of `device`. target: with the plan, compile the largest program for these chips.
    json_file: the report of this compilation. Raises UserError if the setting `seed` is changed, or if this process
    belongs to a group of several. Raises Interrupted for a signal.
    """
    study, seed = studies.read(settings), settings.seed
    errors.refuse((seed != settings.defaults()["seed"], f"seed = {seed} is not for studies. Set study.seeds instead"))
    mesh = runs.make_mesh(settings, device, seeds=settings.mesh.seed, chips=devices)
    joined = "the processes of a study do not join. Start it on each machine with the same --workdir, without "
    errors.refuse((jax.process_count() > 1, f"{joined}--coordinator and --distributed"))
    measure, keep_weights = log.SYMMETRY in settings.log, settings.study.keep_weights
    causal = None if folder is None else set()
    session = programs.Session(study, mesh, signals.current(), measure, keep_weights, printed=set(), causal=causal)
    if folder is None:
        checked = show_plan(settings, session, earlier_study)
        if target:
            largest = max(checked, key=lambda job: job.step_flops)  # compiling one takes a minute on two cores
            print(f"  of {len(checked)} programs only the largest (most FLOPs) is compiled", flush=True)
            dry_runs.compile_and_report(programs.requests(largest, mesh), target, json_file)
        return None
    with runs.file_errors(folder), session.requests.collect():
        try:
            train_study(settings, session, folder)
        except (errors.Interrupted, errors.RunError) as error:
            error.args = (f"{error}; {report_finished_runs(settings, session, folder)}",)
            raise
        files = results.write_report(folder, meshes.describe(mesh))
        text = results.format_text(study, results.analyse(folder, study))
        print("\n".join(["", text, "", *(f"  {file}" for file in files)]))
    session.requests.raise_if_requested("stopped after the last run: the report holds all of them")
    figures = [file for file in files if file.suffix == ".png"]
    return runs.Result(folder, json.loads((folder / "report.json").read_bytes()), figures=figures)


def show_plan(
    settings: configs.Settings, session: programs.Session, earlier_study: pathlib.Path | None
) -> list[programs.Checked]:
    """Print a line for each program, which trains several runs at once, and the power of the study's seeds.

    Return the checked programs, those of tuning first. earlier_study: the folder of a study, whose runs give the
    standard deviations for the power; None: there is no such study. Raises UserError if a run cannot be trained.
    """
    study = session.study
    tuning_programs = group(studies.runs(settings, tuning.trials(study)), session, tuning=True)
    checked = check_all(tuning_programs + group(studies.runs(settings, study), session), session)
    for job in checked:
        print(job, flush=True)
    if tuning_programs:
        print(f"  the first {len(tuning_programs)} choose settings, with which the others are then trained")
    conditions = results.analyse(earlier_study, study).conditions if earlier_study else statistics.analyse(study, [])
    print(sentences.describe_power(study, conditions, earlier_study))
    return checked


def train_study(settings: configs.Settings, session: programs.Session, folder: pathlib.Path) -> None:
    """Check all unfinished runs. Then train those that tune settings, and last those that are compared."""
    study, tuning_folder = session.study, folder / tuning.FOLDER
    tuning_runs = studies.runs(settings, tuning.trials(study))
    tuning_programs = group(tuning_runs, session, tuning=True)
    waiting_tuning = check_all(run_folders.unfinished(tuning_programs, tuning_folder), session)
    compared_runs = studies.runs(settings, study, {} if waiting_tuning else tuning.chosen(folder, study))
    waiting = check_all(run_folders.unfinished(group(compared_runs, session), folder), session)
    with workdirs.lock(folder, wait=workdirs.PATIENCE):
        workdirs.open_run(folder, settings.to_dict())
        plan.record(folder, study)
        sources = workdirs.keep_sources(folder, settings.sources(), workdirs.read_commit()[1])
    if tuning_programs:
        run_folders.open_runs(tuning_folder, tuning_programs, waiting_tuning, session)
    if waiting_tuning:
        print(f"first {len(tuning_runs)} tuning runs in {len(tuning_programs)} programs")
        train_all(tuning_folder, waiting_tuning, session._replace(keep_weights=False), sources, later=waiting)
        compared_runs = studies.runs(settings, study, tuning.chosen(folder, study))
        waiting = check_all(run_folders.unfinished(group(compared_runs, session), folder), session)
    for choice in tuning.read(folder, study):
        print(choice, flush=True)
    every_program = group(compared_runs, session)
    run_folders.open_runs(folder, every_program, waiting, session)
    n_finished = sum(run_folders.is_finished(folder, run) for run in compared_runs)
    print(f"{len(compared_runs)} runs in {len(every_program)} programs, {n_finished} of the runs finished before")
    train_all(folder, waiting, session, sources)
    run_folders.remove_checkpoints(tuning_folder / "checkpoints", tuning_runs)
    run_folders.remove_checkpoints(folder / "checkpoints", compared_runs)


def group(runs: list[studies.Run], session: programs.Session, *, tuning: bool = False) -> list[studies.Program]:
    """Group the runs of a condition that differ only in seeds and the settings studies.NUMBERS into programs.

    The devices along the mesh axis `seed` share the runs of a program. tuning: the runs choose settings for the arms,
    on splits of the training data.
    """
    return studies.programs(runs, tuning=tuning, spread=session.devices.shape.get(meshes.SEED, 1))


def check_all(waiting: list[studies.Program], session: programs.Session) -> list[programs.Checked]:
    """Check and return the programs. Print each line of their experiments about the data once."""
    checked = []
    for program in waiting:
        session.requests.raise_if_requested()
        checked.append(programs.check(program, session))
        for line in [line for line in checked[-1].lines if line not in session.printed]:
            session.printed.add(line)
            log.say(line, end="\n")
    return checked


def report_finished_runs(settings: configs.Settings, session: programs.Session, folder: pathlib.Path) -> str:
    """Write the report of a study that stops early, if any run is finished. Return a sentence on it.

    Without a finished run, the sentence says that there is no report.
    """
    every_run = studies.runs(settings, session.study)
    n_finished = sum(run_folders.is_finished(folder, run) for run in every_run)
    if not n_finished:
        return "no run of the study is finished, and there is no report yet"
    results.write_report(folder, meshes.describe(session.devices))
    return f"{folder / 'report.md'} holds the {n_finished} of {len(every_run)} runs that are finished"


def train_all(
    folder: pathlib.Path,
    waiting: list[programs.Checked],
    session: programs.Session,
    sources: dict[str, str],
    later: Sequence[programs.Checked] = (),
) -> None:
    """Train these programs. If another process trains one of them, wait until it has finished.

    sources: the SHA-256 of the user's files, by name. later: programs that are trained after these. Only the
    predicted time left includes them. Raises Interrupted for a signal.
    """
    n_programs, n_trained, n_locked = len(waiting), 0, 0  # n_locked: programs in a row that were locked
    with contextlib.closing(Progress(waiting, later)) as line:
        while waiting:
            session.requests.raise_if_requested()
            job, *waiting = waiting
            with contextlib.ExitStack() as locks:
                try:
                    for run in job.program.runs:
                        locks.enter_context(workdirs.lock(folder / run.name))
                except workdirs.InUse as error:
                    waiting, n_locked, line.is_shared = [*waiting, job], n_locked + 1, True
                    if n_locked == len(waiting):  # other processes train all that is left
                        line.say(f"waiting for {job.program.name}: {error}")
                    if n_locked >= len(waiting):
                        time.sleep(workdirs.PAUSE)
                    continue
                n_locked, unfinished = 0, run_folders.unfinished([job.program], folder)
                if [program.folder for program in unfinished] != [job.program.folder]:
                    remaining = check_all(unfinished, session)  # another process has trained some runs of the program
                    line.replace(job, remaining)
                    waiting, n_programs = remaining + waiting, n_programs + len(remaining) - 1
                    continue
                line.begin(job)
                line.say(str(job))
                began = time.perf_counter()
                programs.train(job, folder, session, sources, line)
            session.requests.raise_if_requested()
            n_trained, seconds = n_trained + 1, time.perf_counter() - began
            line.say(f"  {n_trained} of {n_programs} done, in {seconds:.1f} s")
            if seconds > REPORT_SECONDS and waiting and not job.program.tuning:
                results.write_report(folder, meshes.describe(session.devices))

"""Arms x seeds, trained together and compared: one study, one report. What differs is in the `study` section."""

import contextlib
import functools
import json
import pathlib
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from experiments.compiler import dry_run, topology
from experiments.engine import config as configs, disk, errors, log, mesh, run as single, signals, workdir
from experiments.studies import plan, programs, progress, report as reports, statistics, study, tuning, words

REPORTED = 60.0  # seconds of a program behind which the report is written, before the others are trained


def config() -> dict[str, dict]:
    """What is compared: arms x seeds, in each of some conditions. All other settings are common to all runs."""
    return {
        "study": {
            "experiment": ("", "whose runs these are: language, vision, synthetic, translation, masked_image"),
            "arms": (
                [],
                'what is compared: [["tied", {"model.score": "tied"}], ...], a name and the settings that differ;'
                " never train.growth, nan or keep_best, which must be as they are here: a run that goes wrong "
                "stops alone",
            ),
            "conditions": ([], "written like arms: comparisons beside each other, as on other data; []: a single one"),
            "seeds": ([0, 1, 2, 3, 4], "the same for all arms: differences are paired by seed"),
            "metric": ("eval/loss", "what is compared: eval/loss, eval/accuracy, ...; a condition may have its own"),
            "threshold": (0.0, "the step at which the metric first reaches this is reported; 0: none; may differ too"),
            "margin": (
                0.0,
                '"equal" is said where the interval lies within this, 0: never; a condition may have its own',
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
                "how often a verdict is read with more seeds each time: intervals are wider, so that 5 % is all",
            ),
        }
    }


def run(
    settings: configs.Settings,
    folder: pathlib.Path | None,
    earlier: pathlib.Path | None,
    device: str,
    chips: Sequence[Any] | None = None,
    target: topology.Topology | None = None,
    file: str | None = None,
) -> single.Result | None:
    """Train what is not trained yet, and write the report; without a folder, only show what there would be to do, and
    what its seeds could show: in the metric, where the study in the folder `earlier` tells the spread.

    Every run has a folder of its own, <condition>/<arm>/seed_<seed>. Arms and seeds may be added to a study later.
    Several processes, also on several machines, may work in the same folder: each program is trained by one of them.
    device, chips: as of run.devices. target, file: as of dry_run.compile_and_report; a dry run without a target
    compiles nothing.
    UserError for a seed beside the study's, and for one process that is spread over machines.
    """
    asked, requests = study.read(settings), signals.Requests()
    if settings.seed != settings.defaults()["seed"]:
        raise errors.UserError("seed: a study has study.seeds")
    devices = single.devices(settings, device, seeds=settings.mesh.seed, chips=chips)
    if jax.process_count() > 1:
        raise errors.UserError(
            "a study is not spread over processes: start it on each machine without --coordinator and --distributed, "
            "with the same --workdir, and each takes programs from it"
        )
    grouped = functools.partial(study.programs, spread=devices.shape.get(mesh.SEED, 1))
    runs, tried = (study.runs(settings, one) for one in (asked, tuning.trials(asked)))
    trials = grouped(tried, tuning=True)
    say = functools.cache(functools.partial(log.say, end="\n"))  # every line once

    def check(waiting: list[study.Program]) -> list[programs.Checked]:
        """The programs, all of which can be trained; what their experiments say of their data is said."""
        found = []
        for program in waiting:
            requests.heed()
            found.append(programs.check(program, devices, metric=asked.metric[program.runs[0].condition]))
            for line in found[-1].lines:
                say(line)
        return found

    if folder is None:
        waiting = check(trials + grouped(runs))
        _show(waiting, len(trials), asked, earlier)
        if target:
            largest = max(waiting, key=lambda one: one.step)  # to compile it takes a minute on two cores
            print(f"  of these {len(waiting)} programs the one of most FLOPs is compiled", flush=True)
            dry_run.compile_and_report(programs.requests(largest, devices), target, file)
        return None

    def write() -> list[pathlib.Path]:
        with workdir.hold(folder, wait=workdir.PATIENCE):
            return reports.again(folder, mesh.describe(devices))

    with single.file_errors(folder), requests.collect():
        try:
            waiting = check(unfinished(trials, folder / tuning.FOLDER))
            if not waiting:
                runs = study.runs(settings, asked, tuning.chosen(folder, asked))
            later = check(unfinished(grouped(runs), folder))  # also those that are tuned first
            with workdir.hold(folder, wait=workdir.PATIENCE):
                workdir.enter(folder, settings.to_dict())
                plan.record(folder, asked)
                sources = workdir.keep_sources(folder, settings.sources(), workdir.checkout()[1])
            how = {"measure": log.SYMMETRY in settings.log, "devices": devices, "sources": sources}
            train = functools.partial(train_all, check=check, write=write, requests=requests, **how)
            if waiting:
                enter(disk.folder(folder, tuning.FOLDER), tried, waiting)
                print(f"first {len(tried)} runs in {len(trials)} programs, to choose settings")
                train(folder / tuning.FOLDER, waiting)
                runs = study.runs(settings, asked, tuning.chosen(folder, asked))
                later = check(unfinished(grouped(runs), folder))
            for one in tuning.read(folder, asked):
                print(one, flush=True)
            enter(folder, runs, later)
            done = sum(_finished(folder, run) for run in runs)
            print(f"{len(runs)} runs in {len(grouped(runs))} programs, {done} of them finished before")
            train(folder, later, weights=settings.study.keep_weights)
        except (errors.Interrupted, errors.RunError) as error:
            holds = "no run of the study is finished, and there is no report yet"
            if done := sum(_finished(folder, run) for run in runs):
                write()
                holds = f"{folder / 'report.md'} holds the {done} of {len(runs)} runs that are finished"
            error.args = (f"{error}; {holds}",)
            raise
        tidy(folder / tuning.FOLDER / "checkpoints", tried)
        tidy(folder / "checkpoints", runs)
        files = write()
        print("\n".join(["", reports.text(folder, asked), "", *(f"  {file}" for file in files)]))
        requests.heed("stopped behind the last run: the report holds all of them")
    figures = [file for file in files if file.suffix == ".png"]
    return single.Result(folder, json.loads((folder / "report.json").read_bytes()), figures=figures)


def _show(waiting: list[programs.Checked], trials: int, asked: study.Study, earlier: pathlib.Path | None) -> None:
    """What a dry run tells: the programs, the first `trials` of which choose settings, and what the seeds can show."""
    for one in waiting:
        print(one, flush=True)
    if trials:
        print(f"  the first {trials} are trained to choose settings; the others then have the chosen ones")
    conditions = reports.analysed(earlier, asked)[1] if earlier else statistics.analyse(asked, [])
    print(words.of_power(asked, conditions, earlier))


def train_all(
    folder: pathlib.Path,
    waiting: list[programs.Checked],
    *,
    check: Callable[..., list[programs.Checked]],
    write: Callable[[], object],
    requests: signals.Requests,
    **how: Any,
) -> None:
    """Train these programs, but those that other processes train meanwhile, and are waited for. check: of others that
    these leave. write: the report so far."""
    every, done, busy = len(waiting), 0, 0
    with contextlib.closing(progress.Progress(waiting)) as line:
        while waiting:
            requests.heed()
            one, *waiting = waiting
            with contextlib.ExitStack() as held:
                try:
                    for run in one.program.runs:
                        held.enter_context(workdir.hold(folder / run.name))
                except workdir.InUse as error:
                    waiting, busy = [*waiting, one], busy + 1
                    if busy == len(waiting):  # all of them
                        line.say(f"waiting for {one.program.name}: {error}")
                    if busy >= len(waiting):
                        time.sleep(workdir.PAUSE)
                    continue
                busy, left = 0, unfinished([one.program], folder)
                if [some.folder for some in left] != [one.program.folder]:  # another process has trained of these
                    rest = check(left)
                    line.replace(one, rest)
                    waiting, every = rest + waiting, every + len(rest) - 1
                    continue
                line.begin(one)
                line.say(str(one))
                began = time.perf_counter()
                programs.train(one, folder, progress=line, requests=requests, **how)
            requests.heed()
            done, took = done + 1, time.perf_counter() - began
            line.say(f"  {done} of {every} done, in {took:.1f} s")
            if took > REPORTED and waiting and not one.program.tuning:
                write()


def enter(folder: pathlib.Path, runs: list[study.Run], later: list[programs.Checked]) -> None:
    """Make the folders of the runs, or come back to them, but for those that another process is in. later: the programs
    that are not trained yet. Raises UserError if a run was another before, or its arm was trained on other data."""
    data = {(run.condition, run.arm): one.data for one in later for run in one.program.runs}
    begun = [one.program for one in later if (folder / "checkpoints" / one.program.folder).exists()]
    begun = {run.name for program in begun for run in program.runs}
    for run in runs:
        now, saved = data.get((run.condition, run.arm)), folder / run.name / "config.json"
        if now and saved.is_file() and (run.name in begun or _finished(folder, run)):
            before = disk.read_json(saved, says="its settings").get("data") or now
            if before != now:
                raise errors.UserError(
                    f"{folder / run.name} was trained on other data than there are now, so the seeds of arm {run.arm} "
                    "could not be compared: bring back the data, or choose another --workdir"
                )
    for run in runs:
        with study.naming(f"condition {run.condition}, arm {run.arm}"), contextlib.suppress(workdir.InUse):
            place = disk.folder(folder, run.condition, run.arm, f"seed_{run.seed}")
            with workdir.hold(place):
                own = data.get((run.condition, run.arm))
                workdir.enter(place, run.settings.to_dict(), data=own)
                if not _finished(folder, run):  # a result of other steps, or a damaged one
                    (place / "summary.json").unlink(missing_ok=True)


def unfinished(every: list[study.Program], folder: pathlib.Path) -> list[study.Program]:
    """The programs that are still to be trained: first those that were begun, as they were."""
    begun, rest = [], []
    for one in every:
        left = [run for run in one.runs if not _finished(folder, run)]
        if left and (folder / "checkpoints" / one.folder).exists():
            begun.append(one)
        else:
            rest += left
    return begun + (study.programs(rest, tuning=every[0].tuning, spread=every[0].spread) if rest else [])


def _finished(folder: pathlib.Path, run: study.Run) -> bool:
    return workdir.finished(folder / run.name, run.settings.train.steps)


def tidy(folder: pathlib.Path, runs: list[study.Run]) -> None:
    """Remove checkpoints of these runs, which are all finished: of programs that have become others.

    Those of runs that are no part of the study this time stay.
    """
    kinds = "|".join(re.escape(run.kind) for run in runs)
    for left in folder.iterdir() if folder.is_dir() and not folder.is_symlink() else ():
        if re.fullmatch(rf"({kinds})_[0-9a-f]{{8}}", left.name):
            disk.remove(left)
    with contextlib.suppress(OSError):
        folder.rmdir()

"""Arms x seeds, trained together and compared: one study, one report. What differs is in the `study` section."""

import contextlib
import functools
import json
import pathlib
import re
import time
from collections.abc import Callable

import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from experiments.compiler import report as compiler_report
from experiments.engine import compilation, disk, errors, log, mesh, signals, workdir
from experiments.engine import config as configs
from experiments.engine import run as single
from experiments.studies import plan, programs, progress, statistics, study, words
from experiments.studies import report as reports

REPORTED = 60.0  # seconds of a program behind which the report is written, before the others are trained


def config() -> dict[str, ConfigDict]:
    """What is compared: arms x seeds, in each of some conditions. All other settings are common to all runs."""
    study = ConfigDict()
    study.experiment = ""  # whose runs these are: language, vision, synthetic, translation, masked_image
    study.arms = []  # what is compared: [["tied", {"model.score": "tied"}], ...], a name and the settings that differ;
    # never train.growth, nan or keep_best, which must be as they are here: a run that goes wrong stops alone
    study.conditions = []  # written like arms: comparisons beside each other, as on other data; []: a single one
    study.seeds = [0, 1, 2, 3, 4]  # the same for all arms: differences are paired by seed
    study.metric = "eval/loss"  # what is compared: eval/loss, eval/accuracy, ...; a condition may have its own
    study.threshold = 0.0  # the step at which the metric first reaches this is reported; 0: none; may differ too
    study.margin = 0.0  # "equal" is said where the interval lies within this, 0: never; a condition may have its own
    study.correction = "study"  # intervals hold for all arms x conditions together; "condition": for the arms of each
    study.looks = 1  # how often a verdict is read with more seeds each time: intervals are wider, so that 5 % is all
    return {"study": study}


def run(
    settings: configs.Settings, folder: pathlib.Path | None, earlier: pathlib.Path | None = None
) -> single.Result | None:
    """Train what is not trained yet, and write the report; without a folder, only show what there would be to do, and
    what its seeds could show: in the metric, where the study in the folder `earlier` tells the spread.

    Every run has a folder of its own, <condition>/<arm>/seed_<seed>. Arms and seeds may be added to a study later.
    UserError for a seed beside the study's, and for several processes.
    """
    asked = study.read(settings)
    if settings.seed != settings.defaults()["seed"]:
        raise errors.UserError("seed: a study has study.seeds")
    devices = single.devices(settings, seeds=settings.mesh.seed)
    if jax.process_count() > 1:
        raise errors.UserError("a study takes one process; its devices may share the seeds (mesh.seed)")
    runs = study.runs(settings, asked)
    every = study.programs(runs)
    if folder is None:
        waiting = checked(every, asked, devices)
        for one in waiting:
            print(one, flush=True)
        conditions = reports.analysed(earlier, asked)[1] if earlier else statistics.analyse(asked, [])
        print(words.of_power(asked, conditions, earlier))
        if compilation.described.get():
            dearest = max(waiting, key=lambda one: one.step)  # to compile it takes a minute on two cores
            print(f"  of these {len(waiting)} programs the one of most FLOPs is compiled", flush=True)
            compiler_report.show(programs.described(dearest, devices))
        return None
    requests = signals.Requests()
    write = functools.partial(reports.again, folder, mesh.describe(devices))
    with workdir.hold(folder), single.file_errors(folder), requests.collect():
        finished = {run.name for run in runs if workdir.finished(folder / run.name, run.settings.train.steps)}
        try:
            waiting = checked(unfinished(every, finished, folder), asked, devices, requests.heed)
            enter(folder, settings, runs)
            plan.record(folder, asked)
            sources = workdir.keep_sources(folder, settings.sources(), workdir.checkout()[1])
            for run in runs:
                if run.name not in finished:  # a result of other steps, or a damaged one
                    (folder / run.name / "summary.json").unlink(missing_ok=True)
            print(f"{len(runs)} runs in {len(every)} programs, {len(finished)} of them finished before")
            with contextlib.closing(progress.Progress(waiting)) as line:
                for number, one in enumerate(waiting, 1):
                    line.begin(number - 1)
                    line.say(str(one))
                    began = time.perf_counter()
                    how = {"measure": log.SYMMETRY in settings.log, "requests": requests, "sources": sources}
                    programs.train(one, folder, devices, line, **how)
                    requests.heed()
                    took = time.perf_counter() - began
                    line.say(f"  {number} of {len(waiting)} done, in {took:.1f} s")
                    if took > REPORTED and number < len(waiting):
                        write()
        except (errors.Interrupted, errors.RunError) as error:
            holds = "no run of the study is finished, and there is no report yet"
            if done := sum(workdir.finished(folder / run.name, run.settings.train.steps) for run in runs):
                write()
                holds = f"{folder / 'report.md'} holds the {done} of {len(runs)} runs that are finished"
            error.args = (f"{error}; {holds}",)
            raise
        tidy(folder / "checkpoints", runs)
        files = write()
        print("\n".join(["", reports.text(folder, asked), "", *(f"  {file}" for file in files)]))
        requests.heed("stopped behind the last run: the report holds all of them")
    figures = [file for file in files if file.suffix == ".png"]
    return single.Result(folder, json.loads((folder / "report.json").read_bytes()), figures=figures)


def checked(
    waiting: list[study.Program], asked: study.Study, devices: Mesh, before: Callable[[], None] = lambda: None
) -> list[programs.Checked]:
    """The programs, all of which can be trained; what their experiments say of their data is said once.

    before: called before each program; what it raises ends this.
    """
    found: list[programs.Checked] = []
    said = set()
    for program in waiting:
        before()
        found.append(programs.check(program, devices, metric=asked.metric[program.runs[0].condition]))
        for line in found[-1].lines:
            if line not in said:
                print(line, flush=True)
        said |= set(found[-1].lines)
    return found


def enter(folder: pathlib.Path, settings: configs.Settings, runs: list[study.Run]) -> None:
    """Make the folders of the study and of its runs, or come back to them. UserError where one was another before."""
    workdir.enter(folder, settings.to_dict(), settings.defaults())
    for run in runs:
        with study.naming(f"condition {run.condition}, arm {run.arm}"):
            disk.folder(folder, run.condition, run.arm, f"seed_{run.seed}")
            workdir.enter(folder / run.name, run.settings.to_dict(), run.settings.defaults())


def unfinished(every: list[study.Program], finished: set[str], folder: pathlib.Path) -> list[study.Program]:
    """The programs that are still to be trained: first those that were begun, as they were."""
    begun, rest = [], []
    for one in every:
        left = [run for run in one.runs if run.name not in finished]
        if left and (folder / "checkpoints" / one.folder).exists():
            begun.append(one)
        else:
            rest += left
    return begun + study.programs(rest)


def tidy(folder: pathlib.Path, runs: list[study.Run]) -> None:
    """Remove checkpoints of these runs, which are all finished: of programs that have become others, or were damaged.

    Those of runs that are no part of the study this time stay.
    """
    kinds = "|".join(re.escape(run.kind) for run in runs)
    for left in folder.iterdir() if folder.is_dir() and not folder.is_symlink() else ():
        if re.fullmatch(rf"({kinds})_[0-9a-f]{{8}}(\.damaged)?", left.name):
            disk.remove(left)
    with contextlib.suppress(OSError):
        folder.rmdir()

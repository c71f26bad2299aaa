"""The folders of a study's runs: make or reopen them, find the runs that are not finished, remove old checkpoints."""

import contextlib
import pathlib
import re

from experiments.engine import disk, errors, workdir
from experiments.studies import programs, study as studies


def enter_runs(
    folder: pathlib.Path,
    every: list[studies.Program],
    waiting: list[programs.Checked],
    session: programs.Session,
) -> None:
    """Make or reopen the folder of each run, under a lock that is released at once; skip folders that are locked.

    every: all programs. waiting: those of them that are not trained yet. Remove a summary.json of other steps, or a
    damaged one. Raises UserError if a run had other settings before, or if its arm was trained on other data than there
    are now; finished runs are checked too.
    """
    data = {run.place: job.data for job in waiting for run in job.program.runs}
    for program in every:
        if unknown := [run for run in program.runs if run.place not in data]:
            work = programs.prepare_work(program, unknown[0].settings, session.devices)
            data |= {run.place: work.data for run in unknown}
    started = [job.program for job in waiting if (folder / "checkpoints" / job.program.folder).exists()]
    started = {run.name for program in started for run in program.runs}
    runs = [run for program in every for run in program.runs]
    for run in runs:
        saved = folder / run.name / "config.json"
        if saved.is_file() and (run.name in started or is_finished(folder, run)):
            before = disk.read_json(saved, says="its settings").get("data") or data[run.place]
            if before != data[run.place]:
                raise errors.UserError(
                    f"{folder / run.name} was trained on other data, so the seeds of arm {run.arm} could not be "
                    "compared: restore the data, or choose another --workdir"
                )
    for run in runs:
        with studies.naming(f"condition {run.condition}, arm {run.arm}"), contextlib.suppress(workdir.InUse):
            place = disk.folder(folder, run.condition, run.arm, f"seed_{run.seed}")
            with workdir.lock(place):
                workdir.open_run(place, run.settings.to_dict(), data=data[run.place])
                if not is_finished(folder, run):  # a result of other steps, or a damaged one
                    (place / "summary.json").unlink(missing_ok=True)


def unfinished(every: list[studies.Program], folder: pathlib.Path) -> list[studies.Program]:
    """Return the programs that are still to be trained: first those that were begun, unchanged."""
    started, rest = [], []
    for program in every:
        remaining = [run for run in program.runs if not is_finished(folder, run)]
        if remaining and (folder / "checkpoints" / program.folder).exists():
            started.append(program)
        else:
            rest += remaining
    return started + (studies.programs(rest, tuning=every[0].tuning, spread=every[0].spread) if rest else [])


def is_finished(folder: pathlib.Path, run: studies.Run) -> bool:
    return workdir.is_finished(folder / run.name, run.settings.train.steps)


def remove_checkpoints(folder: pathlib.Path, runs: list[studies.Run]) -> None:
    """Remove the checkpoints of these finished runs. Checkpoints of other runs stay."""
    kinds = "|".join(re.escape(run.kind) for run in runs)
    for entry in folder.iterdir() if folder.is_dir() and not folder.is_symlink() else ():
        if re.fullmatch(rf"({kinds})_[0-9a-f]{{8}}", entry.name):
            disk.remove(entry)
    with contextlib.suppress(OSError):
        folder.rmdir()

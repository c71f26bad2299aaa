"""The folders of a study's runs: make or reopen them, find unfinished runs, remove old checkpoints."""

import contextlib
import pathlib
import re

from experiments.config import disk, errors
from experiments.folder import records, workdir as workdirs
from experiments.studies import programs, study as studies


def open_runs(
    folder: pathlib.Path, every: list[studies.Program], waiting: list[programs.Checked], session: programs.Session
) -> None:
    """Make or reopen the folder of each run of `every` that no other process has locked.

    waiting: the programs of `every` to be trained. Remove the summary.json of a run that finished after fewer steps
    than are planned now. Raises UserError if a run, also a finished one, had other settings or data.
    """
    data = {run.place: job.data for job in waiting for run in job.program.runs}
    for program in every:
        if unknown := [run for run in program.runs if run.place not in data]:
            work = programs.prepare_work(program, unknown[0].settings, session.devices)
            data |= dict.fromkeys((run.place for run in unknown), work.data)
    started = {run.name for job in waiting if has_checkpoints(folder, job.program) for run in job.program.runs}
    runs = [run for program in every for run in program.runs]
    for run in runs:
        before = records.read_config(folder / run.name).get("data") or data[run.place]
        if before != data[run.place] and (run.name in started or is_finished(folder, run)):
            mixed = f"{folder / run.name} was trained on other data, so its arm {run.arm} would mix two data sets"
            raise errors.UserError(f"{mixed}. Restore the data, or choose another --workdir.")
    for run in runs:
        with studies.naming(f"condition {run.condition}, arm {run.arm}"), contextlib.suppress(workdirs.InUse):
            place = disk.folder(folder, run.name)
            with workdirs.lock(place):
                workdirs.open_run(place, run.settings.to_dict(), data=data[run.place])
                if not is_finished(folder, run):
                    (place / records.SUMMARY).unlink(missing_ok=True)


def has_checkpoints(folder: pathlib.Path, program: studies.Program) -> bool:
    """Return True if the program has a folder of checkpoints in `folder`, so that its training has begun."""
    return (folder / records.CHECKPOINTS / program.folder).exists()


def unfinished(every: list[studies.Program], folder: pathlib.Path) -> list[studies.Program]:
    """Return the programs to train: those with checkpoints, unchanged, then new programs of the other unfinished runs.

    A program whose runs are all finished is left out.
    """
    started, rest = [], []
    for program in every:
        remaining = [run for run in program.runs if not is_finished(folder, run)]
        if remaining and has_checkpoints(folder, program):
            started.append(program)
        else:
            rest += remaining
    return started + (studies.programs(rest, tuning=every[0].tuning, spread=every[0].spread) if rest else [])


def is_finished(folder: pathlib.Path, run: studies.Run) -> bool:
    """Return True if the run has its result. folder: of the study.

    Raises UserError if the run has already taken more steps than planned, and for a damaged summary.json.
    """
    return workdirs.is_finished(folder / run.name, run.settings.train.steps)


def remove_checkpoints(folder: pathlib.Path, runs: list[studies.Run]) -> None:
    """Remove the checkpoints of programs whose first run has condition and arm of one of these finished runs.

    folder: the study's folder `checkpoints`, which is also removed if it is then empty.
    """
    kinds = "|".join(re.escape("_".join(run.place)) for run in runs)
    for entry in folder.iterdir() if folder.is_dir() and not folder.is_symlink() else ():
        if re.fullmatch(rf"({kinds})_[0-9a-f]{{8}}", entry.name):
            disk.remove(entry)
    with contextlib.suppress(OSError):
        folder.rmdir()

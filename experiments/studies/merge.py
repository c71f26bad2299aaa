"""Folders of one study, from several machines, brought together in a new one."""

import copy
import fnmatch
import pathlib
import shutil
from collections.abc import Sequence

from experiments.data import vocabulary_files
from experiments.engine import config, disk, errors, manifest, workdir
from experiments.studies import plan, report, runs, study, tuning

OWN = {"study.arms", "study.conditions", "study.seeds", "log"}  # what may differ, and mesh.*
# What a study writes for a run, with its model's vocabulary and checkpoints if study.keep_weights is set.
FILES = ("config.json", "summary.json", "data.json", "metrics.jsonl", "maps.npz", "*token*.json", "tok*.bin")
FILES += (*vocabulary_files.FILES, "checkpoints")
MEASURED = ("params_sha256", "diverged_at", "steps")  # and all evaluations: of the same run these are the same


def merge(folders: Sequence[pathlib.Path], new: pathlib.Path) -> None:
    """The finished runs of all these folders, their sources and a config of all arms, conditions and seeds, in `new`.

    UserError, and nothing is written: where the folders differ in another setting, in an arm or condition of the same
    name, in the reference, in their code, in the data of an arm; where a run is in two of them and is not
    the same; where there is one folder only, or one that is no study's, or no run is finished, or `new` is there.
    """
    if len(folders) < 2:
        raise errors.UserError("a merge needs at least two folders: --merge=A --merge=B")
    disk.check_new(new, "--workdir")
    every = {folder: report.saved(folder) for folder in folders}
    studies = {folder: study.read(settings) for folder, settings in every.items()}
    of_all = copy.deepcopy(every[folders[0]].to_dict())
    first = config.flat(of_all)
    for folder, settings in every.items():
        own = config.flat(settings.to_dict())
        differ = {key for key in first | own if first.get(key) != own.get(key) and not key.startswith("mesh.")}
        _agree(not differ - OWN, folders[0], folder, f"in {', '.join(sorted(differ - OWN))}")
        _agree(studies[folder].reference == studies[folders[0]].reference, folders[0], folder, "in the reference")
    for what in ("conditions", "arms"):
        of_all["study"][what] = _together(what, {folder: getattr(one, what) for folder, one in studies.items()})
    of_all["study"]["seeds"] = list(dict.fromkeys(seed for one in studies.values() for seed in one.seeds))
    places = _places({folder: runs.load(folder, one) for folder, one in studies.items()})
    if not places:
        raise errors.UserError(f"no run is finished in {' or '.join(map(str, studies))}")
    trials = {folder / tuning.FOLDER: tuning.trials(one) for folder, one in studies.items()}
    tried = _places({place: runs.load(place, one) for place, one in trials.items()})
    kept = places | {f"{tuning.FOLDER}/{name}": place.parent for name, place in tried.items()}
    draft = new.with_name(new.name + disk.DRAFT)  # which becomes the new one if all goes well
    disk.remove(draft)
    try:
        workdir.enter(draft, of_all)
        plan.merge(folders, draft)
        for folder in folders:
            sources = folder / workdir.SOURCES
            files = sorted(sources.iterdir()) if sources.is_dir() else []
            workdir.keep_sources(draft, {file: file.name for file in files})
        for name, folder in kept.items():
            _copy(folder / name, draft / name)
        draft.replace(new)
    finally:
        disk.remove(draft)


def _copy(run: pathlib.Path, new: pathlib.Path) -> None:
    """Copy what a run writes, and print how many other files are left out."""
    new.mkdir(parents=True)
    entries = [one for one in run.iterdir() if one.name != workdir.LOCK]
    written = [one for one in entries if any(fnmatch.fnmatchcase(one.name, name) for name in FILES)]
    for step in manifest.steps(run / "checkpoints") if not (run / "checkpoints").is_symlink() else ():
        shutil.copytree(run / "checkpoints" / str(step), new / "checkpoints" / str(step), symlinks=True)
    for file in (one for one in written if one.is_file() and not one.is_symlink()):
        shutil.copy2(file, new)
    if len(written) < len(entries):
        print(f"{len(entries) - len(written)} files of {run} that no run writes are not copied", flush=True)


def _agree(alike: bool, one: pathlib.Path, other: pathlib.Path, where: str) -> None:
    if not alike:
        raise errors.UserError(f"{one} and {other} are not of one study, as they differ {where}")


def _together(what: str, named: dict[pathlib.Path, list[study.Named]]) -> list[list]:
    """The arms or conditions of all folders as a config has them; of arms, the reference stays the last."""
    first, *_ = named
    found: dict[str, tuple[pathlib.Path, study.Named]] = {}
    for folder, some in named.items():
        for one in some:
            before, its = found.setdefault(one.name, (folder, one))
            _agree(its == one, before, folder, f'in what "{one.name}" of study.{what} is')
    last = named[first][-1].name if what == "arms" else ""
    return [list(one) for name, (_, one) in sorted(found.items(), key=lambda pair: pair[0] == last)]


def _places(finished: dict[pathlib.Path, list[runs.Run]]) -> dict[str, pathlib.Path]:
    """A folder that has it, for each finished run. UserError where runs do not agree."""
    commits: dict[str, pathlib.Path] = {}
    data: dict[tuple[str, str], tuple[pathlib.Path, str | None]] = {}  # and the user's own modules
    found: dict[str, tuple[pathlib.Path, dict]] = {}
    for folder, some in finished.items():
        for run in some:
            commits.setdefault(run.summary.get("commit") or "", folder)
            _agree(len(commits) < 2, *[*commits.values(), folder][:2], f"in the code: {' and '.join(commits)}")
            for file, code in [*run.summary.get("sources", {}).items()][1:]:  # behind the config, which has the arms
                before = data.setdefault(("", file), (folder, code))
                _agree(before[1] == code, before[0], folder, f"in the code: {file}")
            name, digest = f"{run.condition}/{run.arm}/seed_{run.seed}", run.summary.get("data_sha256")
            before, its = data.setdefault((run.condition, run.arm), (folder, digest))
            _agree(its == digest, before, folder, f"in the data of {name}")
            evaluated = [key for key in run.summary if key.startswith("eval/")]
            result = {key: run.summary.get(key) for key in (*MEASURED, *evaluated)}
            before, its = found.setdefault(name, (folder, result))
            _agree(its == result, before, folder, f"in the result of {name}, which both have")
    return {name: folder for name, (folder, _) in found.items()}

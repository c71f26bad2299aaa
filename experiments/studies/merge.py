"""Merge folders of one study, from several machines, into a new one."""

import copy
import fnmatch
import pathlib
import shutil
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from experiments.data import vocabulary_files
from experiments.engine import config, disk, errors, manifest, workdir
from experiments.studies import plan, results, runs, study, tuning

OWN = {"study.arms", "study.conditions", "study.seeds", "log"}  # settings that may differ, as may mesh.*
# The files of a run of a study, with its model's vocabulary and checkpoints if study.keep_weights is set.
FILES = ("config.json", "summary.json", "data.json", "metrics.jsonl", "maps.npz", "*token*.json", "tok*.bin")
FILES += vocabulary_files.FILES
MEASURED = ("params_sha256", "diverged_at", "steps")  # and all evaluations: they are equal if a run is the same


def merge(folders: Sequence[pathlib.Path], new: pathlib.Path) -> None:
    """Write into `new` the finished runs of all these folders, their sources and a config of all arms and seeds.

    Raises UserError, and writes nothing, if the folders differ in other settings, the reference or the code. So it does
    if an arm or condition of the same name differs, or an arm's data, or the results of a run.
    """
    if len(folders) < 2:
        raise errors.UserError("a merge needs at least two folders: --merge=A --merge=B")
    disk.check_new(new, "--workdir")
    every = {folder: results.load_settings(folder) for folder in folders}
    studies = {folder: study.read(settings) for folder, settings in every.items()}
    merged = _merge_settings(every, studies)
    places = _find_runs(studies)
    if not places:
        raise errors.UserError(f"no run is finished in {' or '.join(map(str, studies))}")
    trials = {folder / tuning.FOLDER: tuning.trials(part) for folder, part in studies.items()}
    places |= {f"{tuning.FOLDER}/{name}": place.parent for name, place in _find_runs(trials).items()}
    draft = new.with_name(new.name + disk.DRAFT)  # renamed at the end
    disk.remove(draft)
    try:
        workdir.open_run(draft, merged)
        plan.merge(folders, draft)
        for folder in folders:
            files = sorted((folder / workdir.SOURCES).glob("*"))
            workdir.keep_sources(draft, {file: file.name for file in files})
        for name, folder in places.items():
            _copy(folder / name, draft / name)
        draft.replace(new)
    finally:
        disk.remove(draft)


def _merge_settings(
    every: Mapping[pathlib.Path, config.Settings], studies: Mapping[pathlib.Path, study.Study]
) -> dict[str, Any]:
    """Return the settings of all folders together."""
    agreement = Agreement()
    for folder, settings in every.items():
        for key, value in config.flat(settings.to_dict()).items():
            if key not in OWN and not key.startswith("mesh."):
                agreement.check(key, value, folder)
        agreement.check("the reference", studies[folder].reference, folder)
        for kind, entries in (("arms", studies[folder].arms), ("conditions", studies[folder].conditions)):
            for entry in entries:
                agreement.check(f'"{entry.name}" of study.{kind}', entry, folder)
    first, *_ = every
    merged, reference = copy.deepcopy(every[first].to_dict()), studies[first].arms[-1]
    arms = {arm.name: list(arm) for entry in studies.values() for arm in entry.arms if arm.name != reference.name}
    conditions = {condition.name: list(condition) for entry in studies.values() for condition in entry.conditions}
    merged["study"] |= {"arms": [*arms.values(), list(reference)], "conditions": list(conditions.values())}
    merged["study"]["seeds"] = list(dict.fromkeys(seed for entry in studies.values() for seed in entry.seeds))
    return merged


class Agreement:
    """Facts that must be the same in all folders."""

    def __init__(self) -> None:
        self._first: dict[Hashable, tuple[pathlib.Path, Any]] = {}

    def check(self, fact: str, value: Any, folder: pathlib.Path, key: Hashable = None) -> None:
        """Raise UserError if the fact has another value in another folder.

        fact: its name in the message. key: what identifies it, if calls name the same fact differently; None: its name.
        """
        before, first_value = self._first.setdefault(key or fact, (folder, value))
        if first_value != value:
            raise errors.UserError(f"{before} and {folder} are not of one study, as they differ in {fact}")


def _find_runs(studies: Mapping[pathlib.Path, study.Study]) -> dict[str, pathlib.Path]:
    """Return for each finished run a folder that has it. Raises UserError if runs do not agree."""
    agreement, places = Agreement(), {}
    for folder, part in studies.items():
        for run in runs.load(folder, part):
            name = f"{run.condition}/{run.arm}/seed_{run.seed}"
            agreement.check("the code (the commit)", run.summary.get("commit") or "", folder)
            for file, code in [*run.summary.get("sources", {}).items()][1:]:  # the first is the config, with the arms
                agreement.check(f"the code: {file}", code, folder)
            agreement.check(f"the data of {name}", run.summary.get("data_sha256"), folder, key=(run.condition, run.arm))
            evaluated = [key for key in run.summary if key.startswith("eval/")]
            result = {key: run.summary.get(key) for key in (*MEASURED, *evaluated)}
            agreement.check(f"the result of {name}, which both have", result, folder)
            places.setdefault(name, folder)
    return places


def _copy(run: pathlib.Path, new: pathlib.Path) -> None:
    """Copy the files of a run, and print the number of the others."""
    new.mkdir(parents=True)
    entries = [entry for entry in run.iterdir() if entry.name not in (workdir.LOCK, "checkpoints")]
    files = [entry for entry in entries if any(fnmatch.fnmatchcase(entry.name, name) for name in FILES)]
    files = [entry for entry in files if entry.is_file() and not entry.is_symlink()]
    for step in manifest.steps(run / "checkpoints"):
        shutil.copytree(run / "checkpoints" / str(step), new / "checkpoints" / str(step))
    for file in files:
        shutil.copy2(file, new)
    if len(files) < len(entries):
        print(f"{len(entries) - len(files)} files of {run} that no run writes are not copied", flush=True)

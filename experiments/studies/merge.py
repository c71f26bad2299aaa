"""Merge folders of one study, from several machines, into a new one."""

import copy
import fnmatch
import pathlib
import shutil
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from experiments.engine import config as configs, disk, errors, manifest, workdir as workdirs
from experiments.studies import plan, results, runs as study_runs, study as studies, tuning

MAY_DIFFER = {"study.arms", "study.conditions", "study.seeds", "log"}  # settings; so may those of mesh
# Name patterns of the files of a run; the tokenizer's files exist if study.keep_weights is set.
FILES = ("config.json", "summary.json", "data.json", "metrics.jsonl", "maps.npz", "*token*.json")
MEASURED = ("params_sha256", "diverged_at", "steps")  # with eval/*: equal in two folders that have the same run


def merge(folders: Sequence[pathlib.Path], new: pathlib.Path) -> None:
    """Write into `new` the finished runs of all folders, their sources, and a config with all arms and seeds.

    Raises UserError, and writes nothing, if the folders disagree. They must agree in settings (except MAY_DIFFER), the
    reference and the code, in arms and conditions of the same name, and in the data and the results of common runs.
    """
    if len(folders) < 2:
        raise errors.UserError("a merge needs at least two folders. Repeat the flag: --merge=A --merge=B")
    disk.check_new(new, "--workdir")
    settings = {folder: results.load_settings(folder) for folder in folders}
    by_folder = {folder: studies.read(entry) for folder, entry in settings.items()}
    merged = _merge_settings(settings, by_folder)
    places = _find_runs(by_folder)
    if not places:
        raise errors.UserError(
            f"no run is finished in {' or '.join(map(str, by_folder))}. Merge folders with finished runs."
        )
    trials = {folder / tuning.FOLDER: tuning.trials(part) for folder, part in by_folder.items()}
    places |= {f"{tuning.FOLDER}/{name}": place.parent for name, place in _find_runs(trials).items()}
    draft = new.with_name(new.name + disk.DRAFT)  # renamed at the end
    disk.remove(draft)
    try:
        workdirs.open_run(draft, merged)
        plan.merge(folders, draft)
        for folder in folders:
            files = sorted((folder / workdirs.SOURCES).glob("*"))
            workdirs.keep_sources(draft, {file: file.name for file in files})
        for name, folder in places.items():
            _copy(folder / name, draft / name)
        draft.replace(new)
    finally:
        disk.remove(draft)


def _merge_settings(
    settings: Mapping[pathlib.Path, configs.Settings], by_folder: Mapping[pathlib.Path, studies.Study]
) -> dict[str, Any]:
    """Return the settings with all arms, conditions and seeds. Raises UserError if the folders disagree."""
    agreement = Agreement()
    for folder, folder_settings in settings.items():
        for key, value in configs.flat(folder_settings.to_dict()).items():
            if key not in MAY_DIFFER and not key.startswith("mesh."):
                agreement.check(key, value, folder)
        agreement.check("the reference", by_folder[folder].reference, folder)
        for kind, entries in (("arms", by_folder[folder].arms), ("conditions", by_folder[folder].conditions)):
            for entry in entries:
                agreement.check(f'"{entry.name}" of study.{kind}', entry, folder)
    first, *_ = settings
    merged, reference = copy.deepcopy(settings[first].to_dict()), by_folder[first].arms[-1]
    arms = {arm.name: list(arm) for entry in by_folder.values() for arm in entry.arms if arm.name != reference.name}
    conditions = {condition.name: list(condition) for entry in by_folder.values() for condition in entry.conditions}
    merged["study"] |= {"arms": [*arms.values(), list(reference)], "conditions": list(conditions.values())}
    merged["study"]["seeds"] = list(dict.fromkeys(seed for entry in by_folder.values() for seed in entry.seeds))
    return merged


class Agreement:
    """Checks that facts are the same in all folders: it stores the first value of each, and `check` compares others."""

    def __init__(self) -> None:
        self._first: dict[Hashable, tuple[pathlib.Path, Any]] = {}

    def check(self, fact: str, value: Any, folder: pathlib.Path, key: Hashable = None) -> None:
        """Raise UserError if the fact has another value in another folder.

        fact: the name in the message. key: identifies the fact if calls use different names for it; None: the name.
        """
        before, first_value = self._first.setdefault(key or fact, (folder, value))
        if first_value != value:
            raise errors.UserError(
                f"{before} and {folder} differ in {fact}. Merge only parts of one study, which agree in it."
            )


def _find_runs(by_folder: Mapping[pathlib.Path, studies.Study]) -> dict[str, pathlib.Path]:
    """Return finished run -> a folder that has it. Raises UserError if code, data or results differ."""
    agreement, places = Agreement(), {}
    for folder, part in by_folder.items():
        for run in study_runs.load(folder, part):
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
    """Copy the files that a run writes, and print the number of other files in its folder."""
    new.mkdir(parents=True)
    entries = [entry for entry in run.iterdir() if entry.name not in (workdirs.LOCK, "checkpoints")]
    files = [entry for entry in entries if any(fnmatch.fnmatchcase(entry.name, name) for name in FILES)]
    files = [entry for entry in files if entry.is_file() and not entry.is_symlink()]
    for step in manifest.steps(run / "checkpoints"):
        shutil.copytree(run / "checkpoints" / str(step), new / "checkpoints" / str(step))
    for file in files:
        shutil.copy2(file, new)
    if len(files) < len(entries):
        print(f"{len(entries) - len(files)} files of {run} were not written by a run and are not copied", flush=True)

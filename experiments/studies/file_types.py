"""The types of what summary.json and config.json of a run hold, checked once where they are read."""

import pathlib
from collections.abc import Mapping
from typing import Any

from experiments.engine import config, disk, errors

NUMBER, TEXT = (int, float), str
# Of every field that is there: what its value may be. A dict: of each of its values; a list of one: of each entry.
FIELDS: dict[str, Any] = {
    **dict.fromkeys("experiment condition arm device backend commit params_sha256".split(), TEXT),
    **dict.fromkeys("steps seed params together devices training_crc32 evaluation_crc32".split(), int),
    **dict.fromkeys("flops_per_step flops_per_token wall_seconds seconds_per_step compile_seconds".split(), NUMBER),
    **{"diverged_at": (int, type(None)), "data_sha256": (str, type(None)), "data": [TEXT], "guess": {"": TEXT}},
    **{"sources": {"": TEXT}, "versions": {"": TEXT}, "initial": {"": [NUMBER]}},
    "attention": {"": [(*NUMBER, type(None))]},
}
MEASURED = ("eval/", "baseline/")
STUDY: dict[str, Any] = dict.fromkeys("arms conditions seeds tune tune_seeds".split(), list)
STUDY |= {"experiment": TEXT, "metric": TEXT, "threshold": NUMBER, "margin": NUMBER, "looks": int}


def read_summary(file: pathlib.Path) -> dict[str, Any]:
    """Return what a run found. Raise UserError if the file or the type of a field in it is wrong."""
    summary = disk.read_json(file, says="what the run found")
    if "steps" not in summary:
        raise errors.UserError(f"{file} has no steps: it is not the summary of a run")
    for key, value in summary.items():
        _check(file, key, value, (*NUMBER, type(None)) if key.startswith(MEASURED) else FIELDS.get(key))
    return summary


def check_study(file: pathlib.Path, study: Mapping[str, Any]) -> None:
    """Raise UserError if a setting of the study that this file holds is missing or has a wrong type."""
    for key, right in STUDY.items():
        if key not in study:
            raise errors.UserError(f"{file} has no study.{key}: it is not the config of a study")
        _check(file, f"study.{key}", study[key], right)


def _check(file: pathlib.Path, key: str, value: Any, right: Any) -> None:
    if isinstance(right, list | dict):
        if not isinstance(value, type(right)):
            raise errors.UserError(f"{file}: {key} must be of type {type(right).__name__}, and {_text(value)} is not")
        for name, one in value.items() if isinstance(value, Mapping) else enumerate(value):
            _check(file, f"{key}.{name}", one, right[""] if isinstance(right, dict) else right[0])
    elif right and (not isinstance(value, right) or isinstance(value, bool)):
        names = " or ".join(one.__name__ for one in (right if isinstance(right, tuple) else (right,)))
        raise errors.UserError(f"{file}: {key} must be of type {names}, and {_text(value)} is not")
    elif isinstance(value, int) and abs(value) >= 2**63:
        raise errors.UserError(f"{file}: {key} = {_text(value)} is too large a number")


def _text(value: Any) -> str:
    return config.shown(value)[:60]

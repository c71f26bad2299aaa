"""The finished runs of a study, read back from its folder."""

import dataclasses
import math
import pathlib
from collections.abc import Iterable
from typing import Any

import numpy as np

from experiments.engine import disk, errors, log
from experiments.studies import initial
from experiments.studies import study as studies


@dataclasses.dataclass(frozen=True)
class Run:
    """One seed of one arm in one condition: its summary.json, the rows of its metrics.jsonl, its maps.npz or None."""

    condition: str
    arm: str
    seed: int
    summary: dict[str, Any]
    rows: list[dict[str, Any]]
    maps: pathlib.Path | None


def load(folder: pathlib.Path, study: studies.Study) -> list[Run]:
    """The runs that have a summary.json, in the order of the study. UserError where a file is there and no good."""
    places = (
        (condition.name, arm.name, seed, folder / condition.name / arm.name / f"seed_{seed}")
        for condition in study.conditions
        for arm in study.arms
        for seed in study.seeds
    )
    return [_load(*place) for place in places if (place[-1] / "summary.json").is_file()]


def _load(condition: str, arm: str, seed: int, folder: pathlib.Path) -> Run:
    summary = disk.read_json(folder / "summary.json", says="what the run found")
    maps = folder / "maps.npz"
    return Run(condition, arm, seed, summary, log.read(folder), maps if maps.is_file() else None)


def value(run: Run, metric: str) -> float | None:
    """What the run measured at its end; None where it diverged, or the number is not finite."""
    if run.summary.get("diverged_at") is not None:
        return None
    found = run.summary.get(metric)
    return float(found) if isinstance(found, int | float) and math.isfinite(found) else None


def check_measured(run: Run, metric: str) -> None:
    """UserError where the run came to its end and has no such metric at all."""
    if run.summary.get("diverged_at") is None and metric not in run.summary:
        there = ", ".join(name for name in run.summary if name.startswith("eval/")) or "no metric"
        raise errors.UserError(f'the runs of "{run.arm}" have not measured "{metric}", but {there}')


def differing(runs: Iterable[Run], reference: Iterable[Run], digest: str) -> list[int]:
    """The seeds whose digest in summary.json is not that of the reference's run of the same seed, where both tell."""
    told = {run.seed: run.summary[digest] for run in reference if run.summary.get(digest) is not None}
    mine = ((run.seed, run.summary.get(digest)) for run in runs)
    return [seed for seed, found in mine if found is not None and told.get(seed, found) != found]


def otherwise_begun(runs: Iterable[Run], reference: Iterable[Run]) -> list[str]:
    """The weights that do not begin with the values of the reference's run of the same seed, as far as runs tell."""
    told = {run.seed: run.summary.get("initial") or {} for run in reference}
    found = (initial.apart(run.summary.get("initial") or {}, told.get(run.seed, {})) for run in runs)
    return list(dict.fromkeys(name for names in found for name in names))


def curve(run: Run, name: str) -> dict[int, float]:
    """Step -> what was logged under this name, where it is finite."""
    logged = ((row["step"], row.get(name)) for row in run.rows)
    return {step: float(x) for step, x in logged if x is not None and math.isfinite(x)}


def stack(curves: Iterable[dict[int, float]]) -> tuple[np.ndarray, np.ndarray]:
    """The I steps that all curves have, ascending, and their values, one row for each of the R curves."""
    curves = list(curves)
    step_I = sorted(set.intersection(*(set(one) for one in curves))) if curves else []
    value_RI = np.array([[one[step] for step in step_I] for one in curves], np.float64)
    return np.array(step_I, int), value_RI.reshape(len(curves), len(step_I))


def layers(run: Run, name: str) -> int:
    """How many layers have a curve of this name: symmetry/1, symmetry/2, ... are two of 'symmetry'."""
    found = {key.rpartition("/")[2] for row in run.rows for key in row if key.rpartition("/")[0] == name}
    return max((int(layer) for layer in found if layer.isdecimal()), default=0)

"""The finished runs of a study, read back from its folder."""

import dataclasses
import math
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from experiments.engine import disk, errors, log
from experiments.studies import initial
from experiments.studies import study as studies

SYMMETRY = {  # name in metrics.jsonl, of each layer -> words
    "symmetry": "symmetry s of a head (mean)",
    "symmetry_sum": "symmetry s, heads summed",
    "directionality": "directionality d, heads summed",
}
ATTENTION = {  # name in summary.json -> words
    "entropy": "entropy (nats)",
    "diagonal": "mass on the diagonal",
    "asymmetry": "asymmetry |A - Aᵀ|/|A|",
}


@dataclasses.dataclass(frozen=True)
class Run:
    """One seed of one arm in one condition: its summary.json, the rows of its metrics.jsonl, its maps.npz or None."""

    condition: str
    arm: str
    seed: int
    summary: dict[str, Any]
    rows: list[dict[str, Any]]
    maps: pathlib.Path | None

    def value(self, metric: str) -> float | None:
        """What was measured at the end; None where the run diverged, or the number is not finite.

        UserError where it came to its end and has no such metric at all.
        """
        if self.summary.get("diverged_at") is not None:
            return None
        if metric not in self.summary:
            names = ", ".join(name for name in self.summary if name.startswith("eval/")) or "no metric"
            raise errors.UserError(f'the runs of "{self.arm}" have not measured "{metric}", but {names}')
        x = self.summary[metric]
        return float(x) if isinstance(x, int | float) and math.isfinite(x) else None

    def curve(self, name: str) -> dict[int, float]:
        """Step -> what was logged under this name, where it is finite."""
        points = ((row["step"], row.get(name)) for row in self.rows)
        return {step: float(x) for step, x in points if x is not None and math.isfinite(x)}

    def depth(self, name: str) -> int:
        """How many layers have a curve of this name: symmetry/1, symmetry/2, ... are two of 'symmetry'."""
        layers = {key.removeprefix(f"{name}/") for row in self.rows for key in row if key.startswith(f"{name}/")}
        return max((int(layer) for layer in layers if layer.isdecimal()), default=0)

    def layers(self, name: str) -> list[float | None]:
        """A measure of SYMMETRY or of ATTENTION at the end of training, in each layer; nothing where there is none."""
        if name in ATTENTION:
            return self.summary.get("attention", {}).get(name, [])
        curves = [self.curve(f"{name}/{layer}") for layer in range(1, self.depth(name) + 1)]
        return [curve[max(curve)] if curve else None for curve in curves]


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


def by_arm(runs: Iterable[Run], arms: Iterable[str]) -> dict[str, list[Run]]:
    """Arm -> its runs, of the arms that have any."""
    runs = list(runs)
    groups = {arm: [run for run in runs if run.arm == arm] for arm in arms}
    return {arm: group for arm, group in groups.items() if group}


def differing(runs: Iterable[Run], reference: Iterable[Run], digest: str) -> list[int]:
    """The seeds whose digest in summary.json is not that of the reference's run of the same seed."""
    digests = {run.seed: run.summary.get(digest) for run in reference}
    pairs = [(run, run.summary.get(digest)) for run in runs]
    return [run.seed for run, mine in pairs if digests.get(run.seed, mine) != mine]


def differing_weights(runs: Iterable[Run], reference: Iterable[Run]) -> list[str]:
    """The weights that do not begin with the values of the reference's run of the same seed, nor a multiple of them."""
    sketches = {run.seed: run.summary.get("initial", {}) for run in reference}
    names = (initial.apart(run.summary.get("initial", {}), sketches.get(run.seed, {})) for run in runs)
    return list(dict.fromkeys(name for each in names for name in each))


def stack(curves: Sequence[dict[int, float]]) -> tuple[np.ndarray, np.ndarray]:
    """The I steps that all curves have, ascending, and their values, one row for each of the R curves."""
    step_I = sorted(set.intersection(*map(set, curves))) if curves else []
    value_RI = np.array([[curve[step] for step in step_I] for curve in curves], np.float64)
    return np.array(step_I, int), value_RI.reshape(len(curves), len(step_I))

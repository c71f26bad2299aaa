"""Load the finished runs of a study, and compute digests that show whether runs are comparable."""

import itertools
import math
import pathlib
import zlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments.config import errors
from experiments.folder import checkpoint, records
from experiments.studies import study as studies
from tfm import shapes

SYMMETRY = {  # name in metrics.jsonl, followed by /layer -> in words
    "symmetry": "symmetry",
    "symmetry_sum": "symmetry of the sum",
    "directionality": "directionality",
}
COSTS = {  # name in summary.json -> unit, label of an axis
    "flops_per_step": ("FLOPs", "FLOPs of training"),
    "seconds_per_step": ("seconds", "seconds of training (programs ran one after the other)"),
}
SUMS = 4  # sums of each weight: those of independent weights are proportional by chance once in 10^10
NEAR = 1e-4  # angle between two sketches that counts as 0. Rounding (float32, six digits) is a hundred times smaller

Sketch = dict[str, list[float]]  # 'blocks/score/U_HKD 2x4x8x32' (a weight and its shape) -> SUMS sums


def choose_best(metric: str, runs: Collection["Run"]) -> checkpoint.Best:
    """Return the metric and which values are better ("less" or "more"), as the runs' summaries say.

    Without runs, the direction does not matter. Raises UserError if neither a summary nor the metric's name says it.
    """
    if not runs:
        return checkpoint.Best(metric, "less")
    better = {name: direction for run in runs for name, direction in run.summary.get("better", {}).items()}
    return checkpoint.choose_best(metric, better, key="study.metric")


class Run(NamedTuple):
    """One seed of one arm in one condition: its summary.json and the rows of its metrics.jsonl."""

    condition: str
    arm: str
    seed: int
    steps: int
    summary: dict[str, Any]
    rows: list[dict[str, Any]]
    folder: pathlib.Path = pathlib.Path()  # of its study

    def value(self, metric: str) -> float | None:
        """Return the final value of the metric; None if the run diverged or the value is not finite.

        Raises UserError if the run did not measure the metric.
        """
        if self.summary.get("diverged_at") is not None:
            return None
        if metric not in self.summary:
            names = ", ".join(name for name in self.summary if name.startswith("eval/")) or "no metric"
            raise errors.UserError(f'the runs of "{self.arm}" did not measure "{metric}". They measured: {names}')
        x = self.summary[metric]
        return float(x) if x is not None and math.isfinite(x) else None

    @property
    def flops(self) -> float:
        """FLOPs of the whole training; 0 if unknown."""
        return float(self.steps * (self.summary.get("flops_per_step") or 0))

    def curve(self, name: str) -> dict[int, float]:
        """Return step -> value of a logged metric, without values that are not finite."""
        points = ((row["step"], row.get(name)) for row in self.rows)
        return {step: float(x) for step, x in points if x is not None and math.isfinite(x)}

    @property
    def curves(self) -> dict[str, dict[int, float]]:
        """Name -> {step: finite value}, for the training loss and each evaluated metric."""
        names = dict.fromkeys(key for row in self.rows for key in row if key == "train/loss" or key.startswith("eval/"))
        return {name: self.curve(name) for name in names}

    def layers(self, name: str) -> list[float | None]:
        """Return a measure's last finite value in each layer, None if there is none; [] if it was not logged.

        name: one of the keys of SYMMETRY: symmetry, symmetry_sum or directionality.
        """
        keys, logged = (f"{name}/{m}" for m in itertools.count(1)), {key for row in self.rows for key in row}
        curves = map(self.curve, itertools.takewhile(logged.__contains__, keys))
        return [curve[max(curve)] if curve else None for curve in curves]


def load(folder: pathlib.Path, study: studies.Study) -> list[Run]:
    """Load the finished runs in the order of the study, each from the first of [folder, *study.also] that has it."""
    runs = []
    for condition, arm, seed in itertools.product(study.conditions, study.arms, study.seeds):
        name = f"{condition.name}/{arm.name}/seed_{seed}"
        for part in (folder, *study.also):
            if summary := records.read_summary(part / name):
                rows = records.read_metrics(part / name)
                runs.append(Run(condition.name, arm.name, seed, summary["steps"], summary, rows, part))
                break
    return runs


def stack(curves: Sequence[dict[int, float]]) -> tuple[np.ndarray, np.ndarray]:
    """Return the steps that all R curves have, ascending (I), and the values at them (R, I)."""
    step_I = sorted(set.intersection(*map(set, curves))) if curves else []
    value_RI = np.array([[curve[step] for step in step_I] for curve in curves], np.float64)
    return np.array(step_I, int), value_RI.reshape(len(curves), len(step_I))


def sketches(params: Any) -> list[Sketch]:
    """Return for each of R runs {weight and its shape: SUMS sums of its elements}. params: leaves with R rows.

    In a sum, each element has a fixed factor. A weight whose sums are not finite is left out. The sums of c x are c
    times those of x, so two sketches show whether arms start from the same weights up to a scale.
    """
    run_sketches: list[Sketch] = []
    for path, leaf_R in jax.tree_util.tree_leaves_with_path(params):
        rows = jax.device_get(leaf_R)
        run_sketches = run_sketches or [{} for _ in rows]
        name = f"{'/'.join(shapes.names(path))} {'x'.join(map(str, rows.shape[1:]))}"
        factor_I = np.sin(1.0 + np.arange(rows[0].size))  # distinguishes permutations of a weight
        for sketch, row in zip(run_sketches, rows, strict=True):
            x_I = factor_I * np.asarray(row, np.float64).reshape(-1)
            sums = [x_I[i::SUMS].sum() for i in range(SUMS)]
            if np.isfinite(sums).all():
                sketch[name] = [float(f"{x:.6g}") for x in sums]
    return run_sketches


def unpaired_weights(sketch: Mapping[str, Any], reference: Mapping[str, Any]) -> list[str]:
    """Return the names of initial weights of equal shape that are not multiples of each other in two runs.

    sketch, reference: an element of the result of `sketches` for each run.
    """
    names = []
    for name in filter(reference.__contains__, sketch):
        a, b = np.array(sketch[name], float), np.array(reference[name], float)
        scale = np.linalg.norm(a) * np.linalg.norm(b)
        if scale and not abs(abs(a @ b) / scale - 1) <= NEAR**2 / 2:  # 1 - cos(NEAR)
            names.append(name.rpartition(" ")[0])
    return names


def crc32(batch: dict[str, np.ndarray]) -> int:
    """Return the CRC-32 of a batch: of its names and arrays."""
    digest = 0
    for name, array in sorted(batch.items()):
        digest = zlib.crc32(np.ascontiguousarray(array).tobytes(), zlib.crc32(name.encode(), digest))
    return digest

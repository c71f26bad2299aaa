"""With which values a run began, in a few numbers: whether arms of a seed begin with the same where they have the same
weight, up to a scale, as their comparison by pairs takes for granted."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from tfm import shapes

SUMS = 4  # of each weight: two that were drawn apart agree by chance once in 10^10
NEAR = 1e-4  # what programs round otherwise, and summary.json leaves out, is a hundred times less

Sketch = dict[str, list[float]]  # 'blocks/score/U_HKD 2x4x8x32' -> sums, which have its scale


def sketches(params: Any) -> list[Sketch]:
    """Of each of R runs, whose parameters are rows of these. A sketch is linear: of c x it is c times that of x."""
    found: list[Sketch] = []
    for path, leaf_R in jax.tree_util.tree_leaves_with_path(params):
        rows = jax.device_get(leaf_R)
        found = found or [{} for _ in rows]
        name = f"{'/'.join(shapes.names(path))} {'x'.join(map(str, rows.shape[1:]))}"
        factor_I = np.sin(1.0 + np.arange(rows[0].size))  # else what is moved inside a weight would leave its sums
        for sketch, row in zip(found, rows, strict=True):
            x_I = factor_I * np.asarray(row, np.float64).reshape(-1)
            sums = [x_I[i::SUMS].sum() for i in range(SUMS)]
            if np.isfinite(sums).all():
                sketch[name] = [float(f"{x:.6g}") for x in sums]
    return found


def apart(mine: Mapping[str, Any], its: Mapping[str, Any]) -> list[str]:
    """The weights of the same name and shape that begin otherwise: neither is a multiple of the other."""
    common = [name for name in mine if name in its]
    return [name.rpartition(" ")[0] for name in common if not _multiples(mine[name], its[name])]


def _multiples(mine: list[float], its: list[float]) -> bool:
    """Whether one is a multiple of the other, be it by 0."""
    a, b = np.array(mine, float), np.array(its, float)
    scale = np.linalg.norm(a) * np.linalg.norm(b)
    return scale == 0 or abs(abs(a @ b) / scale - 1) <= NEAR**2 / 2  # the cosine of such an angle

"""The attention of a trained model: entropy, diagonal and asymmetry, and the weights of one example (maps.npz).

The report draws these weights: a row for each arm, a column for each of at most 8 heads.
"""

import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from matplotlib import cm, colors, figure

from experiments.engine import disk, log, train_step
from experiments.figures import plots
from tfm import symmetry

EXAMPLES = 32  # held-out examples over which the measures are means
TOKENS = 32  # of the example that is shown
MOST_COLUMNS, MOST_LAYERS = 8, 4
SIZE = 1.25  # inches of a panel


def observer(task: train_step.Task) -> Callable[[Any], tuple[dict[str, list[float | None]], np.ndarray]]:
    """Return params -> (entropy, diagonal, asymmetry: lists over layers; A_MHNN of the first held-out example)."""
    examples = {name: array[:EXAMPLES] for name, array in task.evaluation[0].items()}

    @jax.jit
    def measures(params: Any) -> tuple[dict, jax.Array]:
        def one(example: dict) -> tuple[dict, jax.Array]:  # alone: the weights of many might not fit into memory
            batch = {name: array[None] for name, array in example.items()}
            A_MBHNN = task.maps(params, batch)
            return symmetry.weights(A_MBHNN, batch.get("valid_BS")), A_MBHNN[:, 0, :, :TOKENS, :TOKENS]

        values, A_BMHNN = jax.lax.map(one, examples)
        return {name: symmetry.mean(x_BM, axis=0) for name, x_BM in values.items()}, A_BMHNN[0]

    def observe(params: Any) -> tuple[dict, np.ndarray]:
        columns, A_MHNN = jax.device_get(measures(params))
        return {name: [log.finite(x) for x in column] for name, column in columns.items()}, A_MHNN

    return observe


def read(path: pathlib.Path) -> np.ndarray:
    """Read A_MHNS of a maps.npz: attention of one example in each layer and head."""
    return disk.read_npz(path, [("A_MHNS",)])["A_MHNS"].astype(np.float64)


def columns(M: int, H: int) -> list[tuple[int, int]]:
    """Return the (layer, head) pairs that are shown of M layers of H heads: at most 8, layers evenly spread."""
    layers = plots.spread(M, MOST_LAYERS)
    return [(m, h) for m in layers for h in range(min(H, MOST_COLUMNS // len(layers)))]


def draw(examples: Mapping[str, np.ndarray], labels: Mapping[str, str]) -> figure.Figure:
    """Draw A_MHNS of each arm in a row, query (row) by key (column), with the same shades in all panels."""
    panels_of = {arm: columns(*A_MHNS.shape[:2]) for arm, A_MHNS in examples.items()}
    width, height = max(map(len, panels_of.values())), len(examples)
    drawing = figure.Figure(figsize=(SIZE * width + 2.2, (SIZE + 0.3) * height + 0.3), layout="compressed")
    panels = drawing.subplots(height, width, squeeze=False)
    largest = max(float(np.nan_to_num(A_MHNS).max()) for A_MHNS in examples.values())
    scale = colors.PowerNorm(0.5, 0, max(largest, 1e-12))  # so that a weight of 1/32 is seen next to one of 1
    for row, (arm, A_MHNS) in zip(panels, examples.items(), strict=True):
        for panel in row[len(panels_of[arm]) :]:
            panel.axis("off")
        for panel, (m, h) in zip(row, panels_of[arm], strict=False):
            panel.imshow(A_MHNS[m, h], cmap="Blues", norm=scale)
            panel.set_title(f"layer {m + 1}, head {h + 1}", fontsize=7)
            panel.set(xticks=[], yticks=[])
        row[0].set_ylabel(labels[arm].replace(" (", "\n("), rotation=0, ha="right", va="center", fontsize=9)
    drawing.colorbar(cm.ScalarMappable(scale, "Blues"), ax=panels[:, -1].tolist(), label="weight")
    return drawing

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

EXAMPLES = 32  # held-out examples; the measures are means over them
TOKENS = 32  # the first queries and keys of the first example, whose weights are stored
MOST_COLUMNS, MOST_LAYERS = 8, 4  # panels in a row of the figure, and layers among them
SIZE = 1.25  # inches, width and height of a panel


def observer(task: train_step.Task) -> Callable[[Any], tuple[dict[str, list[float | None]], np.ndarray]]:
    """Return a function params -> (measures, A_MHNN), with the weights of the first held-out example.

    measures: entropy, diagonal and asymmetry, each a list over layers, means over EXAMPLES examples.
    """
    examples = {name: array[:EXAMPLES] for name, array in task.evaluation[0].items()}

    @jax.jit
    def measures(params: Any) -> tuple[dict, jax.Array]:
        def measure_example(example: dict) -> tuple[dict, jax.Array]:  # the weights of many may not fit into memory
            batch = {name: array[None] for name, array in example.items()}
            A_MBHNN = task.maps(params, batch)
            return symmetry.weights(A_MBHNN, batch.get("valid_BS")), A_MBHNN[:, 0, :, :TOKENS, :TOKENS]

        values, A_BMHNN = jax.lax.map(measure_example, examples)
        return {name: symmetry.mean(x_BM, axis=0) for name, x_BM in values.items()}, A_BMHNN[0]

    def observe(params: Any) -> tuple[dict, np.ndarray]:
        columns, A_MHNN = jax.device_get(measures(params))
        return {name: [log.finite(x) for x in column] for name, column in columns.items()}, A_MHNN

    return observe


def read(path: pathlib.Path) -> np.ndarray:
    """Read A_MHNS from a maps.npz: the attention weights of one example."""
    return disk.read_npz(path, [("A_MHNS",)])["A_MHNS"].astype(np.float64)


def columns(M: int, H: int) -> list[tuple[int, int]]:
    """Return the (layer, head) pairs to draw, of M layers with H heads: at most 8, in at most 4 spread layers."""
    layers = plots.spread(M, MOST_LAYERS)
    return [(m, h) for m in layers for h in range(min(H, MOST_COLUMNS // len(layers)))]


def draw(examples: Mapping[str, np.ndarray], labels: Mapping[str, str]) -> figure.Figure:
    """Draw a row of attention maps for each arm: query (row) by key (column), with one colour scale.

    examples: arm -> A_MHNS. labels: arm -> label.
    """
    panels_of = {arm: columns(*A_MHNS.shape[:2]) for arm, A_MHNS in examples.items()}
    width, height = max(map(len, panels_of.values())), len(examples)
    drawing = figure.Figure(figsize=(SIZE * width + 2.2, (SIZE + 0.3) * height + 0.3), layout="compressed")
    panels = drawing.subplots(height, width, squeeze=False)
    largest = max(float(np.nan_to_num(A_MHNS).max()) for A_MHNS in examples.values())
    scale = colors.PowerNorm(
        0.5, 0, max(largest, 1e-12)
    )  # square root: a weight of 1/32 stays visible next to a weight of 1
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

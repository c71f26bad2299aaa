"""What a trained model's attention looks like: entropy, diagonal and asymmetry of its weights; and an example, kept in
maps.npz and drawn in the report with a row for each arm, a column for each of some layers and heads."""

import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from matplotlib import cm, colors, figure

from experiments.engine import disk, errors, log, train_step
from experiments.figures import plots
from tfm import symmetry

EXAMPLES = 32  # held-out examples over which the measures are means
TOKENS = 32  # of the example that is shown
MOST_COLUMNS, MOST_LAYERS = 8, 4
SIZE = 1.25  # inches of a panel


def observer(task: train_step.Task) -> Callable[[Any], tuple[dict[str, list[float | None]], np.ndarray]]:
    """params -> (entropy, diagonal, asymmetry: a list over layers each, A_MHNN of the first held-out example)."""
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
    """A_MHNS of a maps.npz: attention of one example in each layer and head. UserError where it is no such file."""
    A_MHNS = disk.read_npz(path, [("A_MHNS",)])["A_MHNS"]
    if A_MHNS.ndim != 4 or not np.issubdtype(A_MHNS.dtype, np.number):
        raise errors.UserError(f"{path} must hold numbers A_MHNS with 4 axes, and it has {A_MHNS.ndim}: {A_MHNS.dtype}")
    return A_MHNS.astype(np.float64)


def columns(M: int, H: int) -> list[tuple[int, int]]:
    """The (layer, head) pairs that are shown of M layers of H heads: 8 at most, layers evenly spread."""
    layers = plots.spread(M, MOST_LAYERS)
    return [(m, h) for m in layers for h in range(min(H, MOST_COLUMNS // len(layers)))]


def side_by_side(examples: Mapping[str, np.ndarray], labels: Mapping[str, str]) -> figure.Figure:
    """A_MHNS of each arm, query (row) by key (column), the same shade for the same weight in all panels."""
    shown = {arm: columns(*A_MHNS.shape[:2]) for arm, A_MHNS in examples.items()}
    grid = max(shown.values(), key=len)
    aligned = all(set(each) <= set(grid) for each in shown.values())
    tall = (SIZE + 0.05) * len(examples) + 0.5
    drawing = figure.Figure(figsize=(SIZE * len(grid) + 2.2, tall), layout="compressed")
    panels = drawing.subplots(len(examples), len(grid), squeeze=False)
    for panel in panels.flat:
        panel.set(xticks=[], yticks=[])
        panel.axis("off")
    top = max(float(np.nan_to_num(A_MHNS).max()) for A_MHNS in examples.values())
    scale = colors.PowerNorm(0.5, 0, max(top, 1e-12))  # so that a weight of 1/32 beside one of 1 is still seen
    most, titles = max(A_MHNS.shape[1] for A_MHNS in examples.values()), {}  # the last title in each column
    for row, (arm, A_MHNS) in zip(panels, examples.items(), strict=True):
        for i, (m, h) in enumerate(shown[arm]):
            column = grid.index((m, h)) if aligned else i
            row[column].axis("on")
            row[column].imshow(A_MHNS[m, h], cmap="Blues", norm=scale)
            title = f"layer {m + 1}, {f'head {h + 1}' if A_MHNS.shape[1] == most else 'all heads'}"
            if titles.get(column) != title:
                row[column].set_title(title, fontsize=8)
            titles[column] = title
        look = {"rotation": 0, "ha": "right", "va": "center", "fontsize": 9}
        row[0].set_ylabel(labels[arm].replace(" (", "\n("), **look, **plots.LITERAL)
    shades = cm.ScalarMappable(scale, "Blues")
    drawing.colorbar(shades, ax=panels[:, -1].tolist(), label="weight", shrink=min(1.0, 3 / tall), aspect=20)
    return drawing

"""What a trained model's attention looks like: entropy, diagonal and asymmetry of its weights; and an example, kept in
maps.npz and drawn in the report with a row for each arm, a column for each of some layers and heads."""

import io
import pathlib
import zipfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from matplotlib import cm, colors, figure

from experiments.engine import disk, errors, log, step
from experiments.figures import plots
from experiments.studies import styles
from tfm import symmetry

EXAMPLES = 32  # held-out examples over which the measures are means
TOKENS = 32  # of the example that is shown
MOST_COLUMNS, MOST_LAYERS = 8, 4
SPACE, WIDEST = 0.09, 12.0  # inches: of a token at the side of a panel, of all panels
LONGEST = 8  # letters of a token


def observer(task: step.Task) -> Callable[[Any], tuple[dict[str, list[float | None]], np.ndarray]]:
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


def save(file: pathlib.Path, A_MHNN: np.ndarray) -> None:
    """The weights as an .npz, whole or not at all."""
    content = io.BytesIO()
    np.savez_compressed(content, A_MHNS=A_MHNN)
    disk.write(file, content.getvalue())


class Maps(NamedTuple):
    """Attention of one example in each layer and head, and its tokens, of which there may be none."""

    A_MHNS: np.ndarray
    tokens: list[str]


def read(path: pathlib.Path) -> Maps:
    """A maps.npz. UserError where it is no such file."""
    try:
        # Opened here, since numpy leaves a file that is no whole archive open.
        with disk.opened(path) as file, np.load(file, allow_pickle=False) as arrays:
            maps = Maps(np.asarray(arrays["A_MHNS"], np.float64), list(map(str, arrays.get("tokens", []))))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, EOFError, zipfile.BadZipFile) as error:
        raise errors.UserError(f"{path} does not hold attention maps: {error}") from error
    if maps.A_MHNS.ndim != 4:
        raise errors.UserError(f"{path} must hold A_MHNS with 4 axes, and it has {maps.A_MHNS.ndim}")
    return maps


def columns(M: int, H: int) -> list[tuple[int, int]]:
    """The (layer, head) pairs that are shown of M layers of H heads: 8 at most, layers evenly spread."""
    layers = plots.spread(M, MOST_LAYERS)
    return [(m, h) for m in layers for h in range(min(H, MOST_COLUMNS // len(layers)))]


def side_by_side(examples: Mapping[str, Maps], labels: Mapping[str, str]) -> figure.Figure:
    """Query (row) by key (column), the same shade for the same weight in all panels. labels: of the arms."""
    shown = {arm: columns(*maps.A_MHNS.shape[:2]) for arm, maps in examples.items()}
    grid = max(shown.values(), key=len)
    aligned = all(set(each) <= set(grid) for each in shown.values())
    # Larger where tokens are to be read at the sides, as long as the figure is not too wide.
    size = max(1.25, min(SPACE * max(len(maps.tokens) for maps in examples.values()), WIDEST / len(grid)))
    tall = (size + 0.05) * len(examples) + 0.5
    drawing = figure.Figure(figsize=(size * len(grid) + 2.2, tall), layout="compressed")
    panels = drawing.subplots(len(examples), len(grid), squeeze=False)
    for panel in panels.flat:
        panel.set(xticks=[], yticks=[])
        panel.axis("off")
    top = max(float(np.nan_to_num(maps.A_MHNS).max()) for maps in examples.values())
    scale = colors.PowerNorm(0.5, 0, max(top, 1e-12))  # so that a weight of 1/32 beside one of 1 is still seen
    most, titles = max(maps.A_MHNS.shape[1] for maps in examples.values()), {}  # the last title in each column
    for row, (arm, maps) in zip(panels, examples.items(), strict=True):
        for i, (m, h) in enumerate(shown[arm]):
            column = grid.index((m, h)) if aligned else i
            row[column].axis("on")
            row[column].imshow(maps.A_MHNS[m, h], cmap="Blues", norm=scale)
            title = f"layer {m + 1}, {f'head {h + 1}' if maps.A_MHNS.shape[1] == most else 'all heads'}"
            if titles.get(column) != title:
                row[column].set_title(title, fontsize=8)
            titles[column] = title
            _tokens(row[column], maps.tokens, size, first=column == 0)
        look = {"rotation": 0, "ha": "right", "va": "center", "fontsize": 9}
        row[0].set_ylabel(labels[arm].replace(" (", "\n("), **look, **plots.LITERAL)
    shades = cm.ScalarMappable(scale, "Blues")
    drawing.colorbar(shades, ax=panels[:, -1].tolist(), label="weight", shrink=min(1.0, 3 / tall), aspect=20)
    return drawing


def _tokens(panel: Any, tokens: Sequence[str], size: float, *, first: bool) -> None:
    """The tokens below the panel and, in the first column, to its left; none where they could not be read."""
    if tokens and size >= 0.9 * SPACE * len(tokens):
        names = [styles.label(token)[:LONGEST] for token in tokens]
        look = {"fontsize": 60 * size / len(tokens), **plots.LITERAL}
        panel.set_xticks(range(len(names)), names, rotation=90 * (max(map(len, names)) > 1), **look)
        panel.set_yticks(range(len(names)) if first else [], names if first else [], **look)
        panel.tick_params(length=0, pad=1)

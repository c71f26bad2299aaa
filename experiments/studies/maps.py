"""Attention of one held-out example in every arm: a row for each arm, a column for each of some layers and heads."""

import pathlib
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib import cm, colors, figure

from experiments.engine import disk, errors, figures
from experiments.studies import runs as loaded
from experiments.studies import styles

MOST_COLUMNS, MOST_LAYERS = 8, 4
SPACE, WIDEST = 0.09, 12.0  # inches: of a token at the side of a panel, of all panels
LONGEST = 8  # letters of a token


class Maps(NamedTuple):
    """Attention of one example in each layer and head, and its tokens, of which there may be none."""

    A_MHNS: np.ndarray
    tokens: list[str]
    seed: int


def read(run: loaded.Run) -> Maps:
    """The run's maps.npz. UserError where it is no such file."""
    try:
        # Opened here, since numpy leaves a file that is no whole archive open.
        with disk.opened(run.maps) as file, np.load(file, allow_pickle=False) as saved:
            A_MHNS = np.asarray(saved["A_MHNS"], np.float64)
            tokens = [str(token) for token in saved["tokens"]] if "tokens" in saved else []
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise errors.UserError(f"{run.maps} does not hold attention maps: {error}") from error
    if A_MHNS.ndim != 4:
        raise errors.UserError(f"{run.maps} must hold A_MHNS with 4 axes, and it has {A_MHNS.ndim}")
    return Maps(A_MHNS, tokens, run.seed)


def first(runs: Sequence[loaded.Run]) -> dict[str, Maps]:
    """Arm -> the maps of its first run that has some."""
    found: dict[str, Maps] = {}
    for run in runs:
        if run.maps and run.arm not in found:
            found[run.arm] = read(run)
    return found


def columns(M: int, H: int) -> list[tuple[int, int]]:
    """The (layer, head) pairs that are shown of M layers of H heads: 8 at most, layers evenly spread."""
    layers = styles.spread(M, MOST_LAYERS)
    heads = range(min(H, MOST_COLUMNS // len(layers)))
    return [(m, h) for m in layers for h in heads]


def side_by_side(path: pathlib.Path, *, found: Mapping[str, Maps], style: Mapping[str, styles.Style]) -> None:
    """Query (row) by key (column), the same shade for the same weight in all panels."""
    picked = {arm: columns(*maps.A_MHNS.shape[:2]) for arm, maps in found.items()}
    grid = max(picked.values(), key=len)
    aligned = all(set(each) <= set(grid) for each in picked.values())
    size = _size(len(grid), max(len(maps.tokens) for maps in found.values()))
    drawing, panels = _panels(len(found), len(grid), size)
    top = max(float(np.nan_to_num(maps.A_MHNS).max()) for maps in found.values())
    scale = colors.PowerNorm(0.5, 0, max(top, 1e-12))  # so that a weight of 1/32 beside one of 1 is still seen
    most, titles = max(maps.A_MHNS.shape[1] for maps in found.values()), {}  # the last title in each column
    for row, (arm, maps) in zip(panels, found.items(), strict=True):
        for i, (m, h) in enumerate(picked[arm]):
            column = grid.index((m, h)) if aligned else i
            row[column].axis("on")
            row[column].imshow(maps.A_MHNS[m, h], cmap="Blues", norm=scale)
            title = f"layer {m + 1}, {f'head {h + 1}' if maps.A_MHNS.shape[1] == most else 'all heads'}"
            if titles.get(column) != title:
                row[column].set_title(title, fontsize=8)
            titles[column] = title
            _tokens(row[column], maps.tokens, size, first=column == 0)
        words = {"rotation": 0, "ha": "right", "va": "center", "fontsize": 9}
        row[0].set_ylabel(style[arm].label.replace(" (", "\n("), **words, **figures.LITERAL)
    shades, tall = cm.ScalarMappable(scale, "Blues"), drawing.get_size_inches()[1]
    drawing.colorbar(shades, ax=panels[:, -1].tolist(), label="weight", shrink=min(1.0, 3 / tall), aspect=20)
    figures.write(drawing, path)


def _panels(rows: int, columns: int, size: float) -> tuple[figure.Figure, np.ndarray]:
    """Panels of this size in inches, with nothing in them yet."""
    drawing = figure.Figure(figsize=(size * columns + 2.2, (size + 0.05) * rows + 0.5), layout="compressed")
    panels = drawing.subplots(rows, columns, squeeze=False)
    for panel in panels.flat:
        panel.set(xticks=[], yticks=[])
        panel.axis("off")
    return drawing, panels


def _size(columns: int, tokens: int) -> float:
    """Inches of a panel: larger where tokens are to be read at its sides, as long as the figure is not too wide."""
    return max(1.25, min(SPACE * tokens, WIDEST / columns))


def _tokens(panel: Any, tokens: Sequence[str], size: float, *, first: bool) -> None:
    """The tokens below the panel and, in the first column, to its left; none where they could not be read."""
    if tokens and size >= 0.9 * SPACE * len(tokens):
        words = [styles.label(token)[:LONGEST] for token in tokens]
        look = {"fontsize": 60 * size / len(tokens), **figures.LITERAL}
        panel.set_xticks(range(len(words)), words, rotation=90 * (max(map(len, words)) > 1), **look)
        panel.set_yticks(range(len(words)) if first else [], words if first else [], **look)
        panel.tick_params(length=0, pad=1)

"""Attention of one held-out example in every arm: a row for each arm, a column for each of some layers and heads."""

import pathlib
import zipfile
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib import cm, colors, figure

from experiments.engine import errors, figures
from experiments.laboratory import runs as loaded
from experiments.laboratory import styles

MOST_COLUMNS, MOST_LAYERS = 8, 4


class Maps(NamedTuple):
    """Attention of one example in each layer and head, and its tokens, of which there may be none."""

    A_MHNS: np.ndarray
    tokens: list[str]
    seed: int


def read(run: loaded.Run) -> Maps:
    """The run's maps.npz. UserError where it is no such file."""
    try:
        # Opened here, since numpy leaves a file that is no whole archive open.
        with run.maps.open("rb") as file, np.load(file, allow_pickle=False) as saved:
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
    alike = len(set(map(tuple, picked.values()))) == 1
    wide = max(map(len, picked.values()))
    drawing = figure.Figure(figsize=(1.25 * wide + 2.2, 1.3 * len(found) + 0.5), layout="compressed")
    panels = drawing.subplots(len(found), wide, squeeze=False)
    top = max(float(np.nan_to_num(maps.A_MHNS).max()) for maps in found.values())
    scale = colors.PowerNorm(0.5, 0, max(top, 1e-12))  # so that a weight of 1/32 beside one of 1 is still seen
    for row, (arm, maps) in enumerate(found.items()):
        for panel in panels[row]:
            panel.set(xticks=[], yticks=[])
            panel.axis("off")
        for panel, (m, h) in zip(panels[row], picked[arm], strict=False):
            panel.axis("on")
            panel.imshow(maps.A_MHNS[m, h], cmap="Blues", norm=scale)
            if row == 0 or not alike:
                panel.set_title(f"layer {m + 1}, head {h + 1}", fontsize=8)
        words = {"rotation": 0, "ha": "right", "va": "center", "fontsize": 9}
        panels[row, 0].set_ylabel(style[arm].label.replace(" (", "\n("), **words, **figures.LITERAL)
    shades = cm.ScalarMappable(scale, "Blues")
    tall = drawing.get_size_inches()[1]
    drawing.colorbar(shades, ax=panels[:, -1].tolist(), label="weight", shrink=min(1.0, 3 / tall), aspect=20)
    figures.write(drawing, path)

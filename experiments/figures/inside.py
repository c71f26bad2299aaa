"""Figures of the tools that look inside a model: grids of layers by tokens or heads."""

import pathlib
import textwrap
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib import figure, patches

from experiments.figures import plots

ACROSS = 4  # panels in a row, at most


class Panel(NamedTuple):
    """Values of M layers by an index with labels, such as heads. White is 0, dark blue `limit`, dark red -limit."""

    title: str
    value_MI: np.ndarray
    labels: Sequence[str]
    limit: float = 1.0  # 0: the largest absolute value
    is_signed: bool = False  # whether values may be negative


def grids(path: plots.Path, panels: Sequence[Panel], title: str) -> pathlib.Path:
    """Draw panels of layers (rows, the last one on top) by tokens or heads."""
    M, across = len(panels[0].value_MI), min(ACROSS, len(panels))
    widths = [min(max(0.3 * len(panel.labels), 2.2), 9) for panel in panels[:across]]
    down, height = -(-len(panels) // across), max(0.3 * M, 1.2) + 0.9
    size = sum(widths) + 1.1 * across, height * down + 0.8
    drawing = figure.Figure(figsize=size, layout="constrained")
    cells = drawing.subplots(down, across, width_ratios=widths, squeeze=False).flat
    for axes, panel in zip(cells, panels, strict=False):
        largest = float(np.nanmax(np.abs(panel.value_MI), initial=0))
        limit = panel.limit or largest or 1.0
        style = {"cmap": "RdBu" if panel.is_signed else "Blues", "vmin": -limit * panel.is_signed, "vmax": limit}
        shades = axes.imshow(panel.value_MI, origin="lower", aspect="auto", **style)
        shown = plots.spread(len(panel.labels), 40)
        names = [plots.name(panel.labels[i]) for i in shown]
        rotation = 90 if max(map(len, names)) > 3 else 0
        axes.set_yticks(range(M), range(1, M + 1))
        axes.set_xticks(shown, names, rotation=rotation, fontsize=8, **plots.LITERAL)
        axes.set_title(panel.title, fontsize=9)
        drawing.colorbar(shades, ax=axes, extend="both" if largest > limit else "neither")
    for axes in cells[len(panels) :]:
        axes.remove()
    drawing.supylabel("layer", fontsize=10)
    drawing.suptitle(title, fontsize=11)
    return plots.write(drawing, path)


def lens(
    path: plots.Path,
    *,
    p_MN: np.ndarray,
    top_MN: np.ndarray,
    is_right_MN: np.ndarray,
    tokens: Sequence[str],
    right: Sequence[str],
    title: str,
) -> pathlib.Path:
    """Draw the top tokens of layers (last one on top) by the last 32 positions, coloured by p_MN.

    p_MN: the probabilities of the right tokens; NaN is grey. is_right_MN: whether to frame the top token.
    """
    (M, N), last = p_MN.shape, slice(-plots.MOST_TOKENS, None)
    p_MN, top_MN, is_right_MN = (x_MN[:, last] for x_MN in (p_MN, top_MN, is_right_MN))
    names = [[plots.visible(token, 7) for token in row[last]] for row in (tokens, right)]
    columns, rotation = len(names[0]), 90 if max(map(len, names[0] + names[1])) > 5 else 0
    drawing, [[axes]] = plots.canvas(max(0.6 * columns + 2.2, 5), 0.34 * max(M, 4) + 1.8)
    axes.set_facecolor("#e0e0e0")
    image = axes.imshow(p_MN, cmap="Blues", vmin=0, vmax=1, aspect="auto", origin="lower")
    for (m, n), is_right in np.ndenumerate(is_right_MN):
        shade = "white" if p_MN[m, n] > 0.6 else "black"
        style = {"color": shade, "weight": "bold" if is_right else "normal", "fontsize": 7}
        axes.text(n, m, plots.visible(top_MN[m, n], 7), ha="center", va="center", **style, **plots.LITERAL)
        if is_right:
            axes.add_patch(patches.Rectangle((n - 0.46, m - 0.42), 0.92, 0.84, fill=False, ec=shade, lw=0.8))
    axes.set_xticks(range(columns), names[0], rotation=rotation, fontsize=8, **plots.LITERAL)
    axes.set_yticks(range(M), [f"{m + 1}" for m in range(M)], fontsize=8)
    axes.set(xlabel="token of the prompt", ylabel="layer")
    above = axes.secondary_xaxis("top")
    above.set_xticks(range(columns), names[1], rotation=rotation, fontsize=8, **plots.LITERAL)
    above.set_xlabel("right token")
    title += f"; the last {columns} of {N} positions" * (columns < N)
    drawing.suptitle(textwrap.fill(title, int(max(8.5 * columns, 44))), fontsize=10, **plots.LITERAL)
    plots.bar(drawing, image, [axes], "probability")
    return plots.write(drawing, path)

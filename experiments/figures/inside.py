"""Figures of the tools that look inside a model: grids of layers by tokens or heads."""

import pathlib
import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib import colors, patches

from experiments.config import disk, errors
from experiments.figures import plots

ENDS = (".png", ".svg", ".pdf")


def check_output(path: plots.Path) -> pathlib.Path | None:
    """Return the path of a new figure, or None for ''. Raises UserError if it exists or has another ending."""
    if not str(path):
        return None
    file = pathlib.Path(path).expanduser()
    errors.refuse((file.suffix not in ENDS, f"--figure = {path} must be a file that ends in {', '.join(ENDS)}"))
    return disk.check_new(file, "--figure", is_file=True)


def heat_map(axes: Any, value_MI: np.ndarray, *, labels: Sequence[str], limit: float = 1.0) -> Any:
    """Draw values of layers (rows, the last on top) by index, from -limit (red) over 0 (white) to limit (blue)."""
    M, size = value_MI.shape
    shades = axes.imshow(value_MI, cmap="RdBu", norm=colors.Normalize(-limit, limit), origin="lower", aspect="auto")
    axes.set_yticks(range(M), range(1, M + 1))
    shown = plots.spread(size, 40)
    names = [plots.name(labels[i]) for i in shown]
    axes.set_xticks(shown, names, rotation=90 if max(map(len, names)) > 3 else 0, fontsize=8, **plots.LITERAL)
    return shades


def patching(path: plots.Path, grids: Sequence[Any], corrupted: float, clean: float) -> pathlib.Path:
    """Draw the share of the logit difference that each patch restores. grids: patch.Grid of tokens and of heads."""
    M, sizes = len(grids[0].value_MI), [grid.value_MI.shape[1] for grid in grids]
    widths = [min(max(0.28 * size, 2.2), 9) for size in sizes]
    drawing = plots.figure.Figure(figsize=(sum(widths) + 2.4, max(0.3 * M, 1.2) + 1.9), layout="constrained")
    panels = drawing.subplots(1, len(grids), width_ratios=widths, squeeze=False)[0]
    titles = {"hidden": "one token after a layer", "y": "the output of one head"}
    for axes, grid in zip(panels, grids, strict=True):
        shades = heat_map(axes, (grid.value_MI - corrupted) / (clean - corrupted), labels=grid.labels)
        axes.set(title=titles[grid.name], xlabel={"hidden": "token", "y": "head"}[grid.name], ylabel="layer")
    drawing.colorbar(shades, ax=panels, label="restored share", extend="both")
    drawing.suptitle("How much of the clean text's answer does one patch restore?", fontsize=11)
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


TITLES = {
    "previous": "attends to the token before",
    "duplicate": "to the same token, earlier",
    "induction": "to the token after that",
    "entropy": "entropy of the weights, nats",
    "s": "symmetry of U_q^T U_k",
    "d": "directionality of U_q^T U_k",
    "skew": "rank of its skew part",
    "worth": "worse without the head, nats",
}


def heads(path: plots.Path, columns: dict[str, np.ndarray]) -> pathlib.Path:
    """Draw each column of the scores of heads (M, H) as a panel of layers by heads."""
    M, H = columns["worth"].shape
    across = min(4, len(columns))
    down = -(-len(columns) // across)
    width, height = max(0.3 * H, 2) + 1.1, max(0.3 * M, 1.2) + 0.9
    drawing, grid = plots.canvas(width * across, height * down + 0.4, down, across)
    for axes, (name, x_MH) in zip(grid.flat, columns.items(), strict=False):
        if name in ("s", "d", "worth"):
            limit = float(np.abs(x_MH).max() or 1) if name == "worth" else 1.0
            shades = heat_map(axes, x_MH, labels=[f"{h + 1}" for h in range(H)], limit=limit)
        else:
            largest = float(np.max(x_MH)) if name in ("entropy", "skew") else 1.0
            shades = axes.imshow(x_MH, cmap="Blues", vmin=0, vmax=largest or 1, origin="lower", aspect="auto")
            axes.set_yticks(range(M), range(1, M + 1))
            axes.set_xticks(range(H), range(1, H + 1), fontsize=8)
        axes.set_title(TITLES[name], fontsize=9)
        drawing.colorbar(shades, ax=axes)
    for axes in grid.flat[len(columns) :]:
        axes.remove()
    drawing.supxlabel("head", fontsize=10)
    drawing.supylabel("layer", fontsize=10)
    return plots.write(drawing, path)

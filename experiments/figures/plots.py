"""Figures of a run: loss curves, confusion matrices, attention. Each function takes arrays and writes one PNG.

Colours are safe for the colour-blind, and nothing is shown by colour alone. No global matplotlib state is changed.
"""

import contextlib
import functools
import os
import pathlib
import textwrap
from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib import cm, colors, figure, font_manager, text, ticker
from matplotlib.backends import backend_agg

from experiments.engine import disk

BLUE, RED, PALE, ORANGE = "#0072B2", "#CC3311", "#56B4E9", "#D55E00"
MOST_CLASSES = 1000  # of a confusion matrix, which has their square
MOST_LAYERS, MOST_HEADS, MOST_TOKENS = 12, 8, 32
DPI = 110
FONT = "DejaVu Sans"
PLACEHOLDERS = (".", "Last Resort")  # fonts that draw every letter as a box
UNDATED = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}  # metadata without the time
SYMBOLS = {" ": "␣", "\n": "↵", "\t": "⇥", "\r": "␍"}
LITERAL = {"parse_math": False}  # for texts of the user's: a $ is a dollar, and not the start of a formula


def write(drawing: figure.Figure, path: str | os.PathLike) -> pathlib.Path:
    """Write the figure as a PNG, SVG or PDF, by the end of its name: the same bytes for the same figure."""
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    backend_agg.FigureCanvasAgg(drawing)
    for label in drawing.findobj(text.Text):
        if fonts := {_find_font(letter) for letter in label.get_text()} - {FONT, ""}:
            label.set_fontfamily([*label.get_fontfamily(), *sorted(fonts)])
    kind = path.suffix.removeprefix(".")
    with disk.draft(path) as file, matplotlib.rc_context({"svg.hashsalt": "tfm"}):  # else SVG draws its ids
        drawing.savefig(file, format=kind, dpi=DPI, metadata=UNDATED.get(kind))
    return path


def visible(text: str, most: int = 14) -> str:
    """Return the text with symbols for white space, and codes for letters that no font has.

    A text of more than `most` letters loses its middle: names may differ at either end.
    """
    short = text if len(text) <= most else f"{text[: most // 2]}…{text[1 - most // 2 :]}"
    return "".join(SYMBOLS.get(c) or (c if c.isprintable() and _find_font(c) else f"<{ord(c):x}>") for c in short)


@functools.cache
def _find_font(letter: str) -> str:
    """Return the name of an installed font that has the letter, if possible FONT; "" if none has it."""
    names = {entry.name: entry.fname for entry in font_manager.fontManager.ttflist if entry.style == "normal"}
    for name, file in [(FONT, font_manager.findfont(FONT)), *sorted(names.items())]:
        with contextlib.suppress(OSError, RuntimeError):  # a removed or damaged font
            if not name.startswith(PLACEHOLDERS) and font_manager.get_font(file).get_char_index(ord(letter)):
                return name
    return ""


def name(text: str, most: int = 14) -> str:
    """Return `visible` of a name, which keeps its blanks."""
    return visible(text, most).replace("␣", " ")


def bar(drawing: figure.Figure, shades: cm.ScalarMappable, axes: list, label: str) -> None:
    """Draw a colour bar right of the axes, at most 5 inches high and 0.2 wide however large the figure is."""
    width, height = drawing.get_size_inches()
    length = min(0.8 * height, 5)
    shape = {"shrink": length / height, "aspect": length / 0.2, "fraction": 0.4 / width, "panchor": False}
    drawing.colorbar(shades, ax=axes, label=label, **shape)


def smooth(value_I: np.ndarray, width: int) -> np.ndarray:
    """Return means over centred windows of `width` (odd) values, narrower towards both ends."""
    sum_I = np.concatenate([[0.0], np.cumsum(value_I)])
    i = np.arange(len(value_I))
    half = np.minimum(np.minimum(i, i[::-1]), width // 2)
    return (sum_I[i + half + 1] - sum_I[i - half]) / (2 * half + 1)


def loss_curves(path: str | os.PathLike, rows: list[dict], *, unit: str, title: str) -> pathlib.Path:
    """Draw training loss (raw and smoothed) and evaluation loss by step, from the rows of metrics.jsonl.

    The scale is logarithmic if the values span a decade. Values that are not finite are counted in the title.
    """
    drawing = figure.Figure(figsize=(7, 4.2), layout="constrained")
    axes = drawing.add_subplot()
    (step_I, value_I), infinite_I = _read_points(rows, "train/loss")
    (step_J, value_J), infinite_J = _read_points(rows, "eval/loss")
    if len(step_I):
        is_long = len(step_I) >= 20
        axes.plot(step_I, value_I, color=PALE, lw=0.8, marker="" if is_long else ".", label="training")
        if is_long:
            smooth_I = smooth(value_I, 2 * (len(step_I) // 40) + 3)
            axes.plot(step_I, smooth_I, color=BLUE, lw=1.8, label="training, smoothed")
    if len(step_J):
        axes.plot(step_J, value_J, color=RED, lw=1.2, ls="--", marker="o", ms=4, label="evaluation")
    value = np.concatenate([value_I, value_J])
    if len(value) and value.min() > 0 and value.max() > 10 * value.min():
        logarithmic(axes, value)
    if infinite_I + infinite_J:
        title += f" ({infinite_I + infinite_J} values not finite)"
    axes.set_title(textwrap.fill(title, 60), **LITERAL)
    axes.set(xlabel="step", ylabel=f"loss, {unit}")
    axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True, nbins=8))
    axes.grid(alpha=0.3)
    if len(value):
        axes.legend(frameon=False)
    return write(drawing, path)


def _read_points(rows: list[dict], key: str) -> tuple[np.ndarray, int]:
    """Return steps and finite values (2, I) of a metric, sorted by step, and the number of values not finite."""
    points = {row["step"]: row[key] for row in rows if row.get(key) is not None}
    finite = sorted((step, value) for step, value in points.items() if np.isfinite(value))
    return np.array(finite, float).reshape(-1, 2).T, len(points) - len(finite)


def logarithmic(axes: Any, value: np.ndarray) -> None:
    """Make the y axis logarithmic, with few ticks, written as 0.5 and not as 5 x 10^-1."""
    axes.set_yscale("log")
    short = value.max() < 1e4 * value.min()
    axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5) if short else (1,)))
    axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda y, _: f"{y:g}"))
    axes.yaxis.set_minor_locator(ticker.NullLocator())


def confusion(path: str | os.PathLike, *, count_CC: np.ndarray, classes: Sequence[str]) -> pathlib.Path:
    """Draw counts, true class (row) by predicted class (column), coloured by share of the row."""
    count_CC = np.asarray(count_CC)
    C, total = len(count_CC), int(count_CC.sum())
    share_CC = count_CC / np.maximum(count_CC.sum(1, keepdims=True), 1)
    side = min(max(0.46 * C, 2.4), 14)
    drawing = figure.Figure(figsize=(side + 2.4, side + 1.6), layout="compressed")
    axes = drawing.add_subplot()
    image = axes.imshow(share_CC, cmap="Blues", vmin=0, vmax=1)
    bar(drawing, image, [axes], "share of the true class")
    ticks = range(0, C, -(-C // 30))  # names of more than 30 classes would touch
    names = [name(classes[c]) for c in ticks]
    axes.set_xticks(ticks, names, rotation=90 if max(map(len, names)) > 3 else 0, **LITERAL)
    axes.set_yticks(ticks, names, **LITERAL)
    for row, column in np.argwhere(count_CC) if C <= 30 else ():
        shade = "white" if share_CC[row, column] > 0.5 else "black"
        axes.text(column, row, f"{count_CC[row, column]}", ha="center", va="center", color=shade, fontsize=7)
    correct = int(np.trace(count_CC))
    accuracy = f"accuracy {100 * correct / total:.2f} %\n{correct} of {total} right" if total else "no examples"
    axes.set(xlabel="predicted class", ylabel="true class", title=accuracy)
    return write(drawing, path)


def confusion_of_predictions(
    path: str | os.PathLike, *, label_B: np.ndarray, predicted_B: np.ndarray, classes: Sequence[str]
) -> list[pathlib.Path]:
    """Draw the confusion of these predictions, or print that there are more than MOST_CLASSES."""
    if len(classes) > MOST_CLASSES:
        print(f"{path} is not drawn: {len(classes):,} classes are more than {MOST_CLASSES:,}", flush=True)
        return []
    count_CC = np.zeros((len(classes),) * 2, int)
    np.add.at(count_CC, (label_B, predicted_B), 1)
    return [confusion(path, count_CC=count_CC, classes=classes)]


def spread(count: int, most: int) -> list[int]:
    """Return at most `most` indices below `count`, evenly spread from the first to the last."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(int)).tolist()


def heads(
    drawing: figure.Figure, A_MHNS: np.ndarray, *, height: float, width: float, before: str | None = None
) -> tuple[dict, str]:
    """Return labelled axes by (layer, head), of height x width inches, and a line about layers and heads left out.

    before: the name of a column before the heads, which has the key -1; "" for a column that stays empty.
    """
    M, H = A_MHNS.shape[:2]
    layer_I, head_J = spread(M, MOST_LAYERS), [-1] * (before is not None) + spread(H, MOST_HEADS)
    drawing.set_size_inches(max(width * len(head_J) + 1.6, 5.4), max(height * len(layer_I) + 1.1, 2.6))
    grid, axes = drawing.add_gridspec(len(layer_I), len(head_J)), {}
    for i, m in enumerate(layer_I):
        for j, h in enumerate(head_J):
            if h < 0 and not before:
                continue
            axes[m, h] = panel = drawing.add_subplot(grid[i, j])
            panel.set(xticks=[], yticks=[])
            if m == 0:
                panel.set_title(before if h < 0 else f"head {h + 1}", fontsize=9)
            if h == (-1 if before else 0):
                panel.set_ylabel(f"layer {m + 1}", fontsize=9)
    cut = [f"{len(layer_I)} of {M} layers"] if len(layer_I) < M else []
    cut += [f"{MOST_HEADS} of {H} heads"] if H > MOST_HEADS else []
    return axes, f"\n({', '.join(cut)})" if cut else ""


def attention_matrices(
    path: str | os.PathLike,
    *,
    A_MHNS: np.ndarray,
    queries: Sequence[str],
    keys: Sequence[str],
    title: str = "attention, query (row) by key (column)",
    mean: bool = False,
) -> pathlib.Path:
    """Draw attention weights over short texts for each layer and head, and, with `mean`, for the mean of all heads.

    At most the last 32 queries and keys, 12 layers and 8 heads are drawn; the title counts them.
    """
    A_MHNS = A_MHNS[:, :, -MOST_TOKENS:, -MOST_TOKENS:]
    names = [[visible(token) for token in tokens[-MOST_TOKENS:]] for tokens in (queries, keys)]
    N, S = A_MHNS.shape[-2:]
    drawing = figure.Figure(layout="compressed")
    size = {"height": max(0.14 * N, 1.3), "width": max(0.14 * S, 1.3)}
    axes, cut = heads(drawing, A_MHNS, **size, before="mean of heads" if mean else None)
    scale = colors.Normalize(0, max(float(A_MHNS.max()), 1e-12))
    first, last = min(h for _, h in axes), max(m for m, _ in axes)
    for (m, h), panel in axes.items():
        panel.imshow(A_MHNS[m].mean(0) if h < 0 else A_MHNS[m, h], cmap="Blues", norm=scale)
        if m == last:
            rotation = 90 if max(map(len, names[1])) > 1 else 0
            panel.set_xticks(range(S), names[1], rotation=rotation, fontsize=7, **LITERAL)
        if h == first:
            panel.set_yticks(range(N), names[0], fontsize=7, **LITERAL)
    bar(drawing, cm.ScalarMappable(scale, "Blues"), list(axes.values()), "attention weight")
    if N < len(queries):
        title += f", the last {N} of {len(queries)} queries"
    if S < len(keys):
        title += f", the last {S} of {len(keys)} keys"
    drawing.suptitle(f"{title}{cut}", fontsize=11)
    return write(drawing, path)

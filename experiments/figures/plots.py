"""Figures of a run: loss curves, confusion matrices, attention weights. Each takes arrays and writes one file.

Colours are safe for the colour-blind, and nothing is shown by colour alone. Global matplotlib state does not change.
"""

import contextlib
import functools
import os
import pathlib
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib import cm, colors, figure, font_manager, text, ticker
from matplotlib.backends import backend_agg

from experiments.config import disk

BLUE, RED, PALE, ORANGE = "#0072B2", "#CC3311", "#56B4E9", "#D55E00"
MOST_CLASSES = 1000  # a confusion matrix has the square of this many cells
MOST_LAYERS, MOST_HEADS, MOST_TOKENS = 12, 8, 32  # drawn in a figure of attention
DPI = 110
STYLES = ("-", "--", "-.", ":")
FONT = "DejaVu Sans"
PLACEHOLDERS = (".", "Last Resort")  # fonts that draw every letter as a box
UNDATED = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}  # file metadata without a date, for equal bytes
SYMBOLS = {" ": "␣", "\n": "↵", "\t": "⇥", "\r": "␍"}
LITERAL = {"parse_math": False}  # for the user's texts: a $ does not begin a formula
TITLE = "attention, query (row) by key (column)"
Path = str | os.PathLike


def canvas(
    width: float, height: float, rows: int = 1, columns: int = 1, *, layout: str = "constrained"
) -> tuple[figure.Figure, np.ndarray]:
    """Return a figure of width x height inches and its axes, an array (rows, columns)."""
    drawing = figure.Figure(figsize=(width, height), layout=layout)
    return drawing, drawing.subplots(rows, columns, squeeze=False)


def write(drawing: figure.Figure, path: Path, *, dpi: int = DPI) -> pathlib.Path:
    """Write the figure as PNG, SVG or PDF, as the suffix says. The same figure gives the same bytes."""
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    backend_agg.FigureCanvasAgg(drawing)
    for label in drawing.findobj(text.Text):
        if fonts := {_find_font(letter) for letter in label.get_text()} - {FONT, ""}:
            label.set_fontfamily([*label.get_fontfamily(), *sorted(fonts)])
    kind = path.suffix.removeprefix(".")
    with disk.draft(path) as file, matplotlib.rc_context({"svg.hashsalt": "tfm"}):  # else the ids in it are random
        drawing.savefig(file, format=kind, dpi=dpi, metadata=UNDATED.get(kind))
    return path


def visible(text: str, most: int = 14) -> str:
    """Return the text with symbols for white space and codes for letters without a font.

    If it has more than `most` letters, "…" replaces its middle.
    """
    short = text if len(text) <= most else f"{text[: most // 2]}…{text[1 - most // 2 :]}"
    return "".join(SYMBOLS.get(c) or (c if c.isprintable() and _find_font(c) else f"<{ord(c):x}>") for c in short)


@functools.cache
def _find_font(letter: str) -> str:
    """Return the name of an installed font with this letter, preferably FONT; "" if there is none."""
    names = {entry.name: entry.fname for entry in font_manager.fontManager.ttflist if entry.style == "normal"}
    for name, file in [(FONT, font_manager.findfont(FONT)), *sorted(names.items())]:
        with contextlib.suppress(OSError, RuntimeError):  # a removed or damaged font
            if not name.startswith(PLACEHOLDERS) and font_manager.get_font(file).get_char_index(ord(letter)):
                return name
    return ""


def name(text: str, most: int = 14) -> str:
    """Return the text printable and cut to `most` letters, as `visible` does, but with spaces as they are."""
    return visible(text, most).replace("␣", " ")


def bar(drawing: figure.Figure, shades: cm.ScalarMappable, axes: list, label: str) -> None:
    """Draw a colour bar to the right of the axes, at most 5 inches high and 0.2 inches wide."""
    width, height = drawing.get_size_inches()
    length = min(0.8 * height, 5)
    shape = {"shrink": length / height, "aspect": length / 0.2, "fraction": 0.4 / width, "panchor": False}
    drawing.colorbar(shades, ax=axes, label=label, **shape)


def smooth(value_I: np.ndarray, width: int) -> np.ndarray:
    """Return means over centred windows of `width` (odd) values. Windows get narrower towards both ends."""
    sum_I = np.concatenate([[0.0], np.cumsum(value_I)])
    i = np.arange(len(value_I))
    half = np.minimum(np.minimum(i, i[::-1]), width // 2)
    return (sum_I[i + half + 1] - sum_I[i - half]) / (2 * half + 1)


def loss_curves(path: Path, rows: list[dict], *, unit: str, title: str) -> pathlib.Path:
    """Draw training and evaluation loss against the step. rows: of metrics.jsonl.

    The title counts the values that are not finite: inf, NaN and None, which metrics.jsonl has for both.
    """
    drawing, [[axes]] = canvas(7, 4.2)
    (step_I, value_I), infinite_I = read_points(rows, "train/loss")
    (step_J, value_J), infinite_J = read_points(rows, "eval/loss")
    is_long = len(step_I) >= 20
    if len(step_I):
        axes.plot(step_I, value_I, color=PALE, lw=0.8, marker="" if is_long else ".", label="training")
    if is_long:
        smooth_I = smooth(value_I, 2 * (len(step_I) // 40) + 3)
        axes.plot(step_I, smooth_I, color=BLUE, lw=1.8, label="training, smoothed")
    if len(step_J):
        axes.plot(step_J, value_J, color=RED, lw=1.2, ls="--", marker="o", ms=4, label="evaluation")
    value = np.concatenate([value_I, value_J])
    logarithmic(axes, value)
    if infinite_I + infinite_J:
        title += f" ({infinite_I + infinite_J} values not finite)"
    axes.set_title(textwrap.fill(title, 60), **LITERAL)
    axes.set(xlabel="step", ylabel=f"loss, {unit}")
    axes.xaxis.set_major_locator(round_ticks(8))
    axes.grid(alpha=0.3)
    if len(value):
        axes.legend(frameon=False)
    return write(drawing, path)


def curves(path: Path, rows: list[dict], labels: Mapping[str, str], *, title: str) -> pathlib.Path:
    """Draw metrics between 0 and 1 against the step. rows: of metrics.jsonl. labels: metric -> label."""
    drawing, [[axes]] = canvas(7, 4.2)
    for (metric, label), colour, style in zip(labels.items(), (PALE, RED, BLUE, "black"), STYLES, strict=False):
        axes.plot(*read_points(rows, metric)[0], color=colour, ls=style, lw=1.6, label=label)
    axes.set_title(textwrap.fill(title, 60), **LITERAL)
    axes.set(xlabel="step", ylim=(-0.03, 1.03))
    axes.xaxis.set_major_locator(round_ticks(8))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    return write(drawing, path)


def read_points(rows: list[dict], key: str) -> tuple[np.ndarray, int]:
    """Return the steps and finite values (2, I) of a metric, sorted by step, and the number of other values."""
    points = {row["step"]: row[key] for row in rows if key in row}
    finite = sorted((step, value) for step, value in points.items() if value is not None and np.isfinite(value))
    return np.array(finite, float).reshape(-1, 2).T, len(points) - len(finite)


def round_ticks(most: int) -> ticker.Locator:
    """Return a locator of about `most` ticks at round integers: 0, 50, 100 rather than 0, 60, 120."""
    return ticker.MaxNLocator(nbins=most, steps=[1, 2, 5, 10], integer=True)


def logarithmic(axes: Any, value: np.ndarray) -> None:
    """Make the y axis logarithmic if the values are positive and span a decade. Label a few ticks, such as 0.5."""
    if not (len(value) and value.max() > 10 * value.min() > 0):
        return
    axes.set_yscale("log")
    short = value.max() < 1e4 * value.min()
    axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5) if short else (1,)))
    axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda y, _: f"{y:g}"))
    axes.yaxis.set_minor_locator(ticker.NullLocator())


def confusion(path: Path, *, label_B: np.ndarray, predicted_B: np.ndarray, classes: Sequence) -> list[pathlib.Path]:
    """Draw a confusion matrix, true class (row, with its recall) by predicted class, coloured by share of the row.

    Return its file; [] and a message if there are too many classes.
    """
    C, total = len(classes), len(label_B)
    if C > MOST_CLASSES:
        print(f"{path} is not drawn: {C:,} classes, and at most {MOST_CLASSES:,} fit", flush=True)
        return []
    count_CC = np.zeros((C, C), int)
    np.add.at(count_CC, (label_B, predicted_B), 1)
    share_CC = count_CC / np.maximum(count_CC.sum(1, keepdims=True), 1)
    side = min(max(0.46 * C, 2.4), 14)
    drawing, [[axes]] = canvas(side + 2.4, side + 1.6, layout="compressed")
    image = axes.imshow(share_CC, cmap="Blues", vmin=0, vmax=1)
    bar(drawing, image, [axes], "share of the true class")
    ticks = range(0, C, -(-C // 30))  # at most 30 names, which do not touch
    names = [name(classes[c]) for c in ticks]
    axes.set_xticks(ticks, names, rotation=90 if max(map(len, names)) > 3 else 0, **LITERAL)
    recalls = [f"  {share_CC[c, c]:.0%}" if count_CC[c].any() else "" for c in ticks]
    axes.set_yticks(ticks, [label + recall for label, recall in zip(names, recalls, strict=True)], **LITERAL)
    for row, column in np.argwhere(count_CC) if C <= 30 else ():
        shade = "white" if share_CC[row, column] > 0.5 else "black"
        axes.text(column, row, f"{count_CC[row, column]}", ha="center", va="center", color=shade, fontsize=7)
    correct = int(np.trace(count_CC))
    accuracy = f"accuracy {100 * correct / total:.2f} %\n{correct} of {total} right" if total else "no examples"
    axes.set(xlabel="predicted class", ylabel="true class and its recall", title=accuracy)
    return [write(drawing, path)]


def spread(count: int, most: int) -> list[int]:
    """Return at most `most` indices below `count`, evenly spread from the first to the last."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(int)).tolist()


def heads(
    drawing: figure.Figure, A_MHNS: np.ndarray, *, height: float, width: float, before: str | None = None
) -> tuple[dict, str]:
    """Return {(layer, head): labelled axes}, and a line for the title about omitted layers and heads, "" if none.

    The axes have height x width inches. before: the title of an extra first column, with the key head = -1; "": a gap
    without axes in its place; None: no extra column.
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
    path: Path, *, A_MHNS: np.ndarray, queries: Sequence[str], keys: Sequence[str], title=TITLE, mean: bool = False
) -> pathlib.Path:
    """Draw attention weights over the last 32 tokens, by layer (at most 12) and head (at most 8).

    mean: also draw the mean over a layer's heads.
    """
    A_MHNS = A_MHNS[:, :, -MOST_TOKENS:, -MOST_TOKENS:]
    names = [[visible(token) for token in tokens[-MOST_TOKENS:]] for tokens in (queries, keys)]
    N, S = A_MHNS.shape[-2:]
    drawing, before = figure.Figure(layout="compressed"), "mean of heads" if mean else None
    axes, cut = heads(drawing, A_MHNS, height=max(0.14 * N, 1.3), width=max(0.14 * S, 1.3), before=before)
    scale = colors.Normalize(0, max(float(A_MHNS.max()), 1e-12))
    first, last = min(h for _, h in axes), max(m for m, _ in axes)
    style = {"cmap": "Blues", "norm": scale, "aspect": "equal" if N == S else "auto"}
    for (m, h), panel in axes.items():
        panel.imshow(A_MHNS[m].mean(0) if h < 0 else A_MHNS[m, h], **style)
        if m == last:
            rotation = 90 if max(map(len, names[1])) > 1 else 0
            panel.set_xticks(range(S), names[1], rotation=rotation, fontsize=7, **LITERAL)
        if h == first:
            panel.set_yticks(range(N), names[0], fontsize=7, **LITERAL)
    bar(drawing, cm.ScalarMappable(scale, "Blues"), list(axes.values()), "attention weight")
    for n, tokens, noun in ((N, queries, "queries"), (S, keys, "keys")):
        title += f", the last {n} of {len(tokens)} {noun}" * (n < len(tokens))
    drawing.suptitle(f"{title}{cut}", fontsize=11)
    return write(drawing, path)


def coordinates(
    path: Path, change_by_stage: dict[str, np.ndarray], sizes: Sequence[int], *, letter: str, title: str
) -> pathlib.Path:
    """Draw the mean change of each stage's activations against the size, a line for each step: a coordinate check.

    change_by_stage: mean |x - x_0|, (sizes, steps + 1). letter: D if the sizes are widths, M for numbers of layers.
    """
    columns = min(4, len(change_by_stage))
    rows = -(-len(change_by_stage) // columns)
    drawing, grid = canvas(2.6 * columns, 2.4 * rows, rows, columns)
    for axes, (stage, change_DT) in zip(grid.flat, change_by_stage.items(), strict=False):
        steps = change_DT.shape[1] - 1
        for n in range(1, steps + 1):
            shade = matplotlib.colormaps["viridis"](0.9 * (n - 1) / max(steps - 1, 1))
            axes.plot(sizes, change_DT[:, n], color=shade, lw=1.2, marker=".")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.yaxis.set_major_formatter(ticker.FormatStrFormatter("%.3g"))
        axes.set_title(stage, fontsize=10, **LITERAL)
        axes.grid(alpha=0.3)
    for axes in grid.flat[len(change_by_stage) :]:
        axes.remove()
    drawing.suptitle(textwrap.fill(title, 90), fontsize=11, **LITERAL)
    drawing.supxlabel("width D" if letter == "D" else "layers M", fontsize=10)
    drawing.supylabel("mean |x - x_0|, steps from dark to light", fontsize=10)
    return write(drawing, path)

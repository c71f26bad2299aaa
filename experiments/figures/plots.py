"""What a run shows: loss curves, predictions, confusion, attention. Each function takes arrays and writes one PNG.

Colours are safe for the colour-blind, and nothing is said by colour alone. No global matplotlib state is used.
"""

import os
import pathlib
import textwrap
from collections.abc import Sequence

import numpy as np
from matplotlib import cm, colors, figure, font_manager, ticker
from matplotlib.backends import backend_agg

from experiments.engine import disk

BLUE, RED, PALE, ORANGE = "#0072B2", "#CC3311", "#56B4E9", "#D55E00"
MOST_IMAGES, MOST_LAYERS, MOST_HEADS, MOST_TOKENS, MOST_LETTERS = 40, 12, 8, 32, 14
DPI = 110
SYMBOLS = {" ": "␣", "\n": "↵", "\t": "⇥", "\r": "␍"}
LITERAL = {"parse_math": False}  # for texts of the user's: a $ is a dollar and starts no formula


def write(drawing: figure.Figure, path: str | os.PathLike) -> None:
    """Write the figure as a PNG, whole or not at all; its folder is made where it is missing."""
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    backend_agg.FigureCanvasAgg(drawing)
    with disk.draft(path) as file:
        drawing.savefig(file, format="png", dpi=DPI)


def visible(text: str) -> str:
    """The text with white space as symbols, unprintable or undrawable letters as their code, and a long end cut."""
    font = font_manager.get_font(font_manager.findfont("DejaVu Sans"))
    drawn = text if len(text) <= MOST_LETTERS else text[: MOST_LETTERS - 1] + "…"
    return "".join(
        SYMBOLS.get(c) or (c if c.isprintable() and font.get_char_index(ord(c)) else f"<{ord(c):x}>") for c in drawn
    )


def _name(text: str) -> str:
    return visible(text).replace("␣", " ")


def _bar(drawing: figure.Figure, shades: cm.ScalarMappable, axes: list, label: str) -> None:
    """A colour bar right of the axes, at most 5 inches high and 0.2 wide however large the figure is."""
    width, height = drawing.get_size_inches()
    tall = min(0.8 * height, 5)
    drawing.colorbar(
        shades, ax=axes, label=label, shrink=tall / height, aspect=tall / 0.2, fraction=0.4 / width, panchor=False
    )


def _finite(points: dict[int, float]) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values in order of the steps, without those that are not finite."""
    kept = sorted((step, float(value)) for step, value in points.items() if np.isfinite(value))
    return np.array([step for step, _ in kept]), np.array([value for _, value in kept])


def smooth(value_I: np.ndarray, width: int) -> np.ndarray:
    """Mean over a centred window of `width` (odd) values, narrower towards both ends so that it stays centred."""
    sum_I = np.concatenate([[0.0], np.cumsum(value_I)])
    i = np.arange(len(value_I))
    half = np.minimum(np.minimum(i, i[::-1]), width // 2)
    return (sum_I[i + half + 1] - sum_I[i - half]) / (2 * half + 1)


def loss_figure(file: pathlib.Path, rows: list[dict], *, unit: str, title: str) -> pathlib.Path:
    """Draw training and evaluation loss from the rows of metrics.jsonl."""
    curves = {
        part: {row["step"]: row[f"{part}/loss"] for row in rows if row.get(f"{part}/loss") is not None}
        for part in ("train", "eval")
    }
    loss_curves(file, train=curves["train"], evaluation=curves["eval"], ylabel=f"loss, {unit}", title=title)
    return file


def loss_curves(
    path: str | os.PathLike, *, train: dict[int, float], evaluation: dict[int, float], ylabel: str, title: str
) -> None:
    """Step against value: training (raw and smoothed) and evaluation. Logarithmic where values span over a decade.

    Values that are not finite are left out and counted in the title.
    """
    drawing = figure.Figure(figsize=(7, 4.2), layout="constrained")
    axes = drawing.add_subplot()
    (step_I, value_I), (step_J, value_J) = _finite(train), _finite(evaluation)
    if len(step_I):
        many = len(step_I) >= 20
        axes.plot(step_I, value_I, color=PALE, lw=0.8, marker="" if many else ".", label="training")
        if many:
            smooth_I = smooth(value_I, 2 * (len(step_I) // 40) + 3)
            axes.plot(step_I, smooth_I, color=BLUE, lw=1.8, label="training, smoothed")
    if len(step_J):
        axes.plot(step_J, value_J, color=RED, lw=1.2, ls="--", marker="o", ms=4, label="evaluation")
    value = np.concatenate([value_I, value_J])
    if len(value) and value.min() > 0 and value.max() > 10 * value.min():
        axes.set_yscale("log")
        few = value.max() < 1e4 * value.min()
        axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5) if few else (1,)))
        axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda y, _: f"{y:g}"))
        axes.yaxis.set_minor_locator(ticker.NullLocator())
    left_out = len(train) + len(evaluation) - len(value)
    words = title + (f" ({left_out} values not finite)" if left_out else "")
    axes.set_title(textwrap.fill(words, 60), **LITERAL)
    axes.set(xlabel="step", ylabel=ylabel)
    axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True, nbins=8))
    axes.grid(alpha=0.3)
    if len(value):
        axes.legend(frameon=False)
    write(drawing, path)


def _displayable(image_BYXZ: np.ndarray) -> np.ndarray:
    """Raw pixels on any scale as numbers from 0 to 1, one channel (grey) or three (colour)."""
    low, high = image_BYXZ.min(), image_BYXZ.max()
    scaled_BYXZ = (image_BYXZ.astype(np.float64) - low) / max(float(high) - float(low), 1e-12)
    return scaled_BYXZ if image_BYXZ.shape[-1] == 3 else scaled_BYXZ.mean(-1)


def predictions(
    path: str | os.PathLike,
    *,
    image_BYXZ: np.ndarray,
    label_B: np.ndarray,
    predicted_B: np.ndarray,
    probability_B: np.ndarray,
    classes: Sequence[str],
    title: str,
) -> None:
    """The first 40 images (raw pixels, Z is 1 or 3) with predicted class and its probability; wrong ones in red.

    `label_B` and `predicted_B` index `classes`; a wrong image also says its true class.
    """
    B = min(len(image_BYXZ), MOST_IMAGES)
    columns = min(B, 8)
    rows = -(-B // columns)
    drawing = figure.Figure(figsize=(max(1.35 * columns, 5.4), 1.65 * rows + 0.6), layout="constrained")
    panels = drawing.subplots(rows, columns, squeeze=False).flat
    for panel in panels:
        panel.axis("off")
    image_B = _displayable(np.asarray(image_BYXZ[:B]))
    for b, panel in zip(range(B), drawing.axes, strict=False):
        panel.imshow(image_B[b], cmap="gray", vmin=0, vmax=1)
        right = label_B[b] == predicted_B[b]
        said = f"{_name(classes[predicted_B[b]])}  {100 * probability_B[b]:.0f} %"
        words = f"\n{said}" if right else f"{said}\ntrue: {_name(classes[label_B[b]])}"
        style = {"color": "black"} if right else {"color": RED, "fontweight": "bold"}
        panel.set_title(words, fontsize=8, **style, **LITERAL)
    drawing.suptitle(title)
    write(drawing, path)


def confusion(path: str | os.PathLike, *, count_CC: np.ndarray, classes: Sequence[str]) -> None:
    """Counts, true class (row) by predicted class (column), coloured by share of the row; accuracy in the title."""
    count_CC = np.asarray(count_CC)
    C, total = len(count_CC), int(count_CC.sum())
    share_CC = count_CC / np.maximum(count_CC.sum(1, keepdims=True), 1)
    side = min(max(0.46 * C, 2.4), 14)
    drawing = figure.Figure(figsize=(side + 2.4, side + 1.6), layout="compressed")
    axes = drawing.add_subplot()
    image = axes.imshow(share_CC, cmap="Blues", vmin=0, vmax=1)
    _bar(drawing, image, [axes], "share of the true class")
    named = range(0, C, -(-C // 30))  # names of more than 30 classes would touch
    names = [_name(classes[c]) for c in named]
    axes.set_xticks(named, names, rotation=90 if max(map(len, names)) > 3 else 0, **LITERAL)
    axes.set_yticks(named, names, **LITERAL)
    for row, column in np.argwhere(count_CC) if C <= 30 else ():
        shade = "white" if share_CC[row, column] > 0.5 else "black"
        axes.text(column, row, f"{count_CC[row, column]}", ha="center", va="center", color=shade, fontsize=7)
    right = int(np.trace(count_CC))
    accuracy = f"accuracy {100 * right / total:.2f} %\n{right} of {total} right" if total else "no examples"
    axes.set(xlabel="predicted class", ylabel="true class", title=accuracy)
    write(drawing, path)


def spread(count: int, most: int) -> list[int]:
    """At most `most` indices below `count`, evenly spread from the first to the last."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(int)).tolist()


def _heads(drawing: figure.Figure, A_MHNS: np.ndarray, *, height: float, width: float, beside: int) -> tuple[dict, str]:
    """Labelled axes by (layer, head), a panel being height x width inches, right of `beside` empty columns.

    Also the words that say which layers and heads were left out.
    """
    M, H = A_MHNS.shape[:2]
    layer_I, head_J = spread(M, MOST_LAYERS), spread(H, MOST_HEADS)
    rows, columns = len(layer_I), len(head_J) + beside
    drawing.set_size_inches(max(width * columns + 1.6, 5.4), max(height * rows + 1.1, 2.6))
    grid = drawing.add_gridspec(rows, columns)
    places = ((i, m, j, h) for i, m in enumerate(layer_I) for j, h in enumerate(head_J, beside))
    axes = {(m, h): drawing.add_subplot(grid[i, j]) for i, m, j, h in places}
    for (m, h), panel in axes.items():
        panel.set(xticks=[], yticks=[])
        if m == 0:
            panel.set_title(f"head {h + 1}", fontsize=9)
        if h == 0:
            panel.set_ylabel(f"layer {m + 1}", fontsize=9)
    cut = [f"{i} of {n} {what}" for i, n, what in ((rows, M, "layers"), (len(head_J), H, "heads")) if i < n]
    return axes, "\n(" + ", ".join(cut) + ")" if cut else ""


def attention_maps(
    path: str | os.PathLike, *, image_YXZ: np.ndarray, A_MHNS: np.ndarray, grid: tuple[int, int], class_token: bool
) -> None:
    """One image beside where each head looks: the class token's weights, or their mean over the queries without one.

    `grid` is patches down and across; a class token is token 0. At most 12 layers and 8 heads, said in the title.
    ValueError where the keys are not the patches of the grid (and the class token).
    """
    if A_MHNS.shape[-1] != grid[0] * grid[1] + class_token:
        raise ValueError(f"attention over {A_MHNS.shape[-1]} keys does not fit {grid[0]} x {grid[1]} patches")
    A_MHS = A_MHNS[:, :, 0, 1:] if class_token else A_MHNS.mean(2)
    Y, X = image_YXZ.shape[:2]
    drawing = figure.Figure(layout="constrained")
    axes, cut = _heads(drawing, A_MHNS, height=1.35 * Y / X, width=1.35, beside=1)
    image_YX, extent = _displayable(image_YXZ[None])[0], (-0.5, X - 0.5, Y - 0.5, -0.5)
    whole = drawing.add_subplot(axes[0, 0].get_gridspec()[:, 0])
    whole.imshow(image_YX, cmap="gray", vmin=0, vmax=1)
    whole.set_title("image", fontsize=9)
    whole.set_anchor("N")
    whole.axis("off")
    scale = colors.Normalize(0, max(float(A_MHS.max()), 1e-12))
    tint = colors.LinearSegmentedColormap.from_list("tint", [colors.to_rgba(ORANGE, alpha) for alpha in (0, 1)])
    for (m, h), panel in axes.items():
        panel.imshow((1.5 + image_YX) / 2.5, cmap="gray", vmin=0, vmax=1)  # paler, so that the tint shows everywhere
        panel.imshow(A_MHS[m, h].reshape(grid), cmap=tint, norm=scale, extent=extent)
    _bar(drawing, cm.ScalarMappable(scale, tint), list(axes.values()), "attention weight")
    who = "the class token attends" if class_token else "tokens attend, on average"
    drawing.suptitle(f"where {who}{cut}", fontsize=11)
    write(drawing, path)


def attention_matrices(path: str | os.PathLike, *, A_MHNS: np.ndarray, tokens: Sequence[str]) -> None:
    """Attention weights over one short text, query (row) by key (column), for each layer and head.

    `tokens` are the S keys; the N queries are the last N of them. Cut to the last 32 tokens, 12 layers and 8 heads,
    said in the title. ValueError where the number of tokens is not the number of keys.
    """
    if A_MHNS.shape[-1] != len(tokens):
        raise ValueError(f"attention over {A_MHNS.shape[-1]} keys does not fit {len(tokens)} tokens")
    A_MHNS, names = A_MHNS[:, :, -MOST_TOKENS:, -MOST_TOKENS:], [visible(t) for t in tokens[-MOST_TOKENS:]]
    N, S = A_MHNS.shape[-2:]
    drawing = figure.Figure(layout="constrained")
    axes, cut = _heads(drawing, A_MHNS, height=max(0.12 * N, 1.3), width=max(0.12 * S, 1.3), beside=0)
    scale = colors.Normalize(0, max(float(A_MHNS.max()), 1e-12))
    last = max(m for m, _ in axes)
    for (m, h), panel in axes.items():
        panel.imshow(A_MHNS[m, h], cmap="Blues", norm=scale)
        if m == last:
            panel.set_xticks(range(S), names, rotation=90 if max(map(len, names)) > 1 else 0, fontsize=7, **LITERAL)
        if h == 0:
            panel.set_yticks(range(N), names[S - N :], fontsize=7, **LITERAL)
    _bar(drawing, cm.ScalarMappable(scale, "Blues"), list(axes.values()), "attention weight")
    shown = f", the last {S} of {len(tokens)} tokens" if S < len(tokens) else ""
    drawing.suptitle(f"attention, query (row) by key (column){shown}{cut}", fontsize=11)
    write(drawing, path)

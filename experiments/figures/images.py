"""Figures of images: predicted classes, predicted hidden patches, attention maps."""

import pathlib
import textwrap
from collections.abc import Sequence

import numpy as np
from matplotlib import cm, colors, figure

from experiments.figures import plots

HIDDEN = colors.to_rgb("#7f8fa6")  # bluish, so that it differs from every pixel of a grey image
MOST_IMAGES, MOST_PREDICTIONS = 8, 40  # images drawn


def predictions(
    path: plots.Path,
    *,
    image_BYXZ: np.ndarray,
    label_B: np.ndarray,
    predicted_B: np.ndarray,
    probability_B: np.ndarray,
    classes: Sequence[str],
    title: str,
) -> pathlib.Path:
    """Draw the first 40 images (raw pixels, Z is 1 or 3) with predicted class and its probability, red if wrong."""
    B = min(len(image_BYXZ), MOST_PREDICTIONS)
    columns, rows = min(B, 8), -(-B // 8)
    drawing, grid = plots.canvas(max(1.35 * columns, 5.4), 1.65 * rows + 0.6, rows, columns)
    for panel in grid.flat:
        panel.axis("off")
    for b, (panel, image_YX3) in enumerate(zip(grid.flat, colour(image_BYXZ[:B]), strict=False)):
        panel.imshow(image_YX3)
        text = f"{plots.name(classes[predicted_B[b]])}  {100 * probability_B[b]:.0f} %"
        if label_B[b] == predicted_B[b]:
            panel.set_title(f"\n{text}", fontsize=8, color="black", **plots.LITERAL)
        else:
            text += f"\ntrue: {plots.name(classes[label_B[b]])}"
            panel.set_title(text, fontsize=8, color=plots.RED, fontweight="bold", **plots.LITERAL)
    drawing.suptitle(title)
    return plots.write(drawing, path)


def hidden_patches(
    path: plots.Path,
    *,
    image_BYXZ: np.ndarray,
    prediction_BYXZ: np.ndarray,
    hidden_BN: np.ndarray,
    size: int,
    title: str,
) -> pathlib.Path:
    """Draw the first 8 images (Z is 1 or 3) in three rows: input, image with predicted patches, truth.

    `hidden_BN` is True for hidden patches, size x size pixels in reading order. Predictions are pixels
    in the unit of the images, and are clipped to the range of the images.
    """
    image_BYXZ, prediction_BYXZ, hidden_BN = (x[:MOST_IMAGES] for x in (image_BYXZ, prediction_BYXZ, hidden_BN))
    input_BYX3, truth_BYX3 = hide(image_BYXZ, hidden_BN, size=size), colour(image_BYXZ)
    hidden_BYX1 = _repeat_for_pixels(hidden_BN, image_BYXZ, size=size)
    predicted_BYX3 = np.where(hidden_BYX1, colour(prediction_BYXZ, scale=image_BYXZ), truth_BYX3)
    return rows(path, {"input": input_BYX3, "prediction": predicted_BYX3, "truth": truth_BYX3}, title=title)


def rows(path: plots.Path, images: dict[str, np.ndarray], *, title: str) -> pathlib.Path:
    """Draw a row of images for each name. images: name -> (B, Y, X, 3), red, green and blue from 0 to 1."""
    B, Y, X = next(iter(images.values())).shape[:3]
    width = max(1.15 * B + 0.5, 5.4)
    lines = textwrap.fill(title, int(11 * width))
    height = len(images) * 1.15 * Y / X + 0.25 + 0.2 * len(lines.splitlines())
    drawing, panels = plots.canvas(width, height, len(images), B, layout="compressed")
    for row, (name, image_BYX3) in zip(panels, images.items(), strict=True):
        row[0].set_ylabel(name, fontsize=9)
        for panel, image_YX3 in zip(row, image_BYX3, strict=True):
            panel.imshow(image_YX3, interpolation="nearest")
            panel.set(xticks=[], yticks=[])
            panel.spines[:].set(color="#cccccc", linewidth=0.8)
    drawing.suptitle(lines, fontsize=11, **plots.LITERAL)
    return plots.write(drawing, path)


def hide(image_BYXZ: np.ndarray, hidden_BN: np.ndarray, *, size: int) -> np.ndarray:
    """Return the images as image_BYX3, from 0 to 1, with hidden patches (size x size pixels) in the colour HIDDEN."""
    return np.where(_repeat_for_pixels(hidden_BN, image_BYXZ, size=size), HIDDEN, colour(image_BYXZ))


def _repeat_for_pixels(hidden_BN: np.ndarray, image_BYXZ: np.ndarray, *, size: int) -> np.ndarray:
    """Repeat the value of each patch for its size x size pixels. Return (B, Y, X, 1)."""
    B, Y, X, _ = image_BYXZ.shape
    return hidden_BN.reshape(B, Y // size, X // size, 1).repeat(size, axis=1).repeat(size, axis=2)


def colour(image_BYXZ: np.ndarray, *, scale: np.ndarray | None = None) -> np.ndarray:
    """Return image_BYX3: red, green and blue, from 0 (the smallest value of `scale`) to 1 (the largest).

    scale: an array; None: the images themselves. Values outside its range are clipped. Images without exactly three
    channels become grey, by their mean.
    """
    scale = image_BYXZ if scale is None else scale
    low, high = float(scale.min()), float(scale.max())
    scaled_BYXZ = np.clip((image_BYXZ.astype(np.float64) - low) / max(high - low, 1e-12), 0, 1)
    colour_BYXZ = scaled_BYXZ if image_BYXZ.shape[-1] == 3 else scaled_BYXZ.mean(-1, keepdims=True)
    return np.broadcast_to(colour_BYXZ, (*image_BYXZ.shape[:-1], 3))


def attention_maps(
    path: plots.Path, *, image_YXZ: np.ndarray, A_MHNS: np.ndarray, grid: tuple[int, int], class_token: bool
) -> pathlib.Path:
    """Draw an image next to the attention weights of each head over its patches (rows and columns: `grid`), as a tint.

    The weights are those of the class token, which comes before the patches, or without one the mean over queries. At
    most plots.MOST_LAYERS layers and MOST_HEADS heads are drawn; if there are more, the title says so.
    """
    A_MHS = A_MHNS[:, :, 0, 1:] if class_token else A_MHNS.mean(2)
    Y, X = image_YXZ.shape[:2]
    drawing = figure.Figure(layout="constrained")
    axes, cut = plots.heads(drawing, A_MHNS, height=1.35 * Y / X, width=1.35, before="")
    image_YX3, extent = colour(image_YXZ[None])[0], (-0.5, X - 0.5, Y - 0.5, -0.5)
    original = drawing.add_subplot(axes[0, 0].get_gridspec()[:, 0])
    original.imshow(image_YX3)
    original.set_title("image", fontsize=9)
    original.set_anchor("N")
    original.axis("off")
    scale = colors.Normalize(0, max(float(A_MHS.max()), 1e-12))
    ends = [colors.to_rgba(plots.ORANGE, alpha) for alpha in (0, 1)]
    tint = colors.LinearSegmentedColormap.from_list("tint", ends)
    for (m, h), panel in axes.items():
        panel.imshow((1.5 + image_YX3) / 2.5)  # paler, so that the tint shows everywhere
        panel.imshow(A_MHS[m, h].reshape(grid), cmap=tint, norm=scale, extent=extent)
    plots.bar(drawing, cm.ScalarMappable(scale, tint), list(axes.values()), "attention weight")
    queries = "the class token attends" if class_token else "tokens attend, on average"
    drawing.suptitle(f"where {queries}{cut}", fontsize=11)
    return plots.write(drawing, path)

"""What image-to-image prediction shows: what the model saw, what it made of it, and what stood there."""

import os
import textwrap

import numpy as np
from matplotlib import colors, figure

from experiments.figures import plots

HIDDEN = colors.to_rgb("#7f8fa6")  # a grey that leans to blue, which no grey image has
MOST_IMAGES = 8


def hidden_patches(
    path: str | os.PathLike,
    *,
    image_BYXZ: np.ndarray,
    prediction_BYXZ: np.ndarray,
    hidden_BN: np.ndarray,
    size: int,
    title: str,
) -> None:
    """The first 8 images in three rows: input, prediction in the place of the hidden patches, truth.

    Both arrays hold pixels on the scale of the images, Z is 1 or 3; `hidden_BN` says which of the patches of size x
    size pixels, in reading order, are hidden. Predictions end at the darkest and the brightest pixel of the images.
    """
    image_BYXZ, prediction_BYXZ, hidden_BN = (x[:MOST_IMAGES] for x in (image_BYXZ, prediction_BYXZ, hidden_BN))
    B, Y, X, _ = image_BYXZ.shape
    hidden_BYX1 = _of_pixels(hidden_BN, Y=Y, X=X, size=size)
    truth_BYX3, predicted_BYX3 = (_colours(x, scale=image_BYXZ) for x in (image_BYXZ, prediction_BYXZ))
    shown = {
        "input": seen(image_BYXZ, hidden_BN, size=size),
        "prediction": np.where(hidden_BYX1, predicted_BYX3, truth_BYX3),
        "truth": truth_BYX3,
    }
    width = max(1.15 * B + 0.5, 5.4)
    words = textwrap.fill(title, int(11 * width))
    height = 3 * 1.15 * Y / X + 0.25 + 0.2 * len(words.splitlines())
    drawing = figure.Figure(figsize=(width, height), layout="compressed")
    panels = drawing.subplots(3, B, squeeze=False)
    for row, (name, image_BYX3) in zip(panels, shown.items(), strict=True):
        row[0].set_ylabel(name, fontsize=10)
        for panel, image_YX3 in zip(row, image_BYX3, strict=True):
            panel.imshow(image_YX3, interpolation="nearest")
            panel.set(xticks=[], yticks=[])
            panel.spines[:].set(color="#cccccc", linewidth=0.8)
    drawing.suptitle(words, fontsize=11, **plots.LITERAL)
    plots.write(drawing, path)


def seen(image_BYXZ: np.ndarray, hidden_BN: np.ndarray, *, size: int) -> np.ndarray:
    """The images in colours from 0 to 1, image_BYX3, with the hidden patches grey."""
    hidden_BYX1 = _of_pixels(hidden_BN, Y=image_BYXZ.shape[1], X=image_BYXZ.shape[2], size=size)
    return np.where(hidden_BYX1, HIDDEN, _colours(image_BYXZ, scale=image_BYXZ))


def _of_pixels(hidden_BN: np.ndarray, *, Y: int, X: int, size: int) -> np.ndarray:
    """What is said of patches, said of each of their pixels."""
    hidden_BYX = hidden_BN.reshape(len(hidden_BN), Y // size, X // size).repeat(size, axis=1).repeat(size, axis=2)
    return hidden_BYX[..., None]


def _colours(image_BYXZ: np.ndarray, *, scale: np.ndarray) -> np.ndarray:
    """Red, green and blue from 0, the darkest pixel of `scale`, to 1, its brightest; one channel becomes grey."""
    low, high = float(scale.min()), float(scale.max())
    scaled_BYXZ = np.clip((image_BYXZ.astype(np.float64) - low) / max(high - low, 1e-12), 0, 1)
    colour_BYXZ = scaled_BYXZ if image_BYXZ.shape[-1] == 3 else scaled_BYXZ.mean(-1, keepdims=True)
    return np.broadcast_to(colour_BYXZ, (*image_BYXZ.shape[:-1], 3))

"""Figures of attention as a convolution: kernels, weights of each head, and convolved images."""

import pathlib
from typing import Any

import numpy as np
from matplotlib import colors, figure

from experiments.figures import images as image_figures, plots


def kernels_and_weights(
    path: plots.Path,
    *,
    kernel_HD: np.ndarray,
    learned_HD: np.ndarray,
    offsets: np.ndarray,
    learned_HNS: np.ndarray,
    constructed_HNS: np.ndarray,
    difference: float,
) -> pathlib.Path:
    """Draw the true and the learned kernel by feature and offset; below, the weights A of at most 8 heads.

    In constructed_HNS, head h of query n attends only to the key s = n + offsets[h]. difference: the largest absolute
    difference between attention with the constructed weights and numpy.convolve.
    """
    H, drawn = len(offsets), min(len(offsets), plots.MOST_HEADS)
    cut = f" ({drawn} of {H} heads)" if drawn < H else ""
    drawing = figure.Figure(figsize=(max(1.5 * drawn, 6.5) + 1.2, 7.2), layout="constrained")
    above, middle, below = drawing.subfigures(3, 1, height_ratios=(1.15, 1, 1))
    error_HD = learned_HD - kernel_HD
    error = f"difference: at most {abs(error_HD).max():.1e}"
    kernels = {"true kernel": kernel_HD.T, "learned": learned_HD.T, error: error_HD.T}
    largest = max(float(abs(kernel_DH).max()) for kernel_DH in kernels.values())
    style = {"cmap": "RdBu_r", "norm": colors.Normalize(-largest, largest), "aspect": "auto"}  # white at zero
    ticks = range(0, H, -(-H // 9))  # at most 9, which do not touch
    for panel in _draw_matrices(above, kernels, ("feature", "offset s - n"), style):
        panel.set_xticks(ticks, [f"{offsets[h]:+d}" if offsets[h] else "0" for h in ticks], fontsize=7)
    above.suptitle("attention by position alone imitates a depthwise convolution", fontsize=11)
    weights = {"cmap": "Blues", "vmin": 0, "vmax": 1}
    learned = {f"head {h + 1}": learned_HNS[h] for h in range(drawn)}
    _draw_matrices(middle, learned, ("query n", "key s"), weights, label="weight")
    middle.suptitle(f"learned weights A{cut}: heads may mix offsets", fontsize=10)
    constructed = {f"s = n{offsets[h]:+d}" if offsets[h] else "s = n": constructed_HNS[h] for h in range(drawn)}
    _draw_matrices(below, constructed, ("query n", "key s"), weights, label="weight")
    below.suptitle(f"constructed weights A{cut}: within {difference:.1e} of numpy.convolve", fontsize=10)
    return plots.write(drawing, path)


def _draw_matrices(
    part: figure.SubFigure, matrices: dict[str, np.ndarray], axes: tuple[str, str], style: dict[str, Any], label=""
) -> np.ndarray:
    """Draw matrices side by side with their names and one colour bar. Return their axes, one for each matrix.

    axes: the labels of rows and columns. style: arguments of `imshow`. label: of the colour bar.
    """
    panels = part.subplots(1, len(matrices), squeeze=False)[0]
    for panel, (name, matrix) in zip(panels, matrices.items(), strict=True):
        image = panel.imshow(matrix, **style)
        panel.set(xticks=[], yticks=[])
        panel.set_title(name, fontsize=9)
        panel.set_xlabel(axes[1], fontsize=8)
    panels[0].set_ylabel(axes[0], fontsize=8)
    part.colorbar(image, ax=list(panels), label=label)
    return panels


def convolved_images(path: plots.Path, tokens: dict[str, np.ndarray], *, Z: int, title: str) -> pathlib.Path:
    """Draw a row of the first 8 inputs as grey images for each name, all but "input" on one scale.

    tokens: name -> x_BND. Token n is column n of an image: D = Y * Z values, of which the mean over Z is drawn.
    """
    grey = {}
    for name, x_BND in tokens.items():
        x_BDN = np.asarray(x_BND[: image_figures.MOST_IMAGES]).swapaxes(1, 2)
        grey[name] = x_BDN.reshape(len(x_BDN), -1, Z, x_BDN.shape[2]).mean(2)[..., None]
    outputs = np.concatenate([grey[name] for name in grey if name != "input"])
    scales = {name: image if name == "input" else outputs for name, image in grey.items()}
    images = {name: image_figures.colour(image, scale=scales[name]) for name, image in grey.items()}
    return image_figures.rows(path, images, title=title)

"""Figures of attention as a convolution: kernels, and weights of each head."""

import os
import pathlib
from typing import Any

import numpy as np
from matplotlib import colors, figure

from experiments.figures import plots


def kernels_and_weights(
    path: str | os.PathLike,
    *,
    kernel_HD: np.ndarray,
    learned_HD: np.ndarray,
    offsets: np.ndarray,
    learned_HNS: np.ndarray,
    constructed_HNS: np.ndarray,
    difference: float,
) -> pathlib.Path:
    """Draw the true and the learned kernel of every feature, per offset; below, the A of every head, twice.

    `difference` is the largest one between the constructed attention and numpy's convolution. At most 8 heads.
    """
    H, drawn = len(offsets), min(len(offsets), plots.MOST_HEADS)
    cut = f" ({drawn} of {H} heads)" if drawn < H else ""
    drawing = figure.Figure(figsize=(max(1.5 * drawn, 6.5) + 1.2, 7.2), layout="constrained")
    above, middle, below = drawing.subfigures(3, 1, height_ratios=(1.15, 1, 1))
    error_HD = learned_HD - kernel_HD
    kernels = {
        "true kernel": kernel_HD,
        "learned": learned_HD,
        f"difference: at most {abs(error_HD).max():.1e}": error_HD,
    }
    largest = max(float(abs(kernel_HD).max()) for kernel_HD in kernels.values())
    look = {"cmap": "RdBu_r", "norm": colors.Normalize(-largest, largest), "aspect": "auto"}  # white at zero
    panels = _panels(
        above, {name: kernel_HD.T for name, kernel_HD in kernels.items()}, ("feature", "offset s - n"), look
    )
    for panel in panels:
        named = range(0, H, -(-H // 9))  # more numbers would touch
        panel.set_xticks(named, [f"{offsets[h]:+d}" if offsets[h] else "0" for h in named], fontsize=7)
    above.suptitle("attention by position alone imitates a depthwise convolution", fontsize=11)
    places = [f"s = n{o:+d}" if o else "s = n" for o in offsets]
    for part, A_HNS, names, title in (
        (middle, learned_HNS, [f"head {h + 1}" for h in range(H)], f"learned weights A{cut}: heads may mix offsets"),
        (below, constructed_HNS, places, f"constructed weights A{cut}: within {difference:.1e} of numpy.convolve"),
    ):
        shown = dict(zip(names[:drawn], A_HNS, strict=False))
        _panels(part, shown, ("query n", "key s"), {"cmap": "Blues", "vmin": 0, "vmax": 1}, label="weight")
        part.suptitle(title, fontsize=10)
    return plots.write(drawing, path)


def _panels(
    part: figure.SubFigure, images: dict[str, np.ndarray], axes: tuple[str, str], look: dict[str, Any], label: str = ""
) -> np.ndarray:
    """Draw the matrices next to one another, each with its name. axes: the names of rows and columns."""
    panels = part.subplots(1, len(images), squeeze=False)[0]
    for panel, (name, image) in zip(panels, images.items(), strict=True):
        drawn = panel.imshow(image, **look)
        panel.set(xticks=[], yticks=[])
        panel.set_title(name, fontsize=9)
        panel.set_xlabel(axes[1], fontsize=8)
    panels[0].set_ylabel(axes[0], fontsize=8)
    part.colorbar(drawn, ax=list(panels), label=label)
    return panels

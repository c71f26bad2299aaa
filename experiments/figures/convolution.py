"""What attention as a convolution looks like: kernels, weights of each head, and images."""

import os

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
) -> None:
    """The true kernel of every feature beside what was learned, per offset; below, the A of every head, twice.

    `difference` is the largest one between the constructed attention and numpy's convolution. At most 8 heads.
    """
    H, drawn = len(offsets), min(len(offsets), plots.MOST_HEADS)
    drawing = figure.Figure(figsize=(max(1.5 * drawn, 6.5) + 1.2, 7.2), layout="constrained")
    above, middle, below = drawing.subfigures(3, 1, height_ratios=(1.15, 1, 1))
    _kernels(above, {"true kernel": kernel_HD, "learned": learned_HD, "difference": learned_HD - kernel_HD}, offsets)
    cut = f" ({drawn} of {H} heads)" if drawn < H else ""
    _weights(
        middle,
        learned_HNS[:drawn],
        [f"head {h + 1}" for h in range(drawn)],
        f"learned weights A{cut}: heads may mix offsets",
    )
    title = f"constructed weights A{cut}: within {difference:.1e} of numpy.convolve"
    _weights(below, constructed_HNS[:drawn], [f"s = n{o:+d}" if o else "s = n" for o in offsets[:drawn]], title)
    plots.write(drawing, path)


def _kernels(part: figure.SubFigure, kernels: dict[str, np.ndarray], offsets: np.ndarray) -> None:
    """Feature by offset, all on one scale that is white at zero."""
    largest = max(float(np.abs(kernel_HD).max()) for kernel_HD in kernels.values())
    scale = colors.Normalize(-largest, largest)
    panels = part.subplots(1, len(kernels), squeeze=False)[0]
    for panel, (name, kernel_HD) in zip(panels, kernels.items(), strict=True):
        drawn = panel.imshow(kernel_HD.T, cmap="RdBu_r", norm=scale, aspect="auto")
        words = f"{name}: at most {np.abs(kernel_HD).max():.1e}" if name == "difference" else name
        panel.set_title(words, fontsize=9)
        named = range(0, len(offsets), -(-len(offsets) // 9))  # more numbers would touch
        panel.set_xticks(named, [f"{offsets[h]:+d}" if offsets[h] else "0" for h in named], fontsize=7)
        panel.set_yticks([])
        panel.set_xlabel("offset s - n", fontsize=8)
    panels[0].set_ylabel("feature (pixel row)", fontsize=8)
    part.colorbar(drawn, ax=list(panels))
    part.suptitle("attention by position alone imitates a depthwise convolution", fontsize=11)


def _weights(part: figure.SubFigure, A_HNS: np.ndarray, names: list[str], title: str) -> None:
    """Query (row) by key (column) for every head."""
    panels = part.subplots(1, len(A_HNS), squeeze=False)[0]
    for panel, A_NS, name in zip(panels, A_HNS, names, strict=True):
        drawn = panel.imshow(A_NS, cmap="Blues", vmin=0, vmax=1)
        panel.set(xticks=[], yticks=[])
        panel.set_title(name, fontsize=9)
        panel.set_xlabel("key s", fontsize=8)
    panels[0].set_ylabel("query n", fontsize=8)
    part.colorbar(drawn, ax=list(panels), label="weight")
    part.suptitle(title, fontsize=10)


def rows_of_images(path: str | os.PathLike, images: dict[str, np.ndarray], *, title: str) -> None:
    """A row of pictures, (B, Y, X), for each name; the first row on its own scale of grey, the others on one."""
    (first, *others), B = images, min(len(x) for x in images.values())
    together = np.concatenate([np.ravel(images[name]) for name in others])
    scales = {name: (together.min(), together.max()) for name in others}
    scales[first] = images[first].min(), images[first].max()
    drawing = figure.Figure(figsize=(max(1.1 * B + 1, 5.4), 1.15 * len(images) + 0.7), layout="compressed")
    for row, (name, picture_BYX) in zip(drawing.subplots(len(images), B, squeeze=False), images.items(), strict=True):
        row[0].set_ylabel(name, fontsize=9)
        for panel, picture_YX in zip(row, picture_BYX, strict=True):
            panel.imshow(picture_YX, cmap="gray", vmin=scales[name][0], vmax=scales[name][1])
            panel.set(xticks=[], yticks=[])
    drawing.suptitle(title, fontsize=11, **plots.LITERAL)
    plots.write(drawing, path)

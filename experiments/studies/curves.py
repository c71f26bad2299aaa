"""Figures of the metric: its course over training with bands over seeds, and the paired differences at the end."""

import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import figure, lines, ticker

from experiments.engine import figures
from experiments.studies import runs as loaded
from experiments.studies import statistics, styles

APART = 0.008  # of a panel's height: lines that are closer lie on one another
SMOOTHED = 40  # windows of the mean of training losses, which are of a single batch each


def course(
    path: pathlib.Path, *, found: statistics.Condition, runs: Sequence[loaded.Run], style: Mapping[str, styles.Style]
) -> list[list[str]]:
    """Training loss, the metric on held-out data, and its paired difference to the reference: mean and min to max.

    Returns the arms whose lines lie on one another.
    """
    drawing = figure.Figure(figsize=(10, 7.2), layout="constrained")
    grid = drawing.add_gridspec(2, 2)
    left, right, below = (drawing.add_subplot(place) for place in (grid[0, 0], grid[0, 1], grid[1, :]))
    by_arm = {arm: {run.seed: run for run in runs if run.arm == arm} for arm in style}
    by_arm = {arm: seeds for arm, seeds in by_arm.items() if seeds}
    late: list[float] = []
    for arm, seeds in by_arm.items():
        look = {"style": style[arm], "many": len(by_arm) > 6}
        step_I, loss_RI = loaded.stack(loaded.curve(run, "train/loss") for run in seeds.values())
        band(left, step_I, _smooth(loss_RI), **look)
        band(right, *loaded.stack(loaded.curve(run, found.metric) for run in seeds.values()), **look)
        if arm != found.reference:
            step_I, difference_RI = _paired(seeds, by_arm.get(found.reference, {}), found.metric)
            band(below, step_I, difference_RI, **look)
            late += difference_RI[:, 2 * step_I >= max(step_I, default=0)].ravel().tolist()
    if found.threshold:
        right.axhline(found.threshold, color="grey", lw=0.8, ls=(0, (1, 3)))
    below.axhline(0, color=style[found.reference].colour, lw=style[found.reference].width, zorder=2)
    _zoom(below, late)
    metric = styles.label(found.metric)
    titles = "training loss", f"{metric}, held out", f"{metric}, minus the reference's of the same seed"
    for panel, title in zip((left, right, below), titles, strict=True):
        panel.set_title(title, fontsize=10, **figures.LITERAL)
        finish(panel, logarithmic=panel is left or not found.more_is_better)
    legend(drawing, [style[arm] for arm in by_arm])
    figures.write(drawing, path)
    return coinciding((left, right))


def coinciding(panels: Iterable[Any]) -> list[list[str]]:
    """Groups of arms, by their labels, whose lines cannot be told apart for most of the steps, in one panel or more."""
    found: list[list[str]] = []
    for panel in panels:
        heights = {line.get_gid(): _heights(panel, line) for line in panel.lines if line.get_gid()}
        groups: list[list[str]] = []
        for name in heights:
            near = [group for group in groups if all(_near(heights[name], heights[other]) for other in group)]
            groups = [[*group, name] if group in near[:1] else group for group in groups] + ([] if near else [[name]])
        found += [group for group in groups if len(group) > 1 and group not in found]
    return [group for group in found if not any(set(group) < set(other) for other in found)]


def _near(a_I: np.ndarray, b_I: np.ndarray) -> bool:
    return a_I.shape == b_I.shape and bool(np.mean(np.abs(a_I - b_I) < APART) > 0.5)


def _heights(panel: Any, line: Any) -> np.ndarray:
    """Where the line's points stand: 0 at the bottom of the panel, 1 at its top, at each of I steps."""
    panel.get_ylim()  # settles the limits
    return (panel.transScale + panel.transLimits).transform(line.get_xydata())[:, 1]


def _paired(
    arm: Mapping[int, loaded.Run], reference: Mapping[int, loaded.Run], metric: str
) -> tuple[np.ndarray, np.ndarray]:
    """The I steps at which both were evaluated, and arm minus reference of the R seeds that both have."""
    seeds = [seed for seed in arm if seed in reference]
    step_I, value_RI = loaded.stack(loaded.curve(side[seed], metric) for side in (arm, reference) for seed in seeds)
    return step_I, value_RI[: len(seeds)] - value_RI[len(seeds) :]


def _zoom(panel: Any, late: Sequence[float]) -> None:
    """Where early differences are so large that those of the second half of training could not be seen: cut them."""
    low, high = min([0.0, *late]), max([0.0, *late])
    bottom, top = panel.get_ylim()
    if top - bottom > 5 * (high - low) > 0:
        panel.set_ylim(low - 0.6 * (high - low), high + 0.6 * (high - low))


def _smooth(value_RI: np.ndarray) -> np.ndarray:
    """Each row's mean over a centred window, a fortieth of it wide; few values are left as they are."""
    width = value_RI.shape[1] // SMOOTHED
    if width < 2 or not len(value_RI):
        return value_RI
    kernel = np.ones(2 * (width // 2) + 1)
    many_I = np.convolve(np.ones(value_RI.shape[1]), kernel, "same")
    return np.stack([np.convolve(row_I, kernel, "same") / many_I for row_I in value_RI])


def band(panel: Any, step_I: np.ndarray, value_RI: np.ndarray, style: styles.Style, *, many: bool) -> None:
    """The mean over R seeds as a line, smallest to largest as a band, paler where there are many."""
    if value_RI.size == 0:
        return
    below = 2 if style.line == "-" else 3
    every = max(2, len(step_I) // 8) if len(step_I) > 2 else 1
    marks = (style.turn % every, every)
    panel.plot(step_I, value_RI.mean(0), **_drawn(style), markevery=marks, zorder=below, gid=style.label)
    if len(value_RI) > 1:
        alpha = 0.10 if many else 0.18
        panel.fill_between(step_I, value_RI.min(0), value_RI.max(0), color=style.colour, alpha=alpha, lw=0)


def _drawn(style: styles.Style) -> dict[str, Any]:
    return {"color": style.colour, "ls": style.line, "lw": style.width, "marker": style.marker, "ms": 4}


def finish(panel: Any, *, logarithmic: bool) -> None:
    """Grid, whole steps, and, of losses, a logarithmic scale where positive values span more than a decade."""
    value = np.concatenate([line.get_ydata() for line in panel.lines] or [[]]).astype(float)
    if logarithmic and len(value) and value.min() > 0 and value.max() > 10 * value.min():
        panel.set_yscale("log")
    panel.grid(alpha=0.3)
    panel.set_xlabel("step", fontsize=9)
    panel.tick_params(labelsize=8)
    panel.xaxis.set_major_locator(ticker.MaxNLocator(integer=True, nbins=6))


def legend(drawing: figure.Figure, shown: Sequence[styles.Style]) -> None:
    """The arms by their colour, line and marker, below all panels."""
    handles = [lines.Line2D([], [], **_drawn(style)) for style in shown]
    styles.legend(drawing, handles, [style.label for style in shown])


def differences(path: pathlib.Path, *, found: statistics.Condition, style: Mapping[str, styles.Style]) -> None:
    """A row for each arm: the difference to the reference of each seed, their mean, and the simultaneous interval."""
    shown = [one for one in found.arms if one.comparison and one.comparison.differences]
    drawing = figure.Figure(figsize=(8.5, 1.5 + 0.42 * len(shown)), layout="constrained")
    panel = drawing.add_subplot()
    for row, one in enumerate(shown):
        look, comparison = style[one.name], one.comparison
        value_R = list(comparison.differences.values())
        if comparison.interval:
            panel.plot(comparison.interval, [row, row], color=look.colour, lw=6, alpha=0.35, solid_capstyle="butt")
        panel.plot(comparison.spread.mean, row, ls="", marker="|", ms=18, mew=2.5, color=look.colour)
        panel.plot(value_R, np.full(len(value_R), row), ls="", marker="o", ms=4.5, mfc="white", color=look.colour)
    panel.axvline(0, color=style[found.reference].colour, lw=1.5)
    names = [f"{style[one.name].label} (n = {len(one.comparison.differences)})" for one in shown]
    panel.set_yticks(range(len(shown)), names, **figures.LITERAL)
    panel.set_ylim(len(shown) - 0.4, -0.6)
    panel.grid(axis="x", alpha=0.3)
    side = "right" if found.more_is_better else "left"
    names = styles.label(found.metric), styles.label(found.reference)
    words = f"{names[0]}, arm minus {names[1]} ({side} of the line: better than the reference)"
    panel.set_xlabel(words, fontsize=9, **figures.LITERAL)
    figures.write(drawing, path)

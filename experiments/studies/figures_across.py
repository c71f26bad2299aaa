"""Figures over several conditions, each with a caption: performance profiles, and the loss against compute."""

import pathlib
from collections.abc import Iterable

import numpy as np
from matplotlib import axes, figure, ticker

from experiments.studies import figures, overall, scaling, study as studies, styles

Numbers = overall.Overall | scaling.Family


def draw(folder: pathlib.Path, study: studies.Study, across: Iterable[tuple[str, Numbers]]) -> list[figures.Figure]:
    """Write a figure for each kind with its numbers."""
    drawings = [(kind, draw_numbers(numbers, styles.choose_styles(study))) for kind, numbers in across]
    return [figures.write(folder, *(drawing[0], kind, "", drawing[1])) for kind, drawing in drawings if drawing]


def draw_numbers(numbers: Numbers, style: figures.Styles) -> tuple[figure.Figure, str] | None:
    """Return the figure of these numbers and its caption; None if no arm has a profile."""
    arms = numbers.laws if isinstance(numbers, scaling.Family) else [arm for arm in numbers.arms if arm.profile]
    if not arms:
        return None
    drawing = figure.Figure(figsize=(8.5, 4.6), layout="constrained")
    panel = drawing.add_subplot()
    caption = (draw_laws if isinstance(numbers, scaling.Family) else draw_profile)(panel, numbers, style)
    panel.grid(alpha=0.3, which="both")
    panel.tick_params(labelsize=8, which="both")
    styles.draw_legend(drawing, {arm.name: style[arm.name] for arm in arms})
    return drawing, caption


def draw_profile(panel: axes.Axes, measures: overall.Overall, style: figures.Styles) -> str:
    """Draw the share of an arm's runs that gained at least x, in all conditions, with its bootstrap band."""
    every = 100 * np.concatenate([np.array(arm.profile)[:, 0] for arm in measures.arms])
    ends, middle = [every.min() - 0.05 * np.ptp(every), every.max() + 0.05 * np.ptp(every)], np.median(np.abs(every))
    for arm in measures.arms:
        gain_J, *of_J = np.array(arm.profile).T
        x_J = [ends[0], *(100 * gain_J), ends[1]]
        share_J, low_J, high_J = ([1.0, *one_J, 0.0] for one_J in of_J)
        panel.plot(x_J, share_J, **style[arm.name].look, drawstyle="steps-pre", markevery=slice(1, -1))
        panel.fill_between(x_J, low_J, high_J, step="pre", color=style[arm.name].colour, alpha=0.13, lw=0)
    panel.axvline(0, color=style[measures.reference].colour, lw=1.5)
    panel.axhline(0.5, color="grey", lw=0.8, ls=(0, (1, 3)))
    far = bool(np.abs(every).max() > 20 * middle > 0)
    if far:  # an arm far away would press the others together
        panel.set_xscale("symlog", linthresh=middle)
        panel.xaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
    text = f"better than {styles.shorten(measures.reference)} of the same seed by at least, % of its gain by training"
    panel.set_xlabel(text, fontsize=9)
    panel.set_ylabel("share of runs", fontsize=9)
    return (
        f"Performance profiles over {len(measures.scale)} conditions: the share of an arm's runs that are better than "
        f"{measures.reference} of the same seed by at least x; a curve farther to the right is better. It crosses the "
        f"dotted line at its median. Bands are of 95 % of bootstrap samples, at each x alone."
    ) + f" Beyond {middle:.2g} either way x is logarithmic." * far


def draw_laws(panel: axes.Axes, family: scaling.Family, style: figures.Styles) -> str:
    """Draw the loss of each seed, their means and the law of each arm, both axes logarithmic."""
    for law in family.laws:
        look = style[law.name].look
        x_J = np.geomspace(min(law.flops), max(law.flops), 100)
        panel.plot(x_J, law.E + law.a * (x_J / family.middle) ** -law.b, **(look | {"marker": ""}), zorder=2)
        for flops, values in zip(law.flops, map(list, map(dict.values, law.values)), strict=True):
            panel.plot([flops] * len(values), values, **(look | {"ls": "", "mfc": "none", "mew": 0.7}), alpha=0.6)
            panel.plot(flops, np.mean(values), **(look | {"ls": "", "ms": 5}), zorder=3)
    panel.axvline(family.middle, color="grey", lw=0.8, ls=(0, (1, 3)))
    panel.set(xscale="log", yscale="log")
    panel.xaxis.set_minor_locator(ticker.LogLocator(subs=(2, 5)))
    panel.yaxis.set_minor_locator(ticker.MaxNLocator(6))  # losses span less than a decade
    for axis, form in ((panel.yaxis, "%g"), (panel.xaxis, "%.0e")):  # numbers, where matplotlib would set formulas
        axis.set_major_formatter(ticker.FormatStrFormatter(form))
        axis.set_minor_formatter(ticker.FormatStrFormatter(form))
    panel.set_xlabel("FLOPs of a training run", fontsize=9)
    panel.set_ylabel(styles.shorten(family.metric), fontsize=9)
    return (
        f"How {family.metric} at the end of training falls with the FLOPs of a run, in {len(family.conditions)} sizes. "
        f"Open marks are seeds, full ones their means, lines the fitted laws. The dotted line is C0, where the table "
        f"compares the arms."
    )

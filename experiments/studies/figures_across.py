"""Figures over several conditions, each with a caption: performance profiles, and the loss against compute."""

from collections.abc import Mapping

import numpy as np
from matplotlib import figure, ticker

from experiments.figures import plots
from experiments.studies import overall, scaling, styles

Styles = Mapping[str, styles.Style]  # arm -> how it looks


def drawn(numbers: overall.Overall | scaling.Family, style: Styles) -> tuple[figure.Figure, str] | None:
    """The figure of these numbers; None where nothing is to be seen."""
    return compute(numbers, style) if isinstance(numbers, scaling.Family) else profile(numbers, style)


def profile(measures: overall.Overall, style: Styles) -> tuple[figure.Figure, str] | None:
    """The share of an arm's runs that gained at least x, in all conditions, with its bootstrap band."""
    arms = [arm for arm in measures.arms if arm.gain]
    if not arms:
        return None
    drawing = figure.Figure(figsize=(8.5, 4.4), layout="constrained")
    panel = drawing.add_subplot()
    every = 100 * np.abs(np.concatenate([arm.gain for arm in arms]))
    least, most = (100 * pick(x for arm in arms for x in arm.gain) for pick in (min, max))
    margin = 0.05 * (most - least) or 1.0
    for arm in arms:
        x_J = [least - margin, *(100 * np.array(arm.gain)), most + margin]
        look = style[arm.name].look | {"marker": "", "drawstyle": "steps-pre"}
        panel.plot(x_J, [1.0, *arm.share, 0.0], **look)
        band = [1.0, *arm.share_low, 0.0], [1.0, *arm.share_high, 0.0]
        panel.fill_between(x_J, *band, step="pre", color=style[arm.name].colour, alpha=0.13, lw=0)
    panel.axvline(0, color=style[measures.reference].colour, lw=1.5)
    panel.axhline(0.5, color="grey", lw=0.8, ls=(0, (1, 3)))
    if every.max() > 20 * np.median(every) > 0:  # one arm, far away, would press all others together
        panel.set_xscale("symlog", linthresh=float(np.median(every)))
        panel.xaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
    name = styles.label(measures.reference)
    text = f"better than {name} of the same seed by at least, % of its gain by training"
    panel.set_xlabel(text, fontsize=9, **plots.LITERAL)
    panel.set_ylabel("share of runs", fontsize=9)
    panel.grid(alpha=0.3)
    panel.tick_params(labelsize=8)
    styles.legend(drawing, {arm.name: style[arm.name] for arm in arms}, marker="")
    caption = (
        f"performance profiles over {len(measures.scale)} conditions: the share of an arm's runs that are better than "
        f"{measures.reference} of the same seed by at least x; a curve farther to the right is better. It crosses the "
        f"dotted line at its median. Bands are of 95 % of bootstrap samples, at each x alone."
    )
    return drawing, caption


def compute(family: scaling.Family, style: Styles) -> tuple[figure.Figure, str]:
    """The loss of each seed, their means and the law of each arm, both axes logarithmic."""
    drawing = figure.Figure(figsize=(8.5, 4.8), layout="constrained")
    panel = drawing.add_subplot()
    for law in family.laws:
        colour, mine = style[law.name].colour, style[law.name]
        x_J = np.geomspace(min(law.flops), max(law.flops), 100)
        y_J = law.E + law.a * (x_J / family.middle) ** -law.b
        panel.plot(x_J, y_J, **(mine.look | {"marker": ""}), zorder=2)
        for flops, values in zip(law.flops, law.values, strict=True):
            dots = {"ls": "", "marker": mine.marker, "color": colour}
            panel.plot(np.full(len(values), flops), [*values.values()], mfc="none", ms=4, mew=0.7, alpha=0.6, **dots)
            panel.plot(flops, np.mean([*values.values()]), ms=5, zorder=3, **dots)
    panel.axvline(family.middle, color="grey", lw=0.8, ls=(0, (1, 3)))
    panel.set(xscale="log", yscale="log")
    panel.yaxis.set_minor_locator(ticker.MaxNLocator(6))  # losses span less than a decade
    panel.yaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
    panel.yaxis.set_minor_formatter(ticker.FormatStrFormatter("%g"))
    panel.set_xlabel("FLOPs of a training run", fontsize=9)
    panel.set_ylabel(styles.label(family.metric), fontsize=9, **plots.LITERAL)
    panel.grid(alpha=0.3, which="both")
    panel.tick_params(labelsize=8, which="both")
    styles.legend(drawing, {law.name: style[law.name] for law in family.laws})
    caption = (
        f"how {family.metric} at the end of training falls with the FLOPs of a run, in {len(family.conditions)} sizes. "
        f"Open marks are seeds, full ones their means, lines the fitted laws. The dotted line is C0, where the table "
        f"compares the arms."
    )
    return drawing, caption

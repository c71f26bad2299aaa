"""All figures of a report, each with a caption that says what is drawn and over how many runs: the metric over
training, against its cost, and its paired differences, symmetry and attention of each layer."""

import pathlib
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib import figure, ticker

from experiments.engine import disk
from experiments.figures import plots as engine
from experiments.studies import (
    attention,
    figures_across,
    overall,
    runs as finished,
    scaling,
    statistics,
    study as studies,
    styles,
    words,
)

SMOOTHED = 40  # windows of the mean of training losses, which are of a single batch each
MOST = 6  # layers shown, evenly spread
THIN = 0.5  # width of a seed's line
BANDS = "Lines are means over seeds, thin ones the seeds, bands from smallest to largest."
ALSO = (".svg", ".pdf")  # beside each PNG


class Figure(NamedTuple):
    """A figure that has been written."""

    file: pathlib.Path  # the PNG
    kind: str  # a key of KINDS, or that of what is across conditions
    condition: str  # "": several
    caption: str


Runs = Mapping[str, list[finished.Run]]  # arm -> its runs, of the arms that have some
Styles = Mapping[str, styles.Style]  # arm -> how it looks
Shown = dict[str, set[str]]  # panel -> the arms in it; '' is a panel without a name
Drawing = tuple[figure.Figure, str, Shown] | None  # with its caption; None where there is nothing to be seen


def draw(
    folder: pathlib.Path,
    study: studies.Study,
    conditions: Sequence[statistics.Condition],
    runs: Sequence[finished.Run],
    across: Iterable[tuple[str, overall.Overall | scaling.Family]] = (),
) -> list[Figure]:
    """Write the figures of each condition into folder/figures, as PNG and ALSO; none where nothing is to be seen.

    across: of several conditions, the kind of a figure and its numbers.
    """
    disk.tidy(disk.folder(folder, "figures"))
    figures, style = [], styles.of(study)
    for condition in conditions:
        whole = {(condition.name, arm.name, seed) for arm in condition.arms for seed in arm.values}
        mine = [run for run in runs if (run.condition, run.arm, run.seed) in whole]
        for kind in KINDS if mine else ():
            if made := drawn(kind, condition, mine, style):
                drawing, caption = made
                caption = f"{condition.name}: {caption}" if len(conditions) > 1 else caption[0].upper() + caption[1:]
                figures.append(written(folder, drawing, kind, condition.name, caption))
    for kind, numbers in across:
        if made := figures_across.drawn(numbers, style):
            figures.append(written(folder, made[0], kind, "", made[1]))
    return figures


def written(folder: pathlib.Path, drawing: figure.Figure, kind: str, condition: str, caption: str) -> Figure:
    """The figure, as PNG and ALSO."""
    file = folder / "figures" / f"{'_'.join(filter(None, (kind, condition)))}.png"
    engine.write(drawing, file)
    drawing.set_layout_engine("none")  # all is where it was in the PNG
    for end in ALSO:
        engine.write(drawing, file.with_suffix(end))
    return Figure(file, kind, condition, caption)


def drawn(
    kind: str, condition: statistics.Condition, runs: Iterable[finished.Run], style: Styles
) -> tuple[figure.Figure, str] | None:
    """A figure of KINDS, with its arms in the order of their styles, and its caption, which names those left out."""
    groups = {arm: [run for run in runs if run.arm == arm] for arm in style}
    made = KINDS[kind](condition, {arm: group for arm, group in groups.items() if group}, style)
    if made is None:
        return None
    drawing, caption, shown = made
    without: dict[tuple[str, ...], list[str]] = {}  # arms left out -> of these panels
    for panel, arms in shown.items():
        without.setdefault(tuple(arm for arm in style if arm not in arms), []).append(panel)
    for arms, panels in without.items():
        where = "" if len(without) == 1 else f" in {words.joined([words.quoted(panel) for panel in panels])}"
        caption += f" Not drawn{where}, for want of numbers: {words.quoted(*arms)}." if arms else ""
    return drawing, caption


def course(condition: statistics.Condition, runs: Runs, style: Styles) -> Drawing:
    """Training loss, the metric on held-out data, and its paired difference to the reference: mean and min to max."""
    drawing = figure.Figure(figsize=(10, 7.2), layout="constrained")
    grid = drawing.add_gridspec(2, 2)
    left, right, below = (drawing.add_subplot(place) for place in (grid[0, 0], grid[0, 1], grid[1, :]))
    metric = styles.label(condition.metric)
    titles = "training loss", f"{metric}, held out", f"{metric}, minus the reference's of the same seed"
    base = {run.seed: run.curve(condition.metric) for run in runs.get(condition.reference, [])}
    training, held_out, paired = {}, {}, {}  # the curves of each panel
    for arm, mine in runs.items():
        step_I, loss_RI = finished.stack([run.curve("train/loss") for run in mine])
        width = loss_RI.shape[1] // SMOOTHED  # few values are left as they are
        smooth_R = [engine.smooth(loss_I, 2 * (width // 2) + 1) for loss_I in loss_RI]
        training[arm] = step_I, np.reshape(smooth_R, loss_RI.shape)
        held_out[arm] = finished.stack([run.curve(condition.metric) for run in mine])
        if arm != condition.reference:
            pairs = [(run.curve(condition.metric), base[run.seed]) for run in mine if run.seed in base]
            step_I, value_RI = finished.stack([curve for side in zip(*pairs, strict=True) for curve in side])
            paired[arm] = step_I, value_RI[: len(pairs)] - value_RI[len(pairs) :]
    curves = zip(titles, (left, right, below), (training, held_out, paired), strict=True)
    shown = {title: bands(panel, of, style) for title, panel, of in curves}
    shown[titles[2]].add(condition.reference)
    late = [x for step_I, x_RI in paired.values() for x in x_RI[:, 2 * step_I >= max(step_I, default=0)].ravel()]
    if condition.threshold:
        right.axhline(condition.threshold, color="grey", lw=0.8, ls=(0, (1, 3)))
    reference = style[condition.reference]
    below.axhline(0, color=reference.colour, lw=reference.width, zorder=2)
    low, high, (bottom, top) = min([0.0, *late]), max([0.0, *late]), below.get_ylim()
    if top - bottom > 5 * (high - low) > 0:  # early differences would hide those of the second half of training
        below.set_ylim(low - 0.6 * (high - low), high + 0.6 * (high - low))
    for panel, title in zip((left, right, below), titles, strict=True):
        dress(panel, title, "step", falls=panel is left or condition.better == "less")
        panel.xaxis.set_major_locator(ticker.MaxNLocator(integer=True, nbins=6))
    styles.legend(drawing, {arm: style[arm] for arm in runs})
    threshold = f" The dotted line is the threshold, {condition.threshold:g}." if condition.threshold else ""
    caption = (
        f"training loss (smoothed), {condition.metric} on held-out data, and its difference to {condition.reference} "
        f"of the same seed over training. {BANDS} Early differences are cut off where they would hide the later ones."
    )
    return drawing, caption + threshold, shown


def cost(condition: statistics.Condition, runs: Runs, style: Styles) -> Drawing:
    """The metric on held-out data against what the training of a run has taken by then, a panel for each of COSTS."""
    told = {name: {arm: [run for run in runs[arm] if run.summary.get(name)] for arm in runs} for name in finished.COSTS}
    names = [name for name, groups in told.items() if any(groups.values())]
    if not names:
        return None
    drawing = figure.Figure(figsize=(10, 4.1), layout="constrained")
    shown: Shown = {}
    for panel, name in zip(drawing.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        curves = {}
        for arm, mine in told[name].items():
            step_I, value_RI = finished.stack([run.curve(condition.metric) for run in mine])
            curves[arm] = step_I * np.mean([run.summary[name] for run in mine] or 0), value_RI
        shown[finished.COSTS[name]] = bands(panel, curves, style)
        dress(panel, "", f"{finished.COSTS[name]} of training", falls=condition.better == "less")
        panel.set_ylabel(styles.label(condition.metric), fontsize=9, **engine.LITERAL)
    styles.legend(drawing, {arm: style[arm] for arm in runs})
    caption = (
        f"{condition.metric} on held-out data against what training has taken by then. Seconds are a run's share of "
        f"its program's time without compiling, spread evenly over the steps. {BANDS}"
    )
    return drawing, caption, shown


def dress(panel: Any, title: str, x: str, *, falls: bool) -> None:
    """Title, labels and grid of a panel of curves; logarithmic where they span a decade, and are of what `falls`."""
    panel.set_title(title, fontsize=10, **engine.LITERAL)
    value = np.concatenate([line.get_ydata() for line in panel.lines] or [[]]).astype(float)
    if falls and len(value) and value.max() > 10 * value.min() > 0:
        engine.logarithmic(panel, value)
    panel.grid(alpha=0.3)
    panel.set_xlabel(x, fontsize=9)
    panel.tick_params(labelsize=8)


def bands(panel: Any, curves: Mapping[str, tuple[np.ndarray, np.ndarray]], style: Styles) -> set[str]:
    """Of each arm's x_I and value_RI the mean over R seeds as a line, each seed as a thin one, smallest to largest as a
    band. Returns the arms that have values."""
    shown = {arm: curve for arm, curve in curves.items() if curve[1].size}
    for arm, (x_I, value_RI) in shown.items():
        its, every = style[arm], max(2, len(x_I) // 8) if len(x_I) > 2 else 1
        marks, zorder = (its.turn % every, every), 2 if its.line == "-" else 3
        panel.plot(x_I, value_RI.mean(0), **its.look, markevery=marks, zorder=zorder)
        if len(value_RI) > 1:
            panel.fill_between(x_I, value_RI.min(0), value_RI.max(0), color=its.colour, alpha=0.13, lw=0)
            panel.plot(x_I, value_RI.T, color=its.colour, lw=THIN, alpha=0.5, zorder=1.5)
    return {*shown}


def differences(condition: statistics.Condition, runs: Runs, style: Styles) -> Drawing:
    """A row for each arm: the difference to the reference of each seed, their mean, and the simultaneous interval."""
    arms = [arm for arm in condition.compared if arm.difference.n]
    if not arms:
        return None
    drawing = figure.Figure(figsize=(8.5, 1.5 + 0.42 * len(arms)), layout="constrained")
    panel = drawing.add_subplot()
    for row, arm in enumerate(arms):
        colour, difference = style[arm.name].colour, arm.difference
        value_R = list(difference.by_seed.values())
        if difference.interval:
            panel.plot(difference.interval, [row, row], color=colour, lw=6, alpha=0.35, solid_capstyle="butt")
        panel.plot(difference.mean, row, ls="", marker="|", ms=18, mew=2.5, color=colour)
        panel.plot(value_R, np.full(len(value_R), row), ls="", marker="o", ms=4.5, mfc="white", color=colour)
    panel.axvline(0, color=style[condition.reference].colour, lw=1.5)
    names = [f"{style[arm.name].label} (n = {arm.difference.n})" for arm in arms]
    panel.set_yticks(range(len(arms)), names, **engine.LITERAL)
    panel.set_ylim(len(arms) - 0.4, -0.6)
    panel.grid(axis="x", alpha=0.3)
    metric, reference = styles.label(condition.metric), styles.label(condition.reference)
    side = "right" if condition.better == "more" else "left"
    text = f"{metric}, arm minus {reference} ({side} of the line: better than the reference)"
    panel.set_xlabel(text, fontsize=9, **engine.LITERAL)
    bars = "bars 95 % intervals" + f" for {words.together(condition)}" * (condition.together > 1)
    caption = (
        f"each arm's {condition.metric} minus {condition.reference}'s, paired by seed. Circles are seeds, upright "
        f"lines their means, {bars if any(arm.difference.interval for arm in arms) else 'there are no intervals'}."
    )
    return drawing, caption, {"": {condition.reference, *(arm.name for arm in arms)}}


def layers_of(measures: Iterable[str], runs: Runs) -> tuple[list[str], list[int]]:
    """Those of the measures that some runs have, and the layers that are shown."""
    depth = {name: max(len(run.layers(name)) for mine in runs.values() for run in mine) for name in measures}
    return [name for name in depth if depth[name]], engine.spread(max(depth.values()), MOST)


def symmetry(condition: statistics.Condition, runs: Runs, style: Styles) -> Drawing:
    """One row of panels for each measure, one column for each layer."""
    names, layers = layers_of(finished.SYMMETRY, runs)
    if not names:
        return None
    drawing = figure.Figure(figsize=(max(7.0, 2.1 * len(layers) + 0.8), 2.1 * len(names) + 1), layout="constrained")
    panels = drawing.subplots(len(names), len(layers), sharex=True, sharey="row", squeeze=False)
    every = {arm: [run for run in mine if any(map(run.layers, names))] for arm, mine in runs.items()}
    logged = {arm: mine for arm, mine in every.items() if mine}
    shown: Shown = {}
    for row, name in zip(panels, names, strict=True):
        for panel, m in zip(row, layers, strict=True):
            of = {arm: finished.stack([run.curve(f"{name}/{m + 1}") for run in mine]) for arm, mine in logged.items()}
            shown[f"{finished.SYMMETRY[name]}, layer {m + 1}"] = bands(panel, of, style)
            dress(panel, f"layer {m + 1}" * (name == names[0]), "step" * (name == names[-1]), falls=False)
        row[0].set_ylabel(textwrap.fill(finished.SYMMETRY[name], 16), fontsize=9)
    styles.legend(drawing, {arm: style[arm] for arm in logged})
    caption = (
        "how symmetric and how directional the scores of each layer are over training. s is 1 for a symmetric form, -1 "
        "for a skew one, about 0 for a random one (1/D is expected of D features). d is of the sum over heads: 0 for a "
        "symmetric form, negative where the key side dominates. With few features d is anywhere between -1 and 1 "
        "before any training (95 % of random factors: -1 to 1 at D = 32 and 64, -0.53 to 0.70 at D = 256), so read it "
        f"against step 0. {BANDS}"
    )
    return drawing, caption, shown


def attention_layers(condition: statistics.Condition, runs: Runs, style: Styles) -> Drawing:
    """One panel for each measure: in each layer the arms side by side, seeds as dots, their mean as a bar."""
    arms = [arm for arm, mine in runs.items() if any(run.summary.get("attention") for run in mine)]
    names, layers = layers_of(finished.ATTENTION, runs)
    if not names:
        return None
    shown: Shown = {finished.ATTENTION[name]: set() for name in names}
    drawing = figure.Figure(figsize=(10, 2.1 * len(names) + 1), layout="constrained")
    panels = drawing.subplots(len(names), 1, sharex=True, squeeze=False)[:, 0]
    half = min(0.3 / len(arms), 0.06)
    for panel, name in zip(panels, names, strict=True):
        for i, arm in enumerate(arms):
            colour, of_seeds = style[arm].colour, [run.layers(name) for run in runs[arm]]
            if any(of_seeds):
                shown[finished.ATTENTION[name]].add(arm)
            for x, m in enumerate(layers):
                seed_R = [values[m] for values in of_seeds if m < len(values) and values[m] is not None]
                if seed_R:
                    place = x + 0.8 * ((i + 0.5) / len(arms) - 0.5)
                    panel.hlines(np.mean(seed_R), place - half, place + half, color=colour, lw=2)
                    dots = {"marker": style[arm].marker, "ms": 3, "mfc": "none", "mew": 0.7}
                    panel.plot([place] * len(seed_R), seed_R, ls="", color=colour, **dots)
        panel.set_ylabel(finished.ATTENTION[name], fontsize=9)
        panel.set_ylim(0, 1.05 * panel.get_ylim()[1])
        panel.grid(axis="y", alpha=0.3)
        panel.tick_params(labelsize=8)
    panels[-1].set_xticks(range(len(layers)), [f"layer {m + 1}" for m in layers])
    styles.legend(drawing, {arm: style[arm] for arm in arms}, ls="-", lw=2, ms=6)
    caption = (
        "attention on held-out examples at the end of training, per layer, averaged over heads. Marks are seeds, bars "
        "their means. Attention that is uniform over n keys has an entropy of ln n nats, and 1/n of it on the diagonal."
    )
    return drawing, caption, shown


def maps(condition: statistics.Condition, runs: Runs, style: Styles) -> Drawing:
    """Attention of one held-out example in every arm, of its first run that has kept some."""
    first = {arm: kept[0] for arm, mine in runs.items() if (kept := [run for run in mine if run.maps])}
    if not first:
        return None
    seeds = sorted({run.seed for run in first.values()})
    examples = {arm: attention.read(run.maps) for arm, run in first.items()}
    caption = (
        f"attention on one held-out example (seed {words.listed(seeds)}), query (row) by key (column). Shades are in "
        f"proportion to the square root of the weight, and mean the same in all panels."
    )
    return attention.side_by_side(examples, {arm: style[arm].label for arm in examples}), caption, {"": {*examples}}


KINDS: dict[str, Callable[[statistics.Condition, Runs, Styles], Drawing]] = {
    "course": course,
    "cost": cost,
    "differences": differences,
    "symmetry": symmetry,
    "attention": attention_layers,
    "maps": maps,
}

"""Figures of a report with their captions.

Of one condition: curves, costs, paired differences, symmetry and attention of each layer. Over several conditions:
performance profiles, and the loss against compute.
"""

import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib import axes, figure, ticker

from experiments.engine import disk
from experiments.figures import plots
from experiments.studies import attention, overall, runs as finished, scaling, sentences, statistics, styles
from experiments.studies.study import Study

SMOOTHED = 40  # windows of the mean of training losses, each of a single batch
MOST = 6  # layers shown, evenly spread
THIN = 0.5  # width of a seed's line
BANDS = "Lines are means over seeds, thin lines the seeds, bands from smallest to largest."
ALSO = (".svg", ".pdf")  # in addition to each PNG


class Figure(NamedTuple):
    """A figure that has been written."""

    file: pathlib.Path  # the PNG
    kind: str  # a key of KINDS, or of a figure over several conditions
    condition: str  # "": several
    caption: str


Curve = tuple[np.ndarray, np.ndarray]  # x_I, value_RI: a row for each of R seeds
Runs = Mapping[str, list[finished.Run]]  # arm -> its runs, for the arms that have some
Styles = Mapping[str, styles.Style]  # arm -> style
Drawing = tuple[figure.Figure, str, Iterable[str]] | None  # with its caption and its arms; None if there are no numbers
Across = overall.Overall | scaling.Family  # numbers over several conditions


class Panel(NamedTuple):
    """Axes with a curve for each arm."""

    title: str
    x: str
    curves: dict[str, Curve]
    falls: bool = False  # then the y axis is logarithmic if the values span a decade


def draw(
    folder: pathlib.Path,
    study: Study,
    conditions: Sequence[statistics.Condition],
    runs: Sequence[finished.Run],
) -> list[Figure]:
    """Write the figures of each condition into folder/figures."""
    disk.tidy(disk.folder(folder, "figures"))
    written, style = [], styles.choose_styles(study)
    for condition in conditions:
        complete = {(condition.name, arm.name, seed) for arm in condition.arms for seed in arm.values}
        complete_runs = [run for run in runs if (run.condition, run.arm, run.seed) in complete]
        for kind in KINDS if complete_runs else ():
            if figure_and_caption := draw_kind(kind, condition, complete_runs, style):
                drawing, caption = figure_and_caption
                caption = f"{condition.name}: {caption}" if len(conditions) > 1 else caption[0].upper() + caption[1:]
                written.append(write(folder, drawing, kind, condition.name, caption))
    return written


def write(folder: pathlib.Path, drawing: figure.Figure, kind: str, condition: str, caption: str) -> Figure:
    """Write the figure as PNG and in the formats of ALSO."""
    file = folder / "figures" / f"{'_'.join(filter(None, (kind, condition)))}.png"
    plots.write(drawing, file)
    drawing.set_layout_engine("none")  # everything stays where it is in the PNG
    for end in ALSO:
        plots.write(drawing, file.with_suffix(end))
    return Figure(file, kind, condition, caption)


def draw_kind(
    kind: str, condition: statistics.Condition, runs: Iterable[finished.Run], style: Styles
) -> tuple[figure.Figure, str] | None:
    """Return a figure of KINDS and its caption, which names the arms without numbers; None if no arm has any."""
    runs_by_arm = {arm: [run for run in runs if run.arm == arm] for arm in style}
    result = KINDS[kind](condition, {arm: arm_runs for arm, arm_runs in runs_by_arm.items() if arm_runs}, style)
    if result is None:
        return None
    drawing, caption, drawn_arms = result
    left_out = [arm for arm in style if arm not in {*drawn_arms, condition.reference}]
    return drawing, caption + (f" Without numbers, and not drawn: {sentences.quote(*left_out)}." if left_out else "")


def draw_panels(rows: Sequence[Sequence[Panel]], style: Styles, *, width: float, height: float) -> tuple:
    """Draw panels of width x height inches. Return the figure, its axes, and the arms that have numbers.

    Each arm has its mean over seeds as a line, its seeds as thin lines, and a band from smallest to largest.
    """
    size = (max(7.0, width * len(rows[0])), height * len(rows) + 0.8)
    drawing = figure.Figure(figsize=size, layout="constrained")
    grid = drawing.subplots(len(rows), len(rows[0]), squeeze=False)
    legend = {arm: style[arm] for arm in style if any(arm in panel.curves for row in rows for panel in row)}
    for place, panel in zip(grid.flat, (panel for row in rows for panel in row), strict=True):
        for arm, (x_I, value_RI) in panel.curves.items():
            every, zorder = max(1, len(x_I) // 8), 2 if style[arm].line == "-" else 3
            place.plot(x_I, value_RI.mean(0), **style[arm].look, markevery=every, zorder=zorder)
            if len(value_RI) > 1:
                place.fill_between(x_I, value_RI.min(0), value_RI.max(0), color=style[arm].colour, alpha=0.13, lw=0)
                place.plot(x_I, value_RI.T, color=style[arm].colour, lw=THIN, alpha=0.5, zorder=1.5)
        value = np.concatenate([line.get_ydata() for line in place.lines] or [[]]).astype(float)
        if panel.falls and len(value) and value.max() > 10 * value.min() > 0:
            plots.logarithmic(place, value)
        place.xaxis.set_major_locator(ticker.MaxNLocator(nbins=6))
        place.grid(alpha=0.3)
        place.set_title(panel.title, fontsize=10)
        place.set_xlabel(panel.x, fontsize=9)
        place.tick_params(labelsize=8)
    styles.draw_legend(drawing, legend)
    return drawing, grid, legend


def stack(runs: Runs, curve: Callable[[finished.Run], dict[int, float]]) -> dict[str, Curve]:
    """Return arm -> the curves of its runs, for the arms that have values."""
    stacked = {arm: finished.stack([curve(run) for run in arm_runs]) for arm, arm_runs in runs.items()}
    return {arm: pair for arm, pair in stacked.items() if pair[1].size}


def draw_course(condition: statistics.Condition, runs: Runs, style: Styles) -> Drawing:
    """Draw over training: the loss, the metric on held-out data, and its paired difference to the reference."""
    metric, less = condition.metric, condition.better == "less"
    paired, smoothed = paired_curves(condition, runs), {}
    for arm, (step_I, loss_RI) in stack(runs, lambda run: run.curve("train/loss")).items():
        width = 2 * (len(step_I) // SMOOTHED // 2) + 1  # 1: few values stay as they are
        smoothed[arm] = step_I, np.array([plots.smooth(loss_I, width) for loss_I in loss_RI])
    panels = [
        Panel("training loss", "step", smoothed, falls=True),
        Panel(f"{metric}, held out", "step", stack(runs, lambda run: run.curve(metric)), falls=less),
        Panel(f"{metric}, minus the reference's", "step", paired),
    ]
    drawing, grid, arms = draw_panels([panels], style, width=4.4, height=3.8)
    if condition.threshold:
        grid[0, 1].axhline(condition.threshold, color="grey", lw=0.8, ls=(0, (1, 3)))
    grid[0, 2].axhline(0, color="black", lw=2.4, zorder=2)
    limit_to_second_half(grid[0, 2], paired)
    threshold = f" The dotted line is the threshold, {condition.threshold:g}." if condition.threshold else ""
    caption = (
        f"training loss (smoothed), {metric} on held-out data, and its difference to {condition.reference} of the same "
        f"seed. {BANDS} Early differences are cut off where they would hide later ones.{threshold}"
    )
    return drawing, caption, arms


def paired_curves(condition: statistics.Condition, runs: Runs) -> dict[str, Curve]:
    """Return arm -> the difference of its metric to the reference's of the same seed, at the steps that both have."""
    base = {run.seed: run.curve(condition.metric) for run in runs.get(condition.reference, [])}

    def difference(run: finished.Run) -> dict[int, float]:
        base_curve = base[run.seed]
        return {step: x - base_curve[step] for step, x in run.curve(condition.metric).items() if step in base_curve}

    paired = {arm: [run for run in arm_runs if run.seed in base] for arm, arm_runs in runs.items()}
    return stack({arm: arm_runs for arm, arm_runs in paired.items() if arm != condition.reference}, difference)


def limit_to_second_half(panel: axes.Axes, curves: Mapping[str, Curve]) -> None:
    """Cut off the y axis if early values would hide the values of the second half of training."""
    value = [x for step_I, x_RI in curves.values() for x in x_RI[:, 2 * step_I >= max(step_I)].ravel()]
    low, high, (bottom, top) = min([0.0, *value]), max([0.0, *value]), panel.get_ylim()
    if top - bottom > 5 * (high - low) > 0:
        panel.set_ylim(low - 0.6 * (high - low), high + 0.6 * (high - low))


def draw_costs(condition: statistics.Condition, runs: Runs, style: Styles) -> Drawing:
    """Draw the metric on held-out data against the FLOPs and the seconds of training."""
    panels = []
    for name, unit in finished.COSTS.items():
        measured = {arm: [run for run in arm_runs if run.summary.get(name)] for arm, arm_runs in runs.items()}
        curves = stack(measured, lambda run: run.curve(condition.metric))
        cost = {arm: np.mean([run.summary[name] for run in measured[arm]]) for arm in curves}  # of a step
        curves = {arm: (step_I * cost[arm], value_RI) for arm, (step_I, value_RI) in curves.items()}
        panel = Panel(f"{condition.metric} against {unit}", f"{unit} of training", curves, condition.better == "less")
        panels += [panel] if curves else []
    if not panels:
        return None
    drawing, _, arms = draw_panels([panels], style, width=5, height=3.5)
    caption = (
        f"{condition.metric} on held-out data against what training has taken by then. Seconds are a run's share of "
        f"its program's time without compiling, spread evenly over the steps. {BANDS}"
    )
    return drawing, caption, arms


def draw_differences(condition: statistics.Condition, runs: Runs, style: Styles) -> Drawing:
    """Draw a row for each arm: each seed's difference to the reference, their mean, and the simultaneous interval."""
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
    panel.axvline(0, color="black", lw=1.5)
    panel.set_yticks(range(len(arms)), [f"{style[arm.name].label} (n = {arm.difference.n})" for arm in arms])
    panel.set_ylim(len(arms) - 0.4, -0.6)
    panel.grid(axis="x", alpha=0.3)
    reference, side = styles.shorten(condition.reference), "right" if condition.better == "more" else "left"
    panel.set_xlabel(f"{condition.metric}, arm minus {reference} ({side} of the line: better than the reference)")
    bars = "bars 95 % intervals" + f" for {sentences.describe_family(condition)}" * (condition.together > 1)
    caption = (
        f"each arm's {condition.metric} minus {condition.reference}'s, paired by seed. Circles are seeds, upright "
        f"lines their means, {bars if any(arm.difference.interval for arm in arms) else 'there are no intervals'}."
    )
    return drawing, caption, [arm.name for arm in arms]


def draw_symmetry(condition: statistics.Condition, runs: Runs, style: Styles) -> Drawing:
    """Draw the symmetry and directionality of scores over training: a row for each measure, a column for each layer."""
    every = [run for arm_runs in runs.values() for run in arm_runs]
    depth = {name: max(len(run.layers(name)) for run in every) for name in finished.SYMMETRY}
    names, layers = [name for name in depth if depth[name]], plots.spread(max(depth.values()), MOST)
    if not names:
        return None
    logged = {arm: [run for run in arm_runs if any(map(run.layers, names))] for arm, arm_runs in runs.items()}

    def panel(name: str, layer: int) -> Panel:
        title = f"{name.replace('_', ', ')}, layer {layer}"
        return Panel(title, "step", stack(logged, lambda run: run.curve(f"{name}/{layer}")))

    rows = [[panel(name, m + 1) for m in layers] for name in names]
    drawing, _, arms = draw_panels(rows, style, width=2.6, height=2.2)
    caption = (
        "how symmetric and how directional the scores of each layer are over training. symmetry (mean of heads; sum: "
        "of their sum) is 1 for a symmetric form, -1 for a skew one, about 0 for a random one. directionality is 0 for "
        f"a symmetric form, negative where the key side dominates, and at step 0 anywhere in -1 to 1. {BANDS}"
    )
    return drawing, caption, arms


def draw_attention(condition: statistics.Condition, runs: Runs, style: Styles) -> Drawing:
    """Draw measures of attention at the end of training over the layers, a panel for each measure."""
    panels = []
    for name, label in finished.ATTENTION.items():
        curves = stack(runs, lambda run, name=name: {m: x for m, x in enumerate(run.layers(name), 1) if x is not None})
        panels += [Panel(label, "layer", curves)] if curves else []
    if not panels:
        return None
    drawing, _, arms = draw_panels([panels], style, width=3.4, height=3)
    caption = (
        f"attention on held-out examples at the end of training, per layer, averaged over heads. {BANDS} Attention "
        "that is uniform over n keys has an entropy of ln n nats, and 1/n of it on the diagonal."
    )
    return drawing, caption, arms


def draw_maps(condition: statistics.Condition, runs: Runs, style: Styles) -> Drawing:
    """Draw the attention of one held-out example in every arm, of its first run that has kept it."""
    first = {run.arm: run for arm_runs in runs.values() for run in reversed(arm_runs) if run.maps}
    if not first:
        return None
    examples = {arm: attention.read(run.maps) for arm, run in first.items()}
    seeds = sentences.join_values(sorted({run.seed for run in first.values()}))
    caption = (
        f"attention on one held-out example (seed {seeds}), query (row) by key (column). Shades are in proportion to "
        "the square root of the weight, and mean the same in all panels."
    )
    return attention.draw(examples, {arm: style[arm].label for arm in examples}), caption, examples


KINDS: dict[str, Callable[[statistics.Condition, Runs, Styles], Drawing]] = {
    "course": draw_course,
    "cost": draw_costs,
    "differences": draw_differences,
    "symmetry": draw_symmetry,
    "attention": draw_attention,
    "maps": draw_maps,
}


def draw_across(folder: pathlib.Path, study: Study, across: Iterable[tuple[str, Across]]) -> list[Figure]:
    """Write a figure over several conditions for each kind and its numbers, if an arm has a profile or a law."""
    drawings = [(kind, draw_numbers(numbers, styles.choose_styles(study))) for kind, numbers in across]
    return [write(folder, drawing[0], kind, "", drawing[1]) for kind, drawing in drawings if drawing]


def draw_numbers(numbers: Across, style: Styles) -> tuple[figure.Figure, str] | None:
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


def draw_profile(panel: axes.Axes, measures: overall.Overall, style: Styles) -> str:
    """Draw the share of an arm's runs that gained at least x, in all conditions, with its bootstrap band."""
    every = 100 * np.concatenate([np.array(arm.profile)[:, 0] for arm in measures.arms])
    ends, middle = [every.min() - 0.05 * np.ptp(every), every.max() + 0.05 * np.ptp(every)], np.median(np.abs(every))
    for arm in measures.arms:
        gain_J, *column_J3 = np.array(arm.profile).T
        x_J = [ends[0], *(100 * gain_J), ends[1]]
        share_J, low_J, high_J = ([1.0, *column_J, 0.0] for column_J in column_J3)
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


def draw_laws(panel: axes.Axes, family: scaling.Family, style: Styles) -> str:
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

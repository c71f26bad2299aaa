"""Figures of a report, with their captions.

For each condition: curves, costs, paired differences, and the symmetry of each layer. For several conditions: the loss
against compute.
"""

import pathlib
import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib import axes, figure, ticker

from experiments.config import disk
from experiments.figures import plots
from experiments.studies import runs as study_runs, scaling, sentences, statistics, study as studies, styles

SMOOTHED = 40  # a logged training loss is averaged with its neighbours: a 40th of all logged losses
MOST = 6  # layers drawn, evenly spread
THIN = 0.5  # width of a seed's line, in points
BANDS = "Thick lines are means over seeds, thin lines the seeds; bands reach from the smallest to the largest seed."
ALSO = (".svg", ".pdf")  # formats in addition to PNG
LAWS = "compute"  # Figure.kind of the first family of scaling laws, before the number of the others


class Figure(NamedTuple):
    """A figure that has been written."""

    file: pathlib.Path  # the PNG
    kind: str  # a key of KINDS, compute, compute1, ..., or tuning
    condition: str  # "" if it shows several
    caption: str


Curve = tuple[np.ndarray, np.ndarray]  # x_I and value_RI, with a row for each of R seeds
Conditions, AllRuns = Sequence[statistics.Condition], Sequence[study_runs.Run]
Runs = Mapping[str, list[study_runs.Run]]  # arm -> its runs, without arms that have none
Styles = Mapping[str, styles.Style]  # arm -> style
Drawing = tuple[figure.Figure, str, Iterable[str]] | None  # figure, caption, drawn arms; None without numbers


class Panel(NamedTuple):
    """Axes with a curve for each arm."""

    title: str
    x: str
    curves: dict[str, Curve]
    falls: bool = False  # values fall: the y axis is logarithmic if they span a decade


def draw(
    folder: pathlib.Path, study: studies.Study, conditions: Conditions, runs: AllRuns, laws: Sequence[scaling.Family]
) -> list[Figure]:
    """Write the figures of each condition and of each family of scaling laws into folder/figures. Return them all."""
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
    for i, family in enumerate(laws):
        drawing, caption = draw_laws(family, style)
        written.append(write(folder, drawing, f"{LAWS}{i or ''}", "", caption))
    return written


def write(folder: pathlib.Path, drawing: figure.Figure, kind: str, condition: str, caption: str) -> Figure:
    """Write the drawing as folder/figures/KIND_CONDITION.png, and in the formats of ALSO (SVG, PDF)."""
    name = re.sub(r"[^\w+.,=-]", "_", condition, flags=re.ASCII)[: studies.LONGEST]
    name += f"_{zlib.crc32(condition.encode()):08x}" * (name != condition)  # a table of another program has any names
    file = folder / "figures" / f"{'_'.join(filter(None, (kind, name)))}.png"
    plots.write(drawing, file)
    drawing.set_layout_engine("none")  # keeps the layout of the PNG
    for end in ALSO:
        plots.write(drawing, file.with_suffix(end))
    return Figure(file, kind, condition, caption)


def draw_kind(
    kind: str, condition: statistics.Condition, runs: Iterable[study_runs.Run], style: Styles
) -> tuple[figure.Figure, str] | None:
    """Return a figure of KINDS and its caption, which names arms without numbers; None if no arm has numbers."""
    runs_by_arm = {arm: [run for run in runs if run.arm == arm] for arm in style}
    result = KINDS[kind](condition, {arm: arm_runs for arm, arm_runs in runs_by_arm.items() if arm_runs}, style)
    if result is None:
        return None
    drawing, caption, drawn_arms = result
    if left_out := [arm for arm in style if arm not in {*drawn_arms, condition.reference}]:
        caption += f" Not drawn, because they have no numbers: {sentences.quote(*left_out)}."
    return drawing, caption


def draw_panels(rows: Sequence[Sequence[Panel]], style: Styles, *, width: float, height: float) -> tuple:
    """Draw panels of width x height inches. Return the figure, its axes, and {arm: style} of arms with a curve.

    Each arm has a thick line for its mean over seeds, a thin line for each seed, and a band from smallest to largest.
    """
    size = (max(7.0, width * len(rows[0])), height * len(rows) + 0.8)
    drawing, grid = plots.canvas(*size, len(rows), len(rows[0]))
    legend = {arm: style[arm] for arm in style if any(arm in panel.curves for row in rows for panel in row)}
    for place, panel in zip(grid.flat, (panel for row in rows for panel in row), strict=True):
        for arm, (x_I, value_RI) in panel.curves.items():
            every, zorder = max(1, len(x_I) // 8), 2 if style[arm].line == "-" else 3
            place.plot(x_I, value_RI.mean(0), **style[arm].look, markevery=every, zorder=zorder)
            if len(value_RI) > 1:
                place.fill_between(x_I, value_RI.min(0), value_RI.max(0), color=style[arm].colour, alpha=0.13, lw=0)
                place.plot(x_I, value_RI.T, color=style[arm].colour, lw=THIN, alpha=0.5, zorder=1.5)
        value = np.concatenate([line.get_ydata() for line in place.lines] or [[]]).astype(float)
        if panel.falls:
            plots.logarithmic(place, value)
        place.xaxis.set_major_locator(plots.round_ticks(6))
        place.grid(alpha=0.3)
        place.set_title(panel.title, fontsize=10)
        place.set_xlabel(panel.x, fontsize=9)
        place.tick_params(labelsize=8)
    styles.draw_legend(drawing, legend)
    return drawing, grid, legend


def stack(runs: Runs, curve: Callable[[study_runs.Run], dict[int, float]]) -> dict[str, Curve]:
    """Return arm -> (step_I, value_RI): curve(run) of its R runs at the steps that all have; no arms without values."""
    stacked = {arm: study_runs.stack([curve(run) for run in arm_runs]) for arm, arm_runs in runs.items()}
    return {arm: pair for arm, pair in stacked.items() if pair[1].size}


def draw_course(condition: statistics.Condition, runs: Runs, style: Styles) -> Drawing:
    """Draw training loss, held-out metric and its difference to the reference by step. None if no run has rows."""
    metric, paired = condition.metric, paired_curves(condition, runs)
    if not any(run.rows for arm_runs in runs.values() for run in arm_runs):
        return None
    loss = Panel("training loss", "step", smooth(stack(runs, lambda run: run.curve("train/loss"))), falls=True)
    curves = stack(runs, lambda run: run.curve(metric))
    name = styles.spell(metric)
    held_out = Panel(f"{name} on held-out data", "step", curves, falls=condition.better == "less")
    panels = [loss, held_out, Panel(f"{name} minus the reference's", "step", paired)]
    drawing, grid, arms = draw_panels([panels], style, width=4.4, height=3.8)
    if condition.threshold:
        grid[0, 1].axhline(condition.threshold, color="grey", lw=0.8, ls=(0, (1, 3)))
    grid[0, 2].axhline(0, color="black", lw=2.4, zorder=2)
    limit_to_second_half(grid[0, 2], paired)
    threshold = f" The dotted line is the threshold {condition.threshold:g}." if condition.threshold else ""
    caption = (
        f"training loss (smoothed), {metric} on held-out data, and its difference to {condition.reference} of the same "
        f"seed. {BANDS} Early differences are cut off if they would hide later ones.{threshold}"
    )
    return drawing, caption, arms


def smooth(curves: Mapping[str, Curve]) -> dict[str, Curve]:
    """Return the curves smoothed: each value becomes a mean over a window of 1 / SMOOTHED of the curve."""
    smoothed = {}
    for arm, (step_I, value_RI) in curves.items():
        width = 2 * (len(step_I) // SMOOTHED // 2) + 1  # odd; 1 leaves fewer than 80 values unsmoothed
        smoothed[arm] = step_I, np.array([plots.smooth(value_I, width) for value_I in value_RI])
    return smoothed


def paired_curves(condition: statistics.Condition, runs: Runs) -> dict[str, Curve]:
    """Return arm -> (step_I, value_RI): the metric of R runs minus the reference's of the same seed.

    The reference, arms without values, and steps that a run of the arm or of the reference lacks are left out.
    """
    base = {run.seed: run.curve(condition.metric) for run in runs.get(condition.reference, [])}

    def difference(run: study_runs.Run) -> dict[int, float]:
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
    """Draw the held-out metric against training FLOPs, and against seconds.

    Each cost has a panel if runs of the reference have measured it. Return None if there is no panel.
    """
    panels, metric = [], styles.spell(condition.metric)
    for name, (unit, label) in study_runs.COSTS.items():
        measured = {arm: [run for run in arm_runs if run.summary.get(name)] for arm, arm_runs in runs.items()}
        curves = stack(measured, lambda run: run.curve(condition.metric))
        cost = {arm: np.mean([run.summary[name] for run in measured[arm]]) for arm in curves}  # of a step
        curves = {arm: (step_I * cost[arm], value_RI) for arm, (step_I, value_RI) in curves.items()}
        panel = Panel(f"{metric} against {unit}", label, curves, condition.better == "less")
        panels += [panel] if condition.reference in curves else []
    if not panels:
        return None
    drawing, grid, arms = draw_panels([panels], style, width=5, height=3.5)
    for place in grid[0]:
        place.xaxis.set_major_locator(ticker.MaxNLocator(nbins=6, steps=[1, 2, 5, 10]))
        place.xaxis.set_major_formatter(ticker.EngFormatter())
    caption = (
        f"{condition.metric} on held-out data against the cost of training so far. The seconds of a run are its equal "
        "share of its program's time without compilation, spread evenly over the steps. They are no benchmark: "
        f"programs ran one after the other, maybe with other work beside them on the machine. {BANDS}"
    )
    return drawing, caption, arms


def draw_differences(condition: statistics.Condition, runs: Runs, style: Styles) -> Drawing:
    """Draw each arm's differences to the reference (if unpaired: to its mean), their mean, and the interval.

    Return None if no arm has a difference.
    """
    arms = [arm for arm in condition.compared if arm.difference.n]
    if not arms:
        return None
    drawing, [[panel]] = plots.canvas(8.5, 1.9 + 0.42 * len(arms))
    for row, arm in enumerate(arms):
        colour, difference = style[arm.name].colour, arm.difference
        value_R = [x - condition.base.mean for x in arm.values.values()] if difference.unpaired else []
        value_R += difference.by_seed.values()
        if difference.interval:
            panel.plot(difference.interval, [row, row], color=colour, lw=6, alpha=0.35, solid_capstyle="butt")
        panel.plot(difference.mean, row, ls="", marker="|", ms=18, mew=2.5, color=colour)
        panel.plot(value_R, np.full(len(value_R), row), ls="", marker="o", ms=4.5, mfc="white", color=colour)
    panel.axvline(0, color="black", lw=1.5)
    panel.plot(0, len(arms), ls="", marker="|", ms=18, mew=2.5, color="black")
    labels = [f"{style[arm.name].label} (n = {sentences.count(arm.difference)})" for arm in arms]
    panel.set_yticks(range(len(arms) + 1), [*labels, style[condition.reference].label])
    panel.set_ylim(len(arms) + 0.6, -0.6)
    panel.grid(axis="x", alpha=0.3)
    reference, side = styles.shorten(condition.reference), "right" if condition.better == "more" else "left"
    panel.set_xlabel(f"{styles.spell(condition.metric)}, arm minus {reference} ({side} of the line: better)")
    bars = "Bars are 95 % intervals" + f" for {sentences.describe_family(condition)}" * (condition.together > 1)
    bars = bars if any(arm.difference.interval for arm in arms) else "There are no intervals"
    caption = (
        f"each arm's {condition.metric} minus {condition.reference}'s, {sentences.describe_pairing(condition)}. "
        f"Circles are runs, vertical lines their means. {bars}."
    )
    return drawing, caption, [arm.name for arm in arms]


def draw_symmetry(condition: statistics.Condition, runs: Runs, style: Styles) -> Drawing:
    """Draw symmetry and directionality of scores over steps: a row for each measure, a column for each layer.

    Return None if all arms have the same model.score, or no run has measured symmetry or directionality.
    """
    if len({str(arm.changes.get("model.score")) for arm in condition.arms}) < 2:
        return None
    every = [run for arm_runs in runs.values() for run in arm_runs]
    depth = {name: max(len(run.layers(name)) for run in every) for name in study_runs.SYMMETRY}
    names, layers = [name for name in depth if depth[name]], plots.spread(max(depth.values()), MOST)
    if not names:
        return None
    logged = {arm: [run for run in arm_runs if any(map(run.layers, names))] for arm, arm_runs in runs.items()}

    def panel(name: str, layer: int) -> Panel:
        title = f"{study_runs.SYMMETRY[name]}, layer {layer}"
        return Panel(title, "step", stack(logged, lambda run: run.curve(f"{name}/{layer}")))

    rows = [[panel(name, m + 1) for m in layers] for name in names]
    drawing, _, arms = draw_panels(rows, style, width=2.6, height=2.2)
    caption = (
        "symmetry and directionality of the bilinear form of the scores in each layer, over training. Symmetry is the "
        "mean over heads, or that of the sum of the heads' forms: 1 if symmetric, -1 if skew, about 0 if random. "
        "Directionality is 0 if the form is symmetric, and negative if the key side dominates. At "
        f"step 0 it can be anywhere between -1 and 1. {BANDS}"
    )
    return drawing, caption, arms


KINDS = {"course": draw_course, "cost": draw_costs, "differences": draw_differences, "symmetry": draw_symmetry}


def draw_laws(family: scaling.Family, style: Styles) -> tuple[figure.Figure, str]:
    """Return a figure, loss against FLOPs on logarithmic axes, and its caption.

    It has the loss of each seed, their means, and the fitted law of each arm.
    """
    drawing, [[panel]] = plots.canvas(8.5, 4.6)
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
    for axis, form in ((panel.yaxis, "%g"), (panel.xaxis, "%.0e")):  # instead of formulas such as $10^9$
        axis.set_major_formatter(ticker.FormatStrFormatter(form))
        axis.set_minor_formatter(ticker.FormatStrFormatter(form))
    panel.set_xlabel("FLOPs of a training run", fontsize=9)
    panel.set_ylabel(styles.spell(family.metric), fontsize=9)
    panel.grid(alpha=0.3, which="both")
    panel.tick_params(labelsize=8, which="both")
    styles.draw_legend(drawing, {law.name: style[law.name] for law in family.laws})
    caption = (
        f"How {family.metric} at the end of training falls with the FLOPs of a run, in {len(family.conditions)} sizes. "
        f"Open markers are seeds, filled markers their means, lines the fitted laws. The dotted line is C0, at which "
        f"the table compares the arms."
    )
    return drawing, caption

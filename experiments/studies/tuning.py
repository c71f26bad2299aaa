"""Tuning: choose the best settings of each arm from a grid, on a split of the training data, with other seeds.

Before the study, tuning runs train each arm with each combination of its values. Their folders are
tuning/<condition>/<arm>@<values>/seed_<n>. The learning rate of the compared runs can lie between two tried ones.
"""

import itertools
import math
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments.config import errors
from experiments.folder import records
from experiments.studies import figures as study_figures, inference, runs, sentences, study as studies, styles, tables

FOLDER = "tuning"
SAMPLES = 200  # bootstrap samples of the tuning seeds
RATE = sentences.RATE  # the setting that is interpolated
EARLIER = "runs with the tried rate exist"  # Tuned.kept, in folders of versions that did not interpolate


class Point(NamedTuple):
    """A point of the grid: a combination of values, and the final metric of each seed."""

    values: dict[str, Any]
    metric: dict[int, float | None]  # seed -> metric; None: the seed diverged

    @property
    def mean(self) -> float | None:
        """Mean over seeds; None if a seed diverged, so that the point is never chosen."""
        finite = [x for x in self.metric.values() if x is not None]
        return sum(finite) / len(finite) if len(finite) == len(self.metric) > 0 else None


class Tuned(NamedTuple):
    """The grid of an arm in a condition: all points, the best point, and the settings for the runs to be compared."""

    condition: str
    arm: str
    points: list[Point]
    best: Point
    edges: list[str]  # numeric settings whose best value is the smallest or largest of the grid
    chosen: dict[str, Any]  # the settings of the best point, with an interpolated learning rate
    variance: float | None  # of the arm's mean, from the choice of a point: `estimate_variance`
    kept: str = ""  # why the learning rate is not interpolated; "" also if the best one is an end of the grid

    def record(self) -> dict[str, Any]:
        """Return the entry for this arm and condition in the list "tuned" of report.json."""
        tried = [{"values": point.values, "mean": point.mean, "by_seed": point.metric} for point in self.points]
        place = {"condition": self.condition, "arm": self.arm}
        return place | {
            "chosen": self.chosen,
            "at_the_end": self.edges,
            "not_interpolated": self.kept,
            "variance": self.variance,
            "tried": tried,
        }

    def __str__(self) -> str:
        edge = f"; {sentences.join_values(self.edges)}: the smallest or largest value tried" if self.edges else ""
        condition = "" if self.condition == studies.ONLY else f"{self.condition}: "
        return f"  {condition}{self.arm} chose {format_values(self.chosen)} (best of {len(self.points)}{edge})"


def trials(study: studies.Study) -> studies.Study:
    """Return the study of the tuning runs: an arm for each combination of the values in an arm's grid.

    An arm without a grid stays one arm. If no arm has a grid, the study has no arms.
    """
    arms = []
    for arm in study.arms if study.grid else ():
        changes = {key: x for key, x in arm.changes.items() if key != studies.TUNE}
        for values in combinations(study, arm.name):
            arms.append(studies.Arm(_name(arm.name, values), changes | values))
    return study._replace(arms=arms, seeds=study.tune_seeds, grid={}, also=[part / FOLDER for part in study.also])


def combinations(study: studies.Study, arm: str) -> list[dict[str, Any]]:
    """Return all combinations of the values in an arm's grid; [{}] if the arm has no grid."""
    grid = study.grid.get(arm, {})
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def _name(arm: str, values: dict[str, Any]) -> str:
    """Return the name of a tuning arm and its folder: 'tied@learning_rate=0.003'. No arm of a study can have it."""
    return studies.name_values(values, f"{arm}{studies.VALUES}", longest=200)  # most file systems allow 255


def read(folder: pathlib.Path, study: studies.Study) -> list[Tuned]:
    """Return the choice of each arm in each condition whose tuning runs are finished.

    It is the point with the best mean (the first of equals), with its learning rate interpolated (`interpolate`).
    Raises RunError if every point of an arm has a diverged seed.
    """
    tuned = []
    finished = {(run.condition, run.arm, run.seed): run for run in runs.load(folder / FOLDER, trials(study))}
    for condition, arm in itertools.product(study.conditions, study.arms if study.grid else ()):
        metric, points = condition.metric, []
        for values in combinations(study, arm.name):
            point_runs = [finished.get((condition.name, _name(arm.name, values), seed)) for seed in study.tune_seeds]
            points.append(Point(values, {run.seed: run.value(metric) for run in filter(None, point_runs)}))
        if min(len(point.metric) for point in points) < len(study.tune_seeds):
            continue
        sign = 1 if runs.choose_best(metric, finished.values()).better == "less" else -1
        best = _find_best(points, sign)
        if best.mean is None:
            place = f"condition {condition.name}, arm {arm.name}"
            raise errors.RunError(f"{place}: with each value of {studies.TUNE}, a seed diverged. Choose other values.")
        grid = {key: values for key, values in study.grid[arm.name].items() if len(values) > 1 and _numeric(values)}
        edges = [key for key, values in grid.items() if best.values[key] in (min(values), max(values))]
        values, kept = interpolate(points, best, sign)
        if values != best.values and _has_run(folder, study, f"{condition.name}/{arm.name}", best.values[RATE]):
            values, kept = best.values, EARLIER
        variance = estimate_variance(points, sign, is_kept=kept == EARLIER)
        tuned.append(Tuned(condition.name, arm.name, points, best, edges, values, variance, kept))
    return tuned


def _find_best(points: Sequence[Point], sign: int) -> Point:
    return min(points, key=lambda point: math.inf if point.mean is None else sign * point.mean)


def estimate_variance(points: Sequence[Point], sign: int = 1, *, is_kept: bool = False) -> float | None:
    """Return the variance of an arm's mean metric that comes from the choice of a point; None for one tuning seed.

    points: the tried settings. sign: 1 if less of the metric is better, else -1. is_kept: the learning rate is the best
    tried one, without interpolation. The choice is repeated over bootstrap samples of the n tuning seeds. Each chosen
    rate has the metric of the mean curve, linear in log(rate) between the tried ones. The variance of this metric is
    multiplied by n / (n - 1), because a sample of n seeds varies by (n - 1) / n as much as its source.
    """
    seeds, finite = [*points[0].metric], [point for point in points if point.mean is not None]
    if len(seeds) < 2:
        return None
    losses = []
    for index_I in inference.resamples([len(seeds)], SAMPLES)[0]:
        drawn = [point._replace(metric=dict(enumerate(point.metric[seeds[i]] for i in index_I))) for point in finite]
        best = _find_best(drawn, sign)
        values = best.values if is_kept else interpolate(drawn, best, sign)[0]
        losses.append(_read_curve(_line(finite, best, RATE), values))
    return float(np.var(losses)) * len(seeds) / (len(seeds) - 1)


def _read_curve(line: Sequence[Point], values: dict[str, Any]) -> float:
    """Return the mean metric at these values. If the line has no point with their rate, interpolate in log(rate).

    line: points that differ in the learning rate only.
    """
    means = {point.values.get(RATE): point.mean for point in line}
    if (rate := values.get(RATE)) in means:
        return means[rate]
    rates = sorted(x for x in means if x > 0)  # with a rate of 0, the neighbours are other points
    return float(np.interp(math.log(rate), np.log(rates), [means[x] for x in rates]))


def pool_variances(tuned: Sequence[Tuned]) -> dict[str, float | None]:
    """Return condition -> the mean of `estimate_variance` over its tuned arms; None for one tuning seed.

    An arm with one point is not tuned. A condition without a tuned arm is left out.
    A single arm's estimate from three seeds varies too much. With the mean, less than 5 % of the studies of
    equal arms in docs/false_verdicts.py find a difference.
    """
    variances: dict[str, list[float | None]] = {}
    for choice in tuned:
        if len(choice.points) > 1:
            variances.setdefault(choice.condition, []).append(choice.variance)
    return {name: None if None in values else sum(values) / len(values) for name, values in variances.items()}


def interpolate(points: Sequence[Point], best: Point, sign: int = 1) -> tuple[dict[str, Any], str]:
    """Return the best point's values with an interpolated learning rate, and "".

    If a neighbour diverged, return the best point's values unchanged, and the reason.

    The rate is at the vertex of the parabola in x = log(rate) through the best mean and its two neighbours, with other
    settings at their best; at an end of the grid, through the three values there. In the middles m_1 and m_2 of the two
    intervals of x, a parabola has the slopes s_1 and s_2 of its chords, so the vertex is at
    x = (m_1 s_2 - m_2 s_1) / (s_2 - s_1). It is at most half an interval from the best value. This value is kept if the
    vertex is outside the grid or the worst point of the parabola, or if there is a rate of 0 or fewer than three rates.
    sign: 1 if less is better, else -1. The rate has three significant digits.
    """
    line = sorted(_line(points, best, RATE), key=lambda point: point.values[RATE]) if RATE in best.values else [best]
    first = min(max(line.index(best) - 1, 0), len(line) - 3)
    if first < 0 or line[first].values[RATE] <= 0:
        return best.values, ""
    three = line[first : first + 3]
    if None in (means := [point.mean for point in three]):
        return best.values, "a neighbour diverged"
    x_I = np.log([point.values[RATE] for point in three])
    (s_1, s_2), (m_1, m_2) = np.diff(means) / np.diff(x_I), (x_I[1:] + x_I[:-1]) / 2
    if sign * (s_2 - s_1) <= 0 or not x_I[0] < (vertex := (m_1 * s_2 - m_2 * s_1) / (s_2 - s_1)) < x_I[2]:
        return best.values, ""
    return best.values | {RATE: float(f"{math.exp(vertex):.3g}")}, ""


def _has_run(folder: pathlib.Path, study: studies.Study, place: str, rate: float) -> bool:
    """Return True if a compared run has this learning rate, as in folders of versions that did not interpolate.

    place: "condition/arm".
    """
    files = (file for part in (folder, *study.also) for file in (part / place).glob(f"seed_*/{records.CONFIG}"))
    return any(records.read_settings(file.parent).get(RATE) == rate for file in files)


def _line(points: Sequence[Point], best: Point, key: str) -> list[Point]:
    """Return the points that have the best point's values, except for this setting."""
    return [point for point in points if point.values | {key: None} == best.values | {key: None}]


def chosen(folder: pathlib.Path, study: studies.Study) -> dict[tuple[str, str], dict[str, Any]]:
    """Return {(condition, arm): {setting: value that tuning chose}} for the arms whose tuning runs are finished."""
    return {(choice.condition, choice.arm): choice.chosen for choice in read(folder, study)}


def _numeric(values: Sequence[Any]) -> bool:
    return all(type(x) in (int, float) for x in values)


def format_values(values: dict[str, Any]) -> str:
    """Return 'optim.learning_rate = 0.003, optim.ema = 0', or 'nothing' for {}."""
    return sentences.join_values(f"{key} = {value}" for key, value in values.items()) or "nothing"


def table(tuned: Sequence[Tuned]) -> tables.Table | None:
    """Return the table of the settings that each arm tried and chose; None if nothing was tuned."""
    rows = []
    for choice in tuned:
        means = ("diverged" if point.mean is None else sentences.format_number(point.mean) for point in choice.points)
        values = ("/".join(map(str, point.values.values())) for point in choice.points)
        best = [format_values(choice.chosen), sentences.format_number(choice.best.mean)]
        tried = ", ".join(map(": ".join, zip(values, means, strict=True)))
        rows.append([choice.condition, choice.arm, *best, tried])
    edges = [f"{x.condition}, {x.arm} ({', '.join(x.edges)})" for x in tuned if x.edges]
    beyond = "The best value is the smallest or largest that was tried, so better values may lie beyond"
    notes = ["Each arm chose the best mean on the tuning split, over other seeds than the compared ones."]
    notes += [f"{beyond}: {', '.join(edges)}."] * bool(edges)
    if any(x.chosen != x.best.values for x in tuned):
        notes.append("A learning rate between tried ones is at the vertex of a parabola: docs/studies.md.")
    kept = [f"{x.condition}, {x.arm} ({x.kept})" for x in tuned if x.kept]
    notes += [f"The learning rate is a tried one, not interpolated: {', '.join(kept)}."] * bool(kept)
    head = ["condition", "arm", "chosen", "best mean", "tried"]
    return tables.Table(head, rows, notes, style="words") if rows else None


def draw(folder: pathlib.Path, study: studies.Study, tuned: Sequence[Tuned]) -> list[study_figures.Figure]:
    """Draw the metric over the values of each setting: a panel for each setting, a line for each arm.

    Write a figure into `folder` for each condition, and return the figures. A condition without a panel has none.
    """
    drawn = []
    for condition in study.conditions:
        choices = [choice for choice in tuned if choice.condition == condition.name and len(choice.points) > 1]
        base = next((x.best.mean for x in tuned if x[:2] == (condition.name, study.reference)), None)
        keys = dict.fromkeys(key for choice in choices for key, x in study.grid[choice.arm].items() if len(x) > 1)
        values, metric, panels = {key: _values(study, choices, key) for key in keys}, condition.metric, []
        for key in keys:
            curves = {x.arm: _curve(x, key, values[key]) for x in choices if key in x.best.values}
            if base is not None:  # the reference is in every panel: without values of this setting, as a level line
                curves.setdefault(study.reference, (np.arange(len(values[key])), np.full((1, len(values[key])), base)))
            panels.append(study_figures.Panel(f"{styles.spell(metric)} in tuning", styles.spell(key), curves))
        if not panels:
            continue
        drawing, grid, _ = study_figures.draw_panels([panels], styles.choose_styles(study), width=4.2, height=3.6)
        for panel, key in zip(grid[0], keys, strict=True):
            labels = [styles.shorten(str(x)) for x in values[key]]
            panel.set_xticks(range(len(labels)), labels, parse_math=False)
        seeds = sentences.count_seeds([len(study.tune_seeds)])
        caption = (
            f"{condition.name}: {metric} on the tuning split against the values that each arm tried, mean over "
            f"{seeds}, with other settings at their chosen values. A value with a diverged seed has no point. The "
            "reference is a level line where it has no values to try."
        )
        drawn.append(study_figures.write(folder, drawing, FOLDER, condition.name, caption))
    return drawn


def _values(study: studies.Study, tuned: Sequence[Tuned], key: str) -> list[Any]:
    """Return the values of a setting that these arms tried, without duplicates, numbers in ascending order."""
    tried = [x for choice in tuned for x in study.grid[choice.arm].get(key, [])]
    values = [x for i, x in enumerate(tried) if x not in tried[:i]]
    return sorted(values) if _numeric(values) else values


def _curve(choice: Tuned, key: str, values: list[Any]) -> study_figures.Curve:
    """Return x_I (indices of the arm's values in `values`) and mean_1I, with other settings as chosen."""
    points = _line(choice.points, choice.best, key)
    mean_I = [math.nan if point.mean is None else point.mean for point in points]
    return np.array([values.index(point.values[key]) for point in points]), np.array([mean_I])

"""Scaling laws: the loss of an arm against its training compute, if the conditions of a study are model sizes.

L(C) = E + a (C / C_0)^-b. C: FLOPs of a training run (three times forward). C_0: the middle of the reference's. E: the
loss that no compute removes, fitted from five sizes on, else 0. (Kaplan et al. 2020, arXiv 2001.08361; with E Hoffmann
et al. 2022, arXiv 2203.15556.) Fitted by least squares of the logarithms to the means over seeds.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import optimize

from experiments.studies import inference, statistics

FEWEST, WITH_CONSTANT = 3, 5  # sizes for a law, and for one with E: three numbers, and two points to spare
RESAMPLES = 300
# Settings that may differ between sizes of one model on the same data. The learning rate may depend on the size.
SIZES = {"model.M", "model.D", "model.H", "model.K", "model.G", "model.F", "model.E"}
SIZES |= {"train.steps", "train.batch_size", "optim.learning_rate", "optim.weight_decay", "optim.warmup_steps"}


@dataclass(frozen=True)
class Law:
    """The law of one arm. Intervals: 95 % of bootstrap samples of the seeds; None if a size has fewer than three."""

    name: str
    flops: list[float]  # of a training run, by size, ascending; and the metric there by seed:
    values: list[dict[int, float]]
    a: float  # E + a is the loss at C_0
    b: float
    b_interval: list[float] | None
    E: float
    misfit: float  # the largest |L(C) / loss - 1|
    compute: float | None  # FLOPs for L_reference(C_0), over C_0; None: not among the measured sizes; 1: the reference
    compute_interval: list[float] | None  # its end is inf if the law never reaches that loss


@dataclass(frozen=True)
class Family:
    """Conditions that are sizes of the same model."""

    conditions: list[str]
    metric: str
    reference: str
    middle: float  # C_0
    laws: list[Law]
    left_out: list[str]  # arms with fewer sizes, or a diverged run


Point = tuple[float, dict[int, float]]  # FLOPs of a training run, and the loss by seed
Numbers = tuple[np.ndarray, np.ndarray, np.ndarray]  # a, b, E, each of X laws


def families(conditions: Sequence[statistics.Condition]) -> list[Family]:
    """Return a family for each group of three or more sizes that differ in FLOPs. The metric must be a loss."""
    groups: dict[str, list[statistics.Condition]] = {}
    for condition in conditions:
        rest = {key: x for key, x in condition.changes.items() if key not in SIZES and not key.startswith("study.")}
        groups.setdefault(json.dumps([condition.metric, rest], sort_keys=True), []).append(condition)
    return [family for group in groups.values() if group[0].better == "less" and (family := _family(group))]


def _family(conditions: Sequence[statistics.Condition]) -> Family | None:
    points: dict[str, dict[str, Point]] = {arm.name: {} for arm in conditions[0].arms}
    for condition in conditions:
        for arm in condition.arms:  # without its diverged runs an arm looks better than it is
            if arm.training_flops and not arm.diverged and min(arm.values.values()) > 0:
                points[arm.name][condition.name] = (arm.training_flops, arm.values)
    base = points[conditions[0].reference]
    if len({round(math.log(flops), 2) for flops, _ in base.values()}) < max(FEWEST, len(base)):
        return None
    sizes = sorted(base, key=lambda name: base[name][0])
    middle, laws, left_out = math.sqrt(base[sizes[0]][0] * base[sizes[-1]][0]), [], []
    for name, arm_points in points.items():
        sides = [(arm_points[size], base[size]) for size in sizes if size in arm_points]
        pairs = [(point, base_point) for point, base_point in sides if point[1].keys() & base_point[1].keys()]
        if len(pairs) == len(sizes):
            laws.append(_law(name, pairs, middle))
        else:
            left_out.append(name)
    return Family(sizes, conditions[0].metric, conditions[0].reference, middle, laws, left_out)


def _law(name: str, pairs: Sequence[tuple[Point, Point]], middle: float) -> Law:
    """Fit the law of an arm. pairs: for each size, the points of arm and reference; seeds of both count."""
    x_SI = np.array([[flops for flops, _ in sides] for sides in pairs]).T / middle  # S: the arm, the reference
    losses = []  # of each size: two rows, the arm and the reference, over the seeds that both have
    for (_, arm_loss), (_, base_loss) in pairs:
        seeds = [seed for seed in arm_loss if seed in base_loss]
        losses.append(np.array([[loss[seed] for seed in seeds] for loss in (arm_loss, base_loss)]))
    counts = [loss_SR.shape[1] for loss_SR in losses]

    def fit_sides(places: Sequence[np.ndarray]) -> list[Numbers]:
        loss_SXI = np.stack([loss_SR[:, at].mean(-1) for loss_SR, at in zip(losses, places, strict=True)], -1)
        return [fit(x_I, loss_XI) for x_I, loss_XI in zip(x_SI, loss_SXI, strict=True)]

    sides, b_interval, compute_interval = fit_sides([np.arange(n)[None] for n in counts]), None, None
    compute, (a, b, E) = float(reaches(*sides)[0]), (float(number[0]) for number in sides[0])
    inside = x_SI[0].min() <= compute <= x_SI[0].max()
    if min(counts) >= inference.FEWEST:
        samples = fit_sides(inference.resamples(counts, RESAMPLES))
        b_interval = inference.percentiles(samples[0][1]).tolist()
        compute_interval = inference.percentiles(reaches(*samples)).tolist() if inside else None
    misfit = max(abs((E + a * x**-b) / loss[0].mean() - 1) for x, loss in zip(x_SI[0], losses, strict=True))
    flops, values = zip(*(arm_point for arm_point, _ in pairs), strict=True)
    relative = (compute if inside else None, compute_interval)
    return Law(name, [*flops], [*values], a, b, b_interval, E, float(misfit), *relative)


def fit(x_I: np.ndarray, loss_XI: np.ndarray) -> Numbers:
    """Fit X laws with C = x C_0. Return a, b and E >= 0 of each."""
    slope_X, level_X = np.polyfit(np.log(x_I), np.log(loss_XI).T, 1)
    if len(x_I) < WITH_CONSTANT:
        return np.exp(level_X), -slope_X, np.zeros(len(loss_XI))

    def misses(start: np.ndarray, loss_I: np.ndarray) -> np.ndarray:  # of: ln a, b, ln E
        return np.logaddexp(start[2], start[0] - start[1] * np.log(x_I)) - np.log(loss_I)

    halves = np.log(loss_XI.min(1) / 2)
    starts = zip(loss_XI, np.stack([halves, -2 * slope_X, halves], 1), strict=True)
    a_X, b_X, E_X = np.array([optimize.least_squares(misses, x, method="lm", args=(start,)).x for start, x in starts]).T
    return np.exp(a_X), b_X, np.exp(E_X)


def reaches(law: Numbers, reference: Numbers) -> np.ndarray:
    """Return C / C_0 at which the arm has the reference's loss at C_0, for each of X laws; inf: nowhere."""
    (a_X, b_X, E_X), (base_X, _, least_X) = law, reference
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        x_X = ((base_X + least_X - E_X) / a_X) ** (-1 / b_X)
    return np.where((b_X > 0) & (base_X + least_X > E_X), x_X, np.inf)

"""Scaling laws: the loss of an arm against its training compute, if the conditions of a study are model sizes.

L(C) = E + a (C / C_0)^-b (Kaplan et al. 2020, arXiv 2001.08361; with E: Hoffmann et al. 2022, arXiv 2203.15556).
C: FLOPs of a training run, three times those of its forward passes. C_0: the geometric mean of the reference's smallest
and largest C. E: the loss that remains at infinite compute; 0 with fewer than five sizes. The law is fitted to means
over seeds, by least squares of logarithms.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import optimize

from experiments.studies import inference, statistics

FEWEST, WITH_CONSTANT = 3, 5  # sizes for a law, and for a law with E (three parameters, two more points)
RESAMPLES = 300  # bootstrap samples
# Settings that may differ between sizes of one model on the same data; those of training may be chosen by size.
SIZES = {"model.M", "model.D", "model.H", "model.K", "model.G", "model.F"}
SIZES |= {"train.steps", "train.batch_size", "optim.learning_rate", "optim.weight_decay", "optim.warmup_steps"}


@dataclass(frozen=True)
class Law:
    """The law of one arm: L(C) = E + a (C / C_0)^-b is the loss after C FLOPs, with C_0 = Family.middle.

    Intervals: 95 % of bootstrap samples of the seeds; None if a size has fewer than three seeds.
    """

    name: str
    flops: list[float]  # of a training run of each size, ascending
    values: list[dict[int, float]]  # seed -> loss, for each size
    a: float  # E + a is the loss at C_0
    b: float
    b_interval: list[float] | None
    E: float
    misfit: float  # the largest |L(C) / loss - 1|
    compute: float | None  # C / C_0 at which the arm reaches L_reference(C_0); None if outside the arm's sizes
    compute_interval: list[float] | None  # an end is inf if the law never reaches that loss


@dataclass(frozen=True)
class Family:
    """Conditions that are sizes of the same model, and the law of each arm. middle: C_0 of the laws, in FLOPs."""

    conditions: list[str]
    metric: str
    reference: str
    middle: float  # C_0
    laws: list[Law]
    left_out: list[str]  # arms that lack a size or have a diverged run


Point = tuple[float, dict[int, float]]  # FLOPs of a training run, seed -> loss
Numbers = tuple[np.ndarray, np.ndarray, np.ndarray]  # a_X, b_X, E_X of X laws


def families(conditions: Sequence[statistics.Condition]) -> list[Family]:
    """Return each family of conditions, with its fitted laws of loss against training FLOPs.

    Conditions count only if lower values of their metric are better. The conditions of a family differ only in settings
    of SIZES. It needs three or more of them, all with different FLOPs.
    """
    groups: dict[str, list[statistics.Condition]] = {}
    for condition in conditions:
        rest = {key: x for key, x in condition.changes.items() if key not in SIZES and not key.startswith("study.")}
        groups.setdefault(json.dumps([condition.metric, rest], sort_keys=True), []).append(condition)
    return [family for group in groups.values() if group[0].better == "less" and (family := _family(group))]


def _family(conditions: Sequence[statistics.Condition]) -> Family | None:
    points: dict[str, dict[str, Point]] = {arm.name: {} for arm in conditions[0].arms}
    for condition in conditions:
        for arm in condition.arms:  # leaving out only the diverged runs would flatter an arm
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
    """Fit the law of an arm to the seeds that arm and reference both have. middle: C_0.

    pairs: (point of the arm, point of the reference) for each size.
    """
    x_SI = np.array([[flops for flops, _ in sides] for sides in pairs]).T / middle  # S = 2: arm, reference
    losses = []  # loss_SR of each size, with the R seeds that both have
    for (_, arm_loss), (_, base_loss) in pairs:
        seeds = [seed for seed in arm_loss if seed in base_loss]
        losses.append(np.array([[loss[seed] for seed in seeds] for loss in (arm_loss, base_loss)]))
    counts = [loss_SR.shape[1] for loss_SR in losses]

    def fit_sides(indices: Sequence[np.ndarray]) -> list[Numbers]:
        """Return (a_X, b_X, E_X) of X laws, loss = E + a x^-b, for the arm and then for the reference.

        indices: for each size, an array (X, R). Each row has the indices of R seeds, whose mean loss is fitted.
        """
        loss_SXI = np.stack([loss_SR[:, i_XR].mean(-1) for loss_SR, i_XR in zip(losses, indices, strict=True)], -1)
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
    """Fit X laws, loss = E + a x^-b, to losses at I model sizes. Return (a_X, b_X, E_X).

    x_I: C / C_0, the training FLOPs of each size relative to C_0 (Family.middle). E is not negative, and 0
    for fewer than WITH_CONSTANT sizes.
    """
    slope_X, level_X = np.polyfit(np.log(x_I), np.log(loss_XI).T, 1)
    if len(x_I) < WITH_CONSTANT:
        return np.exp(level_X), -slope_X, np.zeros(len(loss_XI))

    def residuals(parameters: np.ndarray, loss_I: np.ndarray) -> np.ndarray:  # parameters: ln a, b, ln E
        log_a, b, log_E = parameters
        return np.logaddexp(log_E, log_a - b * np.log(x_I)) - np.log(loss_I)

    halves = np.log(loss_XI.min(1) / 2)
    starts = zip(loss_XI, np.stack([halves, -2 * slope_X, halves], 1), strict=True)
    fits = [optimize.least_squares(residuals, start, method="lm", args=(loss_I,)) for loss_I, start in starts]
    a_X, b_X, E_X = np.array([result.x for result in fits]).T
    return np.exp(a_X), b_X, np.exp(E_X)


def reaches(law: Numbers, reference: Numbers) -> np.ndarray:
    """Return C / C_0: at the compute C, the arm's law has the loss of the reference's law at C_0.

    law, reference: (a_X, b_X, E_X) of the losses E + a (C / C_0)^-b. C: FLOPs of a training run. There is one ratio for
    each of X laws, and inf if a law never has this loss.
    """
    (a_X, b_X, E_X), (base_a_X, _, base_E_X) = law, reference
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        x_X = ((base_a_X + base_E_X - E_X) / a_X) ** (-1 / b_X)
    return np.where((b_X > 0) & (base_a_X + base_E_X > E_X), x_X, np.inf)

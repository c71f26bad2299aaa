"""How the loss of an arm falls with the compute of its training, where the conditions of a study are sizes:

L(C) = E + a (C / C_0)^-b, with C the FLOPs of a training run (three times forward), C_0 the middle of the reference's,
and E, the part that no compute removes, only from five sizes on, else 0 (Kaplan et al. 2020, arXiv 2001.08361; with E
Hoffmann et al. 2022, arXiv 2203.15556). Fitted by least squares of the logarithms to the means over seeds.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import optimize

from experiments.studies import inference, runs, statistics

FEWEST, WITH_CONSTANT = 3, 5  # sizes for a law, and for one with E: three numbers, and two points to spare
RESAMPLES = 300
NARROW = "of simulated laws of four sizes with 3, 5 and 10 seeds they held the true b in 83, 88 and 93 %, not in 95 %"
# What may differ between sizes of one model, on the same data: the learning rate may go with the size.
SIZES = {"model.M", "model.D", "model.H", "model.K", "model.G", "model.F", "model.E"}
SIZES |= {"train.steps", "train.batch_size", "optim.learning_rate", "optim.weight_decay", "optim.warmup_steps"}


@dataclass(frozen=True)
class Law:
    """Of one arm. Intervals: 95 % of bootstrap samples of the seeds; None with fewer than three seeds somewhere."""

    name: str
    flops: list[float]  # of a training run, by size, ascending; and the metric there by seed:
    values: list[dict[int, float]]
    a: float  # E + a is the loss at C_0
    b: float
    b_interval: tuple[float, float] | None
    E: float
    misfit: float  # the largest |L(C) / loss - 1|
    compute: float | None  # FLOPs for L_reference(C_0), over C_0; None: outside of what was measured; 1: the reference
    compute_interval: tuple[float, float] | None  # its end is inf where the law never gets there


@dataclass(frozen=True)
class Family:
    """Conditions that are sizes of the same model."""

    conditions: list[str]
    metric: str
    reference: str
    middle: float  # C_0
    laws: list[Law]
    left_out: list[str]  # arms with fewer sizes, or a diverged run


Numbers = tuple[np.ndarray, np.ndarray, np.ndarray]  # a, b, E, each of X laws


def families(conditions: Sequence[statistics.Condition], finished: Sequence[runs.Run]) -> list[Family]:
    """One for each group of conditions in which the reference has three sizes; nothing of accuracies."""
    groups: dict[str, list[statistics.Condition]] = {}
    for one in conditions:
        rest = {key: x for key, x in one.changes.items() if key not in SIZES and not key.startswith("study.")}
        groups.setdefault(json.dumps([one.metric, rest], sort_keys=True), []).append(one)
    return [family for group in groups.values() if group[0].better == "less" and (family := _family(group, finished))]


def _family(conditions: Sequence[statistics.Condition], finished: Sequence[runs.Run]) -> Family | None:
    reference = conditions[0].reference
    points = {arm.name: _points(arm.name, conditions, finished) for arm in conditions[0].arms}
    base = points[reference]
    if len({round(math.log(flops), 2) for flops, _ in base.values()}) < FEWEST:
        return None
    sizes = sorted(base, key=lambda name: base[name][0])
    middle = math.sqrt(base[sizes[0]][0] * base[sizes[-1]][0])
    paired = {
        name: [(of[size], base[size]) for size in sizes]
        for name, of in points.items()
        if all(of[size][1].keys() & base[size][1].keys() for size in sizes if size in of) and of.keys() >= base.keys()
    }
    laws = [_law(name, pairs, middle) for name, pairs in paired.items()]
    return Family(sizes, conditions[0].metric, reference, middle, laws, [name for name in points if name not in paired])


Point = tuple[float, dict[int, float]]  # FLOPs of a training run, and the loss by seed


def _points(name: str, conditions: Sequence[statistics.Condition], finished: Sequence[runs.Run]) -> dict[str, Point]:
    """Of an arm, by condition; not where a run diverged, without which the loss looks better than it is."""
    points = {}
    for condition in conditions:
        [arm] = [one for one in condition.arms if one.name == name]
        told = [run.summary for run in finished if (run.condition, run.arm) == (condition.name, name)]
        flops = [float(one["steps"] * one["flops_per_step"]) for one in told if one.get("flops_per_step")]
        if flops and not arm.diverged and min(arm.values.values()) > 0:
            points[condition.name] = (flops[0], arm.values)
    return points


def _law(name: str, pairs: Sequence[tuple[Point, Point]], middle: float) -> Law:
    """pairs: of each size the arm's point and the reference's, of which the seeds count that both have."""
    x_SI = np.array([[flops for flops, _ in sides] for sides in pairs]).T / middle  # S: the arm, the reference
    seeds = [[seed for seed in mine if seed in its] for (_, mine), (_, its) in pairs]
    losses = [
        np.array([[of[seed] for seed in both] for _, of in sides]) for sides, both in zip(pairs, seeds, strict=True)
    ]
    loss_SI = np.stack([loss_SR.mean(1) for loss_SR in losses], axis=1)
    mine, its = (fit(x_I, loss_I[None]) for x_I, loss_I in zip(x_SI, loss_SI, strict=True))
    compute, b_interval, compute_interval = float(reaches(mine, its)[0]), None, None
    if min(map(len, seeds)) >= inference.FEWEST:
        draws = inference.resamples([*map(len, seeds)], RESAMPLES)
        drawn_SXI = np.stack([one[:, at].mean(-1) for one, at in zip(losses, draws, strict=True)], axis=-1)
        many = [fit(x_I, loss_XI) for x_I, loss_XI in zip(x_SI, drawn_SXI, strict=True)]
        b_interval, compute_interval = (
            tuple(map(float, inference.percentiles(one))) for one in (many[0][1], reaches(*many))
        )
    inside = x_SI[0].min() <= compute <= x_SI[0].max()
    a, b, E = (float(one[0]) for one in mine)
    misfit = float(np.abs((E + a * x_SI[0] ** -b) / loss_SI[0] - 1).max())
    flops, values = [mine[0] for mine, _ in pairs], [mine[1] for mine, _ in pairs]
    known = (compute, compute_interval) if inside else (None, None)
    return Law(name, flops, values, a, b, b_interval, E, misfit, *known)


def fit(x_I: np.ndarray, loss_XI: np.ndarray) -> Numbers:
    """a, b and E, each of X laws, for C = x C_0."""
    slope_X, level_X = np.polyfit(np.log(x_I), np.log(loss_XI).T, 1)
    a_X, b_X, E_X = np.exp(level_X), -slope_X, np.zeros(len(loss_XI))
    if len(x_I) >= WITH_CONSTANT:
        a_X, b_X, E_X = np.array([_with_constant(x_I, loss_I, b) for loss_I, b in zip(loss_XI, b_X, strict=True)]).T
    return a_X, b_X, E_X


def _with_constant(x_I: np.ndarray, loss_I: np.ndarray, b: float) -> np.ndarray:
    """a, b, E >= 0, from the exponent of the law without E."""

    def misses(logs: np.ndarray) -> np.ndarray:
        log_a, b, log_E = logs
        return np.logaddexp(log_E, log_a - b * np.log(x_I)) - np.log(loss_I)

    half = math.log(loss_I.min() / 2)
    log_a, b, log_E = optimize.least_squares(misses, [half, 2 * b, half], method="lm", max_nfev=400).x
    return np.array([math.exp(log_a), b, math.exp(log_E)])


def reaches(mine: Numbers, its: Numbers) -> np.ndarray:
    """C / C_0 at which the arm has the reference's loss at C_0, for each of X laws; inf: nowhere."""
    (a_X, b_X, E_X), (base_X, _, least_X) = mine, its
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        x_X = ((base_X + least_X - E_X) / a_X) ** (-1 / b_X)
    return np.where((b_X > 0) & (base_X + least_X > E_X), x_X, np.inf)

"""What an arm does over all conditions of a study together, in the measures of Agarwal et al. 2021 (arXiv 2108.13264):
interquartile mean, probability of improvement and performance profile, with stratified bootstrap intervals.

A gain is a difference to the reference, paired by seed, above 0 where the arm is better, over what the reference of
that condition gained by training; docs/studies.md says why not over its SD.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from experiments.studies import inference, runs, statistics

RESAMPLES = 2000


@dataclass(frozen=True)
class Arm:
    """One arm over all conditions. Without a mean and a profile where a scale is None."""

    name: str
    n: int  # pairs
    mean: float | None  # of the gains, interquartile
    interval: list[float] | None
    improvement: float  # P(a run of the arm is better than one of the reference), mean over conditions; of equals half
    improvement_interval: list[float]
    profile: list[list[float]]  # (x, the share of pairs that gained at least x, the ends of its interval), x ascending


@dataclass(frozen=True)
class Overall:
    """The arms that have at least three pairs, and no diverged run, in every condition."""

    reference: str
    scale: dict[str, float | None]  # what the reference gained by training; None: unknown, or nothing
    seeds: int  # the fewest pairs that an arm has in a condition
    arms: list[Arm]
    left_out: list[str]


def measure(conditions: Sequence[statistics.Condition], finished: Sequence[runs.Run]) -> Overall | None:
    """None where there is one condition, or no arm to tell of."""
    scale, arms, left_out, seeds = {one.name: _gained(one, finished) for one in conditions}, [], [], []
    for each in zip(*(one.compared for one in conditions), strict=True) if len(conditions) > 1 else ():
        counts = [arm.difference.n for arm in each]
        if min(counts) < inference.FEWEST or any(one.diverged for one in (*each, *(one.base for one in conditions))):
            left_out.append(each[0].name)
        else:
            seeds.append(min(counts))
            arms.append(_arm(conditions, each, scale))
    return Overall(conditions[0].reference, scale, min(seeds), arms, left_out) if arms else None


def _gained(condition: statistics.Condition, finished: Sequence[runs.Run]) -> float | None:
    """Compute how much training improved the metric of the reference, mean over its seeds."""
    ends, of = condition.base.values, (condition.name, condition.reference)
    mine = [run for run in finished if (run.condition, run.arm) == of and run.seed in ends]
    starts = [run.curve(condition.metric).get(0) for run in mine]
    if not starts or None in starts:
        return None
    gained = float(np.mean([ends[run.seed] for run in mine]) - np.mean(starts))
    return max(0.0, gained if condition.better == "more" else -gained) or None


def _arm(
    conditions: Sequence[statistics.Condition], each: Sequence[statistics.Arm], scale: dict[str, float | None]
) -> Arm:
    """each: the arm in each of the conditions."""
    wins, gains, mean, interval, profile = [], [], None, None, []
    for condition, arm in zip(conditions, each, strict=True):
        sign, both = 1 if condition.better == "more" else -1, (arm.values, condition.base.values)
        x_I, y_I = (sign * np.array([of[seed] for seed in arm.difference.by_seed]) for of in both)
        wins.append((x_I[:, None] > y_I) + (x_I[:, None] == y_I) / 2)
        gains.append((x_I - y_I) / (scale[condition.name] or np.nan))
    counts = [len(one) for one in gains]
    once, draws = [np.arange(n)[None] for n in counts], inference.resamples(counts, RESAMPLES)
    improvement, improvement_X = (_improvement(wins, places) for places in (once, draws))
    if all(scale.values()):
        gain_1I, gain_XI = (np.hstack([of[at] for of, at in zip(gains, at, strict=True)]) for at in (once, draws))
        mean, mean_X = (stats.trim_mean(one, 0.25, axis=1) for one in (gain_1I, gain_XI))
        mean, interval = float(mean[0]), inference.percentiles(mean_X).tolist()
        for x in np.unique(gain_1I):
            ends = inference.percentiles(np.mean(gain_XI >= x, axis=1))
            profile.append([float(x), float(np.mean(gain_1I >= x)), *ends.tolist()])
    known = float(improvement[0]), inference.percentiles(improvement_X).tolist()
    return Arm(each[0].name, sum(counts), mean, interval, *known, profile)


def _improvement(wins: Sequence[np.ndarray], places: Sequence[np.ndarray]) -> np.ndarray:
    """Mean over conditions of the share of all pairs of runs, of these seeds, that the arm wins: the statistic of Mann
    and Whitney. Seeds are drawn for both sides at once, as they are paired."""
    of = [win_II[at_XI[:, :, None], at_XI[:, None]].mean((1, 2)) for win_II, at_XI in zip(wins, places, strict=True)]
    return np.mean(of, axis=0)

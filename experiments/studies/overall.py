"""Measures of an arm over all conditions of a study (Agarwal et al. 2021, arXiv 2108.13264):
interquartile mean, probability of improvement and performance profile, with stratified bootstrap intervals.

A gain is a difference to the reference, paired by seed; above 0 the arm is better. It is divided by what the reference
of that condition gained by training. docs/studies.md explains why its SD is no scale.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from experiments.studies import inference, runs, statistics

RESAMPLES = 2000


@dataclass(frozen=True)
class Arm:
    """One arm over all conditions. Without a mean and a profile if a scale is unknown."""

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
    """Compute the measures; None for a single condition, or if every arm is left out."""
    if len(conditions) < 2:
        return None
    scale = {condition.name: _gain(condition, finished) for condition in conditions}
    unstable = any(condition.base.diverged for condition in conditions)
    arms, left_out, seeds = [], [], []
    for arm_C in zip(*(condition.compared for condition in conditions), strict=True):
        fewest = min(arm.difference.n for arm in arm_C)
        if unstable or fewest < inference.FEWEST or any(arm.diverged for arm in arm_C):
            left_out.append(arm_C[0].name)
        else:
            seeds.append(fewest)
            arms.append(_arm(conditions, arm_C, scale))
    return Overall(conditions[0].reference, scale, min(seeds), arms, left_out) if arms else None


def _gain(condition: statistics.Condition, finished: Sequence[runs.Run]) -> float | None:
    """Compute how much training improved the metric of the reference, mean over its seeds."""
    ends, place = condition.base.values, (condition.name, condition.reference)
    reference_runs = [run for run in finished if (run.condition, run.arm) == place and run.seed in ends]
    starts = [run.curve(condition.metric).get(0) for run in reference_runs]
    if not starts or None in starts:
        return None
    gain = float(np.mean([ends[run.seed] for run in reference_runs]) - np.mean(starts))
    return max(0.0, gain if condition.better == "more" else -gain) or None


def _arm(
    conditions: Sequence[statistics.Condition], arms: Sequence[statistics.Arm], scale: dict[str, float | None]
) -> Arm:
    """Compute the measures of one arm. arms: the arm in each of the conditions."""
    wins, gains, mean, interval, profile = [], [], None, None, []
    for condition, arm in zip(conditions, arms, strict=True):
        sign, seeds = 1 if condition.better == "more" else -1, arm.difference.by_seed
        x_I = sign * np.array([arm.values[seed] for seed in seeds])
        y_I = sign * np.array([condition.base.values[seed] for seed in seeds])
        wins.append((x_I[:, None] > y_I) + (x_I[:, None] == y_I) / 2)
        gains.append((x_I - y_I) / (scale[condition.name] or np.nan))
    counts = [len(gain_I) for gain_I in gains]
    once, draws = [np.arange(n)[None] for n in counts], inference.resamples(counts, RESAMPLES)
    improvement, improvement_X = (_improvement(wins, places) for places in (once, draws))
    if all(scale.values()):
        gain_1I, gain_XI = (np.hstack([gain[at] for gain, at in zip(gains, at, strict=True)]) for at in (once, draws))
        mean, mean_X = (stats.trim_mean(gain_I, 0.25, axis=1) for gain_I in (gain_1I, gain_XI))
        mean, interval = float(mean[0]), inference.percentiles(mean_X).tolist()
        for x in np.unique(gain_1I):
            ends = inference.percentiles(np.mean(gain_XI >= x, axis=1))
            profile.append([float(x), float(np.mean(gain_1I >= x)), *ends.tolist()])
    return Arm(
        name=arms[0].name,
        n=sum(counts),
        mean=mean,
        interval=interval,
        improvement=float(improvement[0]),
        improvement_interval=inference.percentiles(improvement_X).tolist(),
        profile=profile,
    )


def _improvement(wins: Sequence[np.ndarray], places: Sequence[np.ndarray]) -> np.ndarray:
    """Compute the share of all pairs of runs that the arm wins (Mann and Whitney), mean over conditions.

    Seeds are drawn for both sides at once, because they are paired.
    """
    pairs = zip(wins, places, strict=True)
    share_CX = [win_II[at_XI[:, :, None], at_XI[:, None]].mean((1, 2)) for win_II, at_XI in pairs]
    return np.mean(share_CX, axis=0)

"""Measures of an arm over all conditions of a study (Agarwal et al. 2021, arXiv 2108.13264).

Interquartile mean, probability of improvement and performance profile, with stratified bootstrap intervals. A gain is
the paired difference to the reference, positive if the arm is better, divided by the scale of its condition. The scale
is the improvement of the reference by training; docs/studies.md explains why it is not the reference's SD.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from experiments.studies import inference, runs as study_runs, statistics

RESAMPLES = 2000  # bootstrap samples


@dataclass(frozen=True)
class Arm:
    """One arm over all conditions. `mean`, `interval` and `profile` are empty if a condition has no scale."""

    name: str
    n: int  # pairs
    mean: float | None  # interquartile mean of the gains
    interval: list[float] | None
    improvement: float  # P(a run of the arm beats a run of the reference), ties count half; mean over conditions
    improvement_interval: list[float]
    profile: list[list[float]]  # rows (x, share of pairs with a gain >= x, low and high end of its interval), by x


@dataclass(frozen=True)
class Overall:
    """The arms that have at least three pairs, and no diverged run, in every condition."""

    reference: str
    scale: dict[str, float | None]  # condition -> improvement of the reference by training; None: unknown, or none
    seeds: int  # the fewest pairs that an arm has in a condition
    arms: list[Arm]
    left_out: list[str]


def measure(conditions: Sequence[statistics.Condition], finished: Sequence[study_runs.Run]) -> Overall | None:
    """Compute the measures. Return None if there is a single condition or every arm is left out."""
    if len(conditions) < 2:
        return None
    scale = {condition.name: _gain(condition, finished) for condition in conditions}
    unstable = any(condition.base.diverged for condition in conditions)
    arms, left_out, seeds = [], [], []
    for arm_C in zip(*(condition.compared for condition in conditions), strict=True):
        fewest = min(arm.difference.n for arm in arm_C)
        if unstable or fewest < inference.FEWEST or any(arm.diverged or arm.difference.unpaired for arm in arm_C):
            left_out.append(arm_C[0].name)
        else:
            seeds.append(fewest)
            arms.append(_arm(conditions, arm_C, scale))
    return Overall(conditions[0].reference, scale, min(seeds), arms, left_out) if arms else None


def _gain(condition: statistics.Condition, finished: Sequence[study_runs.Run]) -> float | None:
    """Return how much training improved the reference's metric, mean over seeds; None if unknown or not at all."""
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
    original, draws = [np.arange(n)[None] for n in counts], inference.resamples(counts, RESAMPLES)
    improvement, improvement_X = (_improvement(wins, indices) for indices in (original, draws))
    if all(scale.values()):
        gain_1I, gain_XI = (
            np.hstack([gain_I[index_XI] for gain_I, index_XI in zip(gains, indices, strict=True)])
            for indices in (original, draws)
        )
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


def _improvement(wins: Sequence[np.ndarray], indices: Sequence[np.ndarray]) -> np.ndarray:
    """Compute the share of all pairs of runs that the arm wins (Mann and Whitney), mean over conditions, X numbers.

    wins: win_II of each condition. indices: the seeds (X, I) of each condition, the same for both sides, as they are
    paired.
    """
    pairs = zip(wins, indices, strict=True)
    share_CX = [win_II[index_XI[:, :, None], index_XI[:, None]].mean((1, 2)) for win_II, index_XI in pairs]
    return np.mean(share_CX, axis=0)

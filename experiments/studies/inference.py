"""Inference from small samples: intervals, p-values, power, rates, plateaus, steps to a threshold.

Pure functions of numbers, by scipy's distributions. m: the number of intervals that hold together (Bonferroni).
docs/studies.md describes their use in a study.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import optimize, stats

LEVEL = 0.95  # confidence level of all intervals of a family together
POWER = 0.8  # the probability of showing a difference that exists
FEWEST = 3  # pairs; with fewer there is no interval and no verdict
# 99 % quantiles of `separation`'s ratio (largest gap / pooled SD of its two sides) for 4, 5, ..., 20 normal values.
# Simulated, 1,000,000 samples each. For more than 20 values the quantile is smaller, and the last one is used.
GAPS = (27.9, 13.4, 8.99, 6.99, 5.76, 5.01, 4.47, 4.07, 3.76, 3.53, 3.33, 3.16, 3.04, 2.92, 2.83, 2.76, 2.68)
SHARE = 0.1  # of the largest absolute value: a smaller gap, as between accuracies 1.0 and 0.99, shows no plateau


@dataclass(frozen=True)
class Rate:
    """A rate k / n with the uncorrected 95 % interval of its probability (Clopper and Pearson 1934)."""

    k: int
    n: int
    interval: tuple[float, float]


def rate(k: int, n: int) -> Rate:
    """Compute the rate k / n with its exact (Clopper and Pearson) 95 % interval; n must be positive."""
    low, high = stats.binomtest(k, n).proportion_ci(LEVEL, "exact")
    return Rate(k, n, (float(low), float(high)))


def interval(difference_XI: np.ndarray, m: float, extra: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """Compute (low_X, high_X), Student's t interval for the mean along the last axis, at level 1 - 0.05/m (Bonferroni).

    extra: a variance that is added to the variance of the mean. The sum has I - 1 degrees of freedom.
    """
    mean_X, error_X, df = _mean_and_error(difference_XI, extra)
    half_X = stats.t.isf((1 - LEVEL) / m / 2, df) * error_X
    return mean_X - half_X, mean_X + half_X


def p_value(difference_XI: np.ndarray, extra: float = 0.0) -> np.ndarray:
    """Compute p_X, two-sided and uncorrected, of the hypothesis that the mean along the last axis is 0 (t test).

    extra: a variance that is added to the variance of the mean.
    """
    mean_X, error_X, df = _mean_and_error(difference_XI, extra)
    return 2 * stats.t.sf(np.abs(mean_X) / error_X, df)


def _mean_and_error(difference_XI: np.ndarray, extra: float) -> tuple[np.ndarray, np.ndarray, int]:
    n = difference_XI.shape[-1]
    return difference_XI.mean(-1), np.sqrt(np.var(difference_XI, axis=-1, ddof=1) / n + extra), n - 1


def welch(value_XI: np.ndarray, base_XJ: np.ndarray, m: float) -> tuple[tuple[np.ndarray, np.ndarray], np.ndarray]:
    """Compute ((low_X, high_X), p_X): a t interval for the difference of two means at level 1 - 0.05/m, uncorrected p.

    The statistic is Welch's (1947), T = (mean value - mean base) / sqrt(s_I^2/I + s_J^2/J). Its tails are at most those
    of Student's t with min(I, J) - 1 degrees of freedom, for all variances of normal values (Hsu 1938). Proof: |T| > t
    has the probability E[g(w U + (1 - w) V)]. Here g(u) = 2 Phi(-t sqrt(u)) is convex, U and V are independent
    chi-squared values divided by their I - 1 and J - 1 degrees of freedom, and w is the first side's share of the
    variance. So it is at most the larger one of E[g(U)] and E[g(V)], which are such tails.
    """
    sides = value_XI, base_XJ
    df = min(side_XI.shape[-1] for side_XI in sides) - 1
    error_X = np.sqrt(sum(np.var(side_XI, axis=-1, ddof=1) / side_XI.shape[-1] for side_XI in sides))
    difference_X = value_XI.mean(-1) - base_XJ.mean(-1)
    half_X = stats.t.isf((1 - LEVEL) / m / 2, df) * error_X
    return (difference_X - half_X, difference_X + half_X), 2 * stats.t.sf(np.abs(difference_X) / error_X, df)


def power(effect: float, n: int, m: float) -> float:
    """Compute the probability that the interval at 1 - 0.05/m of n paired differences lies above 0.

    effect: their true mean in SDs. The statistic is noncentral t with noncentrality effect * sqrt(n).
    """
    return float(stats.nct.sf(stats.t.isf((1 - LEVEL) / m / 2, n - 1), n - 1, effect * math.sqrt(n)))


def detectable(n: int, m: float) -> float:
    """Compute the smallest true difference, in SDs of the paired difference, that n >= 3 seeds show.

    They show it if, with the probability POWER, the interval of their mean difference at level 1 - 0.05/m lies above 0.
    m: the number of intervals that hold together.
    """
    most = 3 * (stats.t.isf((1 - LEVEL) / m / 2, n - 1) + 1) / math.sqrt(n)
    return float(optimize.brentq(lambda effect: power(effect, n, m) - POWER, 0.0, most))


def seeds_for(effect: float, m: float) -> int:
    """Return the fewest seeds that show a true difference of `effect` SDs with probability POWER.

    They show it if the interval of their mean paired difference, at level 1 - 0.05/m, lies above 0.
    """
    return next(n for n in itertools.count(FEWEST) if power(effect, n, m) >= POWER)


def resamples(counts: Sequence[int], repeats: int) -> list[np.ndarray]:
    """Draw a stratified bootstrap: for each stratum of n seeds, indices (repeats, n). Every call draws the same."""
    random = np.random.default_rng(0)
    return [random.integers(n, size=(repeats, n)) for n in counts]


def percentiles(value_X: np.ndarray) -> np.ndarray:
    """Return the 2.5 % and 97.5 % quantiles over bootstrap samples, the first axis. Values may be inf."""
    return np.quantile(value_X, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0, method="inverted_cdf")


def separation(value_XI: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sort I >= 3 values and find the largest gap between neighbours. Return the gap, its middle and a ratio.

    The ratio is the gap / the pooled SD of the values on either side of it (I - 2 degrees of freedom). If that SD is 0,
    the ratio is inf or nan.
    """
    value_XI = np.sort(np.asarray(value_XI, float), axis=-1)
    gap_XI = np.diff(value_XI, axis=-1)
    first_X1 = gap_XI.argmax(-1, keepdims=True)
    middle_XI = (value_XI[..., :-1] + value_XI[..., 1:]) / 2
    gap_X, middle_X = (np.take_along_axis(of_XI, first_X1, -1)[..., 0] for of_XI in (gap_XI, middle_XI))
    low_XI = np.arange(value_XI.shape[-1]) <= first_X1
    squares_X = sum(side_XI.sum(-1) * np.var(value_XI, axis=-1, where=side_XI) for side_XI in (low_XI, ~low_XI))
    with np.errstate(divide="ignore", invalid="ignore"):
        return gap_X, middle_X, gap_X / np.sqrt(squares_X / (value_XI.shape[-1] - 2))


def plateau(values: Sequence[float]) -> float | None:
    """Return the middle of the gap between two clusters of values; None if there is only one cluster.

    Two clusters arise if some runs never left a plateau; 1 % of normal samples have them by chance. Fewer than 4 values
    give None: with 3, the 99 % quantile of gap / (SD within clusters) is 237 even without a plateau.
    """
    if len(values) < 4:
        return None
    gap, middle, ratio = separation(np.array(values))
    separate = gap > SHARE * np.abs(values).max() and ratio > GAPS[min(len(values), 20) - 4]
    return float(middle) if separate else None


def crossing(curve: Mapping[int, float], threshold: float, *, better: str) -> float | None:
    """Return the step at which the curve, step -> value, reached the threshold; None if it never did.

    The step is interpolated linearly between two evaluations. The next evaluation, if there is one, must confirm it.
    better: "less" or "more".
    """
    steps, sign = sorted(curve), 1 if better == "more" else -1
    reached = [sign * curve[step] >= sign * threshold for step in steps]
    first = next((i for i in range(len(steps)) if all(reached[i : i + 2])), None)
    if not first:
        return None if first is None else float(steps[0])
    before, step = steps[first - 1], steps[first]
    return before + (step - before) * (threshold - curve[before]) / (curve[step] - curve[before])

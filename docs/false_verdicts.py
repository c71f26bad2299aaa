"""Simulate studies of equal arms that choose their learning rates: how many find a difference? For docs/studies.md.

python docs/false_verdicts.py

All arms have the same best loss, and the loss is a parabola in log(rate) whose optimum lies anywhere around the middle
of the four rates tried. Runs have an SD of 0.011. Each arm chooses a rate with its own tuning seeds, by the grid or by
the vertex of a parabola (studies/tuning.py), and trains ten compared runs. A study of 13 arms finds a difference if one
of its 12 intervals (Bonferroni) excludes 0.
"""

import numpy as np
from scipy import stats

STUDIES, ARMS, RUNS, SD, RATES = 4000, 13, 10, 0.011, 4
COSTS = (0.003, 0.01, 0.02)  # loss of a rate that is one step of the grid from the optimum


def choose(mean_XR, interpolates):
    """Return the place of the best of R means, or of the vertex of a parabola as in tuning.interpolate."""
    best_X = mean_XR.argmin(-1)
    middle_X = np.clip(best_X, 1, RATES - 2)
    left, here, right = (np.take_along_axis(mean_XR, (middle_X + k)[..., None], -1)[..., 0] for k in (-1, 0, 1))
    curvature = left - 2 * here + right
    with np.errstate(divide="ignore", invalid="ignore"):
        shift_X = (left - right) / (2 * curvature)
    is_valid = interpolates & (curvature > 0) & (np.abs(shift_X) < 1)
    return np.where(is_valid, middle_X + shift_X, best_X)


def simulate(cost, seeds, interpolates):
    """Return the share of studies that find a difference."""
    rng = np.random.default_rng(0)
    optimum = (RATES - 1) / 2 + rng.uniform(-0.5, 0.5, (STUDIES, ARMS))
    tried = cost * (np.arange(RATES) - optimum[..., None]) ** 2
    mean = (tried + rng.normal(0, SD, (seeds, *tried.shape))).mean(0)
    loss = cost * (choose(mean, interpolates) - optimum) ** 2
    runs = loss[..., None] + rng.normal(0, SD, (STUDIES, ARMS, RUNS))
    p = stats.ttest_rel(runs[:, :-1], runs[:, -1:], axis=-1).pvalue
    return (p * (ARMS - 1) < 0.05).any(1).mean()


def main():
    """Print a row for each rule, and the rate if the rates are the best ones."""
    print("| tuning seeds | rate |", *(f"cost {cost} |" for cost in COSTS))
    for seeds, interpolates in ((1, False), (3, False), (3, True), (10, True)):
        rates = (f"{simulate(cost, seeds, interpolates):.1%} |" for cost in COSTS)
        print(f"| {seeds} | {'parabola' if interpolates else 'grid'} |", *rates)
    print(f"rates known: {simulate(0.0, 1, False):.1%}")


if __name__ == "__main__":
    main()

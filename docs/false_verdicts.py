"""Simulate studies of equal arms that choose their learning rates: how many find a difference? For docs/studies.md.

python docs/false_verdicts.py

All arms have the same best loss, and the loss is a parabola in log(rate) whose optimum lies anywhere around the middle
of the four rates tried. Runs have an SD of 0.011. Each arm chooses a rate with its own tuning seeds, by the grid or by
the vertex of a parabola (studies/tuning.py), and trains ten compared runs. A study of 13 arms finds a difference if one
of its 12 intervals (Bonferroni) excludes 0. The last rule adds the variance by tuning to that of a difference.
"""

import itertools

import numpy as np

from experiments.studies import inference

STUDIES, ARMS, RUNS, SD, RATES = 4000, 13, 10, 0.011, 4
COSTS = (0.003, 0.005, 0.01, 0.015, 0.02, 0.03)  # loss of a rate that is one step of the grid from the optimum


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


def estimate_variance(tried_SXR):
    """Return the variance of the loss by the choice of each arm, as tuning.estimate_variance does, by all resamples."""
    seeds, mean_XR = len(tried_SXR), tried_SXR.mean(0)
    losses = []
    for sample in itertools.product(range(seeds), repeat=seeds):
        place_X = choose(tried_SXR[list(sample)].mean(0), True)
        low_X = np.clip(np.floor(place_X).astype(int), 0, RATES - 2)
        left, right = (np.take_along_axis(mean_XR, (low_X + k)[..., None], -1)[..., 0] for k in (0, 1))
        losses.append(left + (place_X - low_X) * (right - left))
    return np.var(losses, axis=0) * seeds / (seeds - 1)


def simulate(cost, seeds, interpolates, adds_variance=False):
    """Return the share of studies that find a difference."""
    rng = np.random.default_rng(0)
    optimum = (RATES - 1) / 2 + rng.uniform(-0.5, 0.5, (STUDIES, ARMS))
    truth = cost * (np.arange(RATES) - optimum[..., None]) ** 2
    tried = truth + rng.normal(0, SD, (seeds, *truth.shape))
    loss = cost * (choose(tried.mean(0), interpolates) - optimum) ** 2
    runs = loss[..., None] + rng.normal(0, SD, (STUDIES, ARMS, RUNS))
    extra = 2 * estimate_variance(tried).mean(-1, keepdims=True) if adds_variance else 0.0
    p = inference.p_value(runs[:, :-1] - runs[:, -1:], extra)
    return (p * (ARMS - 1) < 0.05).any(1).mean()


def main():
    """Print a row for each rule, and the rate if the rates are the best ones."""
    print("| tuning seeds | rate |", *(f"cost {cost} |" for cost in COSTS))
    rules = {"grid": (False,), "parabola": (True,), "parabola, its variance added": (True, True)}
    for seeds, name in ((1, "grid"), (3, "grid"), (3, "parabola"), (3, "parabola, its variance added")):
        rates = (f"{simulate(cost, seeds, *rules[name]):.1%} |" for cost in COSTS)
        print(f"| {seeds} | {name} |", *rates, flush=True)
    print(f"rates known: {simulate(0.0, 1, False):.1%}")


if __name__ == "__main__":
    main()

"""Fit the cost of one matrix against width and training, with the runs of configs/qk_widths.py.

python docs/qk_surface.py runs/qk_widths

The model of a difference in nats, loss of tied_noself minus that of two matrices, at D features and T steps is

    a + b w + c t + d t^2 + e w t,   w = log2(D / 64),  t = log2(T / 500).

Least squares give it for each seed; the intervals are t intervals over the seeds, at 95 % for all five together. They
leave out the chance in tuning: all sizes have the rate that was chosen at 64 features.
"""

import json
import pathlib
import re
import sys

import numpy as np

from experiments.studies import inference

SIZE = re.compile(r"D(\d+)_steps_(\d+)")  # the name of a condition: features and steps
TERMS = {
    "a, at 64 features and 500 steps": lambda w, t: np.ones_like(w),
    "b, per doubling of the width": lambda w, t: w,
    "c, per doubling of the steps": lambda w, t: t,
    "d, curvature in the steps": lambda w, t: t**2,
    "e, width x steps": lambda w, t: w * t,
}


def load(folder):
    """Return the differences, (seeds, sizes), and the sizes as [(D, steps)]."""
    report = json.loads(pathlib.Path(folder, "report.json").read_text(encoding="utf-8"))
    sizes, columns = [], []
    for condition in report["conditions"]:
        arms = {arm["name"]: arm["values"] for arm in condition["arms"]}
        sizes.append(tuple(map(int, SIZE.fullmatch(condition["name"]).groups())))
        columns.append([arms["tied_noself"][seed] - arms["asymmetric"][seed] for seed in sorted(arms["asymmetric"])])
    return np.array(columns).T, sizes


def fit(difference_SI, sizes):
    """Return the coefficients of the seeds, (seeds, terms), and the SD of what the surface leaves of the means."""
    D_I, steps_I = np.array(sizes, float).T
    w_I, t_I = np.log2(D_I / 64), np.log2(steps_I / 500)
    X_IJ = np.stack([term(w_I, t_I) for term in TERMS.values()], axis=1)
    coefficient_SJ = np.linalg.lstsq(X_IJ, difference_SI.T)[0].T
    rest_I = difference_SI.mean(0) - X_IJ @ coefficient_SJ.mean(0)
    return coefficient_SJ, np.sqrt(np.sum(rest_I**2) / (len(sizes) - len(TERMS)))


def main(folder):
    """Print the differences, the coefficients with their intervals, and how far the surface is from the means."""
    difference_SI, sizes = load(folder)
    coefficient_SJ, rest = fit(difference_SI, sizes)
    for (D, steps), values in zip(sizes, difference_SI.T, strict=True):
        low, high = inference.interval(values, len(sizes))
        print(f"{D:4} features, {steps:4} steps: {values.mean():+.4f} ({low:+.4f} to {high:+.4f})")
    for name, values in zip(TERMS, coefficient_SJ.T, strict=True):
        low, high = inference.interval(values, len(TERMS))
        print(f"{name}: {values.mean():+.4f} ({low:+.4f} to {high:+.4f})")
    print(f"SD of the means around the surface: {rest:.4f}")


if __name__ == "__main__":
    main(*sys.argv[1:])

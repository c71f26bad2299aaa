"""When a run first met a threshold, and how finely that is known."""

import math
import statistics
from collections.abc import Mapping, Sequence


def first_reached(curve: Mapping[int, float], threshold: float, *, more: bool) -> int | None:
    """The first step at which the curve is at the threshold or beyond it; None where it never is."""
    return min((step for step, x in curve.items() if (x >= threshold if more else x <= threshold)), default=None)


def median_step(reached: Mapping[int, int | None]) -> float | None:
    """The median over seeds, one that never got there counting as later than all; None where the median is such."""
    steps = [math.inf if step is None else step for step in reached.values()]
    found = statistics.median(steps) if steps else math.inf
    return found if math.isfinite(found) else None


def every(curves: Sequence[Mapping[int, float]]) -> int | None:
    """The largest number of steps between two evaluations that follow each other."""
    gaps = (b - a for one in curves for a, b in zip(sorted(one), sorted(one)[1:], strict=False))
    return max(gaps, default=None)

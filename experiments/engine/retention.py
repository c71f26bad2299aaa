"""Which checkpoints are kept: the newest, and the best by a metric."""

import math
from collections.abc import Mapping

from experiments.engine import errors

BETTER = {"loss": min, "accuracy": max, "explained": max}  # by the last part of a metric's name


def check(best: str, *, key: str = "train.keep_best") -> None:
    """UserError unless it is '' or a metric of which one knows whether less or more is better, as 'eval/loss'.

    key: the setting that it is the value of.
    """
    if best and _kind(best) not in BETTER:
        raise errors.UserError(f'{key} = "{best}" must be a metric that ends in {", ".join(BETTER)}')


def superfluous(measured: Mapping[int, Mapping[str, float]], *, keep: int, best: str) -> list[int]:
    """Of the steps, with what was measured at each, those that are neither among the newest `keep` nor the best one.

    The best one is the newest of those that are equally good; '' for `best`: there is none.
    """
    kept = set(sorted(measured)[-keep:])
    scores = {step: values[best] for step, values in measured.items() if math.isfinite(values.get(best, math.nan))}
    if scores:
        right = BETTER[_kind(best)](scores.values())
        kept.add(max(step for step, score in scores.items() if score == right))
    return sorted(measured.keys() - kept)


def _kind(metric: str) -> str:
    return metric.rpartition("/")[2]

"""The numbers of a study: spread over seeds, differences paired by seed, and their intervals.

Pure functions of the runs. Student's t on paired differences, by scipy; Bonferroni over the comparisons of a condition.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import scipy
from scipy import stats

from experiments.engine import checkpoint
from experiments.studies import runs as loaded
from experiments.studies import study as studies
from experiments.studies import thresholds

LIBRARY = {"scipy": scipy.__version__}  # whose t distribution it is
LEVEL = 0.95  # of all intervals of a condition together
FEWEST = 3  # pairs below which there is no interval and no verdict
ROUNDING = float(np.finfo(np.float32).eps)  # what metrics are computed in: a spread below this, relative, is none


class Spread(NamedTuple):
    """Mean over n runs and sample standard deviation (n - 1 below), which one run does not have."""

    mean: float
    std: float | None
    n: int


class Interval(NamedTuple):
    low: float
    high: float


class Comparison(NamedTuple):
    """Arm minus reference, paired by seed. Without intervals and p where there are fewer than three pairs, or where
    the differences do not vary."""

    differences: dict[int, float]  # by seed
    spread: Spread | None  # None: no pair
    alike: bool  # whether every difference is zero, but for rounding
    varies: bool  # whether the differences differ from each other by more than rounding
    interval: Interval | None  # 95 % for all comparisons of the condition together
    interval_alone: Interval | None  # 95 % for this one comparison, uncorrected
    p: float | None  # two-sided, uncorrected
    p_corrected: float | None  # times the number of comparisons, at most 1


class Arm(NamedTuple):
    """What the runs of an arm measured in one condition; what diverged is in no number, but named."""

    name: str
    changes: dict[str, Any]
    params: int | None  # None: no run yet
    flops_per_token: float | None
    values: dict[int, float]  # the metric at the end, by seed
    spread: Spread | None
    others: dict[str, Spread]  # other evaluated metrics
    reached: dict[int, int | None]  # first evaluation that met the threshold, by seed; None: none, or diverged
    diverged: dict[int, int | None]  # the step, by seed; None: the end was reached, with a metric that is not finite
    missing: list[int]  # seeds that have no finished run
    other_evaluation: list[int]  # seeds whose held-out examples are not those of the reference, as far as runs tell
    other_batches: list[int]  # seeds whose training batches are not those of the reference, as far as runs tell
    other_initial: list[str]  # weights that do not begin with the reference's values, nor a multiple of them
    comparison: Comparison | None  # None for the reference itself


class Condition(NamedTuple):
    """One table of the report."""

    name: str
    changes: dict[str, Any]
    metric: str
    more_is_better: bool
    threshold: float  # 0.0: none
    every: int | None  # steps between evaluations: the resolution of the steps to the threshold
    comparisons: int  # m, of the whole study, also where runs are missing
    reference: str
    arms: list[Arm]
    baseline: dict[str, float]  # what needs no training, by metric
    guess: dict[str, str]  # and what that is, in words


def spread(values: Sequence[float]) -> Spread | None:
    """Mean and sample standard deviation; None of nothing."""
    if not values:
        return None
    return Spread(float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else None, len(values))


def compare(arm: Mapping[int, float], reference: Mapping[int, float], *, m: int) -> Comparison:
    """Differences over the seeds that both have, with intervals at 1 - 0.05/m and at 0.95."""
    seeds = [seed for seed in arm if seed in reference]
    value_I, base_I = np.array([arm[s] for s in seeds]), np.array([reference[s] for s in seeds])
    difference_I = value_I - base_I
    found = dict(zip(seeds, difference_I.tolist(), strict=True))
    rounding = ROUNDING * max(map(abs, [0.0, *value_I, *base_I]))
    alike = all(abs(d) <= rounding for d in found.values())
    varies = max(found.values(), default=0.0) - min(found.values(), default=0.0) > rounding
    whole = spread(list(found.values()))
    if len(seeds) < FEWEST or not varies:
        return Comparison(found, whole, alike, bool(varies), None, None, None, None)
    test = stats.ttest_rel(value_I, base_I)
    wide, alone = (test.confidence_interval(level) for level in (1 - (1 - LEVEL) / m, LEVEL))
    p = float(test.pvalue)
    return Comparison(found, whole, alike, True, _interval(wide), _interval(alone), p, min(1.0, m * p))


def _interval(found: Any) -> Interval:
    return Interval(float(found.low), float(found.high))


def more_is_better(metric: str) -> bool:
    """Whether a higher value is a better one. UserError where nobody knows."""
    checkpoint.check_best(metric, key="study.metric")
    return checkpoint.BETTER[metric.rpartition("/")[2]] is max


def analyse(study: studies.Study, runs: Sequence[loaded.Run]) -> list[Condition]:
    """The numbers of each condition. UserError for a metric that was not measured, or has no known direction."""
    return [_condition(study, one, [run for run in runs if run.condition == one.name]) for one in study.conditions]


def _condition(study: studies.Study, named: studies.Named, runs: list[loaded.Run]) -> Condition:
    metric, threshold = study.metric[named.name], study.threshold[named.name]
    more = more_is_better(metric)
    for run in runs:
        loaded.check_measured(run, metric)
    m = len(study.arms) - 1
    base = [run for run in runs if run.arm == study.reference]
    reference = _values(base, metric)
    arms = []
    for arm in study.arms:
        mine = [run for run in runs if run.arm == arm.name]
        made = _arm(arm, mine, base, study.seeds, metric, threshold, more=more)
        against = None if arm.name == study.reference else compare(made.values, reference, m=m)
        arms.append(made._replace(comparison=against))
    return Condition(
        name=named.name,
        changes=named.changes,
        metric=metric,
        more_is_better=more,
        threshold=threshold,
        every=thresholds.every([loaded.curve(run, metric) for run in runs]),
        comparisons=m,
        reference=study.reference,
        arms=arms,
        baseline=_baseline(runs),
        guess=_guess(runs),
    )


def _arm(
    named: studies.Named,
    runs: list[loaded.Run],
    reference: list[loaded.Run],
    seeds: list[int],
    metric: str,
    threshold: float,
    *,
    more: bool,
) -> Arm:
    values = _values(runs, metric)
    good = [run for run in runs if run.seed in values]
    lasting = {run.seed: loaded.curve(run, metric) if run.seed in values else {} for run in runs}
    reached = {seed: thresholds.first_reached(curve, threshold, more=more) for seed, curve in lasting.items()}
    first = runs[0].summary if runs else {}
    return Arm(
        name=named.name,
        changes=named.changes,
        params=first.get("params"),
        flops_per_token=first.get("flops_per_token"),
        values=values,
        spread=spread(list(values.values())),
        others=_others(good, metric),
        reached=reached if threshold else {},
        diverged={run.seed: run.summary.get("diverged_at") for run in runs if run.seed not in values},
        missing=[seed for seed in seeds if seed not in {run.seed for run in runs}],
        other_evaluation=loaded.differing(good, reference, "evaluation_crc32"),
        other_batches=loaded.differing(good, reference, "training_crc32"),
        other_initial=loaded.otherwise_begun(good, reference),
        comparison=None,
    )


def _values(runs: Sequence[loaded.Run], metric: str) -> dict[int, float]:
    """The metric at the end by seed, of the runs that have it."""
    return {run.seed: x for run in runs if (x := loaded.value(run, metric)) is not None}


def _others(runs: list[loaded.Run], metric: str) -> dict[str, Spread]:
    """The other evaluated metrics, of the runs that have them."""
    names = dict.fromkeys(name for run in runs for name in run.summary if name.startswith("eval/") and name != metric)
    found = {name: spread(list(_values(runs, name).values())) for name in names}
    return {name: one for name, one in found.items() if one is not None}


def _baseline(runs: list[loaded.Run]) -> dict[str, float]:
    """The same for all runs that see the same data: taken from the first that tells."""
    found: dict[str, float] = {}
    for run in runs:
        told = {k.removeprefix("baseline/"): v for k, v in run.summary.items() if k.startswith("baseline/")}
        found = {k: v for k, v in told.items() if v is not None} | found
    return found


def _guess(runs: list[loaded.Run]) -> dict[str, str]:
    """What the baselines are, where runs tell."""
    told = [run.summary.get("guess") for run in runs]
    return {name: str(words) for one in told if isinstance(one, dict) for name, words in one.items()}

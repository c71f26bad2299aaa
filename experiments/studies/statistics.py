"""The numbers of a study: spread over seeds, differences paired by seed and their intervals, steps to a threshold.

Pure functions of the runs. Student's t on paired differences, by scipy; Bonferroni over the comparisons of a condition.
report.json has these fields under these names.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy
from scipy import stats

from experiments.engine import checkpoint
from experiments.studies import runs as finished
from experiments.studies import study as studies

Runs = list[finished.Run]
LIBRARY = {"scipy": scipy.__version__}  # whose t distribution it is
LEVEL = 0.95  # of all intervals of a condition together
FEWEST = 3  # pairs below which there is no interval and no verdict
ROUNDING = float(np.finfo(np.float32).eps)  # what metrics are computed in: a spread below this, relative, is none

# What is known of an arm against the reference: its kind.
WORSE, BETTER, OPEN = "worse", "better", "no difference found"
SAME, CONSTANT, FEW = "identical", "the same difference in every seed", "too few seeds"


@dataclass(frozen=True)
class Spread:
    """Mean over n runs and sample standard deviation (n - 1 below), which one run does not have."""

    mean: float | None
    std: float | None
    n: int


@dataclass(frozen=True)
class Difference:
    """Arm minus reference, paired by seed. Without intervals and p where there are fewer than three pairs, or where
    the differences do not vary by more than rounding."""

    by_seed: dict[int, float]
    mean: float | None
    std: float | None
    n: int
    interval: tuple[float, float] | None  # 95 % for all comparisons of the condition together
    interval_uncorrected: tuple[float, float] | None  # 95 % for this one comparison
    p: float | None  # two-sided, uncorrected
    p_corrected: float | None  # times the number of comparisons, at most 1
    kind: str  # what the corrected interval says


@dataclass(frozen=True)
class ThresholdStep:
    """The first evaluation that met the threshold, by seed; None: none did, or the run diverged."""

    by_seed: dict[int, int | None]
    median: float | None  # a seed that never got there is later than all; None where the median is such
    reached: int  # of so many seeds:
    of: int


@dataclass(frozen=True)
class Arm:
    """What the runs of an arm measured in one condition; what diverged is in no number, but named."""

    name: str
    changes: dict[str, Any]
    params: int | None  # None: no run yet
    flops_per_token: float | None  # forward
    values: dict[int, float]  # the metric at the end, by seed; and their spread:
    mean: float | None
    std: float | None
    n: int
    others: dict[str, Spread]  # other evaluated metrics
    other_evaluation: list[int]  # seeds whose held-out examples are not those of the reference
    other_batches: list[int]  # seeds whose training batches are not those of the reference
    other_initial: list[str]  # weights that do not begin with the reference's values, nor a multiple of them
    threshold_step: ThresholdStep | None  # None: no threshold
    difference: Difference | None  # None: the reference itself
    symmetry: dict[str, list[float | None]]  # measure -> of each layer at the end, mean over seeds
    attention: dict[str, list[float | None]]  # the same
    diverged: dict[int, int | None]  # the step, by seed; None: the end was reached, with a metric that is not finite
    missing: list[int]  # seeds that have no finished run


@dataclass(frozen=True)
class Condition:
    """One table of the report."""

    name: str
    changes: dict[str, Any]
    metric: str
    better: str  # "less" or "more"
    threshold: float | None
    evaluation_interval: int | None  # steps between evaluations: the resolution of the steps to the threshold
    comparisons: int  # m, of the whole study, also where runs are missing
    baseline: dict[str, float]  # what needs no training, by metric
    guess: dict[str, str]  # and what that is, in words
    reference: str
    arms: list[Arm]

    @property
    def compared(self) -> list[Arm]:
        """The arms beside the reference."""
        return [arm for arm in self.arms if arm.difference]


def analyse(study: studies.Study, runs: Sequence[finished.Run]) -> list[Condition]:
    """The numbers of each condition. UserError for a metric that was not measured."""
    conditions = []
    for named in study.conditions:
        mine, metric = [run for run in runs if run.condition == named.name], study.metric[named.name]
        gaps = (b - a for run in mine for a, b in itertools.pairwise(sorted(run.curve(metric))))
        baselines = [(k[9:], x) for run in mine[::-1] for k, x in run.summary.items() if k.startswith("baseline/")]
        condition = Condition(
            name=named.name,
            changes=named.changes,
            metric=metric,
            better="more" if checkpoint.BETTER[metric.rpartition("/")[2]] is max else "less",
            threshold=study.threshold[named.name] or None,
            evaluation_interval=max(gaps, default=None),
            comparisons=len(study.arms) - 1,
            baseline={name: x for name, x in baselines if x is not None},
            guess={name: words for run in mine for name, words in run.summary.get("guess", {}).items()},
            reference=study.reference,
            arms=[],
        )
        reference = [run for run in mine if run.arm == study.reference]
        for arm in study.arms:
            of_arm = [run for run in mine if run.arm == arm.name]
            base = [] if arm.name == study.reference else reference
            condition.arms.append(_arm(condition, arm, study.seeds, of_arm, base))
        conditions.append(condition)
    return conditions


def _arm(condition: Condition, named: studies.Named, seeds: list[int], runs: Runs, reference: Runs) -> Arm:
    """The arm `named` beside the runs of the reference, of which the reference itself gets none."""
    metric, threshold, better = condition.metric, condition.threshold, condition.better
    values = _values(runs, metric)
    whole = [run for run in runs if run.seed in values]
    curves = {run.seed: run.curve(metric) if run.seed in values else {} for run in runs}
    others = dict.fromkeys(name for run in whole for name in run.summary if name.startswith("eval/") and name != metric)
    spreads = {name: spread(_values((run for run in whole if name in run.summary), name).values()) for name in others}
    difference = compare(values, _values(reference, metric), m=condition.comparisons, better=better)
    pairs = [(run, its) for run in whole for its in reference if its.seed == run.seed]
    apart = (finished.apart(run.summary.get("initial", {}), its.summary.get("initial", {})) for run, its in pairs)
    return Arm(
        name=named.name,
        changes=named.changes,
        params=runs[0].summary.get("params") if runs else None,
        flops_per_token=runs[0].summary.get("flops_per_token") if runs else None,
        values=values,
        **vars(spread(values.values())),
        others={name: one for name, one in spreads.items() if one.n},
        other_evaluation=_unlike(pairs, "evaluation_crc32"),
        other_batches=_unlike(pairs, "training_crc32"),
        other_initial=list(dict.fromkeys(itertools.chain(*apart))),
        threshold_step=None if threshold is None else threshold_step(curves, threshold, better=better),
        difference=None if named.name == condition.reference else difference,
        symmetry=_layer_means(whole, finished.SYMMETRY),
        attention=_layer_means(whole, finished.ATTENTION),
        diverged={run.seed: run.summary.get("diverged_at") for run in runs if run.seed not in values},
        missing=[seed for seed in seeds if seed not in curves],
    )


def _values(runs: Iterable[finished.Run], metric: str) -> dict[int, float]:
    """The metric at the end by seed, of the runs that have it."""
    return {run.seed: x for run in runs if (x := run.value(metric)) is not None}


def _unlike(pairs: Iterable[tuple[finished.Run, finished.Run]], digest: str) -> list[int]:
    """The seeds of these pairs of runs whose digests in summary.json differ."""
    return [run.seed for run, its in pairs if run.summary.get(digest) != its.summary.get(digest)]


def _layer_means(runs: list[finished.Run], measures: Iterable[str]) -> dict[str, list[float | None]]:
    """Measure -> its mean over runs in each layer; without measures that no run has."""
    means = {}
    for name in measures:
        columns = itertools.zip_longest(*(run.layers(name) for run in runs))
        if numbers := [[x for x in column if x is not None] for column in columns]:
            means[name] = [sum(column) / len(column) if column else None for column in numbers]
    return means


def spread(values: Iterable[float]) -> Spread:
    """Mean, sample standard deviation and number of the values."""
    values = list(values)
    mean = float(np.mean(values)) if values else None
    return Spread(mean, float(np.std(values, ddof=1)) if len(values) > 1 else None, len(values))


def compare(arm: Mapping[int, float], reference: Mapping[int, float], *, m: int, better: str) -> Difference:
    """Differences over the seeds that both have, with intervals at 1 - 0.05/m and at 0.95."""
    seeds = [seed for seed in arm if seed in reference]
    value_I, base_I = np.array([arm[s] for s in seeds]), np.array([reference[s] for s in seeds])
    difference_I = value_I - base_I
    interval, uncorrected, p = None, None, None
    rounding = ROUNDING * np.abs([0.0, *value_I, *base_I]).max()
    if len(seeds) < FEWEST:
        kind = FEW
    elif np.ptp(difference_I) <= rounding:
        kind = SAME if np.abs(difference_I).max() <= rounding else CONSTANT
    else:
        test = stats.ttest_rel(value_I, base_I)
        interval, uncorrected = (tuple(map(float, test.confidence_interval(x))) for x in (1 - (1 - LEVEL) / m, LEVEL))
        p = float(test.pvalue)
        side = "more" if interval[0] > 0 else "less"
        kind = OPEN if interval[0] <= 0 <= interval[1] else BETTER if side == better else WORSE
    return Difference(
        by_seed=dict(zip(seeds, difference_I.tolist(), strict=True)),
        **vars(spread(difference_I)),
        interval=interval,
        interval_uncorrected=uncorrected,
        p=p,
        p_corrected=None if p is None else min(1.0, m * p),
        kind=kind,
    )


def threshold_step(curves: Mapping[int, Mapping[int, float]], threshold: float, *, better: str) -> ThresholdStep:
    """Where the curve of each seed, step -> value, was first at the threshold or beyond it."""
    sign = 1 if better == "more" else -1
    steps = {
        seed: min((step for step, x in curve.items() if sign * x >= sign * threshold), default=None)
        for seed, curve in curves.items()
    }
    reached = [step for step in steps.values() if step is not None]
    never = [math.inf] * (len(steps) - len(reached))
    median = float(np.median(reached + never)) if steps else math.inf
    return ThresholdStep(steps, median if math.isfinite(median) else None, len(reached), len(steps))

"""The numbers of a study: spread over seeds, differences paired by seed and their intervals, steps to a threshold.

Pure functions of the runs and of the study's plan log. report.json has these fields under these names.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy import stats

from experiments.engine import checkpoint
from experiments.studies import inference, plan, runs as finished, study as studies

Runs = list[finished.Run]
Curves = Mapping[int, Mapping[int, float]]  # seed -> step -> value
ROUNDING = float(np.finfo(np.float32).eps)  # relative: a smaller spread is rounding
BEST = {"less": 0.0, "more": 1.0}  # of the metrics there are: loss, accuracy, explained

# The kinds of a comparison of an arm with the reference.
WORSE, BETTER, OPEN = "worse", "better", "no difference found"
SAME, CEILING, EQUAL, FEW = "identical", "at the ceiling", "equal within the margin", "too few seeds"
UNSTABLE, STUCK = "unstable", "in two clusters"  # means are not compared
FLAT = "no spread"  # equal in every seed, and so small that it may be a step or two of an accuracy


@dataclass(frozen=True)
class Spread:
    """Mean over n runs and sample standard deviation (divisor n - 1; None for a single run)."""

    mean: float | None
    std: float | None
    n: int


@dataclass
class Difference:
    """Arm minus reference, paired by seed.

    `interval` and `p` are None for fewer than three pairs, for differences that vary only by rounding, and if seeds
    diverged or stayed on a plateau.
    """

    by_seed: dict[int, float]
    mean: float | None
    std: float | None
    n: int
    kind: str  # one of the constants above
    interval: tuple[float, float] | None = None  # 95 % for all comparisons of the family, and all looks, together
    p: float | None = None  # two-sided, uncorrected
    p_corrected: float | None = None  # Holm's over the family, times the looks, at most 1
    correlation: float | None = None  # between the arm's values and the reference's: the gain of pairing
    detectable: float | None = None  # the smallest that n seeds of this spread show with probability 0.8
    rates: list[inference.Rate] | None = None  # of unstable and stuck seeds: the arm's, the reference's


@dataclass(frozen=True)
class ThresholdStep:
    """Step at which each seed reached the threshold; None if it never did, or if the run diverged.

    Steps are interpolated linearly between two evaluations. The next evaluation must confirm them.
    """

    by_seed: dict[int, float | None]
    median: float | None  # a seed that never reached it is later than all; None: half of the seeds or more never did
    reached: int  # the number of seeds that did, of all `of`
    of: int
    difference: float | None  # paired mean; None for the reference, and if a pair has a None
    interval: tuple[float, float] | None  # as of Difference; a family apart from the metric's


@dataclass(frozen=True)
class Arm:
    """Measurements of an arm in one condition. Diverged runs are listed and excluded from all numbers."""

    name: str
    changes: dict[str, Any]
    params: int | None  # None: no finished run
    flops_per_token: float | None  # forward
    training_flops: float | None  # of a run
    values: dict[int, float]  # the metric at the end, by seed; and their spread:
    mean: float | None
    std: float | None
    n: int
    others: dict[str, Spread]  # other evaluated metrics
    other_evaluation: list[int]  # seeds that have other held-out examples than the reference
    other_batches: list[int]  # seeds that have other training batches than the reference
    other_initial: list[str]  # weights that do not begin with the reference's values, nor a multiple of them
    threshold_step: ThresholdStep | None  # None: no threshold
    difference: Difference | None  # None: the reference itself
    symmetry: dict[str, list[float | None]]  # measure -> mean over seeds, by layer, at the end
    attention: dict[str, list[float | None]]  # likewise
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
    evaluation_interval: int | None  # steps between evaluations
    family: str  # intervals hold together for all comparisons of the "study" or of the "condition"
    comparisons: int  # m, of the family: all that were ever planned in this folder, also if runs are missing
    looks: int  # planned analyses, for which they hold together too
    margin: float  # of equality; 0: it is not claimed
    baseline: dict[str, float]  # metric -> its value without training
    guess: dict[str, str]  # metric -> the name of that baseline
    reference: str
    arms: list[Arm]

    @property
    def compared(self) -> list[Arm]:
        """All arms except the reference."""
        return [arm for arm in self.arms if arm.difference]

    @property
    def base(self) -> Arm:
        """The reference."""
        return next(arm for arm in self.arms if arm.difference is None)

    @property
    def together(self) -> int:
        """The number of intervals that hold together. Each is at 1 - 0.05 over this number."""
        return self.comparisons * self.looks


def analyse(study: studies.Study, runs: Sequence[finished.Run], past: plan.Past = plan.NOTHING) -> list[Condition]:
    """Compute the numbers of each condition. Raises UserError if a metric was not measured."""
    conditions, planned = [], past.comparisons | plan.comparisons(study)
    for entry in study.conditions:
        condition_runs, metric = [run for run in runs if run.condition == entry.name], study.metric[entry.name]
        gaps = (b - a for run in condition_runs for a, b in itertools.pairwise(sorted(run.curve(metric))))
        summary = {key: x for run in condition_runs[::-1] for key, x in run.summary.items() if x is not None}
        baseline = {key.removeprefix("baseline/"): x for key, x in summary.items() if key.startswith("baseline/")}
        condition = Condition(
            name=entry.name,
            changes=entry.changes,
            metric=metric,
            better="more" if checkpoint.BETTER[metric.rpartition("/")[2]] is max else "less",
            threshold=study.threshold[entry.name] or None,
            evaluation_interval=max(gaps, default=None),
            family=study.correction,
            comparisons=sum(study.correction == "study" or where == entry.name for where, *_ in planned),
            looks=study.looks,
            margin=study.margin[entry.name],
            baseline=baseline,
            guess={name: words for run in condition_runs for name, words in run.summary.get("guess", {}).items()},
            reference=study.reference,
            arms=[],
        )
        runs_by_arm = {arm.name: [run for run in condition_runs if run.arm == arm.name] for arm in study.arms}
        for arm in study.arms:
            base = [] if arm.name == study.reference else runs_by_arm[study.reference]
            condition.arms.append(_arm(condition, arm, study.seeds, runs_by_arm[arm.name], base))
        conditions.append(condition)
    for family in [conditions] if study.correction == "study" else [[condition] for condition in conditions]:
        _correct(family)
    return conditions


def judged(conditions: Iterable[Condition]) -> set[int]:
    """Return the seeds of all comparisons that have a verdict."""
    arms = (arm for condition in conditions for arm in condition.compared if arm.difference.kind != FEW)
    return {seed for arm in arms for seed in (*arm.difference.by_seed, *arm.diverged)}


def _correct(family: Sequence[Condition]) -> None:
    """Set `p_corrected`: Holm's correction over the comparisons of the family, times the planned analyses."""
    differences = [arm.difference for condition in family for arm in condition.compared if arm.difference.p is not None]
    corrected = inference.holm([difference.p for difference in differences], family[0].comparisons)
    for difference, p in zip(differences, corrected, strict=True):
        difference.p_corrected = min(1.0, family[0].looks * p)


def _arm(condition: Condition, entry: studies.Named, seeds: list[int], runs: Runs, reference: Runs) -> Arm:
    """Compute the numbers of the arm `entry`. `reference` is empty for the reference itself."""
    values = _values(runs, condition.metric)
    ended = [run for run in runs if run.seed in values]
    metrics = dict.fromkeys(name for run in ended for name in run.summary if name.startswith("eval/"))
    measured = {name: _values([run for run in ended if name in run.summary], name) for name in metrics}
    pairs = [(run, base) for run in ended for base in reference if base.seed == run.seed]
    initial = ([run.summary.get("initial", {}) for run in pair] for pair in pairs)
    curves = (
        {run.seed: run.curve(condition.metric) if run.value(condition.metric) is not None else {} for run in side}
        for side in (runs, reference)
    )
    options = {"m": condition.together, "better": condition.better}
    return Arm(
        name=entry.name,
        changes=entry.changes,
        params=runs[0].summary.get("params") if runs else None,
        flops_per_token=runs[0].summary.get("flops_per_token") if runs else None,
        training_flops=max((run.flops for run in runs if run.flops), default=None),
        values=values,
        **vars(spread(values.values())),
        others={name: spread(x.values()) for name, x in measured.items() if x and name != condition.metric},
        other_evaluation=_unlike(pairs, "evaluation_crc32"),
        other_batches=_unlike(pairs, "training_crc32"),
        other_initial=list(dict.fromkeys(name for pair in initial for name in finished.unpaired_weights(*pair))),
        threshold_step=threshold_step(*curves, condition.threshold, **options) if condition.threshold else None,
        difference=None if entry.name == condition.reference else _difference(condition, runs, reference),
        symmetry=_layer_means(ended, finished.SYMMETRY),
        attention=_layer_means(ended, finished.ATTENTION),
        diverged={run.seed: run.summary.get("diverged_at") for run in runs if run.seed not in values},
        missing=[seed for seed in seeds if seed not in {run.seed for run in runs}],
    )


def _values(runs: Iterable[finished.Run], metric: str) -> dict[int, float]:
    """Return seed -> final metric, for the runs that have it."""
    return {run.seed: x for run in runs if (x := run.value(metric)) is not None}


def _unlike(pairs: Iterable[tuple[finished.Run, finished.Run]], digest: str) -> list[int]:
    """Return the seeds of the pairs of runs whose digests in summary.json differ."""
    return [run.seed for run, base in pairs if run.summary.get(digest) != base.summary.get(digest)]


def _layer_means(runs: list[finished.Run], measures: Iterable[str]) -> dict[str, list[float | None]]:
    """Return measure -> mean over runs in each layer, for the measures that any run has."""
    means = {}
    for name in measures:
        columns = itertools.zip_longest(*(run.layers(name) for run in runs))
        if numbers := [[x for x in column if x is not None] for column in columns]:
            means[name] = [sum(column) / len(column) if column else None for column in numbers]
    return means


def spread(values: Iterable[float]) -> Spread:
    """Compute mean, sample standard deviation and number of the values."""
    values = list(values)
    mean = float(np.mean(values)) if values else None
    return Spread(mean, float(np.std(values, ddof=1)) if len(values) > 1 else None, len(values))


def compare(
    arm: Mapping[int, float], reference: Mapping[int, float], *, m: int, better: str, margin: float = 0.0
) -> Difference:
    """Compare over the seeds that both sides have, with an interval at 1 - 0.05/m. `p_corrected` stays None."""
    seeds = [seed for seed in arm if seed in reference]
    value_I, base_I = (np.array([values[seed] for seed in seeds]) for values in (arm, reference))
    difference_I, every = value_I - base_I, np.array([*value_I, *base_I])
    by_seed = dict(zip(seeds, difference_I.tolist(), strict=True))
    result = Difference(by_seed, **vars(spread(difference_I)), kind=FEW)
    if result.n < inference.FEWEST:
        return result
    rounding = ROUNDING * np.abs(every).max()
    if np.abs(difference_I).max() <= rounding:
        result.kind = CEILING if np.abs(every - BEST[better]).max() <= rounding else SAME
        return result
    if np.ptp(difference_I) > rounding:
        result.interval = tuple(map(float, inference.interval(difference_I, m)))
        result.p = float(stats.ttest_1samp(difference_I, 0.0).pvalue)
        result.detectable = inference.detectable(result.n, m) * result.std
    if min(np.ptp(value_I), np.ptp(base_I)) > rounding:
        result.correlation = float(np.corrcoef(value_I, base_I)[0, 1])
    low, high = result.interval or (result.mean, result.mean)  # without a spread it is what it is in every seed
    if result.interval is None and abs(result.mean) <= inference.SHARE * np.abs(every).max():
        result.kind = FLAT
    elif result.interval is not None and -margin <= low and high <= margin:
        result.kind = EQUAL
    elif low <= 0 <= high:
        result.kind = OPEN
    else:
        result.kind = BETTER if (low > 0) == (better == "more") else WORSE
    return result


def _difference(condition: Condition, arm: Runs, reference: Runs) -> Difference:
    """Compare arm and reference. If seeds of a side diverged or stayed on a plateau, give rates, no verdict."""
    values, base = sides = [_values(runs, condition.metric) for runs in (arm, reference)]
    result = compare(values, base, m=condition.together, better=condition.better, margin=condition.margin)
    lost = [len(runs) - len(ended) for runs, ended in zip((arm, reference), sides, strict=True)]
    middles = [inference.plateau(list(ended.values())) for ended in sides]
    if len({run.seed for run in arm} & {run.seed for run in reference}) < inference.FEWEST:
        return result
    if any(lost):
        kind, counts, totals = UNSTABLE, lost, (arm, reference)
    elif middles != [None, None] and result.kind not in (SAME, CEILING):
        sign = 1 if condition.better == "more" else -1
        first, second = middles
        middles = [second if first is None else first, first if second is None else second]
        worse = (sum(sign * x < sign * y for x in ended.values()) for ended, y in zip(sides, middles, strict=True))
        kind, counts, totals = STUCK, worse, sides
    else:
        return result
    rates = [inference.rate(k, len(side)) for k, side in zip(counts, totals, strict=True)]
    return replace(result, kind=kind, rates=rates, interval=None, p=None, detectable=None)


def threshold_step(curves: Curves, reference: Curves, threshold: float, *, m: int, better: str) -> ThresholdStep:
    """Compute the step at which each seed reached the threshold, and the paired difference to the reference."""
    steps, base = (
        {seed: inference.crossing(curve, threshold, better=better) for seed, curve in curves_of_side.items()}
        for curves_of_side in (curves, reference)
    )
    reached = [step for step in steps.values() if step is not None]
    median = float(np.median(reached + [math.inf] * (len(steps) - len(reached)))) if steps else math.inf
    mean = interval = None
    if None not in [x for seed in steps.keys() & base.keys() for x in (steps[seed], base[seed])]:
        difference = compare(steps, base, m=m, better="less")
        mean, interval = difference.mean, difference.interval
    return ThresholdStep(steps, median if math.isfinite(median) else None, len(reached), len(steps), mean, interval)

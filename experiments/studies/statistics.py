"""The numbers of a study: spread over seeds, differences paired by seed and their intervals, steps to a threshold.

Pure functions of the runs and of the study's plan log. report.json uses the names of the dataclasses' fields.
"""

import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from experiments.studies import inference, plan, runs as study_runs, study as studies

Runs = list[study_runs.Run]
Curves = Mapping[int, Mapping[int, float]]  # seed -> step -> value
ROUNDING = float(np.finfo(np.float32).eps)  # relative: a smaller difference counts as rounding
BEST = {"less": 0.0, "more": 1.0}  # the best possible value: of loss; of accuracy and explained
UNLIMITED = (-math.inf, math.inf)  # the smallest and the largest possible value of a metric
ENDS = {"less": (0.0,), "more": (0.0, 1.0, 100.0)}  # of a scale: all runs can have this value although they differ

# The kinds of result of a comparison with the reference: docs/studies.md.
WORSE, BETTER, OPEN = "worse", "better", "no difference found"
SAME, CEILING, EQUAL, FEW = "identical", "at the ceiling", "equal within the margin", "too few seeds"
UNSTABLE, STUCK = "unstable", "in two clusters"  # means are not compared
FLAT = "no spread"  # the difference is the same in every seed, and the seeds are too few for the sign test
IDENTICAL = {  # (is the arm constant, is the reference) -> kind
    (True, False): "identical runs of the arm",
    (False, True): "identical runs of the reference",
    (True, True): "identical runs of both",
}


@dataclass(frozen=True)
class Spread:
    """Mean (None without runs) and sample standard deviation (divisor n - 1; None below two runs) of n runs."""

    mean: float | None
    std: float | None
    n: int


@dataclass
class Difference:
    """Arm minus reference, paired by seed, or the difference of the means of independent runs (`unpaired`).

    `interval` and `p` are None for fewer than three pairs, for differences within rounding, and for diverged, stuck or
    identical runs. If all pairs have the same difference, `interval` is None, and p is that of the exact sign test.
    """

    by_seed: dict[int, float]  # {} if unpaired, and then std is None
    mean: float | None
    std: float | None
    n: int
    kind: str  # one of the constants above
    interval: tuple[float, float] | None = None  # 95 % together with all comparisons and looks of the family
    p: float | None = None  # two-sided, uncorrected
    p_corrected: float | None = None  # times all comparisons and looks of the family (Bonferroni), at most 1
    correlation: float | None = None  # of the arm's and the reference's values: if high, pairing helps
    detectable: float | None = None  # the smallest difference that n seeds with this SD show with power 0.8
    rates: list[inference.Rate] | None = None  # of diverged or stuck seeds: of the arm, of the reference
    unpaired: tuple[int, int] | None = None  # runs of the arm and of the reference, n is the smaller; None: paired


@dataclass(frozen=True)
class ThresholdStep:
    """Steps at which the seeds reached the threshold, interpolated (inference.crossing)."""

    by_seed: dict[int, float | None]  # None: the seed never reached it, or diverged
    median: float | None  # over all seeds; None if half of them or more never reached it
    reached: int  # the number of seeds that reached it
    of: int  # the number of all seeds
    difference: float | None  # mean of arm - reference; None: the reference, or a common seed lacks a step
    interval: tuple[float, float] | None  # as in Difference, but these intervals are a family of their own


@dataclass(frozen=True)
class Arm:
    """Measurements of an arm in one condition.

    Diverged runs are listed, and excluded from means and SDs. They count in the verdict of `difference`, and in
    `threshold_step` as runs that did not reach the threshold.
    """

    name: str
    changes: dict[str, Any]
    params: int | None  # None: no finished run
    flops_per_token: float | None  # forward
    training_flops: float | None  # of a run
    values: dict[int, float]  # seed -> the metric at the end of training
    mean: float | None  # of `values`, like std and n
    std: float | None
    n: int
    steps: list[int]  # the different numbers of training steps of its runs, ascending; 0: unknown
    others: dict[str, Spread]  # other evaluated metrics
    other_evaluation: list[int]  # seeds whose held-out examples differ from the reference's
    other_batches: list[int]  # seeds whose training batches differ from the reference's
    other_initial: list[str]  # weights whose initial values are no multiple of the reference's
    threshold_step: ThresholdStep | None  # None: no threshold
    difference: Difference | None  # None: the arm is the reference
    symmetry: dict[str, list[float | None]]  # measure -> mean over seeds in each layer, at the end of training
    diverged: dict[int, int | None]  # seed -> step; None: the run reached the end with a metric that is not finite
    missing: list[int]  # seeds that have no finished run


@dataclass(frozen=True)
class Condition:
    """The results of one condition of a study, which are one table of the report."""

    name: str
    changes: dict[str, Any]  # settings that the condition changes
    metric: str
    better: str  # "less" or "more"
    threshold: float | None  # the metric's value that arms are timed to reach (Arm.threshold_step)
    evaluation_interval: int | None  # steps between evaluations
    family: str  # intervals hold together for all comparisons of the "study" or of the "condition"
    comparisons: int  # m of the family: all that were ever planned in this folder, also those with missing runs
    looks: int  # planned analyses; intervals hold together for all of them too
    margin: float  # the largest difference that counts as equal; 0: equality is never claimed
    baseline: dict[str, float]  # metric -> its value without training
    guess: dict[str, str]  # metric -> how its baseline guesses
    tuning_variance: float | None  # of an arm's mean, by the choice of settings. None: one tuning seed; 0: no choice
    reference: str
    arms: list[Arm]

    @property
    def compared(self) -> list[Arm]:
        """All arms except the reference."""
        return [arm for arm in self.arms if arm.difference]

    @property
    def base(self) -> Arm:
        """The arm of the reference, to which the other arms are compared."""
        return next(arm for arm in self.arms if arm.difference is None)

    @property
    def together(self) -> int:
        """The number of confidence intervals with a joint level of 0.95 or more: each has 1 - 0.05 / this number."""
        return self.comparisons * self.looks


def analyse(
    study: studies.Study,
    runs: Sequence[study_runs.Run],
    past: plan.Past = plan.NOTHING,
    tuning_variances: Mapping[str, float | None] = {},
) -> list[Condition]:
    """Compute the numbers of each condition. Raises UserError if a finished run lacks the metric.

    past: the comparisons planned before; intervals also hold together with them. tuning_variances: condition -> the
    variance of an arm's mean by the choice of settings (Condition.tuning_variance).
    """
    conditions, planned = [], past.comparisons | plan.comparisons(study)
    for entry in study.conditions:
        condition_runs = [run for run in runs if run.condition == entry.name]
        gaps = (b - a for run in condition_runs for a, b in itertools.pairwise(sorted(run.curve(entry.metric))))
        counted = [place for place, *_ in planned if study.correction == "study" or place == entry.name]
        summary = {key: x for run in condition_runs[::-1] for key, x in run.summary.items() if x is not None}
        baseline = {key.removeprefix("baseline/"): x for key, x in summary.items() if key.startswith("baseline/")}
        condition = Condition(
            **entry._asdict() | {"threshold": entry.threshold or None},
            better=study_runs.choose_best(entry.metric, condition_runs).better,
            evaluation_interval=max(gaps, default=None),
            family=study.correction,
            comparisons=len(counted),
            looks=study.looks,
            baseline=baseline,
            guess=dict(itertools.chain(*(run.summary.get("guess", {}).items() for run in condition_runs))),
            tuning_variance=tuning_variances.get(entry.name, 0.0),
            reference=study.reference,
            arms=[],
        )
        runs_by_arm = {arm.name: [run for run in condition_runs if run.arm == arm.name] for arm in study.arms}
        for arm in study.arms:
            base = [] if arm.name == study.reference else runs_by_arm[study.reference]
            condition.arms.append(_arm(condition, arm, study.seeds, runs_by_arm[arm.name], base))
        conditions.append(condition)
    return conditions


def _arm(condition: Condition, entry: studies.Arm, seeds: list[int], runs: Runs, reference: Runs) -> Arm:
    """Compute the numbers of an arm. seeds: of the study. reference: the reference's runs; [] if entry is it."""
    values = _values(runs, condition.metric)
    ended = [run for run in runs if run.seed in values]
    metrics = dict.fromkeys(name for run in ended for name in run.summary if name.startswith("eval/"))
    measured = {name: _values([run for run in ended if name in run.summary], name) for name in metrics}
    base, finished = {run.seed: run for run in reference}, {run.seed for run in runs}
    pairs = [(run, base[run.seed]) for run in ended if run.seed in base]
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
        steps=sorted({run.steps for run in runs}),
        others={name: spread(x.values()) for name, x in measured.items() if x and name != condition.metric},
        other_evaluation=_unlike(pairs, "evaluation_crc32"),
        other_batches=_unlike(pairs, "training_crc32"),
        other_initial=list(dict.fromkeys(name for pair in initial for name in study_runs.unpaired_weights(*pair))),
        threshold_step=threshold_step(*curves, condition.threshold, **options) if condition.threshold else None,
        difference=None if entry.name == condition.reference else _difference(condition, runs, reference, not seeds),
        symmetry=_layer_means(ended, study_runs.SYMMETRY),
        diverged={run.seed: run.summary.get("diverged_at") for run in runs if run.seed not in values},
        missing=[seed for seed in seeds if seed not in finished],
    )


def _values(runs: Iterable[study_runs.Run], metric: str) -> dict[int, float]:
    """Return seed -> final metric, for the runs with a finite value."""
    return {run.seed: x for run in runs if (x := run.value(metric)) is not None}


def _unlike(pairs: Iterable[tuple[study_runs.Run, study_runs.Run]], digest: str) -> list[int]:
    """Return the seeds of the pairs of runs that differ in an entry of summary.json. digest: name of the entry."""
    return [run.seed for run, base in pairs if run.summary.get(digest) != base.summary.get(digest)]


def _layer_means(runs: list[study_runs.Run], measures: Iterable[str]) -> dict[str, list[float | None]]:
    """Return measure -> mean over runs in each layer, without measures that no run has."""
    means = {}
    for name in measures:
        columns = itertools.zip_longest(*(run.layers(name) for run in runs))
        if numbers := [[x for x in column if x is not None] for column in columns]:
            means[name] = [sum(column) / len(column) if column else None for column in numbers]
    return means


def spread(values: Iterable[float]) -> Spread:
    """Return the mean (None without values), sample standard deviation (None below two), and number of the values."""
    values = list(values)
    mean = float(np.mean(values)) if values else None
    return Spread(mean, float(np.std(values, ddof=1)) if len(values) > 1 else None, len(values))


def compare(
    arm: Mapping[int, float],
    reference: Mapping[int, float],
    *,
    m: int,
    better: str,
    margin: float = 0.0,
    limits: tuple[float, float] = UNLIMITED,
    extra: float = 0.0,
) -> Difference:
    """Compare arm and reference (seed -> metric) over the seeds that both have, by a t interval at level 1 - 0.05/m.

    The interval is of the mean of arm - reference. m: the number of intervals that hold together. better: "more" or
    "less", whichever is better. If all n pairs differ equally, there is no interval, and the sign test decides, with
    p = 2 / 2^n. margin: an interval inside -margin ... margin counts as equal. limits: the least and the largest
    possible metric; the interval ends where it would take the reference's mean beyond them. extra: a variance that
    the choice of settings adds to the mean difference. Fewer than FEWEST seeds give no interval and no verdict.
    """
    seeds = [seed for seed in arm if seed in reference]
    value_I, base_I = (np.array([values[seed] for seed in seeds]) for values in (arm, reference))
    difference_I, every = value_I - base_I, np.array([*value_I, *base_I])
    result = Difference(dict(zip(seeds, difference_I.tolist(), strict=True)), **vars(spread(difference_I)), kind=FEW)
    if result.n < inference.FEWEST:
        return result
    rounding = ROUNDING * np.abs(every).max()
    is_same = bool(np.abs(difference_I).max() <= rounding)
    if np.ptp(difference_I) > rounding and not is_same:
        result.interval = tuple(map(float, inference.interval(difference_I, m, extra)))
        result.p = float(inference.p_value(difference_I, extra))
        result.detectable = inference.detectable(result.n, m) * math.sqrt(result.std**2 + result.n * extra)
    elif not is_same:
        result.p = 2 * 0.5**result.n
    if min(np.ptp(value_I), np.ptp(base_I)) > rounding and not is_same:
        result.correlation = float(np.corrcoef(value_I, base_I)[0, 1])
    return _judge(result, value_I, base_I, is_same=is_same, m=m, better=better, margin=margin, limits=limits)


def compare_unpaired(
    arm: Iterable[float],
    reference: Iterable[float],
    *,
    m: int,
    better: str,
    margin: float = 0.0,
    limits: tuple[float, float] = UNLIMITED,
) -> Difference:
    """Compare the means of independent runs by Welch's t, with an interval at level 1 - 0.05/m.

    Other arguments are those of `compare`. In the result, `by_seed` is {}, and `std` and `detectable` are None.
    """
    value_I, base_J = (np.array(list(side)) for side in (arm, reference))
    sizes = len(value_I), len(base_J)
    mean = float(value_I.mean() - base_J.mean()) if min(sizes) else None
    result = Difference({}, mean, None, min(sizes), kind=FEW, unpaired=sizes)
    if result.n < inference.FEWEST:
        return result
    every = np.array([*value_I, *base_J])
    rounding = ROUNDING * np.abs(every).max()
    if max(np.ptp(value_I), np.ptp(base_J)) > rounding:
        ends, p = inference.welch(value_I, base_J, m)
        result.interval, result.p = tuple(map(float, ends)), float(p)
    is_same = bool(np.ptp(every) <= rounding)
    return _judge(result, value_I, base_J, is_same=is_same, m=m, better=better, margin=margin, limits=limits)


def _judge(
    result: Difference,
    value_I: np.ndarray,
    base_J: np.ndarray,
    *,
    is_same: bool,
    m: int,
    better: str,
    margin: float,
    limits: tuple[float, float],
) -> Difference:
    """Set kind and corrected p of `result`, end its interval at the limits, and return it.

    value_I, base_J: the metric of arm and reference. is_same: the difference is only rounding. A difference whose
    interval lies inside the margin is equal. Otherwise it is worse or better if the corrected p is below 0.05, that is,
    if 0 is outside the interval.
    """
    every, (least, most) = np.array([*value_I, *base_J]), (float(limit - base_J.mean()) for limit in limits)
    result.p_corrected = None if result.p is None else min(1.0, m * result.p)
    if result.interval:
        result.interval = max(result.interval[0], least), min(result.interval[1], most)
    low, high = result.interval or (result.mean, result.mean)  # without a spread, the mean stands for the interval
    if is_same:
        at_best = np.abs(every - BEST[better]).max() <= ROUNDING * np.abs(every).max()
        result.kind = CEILING if at_best else SAME
    elif result.interval is None and (result.p_corrected or 1.0) >= 1 - inference.LEVEL:
        result.kind = FLAT
    elif result.interval is not None and -margin <= low and high <= margin:
        result.kind = EQUAL
    elif low <= 0 <= high:
        result.kind = OPEN
    else:
        result.kind = BETTER if (low > 0) == (better == "more") else WORSE
    return result


def _difference(condition: Condition, arm: Runs, reference: Runs, may_unpair: bool) -> Difference:
    """Compare arm and reference, by rates if seeds diverged or are stuck.

    may_unpair: whether to compare means (`compare_unpaired`) if the two have no common seeds.
    """
    values, base = sides = [_values(runs, condition.metric) for runs in (arm, reference)]
    options = {"m": condition.together, "better": condition.better, "margin": condition.margin}
    options["limits"] = _find_limits(condition.metric, [*values.values(), *base.values()])
    shared = len({run.seed for run in arm} & {run.seed for run in reference})
    if may_unpair and not shared:
        result = compare_unpaired(values.values(), base.values(), **options)
        shared = min(len(arm), len(reference))
    else:
        result = compare(values, base, **options, extra=2 * (condition.tuning_variance or 0.0))
    diverged = [len(runs) - len(ended) for runs, ended in zip((arm, reference), sides, strict=True)]
    middles = [inference.plateau(list(ended.values())) for ended in sides]
    constant = tuple(_is_constant(list(ended.values()), condition.better) for ended in sides)
    if shared < inference.FEWEST or (result.kind in (SAME, CEILING) and not any(diverged)):
        return result
    if any(diverged):
        kind, counts, totals = UNSTABLE, diverged, (arm, reference)
    elif any(constant):
        kind, counts, totals = IDENTICAL[constant], (), ()
    elif middles != [None, None]:
        sign, (first, second) = 1 if condition.better == "more" else -1, middles
        middles = [second if first is None else first, first if second is None else second]
        worse = (sum(sign * x < sign * y for x in ended.values()) for ended, y in zip(sides, middles, strict=True))
        kind, counts, totals = STUCK, worse, sides
    else:
        return result
    rates = [inference.rate(k, len(side)) for k, side in zip(counts, totals, strict=True)] or None
    return replace(result, kind=kind, rates=rates, interval=None, p=None, p_corrected=None, detectable=None)


def _find_limits(metric: str, values: Sequence[float]) -> tuple[float, float]:
    """Return the metric's smallest and largest possible value: of an accuracy (0, 1), or (0, 100) if one is above 1.

    Other metrics are unlimited.
    """
    top = 1.0 if max(values, default=0.0) <= 1 else 100.0
    return (0.0, top) if "accuracy" in metric.lower() and all(0 <= x <= top for x in values) else UNLIMITED


def _is_constant(values: Sequence[float], better: str) -> bool:
    """Return True if all runs have the same value up to rounding, and it is not an end of the metric's scale."""
    is_one = bool(values) and bool(np.ptp(values) <= ROUNDING * np.abs(values).max())
    return is_one and values[0] not in ENDS[better]


def threshold_step(curves: Curves, reference: Curves, threshold: float, *, m: int, better: str) -> ThresholdStep:
    """Return the steps at which the seeds reached the threshold, and their mean difference, curves - reference.

    The difference is over the seeds that both have, and its interval is that of `compare`. Both are None if one of
    these seeds did not reach the threshold. m: the number of intervals that hold together, each at level 1 - 0.05/m.
    better: "more" or "less", whichever is better in the metric.
    """
    cross = functools.partial(inference.crossing, threshold=threshold, better=better)
    steps, base = ({seed: cross(curve) for seed, curve in side.items()} for side in (curves, reference))
    reached = [step for step in steps.values() if step is not None]
    median = float(np.median(reached + [math.inf] * (len(steps) - len(reached)))) if steps else math.inf
    mean = interval = None
    if None not in [x for seed in steps.keys() & base.keys() for x in (steps[seed], base[seed])]:
        difference = compare(steps, base, m=m, better="less")
        mean, interval = difference.mean, difference.interval
    return ThresholdStep(steps, median if math.isfinite(median) else None, len(reached), len(steps), mean, interval)

"""Sentences of a report: a verdict on the study and a paragraph for each condition.

Pure functions of the numbers in statistics.py; tables.py formats the same numbers as tables. If no difference was
found, the sentence states the interval, because few seeds rarely show a difference that exists.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from experiments.config import settings as configs
from experiments.studies import inference, plan, statistics, study as studies

RATE = "optim.learning_rate"
LISTED = 6  # the most names of weights, or comparisons, in a sentence
COMPARATIVES = {"less": "lower", "more": "higher"}  # by Condition.better
REPEATED = "every run has the same value: was its seed passed on, or is the value rounded? Means are not compared"
OPENING = {  # kind -> the beginning of the sentence on its arms
    statistics.WORSE: "Worse:",
    statistics.BETTER: "Better:",
    statistics.OPEN: "No difference was found:",
    statistics.EQUAL: "Equal within the margin (the whole interval lies inside it):",
    statistics.SAME: "Identical to the reference up to rounding:",
    statistics.CEILING: "At the ceiling (arm and reference have the best possible value in every seed):",
    statistics.UNSTABLE: "Unstable (seeds of arm or reference diverged, so means are not compared):",
    statistics.FLAT: "No spread (the same difference in every seed; by the sign test, too few seeds for a verdict):",
    statistics.STUCK: "In two clusters (seeds of arm or reference stayed on a plateau, so means are not compared):",
    **{kind: f"{kind.capitalize()} ({REPEATED}):" for kind in statistics.IDENTICAL.values()},
    statistics.FEW: f"No verdict (it needs at least {inference.FEWEST} seeds):",
}
FAILED = {statistics.UNSTABLE: "diverged", statistics.STUCK: "did not leave the plateau"}
PAIRED = "Student's t intervals of the differences paired by seed, which are assumed to be roughly normal"
UNPAIRED = (
    "Welch's t intervals of the difference of two means of independent, roughly normal runs, with the degrees of "
    "freedom of the side with fewer runs"
)


def format_number(x: float) -> str:
    """Return x with four decimals; with two significant digits if 0 < |x| < 0.001."""
    return f"{x:.2g}" if 0 < abs(x) < 0.001 else f"{x + 0.0:.4f}"  # + 0.0 turns -0.0 into 0.0


def format_p(p: float) -> str:
    """Return p with four decimals, or '< 0.0001'."""
    return "< 0.0001" if p < 0.0001 else f"{p:.4f}"


def quote(*names: str) -> str:
    """Return '"none", "tied"'. The quotes keep a name apart from the sentence around it."""
    return ", ".join(f'"{name}"' for name in names)


def join_values(values: Iterable[object]) -> str:
    """Return '0, 1, 2'."""
    return ", ".join(map(str, values))


def join_names(names: Sequence[str]) -> str:
    """Return 'a', 'a and b', 'a, b and c'."""
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def count_seeds(counts: Sequence[int], noun: str = "seed") -> str:
    """Return '1 seed', '5 seeds', '3 to 5 seeds'."""
    least, most = min(counts), max(counts)
    return f"{least}{f' to {most}' if most > least else ''} {noun}{'s' if most != 1 else ''}"


def count(difference: statistics.Difference) -> str:
    """Return '5', the number of pairs, or '8 and 16', the runs of an unpaired arm and of its reference."""
    return join_names(list(map(str, difference.unpaired or (difference.n,))))


def describe_pairing(condition: statistics.Condition) -> str:
    """Return how arms are compared: 'paired by seed', also with ', except "tied" (no common seeds)' for an arm "tied".

    If no arm has common seeds with the reference, return 'unpaired (no common seeds)'.
    """
    unpaired = [arm.name for arm in condition.compared if arm.difference.unpaired]
    if len(unpaired) == len(condition.compared):
        return "unpaired (no common seeds)" if unpaired else "paired by seed"
    return "paired by seed" + f", except {quote(*unpaired)} (no common seeds)" * bool(unpaired)


def describe_range(condition: statistics.Condition, differences: Sequence[statistics.Difference]) -> str:
    """Return the range that covers the intervals of all differences, such as 'from 0.02 better to 0.05 worse'."""
    intervals = [difference.interval for difference in differences]
    low, high = min(low for low, _ in intervals), max(high for _, high in intervals)
    worse, better = (-low, high) if condition.better == "more" else (high, -low)
    if min(worse, better) < 0:  # 0 is outside: an arm can be equal within a margin and still be worse
        side = "worse" if better < 0 else "better"
        return f"from {format_number(-min(worse, better))} to {format_number(max(worse, better))} {side}"
    return f"from {format_number(better)} better to {format_number(worse)} worse"


def describe_arm(condition: statistics.Condition, difference: statistics.Difference) -> str:
    """Return the numbers of an arm's comparison: 'by 0.0482 (95 % interval 0.0310 to 0.0654, 5 seeds)'.

    If its kind has no interval, such as diverged seeds or too few, the text has rates or the number of seeds.
    """
    unpaired = f"unpaired, {count(difference)} runs"
    seeds = unpaired if difference.unpaired else count_seeds([difference.n])
    if difference.rates:
        arm_rate, reference_rate = difference.rates
        low, high = arm_rate.interval
        rate = f"{arm_rate.k} of {arm_rate.n} {'runs' if difference.unpaired else 'seeds'} {FAILED[difference.kind]}"
        interval = f"uncorrected 95 % interval of the rate {low:.2f} to {high:.2f}"
        return f"({rate}, {interval}; {quote(condition.reference)}: {reference_rate.k} of {reference_rate.n})"
    if difference.kind in (statistics.FEW, statistics.SAME, statistics.CEILING, *statistics.IDENTICAL.values()):
        return f"({seeds})"
    if difference.interval is None:
        size = format_number(difference.mean if difference.kind == statistics.FLAT else abs(difference.mean))
        test = "" if difference.p is None else f"p = {format_p(difference.p_corrected)} by the sign test; "
        place = "run" if difference.unpaired else "seed"
        return f"by {size} in every {place} (no spread, so no interval; {test}{seeds})"
    if difference.kind in (statistics.OPEN, statistics.EQUAL):
        return f"(95 % interval {describe_range(condition, [difference])}, {seeds})"
    least, most = map(format_number, sorted(map(abs, difference.interval)))
    return f"by {format_number(abs(difference.mean))} (95 % interval {least} to {most}, {seeds})"


def describe_family(condition: statistics.Condition) -> str:
    """Return 'the 12 comparisons of this study together', with the number of planned analyses if there are several."""
    analyses = f" over {condition.looks} planned analyses" if condition.looks > 1 else ""
    return f"the {condition.comparisons} comparisons of this {condition.family} together{analyses}"


def describe_condition(condition: statistics.Condition) -> str:
    """Return a paragraph on a condition: verdicts, intervals, warnings, excluded and missing runs."""
    rule = f"{condition.metric} ({COMPARATIVES[condition.better]} is better)"
    sentences = [f"Each arm is compared with {quote(condition.reference)} in {rule}."]
    sentences = sentences if condition.compared else [describe_only_arm(condition)]
    for kind, opening in OPENING.items():
        arms = [arm for arm in condition.compared if arm.difference.kind == kind]
        phrases = "; ".join(f"{quote(arm.name)} {describe_arm(condition, arm.difference)}" for arm in arms)
        sentences += [f"{_insert_margins(opening, [condition])} {phrases}."] if arms else []
    if intervals := [arm.difference for arm in condition.compared if arm.difference.interval]:
        kinds = dict.fromkeys(UNPAIRED if difference.unpaired else PAIRED for difference in intervals)
        hold = f" They hold at 95 % for {describe_family(condition)} (Bonferroni)." if condition.together > 1 else ""
        sentences.append(f"Intervals are {', or '.join(kinds)}.{hold}{describe_tuning(condition, intervals)}")
    sentences += [*describe_mismatches(condition), *describe_partners(condition)]
    diverged = []
    for arm in condition.arms:
        for seed, step in arm.diverged.items():
            end = f"{condition.metric} not finite" if step is None else f"diverged at step {step:,}"
            run = f"seed {seed}" if seed >= 0 else f"line {-seed}"  # of another program's table, without seeds
            diverged.append(f"{quote(arm.name)} {run} ({end})")
    missing = [f"{quote(arm.name)} seed {join_values(arm.missing)}" for arm in condition.arms if arm.missing]
    sentences += [f"Excluded from the means, which flatters an arm: {', '.join(diverged)}."] if diverged else []
    sentences += [f"Not finished yet: {'; '.join(missing)}."] if missing else []
    return " ".join(sentences)


def describe_only_arm(condition: statistics.Condition) -> str:
    """Return a sentence about the metric of the condition's only arm: mean and SD over seeds, or "no finished run"."""
    arm = condition.base
    spread = " ± ".join(format_number(x) for x in (arm.mean, arm.std) if x is not None) or "no finished run"
    return f"{condition.metric} of {quote(arm.name)}: {spread} (mean ± SD over {count_seeds([arm.n])})."


def describe_tuning(condition: statistics.Condition, differences: Sequence[statistics.Difference]) -> str:
    """Return ' They include the chance in tuning, ...' (the intervals), with its share of the variance.

    Return ' They leave out ...' if there is one tuning seed, and '' if nothing was tuned or no difference has an SD.
    """
    if condition.tuning_variance is None:
        return " They leave out the chance in tuning, which one tuning seed cannot show."
    extra = 2 * condition.tuning_variance
    shares = [extra / (extra + x.std**2 / x.n) for x in differences if x.std is not None]
    if not extra or not shares:
        return ""
    std = format_number(math.sqrt(condition.tuning_variance))
    share = f"{min(shares):.0%}" if len(shares) == 1 else f"{min(shares):.0%} to {max(shares):.0%}"
    return f" They include the chance in tuning: an SD of {std} for each arm, {share} of the variance of a difference."


def describe_mismatches(condition: statistics.Condition) -> list[str]:
    """Return a warning for each way in which an arm's data, initial values or steps differ from the reference's."""
    reference, base, sentences = quote(condition.reference), condition.base, []
    for arm in condition.arms:
        lengths = [" or ".join(f"{n:,}" if n else "an unknown number of" for n in x.steps) for x in (arm, base)]
        differ = bool(arm.n and base.n and arm.steps != base.steps)
        faults = [(differ, f"trained for {lengths[0]} steps and {reference} for {lengths[1]}", "number of steps")]
        held_out = ("held-out examples", arm.other_evaluation, "data")
        for examples, seeds, source in (held_out, ("training batches", arm.other_batches, "batches")):
            faults.append((seeds, f"has other {examples} than {reference} in seed {join_values(seeds)}", source))
        for is_fault, fault, source in faults:
            if is_fault:
                sentences.append(f"{quote(arm.name)} {fault}, so the difference may come from the {source}.")
        if arm.other_initial:
            sentences.append(
                f"{quote(arm.name)} and {reference} start from values that differ by more than a scale, in weights of "
                f"the same name and shape: {_shorten(arm.other_initial)}. These weights are not paired by seed."
            )
    return sentences


def describe_partners(condition: statistics.Condition) -> list[str]:
    """Return a sentence for each paired comparison that leaves out runs: how many of which side, and why."""
    sentences, base = [], condition.base
    for arm in condition.compared:
        sides = (arm, arm.values.keys() - base.values.keys()), (base, base.values.keys() - arm.values.keys())
        runs = [f"{count_seeds([len(seeds)], 'run')} of {quote(side.name)}" for side, seeds in sides if seeds]
        if runs and arm.difference.by_seed and arm.difference.p is not None:
            names = quote(arm.name, base.name).replace(", ", " and ")
            sentences.append(f"{names} are compared by pairs of the same seed, which leaves out {join_names(runs)}.")
    return sentences


def describe_study(conditions: Sequence[statistics.Condition]) -> str:
    """Return the verdict on the study: in which conditions each arm is worse, better, ..., by how much."""
    arms = [arm for condition in conditions for arm in condition.arms]
    missing, diverged = sum(len(arm.missing) for arm in arms), sum(len(arm.diverged) for arm in arms)
    sentences = [f"The study is not finished (missing runs: {missing})."] * bool(missing)
    excluded = [f"Runs excluded from the means because they diverged: {diverged}."] * bool(diverged)
    reference = quote(conditions[0].reference)
    verdicts = [arm.difference for arm in arms if arm.difference and arm.difference.kind != statistics.FEW]
    if not conditions[0].compared:
        return " ".join([*sentences, "No verdict: there is one arm, and nothing to compare it with.", *excluded])
    if not verdicts:
        needed = f"at least {inference.FEWEST} seeds with finished runs of both the arm and {reference}"
        return " ".join([*sentences, f"No verdict: a comparison needs {needed}.", *excluded])
    paired = [difference for difference in verdicts if not difference.unpaired]
    counts = [difference.rates[0].n if difference.rates else difference.n for difference in paired]
    runs = [n for difference in verdicts for n in difference.unpaired or ()]
    over = [count_seeds(counts)] if paired else []
    over += [f"{count_seeds(runs, 'run')} a side, unpaired (no common seeds)"] if runs else []
    rules = dict.fromkeys(f"{entry.metric} ({COMPARATIVES[entry.better]} is better)" for entry in conditions)
    metric = "" if len(rules) > 1 else f", in {next(iter(rules))}"
    sentences += [f"Each arm is compared with {reference} over {', '.join(over)}{metric}."]
    alike: dict[str, list[str]] = {}  # phrase -> the names of its arms
    for arm_C in zip(*(condition.compared for condition in conditions), strict=True):
        alike.setdefault(_describe_arm_everywhere(arm_C, conditions), []).append(arm_C[0].name)
    sentences += [f"{quote(*names)}: {phrase}." for phrase, names in alike.items()]
    if len(conditions) > 1 and conditions[0].family == "condition":
        sentences.append("Each interval is corrected within its condition, not for the number of conditions.")
    elif conditions[0].together > 1 and any(difference.interval for difference in verdicts):
        sentences.append(f"All intervals hold at 95 % for {describe_family(conditions[0])}.")
    return " ".join([*sentences, *excluded])


def _describe_arm_everywhere(arms: Sequence[statistics.Arm], conditions: Sequence[statistics.Condition]) -> str:
    """Return 'worse in causal by 0.05 (95 % interval 0.03 to 0.07); no difference found in masked (...)'.

    arms: the arm in each of the conditions.
    """
    places: dict[str, list[tuple[statistics.Condition, statistics.Difference]]] = {}
    for condition, arm in zip(conditions, arms, strict=True):
        places.setdefault(arm.difference.kind, []).append((condition, arm.difference))
    phrases = []
    for kind, pairs in places.items():
        subset, differences = zip(*pairs, strict=True)
        phrase = f"{_insert_margins(kind, subset)}{_list_conditions(subset, conditions)}"
        if kind in (statistics.OPEN, statistics.WORSE, statistics.BETTER):
            phrase += _describe_effect(subset, differences)
        phrases.append(phrase)
    return "; ".join(phrases)


def _describe_effect(conditions: Sequence[statistics.Condition], differences: Sequence[statistics.Difference]) -> str:
    """Return ' by 0.05 (95 % interval 0.03 to 0.07)', or the ranges over conditions.

    Return '' if the conditions have different metrics, or an interval is missing.
    """
    if len({condition.metric for condition in conditions}) > 1 or not all(x.interval for x in differences):
        return ""
    intervals = "95 % intervals range" if len(conditions) > 1 else "95 % interval"
    if differences[0].kind == statistics.OPEN:
        return f" ({intervals} {describe_range(conditions[0], differences)})"
    sizes = sorted(abs(x.mean) for x in differences)
    ends = sorted(abs(end) for x in differences for end in x.interval)
    size = " to ".join(dict.fromkeys(map(format_number, (sizes[0], sizes[-1]))))
    start = " from" * (len(conditions) > 1)
    return f" by {size} ({intervals}{start} {format_number(ends[0])} to {format_number(ends[-1])})"


def _insert_margins(text: str, conditions: Sequence[statistics.Condition]) -> str:
    """Replace 'the margin' by the margins of the conditions: 'equal within 0.01 and 0.02'."""
    margins = dict.fromkeys(f"{condition.margin:g}" for condition in conditions)
    return text.replace("the margin", join_names(list(margins)), 1)


def _list_conditions(subset: Sequence[statistics.Condition], conditions: Sequence[statistics.Condition]) -> str:
    """Return ' in causal and masked' or ' in all 7 conditions'; '' if the study has one condition."""
    if len(conditions) == 1:
        return ""
    is_all = len(subset) == len(conditions) > 2
    return f" in {f'all {len(subset)} conditions' if is_all else join_names([entry.name for entry in subset])}"


def describe_plan_log(study: studies.Study, past: plan.Past) -> list[str]:
    """Return warnings about earlier plans and verdicts in plan.jsonl that affect the verdict."""
    current, sentences = plan.comparisons(study), []
    if removed := [text for comparison, text in past.comparisons.items() if comparison not in current]:
        counted = "Comparisons that were planned earlier in this folder, are no longer in the study, and still count"
        sentences.append(f"{counted}: {_shorten(removed, '; ')}.")
    if past.share > 1 + 1e-9:  # tolerance for the rounding of the sum
        sentences.append(
            f"Verdicts were read over {len(past.looks)} different sets of seeds, more than study.looks allows, so the "
            f"level no longer holds: if no arm differs, up to {5 * past.share:.3g} % of such studies report a "
            "difference, not 5 %."
        )
    return sentences


def describe_rates(study: studies.Study, config: Mapping[str, Any]) -> str:
    """Return how the arms were tuned; without tuning, their learning rates. config: of the study, as a tree."""
    if tuned := {arm: grid for arm, grid in study.grid.items() if grid}:
        keys = list(dict.fromkeys(key for grid in tuned.values() for key in grid))
        counts = [math.prod(map(len, grid.values())) for grid in tuned.values()]
        names = "Each arm" if len(tuned) == len(study.arms) else f"Of all arms only {quote(*tuned)}"
        best = f"the best of {count_seeds(counts, 'combination' if len(keys) > 1 else 'value')} of {join_names(keys)}"
        seeds = count_seeds([len(study.tune_seeds)], "other seed")
        return f"{names} was tuned: {best}, over {seeds}, on a split of the training data."
    common, names = configs.flat(config).get(RATE), {}
    for arm in study.arms:
        names.setdefault(arm.changes.get(RATE, common), []).append(arm.name)
    if len(names) > 1:
        rates = "; ".join(f"{rate} for {quote(*arms)}" for rate, arms in names.items())
        return f"No arm was tuned in this study: {RATE} was set to {rates}."
    rate = "" if common is None else f": {RATE} = {next(iter(names))}"
    changed = " in each condition" * any(RATE in condition.changes for condition in study.conditions)
    return f"No arm was tuned in this study: one rate for all arms{changed or rate}."


def describe_reporting(conditions: Sequence[statistics.Condition], rates: str) -> list[str]:
    """Return sentences on what to write about the study in a paper.

    rates: how the arms were tuned, or their learning rates (from `describe_rates`); '' if unknown.
    """
    first, intervals = conditions[0], [x.difference.interval for entry in conditions for x in entry.compared]
    data = "Name the commit, the data and the seeds (What was run), and publish the table of all runs."
    if not first.compared:
        return ["Give the mean and the SD over seeds, not the best seed.", data]
    if not any(intervals):
        return ["There is no interval here, so show the value of every run, and do not claim a difference.", data]
    pairing = "; ".join(dict.fromkeys(map(describe_pairing, conditions)))
    runs = count_seeds([arm.n for entry in conditions for arm in entry.arms if arm.n], "run")
    joint = f", which hold for {describe_family(first)} (Bonferroni)" * (first.together > 1)
    sentences = [f"Give {runs} of each arm, and each mean difference to {quote(first.reference)}, {pairing}."]
    sentences += [f"Next to each difference, give its 95 % interval (Student's t){joint}."]
    sentences += [f"Say how rates were chosen. {rates}"] * bool(rates)
    return [*sentences, "Show all arms, also those without a difference, and all runs that diverged.", data]


def describe_power(study: studies.Study, conditions: Sequence[statistics.Condition], folder: object) -> str:
    """Return lines on the smallest difference that the seeds can show, in SDs of the paired difference.

    If the conditions have runs (those of an earlier study in `folder`), a line gives this difference also in units of
    the metric. With one arm or too few seeds there is no such difference, and the text says so.
    """
    n, m = len(study.seeds), max(condition.together for condition in conditions)
    if not m:
        return "power: there is one arm, and nothing to compare it with"
    if n < inference.FEWEST:
        return f"power: {count_seeds([n])} can show no difference; at least {inference.FEWEST} are needed"
    least = inference.detectable(n, m)
    needed = join_values(f"a difference of {x} needs {inference.seeds_for(x, m)} seeds" for x in (1, 2))
    ranges = []
    for condition in conditions:
        if std := [arm.difference.std for arm in condition.compared if arm.difference.std]:
            ends = " to ".join(dict.fromkeys(format_number(least * x) for x in (min(std), max(std))))
            ranges.append(f"{ends} in {condition.metric}{_list_conditions([condition], conditions)}")
    return (
        f"power: {count_seeds([n])} show a difference of {least:.2g} standard deviations of the paired difference with "
        f"probability {inference.POWER}, with intervals for {describe_family(conditions[0])}; {needed}"
        + (f"\nwith the standard deviations of the runs in {folder}: {'; '.join(ranges)}" if ranges else "")
    )


def _shorten(values: Sequence[str], separator: str = ", ") -> str:
    """Join at most LISTED values, and append how many more there are."""
    rest = f" and {len(values) - LISTED} more" if len(values) > LISTED else ""
    return separator.join(values[:LISTED]) + rest

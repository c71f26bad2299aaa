"""Sentences of a report: a paragraph for each condition and a verdict on the study.

Pure functions of the numbers in statistics.py; tables.py formats the same numbers as tables. If no difference was
found, the sentence states the interval, because few seeds rarely show a difference.
"""

from collections.abc import Iterable, Sequence

from experiments.studies import inference, plan, statistics, study as studies

LISTED = 6  # names of weights, or of comparisons, in a sentence
OPENING = {  # of the sentence on the arms of a kind
    statistics.WORSE: "Worse:",
    statistics.BETTER: "Better:",
    statistics.OPEN: "No difference was found:",
    statistics.EQUAL: "Equal within the margin (the interval lies inside it):",
    statistics.SAME: "Identical to the reference up to rounding:",
    statistics.CEILING: "At the ceiling in every seed, like the reference, so that no difference is measurable:",
    statistics.UNSTABLE: "Unstable (some seeds diverged, so that means are not compared):",
    statistics.FLAT: "The same small difference in every seed, too small for a verdict without a known spread:",
    statistics.STUCK: "In two clusters (some seeds stayed on a plateau, so that means are not compared):",
    statistics.FEW: f"Too few seeds for a verdict (at least {inference.FEWEST} are needed):",
}
FAILED = {statistics.UNSTABLE: "diverged", statistics.STUCK: "did not leave the plateau"}
PAIRED = "computed by Student's t from differences paired by seed, assumed to be roughly normal"


def format_number(x: float) -> str:
    """Write four decimals, or two digits if four decimals would hide the number."""
    return f"{x:.2g}" if 0 < abs(x) < 0.001 else f"{x + 0.0:.4f}"  # + 0.0: no minus before zero


def quote(*names: str) -> str:
    """Return '"none", "tied"'. The quotes keep a name apart from the sentence around it."""
    return ", ".join(f'"{name}"' for name in names)


def join_values(values: Iterable[object]) -> str:
    """Return '0, 1, 2'."""
    return ", ".join(map(str, values))


def join_names(names: Sequence[str]) -> str:
    """Return 'a', 'a and b', 'a, b and c'."""
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def count_seeds(counts: Sequence[int]) -> str:
    """Return '1 seed', '5 seeds', '3 to 5 seeds'."""
    least, most = min(counts), max(counts)
    return f"{least}{f' to {most}' if most > least else ''} seed{'s' if most != 1 else ''}"


def describe_range(condition: statistics.Condition, differences: Sequence[statistics.Difference]) -> str:
    """Write the range that covers all intervals. An arm is worse if its accuracy is lower or its loss is higher."""
    intervals = [difference.interval for difference in differences]
    low, high = min(low for low, _ in intervals), max(high for _, high in intervals)
    worse, better = (-low, high) if condition.better == "more" else (high, -low)
    if min(worse, better) < 0:  # all of it on one side, as one may be that is equal within a margin
        side = "worse" if better < 0 else "better"
        return f"between {format_number(-min(worse, better))} and {format_number(max(worse, better))} {side}"
    return f"between {format_number(better)} better and {format_number(worse)} worse"


def describe_arm(condition: statistics.Condition, difference: statistics.Difference) -> str:
    """Write the difference of an arm as its kind requires: 'by 0.0482 (95 % interval 0.0310 to 0.0654, 5 seeds)'."""
    seeds = count_seeds([difference.n])
    if difference.rates:
        arm_rate, reference_rate = difference.rates
        low, high = arm_rate.interval
        rate = f"{arm_rate.k} of {arm_rate.n} {FAILED[difference.kind]}, rate {low:.2f} to {high:.2f}, 95 % interval"
        return f"({rate}; of {quote(condition.reference)} {reference_rate.k} of {reference_rate.n})"
    if difference.kind in (statistics.FEW, statistics.SAME, statistics.CEILING):
        return f"({seeds})"
    if difference.interval is None:
        size = difference.mean if difference.kind == statistics.FLAT else abs(difference.mean)
        return f"by {format_number(size)} in every seed (no spread, so no interval; {seeds})"
    if difference.kind in (statistics.OPEN, statistics.EQUAL):
        return f"({describe_range(condition, [difference])}, 95 %, {seeds})"
    least, most = map(format_number, sorted(map(abs, difference.interval)))
    return f"by {format_number(abs(difference.mean))} (95 % interval {least} to {most}, {seeds})"


def describe_family(condition: statistics.Condition) -> str:
    """Write 'the 12 comparisons of this study together', with the number of planned analyses if above 1."""
    analyses = f" over {condition.looks} planned analyses" if condition.looks > 1 else ""
    return f"the {condition.comparisons} comparisons of this {condition.family} together{analyses}"


def describe_condition(condition: statistics.Condition) -> str:
    """Write one paragraph on a condition: verdicts, intervals, excluded runs and missing runs."""
    phrases: dict[str, list[str]] = {kind: [] for kind in OPENING}
    for arm in condition.compared:
        phrases[arm.difference.kind].append(f"{quote(arm.name)} {describe_arm(condition, arm.difference)}")
    sentences = [f"Against {quote(condition.reference)}, in {condition.metric} ({condition.better} is better)."]
    opened = {_insert_margins(OPENING[kind], [condition]): texts for kind, texts in phrases.items() if texts}
    sentences += [f"{opening} {'; '.join(texts)}." for opening, texts in opened.items()]
    if any(arm.difference.interval for arm in condition.compared):
        hold = f" They hold at 95 % for {describe_family(condition)} (Bonferroni)." if condition.together > 1 else ""
        sentences.append(f"Intervals are {PAIRED}.{hold}")
    sentences += describe_mismatches(condition)
    diverged = []
    for arm in condition.arms:
        for seed, step in arm.diverged.items():
            end = f"{condition.metric} not finite" if step is None else f"diverged at step {step:,}"
            diverged.append(f"{quote(arm.name)} seed {seed} ({end})")
    if diverged:
        sentences.append(f"Excluded from the means: {', '.join(diverged)} (leaving out diverged runs flatters an arm).")
    if missing := [f"{quote(arm.name)} seed {join_values(arm.missing)}" for arm in condition.arms if arm.missing]:
        sentences.append(f"Not finished yet: {'; '.join(missing)}.")
    return " ".join(sentences)


def describe_mismatches(condition: statistics.Condition) -> list[str]:
    """Write sentences on the arms with other data or initial values than the reference."""
    reference, sentences = quote(condition.reference), []
    for arm in condition.arms:
        held_out = ("held-out examples", arm.other_evaluation, "data")
        for examples, seeds, source in (held_out, ("training batches", arm.other_batches, "batches")):
            if seeds:
                mismatch = f"has other {examples} than {reference} in seed {join_values(seeds)}"
                sentences.append(f"{quote(arm.name)} {mismatch}: the difference may come from the {source}.")
        if arm.other_initial:
            sentences.append(
                f"{quote(arm.name)} starts from other values than {reference}, beyond a change of scale, in weights "
                f"of the same name and shape: {_shorten(arm.other_initial)}. These weights are not paired by seed."
            )
    return sentences


def describe_study(conditions: Sequence[statistics.Condition]) -> str:
    """Write one paragraph on the study: the conditions where each arm was worse, better, or neither."""
    arms = [arm for condition in conditions for arm in condition.arms]
    missing, diverged = sum(len(arm.missing) for arm in arms), sum(len(arm.diverged) for arm in arms)
    sentences = [f"The study is not finished: {missing} of its runs are missing."] if missing else []
    sentences += [f"Runs excluded because they diverged: {diverged}."] if diverged else []
    reference = quote(conditions[0].reference)
    verdicts = [arm.difference for arm in arms if arm.difference and arm.difference.kind != statistics.FEW]
    if not verdicts:
        least = f"at least {inference.FEWEST} seeds must be finished for both an arm and {reference}"
        return " ".join([*sentences, f"No verdict: {least}."])
    counts = [difference.rates[0].n if difference.rates else difference.n for difference in verdicts]
    sentences += [f"Against {reference}, {count_seeds(counts)}."]
    alike: dict[str, list[str]] = {}  # phrase -> the arms that it describes
    for arm_C in zip(*(condition.compared for condition in conditions), strict=True):
        alike.setdefault(_describe_arm_everywhere(arm_C, conditions), []).append(arm_C[0].name)
    sentences += [f"{quote(*names)}: {phrase}." for phrase, names in alike.items()]
    if len(conditions) > 1 and conditions[0].family == "condition":
        sentences.append("Each interval is corrected within its condition, not for the number of conditions.")
    elif len(conditions) > 1:
        sentences.append(f"All intervals hold at 95 % for {describe_family(conditions[0])}.")
    return " ".join(sentences)


def _describe_arm_everywhere(arms: Sequence[statistics.Arm], conditions: Sequence[statistics.Condition]) -> str:
    """Write 'worse in causal; no difference found in masked (between ... at the widest, 95 %)'."""
    places: dict[str, list[tuple[statistics.Condition, statistics.Difference]]] = {}
    for condition, arm in zip(conditions, arms, strict=True):
        places.setdefault(arm.difference.kind, []).append((condition, arm.difference))
    phrases = []
    for kind, pairs in places.items():
        subset, differences = zip(*pairs, strict=True)
        phrases.append(f"{_insert_margins(kind, subset)}{_list_conditions(subset, conditions)}")
        if kind == statistics.OPEN and len({condition.metric for condition in subset}) == 1:
            widest = " at the widest" if len(subset) > 1 else ""
            phrases[-1] += f" ({describe_range(subset[0], differences)}{widest}, 95 %)"
    return "; ".join(phrases)


def _insert_margins(text: str, conditions: Sequence[statistics.Condition]) -> str:
    """Put the conditions' margins into 'equal within the margin'."""
    margins = dict.fromkeys(f"{condition.margin:g}" for condition in conditions)
    return text.replace("the margin", join_names(list(margins)), 1)


def _list_conditions(subset: Sequence[statistics.Condition], conditions: Sequence[statistics.Condition]) -> str:
    """Return '' for the only condition, ' in causal and masked', ' in all 7 conditions'."""
    if len(conditions) == 1:
        return ""
    is_all = len(subset) == len(conditions) > 2
    return f" in {f'all {len(subset)} conditions' if is_all else join_names([entry.name for entry in subset])}"


def describe_plan_log(study: studies.Study, past: plan.Past) -> list[str]:
    """Write sentences on earlier plans and analyses in plan.jsonl that affect the verdict."""
    current, sentences = plan.comparisons(study), []
    if removed := [text for comparison, text in past.comparisons.items() if comparison not in current]:
        counted = "Planned earlier in this folder, no longer in the study, and still counted as comparisons"
        sentences.append(f"{counted}: {_shorten(removed, '; ')}.")
    if past.share > 1 + 1e-9:  # a sum of shares
        sentences.append(
            f"Verdicts were read over {len(past.looks)} different sets of seeds, more than study.looks allows: the "
            f"level no longer holds. Up to {5 * past.share:.3g} % of such studies report a difference by chance, "
            "instead of 5 %."
        )
    return sentences


def describe_power(study: studies.Study, conditions: Sequence[statistics.Condition], folder: object) -> str:
    """Write the smallest detectable difference; in units of the metric if `folder` has runs."""
    n, m = len(study.seeds), max(condition.together for condition in conditions)
    if n < inference.FEWEST:
        return f"power: {count_seeds([n])} can show no difference; at least {inference.FEWEST} are needed"
    least = inference.detectable(n, m)
    needed = join_values(f"one of {effect} takes {inference.seeds_for(effect, m)} seeds" for effect in (1, 2))
    ranges = []
    for condition in conditions:
        if std := [arm.difference.std for arm in condition.compared if arm.difference.std]:
            ends = " to ".join(dict.fromkeys(format_number(least * x) for x in (min(std), max(std))))
            ranges.append(f"{ends} in {condition.metric}{_list_conditions([condition], conditions)}")
    return (
        f"power: {count_seeds([n])} show a difference of {least:.2g} standard deviations of the paired difference with "
        f"probability {inference.POWER}, for {describe_family(conditions[0])}; {needed}"
        + (f"\nwith the standard deviations of the runs in {folder}: {'; '.join(ranges)}" if ranges else "")
    )


def _shorten(values: Sequence[str], separator: str = ", ") -> str:
    """Join at most LISTED values and append the number of the others."""
    rest = f" and {len(values) - LISTED} more" if len(values) > LISTED else ""
    return separator.join(values[:LISTED]) + rest

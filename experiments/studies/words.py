"""The sentences of a report: what the intervals say and no more, a paragraph on a condition, one on the study.

Pure functions of the numbers. If no difference was found, they say how far the intervals reach: few seeds find nothing
easily.
"""

from collections.abc import Iterable, Sequence

from experiments.studies import inference, plan, statistics, study as studies

LISTED = 6  # names of weights, or of comparisons, in a sentence
OPENING = {  # of the sentence on the arms of a kind
    statistics.WORSE: "Worse:",
    statistics.BETTER: "Better:",
    statistics.OPEN: "No difference was found:",
    statistics.EQUAL: "Equal within the margin, in which the whole interval lies:",
    statistics.SAME: "Identical to the reference, but for rounding:",
    statistics.CEILING: "At the ceiling in every seed, as the reference, where a difference cannot be seen:",
    statistics.UNSTABLE: "Unstable, and a mean without the diverged seeds would hide it:",
    statistics.FLAT: "As much in every seed, and too little for a verdict where nothing tells the spread:",
    statistics.STUCK: "In two clusters, so that the mean is not the question here:",
    statistics.FEW: f"Too few seeds for a verdict, which takes {inference.FEWEST}:",
}
FAILED = {statistics.UNSTABLE: "diverged", statistics.STUCK: "did not leave the plateau"}
PAIRED = "Student's t on differences paired by seed, which are taken to be roughly normal"


def number(x: float) -> str:
    """Write four decimals, or two digits if four decimals would hide the number."""
    return f"{x:.2g}" if 0 < abs(x) < 0.001 else f"{x + 0.0:.4f}"  # + 0.0: no minus before zero


def quoted(*names: str) -> str:
    """Return '"none", "tied"': a name may be a word with which the sentence could be read."""
    return ", ".join(f'"{name}"' for name in names)


def listed(values: Iterable[object]) -> str:
    """Return '0, 1, 2'."""
    return ", ".join(map(str, values))


def joined(names: Sequence[str]) -> str:
    """Return 'a', 'a and b', 'a, b and c'."""
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def seeds(counts: Sequence[int]) -> str:
    """Return '1 seed', '5 seeds', '3 to 5 seeds'."""
    least, most = min(counts), max(counts)
    return f"{least}{f' to {most}' if most > least else ''} seed{'s' if most != 1 else ''}"


def between(condition: statistics.Condition, differences: Sequence[statistics.Difference]) -> str:
    """Write how far their intervals reach together; an arm is worse if its accuracy is less."""
    low, high = min(one.interval[0] for one in differences), max(one.interval[1] for one in differences)
    worse, better = (-low, high) if condition.better == "more" else (high, -low)
    if min(worse, better) < 0:  # all of it on one side, as one may be that is equal within a margin
        side = "worse" if better < 0 else "better"
        return f"between {number(-min(worse, better))} and {number(max(worse, better))} {side}"
    return f"between {number(better)} better and {number(worse)} worse"


def of_arm(condition: statistics.Condition, difference: statistics.Difference) -> str:
    """Write the difference of an arm of its kind: 'by 0.0482 (95 % interval 0.0310 to 0.0654, 5 seeds)'."""
    many = seeds([difference.n])
    if difference.rates:
        mine, its = difference.rates
        low, high = mine.interval
        rate = f"{mine.k} of {mine.n} {FAILED[difference.kind]}, a rate of {low:.2f} to {high:.2f}, 95 %"
        return f"({rate}; of {quoted(condition.reference)} {its.k} of {its.n})"
    if difference.kind in (statistics.FEW, statistics.SAME, statistics.CEILING):
        return f"({many})"
    if difference.interval is None:
        size = difference.mean if difference.kind == statistics.FLAT else abs(difference.mean)
        return f"by {number(size)} in every seed, which leaves no spread for an interval ({many})"
    if difference.kind in (statistics.OPEN, statistics.EQUAL):
        return f"({between(condition, [difference])}, 95 %, {many})"
    least, most = map(number, sorted(map(abs, difference.interval)))
    return f"by {number(abs(difference.mean))} (95 % interval {least} to {most}, {many})"


def together(condition: statistics.Condition) -> str:
    """Write 'the 12 comparisons of this study together', and the looks at it."""
    looks = f" and for {condition.looks} looks at them" if condition.looks > 1 else ""
    return f"the {condition.comparisons} comparisons of this {condition.family} together{looks}"


def of_condition(condition: statistics.Condition) -> str:
    """Write one paragraph on a condition, with the runs that were left out and those that are missing."""
    phrases: dict[str, list[str]] = {kind: [] for kind in OPENING}
    for one in condition.compared:
        phrases[one.difference.kind].append(f"{quoted(one.name)} {of_arm(condition, one.difference)}")
    sentences = [f"Against {quoted(condition.reference)}, in {condition.metric} ({condition.better} is better)."]
    opened = {_with_margins(OPENING[kind], [condition]): each for kind, each in phrases.items() if each}
    sentences += [f"{opening} {'; '.join(each)}." for opening, each in opened.items()]
    if any(one.difference.interval for one in condition.compared):
        hold = f", hold at 95 % for {together(condition)} (Bonferroni)" if condition.together > 1 else ""
        sentences.append(f"The interval{'s,' if hold else ' is'} {PAIRED}{hold}.")
    sentences += unlike(condition)
    ends = [
        f"{quoted(arm.name)} seed {seed} "
        f"({f'{condition.metric} not finite' if step is None else f'diverged at step {step:,}'})"
        for arm in condition.arms
        for seed, step in arm.diverged.items()
    ]
    if ends:
        sentences.append(f"In no mean: {', '.join(ends)}; an arm without its diverged runs looks better than it is.")
    if missing := [f"{quoted(arm.name)} seed {listed(arm.missing)}" for arm in condition.arms if arm.missing]:
        sentences.append(f"Not finished yet: {'; '.join(missing)}.")
    return " ".join(sentences)


def unlike(condition: statistics.Condition) -> list[str]:
    """Write sentences on the arms whose data or initial values differ from the reference's."""
    reference, sentences = quoted(condition.reference), []
    for arm in condition.arms:
        if arm.other_evaluation:
            which = f"other held-out examples than {reference} in seed {listed(arm.other_evaluation)}"
            sentences.append(f"{quoted(arm.name)} has {which}: their difference may be one of the data.")
        if arm.other_batches:
            which = f"other training batches than {reference} in seed {listed(arm.other_batches)}"
            sentences.append(f"{quoted(arm.name)} has {which}: their difference may be one of the batches.")
        if arm.other_initial:
            sentences.append(
                f"{quoted(arm.name)} begins with other values than {reference}, not only at another scale, in weights "
                f"of the same name and shape: {_shortened(arm.other_initial)}. Seeds do not pair these."
            )
    return sentences


def of_study(conditions: Sequence[statistics.Condition]) -> str:
    """Write one paragraph on a whole study: for each arm where it was worse, better, or neither."""
    arms = [one for condition in conditions for one in condition.arms]
    missing, diverged = sum(len(one.missing) for one in arms), sum(len(one.diverged) for one in arms)
    sentences = [f"The study is not finished: {missing} of its runs are missing."] if missing else []
    sentences += [f"Left out, since they diverged: {diverged} of its runs."] if diverged else []
    reference = quoted(conditions[0].reference)
    verdicts = [one.difference for one in arms if one.difference and one.difference.kind != statistics.FEW]
    if not verdicts:
        least = f"it takes at least {inference.FEWEST} seeds in which an arm and {reference} are finished"
        return " ".join([*sentences, f"No verdict: {least}."])
    sentences += [f"Against {reference}, {seeds([one.rates[0].n if one.rates else one.n for one in verdicts])}."]
    alike: dict[str, list[str]] = {}  # phrase -> the arms of which it is true
    for each in zip(*(one.compared for one in conditions), strict=True):
        alike.setdefault(_of_arm_in_all(each, conditions), []).append(each[0].name)
    sentences += [f"{quoted(*names)}: {phrase}." for phrase, names in alike.items()]
    if len(conditions) > 1:
        alone = "Each interval is corrected within its condition, not for the number of conditions."
        every = f"All intervals hold at 95 % for {together(conditions[0])}."
        sentences += [alone if conditions[0].family == "condition" else every]
    return " ".join(sentences)


def _of_arm_in_all(arms: Sequence[statistics.Arm], conditions: Sequence[statistics.Condition]) -> str:
    """Write 'worse in causal; no difference found in masked (between ... at the widest, 95 %)'."""
    places: dict[str, list[tuple[statistics.Condition, statistics.Difference]]] = {}
    for condition, arm in zip(conditions, arms, strict=True):
        places.setdefault(arm.difference.kind, []).append((condition, arm.difference))
    phrases = []
    for kind, pairs in places.items():
        those, differences = zip(*pairs, strict=True)
        reach = ""
        if kind == statistics.OPEN and len({one.metric for one in those}) == 1:
            reach = f" ({between(those[0], differences)}{' at the widest' * (len(those) > 1)}, 95 %)"
        phrases.append(f"{_with_margins(kind, those)}{_where(those, conditions)}{reach}")
    return "; ".join(phrases)


def _with_margins(text: str, conditions: Sequence[statistics.Condition]) -> str:
    """Put the conditions' margins into 'equal within the margin'."""
    return text.replace("the margin", joined(list(dict.fromkeys(f"{one.margin:g}" for one in conditions))), 1)


def _where(some: Sequence[statistics.Condition], conditions: Sequence[statistics.Condition]) -> str:
    """Return '' for the only condition, ' in causal and masked', ' in all 7 conditions'."""
    if len(conditions) == 1:
        return ""
    whole = len(some) == len(conditions) > 2
    return f" in all {len(some)} conditions" if whole else f" in {joined([one.name for one in some])}"


def of_past(study: studies.Study, past: plan.Past) -> list[str]:
    """Write sentences on what was planned and read in the study's folder, and is not in its tables."""
    now, sentences = plan.comparisons(study), []
    if gone := [text for comparison, text in past.comparisons.items() if comparison not in now]:
        counted = "Planned in this folder before, left out now, and counted among the comparisons"
        sentences += [f"{counted}: {_shortened(gone, '; ')}."]
    if past.share > 1 + 1e-9:  # a sum of shares
        sentences += [
            f"Verdicts were read over {len(past.looks)} different sets of seeds, for which study.looks did not allow: "
            f"the level no longer holds, and what is said to differ does so by chance in up to {5 * past.share:.3g} % "
            f"of such studies, not 5 %."
        ]
    return sentences


def of_power(study: studies.Study, conditions: Sequence[statistics.Condition], folder: object) -> str:
    """Write what so many seeds can show; in the metric if runs of this folder tell the standard deviations."""
    n, m = len(study.seeds), max(one.together for one in conditions)
    if n < inference.FEWEST:
        return f"power: {seeds([n])} can show no difference, which takes {inference.FEWEST}"
    least = inference.detectable(n, m)
    needed = listed(f"one of {effect} takes {inference.seeds_for(effect, m)} seeds" for effect in (1, 2))
    found = []
    for one in conditions:
        if std := [arm.difference.std for arm in one.compared if arm.difference.std]:
            reach = " to ".join(dict.fromkeys(number(least * x) for x in (min(std), max(std))))
            found.append(f"{reach} in {one.metric}{_where([one], conditions)}")
    return (
        f"power: {seeds([n])} show a difference of {least:.2g} standard deviations of the paired difference with "
        f"probability {inference.POWER}, for {together(conditions[0])}; {needed}"
        + (f"\nwith those of the runs in {folder}: {'; '.join(found)}" if found else "")
    )


def _shortened(values: Sequence[str], between: str = ", ") -> str:
    """Join at most LISTED values, and say how many more there are."""
    more = f" and {len(values) - LISTED} more" if len(values) > LISTED else ""
    return between.join(values[:LISTED]) + more

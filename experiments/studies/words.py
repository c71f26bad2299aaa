"""What the intervals say, in words; and nothing that they do not say: a paragraph on a condition, one on the study.

Pure functions of the numbers. Where no difference was found, they say how far the intervals reach: few seeds find
nothing easily.
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
TAKES = f"it takes at least {inference.FEWEST} seeds in which"
PAIRED = "Student's t on differences paired by seed, which are taken to be roughly normal"


def number(x: float) -> str:
    """Four decimals, or two digits where these would hide the number."""
    return f"{x:.2g}" if 0 < abs(x) < 0.001 else f"{x + 0.0:.4f}"  # + 0.0: no minus before zero


def quoted(*names: str) -> str:
    """'"none", "tied"': a name may be a word that the sentence could be read with."""
    return ", ".join(f'"{name}"' for name in names)


def listed(values: Iterable[object]) -> str:
    """'0, 1, 2'."""
    return ", ".join(map(str, values))


def joined(names: Sequence[str]) -> str:
    """'a', 'a and b', 'a, b and c'."""
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def seeds(counts: Sequence[int]) -> str:
    """'1 seed', '5 seeds', '3 to 5 seeds'."""
    least, most = min(counts), max(counts)
    return f"{least}{f' to {most}' if most > least else ''} seed{'s' if most != 1 else ''}"


def between(condition: statistics.Condition, differences: Sequence[statistics.Difference]) -> str:
    """How far their intervals reach together; of an accuracy, the arm is worse where it is less."""
    low, high = min(one.interval[0] for one in differences), max(one.interval[1] for one in differences)
    worse, better = (-low, high) if condition.better == "more" else (high, -low)
    if min(worse, better) < 0:  # all of it on one side, as one may be that is equal within a margin
        side = "worse" if better < 0 else "better"
        return f"between {number(-min(worse, better))} and {number(max(worse, better))} {side}"
    return f"between {number(better)} better and {number(worse)} worse"


def of_arm(condition: statistics.Condition, difference: statistics.Difference) -> str:
    """What is to be said of an arm of its kind: 'by 0.0482 (95 % interval 0.0310 to 0.0654, 5 seeds)'."""
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
    """'the 12 comparisons of this study together', and the looks at it."""
    looks = f" and for {condition.looks} looks at them" if condition.looks > 1 else ""
    return f"the {condition.comparisons} comparisons of this {condition.family} together{looks}"


def of_condition(condition: statistics.Condition) -> str:
    """One paragraph on a condition, with what was left out and what is missing."""
    phrases: dict[str, list[str]] = {kind: [] for kind in OPENING}
    for one in condition.compared:
        phrases[one.difference.kind].append(f"{quoted(one.name)} {of_arm(condition, one.difference)}")
    reference = quoted(condition.reference)
    if len(phrases[statistics.FEW]) == len(condition.compared):
        most = max(one.difference.n for one in condition.compared)
        both = f"both an arm and {reference} are finished, and there are {f'no more than {most}' if most else 'none'}"
        sentences = [f"No verdict in {condition.metric}: {TAKES} {both}."]
    else:
        sentences = [f"Against {reference}, in {condition.metric} ({condition.better} is better)."]
        sentences += [
            f"{within(OPENING[kind], [condition])} {'; '.join(each)}." for kind, each in phrases.items() if each
        ]
        if any(one.difference.interval for one in condition.compared):
            hold = f"hold at 95 % for {together(condition)} (Bonferroni)"
            sentences.append(
                f"The intervals, {PAIRED}, {hold}." if condition.together > 1 else f"The interval is {PAIRED}."
            )
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
    """Sentences on the arms whose data, or initial values, are not the reference's: what differs may then be those."""
    reference, sentences = quoted(condition.reference), []
    for fact, differs, whose in (
        ("other_evaluation", "evaluated on the same held-out examples as", "data"),
        ("other_batches", "trained on the batches of", "batches, in spite of the same seeds"),
    ):
        arms: dict[str, list[str]] = {}  # in which seeds -> the arms of which it is so
        for arm in condition.arms:
            if other := getattr(arm, fact):
                arms.setdefault("" if len(other) == arm.n else f" in seed {listed(other)}", []).append(arm.name)
        for some, names in arms.items():
            is_not = f"{quoted(*names)} {'is' if len(names) == 1 else 'are'} not {differs} {reference}{some}"
            sentences.append(f"{is_not}: their difference may be one of the {whose}.")
    for arm in condition.arms:
        if arm.other_initial:
            more = len(arm.other_initial) - LISTED
            sentences.append(
                f"{quoted(arm.name)} begins with other values than {reference}, not only at another scale, in weights "
                f"of the same name and shape: {listed(arm.other_initial[:LISTED])}"
                f"{f' and {more} more' if more > 0 else ''}. Seeds do not pair these."
            )
    return sentences


def of_study(conditions: Sequence[statistics.Condition]) -> str:
    """One paragraph on a whole study: which arms were worse, better, or neither, and where."""
    arms = [one for condition in conditions for one in condition.arms]
    missing, diverged = sum(len(one.missing) for one in arms), sum(len(one.diverged) for one in arms)
    sentences = [f"The study is not finished: {missing} of its runs are missing."] if missing else []
    sentences += [f"Left out, since they diverged: {diverged} of its runs."] if diverged else []
    reference = quoted(conditions[0].reference)
    verdicts = [one.difference for one in arms if one.difference and one.difference.kind != statistics.FEW]
    counts = [one.rates[0].n if one.rates else one.n for one in verdicts]
    if not counts:
        return " ".join([*sentences, f"No verdict: {TAKES} an arm and {reference} are finished."])
    sentences += [f"Against {reference}, {seeds(counts)}."]
    alike: dict[tuple[str, ...], list[int]] = {}  # kinds in all conditions -> the arms of which these are known
    for i, each in enumerate(zip(*(condition.compared for condition in conditions), strict=True)):
        alike.setdefault(tuple(one.difference.kind for one in each), []).append(i)
    sentences += [_group(kinds, arms, conditions) for kinds, arms in alike.items()]
    if len(conditions) > 1:
        alone = "Each interval is corrected within its condition, not for the number of conditions."
        every = f"All intervals hold at 95 % for {together(conditions[0])}."
        sentences += [alone if conditions[0].family == "condition" else every]
    return " ".join(sentences)


def _group(kinds: Sequence[str], arms: Sequence[int], conditions: Sequence[statistics.Condition]) -> str:
    """'"none", "tied": worse in causal; no difference found in masked (between ... at the widest, 95 %).'"""
    phrases = []
    for kind in dict.fromkeys(kinds):
        places = [condition for condition, its in zip(conditions, kinds, strict=True) if its == kind]
        reach = f" ({_reach(arms, places)}, 95 %)" if kind == statistics.OPEN else ""
        phrases.append(f"{within(kind, places)}{_where([place.name for place in places], conditions)}{reach}")
    return f"{quoted(*(conditions[0].compared[i].name for i in arms))}: {'; '.join(phrases)}."


def within(text: str, conditions: Sequence[statistics.Condition]) -> str:
    """'equal within the margin' with these conditions' margins."""
    return text.replace("the margin", joined(list(dict.fromkeys(f"{one.margin:g}" for one in conditions))), 1)


def _where(names: Sequence[str], conditions: Sequence[statistics.Condition]) -> str:
    """'' for the only condition, ' in causal and masked', ' in all 7 conditions'."""
    if len(conditions) == 1:
        return ""
    return f" in all {len(names)} conditions" if len(names) == len(conditions) > 2 else f" in {joined(names)}"


def _reach(arms: Sequence[int], conditions: Sequence[statistics.Condition]) -> str:
    """How far the intervals of these arms reach together, for each metric."""
    of_metric: dict[str, list[statistics.Condition]] = {}
    for condition in conditions:
        of_metric.setdefault(condition.metric, []).append(condition)
    phrases = []
    for metric, places in of_metric.items():
        each = [place.compared[i].difference for place in places for i in arms]
        several = f" in {metric}" * (len(of_metric) > 1) + " at the widest" * (len(each) > 1)
        phrases.append(between(places[0], each) + several)
    return joined(phrases)


def of_past(study: studies.Study, past: plan.Past) -> list[str]:
    """Sentences on what was planned and read in the study's folder, and is not in its tables."""
    now = plan.comparisons(study)
    gone = [words for comparison, words in past.comparisons.items() if comparison not in now]
    sentences = []
    if gone:
        more = f" and {len(gone) - LISTED} more" if len(gone) > LISTED else ""
        counted = "Planned in this folder before, left out now, and counted among the comparisons"
        sentences += [f"{counted}: {'; '.join(gone[:LISTED])}{more}."]
    if past.share > 1 + 1e-9:  # a sum of shares
        sentences += [
            f"Verdicts were read over {len(past.looks)} different sets of seeds, for which study.looks did not allow: "
            f"the level no longer holds, and what is said to differ does so by chance in up to {5 * past.share:.3g} % "
            f"of such studies, not 5 %."
        ]
    return sentences


def of_power(study: studies.Study, conditions: Sequence[statistics.Condition], folder: object) -> str:
    """What so many seeds can show; in the metric where runs of this folder tell the standard deviations."""
    n, m = len(study.seeds), max(one.together for one in conditions)
    if n < inference.FEWEST:
        return f"power: {seeds([n])} can show no difference, which takes {inference.FEWEST}"
    least = inference.detectable(n, m)
    needed = listed(f"one of {effect} takes {inference.seeds_for(effect, m)} seeds" for effect in (1, 2))
    found = []
    for one in conditions:
        if std := [arm.difference.std for arm in one.compared if arm.difference.std]:
            reach = " to ".join(dict.fromkeys(number(least * x) for x in (min(std), max(std))))
            found.append(f"{reach} in {one.metric}{_where([one.name], conditions)}")
    return (
        f"power: {seeds([n])} show a difference of {least:.2g} standard deviations of the paired difference with "
        f"probability {inference.POWER}, for {together(conditions[0])}; {needed}"
        + (f"\nwith those of the runs in {folder}: {'; '.join(found)}" if found else "")
    )

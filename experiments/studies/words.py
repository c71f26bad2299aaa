"""What the intervals say, in words; and nothing that they do not say: a paragraph on a condition, one on the study.

Pure functions of the numbers. Where no difference was found, they say how far the intervals reach: few seeds find
nothing easily.
"""

from collections.abc import Iterable, Sequence

from experiments.studies import statistics

LISTED = 6  # names of weights in a sentence
OPENING = {  # of the sentence on the arms of a kind
    statistics.WORSE: "Worse:",
    statistics.BETTER: "Better:",
    statistics.OPEN: "No difference was found:",
    statistics.SAME: "Identical to the reference, but for rounding:",
    statistics.CONSTANT: "The same difference in every seed, which leaves no spread to make an interval of:",
    statistics.FEW: f"Too few seeds for a verdict, which takes {statistics.FEWEST}:",
}
TAKES = f"it takes at least {statistics.FEWEST} seeds in which"
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
    return f"between {number(better)} better and {number(worse)} worse"


def of_arm(condition: statistics.Condition, difference: statistics.Difference) -> str:
    """What is to be said of an arm of its kind: 'by 0.0482 (95 % interval 0.0310 to 0.0654, 5 seeds)'."""
    many = seeds([difference.n])
    if difference.kind in (statistics.FEW, statistics.SAME):
        return f"({many})"
    by = number(abs(difference.mean))
    if difference.kind == statistics.CONSTANT:
        side = "more" if difference.mean > 0 else "less"
        return f"({statistics.BETTER if side == condition.better else statistics.WORSE} by {by}, {many})"
    if difference.kind == statistics.OPEN:
        return f"({between(condition, [difference])}, 95 %, {many})"
    least, most = map(number, sorted(map(abs, difference.interval)))
    return f"by {by} (95 % interval {least} to {most}, {many})"


def of_condition(condition: statistics.Condition) -> str:
    """One paragraph on a condition, with what was left out and what is missing."""
    phrases: dict[str, list[str]] = {kind: [] for kind in OPENING}
    for one in condition.compared:
        phrases[one.difference.kind].append(f"{quoted(one.name)} {of_arm(condition, one.difference)}")
    reference, m = quoted(condition.reference), condition.comparisons
    if len(phrases[statistics.FEW]) == len(condition.compared):
        most = max(one.difference.n for one in condition.compared)
        both = f"both an arm and {reference} are finished, and there are {f'no more than {most}' if most else 'none'}"
        sentences = [f"No verdict in {condition.metric}: {TAKES} {both}."]
    else:
        sentences = [f"Against {reference}, in {condition.metric} ({condition.better} is better)."]
        sentences += [f"{OPENING[kind]} {'; '.join(each)}." for kind, each in phrases.items() if each]
        if phrases[statistics.WORSE] or phrases[statistics.BETTER] or phrases[statistics.OPEN]:
            together = f"hold at 95 % for the {m} comparisons of this condition together (Bonferroni)"
            sentences.append(f"The intervals, {PAIRED}, {together}." if m > 1 else f"The interval is {PAIRED}.")
    sentences += unlike(condition)
    ends = [
        f"{quoted(arm.name)} seed {seed} "
        f"({f'{condition.metric} not finite' if step is None else f'diverged at step {step:,}'})"
        for arm in condition.arms
        for seed, step in arm.diverged.items()
    ]
    if ends:
        sentences.append(f"Left out: {', '.join(ends)}; an arm without its diverged runs looks better than it is.")
    if missing := [f"{quoted(arm.name)} seed {listed(arm.missing)}" for arm in condition.arms if arm.missing]:
        sentences.append(f"Not finished yet: {'; '.join(missing)}.")
    return " ".join(sentences)


def unlike(condition: statistics.Condition) -> list[str]:
    """Sentences on the arms whose data, or initial values, are not the reference's: what differs may then be those."""
    reference, sentences = quoted(condition.reference), []
    for arm in condition.arms:
        for other, differs, whose in (
            (arm.other_evaluation, "evaluated on the same held-out examples as", "data"),
            (arm.other_batches, "trained on the batches of", "batches, in spite of the same seeds"),
        ):
            if other:
                some = "" if len(other) == arm.n else f" in seed {listed(other)}"
                is_not = f"{quoted(arm.name)} is not {differs} {reference}{some}"
                sentences.append(f"{is_not}: their difference may be one of the {whose}.")
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
    counts = [one.difference.n for one in arms if one.difference and one.difference.kind != statistics.FEW]
    if not counts:
        return " ".join([*sentences, f"No verdict: {TAKES} an arm and {reference} are finished."])
    sentences += [f"Against {reference}, {seeds(counts)}."]
    alike: dict[tuple[str, ...], list[int]] = {}  # kinds in all conditions -> the arms of which these are known
    for i, each in enumerate(zip(*(condition.compared for condition in conditions), strict=True)):
        alike.setdefault(tuple(one.difference.kind for one in each), []).append(i)
    sentences += [_group(kinds, arms, conditions) for kinds, arms in alike.items()]
    if len(conditions) > 1:
        sentences += ["Each interval is corrected within its condition, not for the number of conditions."]
    places: dict[str, list[str]] = {}  # where an arm's data are not the reference's
    for condition in conditions:
        for one in condition.arms:
            if one.other_evaluation or one.other_batches:
                places.setdefault(one.name, []).append(condition.name)
    if phrases := "; ".join(f"{quoted(name)}{_where(names, conditions)}" for name, names in places.items()):
        sentences += [f"Not on the same data as the reference, which may be the difference: {phrases}."]
    return " ".join(sentences)


def _group(kinds: Sequence[str], arms: Sequence[int], conditions: Sequence[statistics.Condition]) -> str:
    """'"none", "tied": worse in causal; no difference found in masked (between ... at the widest, 95 %).'"""
    phrases = []
    for kind in dict.fromkeys(kinds):
        places = [condition for condition, its in zip(conditions, kinds, strict=True) if its == kind]
        reach = f" ({_reach(arms, places)}, 95 %)" if kind == statistics.OPEN else ""
        phrases.append(f"{kind}{_where([place.name for place in places], conditions)}{reach}")
    return f"{quoted(*(conditions[0].compared[i].name for i in arms))}: {'; '.join(phrases)}."


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

"""What the intervals say, in words; and nothing that they do not say.

Pure functions of the numbers. A kind is a word for what is known of one arm against the reference.
"""

from collections.abc import Sequence

from experiments.laboratory import statistics

WORSE, BETTER, OPEN = "worse", "better", "no difference found"
SAME, CONSTANT, FEW = "identical", "the same difference in every seed", "too few seeds"
OPENING = {  # of the sentence on the arms of a kind
    WORSE: "Worse:",
    BETTER: "Better:",
    OPEN: "No difference was found:",
    SAME: "Identical to the reference, but for rounding:",
    CONSTANT: "The same difference in every seed, which leaves no spread to make an interval of:",
    FEW: f"Too few seeds for a verdict, which takes {statistics.FEWEST}:",
}


def number(x: float) -> str:
    """Four decimals, or two digits where these would hide the number."""
    return f"{x:.2g}" if 0 < abs(x) < 0.001 else f"{x + 0.0:.4f}"  # + 0.0: no minus before zero


def kind(comparison: statistics.Comparison, *, more_is_better: bool) -> str:
    """What the simultaneous interval says: one of the words above."""
    if comparison.spread is None or comparison.spread.n < statistics.FEWEST:
        return FEW
    if not comparison.varies:
        return SAME if comparison.alike else CONSTANT
    low, high = comparison.interval
    if low <= 0 <= high:
        return OPEN
    return BETTER if (low > 0) == more_is_better else WORSE


def arm(comparison: statistics.Comparison, *, more_is_better: bool) -> str:
    """What is to be said of an arm of its kind: 'by 0.0482 (95 % interval 0.0310 to 0.0654, 5 seeds)'."""
    found = kind(comparison, more_is_better=more_is_better)
    seeds = f"{len(comparison.differences)} seeds"
    if found in (FEW, SAME):
        return f"({seeds.removesuffix('s') if seeds.startswith('1 ') else seeds})"
    mean = comparison.spread.mean
    if found == CONSTANT:
        return f"({BETTER if (mean > 0) == more_is_better else WORSE} by {number(abs(mean))}, {seeds})"
    # As an amount by which the arm is worse: for a loss the difference itself, for an accuracy its negative.
    low, high = comparison.interval if not more_is_better else (-comparison.interval.high, -comparison.interval.low)
    if found == OPEN:
        ends = f"worse by more than {number(high)} or better by more than {number(-low)}"
        return f"({ends} is excluded at 95 %, {seeds})"
    ends = (low, high) if found == WORSE else (-high, -low)
    return f"by {number(abs(mean))} (95 % interval {number(ends[0])} to {number(ends[1])}, {seeds})"


def condition(found: statistics.Condition) -> str:
    """One paragraph on a condition, with what was left out and what is missing."""
    compared = [one for one in found.arms if one.comparison]
    said: dict[str, list[str]] = {word: [] for word in OPENING}
    for one in compared:
        words = arm(one.comparison, more_is_better=found.more_is_better)
        said[kind(one.comparison, more_is_better=found.more_is_better)].append(f"{one.name} {words}")
    if not compared:
        parts = ["There is one arm only, and nothing to compare it with."]
    elif len(said[FEW]) == len(compared):
        parts = [_refusal(found, compared)]
    else:
        parts = [f"Against {found.reference}, in {found.metric} ({_direction(found)})."]
        parts += [f"{OPENING[word]} {'; '.join(each)}." for word, each in said.items() if each]
        if said[WORSE] or said[BETTER] or said[OPEN]:
            parts += [_together(found.comparisons)]
    return " ".join([*parts, *_left_out(found), *_missing(found)])


def _refusal(found: statistics.Condition, compared: Sequence[statistics.Arm]) -> str:
    most = max(len(one.comparison.differences) for one in compared)
    have = f"no more than {most}" if most else "none"
    return (
        f"No verdict in {found.metric}: it takes at least {statistics.FEWEST} seeds in which both an arm and "
        f"{found.reference} are finished, and there are {have}."
    )


def _direction(found: statistics.Condition) -> str:
    return "more is better" if found.more_is_better else "less is better"


def _together(m: int) -> str:
    paired = "Student's t on differences paired by seed, which are taken to be roughly normal"
    if m == 1:
        return f"The interval is {paired}."
    return f"The intervals, {paired}, hold at 95 % for the {m} comparisons of this condition together (Bonferroni)."


def _left_out(found: statistics.Condition) -> list[str]:
    gone = [(one.name, seed, step) for one in found.arms for seed, step in one.diverged.items()]
    if not gone:
        return []
    names = (f"{name} seed {seed} ({_end(found.metric, step)})" for name, seed, step in gone)
    return [f"Left out: {', '.join(names)}; an arm without its diverged runs looks better than it is."]


def _end(metric: str, step: int | None) -> str:
    return f"{metric} not finite" if step is None else f"diverged at step {step:,}"


def _missing(found: statistics.Condition) -> list[str]:
    names = [f"{one.name} seed {', '.join(map(str, one.missing))}" for one in found.arms if one.missing]
    return [f"Not finished yet: {'; '.join(names)}."] if names else []


def overall(conditions: Sequence[statistics.Condition]) -> str:
    """One paragraph on the whole study: which arms were worse, better, or neither, and where."""
    missing = sum(len(one.missing) for found in conditions for one in found.arms)
    diverged = sum(len(one.diverged) for found in conditions for one in found.arms)
    begin = [f"The study is not finished: {missing} of its runs are missing."] if missing else []
    begin += [f"Left out, since they diverged: {diverged} of its runs."] if diverged else []
    places: dict[str, dict[str, list[str]]] = {}  # arm -> kind -> conditions
    for found in conditions:
        for one in found.arms:
            if one.comparison:
                word = kind(one.comparison, more_is_better=found.more_is_better)
                places.setdefault(one.name, {}).setdefault(word, []).append(found.name)
    if not places:
        return " ".join([*begin, "No verdict: there is one arm only."])
    if {word for each in places.values() for word in each} == {FEW}:
        few = f"it takes at least {statistics.FEWEST} seeds in which an arm and {conditions[0].reference} are finished"
        return " ".join([*begin, f"No verdict: {few}."])
    alike: dict[str, list[str]] = {}  # the same words -> arms
    for name, each in places.items():
        alike.setdefault(_places(each, alone=len(conditions) == 1), []).append(name)
    said = "; ".join(f"{', '.join(names)}: {words}" for words, names in alike.items())
    end = ["Each interval is corrected within its condition, not for the number of conditions."]
    return " ".join([*begin, f"Against {conditions[0].reference}: {said}.", *end[: len(conditions) - 1]])


def _places(places: dict[str, list[str]], *, alone: bool) -> str:
    """'worse in causal and masked, no difference found in prefix'."""
    return ", ".join(word if alone else f"{word} in {' and '.join(names)}" for word, names in places.items())

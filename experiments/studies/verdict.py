"""What the intervals say, in words; and nothing that they do not say.

Pure functions of the numbers. A kind is a word for what is known of one arm against the reference.
"""

from collections.abc import Iterable, Sequence

from experiments.studies import statistics

WORSE, BETTER, OPEN = "worse", "better", "no difference found"
SAME, CONSTANT, FEW = "identical", "the same difference in every seed", "too few seeds"
LISTED = 6  # names of weights in a sentence
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


def quoted(names: Iterable[str]) -> str:
    """'"none", "tied"': a name may be a word that the sentence could be read with."""
    return ", ".join(f'"{name}"' for name in names)


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
    many = seeds([len(comparison.differences)])
    if found in (FEW, SAME):
        return f"({many})"
    mean = comparison.spread.mean
    if found == CONSTANT:
        return f"({BETTER if (mean > 0) == more_is_better else WORSE} by {number(abs(mean))}, {many})"
    low, high = worse_by(comparison, more_is_better=more_is_better)
    if found == OPEN:
        return f"({between(low, high)}, 95 %, {many})"
    ends = (low, high) if found == WORSE else (-high, -low)
    return f"by {number(abs(mean))} (95 % interval {number(ends[0])} to {number(ends[1])}, {many})"


def worse_by(comparison: statistics.Comparison, *, more_is_better: bool) -> tuple[float, float]:
    """The interval of how much worse the arm is: of a loss the difference itself, of an accuracy its negative."""
    low, high = comparison.interval
    return (-high, -low) if more_is_better else (low, high)


def between(low: float, high: float) -> str:
    """How far an interval of `worse_by` reaches to both sides."""
    return f"between {number(-low)} better and {number(high)} worse"


def seeds(counts: Sequence[int]) -> str:
    """'1 seed', '5 seeds', '3 to 5 seeds'."""
    least, most = min(counts), max(counts)
    return f"{least}{f' to {most}' if most > least else ''} seed{'s' if most != 1 else ''}"


def condition(found: statistics.Condition) -> str:
    """One paragraph on a condition, with what was left out and what is missing."""
    compared = [one for one in found.arms if one.comparison]
    said: dict[str, list[str]] = {word: [] for word in OPENING}
    for one in compared:
        words = arm(one.comparison, more_is_better=found.more_is_better)
        said[kind(one.comparison, more_is_better=found.more_is_better)].append(f"{quoted([one.name])} {words}")
    if len(said[FEW]) == len(compared):
        parts = [_refusal(found, compared)]
    else:
        parts = [f"Against {quoted([found.reference])}, in {found.metric} ({_direction(found)})."]
        parts += [f"{OPENING[word]} {'; '.join(each)}." for word, each in said.items() if each]
        if said[WORSE] or said[BETTER] or said[OPEN]:
            parts += [_together(found.comparisons)]
    return " ".join([*parts, *unlike(found), *_left_out(found), *_missing(found)])


def _refusal(found: statistics.Condition, compared: Sequence[statistics.Arm]) -> str:
    most = max(len(one.comparison.differences) for one in compared)
    have = f"no more than {most}" if most else "none"
    return (
        f"No verdict in {found.metric}: it takes at least {statistics.FEWEST} seeds in which both an arm and "
        f"{quoted([found.reference])} are finished, and there are {have}."
    )


def _direction(found: statistics.Condition) -> str:
    return "more is better" if found.more_is_better else "less is better"


def _together(m: int) -> str:
    paired = "Student's t on differences paired by seed, which are taken to be roughly normal"
    if m == 1:
        return f"The interval is {paired}."
    return f"The intervals, {paired}, hold at 95 % for the {m} comparisons of this condition together (Bonferroni)."


def unlike(found: statistics.Condition) -> list[str]:
    """Sentences on the arms whose data, or initial values, are not the reference's: what differs may then be those."""
    reference = quoted([found.reference])
    said = []
    for one in found.arms:
        if one.other_evaluation:
            said.append(
                f"{quoted([one.name])} is not evaluated on the same held-out examples as {reference}"
                f"{_some(one, one.other_evaluation)}: their difference may be one of the data."
            )
        if one.other_batches:
            said.append(
                f"{quoted([one.name])} is not trained on the batches of {reference}{_some(one, one.other_batches)}: "
                f"their difference may be one of the batches, in spite of the same seeds."
            )
        if one.other_initial:
            said.append(
                f"{quoted([one.name])} begins with other values than {reference}, not only at another scale, in weights"
                f" of the same name and shape: {_listed(one.other_initial)}. Seeds do not pair these."
            )
    return said


def _listed(names: Sequence[str]) -> str:
    """The first names, and how many more."""
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more


def _some(one: statistics.Arm, seeds: Sequence[int]) -> str:
    """Which seeds, where it is not all."""
    return "" if len(seeds) == len(one.values) else f" in seed {', '.join(map(str, seeds))}"


def _left_out(found: statistics.Condition) -> list[str]:
    gone = [(one.name, seed, step) for one in found.arms for seed, step in one.diverged.items()]
    if not gone:
        return []
    names = (f"{quoted([name])} seed {seed} ({_end(found.metric, step)})" for name, seed, step in gone)
    return [f"Left out: {', '.join(names)}; an arm without its diverged runs looks better than it is."]


def _end(metric: str, step: int | None) -> str:
    return f"{metric} not finite" if step is None else f"diverged at step {step:,}"


def _missing(found: statistics.Condition) -> list[str]:
    names = [f"{quoted([one.name])} seed {', '.join(map(str, one.missing))}" for one in found.arms if one.missing]
    return [f"Not finished yet: {'; '.join(names)}."] if names else []

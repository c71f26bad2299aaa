"""The tables of a report, as rows of words: of a condition, of all conditions, of the layers, of what was run."""

from collections.abc import Sequence
from typing import NamedTuple

from experiments.engine import log
from experiments.studies import runs, statistics, words

NONE = "-"
MANY = 2  # conditions above which there is an overview
SHORT = {  # what an overview says of a kind
    statistics.WORSE: "worse",
    statistics.BETTER: "better",
    statistics.OPEN: "open",
    statistics.SAME: "same",
    statistics.CONSTANT: "constant",
    statistics.FEW: "few seeds",
}


class Table(NamedTuple):
    """A heading for each column, rows of as many words, and sentences that belong below."""

    head: list[str]
    rows: list[list[str]]
    notes: Sequence[str] = ()
    kinds: Sequence[Sequence[str]] = ()  # of each cell, for its colour: "worse", "better" or another word


def of_condition(condition: statistics.Condition) -> Table:
    """One row for each arm, in the order of the study."""
    others = [name for name in ("eval/loss", "eval/accuracy") if any(name in one.others for one in condition.arms)]
    m = condition.comparisons
    head = ["arm", "parameters", "FLOP/token", "runs", condition.metric]
    head += [f"minus {condition.reference}", "95 % interval", "p" + f" (x {m})" * (m > 1)]
    head += [f"steps to {condition.threshold:g}"] if condition.threshold else []
    return Table(head + others, [_row(one, others) for one in condition.arms], _notes(condition))


def _row(arm: statistics.Arm, others: list[str]) -> list[str]:
    return [
        arm.name,
        f"{arm.params:,}" if arm.params is not None else NONE,
        log.si(arm.flops_per_token, "").strip() if arm.flops_per_token is not None else NONE,
        str(arm.n),
        _plus_minus(arm),
        *_difference(arm.difference),
        *([_steps(arm.threshold_step)] if arm.threshold_step else []),
        *(_plus_minus(arm.others.get(name)) for name in others),
    ]


def _difference(difference: statistics.Difference | None) -> list[str]:
    """Mean, interval and p of the paired difference."""
    if difference is None:
        return ["reference", NONE, NONE]
    if difference.interval is None:
        without = {statistics.FEW: NONE, statistics.SAME: "identical", statistics.CONSTANT: "no spread"}
        return [signed(difference.mean), without[difference.kind], NONE]
    low, high = map(signed, difference.interval)
    p = difference.p_corrected
    return [signed(difference.mean), f"{low} to {high}", "< 0.0001" if p < 0.0001 else f"{p:.4f}"]


def signed(x: float | None) -> str:
    return NONE if x is None else ("+" if x > 0 else "") + words.number(x)


def _plus_minus(spread: statistics.Spread | statistics.Arm | None) -> str:
    if spread is None or spread.mean is None:
        return NONE
    return words.number(spread.mean) + (f" ± {words.number(spread.std)}" if spread.std is not None else "")


def _steps(step: statistics.ThresholdStep) -> str:
    """'1,200 (4 of 5)': the median, and how many seeds got there."""
    if not step.of:
        return NONE
    median = "not reached" if step.median is None else f"{step.median:,.1f}".removesuffix(".0")
    return f"{median} ({step.reached} of {step.of})"


def _notes(condition: statistics.Condition) -> list[str]:
    m = condition.comparisons
    notes = ["Mean ± sample standard deviation over runs; differences are paired by seed."]
    if m > 1:
        each = f"{100 * (1 - (1 - statistics.LEVEL) / m):.4g} %"
        notes[0] += f" Intervals hold for {m} comparisons together (Bonferroni: {each} each), and p is times {m}."
    if condition.threshold:
        interval = f"{condition.evaluation_interval:,}" if condition.evaluation_interval else "unknown"
        notes.append(
            f"Steps to {condition.threshold:g}: the first evaluation with {condition.metric} at "
            f"{'least' if condition.better == 'more' else 'most'} that, median over seeds (how many got there); its "
            f"resolution, the steps between evaluations, is {interval}. A run that diverged counts as one that never "
            f"gets there."
        )
    if condition.baseline:
        guess = {name: f" ({phrase})" for name, phrase in condition.guess.items()}
        values = (f"{name} {words.number(x)}{guess.get(name, '')}" for name, x in condition.baseline.items())
        notes.append(f"Baseline: {', '.join(values)}.")
    return notes + words.unlike(condition)


def overview(conditions: Sequence[statistics.Condition]) -> Table | None:
    """Conditions by arms, each with the difference to the reference and a word; None where there are few conditions."""
    if len(conditions) <= MANY:
        return None
    reference, arms = conditions[0].reference, [one.name for one in conditions[0].compared]
    rows, kinds = [], []
    for condition in conditions:
        [base] = [one for one in condition.arms if one.difference is None]
        differences = [one.difference for one in condition.compared]
        cells = [f"{signed(one.mean)} {SHORT[one.kind]}" for one in differences]
        rows.append([condition.name, condition.metric, NONE if base.mean is None else words.number(base.mean), *cells])
        kinds.append(["", "", "", *(SHORT[one.kind] for one in differences)])
    note = (
        f"Under an arm: its mean difference to {words.quoted(reference)}, and what its interval says of it. open: "
        f"no difference was found; same: no more than rounding; constant: no spread to make an interval of."
    )
    return Table(["condition", "metric", reference, *arms], rows, [note], kinds)


def layers(condition: statistics.Condition, section: str) -> Table | None:
    """The last values in each layer, mean over seeds, of what the figures of "symmetry" or "attention" show."""
    measures = {"symmetry": runs.SYMMETRY, "attention": runs.ATTENTION}.get(section, {})
    rows = [
        [arm.name, measures[name], *(NONE if x is None else words.number(x) for x in means)]
        for arm in condition.arms
        for name, means in getattr(arm, section, {}).items()
    ]
    width = max(map(len, rows), default=0)
    head = ["arm", "measure", *(f"layer {m}" for m in range(1, width - 1))]
    return Table(head, [row + [NONE] * (width - len(row)) for row in rows]) if rows else None


def aligned(table: Table) -> str:
    """Columns side by side: the first to the left, numbers to the right. What the files tell besides is left out."""
    columns = [
        i for i, name in enumerate(table.head) if name != "FLOP/token" and {row[i] for row in table.rows} != {NONE}
    ]
    lines = [[" ".join(row[i].split()) for i in columns] for row in (table.head, *table.rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  " + "  ".join(f"{cell:{'>' if i else '<'}{widths[i]}}" for i, cell in enumerate(line)).rstrip()
        for line in lines
    )

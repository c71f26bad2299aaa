"""The table of a condition, as rows of words; and the same in a terminal and in Markdown."""

import re
import textwrap
from collections.abc import Sequence
from typing import NamedTuple

from experiments.engine import report, terminal
from experiments.studies import overall as whole
from experiments.studies import statistics, thresholds, verdict

NONE = "-"


class Table(NamedTuple):
    """A heading for each column, rows of as many words, and sentences that belong below."""

    head: list[str]
    rows: list[list[str]]
    notes: list[str]
    kinds: Sequence[Sequence[str]] = ()  # of each cell, for its colour: "worse", "better" or another word


def condition(found: statistics.Condition) -> Table:
    """One row for each arm, in the order of the study."""
    others = [name for name in ("eval/loss", "eval/accuracy") if any(name in one.others for one in found.arms)]
    head = ["arm", "parameters", "FLOP/token", "runs", found.metric]
    head += [f"minus {found.reference}", "95 % interval", "p" + f" (x {found.comparisons})" * (found.comparisons > 1)]
    head += [f"steps to {found.threshold:g}"] if found.threshold else []
    return Table(head + others, [_row(found, one, others) for one in found.arms], _notes(found))


def _row(found: statistics.Condition, one: statistics.Arm, others: list[str]) -> list[str]:
    row = [
        one.name,
        f"{one.params:,}" if one.params is not None else NONE,
        report.si(one.flops_per_token, "").strip() if one.flops_per_token is not None else NONE,
        str(len(one.values)),
        _plus_minus(one.spread),
        *_difference(one.comparison),
    ]
    row += [_steps(one.reached)] if found.threshold else []
    return row + [_plus_minus(one.others.get(name)) for name in others]


def _difference(comparison: statistics.Comparison | None) -> list[str]:
    """Mean, interval and p of the paired difference."""
    if comparison is None:
        return ["reference", NONE, NONE]
    mean = signed(comparison.spread.mean) if comparison.spread else NONE
    if comparison.interval is None:
        few = len(comparison.differences) < statistics.FEWEST
        return [mean, NONE if few else "identical" if comparison.alike else "no spread", NONE]
    low, high = comparison.interval
    p = comparison.p_corrected
    return [mean, f"{signed(low)} to {signed(high)}", "< 0.0001" if p < 0.0001 else f"{p:.4f}"]


def signed(x: float) -> str:
    return ("+" if x > 0 else "") + verdict.number(x)


def _plus_minus(found: statistics.Spread | None) -> str:
    if found is None:
        return NONE
    return verdict.number(found.mean) + (f" ± {verdict.number(found.std)}" if found.std is not None else "")


def _steps(reached: dict[int, int | None]) -> str:
    """'1,200 (4 of 5)': the median, and how many seeds got there."""
    if not reached:
        return NONE
    median, got = thresholds.median_step(reached), sum(step is not None for step in reached.values())
    return f"{'not reached' if median is None else _whole(median)} ({got} of {len(reached)})"


def _whole(x: float) -> str:
    """1200.0 as '1,200', 1200.5 as '1,200.5'."""
    return f"{x:,.1f}".removesuffix(".0")


def _notes(found: statistics.Condition) -> list[str]:
    m = found.comparisons
    notes = ["Mean ± sample standard deviation over runs; differences are paired by seed."]
    if m > 1:
        each = f"{100 * (1 - (1 - statistics.LEVEL) / m):.4g} %"
        notes[0] += f" Intervals hold for {m} comparisons together (Bonferroni: {each} each), and p is times {m}."
    if found.threshold:
        side, step = ("at least", "at most")[not found.more_is_better], f"{found.every:,}" if found.every else "unknown"
        notes.append(
            f"Steps to {found.threshold:g}: the first evaluation with {found.metric} {side} that, median over seeds "
            f"(how many got there); its resolution, the steps between evaluations, is {step}. A run that diverged "
            "counts as one that never gets there."
        )
    if found.baseline:
        words = {name: f" ({guess})" for name, guess in found.guess.items()}
        told = ", ".join(f"{name} {verdict.number(x)}{words.get(name, '')}" for name, x in found.baseline.items())
        notes.append(f"Baseline: {told}.")
    return notes + verdict.unlike(found)


SHORT = {  # what an overview says of a kind
    verdict.WORSE: "worse",
    verdict.BETTER: "better",
    verdict.OPEN: "open",
    verdict.SAME: "same",
    verdict.CONSTANT: "constant",
    verdict.FEW: "few seeds",
}
MANY = 2  # conditions above which there is an overview


def overview(conditions: Sequence[statistics.Condition]) -> Table | None:
    """Conditions by arms, each with the difference to the reference and a word; None where there are few conditions."""
    if len(conditions) <= MANY:
        return None
    reference, arms = conditions[0].reference, [one.name for one in conditions[0].arms if one.comparison]
    rows, kinds = [], []
    for found in conditions:
        by_name = {one.name: one for one in found.arms}
        compared = [by_name[name].comparison for name in arms]
        kind = [SHORT[verdict.kind(one, more_is_better=found.more_is_better)] for one in compared]
        means = [signed(one.spread.mean) if one.spread else NONE for one in compared]
        cells = [f"{mean} {word}" for mean, word in zip(means, kind, strict=True)]
        rows.append([found.name, found.metric, _mean(by_name[reference].spread), *cells])
        kinds.append(["", "", "", *kind])
    note = (
        f"Under an arm: its mean difference to {verdict.quoted([reference])}, and what its interval says of it. open: "
        f"no difference was found; same: no more than rounding; constant: no spread to make an interval of."
    )
    return Table(["condition", "metric", reference, *arms], rows, [note], kinds)


def _mean(found: statistics.Spread | None) -> str:
    return verdict.number(found.mean) if found else NONE


def text(conditions: Sequence[statistics.Condition]) -> str:
    """For a terminal: aligned tables, each with its verdict, and the verdict on the study."""
    parts = [f"{one.name}\n{_aligned(condition(one))}\n\n{_wrapped(verdict.condition(one))}" for one in conditions]
    seen = overview(conditions)
    parts += [f"all conditions\n{_aligned(seen)}\n\n{_wrapped(seen.notes[0])}"] if seen else []
    return "\n\n".join([*parts, _wrapped(whole.overall(conditions), indent="")]).translate(terminal.CONTROL)


def _wrapped(words: str, indent: str = "  ") -> str:
    kept = words.replace("95 %", "95\N{NO-BREAK SPACE}%")
    found = textwrap.fill(kept, 110, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
    return found.replace("\N{NO-BREAK SPACE}", " ")


def _aligned(table: Table) -> str:
    """Columns side by side: the first to the left, numbers to the right. What the files tell besides is left out."""
    used = (any(row[i] != NONE for row in table.rows) for i in range(len(table.head)))
    kept = [i for i, shown in enumerate(used) if shown and table.head[i] != "FLOP/token"]
    lines = [[" ".join(row[i].split()) for i in kept] for row in (table.head, *table.rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  " + "  ".join(f"{cell:{'<' if i == 0 else '>'}{widths[i]}}" for i, cell in enumerate(line)).rstrip()
        for line in lines
    )


def markdown(table: Table) -> str:
    """The table in Markdown, its notes below."""
    lines = [table.head, [":--", *["--:"] * (len(table.head) - 1)]]
    lines = [[plain(cell) for cell in lines[0]], lines[1], *([plain(cell) for cell in row] for row in table.rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "".join(f"\n\n{plain(n)}" for n in table.notes)


def plain(words: str) -> str:
    """Text in one line that Markdown shows as it is: no name becomes a column, a link, a heading or a tag."""
    escaped = re.sub(r"([\\`*\[\]|#~$!])", r"\\\1", " ".join(words.split()))
    return escaped.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").translate(terminal.CONTROL)

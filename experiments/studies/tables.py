"""The tables of a report as rows of text: one for each condition, for all conditions, for the runs."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from experiments.engine import summary as summaries
from experiments.studies import inference, scaling, sentences, statistics

NONE, UNKNOWN = "-", "unknown"
MANY = 2  # an overview needs more conditions than this
# Short names of kinds in the overview. The others are shown as they are.
SHORT = {statistics.OPEN: "open", statistics.SAME: "same", statistics.CEILING: "ceiling", statistics.FEW: "few seeds"}
SHORT |= {statistics.EQUAL: "equal", statistics.STUCK: "two clusters"}
SHORT |= dict.fromkeys(statistics.IDENTICAL.values(), "identical runs")


class Table(NamedTuple):
    """A table of text: a heading for each column, rows, and sentences (notes) below."""

    head: list[str]
    rows: list[list[str]]
    notes: Sequence[str] = ()
    kinds: Sequence[Sequence[str]] = ()  # the CSS class of each cell; "worse" and "better" have a colour
    style: str = ""  # "words": the cells are sentences


def tabulate_condition(condition: statistics.Condition) -> Table:
    """Return the table of a condition: a row for each arm, in the order of the study."""
    metrics = [name for name in ("eval/loss", "eval/accuracy") if any(name in arm.others for arm in condition.arms)]
    head = ["arm", "parameters", "FLOP/token", "runs", condition.metric]
    compared = [f"minus {condition.reference}", "95 % interval", "p" + " (Bonferroni)" * (condition.together > 1)]
    head += compared if condition.compared else []
    head += [f"steps to {condition.threshold:g}"] if condition.threshold else []
    rows = []
    for arm in condition.arms:
        params = NONE if arm.params is None else f"{arm.params:,}"
        flops = NONE if arm.flops_per_token is None else summaries.format_si(arm.flops_per_token, "").strip()
        row = [arm.name, params, flops, str(arm.n), _format_spread(arm)]
        row += _format_difference(arm.difference) if condition.compared else []
        row += [_format_steps(arm.threshold_step)] if arm.threshold_step else []
        rows.append(row + [_format_spread(arm.others.get(name)) for name in metrics])
    unknown = {i for i in (1, 2) if {row[i] for row in rows} == {NONE}}  # in a table of another program
    head, *rows = [[cell for i, cell in enumerate(row) if i not in unknown] for row in (head + metrics, *rows)]
    return Table(head, rows, _write_notes(condition))


def _format_spread(spread: statistics.Spread | statistics.Arm | None) -> str:
    numbers = [] if spread is None else [x for x in (spread.mean, spread.std) if x is not None]
    return " ± ".join(map(sentences.format_number, numbers)) or NONE


def _format_difference(difference: statistics.Difference | None) -> list[str]:
    """Return three cells: mean, interval and corrected p of the difference."""
    if difference is None:
        return ["reference", NONE, NONE]
    p = NONE if difference.p_corrected is None else sentences.format_p(difference.p_corrected)
    short = {statistics.FEW: NONE, statistics.WORSE: "no spread", statistics.BETTER: "no spread"}
    interval = " to ".join(map(format_signed, difference.interval or ()))
    return [format_signed(difference.mean), interval or short.get(difference.kind, difference.kind), p]


def format_signed(x: float | None) -> str:
    return NONE if x is None else ("+" if x > 0 else "") + sentences.format_number(x)


def _format_steps(step: statistics.ThresholdStep) -> str:
    """Return '1,200 (5 of 5); +300 (+120 to +480)': median steps, seeds at the threshold, difference, interval.

    The difference to the reference is the mean over pairs.
    """
    if not step.of:
        return NONE
    median = "not reached" if step.median is None else f"{step.median:,.0f}"
    reach = " ({:+,.0f} to {:+,.0f})".format(*step.interval) if step.interval else ""
    later = "" if step.difference is None else f"; {step.difference:+,.0f}{reach}"
    return f"{median} ({step.reached} of {step.of}){later}"


def _write_notes(condition: statistics.Condition) -> list[str]:
    differences = f"; differences are {sentences.describe_pairing(condition)}" * bool(condition.compared)
    notes = [f"Mean ± sample standard deviation over runs{differences}."]
    if condition.together > 1:
        level = f"Bonferroni: {100 * (1 - (1 - inference.LEVEL) / condition.together):.4g} % each"
        notes[0] += f" Intervals hold for {sentences.describe_family(condition)} ({level}); p is that of one "
        notes[0] += f"comparison times {condition.together}, at most 1."
    differences = {sentences.quote(arm.name): arm.difference for arm in condition.compared if arm.difference.detectable}
    if differences:
        by_pairs = sorted(differences.values(), key=lambda difference: -difference.n)
        factors = [f"{difference.detectable / difference.std:.2g}" for difference in by_pairs]
        least = " to ".join(dict.fromkeys([factors[0], factors[-1]]))
        detectable = [f"{arm} {sentences.format_number(x.detectable)}" for arm, x in differences.items()]
        pairs = [f"{arm} {x.correlation:.2f}" for arm, x in differences.items() if x.correlation is not None]
        notes.append(
            f"Power: the smallest difference that these seeds show with probability {inference.POWER} is {least} "
            f"standard deviations of the paired difference: {', '.join(detectable)}."
            + (f" Correlation with the reference over seeds: {', '.join(pairs)}." if pairs else "")
        )
    if condition.threshold:
        interval = f"{condition.evaluation_interval:,}" if condition.evaluation_interval else UNKNOWN
        notes.append(
            f"Steps to {condition.threshold:g}: the median over seeds (how many seeds reached it); then the mean "
            f"paired difference (and its interval). Steps are interpolated between evaluations ({interval} steps "
            "apart), and the next evaluation must confirm them."
        )
    if condition.baseline:
        guess = {name: f" ({phrase})" for name, phrase in condition.guess.items()}
        values = (f"{name} {sentences.format_number(x)}{guess.get(name, '')}" for name, x in condition.baseline.items())
        notes.append(f"Baseline: {', '.join(values)}.")
    return notes


def tabulate_overview(conditions: Sequence[statistics.Condition]) -> Table | None:
    """Return a table of mean differences and short verdicts, conditions x arms; None for at most MANY conditions."""
    if len(conditions) <= MANY:
        return None
    reference, arms = conditions[0].reference, [arm.name for arm in conditions[0].compared]
    rows, kinds = [], []
    for condition in conditions:
        base = condition.base.mean
        rows.append([condition.name, condition.metric, NONE if base is None else sentences.format_number(base)])
        kinds.append(["", "", ""])
        for difference in [arm.difference for arm in condition.compared]:
            kinds[-1].append(SHORT.get(difference.kind, difference.kind))
            rows[-1].append(f"{format_signed(difference.mean)} {kinds[-1][-1]}")
    note = (
        f"In the column of an arm: its mean difference to {sentences.quote(reference)}, and the verdict. open: no "
        "difference was found; same: no seed differs by more than rounding; two clusters: some seeds did not leave a "
        "plateau."
    )
    return Table(["condition", "metric", reference, *arms], rows, [note], kinds)


def _format_range(interval: Sequence[float] | None, form: str) -> str:
    return " to ".join(f"{x:{form}}" if x < 1e9 else "infinity" for x in interval or ()) or NONE


def tabulate_laws(family: scaling.Family) -> Table:
    """Return a table with a row for each arm: its law, and the compute with which it reaches the reference's loss.

    The loss is that of the reference at the compute C0 (`family.middle`), and the compute is in units of C0.
    """
    rows, reference, sizes = [], sentences.quote(family.reference), len(family.conditions)
    constant = sizes >= scaling.WITH_CONSTANT
    for law in family.laws:
        row = [law.name, sentences.format_number(law.a), f"{law.b:.4f}", _format_range(law.b_interval, ".4f")]
        row += [sentences.format_number(law.E)] * constant + [f"{law.misfit:.2%}".replace("%", " %")]
        compute = NONE if law.compute is None else f"{law.compute:.2f} times"
        compute = [compute, _format_range(law.compute_interval, ".2f")]
        rows.append(row + (["reference", NONE] if law.name == family.reference else compute))
    law = f"{family.metric} = a (C / C0)^-b" + " + E" * constant
    notes = [
        f"Law: {law}, where C is the FLOPs of a training run and C0 = {family.middle:.2g}"
        + ". E is the loss that remains at infinite compute" * constant
        + f". The law is fitted to the logarithms of means over seeds, in {sizes} sizes "
        f"({sentences.join_values(family.conditions)}), and says little beyond these sizes.",
        f"Compute: the multiple of C0 with which the arm reaches the loss of {reference} at C0, both by their laws. "
        f"Below 1 is better; {NONE} if it is outside the arm's sizes. Misfit: the largest relative error of the law.",
        f"Intervals are percentiles of {scaling.RESAMPLES} bootstrap samples of the seeds of each size, each for one "
        "number. With few seeds they are too narrow (docs/studies.md).",
    ]
    head = ["arm", "a", "b", "95 % interval", *["E"] * constant, "misfit"]
    head += [f"compute for the loss of {family.reference}", "95 % interval"]
    left_out = f"Left out because of a diverged or missing run: {sentences.quote(*family.left_out)}."
    return Table(head, rows, notes + [left_out] * bool(family.left_out))


def tabulate_runs(record: dict[str, Any]) -> Table:
    """Return a table of report.json's facts about the runs, and about the software that wrote the report."""
    conditions, ran, session = record["conditions"], record["ran"], record["what"]
    seeds = sentences.join_values(record["seeds"])
    finished = f"{record['finished_runs']} of {record['planned_runs']} finished, seeds {seeds}"
    source = session.get("source")  # of numbers that another program has measured
    rows = [["experiment", record["experiment"]], ["reference", record["reference"]], ["runs", source or finished]]
    entries = [("condition", entry) for entry in conditions if entry["changes"]]
    for kind, entry in [*entries, *(("arm", arm) for arm in conditions[0]["arms"] if not source)]:
        changes = (f"{key} = {json.dumps(x, ensure_ascii=False)}" for key, x in entry["changes"].items())
        rows.append([f"{kind} {entry['name']}", sentences.join_values(changes) or "no changes"])
    versions = [f"{name} {_format_counts(counts, ' and ')}" for name, counts in ran["versions"].items()]
    seconds = ran["training_seconds"]
    facts = {
        "code of the runs": _format_counts(ran["commits"]),
        "hardware of the runs": _format_counts(ran["devices"]),
        "versions of the runs": ", ".join(versions) or UNKNOWN,
        "folders of the runs": _format_counts(ran["folders"]) if ran["folders"] else "",
        "training time of all runs": UNKNOWN if seconds is None else f"{seconds:,.0f} s",
    }
    rows += [] if source else [[name, fact] for name, fact in facts.items() if fact]
    data = [[f"data, {name}", "; ".join(map(str.strip, lines))] for name, lines in ran["data"].items()]
    rows += [["data", data[0][1]]] if len({text for _, text in data}) == 1 else data
    software = [session.get("commit") or "not from a checkout", session.get("device")]
    versions = sentences.join_values(f"{name} {version}" for name, version in session["versions"].items())
    rows += [["code of the report", ", on ".join(filter(None, software))], ["versions of the report", versions]]
    return Table(["", ""], rows, style="words")


def _format_counts(counts: Mapping[str, int], between: str = ", ") -> str:
    """Return 'a' for one entry, 'a (20 runs), b (10 runs)' for several, UNKNOWN for none. between: the separator."""
    if len(counts) < 2:
        return next(iter(counts), UNKNOWN)
    return between.join(f"{value} ({count} run{'s' if count > 1 else ''})" for value, count in counts.items())


def align(table: Table) -> str:
    """Return the table as aligned text for a terminal, without empty columns and the column FLOP/token."""
    columns = []
    for name, *cells in zip(table.head, *table.rows, strict=True):
        if name != "FLOP/token" and {*cells} != {NONE}:
            column = [" ".join(cell.split()) for cell in (name, *cells)]
            width, side = max(map(len, column)), ">" if columns else "<"
            columns.append([f"{cell:{side}{width}}" for cell in column])
    return "\n".join(f"  {'  '.join(line)}".rstrip() for line in zip(*columns, strict=True))

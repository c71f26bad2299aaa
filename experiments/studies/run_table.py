"""Read the runs in a CSV table that any program has written, and print how the table is read.

A row is a run, or a step of a run. In a wide table a row is a seed, and each column is an arm.
"""

import functools
import math
import pathlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from experiments.config import disk, errors
from experiments.data import files as data_files, tables as data_tables
from experiments.folder import log
from experiments.studies import runs as study_runs, sentences, statistics, study as studies

COLUMNS = {  # column -> its other names. All may be written in any case
    "arm": ("model", "method", "variant", "config", "name"),
    "seed": ("random_seed", "rng_seed"),
    "condition": (),
    "steps": ("step", "_step", "global_step", "iteration", "epoch"),
    "state": ("status",),
    **dict.fromkeys(("params", "flops_per_token", "seconds", "diverged_at"), ()),
    "": ("unnamed:_0",),  # numbers of the rows, by pandas
}
OF_STUDY = {"params", "flops_per_token", "seconds", "diverged_at"}  # columns of runs.csv, which a study has written
USED, DIVERGED, LEFT_OUT, MISSING = "used", "diverged", "left out", "missing"  # what a row counts as
STATES = dict.fromkeys(("finished", "completed", "complete", "success", "done"), USED)
STATES |= dict.fromkeys(("crashed", "failed", "killed", "diverged"), DIVERGED)
STATES |= dict.fromkeys(("running", "pending", "queued"), LEFT_OUT)
NO_VALUE = ("", "-", "na", "n/a", "none", "null")  # cells without a value, in any case. nan is a value: it diverged
BETTER = {"loss": "less", "error": "less", "perplexity": "less", "accuracy": "more"}  # word of a metric's name
# Words of a metric's name that do not change which values are better.
NEUTRAL = """train training val valid validation dev test eval evaluation held out final last best mean avg average
median top rate cross entropy token word class balanced relative absolute squared square mse rmse mae per""".split()
PERCENT = 20  # a value above 1 that is more than this times all values below 1 is a percentage among fractions


class Row(NamedTuple):
    """A row of a long table, or a cell of a wide one."""

    place: str  # "line 3"
    run: study_runs.Run
    use: str  # USED, DIVERGED, LEFT_OUT or MISSING
    state: str  # as written, like arm
    arm: str
    is_percentage: bool  # the metric's cell ends in %


class Table(NamedTuple):
    """The runs of a table, in its order."""

    runs: list[study_runs.Run]
    metric: str
    is_of_study: bool  # the table is runs.csv of a study


def read(file: pathlib.Path, metric: str, better: str, *, wide: bool = False) -> Table:
    """Return the runs of a table as finished runs. Print what is read, replaced and left out.

    wide: whether each arm is a column. metric: the name of a column; "" for the only one whose meaning is not known,
    unlike arm or seed. In a wide table it is the name of the metric in the cells. better: "less", "more", or "" to
    decide by that name. Raises UserError if the file, a column or a cell is invalid, or if there are fewer than two
    arms.
    """
    rows: list[Row] = []
    columns: Mapping[str, str] = {}
    with disk.reading(file):
        for place, named_cells in data_tables.read_cells(data_files.on_disk(file)):
            columns = name_columns((*named_cells,), wide)
            metric = choose_metric((*columns.items(),), metric, wide)
            cells = {columns[name]: cell.strip() for name, cell in named_cells.items() if name in columns}
            rows += read_rows(place, cells, metric, choose_direction(metric, better), wide)
        runs = select_runs(rows, metric)
    arms = {run.arm for run in runs}
    errors.refuse((len(arms) < 2, f"{file}: the number of arms is {len(arms)}, but a comparison needs two or more"))
    check_units(rows, runs, metric)
    direction = choose_direction(metric, better)
    other = {"less": "more", "more": "less"}[direction]
    lines = [f"{metric}: {sentences.COMPARATIVES[direction]} is better. --better={other} would say the opposite."]
    synonyms = {name: known for name, known in columns.items() if known and simplify(name) in COLUMNS.get(known, ())}
    lines += [f'the column "{name}" is read as {known}' for name, known in synonyms.items()]
    lines += [f"columns that are arms: {', '.join(name for name in columns.values() if name not in COLUMNS)}"] * wide
    log.say("\n".join([*lines, *describe(rows, runs, metric)]), "\n")
    return Table(runs, metric, OF_STUDY <= {*columns.values()})


def simplify(name: str) -> str:
    """Return the name of a column in the form of COLUMNS: 'random_seed' for 'Random Seed'."""
    return name.lower().replace(" ", "_")


@functools.cache  # 400,000 rows have one header
def name_columns(names: tuple[str, ...], wide: bool) -> Mapping[str, str]:
    """Return column -> the key of COLUMNS that it means, or its own name.

    Of several columns of steps, the result has only the one whose name comes first in COLUMNS. wide: whether each arm
    is a column; then only a column named arm means the key "arm". Raises ValueError if two columns mean the same other
    key.
    """
    columns = dict(zip(names, names, strict=True))
    for known, others in COLUMNS.items():
        exact = [name for name in names if simplify(name) == known]
        similar = [name for other in others for name in names if simplify(name) == other]
        if known == "steps":
            columns = {name: column for name, column in columns.items() if name not in [*exact, *similar][1:]}
            similar = similar[:1]
        elif len(similar) > 1:
            similar = [name for name in similar if simplify(name) != "name"]  # this is a run's name, beside its model's
        similar = [] if exact or (wide and known == "arm") else similar
        if len([*exact, *similar]) > 1:
            rule = f"Rename one of them to {known}, and the others to other names."
            raise ValueError(f"several columns can be the {known}: {', '.join([*exact, *similar])}. {rule}")
        columns |= dict.fromkeys([*exact, *similar], known)
    return columns


@functools.cache
def choose_metric(columns: tuple[tuple[str, str], ...], metric: str, wide: bool) -> str:
    """Return the new name of the metric's column; for a wide table, with a column for each arm, `metric`.

    columns: (name in the table, new name of `name_columns`). metric: "" for the only column of unknown meaning. Raises
    UserError if the metric, or the column arm, is missing. A wide table instead needs `metric`, a column seed and no
    column arm.
    """
    names, known = [name for name, column in columns if column not in COLUMNS], {column for _, column in columns}
    choices, metric = known - {"arm", "seed", "condition", "state", ""}, dict(columns).get(metric, metric)
    metric = names[0] if not (metric or wide or len(names) != 1) else metric
    rule = "If each of these columns is an arm, and each row a seed, add --wide"
    problem = f"no column is called arm (or {', '.join(COLUMNS['arm'])}) among {', '.join(names)}. {rule}"
    needs = "--wide needs --metric=NAME, which says what the cells are, a column seed, and no column arm"
    errors.refuse(
        (wide and (not metric or metric in COLUMNS or "arm" in known or "seed" not in known), needs),
        (not wide and "arm" not in known, problem),
        (not wide and metric not in choices, f"--metric={metric} must be one of the columns {', '.join(names)}"),
    )
    return metric


def read_rows(place: str, cells: Mapping[str, str], metric: str, better: str, wide: bool) -> list[Row]:
    """Return the cells of a line as a Row; of a wide table, a Row for each arm, whose name is that of a column.

    cells: result of `name_columns` -> text. metric: the column of the metric; of a wide table, the name of its cells'
    metric. better: "less" or "more". Raises ValueError if a cell is invalid.
    """
    if not wide:
        return [read_row(place, cells, metric, better)]
    if not cells["seed"]:
        raise ValueError(f"{place}: seed is empty. The runs in a row of a wide table share a seed. Fill it in.")
    known = {name: cell for name, cell in cells.items() if name in COLUMNS}
    arms = {name: cell for name, cell in cells.items() if name not in COLUMNS}
    return [read_row(place, known | {"arm": arm, metric: cell}, metric, better) for arm, cell in arms.items()]


def read_row(place: str, cells: Mapping[str, str], metric: str, better: str) -> Row:
    """Return a row. If it has no seed, its seed is minus its line number. Raises ValueError if a cell is invalid.

    place: "line 3". cells: column -> text. metric: the column of the metric. better: "less" or "more".
    """
    names = {"seed", "steps", "diverged_at", "params", "flops_per_token", metric} & cells.keys()
    numbers: dict[str, float] = {}
    for name in names | {name for name in cells if name.startswith("eval/")}:
        try:
            numbers[name] = float("nan" if cells[name].lower() in NO_VALUE else cells[name].removesuffix("%"))
        except ValueError as error:
            raise ValueError(f"{place}: {name} = {cells[name]!r} is not a number") from error
    known = {name: int(x) if x.is_integer() else x for name, x in numbers.items() if not math.isnan(x)}
    counts = [known.get(name, 0) for name in ("seed", "steps", "diverged_at")]
    arm, condition = (" ".join(cells.get(name, "").split()) for name in ("arm", "condition"))
    if not arm or any(type(x) is not int or x < 0 for x in counts):
        raise ValueError(f"{place}: arm must be a name; seed, steps and diverged_at whole numbers from 0, or empty")
    use = STATES.get(cells.get("state", "finished").lower())
    if use is None:
        raise ValueError(f"{place}: state = {cells['state']!r} must be one of {', '.join(STATES)}")
    known |= {metric: None} if use == DIVERGED else {}
    use = DIVERGED if "diverged_at" in known else use
    use = MISSING if use == USED and cells[metric].lower() in NO_VALUE else use
    seed = known.pop("seed", -int(re.sub(r"\D", "", place)))
    summary = {metric: None} | known | {"better": {metric.rpartition("/")[2]: better}}
    run = study_runs.Run(condition or studies.ONLY, arm, seed, int(known.get("steps", 0)), summary, rows=[])
    return Row(place, run, use, cells.get("state", ""), cells["arm"], cells[metric].endswith("%"))


def select_runs(rows: Sequence[Row], metric: str) -> list[study_runs.Run]:
    """Return, for each run, its last row with a value of the metric, or the row with which it diverged.

    Rows with the same condition, arm and seed are steps of one run. Raises ValueError if two of them have the same
    step (for the metric "steps": if there are two). Rows of an arm with different steps and no seed, and an arm without
    a value, raise it too.
    """
    last: dict[tuple[str, str, int], Row] = {}
    unnamed: dict[tuple[str, str], set[int]] = {}  # condition, arm -> the steps of its runs without a seed
    for row in rows:
        if row.use in (USED, DIVERGED):
            place = condition, arm, seed = row.run[:3]
            earlier = last.setdefault(place, row)
            if earlier is not row and (earlier.run.steps == row.run.steps or metric == "steps"):
                raise ValueError(f"{row.place}: arm {arm} has seed {seed} twice in condition {condition}. Keep one.")
            last[place] = max(earlier, row, key=lambda row: (row.use == DIVERGED, row.run.steps))
            if seed < 0 and row.run.value(metric) is not None and metric != "steps":
                unnamed.setdefault((condition, arm), set()).add(row.run.steps)
    for (_, arm), steps in unnamed.items():
        if len(steps) > 1:
            rule = "Add a column seed, the number of the run."
            raise ValueError(f"rows of arm {arm} have no seed and different steps: one run, or several? {rule}")
    if lost := {row.run.arm for row in rows} - {arm for _, arm, _ in last}:
        rule = "Remove its rows, or write nan if its runs diverged."
        raise ValueError(f"arm {min(lost)} has no value of {metric}. {rule}")
    return [row.run for row in last.values()]


def check_units(rows: Sequence[Row], runs: Sequence[study_runs.Run], metric: str) -> None:
    """Raise UserError if the column `metric` mixes cells with and without a % sign.

    The values of an accuracy or error may not mix fractions and percentages either.
    """
    signs = Counter(row.is_percentage for row in rows if row.run.summary[metric] is not None)
    values = [run.value(metric) for run in runs]
    small = max((x for x in values if x and 0 < x <= 1), default=math.inf)
    large = min((x for x in values if x and x > 1), default=0.0)
    mixed = re.search("accuracy|error", metric.lower()) and large > PERCENT * small
    ranges = f"fractions, up to {small}, and percentages, from {large}"
    cells = f"{signs[True]:,} cells with a % sign and {signs[False]:,} without"
    rule = "Write all of its values in the same form"
    errors.refuse((len(signs) > 1, f"{metric} has {cells}. {rule}"), (mixed, f"{metric} has {ranges}. {rule}"))


def describe(rows: Sequence[Row], runs: Sequence[study_runs.Run], metric: str) -> list[str]:
    """Return lines that say how many rows are left out or diverged, and how cells, states and names are read."""
    uses, states = Counter(row.use for row in rows), Counter((row.state, row.use) for row in rows if row.state)
    without = {row.run[:3] for row in rows} - {run[:3] for run in runs}
    diverged, steps = sum(run.value(metric) is None for run in runs), uses[USED] + uses[DIVERGED] - len(runs)
    by_state = ", ".join(f"{n:,} {state} ({use})" for (state, use), n in states.items())
    percentages = sum(row.is_percentage for row in rows)
    spellings: dict[str, set[str]] = {}
    for row in rows:
        spellings.setdefault(row.run.arm, set()).add(row.arm)
    lines = {
        f"cells with a % sign, read as percentages: {percentages:,}": percentages,
        f"rows by their state: {by_state}": states,
        f"rows without a value of {metric}, left out as missing: {uses[MISSING]:,}": uses[MISSING],
        f"rows of earlier steps of a run, left out because its last step with a value is used: {steps:,}": steps,
        f"runs without a row that is used: {len(without):,}": without,
        f"runs that count as diverged ({metric} not finite, diverged_at, or their state): {diverged:,}": diverged,
    }
    several = [f"one arm, {arm!r}: {sorted(written)}" for arm, written in spellings.items() if len(written) > 1]
    return [line for line, is_needed in lines.items() if is_needed] + several


@functools.cache
def choose_direction(metric: str, better: str) -> str:
    """Return which values are better, "less" or "more": `better` (--better), or if it is '', what the name says.

    The name says it by one whole word of BETTER, if all its other words are in NEUTRAL: accuracy_drop says nothing.
    Raises UserError if neither says it, or for another `better`.
    """
    words = [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", metric)]
    known = [BETTER.get(word, "") for word in words if word not in NEUTRAL]
    better = better or (known[0] if len(known) == 1 else "")
    rule = f"--metric={metric} does not say which values are better. Add --better=less or --better=more"
    errors.refuse((better not in statistics.BEST, rule if not better else f"--better={better} must be less or more"))
    return better

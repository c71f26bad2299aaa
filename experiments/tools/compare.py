"""Compare runs: their curves in one figure, the settings in which they differ, and their results.

python -m experiments.tools.compare RUN RUN ... --metric=eval/accuracy --output=DIR
compare.run(["RUN", "RUN"], metric="eval/accuracy", output="DIR")

A RUN is the folder of a run, finished or not. It may also be a CSV file of another program, with a column of steps
(step, steps, iter or iteration) and columns named like our metrics: train/loss, eval/loss, eval/accuracy.
"""

import contextlib
import json
import math
import os
import pathlib
import textwrap
from collections.abc import Sequence
from typing import Any, NamedTuple

from experiments import command as commands
from experiments.config import disk, errors
from experiments.data import files as data_files, tables as data_tables
from experiments.engine import run_plan
from experiments.figures import plots
from experiments.folder import checkpoint, log, records
from experiments.studies import figures as study_figures, sentences, styles, tables

HELP = {
    "metric": "The metric to draw and to compare: eval/loss, eval/accuracy, train/loss, ...",
    "output": "The figure's file (.png, .svg or .pdf), or the folder for compare.png.",
}
STEPS = ("step", "steps", "iter", "iteration")  # names of the column of steps, in any case
SIZES = {"wall_seconds": ",.1f", "params": ","}  # of summary.json, and their format
NOISE = (
    "One run of a setting says nothing about noise: with another seed the order may change. A study trains several "
    "seeds of each setting, and gives intervals (docs/studies.md)."
)


class Run(NamedTuple):
    """A run, or a CSV file, which has only a label and rows. The summary is {} if the run is not finished."""

    label: str
    rows: list[dict[str, Any]]  # of metrics.jsonl, and the evaluation in the summary
    settings: dict[str, Any] = {}  # by full name
    summary: dict[str, Any] = {}
    data: str | None = None  # digest of the data; None: unknown

    @property
    def metrics(self) -> list[str]:
        return list(dict.fromkeys(name for row in self.rows for name in row if name != "step"))

    def final(self, metric: str) -> str:
        """Return the last value of a metric as text, or "not finite"; NONE if the run has not measured it."""
        x = next((row[metric] for row in reversed(self.rows) if metric in row), tables.NONE)
        if x == tables.NONE:
            return x
        return sentences.format_number(x) if x is not None and math.isfinite(x) else "not finite"

    def steps(self) -> str:
        """Return '100', '60 of 100' for a run that is not finished, or 'diverged at 35'."""
        if self.summary.get("diverged_at"):
            return f"diverged at {self.summary['diverged_at']:,}"
        last = max((row["step"] for row in self.rows), default=0)
        planned = self.settings.get("train.steps", last)
        return f"{last:,.0f}" if last == planned else f"{last:,.0f} of {planned:,}"


def run(
    runs: Sequence[commands.Path], *, metric: str = "eval/loss", output: commands.Path = "compare.png"
) -> pathlib.Path:
    """Print tables of the settings and results of the runs, draw their curves into a new file, and return its path.

    runs: folders of runs, or CSV files of other programs. output: the file, or the folder for compare.png. Raises
    UserError if the file exists, or if a path is a study, or neither a run nor a CSV file. Fewer than two runs, and a
    metric without a finite value in any run, raise it too.
    """
    file = pathlib.Path(output)
    file = file if file.suffix in (".png", *study_figures.ALSO) else file / "compare.png"
    return write(runs, metric, disk.check_new(file, "--output", is_file=True))


def write(runs: Sequence[commands.Path], metric: str, file: pathlib.Path) -> pathlib.Path:
    """Print the tables, draw the figure, and return its path.

    Raises UserError for a study, for fewer than two runs, and for a metric without a finite value in any run.
    """
    paths = list(dict.fromkeys(map(os.fspath, runs)))
    errors.refuse((len(paths) < 2, "name at least two runs: python -m experiments.tools.compare runs/a runs/b"))
    common = os.path.commonpath([os.path.dirname(os.path.abspath(path)) for path in paths])
    loaded = [load(path, f"{i} {os.path.relpath(path, common)}") for i, path in enumerate(paths, 1)]
    available = ", ".join(dict.fromkeys(name for run in loaded for name in run.metrics)) or "no metrics yet"
    missing = f"--metric={metric} has no finite value in these runs. They have: {available}"
    errors.refuse((not stack(loaded, metric), missing))
    with disk.writing(file):
        draw(loaded, metric, file)
    blocks = [tables.align(tabulate_settings(loaded)), tables.align(tabulate_results(loaded, metric))]
    blocks.append("\n".join(textwrap.fill(note, width=110) for note in [*list_notes(loaded, metric), NOISE]))
    log.say("\n\n".join([*filter(None, blocks), f"  {file}"]), "\n")
    return file


def load(path: str, label: str) -> Run:
    """Load a run's folder or a CSV file. Raises UserError if it is neither, or the folder of a study.

    Also raises it if a row of the CSV file has no step.
    """
    folder = pathlib.Path(path)
    if folder.is_file():
        return Run(label, read_csv(folder))
    settings, data = records.read_settings(folder), records.read_config(folder).get("data") or {}
    is_study = f"{path} is a study: its report.html compares its runs. Name folders of single runs"
    errors.refuse(
        (not settings, f"{path} is neither a CSV file nor the folder of a run, which has a config.json"),
        ("study.arms" in settings, is_study),
    )
    rows, summary = records.read_metrics(folder), records.read_summary(folder)
    ends_early = settings.get("train.patience", 0) > 0
    if summary.get("steps") != settings.get("train.steps") and not ends_early:  # the run goes on with more steps
        summary = {}
    last = {key: x for key, x in summary.items() if key.startswith(run_plan.EVAL)}
    rows += [{"step": summary["steps"]} | last] if last else []
    return Run(label, rows, settings, summary, data.get("sha256"))


def read_csv(file: pathlib.Path) -> list[dict[str, Any]]:
    """Return the numbers in a CSV file as rows like those of metrics.jsonl, without texts and empty cells.

    The column of steps has one of the names STEPS, in any case; it becomes "step". Raises UserError if a step is
    missing or not a number.
    """
    rows: list[dict[str, Any]] = []
    with disk.reading(file):
        for _, cells in data_tables.read_cells(data_files.on_disk(file)):
            names = {name.strip().lower(): name for name in cells}
            step = next((names[name] for name in STEPS if name in names), None)
            if step is None:
                raise ValueError(f"the columns are {', '.join(cells)}. Name the column of steps {' or '.join(STEPS)}")
            rows.append({"step": float(cells.pop(step))})
            for name, cell in cells.items():
                with contextlib.suppress(ValueError):  # empty, or a text
                    rows[-1][name.strip()] = float(cell)
    return rows


def stack(runs: Sequence[Run], metric: str) -> dict[str, study_figures.Curve]:
    """Return label -> steps (I) and finite values (1, I) of the metric, without runs that have no such value."""
    curves = {run.label: plots.read_points(run.rows, metric)[0] for run in runs}
    return {label: (step_I, value_I[None]) for label, (step_I, value_I) in curves.items() if len(step_I)}


def draw(runs: Sequence[Run], metric: str, file: pathlib.Path) -> None:
    """Draw the training loss, smoothed, and the metric against the step."""
    panels = [study_figures.Panel("training loss", "step", study_figures.smooth(stack(runs, "train/loss")), falls=True)]
    if metric != "train/loss":
        panels.append(study_figures.Panel(metric, "step", stack(runs, metric), falls="loss" in metric))
    panels = [panel for panel in panels if panel.curves]
    style = {run.label: styles.number_style(i, plots.name(run.label, 60)) for i, run in enumerate(runs)}
    height = 3.6 + 0.2 * len(runs)  # inches; the legend has a line for each run if the labels are long
    plots.write(study_figures.draw_panels([panels], style, width=4.6, height=height)[0], file)


def tabulate_settings(runs: Sequence[Run]) -> tables.Table:
    """Return a table of the settings that differ. Rows are runs, or settings if there are more settings than runs.

    A run is named by the number with which its label begins. The table is empty if no setting differs.
    """
    known = [run.settings for run in runs if run.settings] or [{}]
    common = sorted(set.intersection(*map(set, known)))
    keys = [key for key in common if any(settings[key] != known[0][key] for settings in known)]
    table = [["run", *keys]]
    for run in runs if keys else ():
        values = (json.dumps(run.settings[key]) if run.settings else tables.NONE for key in keys)
        table.append([run.label.partition(" ")[0], *(plots.name(value, 24) for value in values)])
    if len(table[0]) > len(table):
        table = [list(column) for column in zip(*table, strict=True)]
    return tables.Table(table[0] if table[1:] else [], table[1:])


def tabulate_results(runs: Sequence[Run], metric: str) -> tables.Table:
    """Return a table with a row for each run: final metrics, the best value of the metric and its step, and more.

    That is: steps, seconds, and the number of parameters.
    """
    others = dict.fromkeys(name for run in runs for name in run.metrics if name.startswith(run_plan.EVAL))
    others.pop(metric, None)
    better = {name: x for run in runs for name, x in run.summary.get("better", {}).items()} | checkpoint.BETTER
    name, curves, rows = metric.rpartition("/")[2], stack(runs, metric), []
    direction = better.get(name, "less" if "loss" in name else "")  # without one, no value is the best
    for run in runs:
        row = [run.label, run.final(metric), tables.NONE, tables.NONE]
        if direction and run.label in curves:
            step_I, ((*values,),) = curves[run.label]
            i = values.index((min if direction == "less" else max)(values))
            row[2:] = sentences.format_number(values[i]), f"{step_I[i]:,.0f}"
        size = {key: f"{run.summary[key]:{form}}" for key, form in SIZES.items() if key in run.summary}
        rows.append([*row, *map(run.final, others), run.steps(), *(size.get(key, tables.NONE) for key in SIZES)])
    return tables.Table(["run", metric, "best", "at step", *others, "steps", "seconds", "parameters"], rows)


def list_notes(runs: Sequence[Run], metric: str) -> list[str]:
    """Return sentences on runs without a finite metric, settings that some runs lack, and differences of the runs.

    The differences are other data and, for the metric eval/loss, another train.loss.
    """
    notes, known = [], [set(run.settings) for run in runs if run.settings] or [set()]
    if missing := [run for run in runs if run.label not in stack(runs, metric)]:
        have = (f"{run.label} (it has {', '.join(run.metrics) or 'no metrics yet'})" for run in missing)
        notes.append(f"Without a finite {metric}, so not drawn: {'; '.join(have)}.")
    if partial := sorted(set.union(*known) - set.intersection(*known)):
        names = ", ".join(partial[:6]) + ", ..." * (len(partial) > 6)
        notes.append(f"Settings that not every run has are not compared ({len(partial)}): {names}.")
    if len({run.data for run in runs} - {None}) > 1:
        notes.append("warning: the runs were trained on different data, so their metrics may not be comparable.")
    losses = ", ".join(sorted({run.settings["train.loss"] for run in runs if "train.loss" in run.settings}))
    if "," in losses and metric == "eval/loss":
        notes.append(f"warning: eval/loss has another meaning for each train.loss ({losses}). Compare another metric.")
    return notes


if __name__ == "__main__":
    commands.main(run, HELP, positional="runs")

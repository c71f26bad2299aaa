"""The report of a study, from its folder alone: report.json, report.md, report.html and figures."""

import pathlib
from collections.abc import Sequence
from typing import Any

from experiments.engine import disk
from experiments.studies import drawings, page, provenance, record, runs, statistics, tables, verdict
from experiments.studies import study as studies


def write(folder: pathlib.Path, study: studies.Study, *, what: dict[str, Any]) -> list[pathlib.Path]:
    """Write the report of the runs that are finished, and return its files.

    what: of the session that writes it, {"config": the study's, resolved, "versions", "device": a line, "commit"}.
    UserError where a run's files are damaged, or have not measured what the study compares.
    """
    finished = runs.load(folder, study)
    conditions = statistics.analyse(study, finished)
    numbers = record.record(study, conditions, finished, what)
    drawn = drawings.draw(folder, study, conditions, finished)
    title = f'{study.experiment}: {len(study.arms)} arms, "{study.reference}" is the reference'
    disk.write_json(folder / "report.json", numbers)
    disk.write(folder / "report.md", markdown(title, folder, conditions, numbers, drawn).encode())
    disk.write(folder / "report.html", page.page(title, conditions, numbers, drawn).encode())
    return [folder / "report.json", folder / "report.md", folder / "report.html", *(one.file for one in drawn)]


def text(folder: pathlib.Path, study: studies.Study) -> str:
    """The tables and verdicts of the finished runs, for a terminal."""
    return tables.text(statistics.analyse(study, runs.load(folder, study)))


def markdown(
    title: str,
    folder: pathlib.Path,
    conditions: Sequence[statistics.Condition],
    numbers: dict[str, Any],
    drawn: Sequence[drawings.Drawn],
) -> str:
    """report.md: verdicts, tables, and links to the figures."""
    parts = [f"# {tables.plain(title)}", tables.plain(numbers["verdict"])]
    seen = tables.overview(conditions)
    parts += ["## All conditions", tables.markdown(seen)] if seen else []
    for found in conditions:
        parts += [f"## {tables.plain(found.name)}", tables.plain(verdict.condition(found))]
        parts += [tables.markdown(tables.condition(found))]
        for one in drawn:
            if one.condition == found.name:
                link = one.file.relative_to(folder).as_posix()
                parts.append(f"![{tables.plain(one.section)}]({link})\n\n{tables.plain(one.caption)}")
    lines = [tables.plain(f"{label}: {words}") for label, words in provenance.rows(numbers)]
    parts += ["## What was run", "\n".join(f"* {line}" for line in lines)]
    return "\n\n".join([*parts, "The config is in config.json, all numbers are in report.json."]) + "\n"

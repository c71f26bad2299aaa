"""The report of a study, from its folder alone: report.json, report.md, report.html and figures.

The page and the Markdown are templates beside this file. What is put into them is escaped, whoever has written it.
"""

import base64
import json
import pathlib
import re
import textwrap
from typing import Any

import jinja2
import markupsafe

from experiments.engine import disk, log
from experiments.studies import figures, record, runs, statistics, tables, words
from experiments.studies import study as studies

SECTIONS = {  # of the page: heading -> the figures in it
    "Training": ["course"],
    "Paired differences": ["differences"],
    "Symmetry": ["symmetry"],
    "Attention": ["attention", "maps"],
}


def write(folder: pathlib.Path, study: studies.Study, *, what: dict[str, Any]) -> list[pathlib.Path]:
    """Write the report of the runs that are finished, and return its files.

    what: of the session that writes it, {"config": the study's, resolved, "versions", "device": a line, "commit"}.
    UserError where a run's files are damaged, or have not measured what the study compares.
    """
    finished = runs.load(folder, study)
    conditions = statistics.analyse(study, finished)
    numbers = record.record(study, conditions, finished, what)
    pictures = figures.draw(folder, study, conditions, finished)
    content = {
        "title": f'{study.experiment}: {len(study.arms)} arms, "{study.reference}" is the reference',
        "record": numbers,
        "conditions": conditions,
        "figures": pictures,
        "sections": SECTIONS,
        "ran": tables.Table(["", ""], record.rows(numbers)),
        "words": words,
        "tables": tables,
    }
    disk.write_json(folder / "report.json", numbers)
    files = [folder / "report.md", folder / "report.html"]
    for file, clean in zip(files, (plain, legal), strict=True):
        disk.write(file, _templates(clean).get_template(f"{file.name}.j2").render(content).encode())
    return [folder / "report.json", *files, *(one.file for one in pictures)]


def _templates(clean: Any) -> jinja2.Environment:
    """clean: what is done to every value that is put in, before HTML's own letters in it are escaped."""
    loader = jinja2.FileSystemLoader(pathlib.Path(__file__).parent)
    environment = jinja2.Environment(
        loader=loader,
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: value if isinstance(value, markupsafe.Markup) else clean(str(value)),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["base64"] = lambda file: base64.b64encode(file.read_bytes()).decode()
    environment.filters["json"] = lambda value: json.dumps(value, indent=2, ensure_ascii=False)
    return environment


def legal(text: str) -> str:
    """Text without control characters, which HTML does not allow; 95 % stays in one line."""
    return text.translate(log.CONTROL).replace("95 %", "95\N{NO-BREAK SPACE}%")


def plain(text: str) -> markupsafe.Markup:
    """Text in one line that Markdown shows as it is: no name becomes a column, a link, a heading or a tag."""
    escaped = re.sub(r"([\\`*\[\]|#~$!])", r"\\\1", " ".join(text.split()))
    escaped = escaped.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return markupsafe.Markup(escaped.translate(log.CONTROL))


def text(folder: pathlib.Path, study: studies.Study) -> str:
    """The tables and verdicts of the finished runs, for a terminal."""
    conditions = statistics.analyse(study, runs.load(folder, study))
    parts = [(one.name, tables.of_condition(one), words.of_condition(one)) for one in conditions]
    overview = tables.overview(conditions)
    parts += [("all conditions", overview, overview.notes[0])] if overview else []
    blocks = [f"{name}\n{tables.aligned(table)}\n\n{_wrapped(below, '  ')}" for name, table, below in parts]
    return "\n\n".join([*blocks, _wrapped(words.of_study(conditions), "")]).translate(log.CONTROL)


def _wrapped(text: str, indent: str) -> str:
    lines = textwrap.fill(
        text.replace("95 %", "95\N{NO-BREAK SPACE}%"),
        width=110,
        initial_indent=indent,
        subsequent_indent=indent,
        break_on_hyphens=False,
    )
    return lines.replace("\N{NO-BREAK SPACE}", " ")

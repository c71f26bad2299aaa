"""The report of a study, from its folder alone: report.json, report.md, report.html and figures.

The page and the Markdown are templates beside this file. What is put into them is escaped, whoever has written it.
"""

import base64
import dataclasses
import functools
import json
import math
import pathlib
import re
import textwrap
from collections import Counter
from typing import Any

import jinja2
import markupsafe

from experiments.engine import disk, log
from experiments.studies import figures, inference, plan, runs, statistics, tables, words
from experiments.studies import study as studies

SECTIONS = {"Training": ["course"], "Paired differences": ["differences"]}  # of the page: heading -> the figures in it
SECTIONS |= {"Symmetry": ["symmetry"], "Attention": ["attention", "maps"]}


def write(folder: pathlib.Path, study: studies.Study, *, what: dict[str, Any]) -> list[pathlib.Path]:
    """Write the report of the runs that are finished, and return its files.

    what: of the session that writes it, {"config": the study's, resolved, "versions", "device": a line, "commit"}.
    UserError where a run's files are damaged, or have not measured what the study compares.
    """
    finished, conditions, past = analysed(folder, study)
    if seeds := statistics.judged(conditions):
        plan.look(folder, study, seeds)
        past = plan.read(folder)
    numbers = record(study, conditions, finished, what, past)
    pictures = figures.draw(folder, study, conditions, finished)
    title = f'{study.experiment}: {len(study.arms)} arms, "{study.reference}" is the reference'
    content = {"title": title, "record": numbers, "conditions": conditions, "figures": pictures}
    content |= {"sections": SECTIONS, "words": words, "tables": tables}
    disk.write_json(folder / "report.json", numbers)
    files = [folder / "report.md", folder / "report.html"]
    for file, clean in zip(files, (plain, legal), strict=True):
        disk.write(file, _templates(clean).get_template(f"{file.name}.j2").render(content).encode())
    return [folder / "report.json", *files, *(one.file for one in pictures)]


Analysed = tuple[list[runs.Run], list[statistics.Condition], plan.Past]


def analysed(folder: pathlib.Path, study: studies.Study) -> Analysed:
    """The finished runs, their numbers, and what was ever planned in the folder."""
    finished, past = runs.load(folder, study), plan.read(folder)
    return finished, statistics.analyse(study, finished, past), past


def record(
    study: studies.Study,
    conditions: list[statistics.Condition],
    finished: list[runs.Run],
    what: dict,
    past: plan.Past = plan.NOTHING,
) -> dict:
    """report.json, the whole study in numbers; what cannot be said (an interval of two seeds) is null:

    {
      "experiment", "reference", "seeds",
      "verdict": one paragraph on the study,
      "looks": how many different sets of seeds verdicts were read over,
      "finished_runs", "planned_runs",
      "missing":  [{"condition", "arm", "seed"}],
      "diverged": [{"condition", "arm", "seed", "step": null where the end was reached with a number not finite}],
      "conditions": [the fields of statistics.Condition, and "verdict": one paragraph,
        "arms": [the fields of statistics.Arm,
          "difference": null for the reference, else the fields of statistics.Difference, and "words" on it]],
      "ran": what the runs tell of how they came about: {"commits": {commit: runs}, "devices": {line: runs},
        "versions": {name: {version: runs}}, "training_seconds": sum over runs, "timed_runs",
        "data": {condition: [line]}},
      "what": of the session that wrote the report, which may be another one
    }
    """
    fields, missing, diverged = [], [], []
    for condition in conditions:
        fields.append(dataclasses.asdict(condition) | {"verdict": words.of_condition(condition)})
        del fields[-1]["reference"]  # of the whole study, as are what is missing and what diverged
        for arm, its in zip(condition.arms, fields[-1]["arms"], strict=True):
            place = {"condition": condition.name, "arm": arm.name}
            missing += [place | {"seed": seed} for seed in its.pop("missing")]
            diverged += [place | {"seed": seed, "step": step} for seed, step in its.pop("diverged").items()]
            if arm.difference:
                its["difference"]["words"] = words.of_arm(condition, arm.difference)
    summaries = [run.summary for run in finished]
    seconds = [one["wall_seconds"] for one in summaries if one.get("wall_seconds") is not None]
    names = dict.fromkeys(name for one in summaries for name in one.get("versions", {}))
    data: dict[str, dict[str, None]] = {}
    for run in finished:
        if lines := run.summary.get("data"):
            data.setdefault(run.condition, {}).update(dict.fromkeys(lines))
    ran = {
        "commits": Counter(one.get("commit") or "not from a checkout" for one in summaries),
        "devices": Counter(one.get("device", tables.UNKNOWN) for one in summaries),
        "versions": {n: Counter(one.get("versions", {}).get(n, tables.UNKNOWN) for one in summaries) for n in names},
        "training_seconds": sum(seconds) if seconds else None,
        "timed_runs": len(seconds),
        "data": {condition: list(lines) for condition, lines in data.items()},
    }
    whole = {
        "experiment": study.experiment,
        "reference": study.reference,
        "seeds": study.seeds,
        "verdict": _verdict(study, conditions, past),
        "looks": len(past.looks),
        "finished_runs": len(finished),
        "planned_runs": len(finished) + len(missing),
        "missing": missing,
        "diverged": diverged,
        "conditions": fields,
        "ran": ran,
        "what": {**what, "versions": {**(what.get("versions") or {}), **inference.LIBRARY}},
    }
    return finite(whole)


def _verdict(study: studies.Study, conditions: list[statistics.Condition], past: plan.Past) -> str:
    return " ".join([words.of_study(conditions), *words.of_past(study, past)])


def finite(value: Any) -> Any:
    """The value with keys as words, lists for tuples, and null for numbers that JSON has not."""
    if isinstance(value, dict):
        return {str(key): finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@functools.cache  # a template is compiled once
def _templates(clean: Any) -> jinja2.Environment:
    """clean: what is done to every value that is put in, before HTML's own letters in it are escaped."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(pathlib.Path(__file__).parent),
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
    _, conditions, past = analysed(folder, study)
    parts = [(one.name, tables.of_condition(one), words.of_condition(one)) for one in conditions]
    overview = tables.overview(conditions)
    parts += [("all conditions", overview, overview.notes[0])] if overview else []
    blocks = [f"{name}\n{tables.aligned(table)}\n\n{_wrapped(below, '  ')}" for name, table, below in parts]
    return "\n\n".join([*blocks, _wrapped(_verdict(study, conditions, past), "")]).translate(log.CONTROL)


def _wrapped(text: str, indent: str) -> str:
    options = {"initial_indent": indent, "subsequent_indent": indent, "break_on_hyphens": False}
    lines = textwrap.fill(text.replace("95 %", "95\N{NO-BREAK SPACE}%"), width=110, **options)
    return lines.replace("\N{NO-BREAK SPACE}", " ")

"""The report of a study, from its folder alone: report.json, report.md, report.html, report.tex, runs.csv and figures.

The page, the Markdown and the LaTeX are templates beside this file. What is put into them is escaped, whoever has
written it.
"""

import base64
import csv
import dataclasses
import functools
import io
import json
import pathlib
import re
import textwrap
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

import jinja2
import markupsafe
import ml_collections

from experiments.engine import config, disk, errors, log, mesh, workdir
from experiments.studies import (
    figures,
    file_types,
    inference,
    overall,
    plan,
    runs,
    scaling,
    statistics,
    study as studies,
    tables,
    tuning,
    words,
)

# Of the page: heading -> the figures in it.
SECTIONS = {"Training": ["course", "cost"], "Paired differences": ["differences"]}
SECTIONS |= {"Symmetry": ["symmetry"], "Attention": ["attention", "maps"], "Tuning": [tuning.FOLDER]}
LATEX = {c: f"\\{c}" for c in "&%$#_{}"} | {"±": r"$\pm$"}
_NAMED = {"\\": "backslash", "^": "asciicircum", "~": "asciitilde", "<": "less", ">": "greater", "|": "bar"}
LATEX |= {c: rf"\text{name}{{}}" for c, name in _NAMED.items()}


def saved(folder: pathlib.Path) -> config.Settings:
    """The config of a study's folder, of which no code is run. UserError where it is none."""
    values = disk.read_json(folder / "config.json", says="what was compared").get("config")
    if not isinstance(values, dict) or not isinstance(values.get("study"), dict):
        raise errors.UserError(f"{folder} holds no study: its config.json has no config with a section study")
    file_types.check_study(folder / "config.json", values["study"])
    made = ml_collections.ConfigDict(values)
    return config.Settings(made, made)


def again(folder: pathlib.Path, device: str | None = None, **changes: str) -> list[pathlib.Path]:
    """`write` for the study whose folder this is. device: on which this session computes, if it does; changes: of the
    Study."""
    settings = saved(folder)
    what = {"config": settings.to_dict(), "versions": mesh.versions(), "device": device, "commit": workdir.commit()}
    return write(folder, studies.read(settings)._replace(**changes), what=what)


def write(folder: pathlib.Path, study: studies.Study, *, what: dict[str, Any]) -> list[pathlib.Path]:
    """Write the report of the runs that are finished, and return its files, of each figure the PNG.

    what: of the session that writes it, {"config": the study's, resolved, "versions", "device": a line, "commit"}.
    UserError where a run's files are damaged, or have not measured what the study compares.
    """
    finished, conditions, past = analysed(folder, study)
    if seeds := statistics.judged(conditions):
        plan.look(folder, study, seeds)
        past = plan.read(folder)
    tuned, spread = tuning.read(folder, study), across(conditions, finished)
    numbers = record(study, conditions, finished, what, past, spread)
    numbers |= disk.finite({"tuned": [one.record() for one in tuned]})
    pictures = figures.draw(folder, study, conditions, finished, [(one.kind, one.numbers) for one in spread])
    pictures += tuning.draw(folder, study, tuned)
    title = f'{study.experiment}: {len(study.arms)} arms, "{study.reference}" is the reference'
    begun, waiting = parted(conditions)
    content = {"title": title, "record": numbers, "conditions": begun, "waiting": waiting, "figures": pictures}
    content |= {"sections": SECTIONS, "words": words, "tables": tables, "across": spread}
    content["tuned"] = tuning.table(tuned)
    disk.write_json(folder / "report.json", numbers)
    disk.write(folder / "runs.csv", rows(finished).encode())
    files = [folder / "report.md", folder / "report.html", folder / "report.tex"]
    for file, clean in zip(files, (plain, legal, latex), strict=True):
        disk.write(file, _templates(clean).get_template(f"{file.name}.j2").render(content).encode())
    return [folder / "report.json", *files, folder / "runs.csv", *(one.file for one in pictures)]


class Across(NamedTuple):
    """What the report tells of several conditions together."""

    heading: str
    kind: str  # of its figure
    numbers: overall.Overall | scaling.Family
    table: tables.Table


def across(conditions: list[statistics.Condition], finished: list[runs.Run]) -> list[Across]:
    """The measures over all conditions, and how the loss falls with compute; nothing where that cannot be said."""
    measures, found = overall.measure(conditions, finished), []
    if measures:
        found.append(Across("Over all conditions", "profile", measures, tables.of_overall(measures)))
    families = scaling.families(conditions)
    for i, one in enumerate(families):
        which = f": {words.listed(one.conditions)}" if len(families) > 1 else ""
        found.append(Across(f"Loss against compute{which}", f"compute{i or ''}", one, tables.of_laws(one)))
    return found


def parted(conditions: list[statistics.Condition]) -> tuple[list[statistics.Condition], list[str]]:
    """The conditions of which a run is finished, and a line on each of the others."""
    left = {one.name: sum(len(arm.missing) for arm in one.arms) for one in conditions}
    begun = [one for one in conditions if any(arm.values or arm.diverged for arm in one.arms)]
    waiting = [one.name for one in conditions if one not in begun]
    return begun, [f"{name}: none of its {left[name]} runs is finished yet." for name in waiting]


def rows(finished: list[runs.Run]) -> str:
    """runs.csv: of each run what it is, what was measured at the end, and its costs."""
    metrics = dict.fromkeys(name for run in finished for name in run.summary if name.startswith("eval/"))
    names = ["condition", "arm", "seed", *metrics, "params", "flops_per_token", "seconds", "diverged_at"]
    table = io.StringIO()
    writer = csv.DictWriter(table, names, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(run.summary | run._asdict() | {"seconds": run.summary.get("wall_seconds")} for run in finished)
    return table.getvalue()


def analysed(
    folder: pathlib.Path, study: studies.Study
) -> tuple[list[runs.Run], list[statistics.Condition], plan.Past]:
    """The finished runs, their numbers, and what was ever planned in the folder."""
    finished, past = runs.load(folder, study), plan.read(folder)
    return finished, statistics.analyse(study, finished, past), past


def record(
    study: studies.Study,
    conditions: list[statistics.Condition],
    finished: list[runs.Run],
    what: dict,
    past: plan.Past = plan.NOTHING,
    spread: Iterable[Across] = (),
) -> dict:
    """report.json, the whole study in numbers; what cannot be said (an interval of two seeds) is null.

    "conditions" have the fields of statistics.Condition, their arms those of statistics.Arm, and so on, with "verdict"
    or "words" on them. "overall" is null or has those of overall.Overall, "scaling" those of each scaling.Family.
    "looks": over how many sets of seeds verdicts were read. "ran": what the runs tell of how they came about, with the
    number of runs that tell it. "what": of the session that wrote the report, which may be another one.
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
    data: dict[str, list[str]] = {}
    for run in finished:
        for line in run.summary.get("data", []):
            if line not in data.setdefault(run.condition, []):
                data[run.condition].append(line)
    ran = {
        "commits": Counter(one.get("commit") or "not from a checkout" for one in summaries),
        "devices": Counter(one.get("device", tables.UNKNOWN) for one in summaries),
        "versions": {n: Counter(one.get("versions", {}).get(n, tables.UNKNOWN) for one in summaries) for n in names},
        "training_seconds": sum(seconds) if seconds else None,
        "timed_runs": len(seconds),
        "data": data,
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
        "overall": next((dataclasses.asdict(one.numbers) for one in spread if one.kind == "profile"), None),
        "scaling": [dataclasses.asdict(one.numbers) for one in spread if one.kind != "profile"],
        "ran": ran,
        "curves": [
            {"condition": run.condition, "arm": run.arm, "seed": run.seed, "curves": run.curves} for run in finished
        ],
        "what": {**what, "versions": {**(what.get("versions") or {}), **inference.LIBRARY}},
    }
    return disk.finite(whole)


def _verdict(study: studies.Study, conditions: list[statistics.Condition], past: plan.Past) -> str:
    return " ".join([words.of_study(conditions), *words.of_past(study, past)])


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


def latex(text: str) -> markupsafe.Markup:
    """Text in one line that LaTeX sets as it is."""
    escaped = " ".join(text.split()).translate(log.CONTROL | str.maketrans(LATEX))
    return markupsafe.Markup(re.sub(r"(?<![\w.])-(?=\d)", "$-$", escaped))


def text(folder: pathlib.Path, study: studies.Study) -> str:
    """The tables and verdicts of the finished runs, for a terminal."""
    _, conditions, past = analysed(folder, study)
    begun, waiting = parted(conditions)
    parts = [(one.name, tables.of_condition(one), words.of_condition(one)) for one in begun]
    overview = tables.overview(begun)
    parts += [("all conditions", overview, overview.notes[0])] if overview else []
    filled = functools.partial(textwrap.fill, width=110, break_on_hyphens=False)
    indented = functools.partial(filled, initial_indent="  ", subsequent_indent="  ")
    blocks = [f"{name}\n{tables.aligned(table)}\n\n{indented(below)}" for name, table, below in parts]
    return "\n\n".join([*blocks, *waiting, filled(_verdict(study, conditions, past))]).translate(log.CONTROL)

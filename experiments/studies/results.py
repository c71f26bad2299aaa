"""Write the report of a study from its folder: report.json, report.md, report.html, runs.csv, figures.

The templates *.j2 are next to this module. They escape every value, because settings and names may hold any text.
"""

import base64
import csv
import dataclasses
import functools
import io
import itertools
import json
import pathlib
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jinja2
import markupsafe
import ml_collections

from experiments.config import disk, errors, settings as configs
from experiments.devices import mesh as meshes
from experiments.folder import log, records, workdir as workdirs
from experiments.studies import (
    figures as study_figures,
    inference,
    plan,
    runs as study_runs,
    scaling,
    sentences,
    statistics,
    study as studies,
    tables,
    tuning,
)

# Sections of report.html -> the kinds of figures in them.
SECTIONS = {"Training": ["course", "cost"], "Differences": ["differences"], "Symmetry": ["symmetry"]}
SECTIONS |= {"Tuning": [tuning.FOLDER]}

MAY_DIFFER = re.compile(r"mesh\..*|log|study\.(arms|conditions|seeds)")  # settings, between the parts of a study


class Laws(NamedTuple):
    """A section of the report about the scaling laws of a family."""

    heading: str
    kind: str  # Figure.kind of its figure
    family: scaling.Family


class Block(NamedTuple):
    """A part of report.md and report.html: a heading, then paragraphs, a table, and figures."""

    heading: str
    level: int = 2  # of the heading: 2 or 3
    texts: Sequence[str] = ()
    table: tables.Table | None = None
    figures: Sequence[study_figures.Figure] = ()


class Analysis(NamedTuple):
    """The finished runs of a study and the numbers computed from them."""

    runs: list[study_runs.Run]
    conditions: list[statistics.Condition]
    past: plan.Past
    laws: list[Laws]


def load_settings(folder: pathlib.Path) -> configs.Settings:
    """Load a study's config from config.json; no code of the config runs. Raises UserError if it is missing."""
    missing = f"{folder} has no config.json with a section study: choose the --workdir of a study"
    errors.refuse(("study.arms" not in records.read_settings(folder), missing))
    with disk.reading(folder / records.CONFIG, TypeError, AttributeError):
        values = ml_collections.ConfigDict(records.read_config(folder)["config"])
        studies.read(settings := configs.Settings(values, values))  # raises UserError if a section is missing
    return settings


def combine(folders: Sequence[pathlib.Path]) -> configs.Settings:
    """Return the settings of the study whose parts are in these folders: with all arms, conditions and seeds.

    Raises UserError if a fact of `list_facts` is not the same in two folders.
    """
    settings = [load_settings(folder) for folder in folders]
    if len(settings) == 1:
        return settings[0]
    parts, values = [studies.read(part) for part in settings], {}
    for place, fact, value in itertools.chain(*map(list_facts, folders, settings, parts)):
        first, first_value = values.setdefault(fact, (place, value))
        if first_value != value:
            raise errors.UserError(f"{first} and {place} differ in {fact}. Name only parts of one study.")
    arms = {arm.name: [*arm] for part in parts for arm in part.arms[:-1]}
    conditions = {condition.name: [*condition] for part in parts for condition in part.conditions}
    changes = {"study.arms": [*arms.values(), [*parts[0].arms[-1]]], "study.conditions": [*conditions.values()]}
    changes["study.seeds"] = [*dict.fromkeys(seed for part in parts for seed in part.seeds)]
    return settings[0].replace(changes)


def list_facts(folder: pathlib.Path, settings: configs.Settings, study: studies.Study) -> list[tuple]:
    """Return (folder, fact, value) for the settings, the code and the data of a part, and the result of each run."""
    items = [*configs.flat(settings.to_dict()).items(), ("the reference", study.reference)]
    for kind, entries in (("arms", study.arms), ("conditions", study.conditions)):
        items += [(f'"{entry.name}" of study.{kind}', entry) for entry in entries]
    facts = [(folder, fact, value) for fact, value in items if not MAY_DIFFER.fullmatch(fact)]
    for run in study_runs.load(folder, study) + study_runs.load(folder / tuning.FOLDER, tuning.trials(study)):
        arm, seed, summary = f"{run.condition}/{run.arm}", f"seed_{run.seed}", run.summary
        code = [*summary.get("sources", {}).items()][1:]  # without the config, which has the arms
        items = [(f"the code: {name}", x) for name, x in (("commit", summary.get("commit") or ""), *code)]
        result = {key: x for key, x in summary.items() if key.startswith(("eval/", "diverged_at", "params_sha256"))}
        items += [(f"the data of {arm}", summary.get("data_sha256")), (f"the result of {arm}/{seed}", result)]
        facts += [(run.folder / arm / seed, fact, value) for fact, value in items]
    return facts


def analyse(folder: pathlib.Path, study: studies.Study) -> Analysis:
    """Analyse the finished runs of a folder. Raises UserError if a run is unreadable or lacks the metric."""
    finished, past = study_runs.load(folder, study), plan.read(folder, study.also)
    conditions = statistics.analyse(study, finished, past)
    return Analysis(finished, conditions, past, analyse_laws(conditions))


def analyse_laws(conditions: list[statistics.Condition]) -> list[Laws]:
    """Return a section for each family of conditions."""
    sections, families = [], scaling.families(conditions)
    for i, family in enumerate(families):
        names = f": {sentences.join_values(family.conditions)}" if len(families) > 1 else ""
        sections.append(Laws(f"Loss against compute{names}", f"compute{i or ''}", family))
    return sections


def write_report(
    folder: pathlib.Path, device: str | None = None, study: studies.Study | None = None
) -> list[pathlib.Path]:
    """Write the report of the study in this folder.

    device: describes the devices of this process; None if it does not train. study: the study in the folder, which may
    have another correction, and other folders (also); None: as configured.
    """
    settings = combine([folder, *(study.also if study else ())])
    session = {"config": settings.to_dict(), "versions": meshes.versions()}
    session |= {"device": device, "commit": workdirs.read_commit()[0]}
    return write(folder, study or studies.read(settings), session=session)


def write(folder: pathlib.Path, study: studies.Study, *, session: dict[str, Any]) -> list[pathlib.Path]:
    """Write the report of the finished runs of a folder, and return its files. session: see `write_files`."""
    analysis = analyse(folder, study)
    if seeds := statistics.judged_seeds(analysis.conditions):
        plan.look(folder, study, seeds)
        analysis = analysis._replace(past=plan.read(folder, study.also))
    return write_files(folder, study, analysis, session=session)


def write_files(
    folder: pathlib.Path, study: studies.Study, analysis: Analysis, *, session: dict[str, Any]
) -> list[pathlib.Path]:
    """Write the report of an analysis into the folder, and return its files; of each figure only the PNG.

    session: the process that writes the report, {"config": the study's settings, "versions", "device", "commit"}. If
    the numbers come from another program, "source" is a phrase about their file, and there is no config.
    """
    tuned = tuning.read(folder, study)
    numbers = record(study, analysis, session) | disk.finite({"tuned": [choice.record() for choice in tuned]})
    laws = {section.kind: section.family for section in analysis.laws}
    pictures = study_figures.draw(folder, study, analysis.conditions, analysis.runs, laws)
    pictures += tuning.draw(folder, study, tuned)
    title = f'{study.experiment}: {len(study.arms)} arms, "{study.reference}" is the reference'
    blocks = list_blocks(analysis, numbers, pictures, tuning.table(tuned))
    content = {"title": title, "record": numbers, "blocks": blocks}
    disk.write_json(folder / "report.json", numbers)
    disk.write(folder / "runs.csv", format_runs(analysis.runs, study.metric.values()).encode())
    files = [folder / "report.md", folder / "report.html"]
    for file, escape in zip(files, (escape_markdown, clean_html), strict=True):
        disk.write(file, _templates(escape).get_template(f"{file.name}.j2").render(content).encode())
    return [folder / "report.json", *files, folder / "runs.csv", *(picture.file for picture in pictures)]


def list_blocks(
    analysis: Analysis, record: dict[str, Any], pictures: list[study_figures.Figure], tuned: tables.Table | None
) -> list[Block]:
    """Return the blocks of the report in their order. record: report.json. tuned: the table of the choices."""
    started, waiting = split_by_progress(analysis.conditions)
    blocks = [Block("Verdict", texts=[record["verdict"]])]
    if overview := tables.tabulate_overview(started):
        blocks.append(Block("All conditions", table=overview))
    blocks += [Block(entry.name, 3, [sentences.describe_condition(entry)]) for entry in started]
    blocks.append(Block("Arms", texts=waiting))
    blocks += [Block(f"{x.name}: {x.metric}", 3, table=tables.tabulate_condition(x)) for x in started]
    for section in analysis.laws:
        drawn = [picture for picture in pictures if picture.kind == section.kind]
        blocks.append(Block(section.heading, table=tables.tabulate_laws(section.family), figures=drawn))
    for heading, kinds in SECTIONS.items():
        table, drawn = tuned if heading == "Tuning" else None, [x for x in pictures if x.kind in kinds]
        if drawn or table:
            blocks.append(Block(heading, table=table, figures=() if len(started) > 1 else drawn))
        if len(started) > 1:
            groups = itertools.groupby(drawn, lambda picture: picture.condition)
            blocks += [Block(name, 3, figures=[*group]) for name, group in groups]
    return [*blocks, Block("What was run", table=tables.tabulate_runs(record))]


def split_by_progress(conditions: list[statistics.Condition]) -> tuple[list[statistics.Condition], list[str]]:
    """Return the conditions with a finished run, and a sentence about each other condition."""
    missing = {condition.name: sum(len(arm.missing) for arm in condition.arms) for condition in conditions}
    started = [condition for condition in conditions if any(arm.values or arm.diverged for arm in condition.arms)]
    waiting = [condition.name for condition in conditions if condition not in started]
    return started, [f"{name}: none of its {missing[name]} runs is finished yet." for name in waiting]


def format_runs(finished: list[study_runs.Run], compared: Iterable[str]) -> str:
    """Return the text of runs.csv: a row for each run with its final metrics and costs. compared: study.metric."""
    metrics = dict.fromkeys(name for run in finished for name in run.summary if name.startswith("eval/"))
    metrics |= dict.fromkeys(compared)
    names = ["condition", "arm", "seed", *metrics, "params", "flops_per_token", "seconds", "diverged_at"]
    table = io.StringIO()
    writer = csv.DictWriter(table, names, lineterminator="\n")
    writer.writeheader()
    for run in finished:
        seed = run.seed if run.seed >= 0 else None  # the run has none
        row = run.summary | run._asdict() | {"seed": seed, "seconds": run.summary.get("wall_seconds")}
        writer.writerow({name: disk.escape_cell(row.get(name)) for name in names})
    return table.getvalue()


def record(study: studies.Study, analysis: Analysis, session: dict) -> dict:
    """Return the content of report.json. Numbers that do not exist, such as the interval of two seeds, are null.

    "conditions" have the fields of statistics.Condition and a "verdict"; their arms have those of statistics.Arm, and
    differences also have "words". Each entry of "scaling" has the fields of scaling.Family. "looks": the number of sets
    of seeds with a verdict. "what": the argument `session`.
    """
    missing, diverged = [], []
    for condition in analysis.conditions:
        for arm in condition.arms:
            place = {"condition": condition.name, "arm": arm.name}
            missing += [place | {"seed": seed} for seed in arm.missing]
            diverged += [place | {"seed": seed, "step": step} for seed, step in arm.diverged.items()]
    places = ({"condition": run.condition, "arm": run.arm, "seed": run.seed} for run in analysis.runs)
    curves = [place | {"curves": run.curves} for place, run in zip(places, analysis.runs, strict=True)]
    report = {
        "experiment": study.experiment,
        "reference": study.reference,
        "seeds": study.seeds,
        "verdict": _verdict(study, analysis),
        "looks": len(analysis.past.looks),
        "finished_runs": len(analysis.runs),
        "planned_runs": len(analysis.runs) + len(missing),
        "missing": missing,
        "diverged": diverged,
        "conditions": [_record_condition(condition) for condition in analysis.conditions],
        "scaling": [dataclasses.asdict(section.family) for section in analysis.laws],
        "ran": _record_runs(analysis.runs),
        "curves": curves,
        "what": {**session, "versions": {**(session.get("versions") or {}), **inference.LIBRARY}},
    }
    return disk.finite(report)


def _record_condition(condition: statistics.Condition) -> dict[str, Any]:
    fields = dataclasses.asdict(condition) | {"verdict": sentences.describe_condition(condition)}
    del fields["reference"]  # report.json has it once for the whole study, like missing and diverged runs
    for arm, arm_fields in zip(condition.arms, fields["arms"], strict=True):
        del arm_fields["missing"], arm_fields["diverged"]
        if arm.difference:
            arm_fields["difference"]["words"] = sentences.describe_arm(condition, arm.difference)
    return fields


def _record_runs(finished: Sequence[study_runs.Run]) -> dict[str, Any]:
    """Return commits, devices, versions and folders (if several) with their numbers of runs, training time and data."""
    summaries = [run.summary for run in finished]
    seconds = [x for summary in summaries if (x := summary.get("wall_seconds")) is not None]
    versions = [summary.get("versions", {}) for summary in summaries]
    libraries = dict.fromkeys(name for by_name in versions for name in by_name)
    folders = Counter(str(run.folder) for run in finished)
    data: dict[str, dict[str, None]] = {}  # condition -> the lines about its data, without duplicates
    for run in finished:
        data.setdefault(run.condition, {}).update(dict.fromkeys(run.summary.get("data", [])))
    return {
        "commits": Counter(summary.get("commit") or "not from a checkout" for summary in summaries),
        "devices": Counter(summary.get("device", tables.UNKNOWN) for summary in summaries),
        "versions": {name: Counter(x.get(name, tables.UNKNOWN) for x in versions) for name in libraries},
        "folders": folders if len(folders) > 1 else {},
        "training_seconds": sum(seconds) if seconds else None,
        "timed_runs": len(seconds),
        "data": {condition: [*lines] for condition, lines in data.items() if lines},
    }


def _verdict(study: studies.Study, analysis: Analysis) -> str:
    return " ".join([sentences.describe_study(analysis.conditions), *sentences.describe_plan_log(study, analysis.past)])


@functools.cache  # a template is compiled once
def _templates(escape: Callable[[str], str]) -> jinja2.Environment:
    """Return the templates in this folder. escape: applied to every value; jinja escapes a plain str as HTML."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(pathlib.Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: value if isinstance(value, markupsafe.Markup) else escape(str(value)),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["base64"] = lambda file: base64.b64encode(disk.read_bytes(file)).decode()
    environment.filters["json"] = lambda value: json.dumps(value, indent=2, ensure_ascii=False)
    return environment


def clean_html(text: str) -> str:
    """Replace control characters, which HTML forbids, and the space in "95 %" by one that does not break."""
    return text.translate(log.CONTROL).replace("95 %", "95\N{NO-BREAK SPACE}%")


def escape_markdown(text: str) -> markupsafe.Markup:
    """Escape a text for one line of Markdown: nothing in it becomes a column, a link, a heading or a tag."""
    escaped = re.sub(r"([\\`*\[\]|#~$!])", r"\\\1", " ".join(text.split()))
    escaped = escaped.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return markupsafe.Markup(escaped.translate(log.CONTROL))


def format_text(folder: pathlib.Path, study: studies.Study) -> str:
    """Return the tables and verdicts of the finished runs of a folder as text for a terminal."""
    return format_analysis(study, analyse(folder, study))


def format_analysis(study: studies.Study, analysis: Analysis) -> str:
    """Return the tables and verdicts of an analysis as text for a terminal."""
    started, waiting = split_by_progress(analysis.conditions)
    parts = [(x.name, tables.tabulate_condition(x), sentences.describe_condition(x)) for x in started]
    if overview := tables.tabulate_overview(started):
        parts.append(("all conditions", overview, overview.notes[0]))
    fill = functools.partial(textwrap.fill, width=110, break_on_hyphens=False)
    indented = functools.partial(fill, initial_indent="  ", subsequent_indent="  ")
    blocks = [f"{name}\n{tables.align(table)}\n\n{indented(text)}" for name, table, text in parts]
    return "\n\n".join([*blocks, *waiting, fill(_verdict(study, analysis))]).translate(log.CONTROL)

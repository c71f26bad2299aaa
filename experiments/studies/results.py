"""Write the report of a study from its folder: report.json, report.md, report.html, runs.csv, figures.

The templates *.j2 are next to this module. They escape every value, because settings and names may hold any text.
"""

import base64
import dataclasses
import functools
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
import scipy

from experiments.config import disk, errors, settings as configs
from experiments.devices import mesh as meshes
from experiments.folder import log, records, workdir as workdirs
from experiments.studies import (
    figures as study_figures,
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


class Block(NamedTuple):
    """A part of report.md and report.html: a heading, then paragraphs, a table, and figures."""

    heading: str
    level: int = 2  # of the heading: 2 or 3
    texts: Sequence[str] = ()  # paragraphs
    table: tables.Table | None = None
    figures: Sequence[study_figures.Figure] = ()


class Analysis(NamedTuple):
    """The finished runs of a study, the comparisons in each condition, those planned earlier, and the scaling laws."""

    runs: list[study_runs.Run]
    conditions: list[statistics.Condition]
    past: plan.Past
    laws: list[scaling.Family]


def load_settings(folder: pathlib.Path) -> configs.Settings:
    """Load the config of a study, without running its code.

    Raises UserError if the folder has no config.json of a study, or if the config is damaged or not valid.
    """
    missing = f"{folder} has no config.json with a section study: choose the --workdir of a study"
    errors.refuse(("study.arms" not in records.read_settings(folder), missing))
    with disk.reading(folder / records.CONFIG, TypeError, AttributeError):
        values = ml_collections.ConfigDict(records.read_config(folder)["config"])
        studies.read(settings := configs.Settings(values, values))  # raises UserError if a section is missing
    return settings


def combine(folders: Sequence[pathlib.Path]) -> configs.Settings:
    """Return the settings of the study whose parts are in these folders: all arms, conditions and seeds.

    Raises UserError as `load_settings`, and if the parts differ in anything that `list_facts` lists.
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
    conditions = {condition.name: [*condition[:2]] for part in parts for condition in part.conditions}
    changes = {"study.arms": [*arms.values(), [*parts[0].arms[-1]]], "study.conditions": [*conditions.values()]}
    changes["study.seeds"] = [*dict.fromkeys(seed for part in parts for seed in part.seeds)]
    return settings[0].replace(changes)


def list_facts(folder: pathlib.Path, settings: configs.Settings, study: studies.Study) -> list[tuple]:
    """Return (folder, fact, value) for all that must be equal where two folders with parts of a study have it.

    These are settings, arms, conditions, and the code, data and result of each run. fact: its name in a message.
    """
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
    conditions = statistics.analyse(study, finished, past, tuning.pool_variances(tuning.read(folder, study)))
    return Analysis(finished, conditions, past, scaling.families(conditions))


def write_report(folder: pathlib.Path, device: str | None = None, **changes: Any) -> list[pathlib.Path]:
    """Write the report of the study in this folder, and return its files.

    device: describes the devices of this process; None if it does not train. changes: fields of studies.Study to
    replace, such as the other folders (also) or the correction.
    """
    settings = combine([folder, *changes.get("also", ())])
    study, session = studies.read(settings)._replace(**changes), {"config": settings.to_dict(), "device": device}
    with workdirs.lock(folder, wait=workdirs.PATIENCE):
        return write(folder, study, session=session)


def write(folder: pathlib.Path, study: studies.Study, *, session: dict[str, Any]) -> list[pathlib.Path]:
    """Log the verdict's seeds in plan.jsonl, write the report of the finished runs of a folder, and return its files.

    session: {"config": the study's settings, "device": of this process}.
    """
    analysis = analyse(folder, study)
    arms = [arm for condition in analysis.conditions for arm in condition.compared]
    judged = [arm for arm in arms if arm.difference.kind != statistics.FEW]
    if seeds := {seed for arm in judged for seed in (*arm.difference.by_seed, *arm.diverged)}:
        plan.look(folder, study, seeds)
        analysis = analysis._replace(past=plan.read(folder, study.also))
    return write_files(folder, study, analysis, session=session)


def write_files(folder: pathlib.Path, study: studies.Study, analysis: Analysis, *, session: dict) -> list[pathlib.Path]:
    """Write the report of an analysis into the folder, and return its files. Of a figure's files, return only the PNG.

    session: {"config": the study's settings, "device": of this process}, or {"source": a phrase about the file in which
    another program has written the numbers}. This process adds its commit and versions.
    """
    tuned = tuning.read(folder, study)
    session = {"versions": meshes.versions(), "commit": workdirs.read_commit()[0]} | session
    numbers = record(study, analysis, session) | disk.finite({"tuned": [choice.record() for choice in tuned]})
    pictures = study_figures.draw(folder, study, analysis.conditions, analysis.runs, analysis.laws)
    pictures += tuning.draw(folder, study, tuned)
    several = f'{len(study.arms)} arms, "{study.reference}" is the reference'
    title = f"{study.experiment}: {several if len(study.arms) > 1 else 'one arm'}"
    blocks = list_blocks(analysis, numbers, pictures, tuning.table(tuned))
    content = {"title": title, "record": numbers, "blocks": blocks}
    names = ("report.json", "report.md", "report.html", "runs.csv")
    files = numbers_file, *pages, runs_file = [folder / name for name in names]
    disk.write_json(numbers_file, numbers)
    for file, escape in zip(pages, (escape_markdown, clean_html), strict=True):
        disk.write(file, _templates(escape).get_template(f"{file.name}.j2").render(content).encode())
    compared = [condition.metric for condition in study.conditions]
    disk.write(runs_file, disk.as_csv(tabulate_every_run(analysis.runs, compared)))
    return [*files, *(picture.file for picture in pictures)]


def list_blocks(
    analysis: Analysis, record: dict[str, Any], pictures: list[study_figures.Figure], tuned: tables.Table | None
) -> list[Block]:
    """Return the blocks of the report, in order. record: the content of report.json. tuned: from `tuning.table`."""
    started, waiting = split_by_progress(analysis.conditions)
    blocks, several = [Block("Verdict", texts=[*filter(None, (record["verdict"], record["rates"]))])], len(started) > 1
    if overview := tables.tabulate_overview(started):
        blocks.append(Block("All conditions", table=overview))
    if len(analysis.conditions) > 1:  # else the verdict is that of the condition
        blocks += [Block(entry.name, 3, [sentences.describe_condition(entry)]) for entry in started]
    blocks.append(Block("Arms", texts=waiting))
    blocks += [Block(f"{x.name}: {x.metric}", 3, table=tables.tabulate_condition(x)) for x in started]
    for i, family in enumerate(analysis.laws):
        names = f": {sentences.join_values(family.conditions)}" if len(analysis.laws) > 1 else ""
        drawn = [picture for picture in pictures if picture.kind == f"{study_figures.LAWS}{i or ''}"]
        blocks.append(Block(f"Loss against compute{names}", table=tables.tabulate_laws(family), figures=drawn))
    for heading, kinds in SECTIONS.items():
        table, drawn = tuned if heading == "Tuning" else None, [x for x in pictures if x.kind in kinds]
        if drawn or table:
            blocks.append(Block(heading, table=table, figures=() if several else drawn))
        if several:
            groups = itertools.groupby(drawn, lambda picture: picture.condition)
            blocks += [Block(name, 3, figures=[*group]) for name, group in groups]
    reporting = " ".join(sentences.describe_reporting(analysis.conditions, record["rates"]))
    blocks.append(Block("How to report this", texts=[reporting]))
    return [*blocks, Block("What was run", table=tables.tabulate_runs(record))]


def split_by_progress(conditions: list[statistics.Condition]) -> tuple[list[statistics.Condition], list[str]]:
    """Return the conditions with a finished run, and a sentence about each other condition."""
    missing = {condition.name: sum(len(arm.missing) for arm in condition.arms) for condition in conditions}
    started = [condition for condition in conditions if any(arm.values or arm.diverged for arm in condition.arms)]
    waiting = [condition.name for condition in conditions if condition not in started]
    return started, [f"{name}: none of its {missing[name]} runs is finished yet." for name in waiting]


def tabulate_every_run(finished: list[study_runs.Run], compared: Iterable[str]) -> list[list[Any]]:
    """Return the rows of runs.csv: a header, then the final metrics and costs of each run.

    compared: the metric of each condition (study.metric), which has a column even if no run has measured it.
    """
    metrics = dict.fromkeys(name for run in finished for name in run.summary if name.startswith("eval/"))
    metrics |= dict.fromkeys(compared)
    rows = [["condition", "arm", "seed", *metrics, "params", "flops_per_token", "seconds", "diverged_at"]]
    for run in finished:
        seed = run.seed if run.seed >= 0 else None  # the run has none
        values = run.summary | run._asdict() | {"seed": seed, "seconds": run.summary.get("wall_seconds")}
        values |= {name: "nan" for name in metrics if values.get(name, 0) is None}  # not finite; empty: not measured
        rows.append([values.get(name) for name in rows[0]])
    return rows


def record(study: studies.Study, analysis: Analysis, session: dict) -> dict:
    """Return the content of report.json. Numbers that do not exist, such as the interval of two seeds, are null.

    "conditions", their "arms", and "scaling" have the fields of the dataclasses; "what" is `session` and the version
    of scipy.
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
        "rates": sentences.describe_rates(study, session["config"]) if "config" in session else "",
        "looks": len(analysis.past.looks),
        "finished_runs": len(analysis.runs),
        "planned_runs": len(analysis.runs) + len(missing),
        "missing": missing,
        "diverged": diverged,
        "conditions": [_record_condition(condition) for condition in analysis.conditions],
        "scaling": [dataclasses.asdict(family) for family in analysis.laws],
        "ran": _record_runs(analysis.runs),
        "curves": curves,
        "what": session | {"versions": session["versions"] | {"scipy": scipy.__version__}},
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
    """Return {"commits", "devices", "versions", "folders": value -> number of runs}, the training time and the data.

    Folders are listed if there are several.
    """
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
    conditions = analysis.conditions
    is_one = len(conditions) == 1
    verdict = sentences.describe_condition(conditions[0]) if is_one else sentences.describe_study(conditions)
    return " ".join([verdict, *sentences.describe_plan_log(study, analysis.past)])


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
    """Replace control characters, which HTML forbids, by U+FFFD, and the space in "95 %" by a no-break space."""
    return text.translate(log.CONTROL).replace("95 %", "95\N{NO-BREAK SPACE}%")


def escape_markdown(text: str) -> markupsafe.Markup:
    """Escape a text for one line of Markdown: nothing in it becomes a column, a link, a heading or a tag."""
    escaped = re.sub(r"([\\`*\[\]|#~$!])", r"\\\1", " ".join(text.split()))
    escaped = escaped.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return markupsafe.Markup(escaped.translate(log.CONTROL))


def format_text(study: studies.Study, analysis: Analysis) -> str:
    """Return the tables and verdicts of an analysis as text for a terminal."""
    started, waiting = split_by_progress(analysis.conditions)
    parts = [(x.name, tables.tabulate_condition(x), sentences.describe_condition(x)) for x in started]
    if len(analysis.conditions) == 1:  # then this sentence is the verdict
        parts = [(name, table, "") for name, table, _ in parts]
    if overview := tables.tabulate_overview(started):
        parts.append(("all conditions", overview, overview.notes[0]))
    fill = functools.partial(textwrap.fill, width=110, break_on_hyphens=False)
    indented = functools.partial(fill, initial_indent="  ", subsequent_indent="  ")
    blocks = [f"{name}\n{tables.align(table)}\n\n{indented(text)}".rstrip() for name, table, text in parts]
    return "\n\n".join([*blocks, *waiting, fill(_verdict(study, analysis))]).translate(log.CONTROL)

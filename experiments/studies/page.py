"""report.html: one file that needs nothing else. Built as a tree of elements, which escapes every word in it."""

import base64
import json
from collections.abc import Sequence
from typing import Any
from xml.etree import ElementTree

from experiments.engine import terminal
from experiments.studies import drawings, measures, provenance, statistics, tables, verdict

STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.55 system-ui, sans-serif; color: #1a1a1a; background: #fff; max-width: 76rem; margin: 0 auto;
  padding: 1.5rem 1rem 4rem; }
h1 { font-size: 1.7rem; margin: 0 0 .3rem; } h2 { font-size: 1.3rem; margin: 2.6rem 0 .6rem; }
h3 { font-size: 1.05rem; margin: 1.6rem 0 .4rem; }
p { max-width: 50rem; overflow-wrap: anywhere; } .small { color: #555; font-size: .88rem; }
.verdict { border-left: .3rem solid #0072b2; background: #f3f7fa; padding: .2rem 1rem; max-width: 50rem; }
.wide { overflow-x: auto; }
nav { display: flex; flex-wrap: wrap; position: sticky; top: 0; padding: .5rem 0; background: #fff;
  font-size: .88rem; border-bottom: 1px solid #ddd; }
nav a { margin-right: 1.1rem; white-space: nowrap; } h2, h3 { scroll-margin-top: 3rem; }
table { border-collapse: collapse; font-size: .8rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .4rem; text-align: right; white-space: nowrap; border-bottom: 1px solid #ddd; }
th { vertical-align: bottom; border-bottom: 2px solid #888; white-space: normal; }
td.worse { background: #fde6d8; } td.better { background: #d8ecf8; }
th:first-child, td:first-child { text-align: left; } td:first-child { font-weight: 600; }
table.words td { text-align: left; white-space: normal; overflow-wrap: anywhere; font-weight: 400; }
table.words th { text-align: left; }
figure { margin: 1.2rem 0; } figure img { max-width: 100%; height: auto; display: block; }
figcaption { color: #444; font-size: .88rem; max-width: 56rem; margin-top: .3rem; overflow-wrap: anywhere; }
pre { font-size: .8rem; overflow-x: auto; background: #f6f6f6; padding: .8rem; }
"""
# Whatever a name or a number may hold, the page loads nothing and runs nothing.
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
ALL = "All conditions"
HEADINGS = {"course": "Training", "differences": "Paired differences", "symmetry": "Symmetry", "attention": "Attention"}


def page(
    title: str,
    conditions: Sequence[statistics.Condition],
    record: dict[str, Any],
    drawn: Sequence[drawings.Drawn],
) -> str:
    """The page of a study. `record`: what report.json holds."""
    root = ElementTree.Element("html", lang="en")
    head = _add(root, "head")
    _add(head, "meta", charset="utf-8")
    _add(head, "meta", {"http-equiv": "Content-Security-Policy", "content": POLICY})
    _add(head, "meta", name="viewport", content="width=device-width, initial-scale=1")
    _add(head, "title", text=title)
    _add(head, "style", text=STYLE)
    body = _add(root, "body")
    _add(body, "h1", text=title)
    count = f"{record['finished_runs']} of {record['planned_runs']} runs finished, seeds {_list(record['seeds'])}."
    _add(body, "p", {"class": "small"}, text=count)
    _contents(body, conditions, drawn)
    _verdict(body, conditions, record)
    _arms(body, conditions)
    for section, heading in HEADINGS.items():
        shown = _shown(drawn, section)
        if shown:
            _heading(body, heading)
        for before, one in zip([None, *shown], shown, strict=False):
            if len(conditions) > 1 and (before is None or before.condition != one.condition):
                _add(body, "h3", text=one.condition)
            _figure(body, one)
        _layers(body, section, record)
    _what(body, record)
    return "<!DOCTYPE html>\n" + ElementTree.tostring(root, encoding="unicode", method="html") + "\n"


def _add(
    parent: ElementTree.Element, tag: str, attributes: dict[str, str] | None = None, *, text: str = "", **more: str
) -> ElementTree.Element:
    """A new last child. Control characters, which HTML does not allow, are replaced."""
    made = ElementTree.SubElement(parent, tag, (attributes or {}) | more)
    made.text = text.translate(terminal.CONTROL).replace("95 %", "95\N{NO-BREAK SPACE}%") or None
    return made


def _list(values: Sequence[Any]) -> str:
    return ", ".join(map(str, values))


def _shown(drawn: Sequence[drawings.Drawn], section: str) -> list[drawings.Drawn]:
    return [one for one in drawn if one.section == section or (section, one.section) == ("attention", "maps")]


def _heading(body: ElementTree.Element, words: str, tag: str = "h2") -> None:
    _add(body, tag, id=_anchor(words), text=words)


def _anchor(heading: str) -> str:
    return heading.lower().replace(" ", "-")


def _contents(
    body: ElementTree.Element, conditions: Sequence[statistics.Condition], drawn: Sequence[drawings.Drawn]
) -> None:
    """Links to the sections, which stay in sight."""
    made = _add(body, "nav")
    figures = [heading for section, heading in HEADINGS.items() if _shown(drawn, section)]
    seen = [ALL] if tables.overview(conditions) else []
    for heading in ("Verdict", *seen, "Arms", *figures, "What was run"):
        _add(made, "a", href=f"#{_anchor(heading)}", text=heading)


def _overview(body: ElementTree.Element, conditions: Sequence[statistics.Condition]) -> None:
    seen = tables.overview(conditions)
    if seen:
        _heading(body, ALL, "h3")
        _table(body, seen)


def _verdict(body: ElementTree.Element, conditions: Sequence[statistics.Condition], record: dict[str, Any]) -> None:
    _heading(body, "Verdict")
    _add(_add(body, "div", {"class": "verdict"}), "p", text=record["verdict"])
    _overview(body, conditions)
    for found in conditions:
        _add(body, "h3", text=found.name)
        _add(body, "p", text=verdict.condition(found))


def _arms(body: ElementTree.Element, conditions: Sequence[statistics.Condition]) -> None:
    _heading(body, "Arms")
    for found in conditions:
        _add(body, "h3", text=f"{found.name}: {found.metric}")
        _table(body, tables.condition(found))


def _table(body: ElementTree.Element, table: tables.Table, kind: str = "") -> None:
    """With its notes below; a cell of a kind has that class."""
    made = _add(_add(body, "div", {"class": "wide"}), "table", {"class": kind} if kind else {})
    line = _add(_add(made, "thead"), "tr")
    for cell in table.head:
        _add(line, "th", scope="col", text=cell)
    rest = _add(made, "tbody")
    kinds = table.kinds or [[""] * len(row) for row in table.rows]
    for row, of_row in zip(table.rows, kinds, strict=True):
        line = _add(rest, "tr")
        for cell, of_cell in zip(row, of_row, strict=True):
            _add(line, "td", {"class": of_cell} if of_cell else {}, text=cell)
    for note in table.notes:
        _add(body, "p", {"class": "small"}, text=note)


def _figure(body: ElementTree.Element, one: drawings.Drawn) -> None:
    made = _add(body, "figure")
    content = base64.b64encode(one.file.read_bytes()).decode()
    alt = one.caption.translate(terminal.CONTROL)
    _add(made, "img", src=f"data:image/png;base64,{content}", alt=alt)
    _add(made, "figcaption", text=one.caption)


def _layers(body: ElementTree.Element, section: str, record: dict[str, Any]) -> None:
    """The last values per layer, mean over seeds, of what the section's figures show."""
    words = {"symmetry": measures.SYMMETRY, "attention": measures.ATTENTION}.get(section, {})
    for found in record["conditions"]:
        rows = [
            [one["name"], words[name], *(tables.NONE if x is None else verdict.number(x) for x in layers)]
            for one in found["arms"]
            for name, layers in one.get(section, {}).items()
            if name in words
        ]
        if rows:
            depth = max(map(len, rows))
            details = _add(body, "details")
            _add(details, "summary", text=f"{found['name']}: the numbers at the end of training, mean over seeds")
            head = ["arm", "measure", *(f"layer {m}" for m in range(1, depth - 1))]
            _table(details, tables.Table(head, [row + [tables.NONE] * (depth - len(row)) for row in rows], []))


def _what(body: ElementTree.Element, record: dict[str, Any]) -> None:
    _heading(body, "What was run")
    _table(body, tables.Table(["", ""], provenance.rows(record), []), "words")
    details = _add(body, "details")
    _add(details, "summary", text="The whole config")
    _add(details, "pre", text=json.dumps(record["what"].get("config"), indent=2, ensure_ascii=False))

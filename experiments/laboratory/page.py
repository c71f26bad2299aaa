"""report.html: one file that needs nothing else. Built as a tree of elements, which escapes every word in it."""

import base64
import json
from collections.abc import Sequence
from typing import Any
from xml.etree import ElementTree

from experiments.engine import terminal
from experiments.laboratory import drawings, measures, statistics, tables, verdict

STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.55 system-ui, sans-serif; color: #1a1a1a; background: #fff; max-width: 76rem; margin: 0 auto;
  padding: 1.5rem 1rem 4rem; }
h1 { font-size: 1.7rem; margin: 0 0 .3rem; } h2 { font-size: 1.3rem; margin: 2.6rem 0 .6rem; }
h3 { font-size: 1.05rem; margin: 1.6rem 0 .4rem; }
p { max-width: 50rem; overflow-wrap: anywhere; } .small { color: #555; font-size: .88rem; }
.verdict { border-left: .3rem solid #0072b2; background: #f3f7fa; padding: .2rem 1rem; max-width: 50rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .45rem; text-align: right; white-space: nowrap; border-bottom: 1px solid #ddd; }
th { vertical-align: bottom; border-bottom: 2px solid #888; }
th:first-child, td:first-child { text-align: left; } td:first-child { font-weight: 600; }
table.words td { text-align: left; white-space: normal; overflow-wrap: anywhere; font-weight: 400; }
table.words th { text-align: left; }
figure { margin: 1.2rem 0; } figure img { max-width: 100%; height: auto; display: block; }
figcaption { color: #444; font-size: .88rem; max-width: 56rem; margin-top: .3rem; overflow-wrap: anywhere; }
pre { font-size: .8rem; overflow-x: auto; background: #f6f6f6; padding: .8rem; }
"""
# Whatever a name or a number may hold, the page loads nothing and runs nothing.
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
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
    _verdict(body, conditions, record)
    _arms(body, conditions)
    for section, heading in HEADINGS.items():
        shown = [one for one in drawn if one.section == section or (section, one.section) == ("attention", "maps")]
        if shown:
            _add(body, "h2", text=heading)
        for one in shown:
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


def _verdict(body: ElementTree.Element, conditions: Sequence[statistics.Condition], record: dict[str, Any]) -> None:
    _add(body, "h2", text="Verdict")
    _add(_add(body, "div", {"class": "verdict"}), "p", text=record["verdict"])
    for found in conditions:
        _add(body, "h3", text=found.name)
        _add(body, "p", text=verdict.condition(found))


def _arms(body: ElementTree.Element, conditions: Sequence[statistics.Condition]) -> None:
    _add(body, "h2", text="Arms")
    for found in conditions:
        table = tables.condition(found)
        _add(body, "h3", text=f"{found.name}: {found.metric}")
        _table(body, table.head, table.rows)
        for note in table.notes:
            _add(body, "p", {"class": "small"}, text=note)


def _table(body: ElementTree.Element, head: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "") -> None:
    made = _add(_add(body, "div", {"class": "wide"}), "table", {"class": kind} if kind else {})
    line = _add(_add(made, "thead"), "tr")
    for cell in head:
        _add(line, "th", scope="col", text=cell)
    rest = _add(made, "tbody")
    for row in rows:
        line = _add(rest, "tr")
        for cell in row:
            _add(line, "td", text=cell)


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
            _table(details, head, [row + [tables.NONE] * (depth - len(row)) for row in rows])


def _what(body: ElementTree.Element, record: dict[str, Any]) -> None:
    _add(body, "h2", text="What was run")
    what = record["what"]
    rows = [["experiment", record["experiment"]], ["reference", record["reference"]]]
    rows += [["hardware", what.get("devices") or tables.NONE], ["code", what.get("commit") or "not from a checkout"]]
    rows += [["versions", _list([f"{name} {version}" for name, version in (what.get("versions") or {}).items()])]]
    seconds = what.get("wall_seconds")
    rows += [["wall time", f"{seconds:,.0f} s"]] if seconds is not None else []
    first, arms = record["conditions"][0], "arm "
    rows += [[f"condition {one['name']}", _changes(one["changes"])] for one in record["conditions"] if one["changes"]]
    rows += [[arms + one["name"], _changes(one["changes"])] for one in first["arms"]]
    _table(body, ["", ""], rows, "words")
    details = _add(body, "details")
    _add(details, "summary", text="The whole config")
    _add(details, "pre", text=json.dumps(what.get("config"), indent=2, ensure_ascii=False))


def _changes(changes: dict[str, Any]) -> str:
    told = (f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in changes.items())
    return ", ".join(told) or "no changes"

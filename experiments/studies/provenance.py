"""What was run: told by the runs themselves, since the session that writes the report may be another one."""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from experiments.studies import runs as loaded

UNKNOWN = "unknown"  # of runs whose summary.json does not tell


def told(runs: Sequence[loaded.Run]) -> dict[str, Any]:
    """{"commits", "devices": each with how many runs, "versions": {name: the same}, "training_seconds": of the
    "timed_runs", "data": {condition: lines}}."""
    summaries = [run.summary for run in runs]
    seconds = [one["wall_seconds"] for one in summaries if one.get("wall_seconds") is not None]
    names = dict.fromkeys(name for one in summaries for name in one.get("versions") or {})
    data: dict[str, dict[str, None]] = {}
    for run in runs:
        data.setdefault(run.condition, {}).update(dict.fromkeys(run.summary.get("data") or []))
    return {
        "commits": Counter(_commit(one.get("commit")) for one in summaries),
        "devices": Counter(one.get("device") or _backend(one) for one in summaries),
        "versions": {n: Counter((one.get("versions") or {}).get(n, UNKNOWN) for one in summaries) for n in names},
        "training_seconds": sum(seconds) if seconds else None,
        "timed_runs": len(seconds),
        "data": {condition: list(lines) for condition, lines in data.items() if lines},
    }


def _commit(commit: str | None) -> str:
    return UNKNOWN if commit is None else commit or "not from a checkout"


def _backend(summary: dict[str, Any]) -> str:
    """What an older summary.json has of the hardware."""
    backend, many = summary.get("backend"), summary.get("devices")
    return f"{backend} ({many} device{'s' if many != 1 else ''})" if backend and many else backend or UNKNOWN


def rows(record: dict[str, Any]) -> list[list[str]]:
    """A label and words for each thing that report.json tells of what was run, and of what wrote the report."""
    first = record["conditions"][0]
    seeds = ", ".join(map(str, record["seeds"]))
    found = [["experiment", record["experiment"]], ["reference", record["reference"]]]
    found += [["runs", f"{record['finished_runs']} of {record['planned_runs']} finished, seeds {seeds}"]]
    found += [[f"condition {one['name']}", changes(one["changes"])] for one in record["conditions"] if one["changes"]]
    found += [[f"arm {one['name']}", changes(one["changes"])] for one in first["arms"]]
    return found + _ran(record["ran"]) + _written(record["what"])


def changes(settings: dict[str, Any]) -> str:
    """What an arm or a condition changes: 'model.score = "tied"'."""
    words = (f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in settings.items())
    return ", ".join(words) or "no changes"


def _ran(ran: dict[str, Any]) -> list[list[str]]:
    seconds, all_runs = ran["training_seconds"], sum(ran["commits"].values())
    time = UNKNOWN if seconds is None else f"{seconds:,.0f} s"
    if 0 < ran["timed_runs"] < all_runs:
        time += f" for the {ran['timed_runs']} of {all_runs} runs that tell"
    versions = (f"{name} {_counted(found, ' and ')}" for name, found in ran["versions"].items())
    rows = [["code of the runs", _counted(ran["commits"])], ["hardware of the runs", _counted(ran["devices"])]]
    rows += [["versions of the runs", ", ".join(versions) or UNKNOWN], ["training time of all runs", time]]
    return rows + _data(ran["data"])


def _counted(found: dict[str, int], between: str = ", ") -> str:
    """'a', or 'a (20 runs), b (10 runs)'."""
    if len(found) < 2:
        return next(iter(found), UNKNOWN)
    return between.join(f"{words} ({many} run{'s' if many > 1 else ''})" for words, many in found.items())


def _data(data: dict[str, list[str]]) -> list[list[str]]:
    """One row where all conditions have the same data, else one for each."""
    if len({tuple(lines) for lines in data.values()}) == 1:
        return [["data", _lines(next(iter(data.values())))]]
    return [[f"data, {condition}", _lines(lines)] for condition, lines in data.items()]


def _lines(lines: Iterable[str]) -> str:
    return "; ".join(line.strip() for line in lines)


def _written(what: dict[str, Any]) -> list[list[str]]:
    versions = ", ".join(f"{name} {version}" for name, version in (what.get("versions") or {}).items())
    by = [what.get("commit") or "code that is not from a checkout", what.get("device")]
    return [["report written by", ", on ".join(filter(None, by))], ["report written with", versions or UNKNOWN]]

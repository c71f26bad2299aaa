"""report.json: the whole study in numbers.

{
  "experiment", "reference", "seeds",
  "verdict": one paragraph on the study,
  "finished_runs", "planned_runs",
  "missing":  [{"condition", "arm", "seed"}],
  "diverged": [{"condition", "arm", "seed", "step": null where the run came to its end with a number not finite}],
  "conditions": [the fields of statistics.Condition, and "verdict": one paragraph,
    "arms": [the fields of statistics.Arm,
      "difference": null for the reference, else the fields of statistics.Difference, and "words" on it]],
  "ran": what the runs tell of how they came about: {"commits": {commit: runs}, "devices": {line: runs},
    "versions": {name: {version: runs}}, "training_seconds": sum over runs, "timed_runs", "data": {condition: [line]}},
  "what": of the session that wrote the report, which may be another one: {"config", "versions", "device", "commit"}
}
What cannot be said (an interval of two seeds, a mean of no run) is null.
"""

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.studies import runs as finished
from experiments.studies import statistics, words
from experiments.studies import study as studies

UNKNOWN = "unknown"  # of no run


def record(
    study: studies.Study,
    conditions: Sequence[statistics.Condition],
    runs: Sequence[finished.Run],
    what: dict[str, Any],
) -> dict[str, Any]:
    """The object above; every number in it is finite."""
    places = [
        ({"condition": condition.name, "arm": arm.name}, arm) for condition in conditions for arm in condition.arms
    ]
    missing = [place | {"seed": seed} for place, arm in places for seed in arm.missing]
    diverged = [place | {"seed": seed, "step": step} for place, arm in places for seed, step in arm.diverged.items()]
    whole = {
        "experiment": study.experiment,
        "reference": study.reference,
        "seeds": study.seeds,
        "verdict": words.of_study(conditions),
        "finished_runs": len(runs),
        "planned_runs": len(runs) + len(missing),
        "missing": missing,
        "diverged": diverged,
        "conditions": [_condition(condition) for condition in conditions],
        "ran": _ran(runs),
        "what": {**what, "versions": {**(what.get("versions") or {}), **statistics.LIBRARY}},
    }
    return finite(whole)


def finite(value: Any) -> Any:
    """The value with keys as words, lists for tuples, and null for numbers that JSON has not."""
    if isinstance(value, dict):
        return {str(key): finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _condition(condition: statistics.Condition) -> dict[str, Any]:
    fields = dataclasses.asdict(condition) | {"verdict": words.of_condition(condition)}
    del fields["reference"]  # of the whole study, as are what is missing and what diverged
    for arm, its in zip(condition.arms, fields["arms"], strict=True):
        del its["missing"], its["diverged"]
        if arm.difference:
            its["difference"]["words"] = words.of_arm(condition, arm.difference)
    return fields


def _ran(runs: Sequence[finished.Run]) -> dict[str, Any]:
    """ "ran" above, of summary.json."""
    summaries = [run.summary for run in runs]
    seconds = [one["wall_seconds"] for one in summaries if one.get("wall_seconds") is not None]
    names = dict.fromkeys(name for one in summaries for name in one.get("versions", {}))
    data: dict[str, dict[str, None]] = {}
    for run in runs:
        data.setdefault(run.condition, {}).update(dict.fromkeys(run.summary.get("data", [])))
    return {
        "commits": Counter(one.get("commit") or "not from a checkout" for one in summaries),
        "devices": Counter(one.get("device", UNKNOWN) for one in summaries),
        "versions": {n: Counter(one.get("versions", {}).get(n, UNKNOWN) for one in summaries) for n in names},
        "training_seconds": sum(seconds) if seconds else None,
        "timed_runs": len(seconds),
        "data": {condition: list(lines) for condition, lines in data.items() if lines},
    }


def rows(record: dict[str, Any]) -> list[list[str]]:
    """A label and words for each thing that report.json tells of what was run, and of what wrote the report."""
    conditions, ran, what = record["conditions"], record["ran"], record["what"]
    rows = [["experiment", record["experiment"]], ["reference", record["reference"]], ["runs", finished_runs(record)]]
    rows += [[f"condition {one['name']}", changes(one["changes"])] for one in conditions if one["changes"]]
    rows += [[f"arm {one['name']}", changes(one["changes"])] for one in conditions[0]["arms"]]
    versions = words.listed(f"{name} {_counted(counts, ' and ')}" for name, counts in ran["versions"].items())
    seconds = ran["training_seconds"]
    rows += [["code of the runs", _counted(ran["commits"])], ["hardware of the runs", _counted(ran["devices"])]]
    rows += [["versions of the runs", versions or UNKNOWN]]
    rows += [["training time of all runs", UNKNOWN if seconds is None else f"{seconds:,.0f} s"]]
    data = {condition: "; ".join(line.strip() for line in lines) for condition, lines in ran["data"].items()}
    alike = len(set(data.values())) == 1
    rows += [["data" if alike else f"data, {condition}", lines] for condition, lines in data.items()][
        : 1 if alike else None
    ]
    author = [what.get("commit") or "code that is not from a checkout", what.get("device")]
    versions = words.listed(f"{name} {version}" for name, version in what["versions"].items())
    return [*rows, ["report written by", ", on ".join(filter(None, author))], ["report written with", versions]]


def finished_runs(record: dict[str, Any]) -> str:
    return f"{record['finished_runs']} of {record['planned_runs']} finished, seeds {words.listed(record['seeds'])}"


def changes(settings: Mapping[str, Any]) -> str:
    """What an arm or a condition changes: 'model.score = "tied"'."""
    return words.listed(f"{key} = {json.dumps(x, ensure_ascii=False)}" for key, x in settings.items()) or "no changes"


def _counted(counts: Mapping[str, int], between: str = ", ") -> str:
    """'a', or 'a (20 runs), b (10 runs)'."""
    if len(counts) < 2:
        return next(iter(counts), UNKNOWN)
    return between.join(f"{words} ({many} run{'s' if many > 1 else ''})" for words, many in counts.items())

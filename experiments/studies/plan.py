"""plan.jsonl, the log in a study's folder: every plan, and the seeds of every verdict that was read.

A comparison that is removed later therefore still counts, and seeds that are added after a verdict are on record. When
the plan changes, the log gets a line {"when", "planned": {"conditions": {name: metric}, "arms", "reference", "seeds"}};
a verdict is {"when", "verdict": {"seeds", "looks": study.looks}}.
"""

import datetime
import json
import pathlib
from collections.abc import Iterable
from typing import Any, NamedTuple

from experiments.config import disk
from experiments.folder import records
from experiments.studies import study as studies

FILE = "plan.jsonl"
PLAN_FORM = {"!conditions": records.TEXTS, "!arms": [str], "!reference": str, "!seeds": [records.COUNT]}
FORM = ({"!planned": PLAN_FORM}, {"!verdict": {"!seeds": [records.COUNT], "!looks": records.POSITIVE}})
Comparison = tuple[str, str, frozenset[str]]  # condition, metric, the arm and its reference


class Past(NamedTuple):
    """The content of plan.jsonl: the comparisons ever planned, and the share of the 5 % error spent by each verdict."""

    comparisons: dict[Comparison, str]  # each comparison that was ever planned -> a phrase for the report
    looks: dict[frozenset[int], float]  # the seeds of each verdict that was read -> its share of the 5 % error

    @property
    def share(self) -> float:
        """The share of the 5 % error that all verdicts together have spent. The level holds if it is at most 1."""
        return sum(self.looks.values())


NOTHING = Past({}, {})


def comparisons(study: studies.Study) -> dict[Comparison, str]:
    """Return {comparison: phrase for the report}: each other arm with the reference, in each condition of the study."""
    return _comparisons(_plan(study))


def read(folder: pathlib.Path, also: Iterable[pathlib.Path] = ()) -> Past:
    """Return the plans and verdicts in the folder's plan.jsonl. Raises UserError if the file is damaged.

    also: other folders of the study. The last verdict of each is left out: it covers only a part of the study.
    """
    compared, seeds, verdicts, rows = {}, (), {}, []
    for part in (folder, *also):
        new = [*records.read_rows(part / FILE, FORM)]
        last = [row for row in new if "verdict" in row][-1:] if part != folder else []
        rows = [row for row in new if row not in last] + rows
    for row in rows:
        if "planned" in row:
            compared |= _comparisons(row["planned"])
            seeds = tuple(sorted(row["planned"]["seeds"]))
        else:  # one verdict for each plan, its last: a resumed study has an earlier verdict from its interruption
            judged, share = frozenset(row["verdict"]["seeds"]), 1 / row["verdict"]["looks"]
            before, before_share = verdicts.get(seeds, (judged, 0.0))
            verdicts[seeds] = judged, max(share, before_share) if before == judged else share
    looks = dict(sorted(verdicts.values(), key=lambda verdict: verdict[1]))  # the largest share of the same seeds
    return Past(compared, looks)


def record(folder: pathlib.Path, study: studies.Study) -> None:
    """Add the study's plan to plan.jsonl if it differs from the last one there."""
    _log(folder, "planned", _plan(study))


def look(folder: pathlib.Path, study: studies.Study, seeds: set[int]) -> None:
    """Add to plan.jsonl that a verdict over these seeds was read, unless its last one has the same seeds and looks."""
    _log(folder, "verdict", {"seeds": sorted(seeds), "looks": study.looks})


def _plan(study: studies.Study) -> dict[str, Any]:
    conditions = {condition.name: condition.metric for condition in study.conditions}
    arms = [arm.name for arm in study.arms]
    return {"conditions": conditions, "arms": arms, "reference": study.reference, "seeds": study.seeds}


def _comparisons(planned: dict[str, Any]) -> dict[Comparison, str]:
    reference = planned["reference"]
    return {
        (condition, metric, frozenset((arm, reference))): f'"{arm}" against "{reference}" in {condition}, {metric}'
        for condition, metric in planned["conditions"].items()
        for arm in planned["arms"]
        if arm != reference
    }


def _log(folder: pathlib.Path, kind: str, entry: dict[str, Any]) -> None:
    """Add a line unless the last one of its kind is the same."""
    rows = [*records.read_rows(folder / FILE, FORM)]
    if [row[kind] for row in rows if kind in row][-1:] != [entry]:
        when = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        lines = [json.dumps(row) + "\n" for row in [*rows, {"when": when, kind: entry}]]
        disk.write(folder / FILE, "".join(lines).encode())

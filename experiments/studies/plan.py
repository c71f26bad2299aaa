"""plan.jsonl, the log of a study's folder: all that was ever planned in it, and over which seeds a verdict was read.

So what was compared and then left out still counts among the comparisons, and seeds that were added to a verdict are
declared. A line is {"when", "planned": {"conditions": {name: metric}, "arms", "reference", "seeds"}}, for each time
that these became others, or {"when", "verdict": {"seeds": of which it is, "looks": study.looks}}.
"""

import datetime
import json
import pathlib
from collections.abc import Iterable
from typing import Any, NamedTuple

from experiments.engine import disk, errors
from experiments.studies import study as studies

FILE = "plan.jsonl"
Comparison = tuple[str, str, frozenset[str]]  # condition, metric, the arm and its reference


class Past(NamedTuple):
    """What a folder's log tells."""

    comparisons: dict[Comparison, str]  # all that were planned, with words
    looks: dict[frozenset[int], float]  # the seeds of each verdict that was read -> its share of the 5 %

    @property
    def share(self) -> float:
        """Of the 5 % that all verdicts may cost together, what those cost that were read: at most 1 if they keep it."""
        return sum(self.looks.values())


NOTHING = Past({}, {})


def comparisons(study: studies.Study) -> dict[Comparison, str]:
    """Those that the study asks for now."""
    return _comparisons(_planned(study))


def read(folder: pathlib.Path) -> Past:
    """What was planned and read in the folder; nothing where it has no log. UserError where the log is damaged."""
    return _past(_rows(folder))


def _past(rows: list[dict[str, Any]]) -> Past:
    compared, seeds, verdicts = {}, (), {}
    for row in rows:
        if "planned" in row:
            compared |= _comparisons(row["planned"])
            seeds = tuple(sorted(row["planned"]["seeds"]))
        else:  # a study that was stopped, and went on, has the verdict of its end
            its, share = frozenset(row["verdict"]["seeds"]), 1 / row["verdict"]["looks"]
            before = verdicts.get(seeds)
            verdicts[seeds] = its, max(share, before[1]) if before and before[0] == its else share
    looks: dict[frozenset[int], float] = {}
    for its, share in verdicts.values():
        looks[its] = max(share, looks.get(its, 0.0))
    return Past(compared, looks)


def record(folder: pathlib.Path, study: studies.Study) -> None:
    """Note what is planned, where it was not the last that was. UserError where the log is damaged."""
    _note(folder, "planned", _planned(study))


def look(folder: pathlib.Path, study: studies.Study, seeds: set[int]) -> None:
    """Note that a verdict over these seeds is read."""
    _note(folder, "verdict", {"seeds": sorted(seeds), "looks": study.looks})


def merge(folders: Iterable[pathlib.Path], new: pathlib.Path) -> None:
    """Make the log of folders that are one study's parts: all but their last verdicts, each of which is of a part."""
    content = []
    for folder in folders:
        rows = _rows(folder)
        last = [row for row in rows if "verdict" in row][-1:]
        content += [json.dumps(row) + "\n" for row in rows if row not in last]
    disk.write(new / FILE, "".join(content).encode())


def _planned(study: studies.Study) -> dict[str, Any]:
    conditions = {one.name: study.metric[one.name] for one in study.conditions}
    arms = [one.name for one in study.arms]
    return {"conditions": conditions, "arms": arms, "reference": study.reference, "seeds": study.seeds}


def _comparisons(planned: dict[str, Any]) -> dict[Comparison, str]:
    reference = planned["reference"]
    return {
        (condition, metric, frozenset((arm, reference))): f'"{arm}" against "{reference}" in {condition}, {metric}'
        for condition, metric in planned["conditions"].items()
        for arm in planned["arms"]
        if arm != reference
    }


def _rows(folder: pathlib.Path) -> list[dict[str, Any]]:
    """UserError where one is none that `_note` writes."""
    file, rows = folder / FILE, []
    try:
        for line in file.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            _past([row])
            rows.append(row)
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        why = disk.reason(error) if isinstance(error, OSError) else f"line {len(rows) + 1} is damaged"
        raise errors.UserError(
            f"{file} cannot be read ({why}), which tells all comparisons that were planned in this study: put a whole "
            f"copy of it there, or begin the study in another --workdir"
        ) from error
    return rows


def _note(folder: pathlib.Path, what: str, entry: dict[str, Any]) -> None:
    """Add a line, unless the last of its sort says the same."""
    rows = _rows(folder)
    if [row[what] for row in rows if what in row][-1:] != [entry]:
        when = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        content = [json.dumps(row) + "\n" for row in [*rows, {"when": when, what: entry}]]
        disk.write(folder / FILE, "".join(content).encode())

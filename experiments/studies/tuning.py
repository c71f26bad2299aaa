"""Settings that every arm has chosen for itself: the best of a grid, on a part of the training part, with other seeds.

A study before the study trains each arm with each of its values. Its runs lie in the folder `tuning`, as a condition's
<arm>@<values>/seed_<n>.
"""

import hashlib
import itertools
import json
import math
import pathlib
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from matplotlib import figure

from experiments.engine import checkpoint, errors
from experiments.studies import figures, runs, study as studies, styles, tables, words

FOLDER = "tuning"
_LONGEST = 200  # letters of a folder's name; most systems have 255


class Point(NamedTuple):
    """One of the values, or of their combinations, and what its seeds reached."""

    values: dict[str, Any]
    metric: dict[int, float | None]  # by seed; None: it diverged

    @property
    def mean(self) -> float | None:
        """None where a seed diverged: it is never chosen."""
        found = [x for x in self.metric.values() if x is not None]
        return sum(found) / len(found) if len(found) == len(self.metric) > 0 else None


class Tuned(NamedTuple):
    """What an arm has tried in a condition."""

    condition: str
    arm: str
    points: list[Point]
    best: Point
    edges: list[str]  # settings whose best value is the smallest or the largest that was tried

    def record(self) -> dict[str, Any]:
        """For report.json."""
        tried = [{"values": one.values, "mean": one.mean, "by_seed": one.metric} for one in self.points]
        chosen = {"chosen": self.best.values, "at_the_end": self.edges}
        return {"condition": self.condition, "arm": self.arm, **chosen, "tried": tried}

    def __str__(self) -> str:
        edge = f"; {words.listed(self.edges)}: at the end of what was tried" if self.edges else ""
        where = "" if self.condition == studies.ONLY else f"{self.condition}: "
        return f"  {where}{self.arm} chose {said(self.best.values)} (best of {len(self.points)}{edge})"


def trials(study: studies.Study) -> studies.Study:
    """The study before the study: an arm for each arm's values; none where nothing is tuned."""
    arms = [
        studies.Named(_name(arm.name, values), {k: x for k, x in arm.changes.items() if k != studies.TUNE} | values)
        for arm in (study.arms if study.grid else ())
        for values in combinations(study, arm.name)
    ]
    return study._replace(arms=arms, seeds=study.tune_seeds, grid={})


def combinations(study: studies.Study, arm: str) -> list[dict[str, Any]]:
    """All values of the arm's grid; [{}] where it has none."""
    grid = study.grid.get(arm, {})
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def _name(arm: str, values: dict[str, Any]) -> str:
    """'tied@learning_rate=0.003', no name of an arm, as a folder may be called."""
    said = ",".join(f"{key.rpartition('.')[2]}={value}" for key, value in values.items())
    name = f"{arm}{studies.VALUES}{re.sub(r'[^A-Za-z0-9_+.,=-]', '-', said)}"
    plain = all(re.fullmatch(r"[a-z0-9_+.-]+|True|False", str(value)) for value in values.values())
    if plain and len(name) <= _LONGEST:
        return name
    digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:8]
    return f"{name[: _LONGEST - 9]}-{digest}"  # other values may look alike, or alike on some systems


def read(folder: pathlib.Path, study: studies.Study) -> list[Tuned]:
    """What every arm has chosen, as far as all its runs in the study's folder are finished: the best mean over seeds,
    the first of equals. RunError where none of an arm's values came to the end with all seeds."""
    found = []
    finished = {(run.condition, run.arm, run.seed): run for run in runs.load(folder / FOLDER, trials(study))}
    for condition, arm in itertools.product(study.conditions, study.arms if study.grid else ()):
        metric, points = study.metric[condition.name], []
        for values in combinations(study, arm.name):
            mine = [finished.get((condition.name, _name(arm.name, values), seed)) for seed in study.tune_seeds]
            points.append(Point(values, {run.seed: run.value(metric) for run in filter(None, mine)}))
        if min(len(point.metric) for point in points) < len(study.tune_seeds):
            continue
        sign = 1 if checkpoint.BETTER[metric.rpartition("/")[2]] is min else -1
        best = min(points, key=lambda point: math.inf if point.mean is None else sign * point.mean)
        if best.mean is None:
            raise errors.RunError(
                f"condition {condition.name}, arm {arm.name}: with none of its values of {studies.TUNE} did all seeds "
                "come to the end: try others"
            )
        found.append(Tuned(condition.name, arm.name, points, best, _edges(study.grid[arm.name], best.values)))
    return found


def said(values: dict[str, Any]) -> str:
    """'optim.learning_rate = 0.003, optim.ema = 0'."""
    return words.listed(f"{key} = {value}" for key, value in values.items()) or "nothing"


def table(tuned: Sequence[Tuned]) -> tables.Table | None:
    """What each arm has chosen; None where nothing was tuned."""
    rows = []
    for one in tuned:
        tried = words.listed(
            f"{'/'.join(map(str, values.values()))}: {'diverged' if mean is None else words.number(mean)}"
            for values, mean in ((point.values, point.mean) for point in one.points)
        )
        rows.append([one.condition, one.arm, said(one.best.values), words.number(one.best.mean), tried])
    notes = [
        "Each arm chose for itself, by the mean over seeds of its own, trained and evaluated on parts of the training "
        "part: neither the held-out part nor the seeds of the comparison were seen."
    ]
    if beyond := [f"{one.condition}, {one.arm} ({words.listed(one.edges)})" for one in tuned if one.edges]:
        notes.append(
            f"Chosen at the end of what was tried, so that better values may lie beyond: {words.listed(beyond)}."
        )
    return tables.Table(["condition", "arm", "chosen", "mean", "tried"], rows, notes) if rows else None


def draw(folder: pathlib.Path, study: studies.Study, tuned: Sequence[Tuned]) -> list[figures.Figure]:
    """The metric over the values of each setting, a panel for each, a line for each arm, its best value filled."""
    style, drawn = styles.of(study), []
    for condition in study.conditions:
        mine = [one for one in tuned if one.condition == condition.name and len(one.points) > 1]
        keys = list(dict.fromkeys(key for one in mine for key, x in study.grid[one.arm].items() if len(x) > 1))
        if not keys:
            continue
        picture = figure.Figure(figsize=(max(5.5, 4.2 * len(keys)), 4.4), layout="constrained")
        for panel, key in zip(picture.subplots(1, len(keys), squeeze=False)[0], keys, strict=True):
            with_it = [one for one in mine if key in study.grid[one.arm]]
            tried = [x for one in with_it for x in study.grid[one.arm][key]]
            values = [x for i, x in enumerate(tried) if x not in tried[:i]]
            values = sorted(values) if _numeric(values) else values
            for one in with_it:
                of = [point for point in one.points if point.values | {key: None} == one.best.values | {key: None}]
                x_I = [values.index(point.values[key]) for point in of]
                mean_I = [math.nan if point.mean is None else point.mean for point in of]
                look = style[one.arm].look | {"mfc": "white"}
                panel.plot(x_I, mean_I, **look)
                at = of.index(one.best)
                panel.plot(x_I[at], mean_I[at], **look | {"mfc": style[one.arm].colour, "ms": 6})
            panel.set_xticks(range(len(values)), [styles.label(str(x)) for x in values])
            falls = checkpoint.BETTER[study.metric[condition.name].rpartition("/")[2]] is min
            figures.dress(panel, styles.label(study.metric[condition.name]), key, falls=falls)
        styles.legend(picture, {one.arm: style[one.arm] for one in mine})
        caption = (
            f"{condition.name}: {study.metric[condition.name]} on the third part of the data over the values that each "
            f"arm tried, mean of {words.seeds([len(study.tune_seeds)])}; the chosen one is filled, and other settings "
            f"are at what was chosen. Where a seed diverged there is no point."
        )
        drawn.append(figures.written(folder, picture, FOLDER, condition.name, caption))
    return drawn


def chosen(folder: pathlib.Path, study: studies.Study) -> dict[tuple[str, str], dict[str, Any]]:
    """The settings by condition and arm, for `study.runs`."""
    return {(one.condition, one.arm): one.best.values for one in read(folder, study)}


def _edges(grid: Any, best: dict[str, Any]) -> list[str]:
    """Where numbers of a grid may go on getting better beyond it."""
    numbers = {key: x for key, x in grid.items() if len(x) > 1 and _numeric(x)}
    return [key for key, values in numbers.items() if best[key] in (min(values), max(values))]


def _numeric(values: Sequence[Any]) -> bool:
    return all(type(x) in (int, float) for x in values)

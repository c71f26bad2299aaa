"""The verdict on a whole study, in one paragraph: which arms were worse, better, or neither, and where.

Where no difference was found, it says how far the intervals reach: few seeds find nothing easily.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from experiments.studies import statistics, verdict


class Place(NamedTuple):
    """What is known of an arm in one condition."""

    condition: statistics.Condition
    comparison: statistics.Comparison

    @property
    def kind(self) -> str:
        return verdict.kind(self.comparison, more_is_better=self.condition.more_is_better)


def overall(conditions: Sequence[statistics.Condition]) -> str:
    """The paragraph."""
    missing = sum(len(one.missing) for found in conditions for one in found.arms)
    diverged = sum(len(one.diverged) for found in conditions for one in found.arms)
    begin = [f"The study is not finished: {missing} of its runs are missing."] if missing else []
    begin += [f"Left out, since they diverged: {diverged} of its runs."] if diverged else []
    places: dict[str, list[Place]] = {}
    for found in conditions:
        for one in found.arms:
            if one.comparison:
                places.setdefault(one.name, []).append(Place(found, one.comparison))
    reference = verdict.quoted([conditions[0].reference])
    counts = [len(p.comparison.differences) for each in places.values() for p in each if p.kind != verdict.FEW]
    if not counts:
        few = f"it takes at least {statistics.FEWEST} seeds in which an arm and {reference} are finished"
        return " ".join([*begin, f"No verdict: {few}."])
    said = [_said(names, [places[name] for name in names], conditions) for names in _alike(places)]
    end = ["Each interval is corrected within its condition, not for the number of conditions."]
    said += end[: len(conditions) - 1] + _unlike(conditions)
    return " ".join([*begin, f"Against {reference}, {verdict.seeds(counts)}.", *said])


def _alike(places: dict[str, list[Place]]) -> list[list[str]]:
    """The arms, those together of which the same is known in all conditions."""
    found: dict[tuple[str, ...], list[str]] = {}
    for name, each in places.items():
        found.setdefault(tuple(place.kind for place in each), []).append(name)
    return list(found.values())


def _said(names: Sequence[str], places: Sequence[list[Place]], conditions: Sequence[statistics.Condition]) -> str:
    """'"none", "tied": worse in causal; no difference found in masked (between ... at the widest, 95 %).'"""
    by_kind: dict[str, list[str]] = {}
    for place in places[0]:
        by_kind.setdefault(place.kind, []).append(place.condition.name)
    parts = []
    for kind, where in by_kind.items():
        words = f"{kind}{_where(where, conditions)}"
        if kind == verdict.OPEN:
            words += f" ({_reach(place for each in places for place in each if place.kind == kind)})"
        parts.append(words)
    return f"{verdict.quoted(names)}: {'; '.join(parts)}."


def _where(names: Sequence[str], conditions: Sequence[statistics.Condition]) -> str:
    """'' for the only condition, ' in causal and masked', ' in all 7 conditions'."""
    if len(conditions) == 1:
        return ""
    if len(names) == len(conditions) > 2:
        return f" in all {len(names)} conditions"
    return f" in {joined(names)}"


def joined(names: Sequence[str]) -> str:
    """'a', 'a and b', 'a, b and c'."""
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _reach(places: Iterable[Place]) -> str:
    """How far their intervals reach together, for each metric."""
    by_metric: dict[str, list[tuple[float, float]]] = {}
    for condition, comparison in places:
        worse_by = verdict.worse_by(comparison, more_is_better=condition.more_is_better)
        by_metric.setdefault(condition.metric, []).append(worse_by)
    said = []
    for metric, intervals in by_metric.items():
        words = verdict.between(min(low for low, _ in intervals), max(high for _, high in intervals))
        words += f" in {metric}" * (len(by_metric) > 1) + " at the widest" * (len(intervals) > 1)
        said.append(words)
    return f"{joined(said)}, 95 %"


def _unlike(conditions: Sequence[statistics.Condition]) -> list[str]:
    """Where an arm's data are not the reference's."""
    found: dict[str, list[str]] = {}
    for one in conditions:
        for arm in one.arms:
            if arm.other_evaluation or arm.other_batches:
                found.setdefault(arm.name, []).append(one.name)
    said = "; ".join(f"{verdict.quoted([arm])}{_where(names, conditions)}" for arm, names in found.items())
    return [f"Not on the same data as the reference, which may be the difference: {said}."] if said else []

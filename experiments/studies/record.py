"""report.json: the whole study in numbers.

{
  "experiment", "reference", "seeds",
  "verdict": one paragraph on the study,
  "finished_runs", "planned_runs",
  "missing":  [{"condition", "arm", "seed"}],
  "diverged": [{"condition", "arm", "seed", "step": null where the run came to its end with a number not finite}],
  "conditions": [{
    "name", "changes", "metric", "better": "less" | "more", "threshold": null | x, "evaluation_interval": steps | null,
    "comparisons": m, "baseline": {metric: x}, "guess": {metric: what it is}, "verdict": one paragraph,
    "arms": [{
      "name", "changes", "params", "flops_per_token": forward,
      "values": {seed: x}, "mean", "std": n - 1 below, "n",
      "others": {metric: {"mean", "std", "n"}},
      "other_evaluation": seeds that are not evaluated on the reference's examples, "other_batches": nor trained on its,
      "other_initial": weights that do not begin with the reference's values, nor with a multiple of them,
      "threshold_step": null | {"by_seed": {seed: step | null}, "median": step | null, "reached": n, "of": n},
      "difference": null for the reference, else {
        "by_seed": {seed: arm - reference}, "mean", "std", "n",
        "interval": [low, high] at 95 % for the m comparisons together, "interval_uncorrected": the same for one,
        "p", "p_corrected": min(1, m p), "kind": a word of verdict.py, "words": what the report says of it},
      "symmetry": {measure: [of each layer at the end, mean over seeds]}, "attention": the same}]}],
  "ran": what the runs tell of how they came about: {"commits": {commit: runs}, "devices": {line: runs},
    "versions": {name: {version: runs}}, "training_seconds": sum over runs, "timed_runs", "data": {condition: [line]}},
  "what": of the session that wrote the report: {"config", "versions", "device", "commit"}
}
What cannot be said (an interval of two seeds, a mean of no run) is null.
"""

import math
from collections.abc import Sequence
from typing import Any

from experiments.studies import measures, overall, provenance, statistics, thresholds, verdict
from experiments.studies import runs as loaded
from experiments.studies import study as studies


def record(
    study: studies.Study,
    conditions: Sequence[statistics.Condition],
    runs: Sequence[loaded.Run],
    what: dict[str, Any],
) -> dict[str, Any]:
    """The object above; every number in it is finite."""
    named = [(found, one) for found in conditions for one in found.arms]
    missing = [{"condition": c.name, "arm": a.name, "seed": seed} for c, a in named for seed in a.missing]
    diverged = [
        {"condition": c.name, "arm": a.name, "seed": seed, "step": step}
        for c, a in named
        for seed, step in a.diverged.items()
    ]
    whole = {
        "experiment": study.experiment,
        "reference": study.reference,
        "seeds": study.seeds,
        "verdict": overall.overall(conditions),
        "finished_runs": len(runs),
        "planned_runs": len(runs) + len(missing),
        "missing": missing,
        "diverged": diverged,
        "conditions": [_condition(found, [r for r in runs if r.condition == found.name]) for found in conditions],
        "ran": provenance.told(runs),
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


def _condition(found: statistics.Condition, runs: Sequence[loaded.Run]) -> dict[str, Any]:
    return {
        "name": found.name,
        "changes": found.changes,
        "metric": found.metric,
        "better": "more" if found.more_is_better else "less",
        "threshold": found.threshold or None,
        "evaluation_interval": found.every,
        "comparisons": found.comparisons,
        "baseline": found.baseline,
        "guess": found.guess,
        "verdict": verdict.condition(found),
        "arms": [_arm(found, one, [run for run in runs if run.arm == one.name]) for one in found.arms],
    }


def _arm(found: statistics.Condition, one: statistics.Arm, runs: Sequence[loaded.Run]) -> dict[str, Any]:
    kept = [run for run in runs if run.seed in one.values]
    return {
        "name": one.name,
        "changes": one.changes,
        "params": one.params,
        "flops_per_token": one.flops_per_token,
        "values": one.values,
        **_spread(one.spread),
        "others": {name: _spread(spread) for name, spread in one.others.items()},
        "other_evaluation": one.other_evaluation,
        "other_batches": one.other_batches,
        "other_initial": one.other_initial,
        "threshold_step": _reached(one.reached) if found.threshold else None,
        "difference": _difference(found, one.comparison) if one.comparison else None,
        "symmetry": measures.symmetry(kept),
        "attention": measures.attention(kept),
    }


def _spread(spread: statistics.Spread | None) -> dict[str, Any]:
    return spread._asdict() if spread else {"mean": None, "std": None, "n": 0}


def _reached(reached: dict[int, int | None]) -> dict[str, Any]:
    got = sum(step is not None for step in reached.values())
    return {"by_seed": reached, "median": thresholds.median_step(reached), "reached": got, "of": len(reached)}


def _difference(found: statistics.Condition, comparison: statistics.Comparison) -> dict[str, Any]:
    return {
        "by_seed": comparison.differences,
        **_spread(comparison.spread),
        "interval": comparison.interval,
        "interval_uncorrected": comparison.interval_alone,
        "p": comparison.p,
        "p_corrected": comparison.p_corrected,
        "kind": verdict.kind(comparison, more_is_better=found.more_is_better),
        "words": verdict.arm(comparison, more_is_better=found.more_is_better),
    }

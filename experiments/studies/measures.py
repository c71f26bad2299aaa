"""How symmetric the scores are and where attention goes, per layer: averaged over the seeds of an arm."""

from collections.abc import Sequence

from experiments.studies import runs as loaded

SYMMETRY = {  # name in metrics.jsonl -> words
    "symmetry": "symmetry s of a head (mean)",
    "symmetry_sum": "symmetry s, heads summed",
    "directionality": "directionality d, heads summed",
}
ATTENTION = {  # name in summary.json -> words
    "entropy": "entropy (nats)",
    "diagonal": "mass on the diagonal",
    "asymmetry": "asymmetry |A - Aᵀ|/|A|",
}


def symmetry(runs: Sequence[loaded.Run]) -> dict[str, list[float | None]]:
    """Measure -> its last logged value in each layer, mean over runs; without measures that no run has logged."""
    found = {}
    for name in SYMMETRY:
        depth = max((loaded.layers(run, name) for run in runs), default=0)
        ends = [[_last(loaded.curve(run, f"{name}/{layer}")) for run in runs] for layer in range(1, depth + 1)]
        found[name] = [_mean(end) for end in ends]
    return {name: layers for name, layers in found.items() if layers}


def attention(runs: Sequence[loaded.Run]) -> dict[str, list[float | None]]:
    """Measure -> its value in each layer, mean over runs; without measures that no run has."""
    found = {name: attention_layers(runs, name) for name in ATTENTION}
    return {name: [_mean(seeds) for seeds in layers] for name, layers in found.items() if layers}


def attention_layers(runs: Sequence[loaded.Run], name: str) -> list[list[float | None]]:
    """For each layer, the value of each run, None where it has none."""
    each = [(run.summary.get("attention") or {}).get(name) or [] for run in runs]
    depth = max(map(len, each), default=0)
    return [[layers[m] if m < len(layers) else None for layers in each] for m in range(depth)]


def _last(curve: dict[int, float]) -> float | None:
    return curve[max(curve)] if curve else None


def _mean(values: Sequence[float | None]) -> float | None:
    kept = [x for x in values if x is not None]
    return sum(kept) / len(kept) if kept else None

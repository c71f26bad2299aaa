"""Probes of a task: symmetry of each layer's scores (tfm/symmetry.py), and scores of heads (tfm/inside.py)."""

from collections.abc import Callable
from typing import Any

import jax

from experiments.config import settings as configs
from experiments.engine import train_step
from experiments.model import variants
from tfm import inside, symmetry

HEADS = {"previous": "previous-token score", "induction": "induction score"}  # logged scores of inside.head_scores
TEXTS = 32  # with which heads are scored


def symmetry_metrics(m: configs.Settings) -> Callable | None:
    """Return a function params -> {"symmetry/1": number, "symmetry_sum/1": ..., "directionality/1": ..., ...}.

    symmetry/i is the mean over the heads of layer i. symmetry_sum/i and directionality/i measure the sum of its heads'
    bilinear forms. An encoder-decoder has symmetry/encoder/1, ... Return None if the scores have no bilinear form.
    """
    measure_layers = symmetry_layers(m)

    def measure(params: Any) -> dict[str, jax.Array]:
        metrics = {}
        for side, layers in measure_layers(params).items():
            mean_M = symmetry.mean(layers.symmetry_H, axis=-1)
            measures = {"symmetry": mean_M, "symmetry_sum": layers.symmetry, "directionality": layers.directionality}
            metrics |= {f"{name}/{side}{i + 1}": x_M[i] for name, x_M in measures.items() for i in range(len(x_M))}
        return metrics

    return measure if measure_layers else None


def symmetry_layers(m: configs.Settings) -> Callable[[Any], dict[str, symmetry.Layer]] | None:
    """Return a function params -> {side: the measures of self-attention in all its layers (symmetry.Layer)}.

    The sides are "encoder/" and "decoder/" in an encoder-decoder, otherwise only "". Return None if the scores have no
    bilinear form (score.Score.factors).
    """
    factors = variants.choose(m, "score").factors

    def measure_layers(params: Any) -> dict[str, symmetry.Layer]:
        trunks = {f"{side}/": params[side] for side in ("encoder", "decoder") if side in params} or {"": params}
        scores = {side: trunk["blocks"]["score"] for side, trunk in trunks.items()}
        return {side: symmetry.layers(score, factors, M=m.M, D=m.D) for side, score in scores.items()}

    return measure_layers if factors else None


def add_head_scores(task: train_step.Task, look: Callable[[Any, dict], dict], *, N: int, W: int) -> train_step.Task:
    """Return the task with a probe that also has the scores of heads: "heads/induction/2.1" is that of layer 2, head 1.

    look: (params, batch) -> {"A": A_MBHNN}. The heads are scored on TEXTS texts of N // 2 random ids below W, twice.
    """
    period = N // 2
    w_BN = inside.draw_repeated(jax.random.key(0), W=W, B=TEXTS, period=period)

    def measure(params: Any) -> dict[str, jax.Array]:
        scores = inside.head_scores(look(params, {"w_BN": w_BN})["A"], period=period)
        metrics = task.probe(params) if task.probe else {}
        for name in HEADS:
            M, H = scores[name].shape
            metrics |= {f"heads/{name}/{m + 1}.{h + 1}": scores[name][m, h] for m in range(M) for h in range(H)}
        return metrics

    return task._replace(probe=measure)


def choose_heads(rows: list[dict]) -> dict[str, str]:
    """Return {metric: label for a figure} of the best head for each score in HEADS, at the end of a log.

    rows: those of metrics.jsonl; the last one that has scores of heads decides. If none has, the result is {}.
    """
    last = next((row for row in reversed(rows) if any(name.startswith("heads/") for name in row)), {})
    labels = {}
    for name, label in HEADS.items():
        if scores := {metric: x or 0.0 for metric, x in last.items() if metric.startswith(f"heads/{name}/")}:
            best = max(scores, key=scores.__getitem__)
            labels[best] = f"{label} of head {best.rpartition('/')[2]}"
    return labels

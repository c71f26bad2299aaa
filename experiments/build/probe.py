"""Symmetry and directionality of the scores of each layer, measured while a model trains (tfm/symmetry.py)."""

from collections.abc import Callable
from typing import Any

import jax

from experiments.build import variants
from experiments.engine import config
from tfm import symmetry


def symmetry_metrics(m: config.Settings) -> Callable | None:
    """Return the function params -> {"symmetry/1": number, "symmetry_sum/1": ..., "directionality/1": ..., ...}.

    symmetry/i is the mean over the heads of layer i; symmetry_sum/i and directionality/i are of the sum over heads. An
    encoder-decoder has symmetry/encoder/1, ... Return None if the scores have no bilinear form.
    """
    measure_layers = symmetry_layers(m)

    def measure(params: Any) -> dict[str, jax.Array]:
        metrics = {}
        for part, layers in measure_layers(params).items():
            mean_M = symmetry.mean(layers.symmetry_H, axis=-1)
            by_name = {"symmetry": mean_M, "symmetry_sum": layers.symmetry, "directionality": layers.directionality}
            metrics |= {f"{name}/{part}{i + 1}": x_M[i] for name, x_M in by_name.items() for i in range(len(x_M))}
        return metrics

    return measure if measure_layers else None


def symmetry_layers(m: config.Settings) -> Callable[[Any], dict[str, symmetry.Layer]] | None:
    """Return the function params -> {part: the measures of its self-attention, for all layers (symmetry.Layer)}.

    The parts are "encoder/" and "decoder/", or "" for a single trunk. Return None if the scores have no bilinear form
    (score.Score.factors).
    """
    factors = variants.choose(m, "score").factors

    def measure_layers(params: Any) -> dict[str, symmetry.Layer]:
        trunks = {f"{side}/": params[side] for side in ("encoder", "decoder") if side in params} or {"": params}
        scores = {part: trunk["blocks"]["score"] for part, trunk in trunks.items()}
        return {part: symmetry.layers(score, factors, M=m.M // m.share, D=m.D) for part, score in scores.items()}

    return measure_layers if factors else None

"""The symmetry and the directionality of each layer's scores, measured during training (tfm/symmetry.py)."""

from collections.abc import Callable
from typing import Any

import jax

from experiments.config import settings as configs
from experiments.model import variants
from tfm import symmetry


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

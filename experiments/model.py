"""From the `model` section of a config to pure functions of `tfm`: names become variants, sizes become keywords."""

import functools
from collections.abc import Callable
from typing import NamedTuple

from experiments.engine import config, errors
from tfm import attention, block, mlp, norm, position, score, transformer, value


class Model(NamedTuple):
    """`init(key) -> params` and `apply(params, inputs, *, mask, maps=False) -> logits` (with maps: and A_MBHNS)."""

    init: Callable
    apply: Callable


def build(
    m: config.Settings,
    *,
    embed_init,
    embed_apply,
    head_init,
    head_apply,
    N: int,
    class_token: bool = False,
    tied_output: bool = False,
) -> Model:
    """The model that the section `m` describes, for up to N tokens. Raises UserError for a wrong name or size."""
    sizes = {letter: getattr(m, letter) for letter in "MDHKF"}
    config.at_least(1, {f"model.{letter}": n for letter, n in sizes.items()})
    config.at_least(0, {"model.unroll": m.unroll, "model.eps": m.eps})
    if m.D % m.H and m.K == m.D // m.H:
        raise errors.UserError(
            f"model.D = {m.D} is not divisible by model.H = {m.H} heads: choose one that is, or set model.K"
        )
    shared = {
        "norm": config.choose("norm", m.norm, config.candidates(norm)),
        "position": config.choose("position", m.position, config.candidates(position)),
    }
    variants = {
        "score": config.choose("score", m.score, config.candidates(score)),
        "value": config.choose("value", m.value, config.candidates(value)),
        "mlp": config.choose("mlp", m.mlp, config.candidates(mlp)),
    }
    init = functools.partial(
        transformer.init,
        **sizes,
        **shared,
        **variants,
        N=N,
        embed_init=embed_init,
        head_init=head_init,
        final_norm=m.final_norm,
        class_token=class_token,
        tied_output=tied_output,
        bias=m.bias,
    )
    apply = functools.partial(
        transformer.apply,
        **shared,
        **variants,
        embed_apply=embed_apply,
        head_apply=head_apply,
        eps=m.eps,
        scale=config.choose("scale", m.scale, score.SCALES),
        order=config.choose("block", m.block, block.ORDERS),
        compute=config.choose("attention", m.attention, attention.WAYS),
        remat=m.remat,
        unroll=m.unroll or True,
    )
    return Model(init, apply)

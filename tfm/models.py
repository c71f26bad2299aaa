"""Whole models as `(init, apply)` in one line, built from functions.

init, apply = tfm.language_model(W=65, M=2, D=32, H=4, N=16, norm=tfm.norm.rms, mlp=tfm.mlp.swiglu)
params = init(jax.random.key(0))
logits_BNW = apply(params, w_BN)
"""

import functools
from collections.abc import Callable
from typing import Any

import jax

from tfm import (
    block,
    embed,
    head as heads,
    layout as layouts,
    mlp as mlps,
    norm as norms,
    position as positions,
    transformer,
    variant,
)
from tfm.attention import (
    flash,
    mask as masks,
    relative_position as relative,
    score as scores,
    spec as attentions,
    value as values,
)

Init = Callable[[jax.Array], dict]
Apply = Callable[..., jax.Array]
Position = variant.Variant | relative.RelativePosition


def language_model(
    *,
    W: int,
    M: int,
    D: int,
    H: int,
    N: int,
    mask: masks.Mask | None = masks.causal,
    tied_output: bool = False,
    **choices: Any,
) -> tuple[Init, Apply]:
    """Return (init, apply) of a language model of W token ids, for up to N tokens (Turner 2023; E1-E24).

    init(key) -> params; apply(params, w_BN, *, key_B=None, layout=ONE) -> logits_BNW. key_B: a random key for each
    sequence in training, for dropout. mask: None lets every token attend to every other. choices: arguments of
    `make_spec`, and K, F and bias.
    """
    words = embed.words._replace(init=functools.partial(embed.words.init, W=W))
    output = heads.next_word._replace(init=functools.partial(heads.next_word.init, W=W))
    return _bind(words, output, {"M": M, "D": D, "H": H, "N": N, "tied_output": tied_output}, mask, **choices)


def vision_model(
    *,
    Y: int,
    X: int,
    Z: int,
    patch: int,
    C: int,
    M: int,
    D: int,
    H: int,
    head: variant.Variant = heads.pooled,
    **choices: Any,
) -> tuple[Init, Apply]:
    """Return (init, apply) of a classifier of images with Y x X pixels and Z channels into C classes (E2, E25).

    init(key) -> params; apply(params, image_BYXZ, *, key_B=None, layout=ONE) -> logits_BC. head: head.pooled or
    head.class_token. choices: arguments of `make_spec`, and K, F and bias. Raises ValueError if the pixels do not
    divide into patches.
    """
    if Y % patch or X % patch:
        raise ValueError(f"images of {Y} x {X} pixels do not divide into patches of {patch} x {patch}")
    first = int(head is heads.class_token)
    patches = embed.patches._replace(init=functools.partial(embed.patches.init, P=patch * patch * Z))
    output = head._replace(init=functools.partial(head.init, C=C))
    sizes = {"M": M, "D": D, "H": H, "N": (Y // patch) * (X // patch) + first, "class_token": first}
    init, apply = _bind(patches, output, sizes, None, **choices)
    return init, lambda params, image_BYXZ, **call: apply(params, embed.cut(image_BYXZ, size=patch), **call)


def make_spec(
    *,
    H: int,
    score: scores.Score = scores.asymmetric,
    value: values.Value = values.low_rank,
    norm: norms.Norm = norms.token,
    mlp: variant.Variant = mlps.gelu,
    order: str = "pre_norm",
    position: Position = positions.learned,
    attend: Callable = flash.attention,
    scale: Callable[[int, int], float] = scores.SCALES["1/sqrt(K)"],
    eps: float = 1e-5,
    dropout: float = 0.0,
) -> tuple[block.Spec, variant.Variant]:
    """Return the spec of a block, and the position code of the tokens.

    order: one of block.ORDERS. position: from position.py, or from relative_position.py, which acts inside the
    attention.
    """
    inside = isinstance(position, relative.RelativePosition)
    relation = position if inside else relative.none
    attention = attentions.Spec(score, value, relation, attend, scale, H)
    spec = block.Spec(attention, norm, mlp, block.ORDERS[order], eps, dropout)
    return spec, positions.none if inside else position


def _bind(
    embedding: variant.Variant,
    head: variant.Variant,
    sizes: dict[str, Any],
    mask: masks.Mask | None,
    *,
    K: int | None = None,
    F: int | None = None,
    bias: str = "all",
    **choices: Any,
) -> tuple[Init, Apply]:
    """Return (init, apply). K: query and key features of a head, D / H if None. F: hidden units, 4 D if None."""
    D, H = sizes["D"], sizes["H"]
    if K is None and D % H:
        raise ValueError(f"D = {D} is not divisible by H = {H} heads: choose K")
    inside, position = make_spec(H=H, **choices)
    spec = transformer.Spec(embedding, position, inside, head)
    sizes = sizes | {"K": K or D // H, "F": F or 4 * D, "bias": bias, "final_norm": True}

    def apply(
        params: dict, inputs: Any, *, key_B: jax.Array | None = None, layout: layouts.Layout = layouts.ONE
    ) -> jax.Array:
        return transformer.apply(params, inputs, spec, attentions.Call(mask, key_B=key_B, layout=layout))[0]

    return functools.partial(transformer.init, spec=spec, **sizes), apply

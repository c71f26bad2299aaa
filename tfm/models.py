"""Whole models: `language_model` and `vision_model` return `(init, apply)`.

init, apply = tfm.language_model(W=65, M=2, D=32, H=4, N=16, norm=tfm.norm.rms, mlp=tfm.mlp.swiglu)
params = init(jax.random.key(0))
logits_BNW = apply(params, w_BN)
logits_BNW, activations = apply(params, w_BN, look=("hidden", "A"))  # hidden: (M, B, N, D), A: (M, B, H, N, N)
"""

import functools
from collections.abc import Callable
from typing import Any

import jax

from tfm import block as blocks, embed as embeds, head as heads, mlp, norm, position, transformer, variant
from tfm.attention import flash, mask as masks, relative_position, score, spec as attentions, value

Init = Callable[[jax.Array], dict]
Apply = Callable[..., Any]  # the logits; with `look`, also a dict of activations
Position = variant.Variant | relative_position.RelativePosition
NO_POSITION, NO_RELATION = position.none, relative_position.none


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
    """Return (init, apply) of a language model with W token ids, for up to N tokens (Turner 2023; E1-E24).

    init(key) -> params; apply(params, w_BN, *, key_B=None, layout=ONE, look=(), edit=()) -> logits_BNW. key_B: in
    training, a random key for each sequence, for dropout. look: names of activations (block.Order); if there are any,
    apply returns (logits_BNW, {name: activation}), with a leading axis of layers M. edit: {name: (x, m) -> x}, which
    replaces activations x of layer m. mask: None lets every token attend to every other. tied_output: the head uses the
    embedding as its matrix. choices: further arguments of `make_spec`, and K, F and bias of `_bind`.
    """
    words = embeds.words._replace(init=functools.partial(embeds.words.init, W=W))
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
    class_token: bool = False,
    **choices: Any,
) -> tuple[Init, Apply]:
    """Return (init, apply) of a classifier of images with Y x X pixels and Z channels into C classes (E2, E25).

    init(key) -> params; apply(params, image_BYXZ, *, key_B=None, layout=ONE, look=(), edit=()) -> logits_BC, like the
    `apply` of `language_model`. patch: height and width of a patch in pixels. class_token: classify a class token
    (heads.class_token), not the mean token (heads.pooled). choices: as for `language_model`. Raises ValueError if
    `patch` does not divide Y and X.
    """
    if Y % patch or X % patch:
        raise ValueError(
            f"patch = {patch}: images of {Y} x {X} pixels do not divide into patches of {patch} x {patch}. "
            "Choose a patch size that divides both sides"
        )
    head = heads.class_token if class_token else heads.pooled
    patches = embeds.patches._replace(init=functools.partial(embeds.patches.init, P=patch * patch * Z))
    output = head._replace(init=functools.partial(head.init, C=C))
    sizes = {"M": M, "D": D, "H": H, "N": (Y // patch) * (X // patch) + class_token, "class_token": class_token}
    init, apply = _bind(patches, output, sizes, None, **choices)
    return init, lambda params, image_BYXZ, **call: apply(params, embeds.cut(image_BYXZ, size=patch), **call)


DEFAULTS = {"score": score.asymmetric, "value": value.low_rank, "attend": flash.attention}
DEFAULTS |= {"scale": score.SCALES["1/sqrt(K)"], "norm": norm.token, "mlp": mlp.gelu}


def make_spec(
    *, H: int, order: str = "pre_norm", position: Position = position.learned, **choices: Any
) -> tuple[blocks.Spec, variant.Variant]:
    """Return the spec of a block, and the position code of the tokens.

    order: a key of blocks.ORDERS. position: a position code of position.py, or a relative position of
    relative_position.py, which becomes part of the block's spec; the position code is then position.none. choices:
    other fields of blocks.Spec and attentions.Spec; missing ones are the DEFAULTS.
    """
    is_relative = isinstance(position, relative_position.RelativePosition)
    choices = DEFAULTS | {"relative_position": position if is_relative else NO_RELATION, "H": H} | choices
    in_attention = {name: choices.pop(name) for name in attentions.Spec._fields if name in choices}
    spec = blocks.Spec(attentions.Spec(**in_attention), order=blocks.ORDERS[order], **choices)
    return spec, NO_POSITION if is_relative else position


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
    """Return (init, apply) of a model. sizes: arguments of transformer.init. choices: arguments of `make_spec`.

    K: query and key features of a head, D / H if None. F: hidden units of the MLP, 4 D if None. bias: a key of
    blocks.BIASES. Raises ValueError if K is None and H does not divide D.
    """
    D, H = sizes["D"], sizes["H"]
    if K is None and D % H:
        raise ValueError(f"H = {H} does not divide D = {D}. Choose a divisor of {D} or set K")
    block, position = make_spec(H=H, **choices)
    spec = transformer.Spec(embedding, position, block, head)
    sizes = sizes | {"K": K or D // H, "F": F or 4 * D, "bias": bias, "final_norm": True}

    def apply(params: dict, inputs: Any, *, look: tuple[str, ...] = (), **call: Any) -> Any:
        logits, aux = transformer.apply(params, inputs, spec, attentions.Call(mask, look=look, **call))
        return (logits, aux["look"]) if look else logits

    return functools.partial(transformer.init, spec=spec, **sizes), apply

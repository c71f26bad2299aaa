"""Whole models: `language_model` and `vision_model` return `(init, apply)`; `bind` returns all functions of a model.

init, apply = tfm.language_model(W=65, M=2, D=32, H=4, N=16, norm=tfm.norm.rms, mlp=tfm.mlp.swiglu)
params = init(jax.random.key(0))
logits_BNW = apply(params, w_BN)
logits_BNW, activations = apply(params, w_BN, look=("hidden", "A"))  # hidden: (M, B, N, D), A: (M, B, H, N, N)
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from tfm import (
    block as blocks,
    embed as embeds,
    encoder_decoder,
    head as heads,
    layout as layouts,
    mlp,
    norm,
    position,
    transformer,
    variant,
)
from tfm.attention import flash, heads as attentions, mask as masks, relative_position, score, value
from tfm.attention.heads import Call
from tfm.decode import kv_cache

Init = Callable[[jax.Array], dict]
Apply = Callable[..., Any]  # the logits; with `look`, also a dict of activations
Position = variant.Variant | relative_position.RelativePosition
NO_POSITION, NO_RELATION = position.none, relative_position.none


class Model(NamedTuple):
    """A model as functions of its parameters. Training, generation, figures and tools all call these functions.

    * init(key, **block_settings) -> params. block_settings: fields of blocks.Spec in which the runs of a study differ.
    * hidden(params, inputs, mask=..., layout=ONE, **options) -> (X^(M), the tokens before the head, and aux of
      transformer.hidden). options: key_B, code_n, look and edit of attentions.Call. An encoder-decoder has the inputs
      source_BS, valid_BS, w_BN, and no mask.
    * output(params, x_BND, layout=ONE) -> the input of the head's `apply`, and its parameters (transformer.output).
    * logits(params, x_BND, layout=ONE) -> the logits of X^(M).
    * loss(params, x_BND, target, weight, sparse=False, layout=ONE) -> {"loss", "accuracy"} (heads.Head.loss).
    * start(params, prompt_BN, length_B, capacity=..., mask=...) -> logits_BW after each prompt, and the KV cache for
      `capacity` tokens. An encoder-decoder takes source_BS and valid_BS before the prompt.
    * by_layer(params) -> the parameters for `step`, in the form that is fastest for many calls.
    * step(layers, cache, w_B, n_B, mask=...) -> logits_BW of the token after w_B at positions n_B, and the new cache.

    layout: how the devices of the training share the model. weights: {name: factor} of the measures that training adds
    to its loss (variant.py). lines: text that is printed before training. fixed: patterns of arrays that are never
    trained.
    """

    init: Init
    hidden: Callable[..., tuple[jax.Array, dict]]
    output: Callable[..., tuple[jax.Array, dict]]
    logits: Callable[..., jax.Array]
    loss: Callable[..., dict]
    start: Callable[..., tuple[jax.Array, Any]]
    by_layer: Callable[[Any], Any]
    step: Callable[..., tuple[jax.Array, Any]]
    layout: layouts.Layout = layouts.ONE
    weights: Mapping[str, float] | tuple[()] = ()
    lines: tuple[str, ...] = ()
    fixed: tuple[str, ...] = ()

    def apply(self, params: Any, *inputs: Any, layout: layouts.Layout = layouts.ONE, **options: Any) -> tuple:
        """Return the logits, and the dict aux: losses of experts and other measures, and activations to look at.

        options: arguments of `hidden`.
        """
        x_BND, aux = self.hidden(params, *inputs, layout=layout, **options)
        return self.logits(params, x_BND, layout=layout), aux


def bind(init: Init, spec: transformer.Spec, at: Callable[[layouts.Layout], transformer.Spec] | None = None) -> Model:
    """Return the Model of a transformer. init: (key, **block_settings) -> params, a field of Model.

    at: a function layout -> the spec for devices with this layout; None: `spec` for all layouts.
    """
    at = at or (lambda layout: spec)

    def hidden(params: Any, inputs: Any, *, mask: Any, layout: layouts.Layout = layouts.ONE, **options: Any) -> tuple:
        return transformer.hidden(params, inputs, at(layout), Call(mask, layout=layout, **options))

    def start(params: Any, prompt_BN: Any, length_B: Any, *, capacity: int, mask: Any, **options: Any) -> tuple:
        call = Call(mask, **options)
        return kv_cache.start(params, prompt_BN, length_B, capacity=capacity, spec=at(layouts.ONE), call=call)

    def step(layers: Any, cache: Any, w_B: Any, n_B: Any, *, mask: Any, **options: Any) -> tuple:
        return kv_cache.step(layers, cache, w_B, n_B, spec=spec, call=Call(mask, **options))

    of_head = {name: functools.partial(getattr(transformer, name), spec=spec) for name in ("output", "logits", "loss")}
    by_layer = functools.partial(kv_cache.by_layer, dtype=spec.dtype)
    return Model(init, hidden, **of_head, start=start, by_layer=by_layer, step=step)


def bind_encoder_decoder(
    init: Init, spec: transformer.Spec, at: Callable[[layouts.Layout], transformer.Spec] | None = None
) -> Model:
    """Return the Model of an encoder and a decoder (encoder_decoder.py), whose masks follow from its inputs.

    at: a function layout -> the spec for devices with this layout; None: `spec` for all layouts.
    """
    at = at or (lambda layout: spec)

    def hidden(params: Any, source_BS: Any, valid_BS: Any, w_BN: Any, *, layout=layouts.ONE, **options: Any) -> tuple:
        return encoder_decoder.hidden(params, source_BS, valid_BS, w_BN, at(layout), Call(layout=layout, **options))

    def start(params: Any, *inputs: jax.Array, capacity: int) -> tuple[jax.Array, Any]:
        return encoder_decoder.start(params, *inputs, capacity=capacity, spec=at(layouts.ONE), call=Call())

    step = functools.partial(encoder_decoder.step, spec=spec)
    return bind(init, spec)._replace(hidden=hidden, start=start, by_layer=unchanged, step=step)


def unchanged(x: Any) -> Any:
    """Return the argument unchanged. It stands in place of functions that change a model or its parameters."""
    return x


def map_params(model: Model, use: Callable[[Any], Any]) -> Model:
    """Return the model with `use(params)` in place of its parameters, in all its functions.

    For example, `use` makes float weights of quantised ones. It must also map parameters that are sharded over devices,
    so it may only compute elementwise.
    """

    def mapped(name: str) -> Callable[..., Any]:
        function = getattr(model, name)
        return lambda params, *arrays, **options: function(use(params), *arrays, **options)

    names = "hidden", "output", "logits", "loss", "start", "by_layer"  # `step` gets the result of `by_layer`
    return model._replace(**{name: mapped(name) for name in names})


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

    model = bind(functools.partial(transformer.init, spec=spec, **sizes), spec)

    def apply(params: dict, inputs: Any, *, look: tuple[str, ...] = (), **call: Any) -> Any:
        logits, aux = model.apply(params, inputs, mask=mask, look=look, **call)
        return (logits, aux["look"]) if look else logits

    return model.init, apply

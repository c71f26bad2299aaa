"""From the section `model` of a config to pure functions of `tfm`: names become functions, sizes become arguments."""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from experiments.build import checks, variants
from experiments.engine import by_name, config, errors
from tfm import (
    block,
    embed as embeds,
    encoder_decoder as seq2seq,
    head as heads,
    initial,
    layout as layouts,
    mlp,
    transformer,
    variant,
)
from tfm.attention import implementations, mask as masks, score, spec as attentions
from tfm.attention.spec import Call
from tfm.decode import kv_cache

DTYPES = {"float32": None, "bfloat16": jnp.bfloat16}  # None: the dtype of the parameters
# The most layers that are unrolled, on a TPU or GPU and on a CPU, if no layer is computed again in the backward pass.
# libtpu 0.0.50 compiles a layer in 5 s, for both step and evaluation; it estimates that a loop over four layers takes
# 1.5 times as long as unrolled ones (causal_lm, llama; vit 1.77; v5e). On a CPU it takes 1.15 to 1.25 times as long.
UNROLLED, UNROLLED_CPU = 4, 6
OUTPUTS = ("Uo_HDK", "V_HDD", "W2_DF")  # the last matrix of attention and of the MLP, which output_std scales
CLASS_HEADS = {"pooled": heads.pooled, "class_token": heads.class_token, "distilled": heads.distilled}
CLASS_TOKENS = {"class_token": 1, "distilled": 2}  # number of tokens of a class head, which come before the patches
TEXT_CLASS_HEADS = {layer: (False, layer) for layer in ("linear", "pooled", *mlp.ACTIVATIONS)}


def name_head(tied: bool, layer: str) -> str:
    """Return the setting text.head: "linear" or "tied" (to the embedding), and the layer before: "tied+gelu"."""
    return "+".join(filter(None, ("tied" if tied else "linear", layer)))


TOKEN_HEADS = {
    name_head(tied, layer): (tied, layer)
    for tied, layer in itertools.product((False, True), ("", "bias", *mlp.ACTIVATIONS))
}


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """A model as functions of its parameters.

    layout: the devices of its training, on which `attention` computes the averages. For figures and generation, without
    a layout, `fallback` does.
    """

    spec: transformer.Spec
    layers: int
    make: Callable[..., dict]  # (key, spec) -> params
    scale: Callable[[dict, set[str]], dict]  # (params, settings of a single run of a study) -> params
    layout: layouts.Layout
    attention: implementations.Implementation
    fallback: implementations.Implementation

    def init(self, key: jax.Array, **block_settings: Any) -> dict:
        """Return the initial parameters.

        block_settings: fields of block.Spec (score_std) in place of the model's, if runs of a study differ in them.
        """
        spec = self.spec._replace(block=self.spec.block._replace(**block_settings))
        return self.scale(self.make(key, spec=spec), set(block_settings))

    def spec_for(self, layout: layouts.Layout, *, maps: bool = False) -> transformer.Spec:
        """Return the spec for these devices: the implementation of attention, and layers unrolled or in a loop.

        With FSDP XLA:CPU would gather the weights of all unrolled layers at once; deep models would compile long.
        """
        attention = self.attention if layout == self.layout else self.fallback
        attend = implementations.DEFINED.attend if maps else attention.attend
        deep = self.layers > (UNROLLED_CPU if layout.platform in ("", "cpu") else UNROLLED)
        unroll = 1 if layout.fsdp or deep or self.spec.remat != "none" else True
        attention_spec = self.spec.block.attention._replace(attend=attend)
        return self.spec._replace(block=self.spec.block._replace(attention=attention_spec), unroll=unroll)

    def hidden(
        self,
        params: Any,
        inputs: Any,
        *,
        mask: masks.Mask | None,
        key_B: jax.Array | None = None,
        maps: bool = False,
        layout: layouts.Layout = layouts.ONE,
    ) -> tuple[jax.Array, dict]:
        """Return X^(M) and aux (transformer.hidden)."""
        call = Call(mask=mask, key_B=key_B, layout=layout, maps=maps)
        return transformer.hidden(params, inputs, self.spec_for(layout, maps=maps), call)

    def output(
        self, params: Any, x_BND: jax.Array, *, layout: layouts.Layout = layouts.ONE
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Return the tokens before the output matrix, and the head's parameters (transformer.output)."""
        return transformer.output(params, x_BND, self.spec, layout)

    def logits(self, params: Any, x_BND: jax.Array, *, layout: layouts.Layout = layouts.ONE) -> jax.Array:
        """Return the logits of X^(M) (transformer.logits)."""
        return transformer.logits(params, x_BND, self.spec, layout)

    def apply(
        self, params: Any, *inputs: Any, layout: layouts.Layout = layouts.ONE, **options: Any
    ) -> tuple[jax.Array, dict]:
        """Return the logits and aux. options: arguments of `hidden`."""
        x_BND, aux = self.hidden(params, *inputs, layout=layout, **options)
        return self.logits(params, x_BND, layout=layout), aux

    def start(
        self, params: Any, prompt_BN: jax.Array, length_B: jax.Array, *, capacity: int, mask: masks.Mask | None
    ) -> tuple[jax.Array, Any]:
        """Return the logits_BW after each prompt, and the cache (kv_cache.start)."""
        spec = self.spec_for(layouts.ONE)
        return kv_cache.start(params, prompt_BN, length_B, capacity=capacity, spec=spec, call=Call(mask=mask))

    def by_layer(self, params: Any) -> Any:
        """Return the parameters for many steps (kv_cache.by_layer)."""
        return kv_cache.by_layer(params, dtype=self.spec.dtype)

    def step(
        self, params: Any, cache: Any, w_B: jax.Array, n_B: jax.Array, *, mask: masks.Mask | None
    ) -> tuple[jax.Array, Any]:
        """Return the logits_BW of the next token, and the new cache (kv_cache.step)."""
        return kv_cache.step(params, cache, w_B, n_B, spec=self.spec, call=Call(mask=mask))


class EncoderDecoder(Model):
    """A sequence-to-sequence model (encoder_decoder.py). Its masks follow from its inputs."""

    def hidden(
        self,
        params: Any,
        source_BS: jax.Array,
        valid_BS: jax.Array,
        w_BN: jax.Array,
        *,
        key_B: jax.Array | None = None,
        maps: bool = False,
        layout: layouts.Layout = layouts.ONE,
    ) -> tuple[jax.Array, dict]:
        """Return X^(M) of the decoder, and aux (encoder_decoder.hidden)."""
        call = Call(key_B=key_B, layout=layout, maps=maps)
        return seq2seq.hidden(params, source_BS, valid_BS, w_BN, self.spec_for(layout, maps=maps), call)

    def start(
        self,
        params: Any,
        source_BS: jax.Array,
        valid_BS: jax.Array,
        prompt_BN: jax.Array,
        length_B: jax.Array,
        *,
        capacity: int,
    ) -> tuple[jax.Array, Any]:
        """Return the logits_BW after each prompt, and the cache (encoder_decoder.start)."""
        arrays = params, source_BS, valid_BS, prompt_BN, length_B
        return seq2seq.start(*arrays, capacity=capacity, spec=self.spec_for(layouts.ONE), call=Call())

    def step(self, params: Any, cache: Any, w_B: jax.Array, n_B: jax.Array) -> tuple[jax.Array, Any]:
        """Return the logits_BW of the next token, and the new cache (encoder_decoder.step)."""
        return seq2seq.step(params, cache, w_B, n_B, spec=self.spec)


def build_language_model(
    m: config.Settings,
    *,
    head: variant.Variant,
    W: int,
    N: int,
    output: str = "linear",
    C: int = 0,
    layout: layouts.Layout = layouts.ONE,
    mask: masks.Mask | None = None,
) -> Model:
    """Return a model of W token ids, for up to N tokens. output: the setting text.head.

    C: number of classes, for a head that predicts classes; output = "pooled" then averages all tokens. layout and mask:
    as in build_model.
    """
    config.at_least(0, {"model.segments": m.segments, "model.E": m.E})
    tied, layer = by_name.choose("head", output, TEXT_CLASS_HEADS if C else TOKEN_HEADS)
    activation = mlp.ACTIVATIONS.get(layer)
    checks.check_embedding(m, output=output, tied=tied, transformed=activation is not None)
    if C:
        if output == "pooled":
            head = heads.pooled
        elif head is heads.first_word:
            head = heads.first_word_of(activation) if activation else heads.class_token
        head = bind_sizes(head, C=C)
    elif layer == "bias":
        head = bind_sizes(head, W=W, bias="b_W")
    else:
        head = bind_sizes(head, W=W)
        if activation:
            norm = variants.choose(m, "norm")
            head = head._replace(init=functools.partial(heads.transformed_init, head.init, norm=norm, E=m.E))
    embed = bind_sizes(embeds.words, W=W, J=m.segments)
    tree = {"tied_output": tied, "E": m.E}
    return build_model(m, embed=embed, head=head, N=N, activation=activation, layout=layout, mask=mask, **tree)


def bind_sizes(choice: variant.Variant, **sizes: Any) -> variant.Variant:
    """Return the variant with these sizes bound to its init."""
    return choice._replace(init=functools.partial(choice.init, **sizes))


def build_vision_model(
    m: config.Settings,
    *,
    output: str,
    Y: int,
    X: int,
    Z: int,
    patch: int,
    C: int,
    layout: layouts.Layout = layouts.ONE,
    mask: masks.Mask | None = None,
) -> Model:
    """Return a classifier of images with Y x X pixels and Z channels. output: the setting image.head.

    Raises UserError if patches of patch x patch pixels do not fit.
    """
    N, P = count_patches(Y, X, Z, patch=patch)
    head = bind_sizes(by_name.choose("head", output, CLASS_HEADS), C=C)
    embed, first = bind_sizes(embeds.patches, P=P), CLASS_TOKENS.get(output, 0)
    return build_model(m, embed=embed, head=head, N=N + first, class_token=first, layout=layout, mask=mask)


def count_patches(Y: int, X: int, Z: int, *, patch: int) -> tuple[int, int]:
    """Return (N, P): the number of patches, and of the values of one. Raises UserError if they do not fit."""
    if patch < 1 or Y % patch or X % patch:
        raise errors.UserError(
            f"image.patch = {patch}: images of {Y} x {X} pixels do not divide into patches of {patch} x {patch}"
        )
    return (Y // patch) * (X // patch), patch * patch * Z


def build_encoder_decoder(
    m: config.Settings,
    *,
    W: int,
    N: int,
    tied_output: bool,
    output_bias: bool = False,
    layout: layouts.Layout = layouts.ONE,
    mask: masks.Mask | None = None,
) -> Model:
    """Return an encoder-decoder with M layers on each side, for up to N tokens on each side."""
    checks.check_causal(m)
    head = bind_sizes(heads.next_word, W=W, **({"bias": "b_W"} if output_bias else {}))
    tree = {"cross": True, "tied_output": tied_output}
    return build_model(m, embed=bind_sizes(embeds.words, W=W), head=head, N=N, layout=layout, mask=mask, **tree)


def build_model(
    m: config.Settings,
    *,
    embed: variant.Variant,
    head: variant.Variant,
    N: int,
    activation: Callable | None = None,
    cross: bool = False,
    layout: layouts.Layout = layouts.ONE,
    mask: masks.Mask | None = None,
    **tree: int,
) -> Model:
    """Return the model of the section `m`, for up to N tokens. Raises UserError for a wrong name or size.

    activation: of head.transform. cross: build an encoder-decoder. layout: the devices of the training. mask: like the
    masks of its calls; layout and mask decide the implementation of attention. tree: class_token, tied_output, E
    (transformer.init).
    """
    by_name.choose("compute_dtype", m.compute_dtype, DTYPES)
    checks.check_model(m, N=N, cross=cross, pixels=head.apply is heads.pixels.apply)
    spec = transformer.Spec(embed, variants.choose(m, "position"), make_block_spec(m, N=N), head)
    spec = spec._replace(cap=m.output_cap, share=m.share, dtype=DTYPES[m.compute_dtype], remat=m.remat)
    if activation:
        spec = spec._replace(activation=activation)
    sizes = checks.check_sizes(m) | {"N": N}
    variants.rehearse(m, spec, sizes, cross=cross)
    chosen = choose_attention(m, spec, sizes, layout=layout, mask=mask, cross=cross)
    fallback = implementations.DEFINED if m.attention == "explicit" else implementations.BLOCKS
    embed_norm, final_norm = checks.OUTER_NORMS[m.outer_norm]
    tree |= sizes | {"final_norm": final_norm, "bias": m.bias}
    if cross:
        make = functools.partial(seq2seq.init, **tree)
    else:
        make = functools.partial(transformer.init, embed_norm=embed_norm, **tree)

    def scale(params: dict, changed: set[str]) -> dict:
        changed |= {name for name in ("score_std", "output_std") if getattr(m, name) != 1}
        variants.check_scales(m, changed, params, OUTPUTS)
        return params if m.output_std == 1 else initial.scaled(params, m.output_std, OUTPUTS)

    kind = EncoderDecoder if cross else Model
    return kind(spec, m.M, make, scale, layout, chosen, fallback)


def choose_attention(
    m: config.Settings,
    spec: transformer.Spec,
    sizes: dict[str, int],
    *,
    layout: layouts.Layout,
    mask: masks.Mask | None,
    cross: bool,
) -> implementations.Implementation:
    """Return the implementation of attention for these devices, from the shapes of queries, keys and values."""
    attention = spec.block.attention

    def project(key: jax.Array, x_BND: jax.Array) -> tuple:
        params = block.init(key, **sizes, spec=spec.block, bias=m.bias, cross=cross)
        params, x_BND = transformer.cast(params, spec.dtype), x_BND.astype(spec.dtype or x_BND.dtype)
        q, k = attention.score.apply(params["score"], x_BND, x_BND)
        return q, k, attention.value.apply(params["value"], k if attention.value.from_keys else x_BND)

    x_BND = jax.ShapeDtypeStruct((1, sizes["N"], m.D), jnp.float32)
    q, k, v = jax.eval_shape(project, jax.random.key(0), x_BND)
    bias = attention.relative_position.bias is not None or not attention.score.attend_to_self
    options = {"mask": mask, "bias": bias, "cap": m.cap, "axis": layout.sequence}
    return implementations.choose(m.attention, layout.platform, q, k, v, **options)


def make_block_spec(m: config.Settings, *, N: int = 0) -> block.Spec:
    """Return the function for each stage of a block, from its name in the config."""
    checks.check_block(m)
    chosen = variants.choose_all(m, checks.check_sizes(m))
    eps = variants.read_eps(m)
    if chosen["score"].takes_eps:
        apply = functools.partial(chosen["score"].apply, eps=eps)
        chosen["score"] = chosen["score"]._replace(apply=apply)
    elif m.norm.startswith("none:"):
        raise errors.UserError(f"model.norm = {m.norm}: no norm uses this number. Choose model.norm = none")
    if N and variants.split("norm", m.norm)[0] == "batch_features":
        chosen["norm"] = bind_sizes(chosen["norm"], N=N)
    attention = attentions.Spec(
        score=chosen["score"],
        value=chosen["value"],
        relative_position=chosen["relative_position"],
        attend=implementations.BLOCKS.attend,
        scale=by_name.choose("scale", m.scale, score.SCALES),
        H=m.H,
        cap=m.cap,
    )
    order = by_name.choose("block", m.block, block.ORDERS)
    return block.Spec(attention, chosen["norm"], chosen["mlp"], order, eps, m.dropout, m.score_std)


def average_tokens(logits_BNC: jax.Array, valid_BN: jax.Array) -> jax.Array:
    """Return the mean of the logits over the valid tokens: the logits of the averaged tokens."""
    valid_BN1 = valid_BN[..., None]
    return jnp.where(valid_BN1, logits_BNC, 0).sum(1) / valid_BN1.sum(1)


def add_window(m: config.Settings, mask: masks.Mask | None) -> masks.Mask | None:
    """Return the product of the mask and the sliding window of model.window (0: none)."""
    if not m.window:
        return mask
    window = masks.window(m.window)
    return window if mask is None else masks.both(mask, window)

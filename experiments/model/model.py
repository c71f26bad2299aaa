"""Build a model from the section `model` of a config: names become functions of `tfm`, sizes become arguments."""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from experiments.config import by_name, errors, settings as configs
from experiments.engine import optim
from experiments.model import checks, variants
from tfm import (
    block as blocks,
    embed as embeds,
    encoder_decoder,
    head as heads,
    layout as layouts,
    mlp,
    transformer,
    variant,
)
from tfm.attention import implementations, mask as masks, score, spec as attentions
from tfm.attention.spec import Call
from tfm.decode import kv_cache

DTYPES = {"float32": None, "bfloat16": jnp.bfloat16}  # None: the dtype of the parameters
# Models with more layers use a loop over layers: the limit on a TPU or GPU, and the limit on a CPU (`Model.spec_for`).
# libtpu 0.0.50 takes 5 s to compile one layer of a step and an evaluation. It estimates that a loop over four layers
# takes 1.5 times as long as four unrolled layers (causal_lm, llama; vit: 1.77; v5e). On a CPU: 1.15 to 1.25 times.
UNROLLED, UNROLLED_CPU = 4, 6
CLASS_HEADS = {"pooled": heads.pooled, "class_token": heads.class_token}
# text.head -> (whether the output matrix is the embedding, the layer before the matrix), for classes and for tokens
TEXT_CLASS_HEADS = {layer: (False, layer) for layer in ("linear", "pooled", *mlp.ACTIVATIONS)}


def name_head(tied: bool, layer: str) -> str:
    """Return the value of text.head, such as "linear", or "tied+gelu" for a tied matrix after a layer with gelu."""
    return "+".join(filter(None, ("tied" if tied else "linear", layer)))


TOKEN_HEADS = {
    name_head(tied, layer): (tied, layer)
    for tied, layer in itertools.product((False, True), ("", "bias", *mlp.ACTIVATIONS))
}


def unchanged(x: Any) -> Any:
    """Return the argument: a model or parameters that an experiment does not change."""
    return x


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """A model as functions of its parameters.

    layout: how the devices of the training share the model. attention: the implementation of attention for layouts with
    the same platform and ring of devices. fallback: for all others, such as any platform for figures and generation.
    """

    spec: transformer.Spec
    layers: int
    make: Callable[..., dict]  # (key, spec) -> params
    check: Callable[[dict, set[str]], None]  # (params, names of block_settings, see init): raises UserError
    layout: layouts.Layout
    attention: implementations.Implementation
    fallback: implementations.Implementation
    use: Callable[[dict], dict] = unchanged  # params -> the parameters that all functions use (map_params)
    lines: ClassVar[tuple[str, ...]] = ()  # printed before training
    fixed: ClassVar[tuple[str, ...]] = ()  # patterns of arrays that are never trained

    @property
    def weights(self) -> dict[str, float]:
        """The measures of the stages that training minimises, with their weights (variant.py)."""
        return {name: weight for name, weight in blocks.weigh_measures(self.spec.block).items() if weight}

    def init(self, key: jax.Array, **block_settings: Any) -> dict:
        """Return the initial parameters.

        block_settings: fields of blocks.Spec that replace the model's: score_std, if runs of a study differ in it.
        """
        spec = self.spec._replace(block=self.spec.block._replace(**block_settings))
        params = self.make(key, spec=spec)
        if not jax.tree.leaves(params.get("blocks", params)):
            rule = "Choose a score, value, MLP or norm with parameters: a number for each layer is enough"
            raise errors.UserError(f"the {self.layers} layers have no parameters. {rule}")
        self.check(params, set(block_settings))
        return params

    def spec_for(self, layout: layouts.Layout) -> transformer.Spec:
        """Return the spec for these devices: with their implementation of attention, and layers unrolled or in a loop.

        FSDP and deep models use a loop: XLA:CPU would gather the weights of all unrolled layers at once, and many
        layers would compile slowly.
        """
        same = (layout.platform, layout.sequence) == (self.layout.platform, self.layout.sequence)
        attend = (self.attention if same else self.fallback).attend
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
        layout: layouts.Layout = layouts.ONE,
        **options: Any,
    ) -> tuple[jax.Array, dict]:
        """Return X^(M), the tokens before the head, and aux (transformer.hidden).

        options: key_B, code_n, look and edit of attentions.Call.
        """
        call = Call(mask=mask, layout=layout, **options)
        return transformer.hidden(self.use(params), inputs, self.spec_for(layout), call)

    def output(
        self, params: Any, x_BND: jax.Array, *, layout: layouts.Layout = layouts.ONE
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Return the tokens before the output matrix, and the head's parameters (transformer.output)."""
        return transformer.output(self.use(params), x_BND, self.spec, layout)

    def logits(self, params: Any, x_BND: jax.Array, *, layout: layouts.Layout = layouts.ONE) -> jax.Array:
        """Return the logits of X^(M) (transformer.logits)."""
        return transformer.logits(self.use(params), x_BND, self.spec, layout)

    def apply(
        self, params: Any, *inputs: Any, layout: layouts.Layout = layouts.ONE, **options: Any
    ) -> tuple[jax.Array, dict]:
        """Return the logits and aux. options: arguments of `hidden`."""
        x_BND, aux = self.hidden(params, *inputs, layout=layout, **options)
        return self.logits(params, x_BND, layout=layout), aux

    def start(
        self,
        params: Any,
        prompt_BN: jax.Array,
        length_B: jax.Array,
        *,
        capacity: int,
        mask: masks.Mask | None,
        **options: Any,
    ) -> tuple[jax.Array, Any]:
        """Return logits_BW after each prompt, and the KV cache for `capacity` tokens (kv_cache.start).

        options: edit of Call.
        """
        spec, call = self.spec_for(layouts.ONE), Call(mask=mask, **options)
        return kv_cache.start(self.use(params), prompt_BN, length_B, capacity=capacity, spec=spec, call=call)

    def by_layer(self, params: Any) -> Any:
        """Return the parameters for `step`, in the form that is fastest for many calls (kv_cache.by_layer)."""
        return kv_cache.by_layer(self.use(params), dtype=self.spec.dtype)

    def step(
        self, layers: Any, cache: Any, w_B: jax.Array, n_B: jax.Array, *, mask: masks.Mask | None, **options: Any
    ) -> tuple[jax.Array, Any]:
        """Return logits_BW of the token after w_B at positions n_B, and the new cache.

        layers: from `by_layer`. options: edit of Call.
        """
        return kv_cache.step(layers, cache, w_B, n_B, spec=self.spec, call=Call(mask=mask, **options))


class EncoderDecoder(Model):
    """A sequence-to-sequence model (encoder_decoder.py). Its masks follow from its inputs."""

    def hidden(
        self,
        params: Any,
        source_BS: jax.Array,
        valid_BS: jax.Array,
        w_BN: jax.Array,
        *,
        layout: layouts.Layout = layouts.ONE,
        **options: Any,
    ) -> tuple[jax.Array, dict]:
        """Return X^(M) of the decoder, and aux (encoder_decoder.hidden). options: key_B, look and edit of Call."""
        params, spec, call = self.use(params), self.spec_for(layout), Call(layout=layout, **options)
        return encoder_decoder.hidden(params, source_BS, valid_BS, w_BN, spec, call)

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
        """Return logits_BW after each prompt, and the KV cache for `capacity` tokens (encoder_decoder.start)."""
        arrays = self.use(params), source_BS, valid_BS, prompt_BN, length_B
        return encoder_decoder.start(*arrays, capacity=capacity, spec=self.spec_for(layouts.ONE), call=Call())

    def by_layer(self, params: Any) -> Any:
        """Return the parameters for `step`."""
        return self.use(params)

    def step(self, layers: Any, cache: Any, w_B: jax.Array, n_B: jax.Array) -> tuple[jax.Array, Any]:
        """Return logits_BW of the token after w_B at positions n_B, and the new cache. layers: from `by_layer`."""
        return encoder_decoder.step(layers, cache, w_B, n_B, spec=self.spec)


def map_params(model: Model, use: Callable[[dict], dict]) -> Model:
    """Return the model with `use(params)` in place of its parameters, in all its functions: quantised weights, ...

    `use` must also map parameters that are sharded over devices, so it may only compute elementwise. Raises UserError
    for a Flax module, which can map its own parameters.
    """
    errors.refuse((not isinstance(model, Model), "map_params is not for model.flax: map the parameters in your module"))
    return dataclasses.replace(model, use=lambda params: model.use(use(params)))


def build_language_model(
    m: configs.Settings,
    *,
    head: variant.Variant | None = None,
    W: int,
    N: int,
    output: str = "linear",
    C: int = 0,
    layout: layouts.Layout = layouts.ONE,
    mask: masks.Mask | None = None,
) -> Model:
    """Return a model of texts with W token ids and up to N tokens, which predicts tokens or, with C, classes.

    head: one of the variants of tfm/head.py; None: that of classes which `output`, the setting text.head, names. C:
    number of classes; 0 for tokens. layout, mask: arguments of build_model. Raises UserError for settings that are
    wrong or do not fit together.
    """
    tied, layer = by_name.choose("head", output, TEXT_CLASS_HEADS if C else TOKEN_HEADS)
    activation, norm = mlp.ACTIVATIONS.get(layer), variants.choose(m, "norm")
    excluded = activation and norm.observe
    errors.refuse((excluded, f"text.head = {output} excludes model.norm = {m.norm}. Choose another norm"))
    if C:
        if output == "pooled":
            head = heads.pooled
        elif head is None:
            head = heads.first_word_of(activation) if activation else heads.class_token
        head = bind_sizes(head, C=C)
    elif layer == "bias":
        head = bind_sizes(head, W=W, bias="b_W")
    else:
        head = bind_sizes(head, W=W)
        if activation:
            head = head._replace(init=functools.partial(heads.transformed_init, head.init, norm=norm))
    embed = bind_sizes(embeds.words, W=W, J=m.segments)
    options = {"layout": layout, "mask": mask, "tied_output": tied}
    return build_model(m, embed=embed, head=head, N=N, activation=activation, **options)


def bind_sizes(choice: variant.Variant, **sizes: Any) -> variant.Variant:
    """Return the variant with an `init` that has these sizes already."""
    return choice._replace(init=functools.partial(choice.init, **sizes))


def build_vision_model(
    m: configs.Settings,
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

    C: number of classes. layout, mask: arguments of build_model. Raises UserError if the image is not a whole number of
    patches of patch x patch pixels.
    """
    N, P = count_patches(Y, X, Z, patch=patch)
    head = bind_sizes(by_name.choose("head", output, CLASS_HEADS), C=C)
    embed, class_token = bind_sizes(embeds.patches, P=P), output == "class_token"
    options = {"class_token": class_token, "layout": layout, "mask": mask}
    return build_model(m, embed=embed, head=head, N=N + class_token, **options)


def build_masked_image_model(m: configs.Settings, *, Y: int, X: int, Z: int, patch: int, **options: Any) -> Model:
    """Return a model that predicts the pixels of masked patches. options: layout and mask, as in build_vision_model."""
    N, P = count_patches(Y, X, Z, patch=patch)
    embed, head = bind_sizes(embeds.masked_patches, P=P), bind_sizes(heads.pixels, P=P)
    errors.refuse((m.output_cap, f"model.output_cap = {m.output_cap} is for logits, not for pixels. Set it to 0"))
    return build_model(m, embed=embed, head=head, N=N, **options)


def count_patches(Y: int, X: int, Z: int, *, patch: int) -> tuple[int, int]:
    """Return (N, P): the number of patches, and the values of a patch. Raises UserError if they do not fit."""
    if patch < 1 or Y % patch or X % patch:
        raise errors.UserError(
            f"image.patch = {patch}: images of {Y} x {X} pixels do not divide into patches of {patch} x {patch}. "
            "Choose a divisor of both sides"
        )
    return (Y // patch) * (X // patch), patch * patch * Z


def build_encoder_decoder(
    m: configs.Settings,
    *,
    W: int,
    N: int,
    tied_output: bool,
    layout: layouts.Layout = layouts.ONE,
    mask: masks.Mask | None = None,
) -> Model:
    """Return an encoder-decoder with W token ids, and with M layers and up to N tokens on each side.

    tied_output: the output matrix is the embedding.
    """
    checks.check_causal(m)
    embed, head = bind_sizes(embeds.words, W=W), bind_sizes(heads.next_word, W=W)
    options = {"cross": True, "tied_output": tied_output}
    return build_model(m, embed=embed, head=head, N=N, layout=layout, mask=mask, **options)


def build_model(
    m: configs.Settings,
    *,
    embed: variant.Variant,
    head: variant.Variant,
    N: int,
    activation: Callable | None = None,
    cross: bool = False,
    layout: layouts.Layout = layouts.ONE,
    mask: masks.Mask | None = None,
    **init_options: bool,
) -> Model:
    """Return the model of the section `m`, for up to N tokens. Raises UserError for settings that are wrong.

    activation: for the layer before the output matrix (heads.transform). cross: build an encoder-decoder. layout: how
    the devices of the training share the model. mask: a mask like those of later calls; with the layout it decides the
    implementation of attention. init_options: class_token and tied_output of transformer.init.
    """
    by_name.choose("compute_dtype", m.compute_dtype, DTYPES)
    checks.check_model(m, N=N, cross=cross)
    spec = transformer.Spec(embed, variants.choose(m, "position"), make_block_spec(m, N=N), head)
    growth = optim.measure_growth(m)
    spec = spec._replace(output_scale=1 / growth.width, cap=m.output_cap, dtype=DTYPES[m.compute_dtype], remat=m.remat)
    if activation:
        spec = spec._replace(activation=activation)
    sizes = checks.check_sizes(m) | {"N": N}
    variants.rehearse(m, spec, sizes, cross=cross)
    chosen = choose_attention(m, spec, sizes, layout=layout, mask=mask, cross=cross)
    fallback = implementations.EXPLICIT if m.attention == "explicit" else implementations.FLASH
    embed_norm, final_norm = checks.OUTER_NORMS[m.outer_norm]
    init_options |= sizes | {"final_norm": final_norm, "bias": m.bias}
    if cross:
        init = functools.partial(encoder_decoder.init, **init_options)
    else:
        init = functools.partial(transformer.init, embed_norm=embed_norm, **init_options)

    def make(key: jax.Array, *, spec: transformer.Spec) -> dict:
        return transformer.scale_embedding(init(key, spec=spec), m.embed_std * growth.width**0.5)

    kind, check = EncoderDecoder if cross else Model, functools.partial(variants.check_scales, m, spec.block)
    return kind(spec, m.M, make, check, layout, chosen, fallback)


def choose_attention(
    m: configs.Settings,
    spec: transformer.Spec,
    sizes: dict[str, int],
    *,
    layout: layouts.Layout,
    mask: masks.Mask | None,
    cross: bool,
) -> implementations.Implementation:
    """Return the implementation of attention for this layout, mask, and shapes of queries, keys and values."""
    attention = spec.block.attention
    if attention.weigh and layout.sequence is None:
        return implementations.EXPLICIT._replace(reason=f"model.weights = {m.weights}")

    def project(key: jax.Array, x_BND: jax.Array) -> tuple:
        params = blocks.init(key, **sizes, spec=spec.block, bias=m.bias, cross=cross)
        params, x_BND = transformer.cast(params, spec.dtype), x_BND.astype(spec.dtype or x_BND.dtype)
        pair = attention.score.apply(params["score"], x_BND, x_BND)
        (q, k), _ = variant.split_measures(attention.score, pair)
        v = attention.value.apply(params["value"], k if attention.value.from_keys else x_BND)
        return q, k, variant.split_measures(attention.value, v)[0]

    x_BND = jax.ShapeDtypeStruct((1, sizes["N"], m.D), jnp.float32)
    q, k, v = jax.eval_shape(project, jax.random.key(0), x_BND)
    bias = attention.relative_position.bias is not None or not attention.score.attend_to_self
    options = {"mask": mask, "bias": bias, "cap": m.cap, "axis": layout.sequence}
    return implementations.choose(m.attention, layout.platform, q, k, v, **options)


def make_block_spec(m: configs.Settings, *, N: int = 0) -> blocks.Spec:
    """Return the function for each stage of a block, by its name in the section `m`.

    N: number of tokens, for a norm with statistics of each position. Raises UserError for settings that are wrong.
    """
    checks.check_sizes(m)
    chosen, eps = variants.choose_all(m), variants.read_eps(m)
    checks.check_variants(m, chosen)
    if chosen["score"].takes_eps:
        apply = functools.partial(chosen["score"].apply, eps=eps)
        chosen["score"] = chosen["score"]._replace(apply=apply)
    if N and chosen["norm"].per_position:
        chosen["norm"] = bind_sizes(chosen["norm"], N=N)
    attention = attentions.Spec(
        score=chosen["score"],
        value=chosen["value"],
        relative_position=chosen["relative_position"],
        attend=implementations.FLASH.attend,
        scale=choose_scale(m),
        H=m.H,
        cap=m.cap,
        weigh=variants.choose_weights(m),
    )
    order, form = by_name.choose("block", m.block, blocks.ORDERS), "Order(apply, residual), with residual True or False"
    errors.refuse((not isinstance(order.residual, bool), f"model.block = {m.block} must have the form {form}"))
    output_std = m.output_std * optim.measure_growth(m).output_std
    return blocks.Spec(attention, chosen["norm"], chosen["mlp"], order, eps, m.dropout, m.score_std, output_std)


def choose_scale(m: configs.Settings) -> Callable[[int, int], float]:
    """Return (K, D) -> the factor on the logits that m.scale names, smaller by 1/sqrt(D / D_0) with m.mup (mup.py)."""
    scale = by_name.choose("scale", m.scale, score.SCALES)
    return (lambda K, D: scale(K, D) * (m.mup / m.D) ** 0.5) if m.mup else scale


def average_tokens(logits_BNC: jax.Array, valid_BN: jax.Array) -> jax.Array:
    """Return the mean over the valid tokens, logits_BC. The head is linear: these are the logits of the mean token."""
    valid_BN1 = valid_BN[..., None]
    return jnp.where(valid_BN1, logits_BNC, 0).sum(1) / valid_BN1.sum(1)


def add_window(m: configs.Settings, mask: masks.Mask | None) -> masks.Mask | None:
    """Return the mask within the sliding window of model.window; the mask itself if there is no window (0)."""
    if not m.window:
        return mask
    window = masks.window(m.window)
    return window if mask is None else masks.both(mask, window)


def within_documents(mask: masks.Mask, batch: dict) -> dict:
    """Return the arguments `mask` and `code_n` of Model.hidden for a batch of windows.causal.

    If the batch has documents, its tokens attend only to their own document, in which their positions begin at 0.
    """
    if "document_BN" not in batch:
        return {"mask": mask}
    return {"mask": masks.both(mask, masks.documents(batch["document_BN"])), "code_n": batch["n_BN"]}

"""From the `model` section of a config to pure functions of `tfm`: names become functions, sizes become keywords."""

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
    embed,
    encoder_decoder as seq2seq,
    head,
    initial as initials,
    layout as layouts,
    mlp,
    transformer,
    variant,
)
from tfm.attention import implementations, mask as masks, score, spec as attentions
from tfm.attention.spec import Call
from tfm.decode import kv_cache

DTYPES = {"float32": None, "bfloat16": jnp.bfloat16}  # None: that of the parameters
# Layers that are unrolled if nothing is computed again. libtpu 0.0.50 compiles one in 5 s, for each of step and
# evaluation; it expects a loop over four layers to take 1.5 times as long (causal_lm, llama; vit 1.77; v5e).
UNROLLED, SHALLOW = 4, 6  # the second on a CPU, where a loop is 1.15 to 1.25 times slower
OUTPUTS = ("Uo_HDK", "V_HDD", "W2_DF")  # the last matrix of attention and of the MLP
PIXELS = head.pixels.apply
CLASS_HEADS = {"pooled": head.pooled, "class_token": head.class_token, "distilled": head.distilled}
TEXT_HEADS = {layer: (False, layer) for layer in ("linear", "pooled", *mlp.ACTIVATIONS)}
FIRST = {"class_token": 1, "distilled": 2}  # tokens of a class head, before the patches


def word_head(tied: bool, layer: str) -> str:
    """text.head of words: whether the output matrix is the embedding, and what is before it."""
    return "+".join(filter(None, ("tied" if tied else "linear", layer)))


WORD_HEADS = {word_head(*one): one for one in itertools.product((False, True), ("", "bias", *mlp.ACTIVATIONS))}


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """A model as functions of its parameters.

    `layout` are the devices of its training, `attention` what computes attention there; without a layout, as in figures
    and generation, `usual` does.
    """

    spec: transformer.Spec
    layers: int
    make: Callable[..., dict]  # (key, spec) -> params
    scale: Callable[[dict, set[str]], dict]  # (params, settings that one of several runs has for itself) -> params
    layout: layouts.Layout
    attention: implementations.Implementation
    usual: implementations.Implementation

    @property
    def cap(self) -> float:
        """Soft cap of the logits; 0: none."""
        return self.spec.cap

    def init(self, key: jax.Array, **numbers: Any) -> dict:
        """Return the parameters. numbers: score_std of one of several runs, instead of the config's."""
        spec = self.spec._replace(block=self.spec.block._replace(**numbers))
        return self.scale(self.make(key, spec=spec), set(numbers))

    def on(self, layout: layouts.Layout, *, maps: bool = False) -> transformer.Spec:
        """Return the spec for these devices: with their attention, and layers unrolled or in a loop.

        Unrolled with FSDP, XLA:CPU would gather the weights of all layers at once; deep models compile long.
        """
        attention = self.attention if layout == self.layout else self.usual
        attend = implementations.DEFINED.attend if maps else attention.attend
        deep = self.layers > (SHALLOW if layout.platform in ("", "cpu") else UNROLLED)
        unroll = 1 if layout.fsdp or deep or self.spec.remat != "none" else True
        own = self.spec.block.attention._replace(attend=attend)
        return self.spec._replace(block=self.spec.block._replace(attention=own), unroll=unroll)

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
        return transformer.hidden(params, inputs, self.on(layout, maps=maps), call)

    def output(
        self, params: Any, x_BND: jax.Array, *, layout: layouts.Layout = layouts.ONE
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Return the tokens before the output matrix, and the head (transformer.output)."""
        return transformer.output(params, x_BND, self.spec, layout)

    def logits(self, params: Any, x_BND: jax.Array, *, layout: layouts.Layout = layouts.ONE) -> jax.Array:
        """Return the logits of X^(M) (transformer.logits)."""
        return transformer.logits(params, x_BND, self.spec, layout)

    def apply(
        self, params: Any, *inputs: Any, layout: layouts.Layout = layouts.ONE, **options: Any
    ) -> tuple[jax.Array, dict]:
        """Return the logits and aux; arguments as of `hidden`."""
        x_BND, aux = self.hidden(params, *inputs, layout=layout, **options)
        return self.logits(params, x_BND, layout=layout), aux

    def start(
        self, params: Any, prompt_BN: jax.Array, length_B: jax.Array, *, capacity: int, mask: masks.Mask | None
    ) -> tuple[jax.Array, Any]:
        """Return the logits_BW after each prompt, and the cache (kv_cache.start)."""
        own, call = self.on(layouts.ONE), Call(mask=mask)
        return kv_cache.start(params, prompt_BN, length_B, capacity=capacity, spec=own, call=call)

    def by_layer(self, params: Any) -> Any:
        """Return the parameters for many steps (kv_cache.by_layer)."""
        return kv_cache.by_layer(params, dtype=self.spec.dtype)

    def step(
        self, params: Any, cache: Any, w_B: jax.Array, n_B: jax.Array, *, mask: masks.Mask | None
    ) -> tuple[jax.Array, Any]:
        """Return the logits_BW of the next token, and the new cache (kv_cache.step)."""
        return kv_cache.step(params, cache, w_B, n_B, spec=self.spec, call=Call(mask=mask))


class EncoderDecoder(Model):
    """A sequence-to-sequence model (encoder_decoder.py), which knows its masks."""

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
        """Return X^(M) of the decoder and aux (encoder_decoder.hidden)."""
        call = Call(key_B=key_B, layout=layout, maps=maps)
        return seq2seq.hidden(params, source_BS, valid_BS, w_BN, self.on(layout, maps=maps), call)

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
        return seq2seq.start(*arrays, capacity=capacity, spec=self.on(layouts.ONE), call=Call())

    def step(self, params: Any, cache: Any, w_B: jax.Array, n_B: jax.Array) -> tuple[jax.Array, Any]:
        """Return the logits_BW of the next token, and the new cache (encoder_decoder.step)."""
        return seq2seq.step(params, cache, w_B, n_B, spec=self.spec)


def language(
    m: config.Settings, *, answer: Any, W: int, N: int, output: str = "linear", C: int = 0, **devices: Any
) -> Model:
    """Return a model of tokens: `answer` is the head, output is text.head. C: classes, of the heads that answer with
    classes; 'pooled' is then the mean of all tokens. devices: layout and mask, as in `build`."""
    config.at_least(0, {"model.segments": m.segments, "model.E": m.E})
    (tied, layer) = by_name.choose("head", output, TEXT_HEADS if C else WORD_HEADS)
    activation, answer = mlp.ACTIVATIONS.get(layer), head.pooled if output == "pooled" else answer
    checks.check_embedding(m, output=output, tied=tied, transformed=bool(activation))
    if answer is head.first_word:
        answer = head.first_word_of(activation) if activation else head.class_token
    made = sized(answer, **({"C": C} if C else {"W": W, "bias": "b_W"} if layer == "bias" else {"W": W}))
    if activation and not C:
        init = functools.partial(head.transformed_init, made.init, norm=variants.choose(m, "norm"), E=m.E)
        made = made._replace(init=init)
    words = sized(embed.words, W=W, J=m.segments)
    own = {"activation": activation} if activation else {}
    return build(m, embed=words, head=made, N=N, tied_output=tied, E=m.E, **own, **devices)


def sized(choice: variant.Variant, **sizes: Any) -> variant.Variant:
    """The variant whose init knows these sizes."""
    return choice._replace(init=functools.partial(choice.init, **sizes))


def vision(m: config.Settings, *, answer: str, Y: int, X: int, Z: int, patch: int, C: int, **devices: Any) -> Model:
    """A model of images of Y x X pixels and Z channels. Raises UserError for a patch that does not divide them."""
    N, P = patches(Y, X, Z, patch=patch)
    output = sized(by_name.choose("head", answer, CLASS_HEADS), C=C)
    first = FIRST.get(answer, 0)
    return build(m, embed=sized(embed.patches, P=P), head=output, N=N + first, class_token=first, **devices)


def patches(Y: int, X: int, Z: int, *, patch: int) -> tuple[int, int]:
    """(N, P): the patches of an image, and the values of one. Raises UserError for a patch that does not divide it."""
    if patch < 1 or Y % patch or X % patch:
        raise errors.UserError(
            f"images of {Y} x {X} pixels do not divide into patches of {patch} x {patch} (image.patch)"
        )
    return (Y // patch) * (X // patch), patch * patch * Z


def encoder_decoder(
    m: config.Settings, *, W: int, N: int, tied_output: bool, output_bias: bool = False, **devices: Any
) -> Model:
    """The encoder-decoder that the section `m` describes, M layers each, for up to N tokens on either side."""
    checks.check_causal(m)
    words, output = sized(embed.words, W=W), sized(head.next_word, W=W, **({"bias": "b_W"} if output_bias else {}))
    return build(m, embed=words, head=output, N=N, cross=True, tied_output=tied_output, **devices)


def build(
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
    """Return the model that the section `m` describes, for up to N tokens. Raises UserError for a wrong name or size.

    activation: of the layer before the output matrix. cross: an encoder-decoder. layout: the devices of the training;
    mask: one like those of its calls: by both the implementation of attention is chosen. tree: class_token,
    tied_output, E (transformer.init).
    """
    by_name.choose("compute_dtype", m.compute_dtype, DTYPES)
    checks.check_model(m, N=N, cross=cross, pixels=head.apply is PIXELS)
    first, last = checks.OUTER_NORMS[m.outer_norm]
    own = {"activation": activation} if activation else {}
    spec = transformer.Spec(embed, variants.choose(m, "position"), block_spec(m, N=N), head, **own)
    spec = spec._replace(cap=m.output_cap, share=m.share, dtype=DTYPES[m.compute_dtype], remat=m.remat)
    variants.rehearse(m, spec, checks.check_sizes(m), N=N, cross=cross)
    chosen = choose_attention(m, spec, N=N, layout=layout, mask=mask, cross=cross)
    usual = implementations.DEFINED if m.attention == "explicit" else implementations.BLOCKS
    tree |= (
        checks.check_sizes(m) | {"N": N, "final_norm": last, "bias": m.bias} | ({} if cross else {"embed_norm": first})
    )
    make = functools.partial((seq2seq if cross else transformer).init, **tree)

    def scale(params: dict, changed: set[str]) -> dict:
        changed |= {name for name in ("score_std", "output_std") if getattr(m, name) != 1}
        variants.check_scales(m, changed, params, OUTPUTS)
        return params if m.output_std == 1 else initials.scaled(params, m.output_std, OUTPUTS)

    kind = EncoderDecoder if cross else Model
    return kind(spec, m.M, make, scale, layout, chosen, usual)


def choose_attention(
    m: config.Settings, spec: transformer.Spec, *, N: int, layout: layouts.Layout, mask: Any, cross: bool
) -> implementations.Implementation:
    """Return the implementation of attention for these devices, by the shapes of queries, keys and values."""
    own = spec.block.attention

    def trace(key: jax.Array, x_BND: jax.Array) -> tuple:
        params = block.init(key, **checks.check_sizes(m), N=N, spec=spec.block, bias=m.bias, cross=cross)
        params, x_BND = transformer.cast(params, spec.dtype), x_BND.astype(spec.dtype or x_BND.dtype)
        q, k = own.score.apply(params["score"], x_BND, x_BND)
        return q, k, own.value.apply(params["value"], k if own.value.from_keys else x_BND)

    qkv = jax.eval_shape(trace, jax.random.key(0), jax.ShapeDtypeStruct((1, N, m.D), jnp.float32))
    bias = own.relative_position.bias is not None or not own.score.attend_to_self
    options = {"mask": mask, "bias": bias, "cap": m.cap, "axis": layout.sequence}
    return implementations.choose(m.attention, layout.platform, *qkv, **options)


def block_spec(m: config.Settings, *, N: int = 0) -> block.Spec:
    """Return the function for each place of a block, by its name in the config."""
    checks.check_block(m)
    chosen = variants.checked(m, checks.check_sizes(m))
    takes_eps = chosen["score"].takes_eps
    if m.norm.startswith("none:") and not takes_eps:
        raise errors.UserError(f"model.norm = {m.norm}: nothing uses the number after the colon. Choose none")
    if takes_eps:
        own = functools.partial(chosen["score"].apply, eps=variants.eps(m))
        chosen["score"] = chosen["score"]._replace(apply=own)
    if N and variants.split("norm", m.norm)[0] == "batch_features":
        chosen["norm"] = sized(chosen["norm"], N=N)
    own = attentions.Spec(
        score=chosen["score"],
        value=chosen["value"],
        relative_position=chosen["relative_position"],
        attend=implementations.BLOCKS.attend,
        scale=by_name.choose("scale", m.scale, score.SCALES),
        H=m.H,
        cap=m.cap,
    )
    order = by_name.choose("block", m.block, block.ORDERS)
    return block.Spec(own, chosen["norm"], chosen["mlp"], order, variants.eps(m), m.dropout, m.score_std)


def mean_of_words(answer_BNC: jax.Array, valid_BN: jax.Array) -> jax.Array:
    """Return answer_BC, the mean over the words that are no padding: what their mean would answer."""
    valid_BN1 = valid_BN[..., None]
    return jnp.where(valid_BN1, answer_BNC, 0).sum(1) / valid_BN1.sum(1)


def masked(m: config.Settings, who: masks.Mask | None) -> masks.Mask | None:
    """The mask of an experiment, and beside it the sliding window that the config asks for (model.window; 0: none)."""
    if not m.window:
        return who
    near = masks.window(m.window)
    return near if who is None else masks.both(who, near)

"""From the `model` section of a config to pure functions of `tfm`: names become functions, sizes become keywords."""

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from experiments import variants
from experiments.engine import by_name, config, errors, mesh
from tfm import (
    attention,
    block,
    embed,
    encoder_decoder as seq2seq,
    head,
    initial as initials,
    layout as layouts,
    mlp,
    symmetry,
    transformer,
    variant,
)
from tfm.attention import explicit, flash, heads, mask, score
from tfm.decode import kv_cache

DTYPES = {"float32": None, "bfloat16": jnp.bfloat16}  # None: that of the parameters
# Layers that are written out where nothing is computed again. libtpu 0.0.50 compiles one in 5 s, for each of step
# and evaluation; of four layers in a loop it expects a step to take 1.5 times as long (causal_lm, llama; v5e).
WRITTEN_OUT, SHALLOW = 4, 6  # the second on a CPU, where a loop is 1.15 to 1.25 times slower
OUTPUTS = ("Uo_HDK", "V_HDD", "W2_DF")  # the last matrix of attention and of the MLP
CUTS = ("identity_query", "nonlinear_query")  # scores that cut whole tokens into heads
OUTER_NORMS = {"last": (False, True), "first": (True, False), "both": (True, True), "none": (False, False)}
LOW_RANK = ("low_rank", "gated", "exclusive")  # values of K features, to which an embedding of words can be added
WORDS, PIXELS = embed.words.apply, head.pixels.apply
CLASS_HEADS = {"pooled": head.pooled, "class_token": head.class_token, "distilled": head.distilled}
TEXT_HEADS = {layer: (False, layer) for layer in ("linear", "pooled", *mlp.ACTIVATIONS)}
FIRST = {"class_token": 1, "distilled": 2}  # tokens of a class head, before the patches


def word_head(tied: bool, layer: str) -> str:
    """text.head of words: whether the output matrix is the embedding, and what is before it."""
    return "+".join(filter(None, ("tied" if tied else "linear", layer)))


WORD_HEADS = {word_head(*one): one for one in itertools.product((False, True), ("", "bias", *mlp.ACTIVATIONS))}


class Model(NamedTuple):
    """A model as functions of its parameters.

    init(key, **numbers) -> params; or with a number, score_std=..., that is not the config's but one of several runs'
    apply(params, inputs, *, mask, key_B=None, maps=False, over=layout.ONE) -> (logits, aux)    (transformer.apply)
    start(params, prompt_BN, length_B, *, capacity, mask, over=layout.ONE) -> (logits_BW, cache)     (kv_cache.start)
    by_layer(params) -> the parameters for many steps                                             (kv_cache.by_layer)
    step(params, cache, w_B, n_B, *, mask) -> (logits_BW, cache)                                      (kv_cache.step)

    Of a sequence-to-sequence model (encoder_decoder.py) apply(params, source_BS, valid_BS, w_BN, ...) and
    start(params, source_BS, valid_BS, prompt_BN, length_B, *, capacity); they and step know their masks.
    """

    init: Callable
    apply: Callable
    start: Callable
    by_layer: Callable
    step: Callable


def language(m: config.Settings, *, answer: Any, W: int, N: int, output: str = "linear", C: int = 0) -> Model:
    """A model of words: `answer` is the head, output is text.head. C: classes, of the heads that answer with classes;
    'pooled' is then the mean of all words."""
    config.at_least(0, {"model.segments": m.segments, "model.E": m.E})
    names, batch = TEXT_HEADS if C else WORD_HEADS, m.norm.startswith("batch")
    (tied, layer), answer = by_name.choose("head", output, names), head.pooled if output == "pooled" else answer
    activation = mlp.ACTIVATIONS.get(layer)
    if m.E and (batch or tied and not activation):
        wrong = f"another model.norm than {m.norm}" if batch else "text.head = linear, or with a layer, as tied+gelu"
        raise errors.UserError(f"model.E = {m.E} needs {wrong}")
    if answer is head.first_word:
        answer = head.first_word_of(activation) if activation else head.class_token
    more = {"C": C} if C else {"W": W, "bias": "b_W"} if layer == "bias" else {"W": W}
    made = sized(answer, **more)
    if activation and not C:
        if batch:
            raise errors.UserError(f"text.head = {output} has a norm without statistics: choose another model.norm")
        init = functools.partial(head.transformed_init, made.init, norm=variants.choose(m, "norm"), E=m.E)
        made = made._replace(init=init)
    words = sized(embed.words, W=W, J=m.segments)
    return build(m, embed=words, head=made, N=N, transform=activation, tied_output=tied, E=m.E)


def sized(choice: variant.Variant, **sizes: Any) -> variant.Variant:
    """The variant whose init knows these sizes."""
    return choice._replace(init=functools.partial(choice.init, **sizes))


def vision(m: config.Settings, *, answer: str, Y: int, X: int, Z: int, patch: int, C: int) -> Model:
    """A model of images of Y x X pixels and Z channels. Raises UserError for a patch that does not divide them."""
    N, P = patches(Y, X, Z, patch=patch)
    output = sized(by_name.choose("head", answer, CLASS_HEADS), C=C)
    first = FIRST.get(answer, 0)
    return build(m, embed=sized(embed.patches, P=P), head=output, N=N + first, class_token=first)


def patches(Y: int, X: int, Z: int, *, patch: int) -> tuple[int, int]:
    """(N, P): the patches of an image, and the values of one. Raises UserError for a patch that does not divide it."""
    if patch < 1 or Y % patch or X % patch:
        raise errors.UserError(
            f"images of {Y} x {X} pixels do not divide into patches of {patch} x {patch} (image.patch)"
        )
    return (Y // patch) * (X // patch), patch * patch * Z


def encoder_decoder(m: config.Settings, *, W: int, N: int, tied_output: bool, output_bias: bool = False) -> Model:
    """The encoder-decoder that the section `m` describes, M layers each, for up to N tokens on either side."""
    check_causal(m)
    words, output = sized(embed.words, W=W), sized(head.next_word, W=W, **({"bias": "b_W"} if output_bias else {}))
    return build(m, embed=words, head=output, N=N, cross=True, tied_output=tied_output)


def build(
    m: config.Settings,
    *,
    embed: variant.Variant,
    head: variant.Variant,
    N: int,
    transform: Callable | None = None,
    cross: bool = False,
    **tree: int,
) -> Model:
    """The model that the section `m` describes, for up to N tokens. transform: the activation before the output matrix.
    tree: class_token, tied_output, E (transformer.init). cross: an encoder-decoder. UserError: a wrong name or size."""
    config.at_least(0, {"model.window": m.window})
    if isinstance(m, config.Settings) and m.window >= N and not endless(m, N=N):  # published models may say it
        raise errors.UserError(f"model.window = {m.window} hides none of {N} tokens: choose less, or 0 for no window")
    dtype = by_name.choose("compute_dtype", m.compute_dtype, DTYPES)
    by_name.choose("remat", m.remat, transformer.REMAT)
    by_name.choose("bias", m.bias, block.BIASES)
    inner = block_parts(m, cross=cross)
    if variants.split("norm", m.norm)[0] == "batch_features":
        inner = inner._replace(norm=sized(inner.norm, N=N))
    parts = transformer.Parts(embed, variants.choose(m, "position"), inner, head)
    parts = parts._replace(cap=m.output_cap, **({"transform": transform} if transform else {}))
    call = {"parts": parts, "dtype": dtype, "remat": m.remat, "unroll": m.remat == "none" or 1, "share": m.share}
    config.at_least(1, {"model.share": m.share})
    batch = m.norm.startswith("batch")
    if m.M % m.share or m.share > 1 and batch:
        wrong = f"another model.norm than {m.norm}" if batch else f"to divide model.M = {m.M}"
        raise errors.UserError(f"model.share = {m.share} needs {wrong}")
    first, last = by_name.choose("outer_norm", m.outer_norm, OUTER_NORMS)
    if first and cross:
        raise errors.UserError(f"model.outer_norm = {m.outer_norm} needs a single sequence: here it is last or none")
    tree |= sizes(m) | {"share": m.share, "skips": m.skips, "N": N, "final_norm": last, "bias": m.bias}
    tree |= {} if cross else {"embed_norm": first, "value_embedding": m.value_embedding}
    for name, holds, right in (
        ("value_embedding", cross or embed.apply is not WORDS, "words alone as the input of a single sequence"),
        ("value_embedding", m.value not in LOW_RANK, f"model.value = {' or '.join(LOW_RANK)}"),
        ("output_cap", head.apply is PIXELS, "words or classes for an answer"),
        ("skips", m.M < 2, "model.M of at least 2"),
        ("skips", m.share > 1, "model.share = 1"),
        ("window", cross, "a single sequence"),
    ):
        if getattr(m, name) and holds:
            raise errors.UserError(f"model.{name} needs {right}")
    whole, one_by_one = (seq2seq, seq2seq) if cross else (transformer, kv_cache)

    def initial(key: jax.Array, **numbers: Any) -> dict:
        own = parts._replace(block=parts.block._replace(**numbers))
        params = whole.init(key, parts=own, **tree)
        scales = {name for name in ("score_std", "output_std") if name in numbers or getattr(m, name) != 1}
        variants.check_scales(m, scales, params, OUTPUTS)
        return params if m.output_std == 1 else initials.scaled(params, m.output_std, OUTPUTS)

    def on(over: layouts.Layout, *, maps: bool = False) -> dict:
        """How it is computed on such devices. Maps are made by the way that forms them."""
        product = getattr(parts.block.attention.score, "logits", None) is None
        compute = explicit.attention if maps or not product else parts.block.attention.compute
        if product and (over.sequence or compute is flash.attention):
            compute = attention.on(over.platform, dtype, shared=bool(over.sequence), cap=m.cap)
        own = parts.block.attention._replace(compute=compute)
        changed = {"parts": parts._replace(block=parts.block._replace(attention=own)), "layout": over}
        # Written out, XLA:CPU would gather the weights of all layers at once, and deep models compile long.
        deep = m.M > (SHALLOW if over.platform in ("", "cpu") else WRITTEN_OUT)
        if over.fsdp or deep:
            changed["unroll"] = 1
        return call | changed

    def applied(*arrays: Any, maps: bool = False, over: layouts.Layout = layouts.ONE, **options: Any) -> Any:
        """over: the devices that share the model (inside shard_map)."""
        return whole.apply(*arrays, **on(over, maps=maps), maps=maps, **options)

    def start(*arrays: Any, over: layouts.Layout = layouts.ONE, **options: Any) -> Any:
        """over: of one device, whose platform may have a kernel for the prompts."""
        return one_by_one.start(*arrays, **on(over), **options)

    by_layer = functools.partial(kv_cache.by_layer, dtype=dtype)
    return Model(initial, applied, start, by_layer, functools.partial(one_by_one.step, **call))


def block_parts(m: config.Settings, *, cross: bool = False) -> block.Parts:
    """The function for each place of a block, by its name in the config. cross: some attend to another sequence."""
    config.at_least(0, {f"model.{n}": getattr(m, n) for n in "dropout score_std output_std cap output_cap".split()})
    if m.dropout >= 1:
        raise errors.UserError(f"model.dropout must be less than 1, and {m.dropout} is not")
    if m.score.removesuffix(variants.NOSELF) in CUTS and m.D != m.H * m.K:
        raise errors.UserError(
            f"model.score = {m.score} cuts a token into heads: model.D = {m.D} must be model.H x model.K = "
            f"{m.H} x {m.K}"
        )
    chosen = variants.checked(m, sizes(m), cross=cross)
    if m.norm.startswith("none:") and not getattr(chosen["score"], "normed", False):
        raise errors.UserError(f"model.norm = {m.norm}: nothing uses the number after the colon. Choose none")
    if getattr(chosen["score"], "normed", False):
        own = functools.partial(chosen["score"].apply, eps=variants.eps(m))
        chosen["score"] = chosen["score"]._replace(apply=own)
    own = heads.Parts(
        score=chosen["score"],
        value=chosen["value"],
        relative_position=chosen["relative_position"],
        compute=by_name.choose("attention", m.attention, attention.IMPLEMENTATIONS),
        scale=by_name.choose("scale", m.scale, score.SCALES),
        H=m.H,
        itself=getattr(chosen["score"], "itself", True),
        cap=m.cap,
    )
    order = by_name.choose("block", m.block, block.ORDERS)
    return block.Parts(own, chosen["norm"], chosen["mlp"], order, variants.eps(m), m.dropout, m.score_std)


def sizes(m: config.Settings) -> dict[str, int]:
    """The sizes M, D, H, K, F, checked, and G with them."""
    numbers = {letter: getattr(m, letter) for letter in "MDHKF"}
    config.at_least(1, {f"model.{letter}": n for letter, n in {**numbers, "G": m.G}.items()})
    if m.H % m.G:
        raise errors.UserError(f"model.G = {m.G} heads of keys and values do not divide model.H = {m.H} heads")
    if m.D % m.H and m.K == m.D // m.H:
        raise errors.UserError(
            f"model.D = {m.D} is not divisible by model.H = {m.H} heads: choose one that is, or set model.K"
        )
    return numbers


def check_causal(m: config.Settings) -> None:
    """UserError for a norm that a causal model cannot have."""
    if getattr(variants.choose(m, "norm"), "whole", False):
        raise errors.UserError(
            f"model.norm = {m.norm} needs all tokens of a sequence at once, and a causal model sees those before alone:"
            " choose another norm"
        )


def mean_of_words(answer_BNC: jax.Array, valid_BN: jax.Array) -> jax.Array:
    """Return answer_BC, the mean over the words that are no padding: what their mean would answer."""
    valid_BN1 = valid_BN[..., None]
    return jnp.where(valid_BN1, answer_BNC, 0).sum(1) / valid_BN1.sum(1)


def masked(m: config.Settings, who: mask.Mask | None) -> mask.Mask | None:
    """The mask of an experiment, and beside it the sliding window that the config asks for (model.window; 0: none)."""
    if not m.window:
        return who
    near = mask.window(m.window)
    return near if who is None else mask.both(who, near)


def endless(m: config.Settings, *, N: int) -> bool:
    """Whether the KV cache serves texts beyond the context of N: each token sees those of a window, and how far they
    are away, both as in training. (Without a window, keys that saw what has left the context would mislead.)"""
    return 0 < m.window <= N and m.position == "none" and not by_name.CODE.fullmatch(m.relative_position)


def layout(m: config.Settings, devices: Any, *, W: int = 0, N: int = 0, head: str = "") -> layouts.Layout:
    """How the model that `m` describes is shared over a mesh. W: its words; N, head: its patches and class head. Raises
    UserError for what cannot be shared so, with the reason."""
    over, size, parts = mesh.layout(devices, W=W), devices.shape, block_parts(m)
    sequence, tensor = size.get(over.sequence, 1), size.get(over.tensor, 1)
    rooms = {"mlp": parts.mlp, "value": parts.attention.value}
    whole = [f'model.{name} = "{getattr(m, name)}"' for name, own in rooms.items() if not getattr(own, "shared", False)]
    for holds, reason in (
        (
            over.sequence and head in FIRST,
            "the class token is no part of the image that devices could share: choose image.head = pooled, or "
            "mesh.sequence = 1",
        ),
        (
            over.sequence and getattr(parts.attention.score, "logits", None),
            f"model.score = {m.score} is no product of queries and keys, and needs all keys: mesh.sequence must be 1",
        ),
        (
            over.sequence and variants.split("norm", m.norm)[0] == "batch_features",
            "model.norm = batch_features keeps statistics of each position: mesh.sequence must be 1",
        ),
        (N % sequence, f"{N} patches do not divide evenly over mesh.sequence = {sequence}"),
        (m.H % tensor, f"model.H = {m.H} heads do not divide evenly over mesh.tensor = {tensor}"),
        (m.G % tensor, f"model.G = {m.G} heads of keys and values do not divide evenly over mesh.tensor = {tensor}"),
        (
            over.tensor and m.score.removesuffix(variants.NOSELF) in CUTS,
            f"model.score = {m.score} cuts whole tokens into heads, and devices would have to share those: "
            "mesh.tensor must be 1",
        ),
        (
            over.tensor and m.value_embedding,
            "model.value_embedding is one table for the words and heads of all devices: mesh.tensor must be 1",
        ),
        (
            over.tensor and whole,
            f"{(*whole, '')[0]} does not say `shared`, that it takes the layout of the devices over which it would "
            "have to be added up: mesh.tensor must be 1",
        ),
    ):
        if holds:
            raise errors.UserError(reason)
    return over


def probe(m: config.Settings) -> Callable | None:
    """params -> {"symmetry/1": number, ...}: how symmetric and directional the scores of each layer are (symmetry.py).
    symmetry is the mean over heads; symmetry_sum and directionality are of the sum over heads. In an encoder-decoder
    the names are symmetry/encoder/1, ... None where scores have no bilinear form."""
    look = symmetries(m)

    def numbers(params: Any) -> dict[str, jax.Array]:
        measures = {}
        for part, of in look(params).items():
            mean_M = symmetry.mean(of.symmetry_H, axis=-1)
            named = {"symmetry": mean_M, "symmetry_sum": of.symmetry, "directionality": of.directionality}
            measures |= {f"{name}/{part}{i + 1}": x_M[i] for name, x_M in named.items() for i in range(len(x_M))}
        return measures

    return look and numbers


def symmetries(m: config.Settings) -> Callable[[Any], dict[str, symmetry.Layer]] | None:
    """params -> what is measured of the scores among the tokens themselves, of all layers, by the part of the model.
    The parts are 'encoder/' and 'decoder/', or ''. None where scores have no bilinear form, or do not tell it."""
    factors = getattr(variants.choose(m, "score"), "factors", None)

    def look(params: Any) -> dict[str, symmetry.Layer]:
        sides = {f"{side}/": params[side] for side in ("encoder", "decoder") if side in params} or {"": params}
        scores = {part: trunk["blocks"]["score"] for part, trunk in sides.items()}
        return {part: symmetry.layers(of, factors, M=m.M // m.share, D=m.D) for part, of in scores.items()}

    return factors and look

"""From the `model` section of a config to pure functions of `tfm`: names become variants, sizes become keywords."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from experiments import variants
from experiments.engine import by_name, config, errors, mesh
from experiments.engine import step as steps
from tfm import attention, block, embed, head, loss, norm, shapes, symmetry, transformer
from tfm import encoder_decoder as seq2seq
from tfm import layout as layouts
from tfm.attention import explicit, mask, relative_position, score
from tfm.decode import kv_cache

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
MOST_UNROLLED = 512  # layers written out in a program
# Layers that are written out for a TPU unless model.unroll says otherwise. libtpu 0.0.50 compiles one in 5 s, for each
# of step and evaluation; of four layers in a loop it expects a step to take 1.5 times as long (causal_lm, llama; v5e).
WRITTEN_OUT = 4
OUTPUTS = ("Uo_HDK", "V_HDD", "W2_DF")  # the last matrix of attention and of the MLP
CLASS_HEADS = {"pooled": head.pooled, "class_token": head.class_token}


class Model(NamedTuple):
    """A model as functions of its parameters.

    init(key, **numbers) -> params    (from_numbers)
    apply(params, inputs, *, mask, key_B=None, maps=False, over=layout.ONE) -> (logits, seen)    (transformer.apply)
    start(params, prompt_BN, length_B, *, capacity, mask) -> (logits_BW, cache)       (kv_cache.start)
    step(params, cache, w_B, n_B, *, mask) -> (logits_BW, cache)                  (kv_cache.step)
    """

    init: Callable
    apply: Callable
    start: Callable
    step: Callable


class Seq2Seq(NamedTuple):
    """A sequence-to-sequence model as functions of its parameters.

    init(key, **numbers) -> params    (from_numbers)
    apply(params, source_BS, valid_BS, w_BN, *, key_B=None, maps=False, over=layout.ONE) -> (logits_BNW, seen)
    start(params, source_BS, valid_BS, prompt_BN, length_B, *, capacity) -> (logits_BW, cache)
    step(params, cache, w_B, n_B) -> (logits_BW, cache)
    """

    init: Callable
    apply: Callable
    start: Callable
    step: Callable


def language(m: config.Settings, *, answer: Any, W: int, N: int, tied_output: bool, transform: bool = False) -> Model:
    """A model of words: `answer` is the head. transform: one more layer before the output matrix, as BERT has."""
    if transform and m.norm == "batch":
        raise errors.UserError("text.transform has a norm without running statistics: choose another model.norm")
    config.at_least(0, {"model.segments": m.segments})
    size = {"W": W}
    if m.segments:
        size["J"] = m.segments
    head_init = functools.partial(answer.init, W=W)
    return build(
        m,
        embed_init=functools.partial(embed.words.init, **size),
        embed_apply=embed.words.apply,
        head_init=functools.partial(with_transform, head_init, design(m).norm) if transform else head_init,
        head_apply=answer.apply,
        N=N,
        tied_output=tied_output,
    )


def with_transform(head_init: Callable, norm: Any, key: Any, *, D: int) -> dict:
    """The parameters of a head that begins with BERT's transform, and has a bias for each word."""
    made = head_init(key, D=D)
    W = made["G_WD"].shape[0]
    return made | {"b_W": jnp.zeros(W), "transform": head.transform_init(key, D=D, norm=norm)}


def vision(m: config.Settings, *, answer: str, Y: int, X: int, Z: int, patch: int, C: int) -> Model:
    """A model of images of Y x X pixels and Z channels. Raises UserError for a patch that does not divide them."""
    _, P = patches(Y, X, Z, patch=patch)
    chosen = by_name.choose("head", answer, CLASS_HEADS)
    return build(
        m,
        embed_init=functools.partial(embed.patches.init, P=P),
        embed_apply=embed.patches.apply,
        head_init=functools.partial(chosen.init, C=C),
        head_apply=chosen.apply,
        N=image_tokens(Y, X, patch=patch, answer=answer),
        class_token=answer == "class_token",
    )


def patches(Y: int, X: int, Z: int, *, patch: int) -> tuple[int, int]:
    """(N, P): the patches of an image, and the values of one. Raises UserError for a patch that does not divide it."""
    if patch < 1 or Y % patch or X % patch:
        raise errors.UserError(
            f"images of {Y} x {X} pixels do not divide into patches of {patch} x {patch} (image.patch)"
        )
    return (Y // patch) * (X // patch), patch * patch * Z


def image_tokens(Y: int, X: int, *, patch: int, answer: str) -> int:
    """Tokens of one image, the class token included."""
    return (Y // patch) * (X // patch) + (answer == "class_token")


def build(
    m: config.Settings,
    *,
    embed_init: Callable,
    embed_apply: Callable,
    head_init: Callable,
    head_apply: Callable,
    N: int,
    class_token: bool = False,
    tied_output: bool = False,
) -> Model:
    """The model that the section `m` describes, for up to N tokens. Raises UserError for a wrong name or size."""
    config.at_least(0, {"model.window": m.window})
    parts = {"design": design(m), "position": positions(m)}
    init = from_numbers(
        transformer.init,
        **sizes(m),
        **parts,
        output_std=m.output_std,
        N=N,
        embed_init=embed_init,
        head_init=head_init,
        final_norm=m.final_norm,
        embed_norm=m.embed_norm,
        class_token=class_token,
        tied_output=tied_output,
        bias=m.bias,
    )
    call = {"embed_apply": embed_apply, "head_apply": head_apply, **parts, **computing(m)}
    return Model(
        init,
        seeing(transformer.apply, call, M=m.M),
        functools.partial(kv_cache.start, **call),
        functools.partial(kv_cache.step, **call),
    )


def encoder_decoder(m: config.Settings, *, W: int, N: int, tied_output: bool) -> Seq2Seq:
    """The encoder-decoder that the section `m` describes, M layers each, for up to N tokens on either side."""
    if m.norm == "instance":
        raise errors.UserError("model.norm = instance looks at later tokens: a decoder needs another norm")
    parts = {"design": design(m, cross=True), "position": positions(m)}
    init = from_numbers(
        seq2seq.init,
        **sizes(m),
        **parts,
        output_std=m.output_std,
        N=N,
        embed_init=functools.partial(embed.words.init, W=W),
        head_init=functools.partial(head.next_word.init, W=W),
        final_norm=m.final_norm,
        tied_output=tied_output,
        bias=m.bias,
    )
    call = {"embed_apply": embed.words.apply, "head_apply": head.next_word.apply, **parts, **computing(m)}
    return Seq2Seq(
        init,
        seeing(seq2seq.apply, call, M=m.M),
        functools.partial(seq2seq.start, **call),
        functools.partial(seq2seq.step, **call),
    )


def word_measures(logits_BNW: jax.Array, batch: dict, over: layouts.Layout) -> steps.Ratios:
    """Loss and accuracy at every token that is asked for (target_BN, weight_BN), whatever devices share the words."""
    answer = logits_BNW, batch["target_BN"], batch["weight_BN"]
    measures = {steps.LOSS: loss.cross_entropy, "accuracy": loss.accuracy}
    return {name: of(*answer, vocab=over.vocab) for name, of in measures.items()}


def from_numbers(init: Callable, *, design: block.Design, output_std: float = 1.0, **arguments: Any) -> Callable:
    """(key) -> params; or (key, score_std=...), where that number is not the config's but one of several runs'."""

    def made(key: jax.Array, **numbers: Any) -> dict:
        return scaled_outputs(init(key, design=design._replace(**numbers), **arguments), output_std)

    return made


def scaled_outputs(params: dict, factor: float) -> dict:
    """The parameters with a factor on the matrices whose products are added to the tokens."""

    def times(path: Any, leaf: jax.Array) -> jax.Array:
        return factor * leaf if shapes.names(path)[-1] in OUTPUTS else leaf

    return params if factor == 1 else jax.tree_util.tree_map_with_path(times, params)


def probe(m: config.Settings) -> Callable | None:
    """params -> {"symmetry/1": number, ...}: how symmetric and directional the scores of each layer are (symmetry.py).

    symmetry is the mean over heads; symmetry_sum and directionality are of the sum over heads. In an encoder-decoder
    the names are symmetry/encoder/1, ... None where scores have no bilinear form.
    """
    look = symmetries(m)
    if look is None:
        return None

    def numbers(params: Any) -> dict[str, jax.Array]:
        found = {}
        for part, of in look(params).items():
            mean_M = symmetry.mean(of.symmetry_H, axis=-1)
            named = {"symmetry": mean_M, "symmetry_sum": of.symmetry, "directionality": of.directionality}
            found |= {f"{name}/{part}{i + 1}": x_M[i] for name, x_M in named.items() for i in range(len(x_M))}
        return found

    return numbers


def symmetries(m: config.Settings) -> Callable[[Any], dict[str, symmetry.Layer]] | None:
    """params -> what is measured of the scores among the tokens themselves, of all layers, by the part of the model.

    The parts are 'encoder/' and 'decoder/', or ''. None where scores have no bilinear form, or do not tell it.
    """
    factors = getattr(variants.choose(m, "score"), "factors", None)
    if factors is None:
        return None

    def look(params: Any) -> dict[str, symmetry.Layer]:
        sides = {f"{side}/": params[side] for side in ("encoder", "decoder") if side in params}
        parts = {part: trunk["blocks"]["score"] for part, trunk in (sides or {"": params}).items()}
        return {part: symmetry.layers(of, factors, M=m.M, D=m.D) for part, of in parts.items()}

    return look


def seeing(apply: Callable, call: dict, *, M: int) -> Callable:
    """`apply` with these arguments; where the weights are asked for, computed in the way that forms them.

    over: the devices that share the model (inside shard_map).
    """

    def applied(*arrays: Any, maps: bool = False, over: layouts.Layout = layouts.ONE, **options: Any) -> Any:
        design = call["design"]._replace(compute=explicit.attention) if maps else call["design"]
        return apply(*arrays, **call | shared(call, design, over, M=M), maps=maps, **options)

    return applied


def shared(call: dict, design: block.Design, over: layouts.Layout, *, M: int) -> dict[str, Any]:
    """The arguments of `call` that change where devices share the model."""
    changed = {"design": design._replace(layout=over)}
    # Written out, XLA:CPU would gather the weights of all layers at once, and deep models compile for minutes on TPU.
    if call["unroll"] is True and (over.fsdp or (over.platform == "tpu" and M > WRITTEN_OUT)):
        changed["unroll"] = 1
    if over.sequence:
        own_norm = norm.instance_over(over.sequence) if design.norm is norm.instance else design.norm
        changed["design"] = changed["design"]._replace(compute=attention.IMPLEMENTATIONS["flash"], norm=own_norm)
        if call["head_apply"] is head.pooled.apply:
            changed["head_apply"] = functools.partial(head.pooled.apply, sequence=over.sequence)
    return changed


def layout(m: config.Settings, devices: Any, *, W: int = 0, N: int = 0, head: str = "") -> layouts.Layout:
    """How the model that `m` describes is shared over a mesh. W: its words; N, head: its patches and class head.

    Raises UserError for what cannot be shared so, with the reason.
    """
    over, size = mesh.layout(devices, W=W), devices.shape
    if over.sequence and m.attention == "fused":
        raise errors.UserError("model.attention = fused needs whole sequences: choose flash, or mesh.sequence = 1")
    if over.sequence and head == "class_token":
        raise errors.UserError(
            "the class token is no part of the image that devices could share: choose image.head = pooled, or "
            "mesh.sequence = 1"
        )
    if over.sequence and N % size[over.sequence]:
        raise errors.UserError(f"{N} patches do not divide evenly over mesh.sequence = {size[over.sequence]}")
    if over.tensor and m.H % size[over.tensor]:
        raise errors.UserError(f"model.H = {m.H} heads do not divide evenly over mesh.tensor = {size[over.tensor]}")
    if over.tensor and m.score == "identity_query":
        raise errors.UserError(
            "model.score = identity_query cuts whole tokens into heads, and devices would have to share those: "
            "mesh.tensor must be 1"
        )
    parts = design(m)
    for name, function in (("mlp", parts.mlp.apply), ("value", parts.value.combine)):
        if over.tensor and "tensor" not in inspect.signature(function).parameters:
            raise errors.UserError(
                f'model.{name} = "{getattr(m, name)}" does not take the argument `tensor`, the mesh axis over which it '
                "would have to be added up: mesh.tensor must be 1"
            )
    return over


def sizes(m: config.Settings) -> dict[str, int]:
    """The sizes M, D, H, K, F, checked."""
    found = {letter: getattr(m, letter) for letter in "MDHKF"}
    config.at_least(1, {f"model.{letter}": n for letter, n in found.items()})
    if m.D % m.H and m.K == m.D // m.H:
        raise errors.UserError(
            f"model.D = {m.D} is not divisible by model.H = {m.H} heads: choose one that is, or set model.K"
        )
    return found


def computing(m: config.Settings) -> dict[str, Any]:
    """How it is computed: dtype, rematerialisation, unrolled layers."""
    config.at_least(0, {"model.unroll": m.unroll})
    if min(m.unroll or m.M, m.M) > MOST_UNROLLED:
        raise errors.UserError(
            f"model.unroll = {m.unroll} would write out {min(m.unroll or m.M, m.M)} layers, and compiling would not end"
            f" soon: at most {MOST_UNROLLED} are possible, and model.unroll = 1 makes a loop of any number"
        )
    dtype = by_name.choose("compute_dtype", m.compute_dtype, DTYPES)
    return {
        "dtype": None if dtype is jnp.float32 else dtype,
        "remat": m.remat,
        "unroll": m.unroll or (1 if m.remat else True),
    }


def design(m: config.Settings, *, cross: bool = False) -> block.Design:
    """The function for each place of a block, by its name in the config. cross: some attend to another sequence."""
    config.at_least(0, {"model.eps": m.eps, "model.dropout": m.dropout, "model.score_std": m.score_std})
    config.at_least(0, {"model.output_std": m.output_std})
    if m.dropout >= 1:
        raise errors.UserError(f"model.dropout must be less than 1, and {m.dropout} is not")
    if m.diagonal not in ("keep", "exclude"):
        raise errors.UserError(f'unknown diagonal "{m.diagonal}"; the right ones are: keep, exclude')
    chosen = {name: variants.choose(m, name) for name in ("score", "value", "relative_position", "norm", "mlp")}
    if m.score == "identity_query" and m.D != m.H * m.K:
        raise errors.UserError(
            f"model.score = identity_query cuts a token into heads: model.D = {m.D} must be model.H x model.K = "
            f"{m.H} x {m.K}"
        )
    variants.check(m, chosen, sizes(m), cross=cross)
    if m.relative_position in variants.ROTARY:
        chosen["relative_position"] = relative_position.rotary_of(
            m.rotary_base, halves=m.relative_position == "rotary_halves"
        )
    return block.Design(
        **chosen,
        order=by_name.choose("block", m.block, block.ORDERS),
        compute=by_name.choose("attention", m.attention, attention.IMPLEMENTATIONS),
        scale=by_name.choose("scale", m.scale, score.SCALES),
        H=m.H,
        eps=m.eps,
        dropout=m.dropout,
        itself=m.diagonal == "keep" and getattr(chosen["score"], "itself", True),
        score_std=m.score_std,
    )


def positions(m: config.Settings) -> Any:
    """The code that says in a token where it stands."""
    chosen = variants.choose(m, "position")
    variants.check(m, {"position": chosen}, sizes(m))
    return chosen


def masked(m: config.Settings, who: mask.Mask | None) -> mask.Mask | None:
    """The mask of an experiment, and beside it the sliding window that the config asks for (model.window; 0: none)."""
    if not m.window:
        return who
    near = mask.window(m.window)
    return near if who is None else mask.both(who, near)

"""The transformer block: attention across tokens and an MLP across features, each with a residual connection (E13).

`Spec` holds the function for each stage. The parameter tree decides which optional parts a block has: biases if the
tree has bias leaves, cross-attention if it has `score_cross` and `value_cross` (E26).
"""

import collections
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tfm import initial, layout as layouts, norm, variant
from tfm.attention import heads as attentions
from tfm.attention.heads import Call


class Order(NamedTuple):
    """The order of a block's stages, as a function apply(params, x_BND, spec, call) -> (x_BND, aux).

    residual: True if the output of each stage is added to its input. aux is a dict of dicts, which the stages fill.
    "cache": {"self", and in a decoder "cross"}, the keys and values, if call.keep or call.cache. "running": the batch
    statistics of norms with running averages, in training. "measures": the sums of the measures of all stages. "look":
    {name: activation} for the names in call.look:

    * q, k: queries and keys of the heads (B, H, N, K); v: their values (B, H, N, V); k and v may have fewer heads
    * A: attention weights (B, H, N, S); A_cross: those of cross-attention, in a decoder
    * y: the averages of the values, of each head (B, H, N, V), before the last matrix of attention
    * attention, mlp: what these stages return (B, N, D); hidden: the tokens after the block (B, N, D)

    call.edit replaces the activations of these names.
    """

    apply: Callable
    residual: bool = True


class Spec(NamedTuple):
    """The function for each stage of a block, and the block's hyperparameters."""

    attention: attentions.Spec
    norm: norm.Norm
    mlp: variant.Variant
    order: Order
    eps: float = 1e-5  # inside the root of the norms
    dropout: float = 0.0  # probability that an element of a stage's output is set to 0 in training
    score_std: float | jax.Array = 1.0  # factor on the initial values of the score's matrices (Score.inner)
    output_std: float = 1.0  # factor on those of the last matrices of value and MLP (Value.output, Variant.output)


# Values of `bias`, and the stages that then have biases. "output" is the bias bo_D of attention.
BIASES = {
    "all": ("score", "value", "output", "mlp"),
    "none": (),
    "attention": ("score", "value", "output"),
    "mlp": ("mlp",),
    "qkv": ("score", "value"),
}


def has_bias(stage: str, bias: bool | str) -> bool:
    """Return whether this stage has biases. bias: a key of BIASES, or True for all stages and False for none."""
    return bias if isinstance(bias, bool) else stage in BIASES[bias]


def init(key: jax.Array, *, M: int, N: int, spec: Spec, bias: bool | str, cross: bool = False, **sizes: int) -> dict:
    """Return the parameters of one block. sizes: D, H, K and F.

    M: number of layers of the model, which sets the initial scale of the output projections, 1/sqrt(2 M). N: largest
    number of tokens. bias: see `has_bias`. cross: add cross-attention.
    """
    attention, params, (D, H, K, F) = spec.attention, {}, (sizes[letter] for letter in "DHKF")
    M = M if spec.order.residual else 0.5  # without residual connections no sum grows with M, so 1/sqrt(2 M) = 1

    def add(name: str, stage: Any, **sizes: Any) -> None:
        params[name] = stage.init(initial.key(key, name), **sizes)

    for suffix in ("", "_cross") if cross else ("",):
        add(f"norm{suffix or 1}", spec.norm, D=D)
        add(f"score{suffix}", attention.score, H=H, K=K, D=D, bias=has_bias("score", bias))
        add(f"value{suffix}", attention.value, H=H, K=K, D=D, M=M, bias=has_bias("value", bias))
        if not has_bias("output", bias):
            params[f"value{suffix}"].pop("bo_D", None)
        params[f"score{suffix}"] = initial.scaled(params[f"score{suffix}"], spec.score_std, attention.score.inner)
        params[f"value{suffix}"] = initial.scaled(params[f"value{suffix}"], spec.output_std, attention.value.output)
    add("relative_position", attention.relative_position, H=H, K=K, N=N)
    add("norm2", spec.norm, D=D)
    add("mlp", spec.mlp, D=D, F=F, M=M, bias=has_bias("mlp", bias))
    params["mlp"] = initial.scaled(params["mlp"], spec.output_std, spec.mlp.output)
    return params


def weigh_measures(spec: Spec) -> dict[str, float]:
    """Return {name: its weight in the loss} of the measures of all stages (variant.py).

    Raises ValueError if two stages give the same name different weights.
    """
    weights: dict[str, float] = {}
    for stage in (spec.attention.score, spec.attention.value, spec.norm, spec.mlp):
        for name, weight in dict(stage.measures).items():
            if weights.setdefault(name, weight) != weight:
                raise ValueError(
                    f"two stages give the measure {name} the weights {weights[name]} and {weight}. "
                    "Make the weights equal or rename one measure"
                )
    return weights


def pre_norm(params: dict, x_BND: jax.Array, spec: Spec, call: Call) -> tuple[jax.Array, dict]:
    """Return X' and aux: Y = X + MHSA(LN(X)); X' = Y + MLP(LN(Y)) (Turner 2023; E18).

    A decoder has cross-attention in between: Z = Y + MHCA(LN(Y), memory) (E26). aux: what the stages record (`Order`).
    """
    aux: dict = collections.defaultdict(dict)
    normed_BND = normalise("norm1", params["norm1"], x_BND, spec, call, aux)
    y_BND = attentions.self_attention(params, normed_BND, spec.attention, call, aux)
    x_BND = x_BND + dropout("attention", y_BND, spec, call)
    if "score_cross" in params:
        normed_BND = normalise("norm_cross", params["norm_cross"], x_BND, spec, call, aux)
        y_BND = attentions.cross_attention(params, normed_BND, spec.attention, call, aux)
        x_BND = x_BND + dropout("cross", y_BND, spec, call)
    normed_BND = normalise("norm2", params["norm2"], x_BND, spec, call, aux)
    y_BND = feed_forward(params, normed_BND, spec, call, aux)
    x_BND = x_BND + dropout("mlp", y_BND, spec, call)
    return finish(x_BND, call, aux)


def post_norm(params: dict, x_BND: jax.Array, spec: Spec, call: Call) -> tuple[jax.Array, dict]:
    """Return X' and aux: Y = LN(X + MHSA(X)); X' = LN(Y + MLP(Y)) (Vaswani et al. 2017; E19).

    A decoder has cross-attention in between: Z = LN(Y + MHCA(Y, memory)) (E26). aux: what the stages record (`Order`).
    """
    aux: dict = collections.defaultdict(dict)
    y_BND = attentions.self_attention(params, x_BND, spec.attention, call, aux)
    y_BND = x_BND + dropout("attention", y_BND, spec, call)
    x_BND = normalise("norm1", params["norm1"], y_BND, spec, call, aux)
    if "score_cross" in params:
        y_BND = attentions.cross_attention(params, x_BND, spec.attention, call, aux)
        y_BND = x_BND + dropout("cross", y_BND, spec, call)
        x_BND = normalise("norm_cross", params["norm_cross"], y_BND, spec, call, aux)
    y_BND = feed_forward(params, x_BND, spec, call, aux)
    y_BND = x_BND + dropout("mlp", y_BND, spec, call)
    x_BND = normalise("norm2", params["norm2"], y_BND, spec, call, aux)
    return finish(x_BND, call, aux)


def plain(params: dict, x_BND: jax.Array, spec: Spec, call: Call) -> tuple[jax.Array, dict]:
    """Return X' and aux without residual connections: Y = MHSA(LN(X)); X' = MLP(LN(Y)).

    A decoder has cross-attention in between: Z = MHCA(LN(Y), memory). aux: what the stages record (`Order`).
    """
    aux: dict = collections.defaultdict(dict)
    normed_BND = normalise("norm1", params["norm1"], x_BND, spec, call, aux)
    y_BND = attentions.self_attention(params, normed_BND, spec.attention, call, aux)
    x_BND = dropout("attention", y_BND, spec, call)
    if "score_cross" in params:
        normed_BND = normalise("norm_cross", params["norm_cross"], x_BND, spec, call, aux)
        y_BND = attentions.cross_attention(params, normed_BND, spec.attention, call, aux)
        x_BND = dropout("cross", y_BND, spec, call)
    normed_BND = normalise("norm2", params["norm2"], x_BND, spec, call, aux)
    y_BND = feed_forward(params, normed_BND, spec, call, aux)
    x_BND = dropout("mlp", y_BND, spec, call)
    return finish(x_BND, call, aux)


ORDERS = {
    "pre_norm": Order(pre_norm),
    "post_norm": Order(post_norm),
    "plain": Order(plain, residual=False),
}


def feed_forward(params: dict, x_BND: jax.Array, spec: Spec, call: Call, aux: dict) -> jax.Array:
    """Return MLP(X) (E12). aux: receives measures and the activation "mlp"."""
    with jax.named_scope("mlp"):
        result = spec.mlp.apply(params["mlp"], x_BND, layout=call.layout)
        y_BND = variant.take_measures(spec.mlp, result, aux["measures"])
        return call.visit(aux["look"], "mlp", variant.check_shape(spec.mlp.apply, y_BND, x_BND))


def normalise(name: str, params: dict, x_BND: jax.Array, spec: Spec, call: Call, aux: dict) -> jax.Array:
    """Return LN(X) (E14-E17). params: of this norm. aux: receives the measures of the norm (variant.py).

    If the norm has running averages, training normalises with the statistics of the batch, which aux["running"][name]
    receives; evaluation with the averages in `params`.
    """
    if call.key_B is not None and spec.norm.observe is not None:
        aux["running"][name] = spec.norm.observe(x_BND, layout=call.layout)
        params = params | aux["running"][name]
    result = spec.norm.apply(params, x_BND, eps=spec.eps, layout=call.layout)
    normed_BND = variant.take_measures(spec.norm, result, aux["measures"])
    return variant.check_shape(spec.norm.apply, normed_BND, x_BND)


def finish(x_BND: jax.Array, call: Call, aux: dict) -> tuple[jax.Array, dict]:
    """Return the tokens after the block, edited if call.edit has "hidden", and aux; its "look" keeps call.look's names.

    Raises ValueError if call.look or call.edit has an unknown name.
    """
    activations = aux["look"]
    x_BND = call.visit(activations, "hidden", x_BND)
    for option, names in {"look": call.look, "edit": call.edit}.items():
        for name in names:
            if name not in activations:
                raise ValueError(f"{option} = {name!r} is not an activation. Choose from {', '.join(activations)}")
    return x_BND, {**aux, "look": {name: activations[name] for name in call.look}}


def dropout(name: str, x_BND: jax.Array, spec: Spec, call: Call) -> jax.Array:
    """Return x with each element 0 with probability p = spec.dropout, else divided by 1 - p (Srivastava et al. 2014).

    The zeros of a sequence depend only on its random key and the stage's name, not on other sequences, the number of
    devices or microbatches. If devices share a sequence, each device draws the full mask and slices its own tokens.
    Without keys (evaluation), or if p = 0, x is unchanged. Raises ValueError unless 0 <= p < 1.
    """
    if not 0 <= spec.dropout < 1:
        raise ValueError(f"dropout = {spec.dropout} is outside [0, 1). Choose a probability of at least 0 and below 1")
    if call.key_B is None or spec.dropout == 0:
        return x_BND
    (_, N, D), sequence = x_BND.shape, call.layout.sequence
    N = N * jax.lax.axis_size(sequence) if sequence else N
    draw = jax.vmap(lambda key: jax.random.bernoulli(key, 1 - spec.dropout, (N, D)))
    keep_BND = layouts.take_own_tokens(draw(fold_name(call.key_B, name)), call.layout)
    return jnp.where(keep_BND, x_BND / (1 - spec.dropout), 0)


def fold_name(key_B: jax.Array | None, name: str) -> jax.Array | None:
    """Return the random keys of the stage `name`, one for each sequence; None without keys."""
    return None if key_B is None else jax.vmap(lambda key: initial.key(key, name))(key_B)

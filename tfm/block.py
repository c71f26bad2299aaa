"""The transformer block: attention across tokens and an MLP across features, each with a residual connection (E13).

`Spec` says which function fills each place. What the tree holds decides the rest: biases if there are bias leaves,
cross-attention if there are `score_cross` and `value_cross` (E26).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tfm import initial, layout as layouts, norm, variant
from tfm.attention import heads, spec as attentions
from tfm.attention.spec import Call


class Order(NamedTuple):
    """How the stages of a block follow one another: `encoder`, and `decoder` with cross-attention, are functions
    (params, x_BND, spec, call) -> (x_BND, aux). residual: whether stages are added to the tokens."""

    encoder: Callable
    decoder: Callable
    residual: bool = True


class Spec(NamedTuple):
    """The function that fills each place of a block, and the numbers that go with them."""

    attention: attentions.Spec
    norm: norm.Norm
    mlp: variant.Variant
    order: Order
    eps: float = 1e-5  # inside the root of the norms
    dropout: float = 0.0  # share of a stage's output that is set to 0 in training
    score_std: float | jax.Array = 1.0  # factor on the initial scale of the score's matrices, the leaves U...


# What `bias` may be, and the stages that then have biases; the output is that of attention, b_o.
BIASES = {
    "all": ("score", "value", "output", "mlp"),
    "none": (),
    "attention": ("score", "value", "output"),
    "mlp": ("mlp",),
    "qkv": ("score", "value"),  # of queries, keys and values alone
}


def has_bias(stage: str, bias: bool | str) -> bool:
    """Return whether this stage has biases; `bias` is one of BIASES, or True for all and False for none."""
    return bias if isinstance(bias, bool) else stage in BIASES[bias]


def init(
    key: jax.Array, *, D: int, H: int, K: int, F: int, M: int, N: int, spec: Spec, bias: bool | str, cross=False
) -> dict:
    """Return the parameters of one block. M, the depth of the stack, sets the initial scale of the output projections.
    bias: one of BIASES. cross: with cross-attention."""
    attention, params = spec.attention, {}
    M = M if spec.order.residual else 0.5  # 1/sqrt(2 M) = 1 of a single stage, instead of 2 M terms of a sum

    def add(name: str, part: Any, **sizes: Any) -> None:
        params[name] = part.init(initial.key(key, name), **sizes)

    for suffix in ("", "_cross") if cross else ("",):
        add(f"norm{suffix or 1}", spec.norm, D=D)
        add(f"score{suffix}", attention.score, H=H, K=K, D=D, bias=has_bias("score", bias))
        add(f"value{suffix}", attention.value, H=H, K=K, D=D, M=M, bias=has_bias("value", bias))
        if not has_bias("output", bias):
            params[f"value{suffix}"].pop("bo_D", None)
        params[f"score{suffix}"] = initial.scaled(params[f"score{suffix}"], spec.score_std, "U")
    add("relative_position", attention.relative_position, H=H, K=K, N=N)
    add("norm2", spec.norm, D=D)
    add("mlp", spec.mlp, D=D, F=F, M=M, bias=has_bias("mlp", bias))
    return params


def apply(params: dict, x_BND: jax.Array, spec: Spec, call: Call) -> tuple[jax.Array, dict]:
    """Return the tokens after one block, and what it saw: `A` and `A_cross` (B, H, N, S) with call.maps, `cache` with
    call.keep or a cache, and `running`, the batch statistics of norms that keep running averages, in training."""
    run = spec.order.decoder if "score_cross" in params else spec.order.encoder
    return run(params, x_BND, spec, call)


def pre_norm(params: dict, x_BND: jax.Array, spec: Spec, call: Call) -> tuple[jax.Array, dict]:
    """Y = X + MHSA(LN(X)); X' = Y + MLP(LN(Y)) (Turner 2023; E18)."""
    normed_BND, norm1 = normalise(params["norm1"], x_BND, spec, call)
    attended_BND, seen = attend(params, normed_BND, spec, call)
    x_BND = x_BND + attended_BND
    normed_BND, norm2 = normalise(params["norm2"], x_BND, spec, call)
    return x_BND + feed_forward(params, normed_BND, spec, call), aux(call, seen, norm1=norm1, norm2=norm2)


def post_norm(params: dict, x_BND: jax.Array, spec: Spec, call: Call) -> tuple[jax.Array, dict]:
    """Y = LN(X + MHSA(X)); X' = LN(Y + MLP(Y)) (Vaswani et al. 2017; E19)."""
    attended_BND, seen = attend(params, x_BND, spec, call)
    x_BND, norm1 = normalise(params["norm1"], x_BND + attended_BND, spec, call)
    x_BND, norm2 = normalise(params["norm2"], x_BND + feed_forward(params, x_BND, spec, call), spec, call)
    return x_BND, aux(call, seen, norm1=norm1, norm2=norm2)


def plain(params: dict, x_BND: jax.Array, spec: Spec, call: Call) -> tuple[jax.Array, dict]:
    """Y = MHSA(LN(X)); X' = MLP(LN(Y)): without residual connections."""
    normed_BND, norm1 = normalise(params["norm1"], x_BND, spec, call)
    x_BND, seen = attend(params, normed_BND, spec, call)
    normed_BND, norm2 = normalise(params["norm2"], x_BND, spec, call)
    return feed_forward(params, normed_BND, spec, call), aux(call, seen, norm1=norm1, norm2=norm2)


def decoder_pre_norm(params: dict, x_BND: jax.Array, spec: Spec, call: Call) -> tuple[jax.Array, dict]:
    """Y = X + MHSA(LN(X)); Z = Y + MHCA(LN(Y), memory); X' = Z + MLP(LN(Z)) (E18, E26)."""
    normed_BND, norm1 = normalise(params["norm1"], x_BND, spec, call)
    attended_BND, seen = attend(params, normed_BND, spec, call)
    x_BND = x_BND + attended_BND
    normed_BND, norm_cross = normalise(params["norm_cross"], x_BND, spec, call)
    attended_BND, cross = attend_memory(params, normed_BND, spec, call)
    x_BND = x_BND + attended_BND
    normed_BND, norm2 = normalise(params["norm2"], x_BND, spec, call)
    x_BND = x_BND + feed_forward(params, normed_BND, spec, call)
    return x_BND, aux(call, seen, cross, norm1=norm1, norm_cross=norm_cross, norm2=norm2)


def decoder_post_norm(params: dict, x_BND: jax.Array, spec: Spec, call: Call) -> tuple[jax.Array, dict]:
    """Y = LN(X + MHSA(X)); Z = LN(Y + MHCA(Y, memory)); X' = LN(Z + MLP(Z)) (Vaswani et al. 2017; E19, E26)."""
    attended_BND, seen = attend(params, x_BND, spec, call)
    x_BND, norm1 = normalise(params["norm1"], x_BND + attended_BND, spec, call)
    attended_BND, cross = attend_memory(params, x_BND, spec, call)
    x_BND, norm_cross = normalise(params["norm_cross"], x_BND + attended_BND, spec, call)
    x_BND, norm2 = normalise(params["norm2"], x_BND + feed_forward(params, x_BND, spec, call), spec, call)
    return x_BND, aux(call, seen, cross, norm1=norm1, norm_cross=norm_cross, norm2=norm2)


def decoder_plain(params: dict, x_BND: jax.Array, spec: Spec, call: Call) -> tuple[jax.Array, dict]:
    """Y = MHSA(LN(X)); Z = MHCA(LN(Y), memory); X' = MLP(LN(Z)): without residual connections."""
    normed_BND, norm1 = normalise(params["norm1"], x_BND, spec, call)
    x_BND, seen = attend(params, normed_BND, spec, call)
    normed_BND, norm_cross = normalise(params["norm_cross"], x_BND, spec, call)
    x_BND, cross = attend_memory(params, normed_BND, spec, call)
    normed_BND, norm2 = normalise(params["norm2"], x_BND, spec, call)
    x_BND = feed_forward(params, normed_BND, spec, call)
    return x_BND, aux(call, seen, cross, norm1=norm1, norm_cross=norm_cross, norm2=norm2)


ORDERS = {
    "pre_norm": Order(pre_norm, decoder_pre_norm),
    "post_norm": Order(post_norm, decoder_post_norm),
    "plain": Order(plain, decoder_plain, residual=False),
}


def attend(params: dict, x_BND: jax.Array, spec: Spec, call: Call) -> tuple[jax.Array, dict]:
    """Return MHSA(X) with dropout (E8), and what it saw."""
    with jax.named_scope("attention"):
        y_BND, seen = heads.self_attention(params, x_BND, spec.attention, call)
        return dropout("attention", y_BND, spec, call), seen


def attend_memory(params: dict, x_BND: jax.Array, spec: Spec, call: Call) -> tuple[jax.Array, dict]:
    """Return MHCA(X, memory) with dropout (E26), and what it saw."""
    with jax.named_scope("cross"):
        cross = {"score": params["score_cross"], "value": params["value_cross"]}
        y_BND, seen = heads.cross_attention(cross, x_BND, spec.attention, call)
        return dropout("cross", y_BND, spec, call), seen


def feed_forward(params: dict, x_BND: jax.Array, spec: Spec, call: Call) -> jax.Array:
    """Return MLP(X) with dropout (E12)."""
    with jax.named_scope("mlp"):
        return dropout("mlp", spec.mlp.apply(params["mlp"], x_BND, layout=call.layout), spec, call)


def normalise(params: dict, x_BND: jax.Array, spec: Spec, call: Call) -> tuple[jax.Array, dict]:
    """Return LN(X) (E14-E17). In training a norm with running averages uses the statistics of the batch, which are
    returned as well."""
    statistics = {} if call.key_B is None else spec.norm.observe(x_BND, layout=call.layout)
    return spec.norm.apply(params | statistics, x_BND, eps=spec.eps, layout=call.layout), statistics


def aux(call: Call, seen: dict, cross: dict | None = None, **statistics: dict) -> dict:
    """Return what the caller asked to see of a block (`apply`)."""
    result: dict = {"running": {name: of for name, of in statistics.items() if of}}
    attentions_seen = {"": seen} | ({} if cross is None else {"_cross": cross})
    if call.maps:
        result |= {f"A{suffix}": of["A"] for suffix, of in attentions_seen.items()}
    if call.keep or call.cache is not None:
        result["cache"] = {suffix.strip("_") or "self": of["cache"] for suffix, of in attentions_seen.items()}
    return result


def dropout(name: str, x_BND: jax.Array, spec: Spec, call: Call) -> jax.Array:
    """Return x with each number 0 with probability p = spec.dropout, else x / (1 - p) (Srivastava et al. 2014).

    The zeros of a sequence depend on its random key and the stage's name alone, not on its neighbours, the number of
    devices or the microbatches. If devices share a sequence, each draws the full mask and takes its own tokens.
    Without keys (evaluation) or at rate 0 the result is x. Raises ValueError for a rate outside [0, 1).
    """
    if not 0 <= spec.dropout < 1:
        raise ValueError(f"a dropout rate of {spec.dropout}; it must be at least 0 and less than 1")
    if call.key_B is None or spec.dropout == 0:
        return x_BND
    (_, N, D), sequence = x_BND.shape, call.layout.sequence
    N = N * jax.lax.axis_size(sequence) if sequence else N
    draw = jax.vmap(lambda key: jax.random.bernoulli(key, 1 - spec.dropout, (N, D)))
    keep_BND = layouts.take_own_tokens(draw(fold_name(call.key_B, name)), call.layout)
    return jnp.where(keep_BND, x_BND / (1 - spec.dropout), 0)


def fold_name(key_B: jax.Array | None, name: str) -> jax.Array | None:
    """Return the random keys of the stage `name`, one for each sequence."""
    return None if key_B is None else jax.vmap(lambda key: initial.key(key, name))(key_B)

"""The transformer block: attention across tokens and an MLP across features, each with a residual connection (E13).

`Spec` holds the function for each stage. The parameter tree decides the rest: biases if there are bias leaves,
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
    """The order of a block's stages, as two functions (params, x_BND, spec, call) -> (x_BND, aux).

    decoder: has cross-attention. residual: the stages are added to the tokens. aux: "A", the attention weights (B, H,
    N, S), with call.maps; "cache" with call.keep or a cache; each a dict with the names "self" and "cross". "running":
    in training, the batch statistics of norms with running averages.
    """

    encoder: Callable
    decoder: Callable
    residual: bool = True


class Spec(NamedTuple):
    """The function for each stage of a block, and its numbers."""

    attention: attentions.Spec
    norm: norm.Norm
    mlp: variant.Variant
    order: Order
    eps: float = 1e-5  # inside the root of the norms
    dropout: float = 0.0  # probability that a number of a stage's output is set to 0 in training
    score_std: float | jax.Array = 1.0  # factor on the initial scale of the score's matrices (leaves U...)


# The settings of `bias`, and the stages that have biases; "output" is the bias b_o of attention.
BIASES = {
    "all": ("score", "value", "output", "mlp"),
    "none": (),
    "attention": ("score", "value", "output"),
    "mlp": ("mlp",),
    "qkv": ("score", "value"),
}


def has_bias(stage: str, bias: bool | str) -> bool:
    """Return whether this stage has biases; `bias` is one of BIASES, or True for all and False for none."""
    return bias if isinstance(bias, bool) else stage in BIASES[bias]


def init(
    key: jax.Array, *, D: int, H: int, K: int, F: int, M: int, N: int, spec: Spec, bias: bool | str, cross=False
) -> dict:
    """Return the parameters of one block.

    M: the depth of the stack, which sets the initial scale of the output projections. bias: one of BIASES. cross: add
    cross-attention.
    """
    attention, params = spec.attention, {}
    M = M if spec.order.residual else 0.5  # 1/sqrt(2 M) = 1: without residual connections nothing is summed up

    def add(name: str, stage: Any, **sizes: Any) -> None:
        params[name] = stage.init(initial.key(key, name), **sizes)

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


def choose(params: dict, order: Order) -> Callable[..., tuple[jax.Array, dict]]:
    """Return the function of the block with these parameters: the decoder's if they have cross-attention."""
    return order.decoder if "score_cross" in params else order.encoder


def pre_norm(params: dict, x_BND: jax.Array, spec: Spec, call: Call) -> tuple[jax.Array, dict]:
    """Y = X + MHSA(LN(X)); X' = Y + MLP(LN(Y)) (Turner 2023; E18)."""
    normed_BND, norm1 = normalise(params["norm1"], x_BND, spec, call)
    attended_BND, self_aux = heads.self_attention(params, normed_BND, spec.attention, call)
    x_BND = x_BND + dropout("attention", attended_BND, spec, call)
    normed_BND, norm2 = normalise(params["norm2"], x_BND, spec, call)
    x_BND = x_BND + dropout("mlp", feed_forward(params, normed_BND, spec, call), spec, call)
    return x_BND, collect_aux(call, {"self": self_aux}, {"norm1": norm1, "norm2": norm2})


def post_norm(params: dict, x_BND: jax.Array, spec: Spec, call: Call) -> tuple[jax.Array, dict]:
    """Y = LN(X + MHSA(X)); X' = LN(Y + MLP(Y)) (Vaswani et al. 2017; E19)."""
    attended_BND, self_aux = heads.self_attention(params, x_BND, spec.attention, call)
    x_BND = x_BND + dropout("attention", attended_BND, spec, call)
    x_BND, norm1 = normalise(params["norm1"], x_BND, spec, call)
    x_BND = x_BND + dropout("mlp", feed_forward(params, x_BND, spec, call), spec, call)
    x_BND, norm2 = normalise(params["norm2"], x_BND, spec, call)
    return x_BND, collect_aux(call, {"self": self_aux}, {"norm1": norm1, "norm2": norm2})


def plain(params: dict, x_BND: jax.Array, spec: Spec, call: Call) -> tuple[jax.Array, dict]:
    """Y = MHSA(LN(X)); X' = MLP(LN(Y)): without residual connections."""
    normed_BND, norm1 = normalise(params["norm1"], x_BND, spec, call)
    attended_BND, self_aux = heads.self_attention(params, normed_BND, spec.attention, call)
    x_BND = dropout("attention", attended_BND, spec, call)
    normed_BND, norm2 = normalise(params["norm2"], x_BND, spec, call)
    x_BND = dropout("mlp", feed_forward(params, normed_BND, spec, call), spec, call)
    return x_BND, collect_aux(call, {"self": self_aux}, {"norm1": norm1, "norm2": norm2})


def decoder_pre_norm(params: dict, x_BND: jax.Array, spec: Spec, call: Call) -> tuple[jax.Array, dict]:
    """Y = X + MHSA(LN(X)); Z = Y + MHCA(LN(Y), memory); X' = Z + MLP(LN(Z)) (E18, E26)."""
    normed_BND, norm1 = normalise(params["norm1"], x_BND, spec, call)
    attended_BND, self_aux = heads.self_attention(params, normed_BND, spec.attention, call)
    x_BND = x_BND + dropout("attention", attended_BND, spec, call)
    normed_BND, norm_cross = normalise(params["norm_cross"], x_BND, spec, call)
    attended_BND, cross_aux = heads.cross_attention(params, normed_BND, spec.attention, call)
    x_BND = x_BND + dropout("cross", attended_BND, spec, call)
    normed_BND, norm2 = normalise(params["norm2"], x_BND, spec, call)
    x_BND = x_BND + dropout("mlp", feed_forward(params, normed_BND, spec, call), spec, call)
    statistics = {"norm1": norm1, "norm_cross": norm_cross, "norm2": norm2}
    return x_BND, collect_aux(call, {"self": self_aux, "cross": cross_aux}, statistics)


def decoder_post_norm(params: dict, x_BND: jax.Array, spec: Spec, call: Call) -> tuple[jax.Array, dict]:
    """Y = LN(X + MHSA(X)); Z = LN(Y + MHCA(Y, memory)); X' = LN(Z + MLP(Z)) (Vaswani et al. 2017; E19, E26)."""
    attended_BND, self_aux = heads.self_attention(params, x_BND, spec.attention, call)
    x_BND = x_BND + dropout("attention", attended_BND, spec, call)
    x_BND, norm1 = normalise(params["norm1"], x_BND, spec, call)
    attended_BND, cross_aux = heads.cross_attention(params, x_BND, spec.attention, call)
    x_BND = x_BND + dropout("cross", attended_BND, spec, call)
    x_BND, norm_cross = normalise(params["norm_cross"], x_BND, spec, call)
    x_BND = x_BND + dropout("mlp", feed_forward(params, x_BND, spec, call), spec, call)
    x_BND, norm2 = normalise(params["norm2"], x_BND, spec, call)
    statistics = {"norm1": norm1, "norm_cross": norm_cross, "norm2": norm2}
    return x_BND, collect_aux(call, {"self": self_aux, "cross": cross_aux}, statistics)


def decoder_plain(params: dict, x_BND: jax.Array, spec: Spec, call: Call) -> tuple[jax.Array, dict]:
    """Y = MHSA(LN(X)); Z = MHCA(LN(Y), memory); X' = MLP(LN(Z)): without residual connections."""
    normed_BND, norm1 = normalise(params["norm1"], x_BND, spec, call)
    attended_BND, self_aux = heads.self_attention(params, normed_BND, spec.attention, call)
    x_BND = dropout("attention", attended_BND, spec, call)
    normed_BND, norm_cross = normalise(params["norm_cross"], x_BND, spec, call)
    attended_BND, cross_aux = heads.cross_attention(params, normed_BND, spec.attention, call)
    x_BND = dropout("cross", attended_BND, spec, call)
    normed_BND, norm2 = normalise(params["norm2"], x_BND, spec, call)
    x_BND = dropout("mlp", feed_forward(params, normed_BND, spec, call), spec, call)
    statistics = {"norm1": norm1, "norm_cross": norm_cross, "norm2": norm2}
    return x_BND, collect_aux(call, {"self": self_aux, "cross": cross_aux}, statistics)


ORDERS = {
    "pre_norm": Order(pre_norm, decoder_pre_norm),
    "post_norm": Order(post_norm, decoder_post_norm),
    "plain": Order(plain, decoder_plain, residual=False),
}


def feed_forward(params: dict, x_BND: jax.Array, spec: Spec, call: Call) -> jax.Array:
    """Return MLP(X) (E12)."""
    with jax.named_scope("mlp"):
        return spec.mlp.apply(params["mlp"], x_BND, layout=call.layout)


def normalise(params: dict, x_BND: jax.Array, spec: Spec, call: Call) -> tuple[jax.Array, dict]:
    """Return LN(X) (E14-E17), and the statistics of the batch, if this is training and the norm has running averages.

    Training uses these statistics; evaluation uses the running averages in `params`.
    """
    if call.key_B is None or spec.norm.observe is None:
        return spec.norm.apply(params, x_BND, eps=spec.eps, layout=call.layout), {}
    statistics = spec.norm.observe(x_BND, layout=call.layout)
    return spec.norm.apply(params | statistics, x_BND, eps=spec.eps, layout=call.layout), statistics


def collect_aux(call: Call, attentions: dict[str, dict], statistics: dict[str, dict]) -> dict:
    """Return aux of a block (see `Order`): what the caller requested, and the statistics of norms that have any."""
    aux: dict = {"running": {name: values for name, values in statistics.items() if values}}
    if call.maps:
        aux["A"] = {name: aux_of["A"] for name, aux_of in attentions.items()}
    if call.keep or call.cache is not None:
        aux["cache"] = {name: aux_of["cache"] for name, aux_of in attentions.items()}
    return aux


def dropout(name: str, x_BND: jax.Array, spec: Spec, call: Call) -> jax.Array:
    """Return x with each number 0 with probability p = spec.dropout, else x / (1 - p) (Srivastava et al. 2014).

    The zeros of a sequence depend only on its random key and the name of the stage: not on the other sequences, the
    number of devices or the microbatches. If devices share a sequence, each draws the full mask and slices its own
    tokens. Without keys (evaluation) or at rate 0 the result is x. Raises ValueError unless 0 <= p < 1.
    """
    if not 0 <= spec.dropout < 1:
        raise ValueError(f"dropout = {spec.dropout} must be at least 0 and less than 1")
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

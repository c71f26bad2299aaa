"""Values: the vectors that attention averages, and the output projection of these averages.

`apply(params, x_BSD) -> v_BHSV` computes the values, and `out_proj(params, y_BHNV, *, layout) -> y_BND` maps the
averages of all heads back to tokens. V is K for values of low rank and D for the others. A head axis of size one is
shared by all heads: values that are the tokens themselves have one head, for every G.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tfm import initial, layout as layouts, linear, platform, variant
from tfm.attention import groups

EPS = 1e-12  # added to a squared length, so that a zero vector has zero gradient


class Value(NamedTuple):
    """The functions of a value: `init(key, *, H, K, D, M, bias) -> params`, `apply`, `out_proj` and `post_process`.

    apply(params, x_BSD) -> v_BHSV computes the vectors to average. out_proj(params, y_BHNV, *, layout) -> y_BND maps
    the averages back to tokens.

    post_process(params, y_BHNV, x_BND, v_BHNV) -> y_BHNV changes the averages before out_proj; None: no change. x: the
    tokens that attend. v: their own values in self-attention, None in cross-attention.
    from_keys: True if `apply` takes the score's keys instead of the tokens.
    supports_gqa: True if `init` also takes G, the number of heads of values (groups.py).
    takes_layout: True if out_proj sums over the devices that each hold some heads (layout.py).
    output: the names of the last matrices, whose initial values model.output_std scales.
    measures: {name: weight in the loss} of the measures that `apply` also returns (variant.py).
    """

    init: Callable[..., dict]
    apply: Callable[[dict, jax.Array], jax.Array]
    out_proj: Callable[..., jax.Array]
    post_process: Callable[..., jax.Array] | None = None
    from_keys: bool = False
    supports_gqa: bool = False
    takes_layout: bool = False
    output: tuple[str, ...] = ()
    measures: variant.Weights = ()


def _low_rank_init(key: jax.Array, *, H: int, K: int, D: int, M: int, bias: bool, G: int | None = None) -> dict:
    """Draw U_v, and U_h (Uo_HDK) with std 1/sqrt(2 M H K), so that the sum of 2 M residual terms has variance 1."""
    params = initial.normal(key, groups.name_leaf("Uv_GKD", H, G), D**-0.5, H=H, G=G, K=K, D=D)
    params |= initial.normal(key, "Uo_HDK", (2 * M * H * K) ** -0.5, H=H, D=D, K=K)
    biases = (groups.name_leaf("bv_GK", H, G), "bo_D") if bias else ()
    for name in biases:
        params |= initial.zeros(name, H=H, G=G, K=K, D=D)
    return params


def _low_rank(params: dict, x_BSD: jax.Array) -> jax.Array:
    """Return v_{h,s} = U_{v,h} x_s (+ b_v), K features per head (E9, E11)."""
    return linear.matmul_heads(x_BSD, *groups.find_matrix(params, "v"))


def _keys_init(key: jax.Array, *, H: int, K: int, D: int, G: int | None = None, **more: Any) -> dict:
    """Draw U_h as `low_rank` does. There is no U_v."""
    params = low_rank.init(key, H=H, K=K, D=D, G=G, **more)
    return {name: leaf for name, leaf in params.items() if name in ("Uo_HDK", "bo_D")}


def _keys(params: dict, k_BHSK: jax.Array) -> jax.Array:
    """Return the keys: v_{h,s} = U_{k,h} x_s (+ b_k) (Kayyam et al. 2026, Q-K=V; with the score `tied`, Q=K=V).

    Rotary positions rotate the keys, but not these values. Without rotary positions, a KV cache stores one array.
    """
    return k_BHSK


def _sum_over_heads(params: dict, y_BHNV: jax.Array, *, layout: layouts.Layout = layouts.ONE) -> jax.Array:
    """Return sum_h U_h y_{h,n} (+ b_o): Y = sum_h V_h X A_h with V_h = U_h U_{v,h} (E9), or V_h of D x D (E8).

    This is one product of the concatenated heads with the concatenated U_h (E10), summed over the devices of
    layout.tensor.
    """
    U_HDV = params["Uo_HDK"] if "Uo_HDK" in params else params["V_HDD"]
    if y_BHNV.shape[1] == 1:  # all heads share the average y: sum_h U_h y = (sum_h U_h) y
        U_HDV = U_HDV.sum(0, keepdims=True)
    y_BND = platform.sum_heads(y_BHNV, U_HDV)
    y_BND = y_BND if layout.tensor is None else jax.lax.psum(y_BND, layout.tensor)
    return y_BND if "bo_D" not in params else y_BND + params["bo_D"]


def _gated_init(key: jax.Array, *, H: int, K: int, D: int, **more: Any) -> dict:
    """Draw the parameters of `low_rank`, and U_g with the std of U_v: the initial gates are 1/2 on average."""
    return low_rank.init(key, H=H, K=K, D=D, **more) | initial.normal(key, "Ug_HKD", D**-0.5, H=H, K=K, D=D)


def _gated(params: dict, y_BHNK: jax.Array, x_BND: jax.Array, v_BHNK: jax.Array | None) -> jax.Array:
    """Return sigma(U_g,h x_n) * y_h,n: a gate for each feature of each head (Qiu et al. 2025, section 2.2)."""
    return jax.nn.sigmoid(linear.matmul_heads(x_BND, params["Ug_HKD"])) * y_BHNK


def _exclusive(params: dict, y_BHNK: jax.Array, x_BND: jax.Array, v_BHNK: jax.Array | None) -> jax.Array:
    """Return y_n - (y_n . v_n) v_n / |v_n|^2: the part along the token's own value is removed (Zhai 2026).

    With attend_to_self = False, in contrast, averages of other tokens' values may still point along v_n. If v_n is 0,
    and in cross-attention, y_n is unchanged.
    """
    if v_BHNK is None:
        return y_BHNK
    y, v = linear.to_float32(y_BHNK), linear.to_float32(jnp.repeat(v_BHNK, y_BHNK.shape[1] // v_BHNK.shape[1], axis=1))
    share = jnp.sum(y * v, -1, keepdims=True) / (jnp.sum(v * v, -1, keepdims=True) + EPS)
    return (y - share * v).astype(y_BHNK.dtype)


def _full_rank_init(key: jax.Array, *, H: int, K: int, D: int, M: int, bias: bool) -> dict:
    """Draw V_h with std 1/sqrt(2 M H D), so that the sum of 2 M residual terms has variance 1.

    The only bias is b_o: the weights of a query sum to one, so a bias of the values would be a bias of the output.
    """
    params = initial.normal(key, "V_HDD", (2 * M * H * D) ** -0.5, H=H, D=D)
    return params | (initial.zeros("bo_D", D=D) if bias else {})


def _tokens(params: dict, x_BSD: jax.Array) -> jax.Array:
    """Return v_s = x_s as one head that all heads share: attention averages the tokens themselves (E3)."""
    return x_BSD[:, None]


def _identity_init(key: jax.Array, *, H: int, K: int, D: int, M: int, bias: bool) -> dict:
    return {}


def _mean_over_heads(params: dict, y_BHND: jax.Array, *, layout: layouts.Layout = layouts.ONE) -> jax.Array:
    """Return the mean over heads, sum_h V_h y_{h,n} with V_h = I / H. With one head this is E3."""
    mean_BND = jnp.mean(y_BHND, axis=1)
    return mean_BND if layout.tensor is None else jax.lax.pmean(mean_BND, layout.tensor)


_OUTPUT = ("Uo_HDK",)
low_rank = Value(_low_rank_init, _low_rank, _sum_over_heads, supports_gqa=True, takes_layout=True, output=_OUTPUT)
gated = low_rank._replace(init=_gated_init, post_process=_gated)
exclusive = low_rank._replace(post_process=_exclusive)
keys = low_rank._replace(init=_keys_init, apply=_keys, from_keys=True)
full_rank = Value(_full_rank_init, _tokens, _sum_over_heads, takes_layout=True, output=("V_HDD",))
identity = Value(_identity_init, _tokens, _mean_over_heads, takes_layout=True)

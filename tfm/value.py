"""What is averaged: the values of a head, and how the heads' averages come together again.

A value path is `(init, apply, combine)`: `apply(params, x_BSD) -> v_BHSK` before the average over tokens and
`combine(params, y_BHNK) -> y_BND` after it.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax

from tfm import initial, linear


class Value(NamedTuple):
    """See the module's first lines."""

    init: Callable[..., dict]
    apply: Callable[[dict, jax.Array], jax.Array]
    combine: Callable[[dict, jax.Array], jax.Array]


def _low_rank_init(key: jax.Array, *, H: int, K: int, D: int, M: int, bias: bool) -> dict:
    """U_h starts at 1/sqrt(2 M H K), so that the 2 M residual terms of a stack add up to unit variance."""
    params = initial.normal(key, "Uv_HKD", D**-0.5, H=H, K=K, D=D)
    params |= initial.normal(key, "Uo_HDK", (2 * M * H * K) ** -0.5, H=H, D=D, K=K)
    return params | (initial.zeros("bv_HK", H=H, K=K) | initial.zeros("bo_D", D=D) if bias else {})


def _low_rank(params: dict, x_BSD: jax.Array) -> jax.Array:
    """v_{h,s} = U_{v,h} x_s (+ b_v), K features per head (E9, E11)."""
    return linear.heads(x_BSD, params["Uv_HKD"], params.get("bv_HK"))


def _low_rank_combine(params: dict, y_BHNK: jax.Array) -> jax.Array:
    """sum_h U_h y_{h,n} (+ b_o): equation (4) of seed 003 with V_h = U_h U_{v,h} (E9).

    The sum over heads is one product of the concatenated heads with the U_h side by side (E10).
    """
    B, H, N, K = y_BHNK.shape
    heads_BNC = y_BHNK.swapaxes(1, 2).reshape(B, N, H * K)
    Uo_DC = params["Uo_HDK"].swapaxes(0, 1).reshape(-1, H * K)
    return linear.rows(heads_BNC, Uo_DC, params.get("bo_D"))


low_rank = Value(_low_rank_init, _low_rank, _low_rank_combine)

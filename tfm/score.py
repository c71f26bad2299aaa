"""How two tokens are compared: a score turns tokens into the queries and keys whose product is the logit.

l_{n,s} = scale * q_n . k_s, where n attends to s. A score is `(init, apply)`:
`init(key, *, H, K, D, bias) -> params` and `apply(params, x_BND, x_BSD) -> (q_BHNK, k_BHSK)`; a head axis of size one
is shared by all heads. In self-attention both arguments are the same array. What a score may have beside is in `Score`.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tfm import initial, linear


class Score(NamedTuple):
    """`init` and `apply` as above, and what else is known of the comparison.

    factors(params, *, D) -> (Uq_HKD, Uk_HKD): the bilinear form of head h is M_h = U_q,h^T U_k,h, so that
    l_{n,s} = x_n^T M_h x_s without biases, scale and what is said beside it; None: there is no such form.
    itself: whether a token attends to itself where it may attend to others too (multihead.py).
    """

    init: Callable[..., dict[str, Any]]
    apply: Callable[..., tuple[jax.Array, jax.Array]]
    factors: Callable[..., tuple[jax.Array, jax.Array]] | None = None
    itself: bool = True


def _none_init(key: jax.Array, *, H: int, K: int, D: int, bias: bool) -> dict:
    return {}


def _none(params: dict, x_BND: jax.Array, x_BSD: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A proportional to exp(x_s^T x_n): queries and keys are the tokens, K = D, one map for all heads (E4)."""
    return x_BND[:, None], x_BSD[:, None]


def _tied_init(key: jax.Array, *, H: int, K: int, D: int, bias: bool) -> dict:
    params = initial.normal(key, "U_HKD", D**-0.5, H=H, K=K, D=D)
    return params | (initial.zeros("b_HK", H=H, K=K) if bias else {})


def _tied(params: dict, x_BND: jax.Array, x_BSD: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A proportional to exp(x_s^T U^T U x_n): one matrix for queries and keys, symmetric logits (E5)."""
    q_BHNK = linear.heads(x_BND, params["U_HKD"], params.get("b_HK"))
    k_BHSK = q_BHNK if x_BSD is x_BND else linear.heads(x_BSD, params["U_HKD"], params.get("b_HK"))
    return q_BHNK, k_BHSK


def _asymmetric_init(key: jax.Array, *, H: int, K: int, D: int, bias: bool) -> dict:
    params = {}
    for side in "qk":
        params |= initial.normal(key, f"U{side}_HKD", D**-0.5, H=H, K=K, D=D)
        params |= initial.zeros(f"b{side}_HK", H=H, K=K) if bias else {}
    return params


def _asymmetric(params: dict, x_BND: jax.Array, x_BSD: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A proportional to exp(x_s^T U_k^T U_q x_n): q_n = U_q x_n + b_q, k_s = U_k x_s + b_k (E6, biases E11)."""
    q_BHNK = linear.heads(x_BND, params["Uq_HKD"], params.get("bq_HK"))
    k_BHSK = linear.heads(x_BSD, params["Uk_HKD"], params.get("bk_HK"))
    return q_BHNK, k_BHSK


def _constant(params: dict, x_BND: jax.Array, x_BSD: jax.Array) -> tuple[jax.Array, jax.Array]:
    """All logits 0: the weights follow from positions alone, from a mask or a relation's bias (E28)."""
    return jnp.zeros_like(x_BND[:, None, :, :1]), jnp.zeros_like(x_BSD[:, None, :, :1])


none = Score(_none_init, _none, lambda params, *, D: (jnp.eye(D)[None], jnp.eye(D)[None]))
tied = Score(_tied_init, _tied, lambda params, *, D: (params["U_HKD"], params["U_HKD"]))
asymmetric = Score(_asymmetric_init, _asymmetric, lambda params, *, D: (params["Uq_HKD"], params["Uk_HKD"]))
constant = Score(_none_init, _constant)

# The factor on the logits (E7) from K, the features that queries and keys really have, and D.
SCALES = {
    "1/sqrt(K)": lambda K, D: 1 / math.sqrt(K),  # seeds 001 and 004, the default
    "1/sqrt(D)": lambda K, D: 1 / math.sqrt(D),  # seed 000
    "1": lambda K, D: 1.0,  # seed 002; in seed 003 the scale is absorbed in U
}

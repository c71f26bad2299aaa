"""How two tokens are compared: a score turns tokens into the queries and keys whose product is the logit.

l_{n,s} = scale * q_n . k_s, where n attends to s. A score is `(init, apply)`:
`init(key, *, H, K, D, bias) -> params` and `apply(params, x_BND, x_BSD) -> (q_BHNK, k_BHSK)`; a head axis of size one
is shared by all heads. In self-attention both arguments are the same array. What a score may have beside is in `Score`.

| score                       | l_{n,s}, unscaled, without biases | parameters a head | from                           |
|-----------------------------|-----------------------------------|-------------------|--------------------------------|
| none                        | x_n . x_s                         | 0                 | E4                             |
| tied, tied_noself           | U x_n . U x_s                     | D K               | E5; with other tokens only     |
| tied_keynorm                | U x_n . U x_s sqrt(K) / |U x_s|   | D K               | Kitaev et al. 2020; the same   |
| tied_wide                   | as tied, of 2 K features          | 2 D K             | as many as asymmetric          |
| tied_signed                 | U x_n . (sigma * U x_s)           | D K + K           | symmetric, but not definite    |
| l2_tied                     | -|U x_n - U x_s|^2                | D K               | Kim et al. 2021                |
| pairwise                    | U x_n . P U x_s                   | D K + K^2         | Courtois et al. 2024           |
| pairwise_sym                | U x_n . (P + P^T)/2 U x_s         | D K + K^2         | Courtois et al. 2024           |
| identity_query              | x_n, cut into heads, . U_k x_s    | D K               | Karbevski 2025                 |
| asymmetric, asymmetric_std  | U_q x_n . U_k x_s                 | 2 D K             | E6; with the next one's std    |
| symmetric_init              | the same, at first U_k = U_q      | 2 D K             | Saponati et al. 2025           |
| constant                    | 0                                 | 0                 | E28                            |
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tfm import initial, linear
from tfm.attention import score_symmetric


class Score(NamedTuple):
    """`init` and `apply` as above, and what else is known of the comparison.

    factors(params, *, D) -> (Uq_HKD, Uk_HKD): the bilinear form of head h is M_h = U_q,h^T U_k,h, so that
    l_{n,s} = x_n^T M_h x_s without biases, scale and what is said beside it; None: there is no such form.
    itself: whether a token attends to itself where it may attend to others too (heads.py).
    rotatable: whether rotary positions may turn queries and keys (relative_position.py). They may where all features
    are of one kind and nothing but the product of two tokens is asked for: not where one of them is a square or a 1.
    """

    init: Callable[..., dict[str, Any]]
    apply: Callable[..., tuple[jax.Array, jax.Array]]
    factors: Callable[..., tuple[jax.Array, jax.Array]] | None = None
    itself: bool = True
    rotatable: bool = False


# ---------------------------------------------------------------------------------------------------------- no matrix


def _none_init(key: jax.Array, *, H: int, K: int, D: int, bias: bool) -> dict:
    return {}


def _none(params: dict, x_BND: jax.Array, x_BSD: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A proportional to exp(x_s^T x_n): queries and keys are the tokens, K = D, one map for all heads (E4)."""
    return x_BND[:, None], x_BSD[:, None]


def _none_factors(params: dict, *, D: int) -> tuple[jax.Array, jax.Array]:
    return jnp.eye(D)[None], jnp.eye(D)[None]


def _constant(params: dict, x_BND: jax.Array, x_BSD: jax.Array) -> tuple[jax.Array, jax.Array]:
    """All logits 0: the weights follow from positions alone, from a mask or a relative position's bias (E28)."""
    return jnp.zeros_like(x_BND[:, None, :, :1]), jnp.zeros_like(x_BSD[:, None, :, :1])


# ------------------------------------------------------------------------------------------------------- two matrices

# In the published code of Saponati et al. 2025, matrices that begin with U_k = U_q are drawn as PyTorch draws any, with
# the standard deviation 1/sqrt(3 D), and the others as BERT's, with 0.02: at D = 256 the first are 1.8 times larger.
# Here the first scale is theirs too; the other scores have 1/sqrt(D), at which logits have variance 1.
NARROW = 3**-0.5


def _asymmetric_init(key: jax.Array, *, H: int, K: int, D: int, bias: bool, factor: float = 1.0) -> dict:
    params = {}
    for side in "qk":
        params |= initial.normal(key, f"U{side}_HKD", factor * D**-0.5, H=H, K=K, D=D)
        params |= initial.zeros(f"b{side}_HK", H=H, K=K) if bias else {}
    return params


def _asymmetric_std_init(key: jax.Array, *, H: int, K: int, D: int, bias: bool) -> dict:
    """As `asymmetric`, but NARROW: what the scale of `symmetric_init` does without the symmetry."""
    return _asymmetric_init(key, H=H, K=K, D=D, bias=bias, factor=NARROW)


def _symmetric_init_init(key: jax.Array, *, H: int, K: int, D: int, bias: bool) -> dict:
    """As `asymmetric`, but NARROW and U_k = U_q, each of which then learns on its own (Saponati et al. 2025)."""
    params = _asymmetric_std_init(key, H=H, K=K, D=D, bias=bias)
    return params | {"Uk_HKD": params["Uq_HKD"].copy()}  # a training step may give away an array only once


def _asymmetric(params: dict, x_BND: jax.Array, x_BSD: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A proportional to exp(x_s^T U_k^T U_q x_n): q_n = U_q x_n + b_q, k_s = U_k x_s + b_k (E6, biases E11).

    2 D K parameters a head.
    """
    q_BHNK = linear.heads(x_BND, params["Uq_HKD"], params.get("bq_HK"))
    k_BHSK = linear.heads(x_BSD, params["Uk_HKD"], params.get("bk_HK"))
    return q_BHNK, k_BHSK


def _asymmetric_factors(params: dict, *, D: int) -> tuple[jax.Array, jax.Array]:
    return params["Uq_HKD"], params["Uk_HKD"]


# ----------------------------------------------------------------------------------------------- what a config can name

_product = functools.partial(Score, rotatable=True)

none = _product(_none_init, _none, _none_factors)
tied = _product(score_symmetric.tied_init, score_symmetric.tied, score_symmetric.tied_factors)
tied_noself = tied._replace(itself=False)
tied_keynorm = _product(
    score_symmetric.tied_keynorm_init, score_symmetric.tied_keynorm, score_symmetric.tied_factors, itself=False
)
tied_wide = _product(score_symmetric.tied_wide_init, score_symmetric.tied_wide, score_symmetric.tied_wide_factors)
tied_signed = _product(
    score_symmetric.tied_signed_init, score_symmetric.tied_signed, score_symmetric.tied_signed_factors
)
l2_tied = Score(score_symmetric.l2_tied_init, score_symmetric.l2_tied, score_symmetric.l2_tied_factors)
pairwise = _product(score_symmetric.pairwise_init, score_symmetric.pairwise, score_symmetric.pairwise_factors)
pairwise_sym = _product(
    score_symmetric.pairwise_sym_init, score_symmetric.pairwise_sym, score_symmetric.pairwise_sym_factors
)
identity_query = _product(
    score_symmetric.identity_query_init, score_symmetric.identity_query, score_symmetric.identity_query_factors
)
symmetric_init = _product(_symmetric_init_init, _asymmetric, _asymmetric_factors)
asymmetric = _product(_asymmetric_init, _asymmetric, _asymmetric_factors)
asymmetric_std = _product(_asymmetric_std_init, _asymmetric, _asymmetric_factors)
constant = Score(_none_init, _constant)

# The factor on the logits (E7) from K, the features that queries and keys really have, and D.
SCALES = {
    "1/sqrt(K)": lambda K, D: 1 / math.sqrt(K),  # seeds 001 and 004, the default
    "1/sqrt(D)": lambda K, D: 1 / math.sqrt(D),  # seed 000
    "1": lambda K, D: 1.0,  # seed 002; in seed 003 the scale is absorbed in U
}

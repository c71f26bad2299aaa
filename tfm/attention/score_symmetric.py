"""The tied score, with one matrix U for queries and keys, and scores between it and `asymmetric`, with U_q and U_k.

They show whether attention needs both U_q and U_k. score.py has their names and initial parameters. Each function
returns queries and keys, and its docstring states their product l_{n,s} with u_n = U_h x_n + b_h.
"""

import math

import jax
import jax.numpy as jnp

from tfm import linear
from tfm.attention import groups

Pair = tuple[jax.Array, jax.Array]  # queries and keys


def tied(params: dict, x_BND: jax.Array, x_BSD: jax.Array) -> Pair:
    """Return q = U x_n and k = U x_s: A ~ exp(x_s^T U^T U x_n), one matrix and symmetric logits (E5).

    D K parameters per head.
    """
    return _project_both(x_BND, x_BSD, params["U_HKD"], params.get("b_HK"))


def _project_both(x_BND: jax.Array, x_BSD: jax.Array, U_HKD: jax.Array, b_HK: jax.Array | None) -> Pair:
    q_BHNK = _round(linear.matmul_heads(x_BND, U_HKD, b_HK), x_BND.dtype)
    return q_BHNK, q_BHNK if x_BSD is x_BND else linear.matmul_heads(x_BSD, U_HKD, b_HK)


def tied_keynorm(params: dict, x_BND: jax.Array, x_BSD: jax.Array) -> Pair:
    """Return q = u_n = U x_n and k = sqrt(K) u_s / |u_s|: all keys have length sqrt(K) (Kitaev et al. 2020).

    D K parameters per head. The logits are not symmetric, because only the keys are normalised. The paper's keys of
    length 1 would make logits sqrt(K) times smaller than in the other scores. A zero u_s gives a zero key, with zero
    gradient.
    """
    q_BHNK, u_BHSK = tied(params, x_BND, x_BSD)
    u32_BHSK = linear.to_float32(u_BHSK)
    square_BHS1 = jnp.sum(u32_BHSK * u32_BHSK, axis=-1, keepdims=True)
    K, nonzero = u32_BHSK.shape[-1], square_BHS1 > 0
    k_BHSK = jnp.where(nonzero, u32_BHSK * jax.lax.rsqrt(jnp.where(nonzero, square_BHS1 / K, 1)), 0)
    return q_BHNK, k_BHSK.astype(u_BHSK.dtype)


def tied_wide(params: dict, x_BND: jax.Array, x_BSD: jax.Array) -> Pair:
    """Return q = U x_n and k = U x_s as `tied` (E5), with Q = 2 K features of each.

    2 D K parameters per head, as many as `asymmetric` has.
    """
    return _project_both(x_BND, x_BSD, params["U_HQD"], params.get("b_HQ"))


def tied_signed(params: dict, x_BND: jax.Array, x_BSD: jax.Array) -> Pair:
    """Return q = sigma * u_n and k = u_s, with u = U x and a learned vector sigma that may be negative.

    Logits q . k are symmetric, but U^T diag(sigma) U need not be positive semi-definite, as U^T U is. D K + K
    parameters per head. Not from a paper: comparisons with `tied` and `asymmetric` separate the cost of symmetry from
    the cost of definiteness.
    """
    q_BHNK, k_BHSK = tied(params, x_BND, x_BSD)
    return params["sigma_HK"][:, None] * q_BHNK, k_BHSK


def l2_tied(params: dict, x_BND: jax.Array, x_BSD: jax.Array) -> Pair:
    """Return q and k with q . k = l_{n,s} = -|U x_n - U x_s|^2 (Kim et al. 2021): symmetric, with maximum l_{n,n} = 0.

    D K parameters per head. With w = sqrt(2) U x and a = |w|^2 / 2, the logit is w_n . w_s - a_n - a_s. This is a
    product of K + 4 features, because each a is the sum of two numbers (`_with_square`).
    """
    sides = [_with_square(x, params["U_HKD"]) for x in ((x_BND,) if x_BSD is x_BND else (x_BND, x_BSD))]
    (wq_BHNK, aq_BHN2), (wk_BHSK, ak_BHS2) = sides[0], sides[-1]
    q = jnp.concatenate([wq_BHNK, -aq_BHN2, jnp.ones_like(aq_BHN2)], axis=-1)
    return q, jnp.concatenate([wk_BHSK, jnp.ones_like(ak_BHS2), -ak_BHS2], axis=-1)


def _with_square(x_BND: jax.Array, U_HKD: jax.Array) -> Pair:
    """Return w = sqrt(2) U x, and |w|^2 / 2 as the sum of two numbers, which keeps its small differences precise.

    The first number has the 8 binary digits of bfloat16 and is exact in every product; the second is the rest, with
    another 8 digits in bfloat16. `_round` makes sure that the compiler rounds w before w is squared.
    """
    w_BHNK = _round(math.sqrt(2) * linear.matmul_heads(x_BND, U_HKD), x_BND.dtype)
    w32_BHNK = linear.to_float32(w_BHNK)
    a_BHN1 = jnp.sum(w32_BHNK * w32_BHNK, axis=-1, keepdims=True) / 2
    high_BHN1 = jax.lax.stop_gradient(_round(a_BHN1, jnp.bfloat16))
    return w_BHNK, jnp.concatenate([high_BHN1, a_BHN1 - high_BHN1], axis=-1).astype(w_BHNK.dtype)


def _round(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Return x rounded to the precision of `dtype`; the dtype of the result is that of x."""
    kind = jnp.finfo(dtype)
    return jax.lax.reduce_precision(x, exponent_bits=kind.nexp, mantissa_bits=kind.nmant)


def pairwise(params: dict, x_BND: jax.Array, x_BSD: jax.Array) -> Pair:
    """Return q and k of l_{n,s} = u_n . P u_s, with u = U x + b and a learned P: not symmetric (Courtois et al. 2024).

    D K + K^2 parameters per head, without b.
    """
    q_BHNK, u_BHSK = tied(params, x_BND, x_BSD)
    return q_BHNK, jnp.matmul(u_BHSK, params["P_HKK"].swapaxes(-1, -2))


def pairwise_sym(params: dict, x_BND: jax.Array, x_BSD: jax.Array) -> Pair:
    """Return q and k of l_{n,s} = u_n . (P + P^T)/2 u_s, with u = U x + b: symmetric (Courtois et al. 2024).

    D K + K^2 parameters per head, without b. Unlike the form of `tied`, this one may be indefinite.
    """
    return pairwise(symmetric(params), x_BND, x_BSD)


def symmetric(params: dict) -> dict:
    """Return the parameters of `pairwise` with (P + P^T)/2 in place of P."""
    return params | {"P_HKK": (params["P_HKK"] + params["P_HKK"].swapaxes(-1, -2)) / 2}


def sym_plus_skew(params: dict, x_BND: jax.Array, x_BSD: jax.Array, *, r: int) -> Pair:
    """Return q and k of l_{n,s} = u_n . u_s + sum_j (a_nj b_sj - b_nj a_sj): a symmetric form plus a skew form.

    (K + r) D parameters per head: U_HQD has the K rows of u and then the r rows of a_1, b_1, a_2, b_2, ... (r is even).
    Without rotary positions, and as long as its rows are independent, the skew part of the bilinear form has exactly
    rank r. r = 0 is `tied`. (Jamil and Kapadia 2026 measure that the skew part of trained heads has a low rank.)
    """
    Uq_HQD, Uk_HQD = skew_factors(params, r=r)
    b_HQ = params.get("b_HQ")
    bk_HQ = None if b_HQ is None else _turn(b_HQ[..., None], r)[..., 0]
    return linear.matmul_heads(x_BND, Uq_HQD, b_HQ), linear.matmul_heads(x_BSD, Uk_HQD, bk_HQ)


def skew_factors(params: dict, *, r: int) -> Pair:
    """Return U_q = U and U_k of `sym_plus_skew`. The last r rows of both make the skew part of U_q^T U_k."""
    return params["U_HQD"], _turn(params["U_HQD"], r)


def _turn(U_HQD: jax.Array, r: int) -> jax.Array:
    """Replace the last r rows a_1, b_1, a_2, b_2, ... by b_1, -a_1, b_2, -a_2, ..."""
    u_HKD, skew_HRD = jnp.split(U_HQD, [U_HQD.shape[-2] - r], axis=-2)
    a_HJD, b_HJD = skew_HRD[..., ::2, :], skew_HRD[..., 1::2, :]
    return jnp.concatenate([u_HKD, jnp.stack([b_HJD, -a_HJD], axis=-2).reshape(skew_HRD.shape)], axis=-2)


def identity_query(params: dict, x_BND: jax.Array, x_BSD: jax.Array) -> Pair:
    """Return q = x_n^(h) and k = U_k x_s + b_k, with the features hK ... (h+1)K-1 of x as x^(h) (Karbevski 2025).

    D K parameters per head, or per group.
    """
    K = params["Uk_HKD" if "Uk_HKD" in params else "Uk_GKD"].shape[-2]
    q_BHNK = x_BND.reshape(*x_BND.shape[:-1], -1, K).swapaxes(-2, -3)
    return q_BHNK, linear.matmul_heads(x_BSD, *groups.find_matrix(params, "k"))

"""Symmetry and directionality of scores.

l_{n,s} = x_n^T M_h x_s with M_h = U_q,h^T U_k,h (score.py): a row of M belongs to a feature of the query, a column to a
feature of the key. Symmetry s and directionality d follow Saponati et al. 2025. Each has two functions: the definition
takes M, and the closed form takes U_q and U_k. The closed form needs O(D K^2) operations for a head, and no D x D
matrix. Neither s nor d depends on the scale of M; all sums are float32 or float64. M describes the logits before a soft
cap (explicit.soft_cap). Symmetric logits stay symmetric after it.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tfm import linear

OUTLIER = 2.0  # a norm counts in d if it exceeds the mean by this many standard deviations
ROUNDING = 32.0  # a difference below this many times eps times its terms counts as 0


_einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)  # some devices multiply in bfloat16
_gram = functools.partial(_einsum, "...kd,...jd->...kj")  # U V^T for every head


class Layer(NamedTuple):
    """Symmetry of each head's M_h = U_q,h^T U_k,h, and symmetry and directionality of their sum over heads, in a layer.

    Symmetry is 1 for a symmetric matrix and -1 for a skew-symmetric one. Directionality (-1 to 1) is negative if
    features of the key dominate (`directionality_of`). The results of `layers` have a leading axis M.
    """

    symmetry_H: jax.Array  # of M_h for each head
    symmetry: jax.Array  # of the sum of M_h over heads
    directionality: jax.Array  # of the sum of M_h over heads


def form(Uq_HKD: jax.Array, Uk_HKD: jax.Array) -> jax.Array:
    """Return the matrices M_h = U_q,h^T U_k,h of the bilinear form, (H, D, D)."""
    return _einsum("...kd,...ke->...de", *map(linear.to_float32, (Uq_HKD, Uk_HKD)))


def concatenate_heads(Uq_HKD: jax.Array, Uk_HKD: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the factors (1, H K, D) of the sum of M_h = U_q,h^T U_k,h over heads: those of all heads, concatenated."""
    Uq_HKD, Uk_HKD = jnp.broadcast_arrays(Uq_HKD, Uk_HKD)  # all heads share a factor with a head axis of size one
    return Uq_HKD.reshape(1, -1, Uq_HKD.shape[-1]), Uk_HKD.reshape(1, -1, Uk_HKD.shape[-1])


def symmetry_of(M_HDD: jax.Array) -> jax.Array:
    """Return s_H = <M, M^T> / |M|^2: 1 if M is symmetric, -1 if skew-symmetric, about 0 if random, NaN if M = 0.

    (Saponati et al. 2025: (|S|^2 - |N|^2) / |M|^2 for the symmetric and skew parts M = S + N.)
    """
    M_HDD = _unit(M_HDD)
    return _ratio(jnp.sum(M_HDD * M_HDD.mT, axis=(-2, -1)), jnp.sum(jnp.square(M_HDD), axis=(-2, -1)))


def symmetry(Uq_HKD: jax.Array, Uk_HKD: jax.Array) -> jax.Array:
    """Return the symmetry of M_h = U_q,h^T U_k,h (see `symmetry_of`) from its factors: s_H = tr(C C) / tr(G_q G_k).

    C = U_k U_q^T, G_q = U_q U_q^T and G_k = U_k U_k^T are K x K. NaN if M is 0 within the rounding of its factors.
    """
    Uq_HKD, Uk_HKD = _unit(Uq_HKD), _unit(Uk_HKD)
    C_HKK, Gq_HKK, Gk_HKK = _gram(Uk_HKD, Uq_HKD), _gram(Uq_HKD, Uq_HKD), _gram(Uk_HKD, Uk_HKD)
    size_H = jnp.sum(Gq_HKK * Gk_HKK, axis=(-2, -1))
    bound_H = jnp.sqrt(jnp.sum(jnp.square(Gq_HKK), (-2, -1)) * jnp.sum(jnp.square(Gk_HKK), (-2, -1)))
    return _ratio(jnp.sum(C_HKK * C_HKK.mT, axis=(-2, -1)), _zero_rounding(size_H, bound_H))


def directionality_of(M_HDD: jax.Array) -> jax.Array:
    """Return d = (R - C) / (R + C) of each head, from the norms of the rows and columns of M; 0 if R = C = 0.

    R is the sum of max(0, norm - limit) over rows. The limit is the mean of the rows' norms plus two of their standard
    deviations (divisor D - 1). C is the same sum over columns. If d < 0, features of the key dominate. M^T has
    directionality -d. The sign follows the published tables (Saponati et al. 2025).
    """
    square_HDD = jnp.square(_unit(M_HDD))
    return _dominance(jnp.sum(square_HDD, axis=-1), jnp.sum(square_HDD, axis=-2))


def directionality(Uq_HKD: jax.Array, Uk_HKD: jax.Array) -> jax.Array:
    """Return the directionality d_H of M_h = U_q,h^T U_k,h (see `directionality_of`) from its factors.

    Row i of M has the squared norm u_i^T G_k u_i with u_i, column i of U_q, and G_k = U_k U_k^T. Columns likewise.
    """
    Uq_HKD, Uk_HKD = _unit(Uq_HKD), _unit(Uk_HKD)

    def squared_norms(U_HKD: jax.Array, G_HKK: jax.Array) -> jax.Array:
        square_HD = jnp.sum(U_HKD * _einsum("...kj,...jd->...kd", G_HKK, U_HKD), axis=-2)
        return jnp.maximum(square_HD, 0)

    rows_HD = squared_norms(Uq_HKD, _gram(Uk_HKD, Uk_HKD))
    return _dominance(rows_HD, squared_norms(Uk_HKD, _gram(Uq_HKD, Uq_HKD)))


def skew_rank(Uq_HKD: jax.Array, Uk_HKD: jax.Array, share: float = 0.9) -> jax.Array:
    """Return how many of the largest singular values of N_h = (M_h - M_h^T) / 2 have `share` of |N_h|^2.

    The rank is even, because singular values of a skew-symmetric matrix come in pairs, and 0 if M_h is symmetric.
    (Jamil and Kapadia 2026 find a low rank in published models; the share is our choice.) M_h = U_q^T U_k =
    Q (R_q R_k^T) Q^T with (U_q^T, U_k^T) = Q (R_q, R_k), so N_h has the singular values of the skew part of R_q R_k^T,
    of at most 2 K rows.
    """
    Uq_HKD, Uk_HKD = (_unit(U) for U in jnp.broadcast_arrays(Uq_HKD, Uk_HKD))
    R_HKK = jnp.linalg.qr(jnp.concatenate([Uq_HKD, Uk_HKD], axis=-2).mT, mode="r")
    Rq_HKK, Rk_HKK = jnp.split(R_HKK, 2, axis=-1)
    form_HKK = _einsum("...ij,...kj->...ik", Rq_HKK, Rk_HKK)
    square_HK = jnp.square(jnp.linalg.svd((form_HKK - form_HKK.mT) / 2, compute_uv=False))
    bound_H1 = jnp.sum(jnp.square(form_HKK), axis=(-2, -1))[..., None]
    square_HK = _zero_rounding(square_HK, bound_H1 * ROUNDING * jnp.finfo(square_HK.dtype).eps)
    least_H1 = share * square_HK.sum(-1, keepdims=True)
    before_HK = jnp.cumsum(square_HK, axis=-1) - square_HK
    rank_H = jnp.sum((before_HK < least_H1) & (square_HK > 0), axis=-1)
    return rank_H + rank_H % 2


def layers(params: Any, factors: Callable, *, M: int, D: int) -> Layer:
    """Return the Layer of symmetry and directionality of U_q^T U_k; its arrays have a leading axis of M layers.

    params: the parameters of a score, stacked over layers. factors: the field `factors` of this score (score.Score).
    A closed form replaces the definition if U_q and U_k have fewer than D rows. For the sum over heads they have H K
    rows, which is often D or more; the closed form would then take several times as long.
    """

    def measure(closed_form: Callable, definition: Callable, Uq_HKD: jax.Array, Uk_HKD: jax.Array) -> jax.Array:
        if max(Uq_HKD.shape[-2], Uk_HKD.shape[-2]) < D:
            return closed_form(Uq_HKD, Uk_HKD)
        return definition(form(_unit(Uq_HKD), _unit(Uk_HKD)))

    def measure_layer(params: Any) -> Layer:
        heads = factors(params, D=D)
        total = concatenate_heads(*heads)
        symmetry_H = measure(symmetry, symmetry_of, *heads)
        (s,), (d,) = measure(symmetry, symmetry_of, *total), measure(directionality, directionality_of, *total)
        return Layer(symmetry_H, s, d)

    return jax.vmap(measure_layer, axis_size=M)(params)


def _dominance(square_r_HD: jax.Array, square_c_HD: jax.Array) -> jax.Array:
    """Return d = (R - C) / (R + C) of each head, and 0 if R = C = 0. Squared norms: of the rows and of the columns.

    R and C are sums of what the norms exceed a limit by (see `directionality_of`).
    """

    def excess(square_HD: jax.Array) -> jax.Array:
        x_HD = jnp.sqrt(square_HD)
        limit_H1 = jnp.mean(x_HD, -1, keepdims=True) + OUTLIER * jnp.std(x_HD, -1, keepdims=True, ddof=1)
        return jnp.sum(_zero_rounding(x_HD - limit_H1, limit_H1), axis=-1)

    R_H, C_H = excess(square_r_HD), excess(square_c_HD)
    sum_H = R_H + C_H
    return (R_H - C_H) / jnp.where(sum_H == 0, 1, sum_H)


def _zero_rounding(x: jax.Array, terms: jax.Array) -> jax.Array:
    """Return x, but 0 if x is negative or below the rounding error of `terms`, its summands. NaN stays NaN."""
    return jnp.where(x <= ROUNDING * jnp.finfo(x.dtype).eps * terms, 0, x)


def _unit(U_HKD: jax.Array) -> jax.Array:
    """Return each matrix divided by its largest entry, so that fourth powers neither overflow nor vanish in float32."""
    U_HKD = linear.to_float32(U_HKD)
    largest_H11 = jnp.max(jnp.abs(U_HKD), axis=(-2, -1), keepdims=True)
    return U_HKD / jnp.where(largest_H11 > 0, largest_H11, 1)


def mean(x: jax.Array, axis: int) -> jax.Array:
    """Return the mean over `axis` of all elements that are not NaN; NaN if all are NaN."""
    is_number = ~jnp.isnan(x)
    return _ratio(jnp.sum(jnp.where(is_number, x, 0), axis), jnp.sum(is_number, axis))


def _ratio(numerator: jax.Array, denominator: jax.Array) -> jax.Array:
    """Return numerator / denominator; NaN unless the denominator is positive."""
    return jnp.where(denominator > 0, numerator / jnp.where(denominator > 0, denominator, 1), jnp.nan)

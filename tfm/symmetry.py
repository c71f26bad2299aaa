"""Symmetry and directionality of scores, and statistics of attention weights.

l_{n,s} = x_n^T M_h x_s with M_h = U_q,h^T U_k,h (score.py): a row of M belongs to a feature of the query, a column to a
feature of the key. Symmetry s and directionality d follow Saponati et al. 2025. Both are computed by definition, from
M, and in closed form, from its two factors, without a D x D matrix, in O(D K^2) for a head. Neither depends on the
scale of M; all sums are float32 or float64. A soft cap (explicit.soft_cap) is odd and monotonic in each logit, so M
describes the logits before it, and symmetric logits stay symmetric.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy import special

from tfm import linear

OUTLIER = 2.0  # standard deviations above the mean from which on a norm counts in d
ROUNDING = 32.0  # a difference below so many units in the last place of its terms counts as 0


_einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)  # also on devices that multiply in less
_gram = functools.partial(_einsum, "...kd,...jd->...kj")  # U V^T of every head


class Layer(NamedTuple):
    """The measures of a layer; with a leading axis M, of all layers."""

    symmetry_H: jax.Array  # of each head
    symmetry: jax.Array  # of the sum over heads
    directionality: jax.Array  # of the sum over heads


def form(Uq_HKD: jax.Array, Uk_HKD: jax.Array) -> jax.Array:
    """Return M_h = U_q,h^T U_k,h, (H, D, D): the definition, which the closed forms do not need."""
    return _einsum("...kd,...ke->...de", *map(linear.to_float32, (Uq_HKD, Uk_HKD)))


def concatenate_heads(Uq_HKD: jax.Array, Uk_HKD: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the factors (1, H K, D) of the sum of M_h over heads: the factors of the heads, concatenated."""
    Uq_HKD, Uk_HKD = jnp.broadcast_arrays(Uq_HKD, Uk_HKD)  # a head axis of size one is shared by all heads
    return Uq_HKD.reshape(1, -1, Uq_HKD.shape[-1]), Uk_HKD.reshape(1, -1, Uk_HKD.shape[-1])


def symmetry_of(M_HDD: jax.Array) -> jax.Array:
    """Return s = <M, M^T> / |M|^2: 1 if M is symmetric, -1 if it is skew, about 0 if it is random, NaN if M = 0.

    (Saponati et al. 2025: (|S|^2 - |N|^2) / |M|^2 for the symmetric and skew parts M = S + N.)
    """
    M_HDD = _unit(M_HDD)
    return _ratio(jnp.sum(M_HDD * M_HDD.mT, axis=(-2, -1)), jnp.sum(jnp.square(M_HDD), axis=(-2, -1)))


def symmetry(Uq_HKD: jax.Array, Uk_HKD: jax.Array) -> jax.Array:
    """Return `symmetry_of` from the factors: s_H = tr(C C) / tr(G_q G_k).

    C = U_k U_q^T, G_q = U_q U_q^T and G_k = U_k U_k^T are K x K. NaN if M is 0 within the rounding of its factors.
    """
    Uq_HKD, Uk_HKD = _unit(Uq_HKD), _unit(Uk_HKD)
    C_HKK, Gq_HKK, Gk_HKK = _gram(Uk_HKD, Uq_HKD), _gram(Uq_HKD, Uq_HKD), _gram(Uk_HKD, Uk_HKD)
    size_H = jnp.sum(Gq_HKK * Gk_HKK, axis=(-2, -1))
    largest_H = jnp.sqrt(jnp.sum(jnp.square(Gq_HKK), (-2, -1)) * jnp.sum(jnp.square(Gk_HKK), (-2, -1)))
    return _ratio(jnp.sum(C_HKK * C_HKK.mT, axis=(-2, -1)), _zero_rounding(size_H, largest_H))


def directionality_of(M_HDD: jax.Array) -> jax.Array:
    """Return d = (R - C) / (R + C) of each head, from the norms of the rows and the columns of M; 0 if R = C = 0.

    R is the sum of max(0, norm - limit) over rows. The limit is the mean of the rows' norms plus two of their standard
    deviations (divisor D - 1). C is the same for columns. d < 0: the key's side dominates. M^T has -d. The sign is that
    of the published tables (Saponati et al. 2025).
    """
    square_HDD = jnp.square(_unit(M_HDD))
    return _dominance(jnp.sum(square_HDD, axis=-1), jnp.sum(square_HDD, axis=-2))


def directionality(Uq_HKD: jax.Array, Uk_HKD: jax.Array) -> jax.Array:
    """Return `directionality_of` from the factors: row i of M has squared norm u_i^T G_k u_i, u_i column i of U_q."""
    Uq_HKD, Uk_HKD = _unit(Uq_HKD), _unit(Uk_HKD)

    def squared_norms(U_HKD: jax.Array, G_HKK: jax.Array) -> jax.Array:
        square_HD = jnp.sum(U_HKD * _einsum("...kj,...jd->...kd", G_HKK, U_HKD), axis=-2)
        return jnp.maximum(square_HD, 0)

    rows_HD = squared_norms(Uq_HKD, _gram(Uk_HKD, Uk_HKD))
    return _dominance(rows_HD, squared_norms(Uk_HKD, _gram(Uq_HKD, Uq_HKD)))


def layers(params: Any, factors: Callable, *, M: int, D: int) -> Layer:
    """Return the measures of M layers, by the cheaper of definition and closed form.

    params: a score's, stacked over layers. factors: score.Score's. For the sum over heads the definition is mostly
    cheaper: its factors have H K features, and if these are D or more the closed form takes several times longer.
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
    """Return (R - C) / (R + C) from the squared norms of rows and columns."""

    def excess(square_HD: jax.Array) -> jax.Array:
        x_HD = jnp.sqrt(square_HD)
        limit_H1 = jnp.mean(x_HD, -1, keepdims=True) + OUTLIER * jnp.std(x_HD, -1, keepdims=True, ddof=1)
        return jnp.sum(_zero_rounding(x_HD - limit_H1, limit_H1), axis=-1)

    R_H, C_H = excess(square_r_HD), excess(square_c_HD)
    sum_H = R_H + C_H
    return (R_H - C_H) / jnp.where(sum_H == 0, 1, sum_H)


def _zero_rounding(x: jax.Array, terms: jax.Array) -> jax.Array:
    """Return x, or 0 if it is negative or within the rounding of the terms it was computed from. NaN stays."""
    return jnp.where(x <= ROUNDING * jnp.finfo(x.dtype).eps * terms, 0, x)


def _unit(U_HKD: jax.Array) -> jax.Array:
    """Return every matrix scaled to a largest entry of 1, so that no fourth power of an entry leaves float32."""
    U_HKD = linear.to_float32(U_HKD)
    largest_H11 = jnp.max(jnp.abs(U_HKD), axis=(-2, -1), keepdims=True)
    return U_HKD / jnp.where(largest_H11 > 0, largest_H11, 1)


def weights(A_MBHNN: jax.Array, real_BN: jax.Array | None = None) -> dict[str, jax.Array]:
    """Return statistics of the attention weights of every layer, (M,): means over all its matrices, NaN if none counts.

    entropy: the mean over queries of - sum_s A_{n,s} ln A_{n,s} in nats: 0 for one key, ln S for uniform weights.
    diagonal: the mean over tokens of A_{n,n}; with a causal mask the first token has 1. asymmetry: |A - A^T| / |A|
    (Frobenius), 0 to sqrt(2). real_BN: False at padding; None: no padding. Padding and queries that see nothing (a row
    of zeros) are excluded, for the asymmetry also as keys.
    """
    A_MBHNN = linear.to_float32(A_MBHNN)
    counted_MBHN = jnp.sum(A_MBHNN, axis=-1) > 0
    counted_MBHN &= True if real_BN is None else jnp.asarray(real_BN, bool)[:, None]
    square_MBHNN = jnp.where(counted_MBHN[..., None] & counted_MBHN[..., None, :], A_MBHNN, 0)
    difference, size = (jnp.sum(jnp.square(A), (-2, -1)) for A in (square_MBHNN - square_MBHNN.mT, square_MBHNN))
    statistics_MBH = {
        "entropy": _mean(jnp.sum(special.entr(A_MBHNN), axis=-1), counted_MBHN, -1),
        "diagonal": _mean(jnp.diagonal(A_MBHNN, axis1=-2, axis2=-1), counted_MBHN, -1),
        "asymmetry": jnp.sqrt(_ratio(difference, size)),
    }
    return {name: mean(x_MBH, axis=(1, 2)) for name, x_MBH in statistics_MBH.items()}


def mean(x: jax.Array, axis: int | tuple[int, ...]) -> jax.Array:
    """Return the mean over these axes of all numbers but NaN; NaN if all are NaN."""
    return _mean(x, ~jnp.isnan(x), axis)


def _mean(x: jax.Array, counted: jax.Array, axis: int | tuple[int, ...]) -> jax.Array:
    """Return the mean of x over the entries that count."""
    return _ratio(jnp.sum(jnp.where(counted, x, 0), axis), jnp.sum(counted, axis))


def _ratio(above: jax.Array, below: jax.Array) -> jax.Array:
    """Return above / below, NaN if below is 0."""
    return jnp.where(below > 0, above / jnp.where(below > 0, below, 1), jnp.nan)

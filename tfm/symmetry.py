"""How symmetric and how directional a comparison of tokens is, and what attention weights look like.

l_{n,s} = x_n^T M_h x_s with M_h = U_q,h^T U_k,h (score.py): a row of M belongs to a feature of the query, a column to
one of the key. Symmetry s and directionality d are those of Saponati et al. 2025, here by definition, from M, and in
closed form, from its two factors: without a D x D matrix, in O(D K^2) for a head. Neither depends on the size of M, and
all is computed in float32 at least. A soft cap (explicit.soft_cap) is odd and
monotonic and acts on each logit: M is of the logits before it, and symmetric logits stay symmetric.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy import special

from tfm import linear

OUTLIER = 2.0  # standard deviations above the mean, from which on a norm counts for d
ROUNDING = 32.0  # units in the last place: what is less than that of its terms is rounding, and counts as 0


_einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)  # also where a device multiplies in less
_gram = functools.partial(_einsum, "...kd,...jd->...kj")  # U V^T of every head


class Layer(NamedTuple):
    """What is measured of a layer; with a leading axis M, of all of them."""

    symmetry_H: jax.Array  # of each head
    symmetry: jax.Array  # of the sum over heads
    directionality: jax.Array  # of the sum over heads


def form(Uq_HKD: jax.Array, Uk_HKD: jax.Array) -> jax.Array:
    """M_h = U_q,h^T U_k,h, (H, D, D): the definition, of which the closed forms below have no need."""
    return _einsum("...kd,...ke->...de", *map(linear.to_float32, (Uq_HKD, Uk_HKD)))


def summed(Uq_HKD: jax.Array, Uk_HKD: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Factors (1, H K, D) of the sum of M_h over heads: those of the heads, one below the other."""
    both = jnp.broadcast_arrays(Uq_HKD, Uk_HKD)  # a head axis of size one is shared by all heads
    return tuple(U_HKD.reshape(1, -1, U_HKD.shape[-1]) for U_HKD in both)


def symmetry_of(M_HDD: jax.Array) -> jax.Array:
    """s = <M, M^T> / |M|^2 of every matrix: 1 for a symmetric one, -1 for a skew one, about 0 for a random one. NaN for
    M = 0, which is both. (Saponati et al. 2025: (|S|^2 - |N|^2) / |M|^2 for the parts M = S + N.)"""
    M_HDD = _unit(M_HDD)
    return _ratio(jnp.sum(M_HDD * M_HDD.mT, axis=(-2, -1)), jnp.sum(jnp.square(M_HDD), axis=(-2, -1)))


def symmetry(Uq_HKD: jax.Array, Uk_HKD: jax.Array) -> jax.Array:
    """s_H = tr(C C) / tr(G_q G_k), with C = U_k U_q^T, G_q = U_q U_q^T and G_k = U_k U_k^T, all K x K: `symmetry_of`.
    NaN where M is 0, or too small beside its factors to be told from 0."""
    Uq_HKD, Uk_HKD = _unit(Uq_HKD), _unit(Uk_HKD)
    C_HKK, Gq_HKK, Gk_HKK = _gram(Uk_HKD, Uq_HKD), _gram(Uq_HKD, Uq_HKD), _gram(Uk_HKD, Uk_HKD)
    size_H = jnp.sum(Gq_HKK * Gk_HKK, axis=(-2, -1))
    largest_H = jnp.sqrt(jnp.sum(jnp.square(Gq_HKK), (-2, -1)) * jnp.sum(jnp.square(Gk_HKK), (-2, -1)))
    return _ratio(jnp.sum(C_HKK * C_HKK.mT, axis=(-2, -1)), _rounded(size_H, largest_H))


def directionality_of(M_HDD: jax.Array) -> jax.Array:
    """d = (R - C) / (R + C) of every matrix, from the norms of its rows and of its columns; 0 where both are 0.

    R is the sum of what norms of rows have above the mean and two standard deviations of them all (with D - 1 below
    the line), C that of columns. Less than 0: the key's side dominates. M^T has -d. The sign is that of the published
    tables (Saponati et al. 2025).
    """
    square_HDD = jnp.square(_unit(M_HDD))
    return _dominance(jnp.sum(square_HDD, axis=-1), jnp.sum(square_HDD, axis=-2))


def directionality(Uq_HKD: jax.Array, Uk_HKD: jax.Array) -> jax.Array:
    """d_H as in `directionality_of`: row i of M has the squared norm u_i^T G_k u_i, where u_i is column i of U_q."""
    Uq_HKD, Uk_HKD = _unit(Uq_HKD), _unit(Uk_HKD)
    both = ((Uq_HKD, _gram(Uk_HKD, Uk_HKD)), (Uk_HKD, _gram(Uq_HKD, Uq_HKD)))
    squares = (jnp.sum(U_HKD * _einsum("...kj,...jd->...kd", G_HKK, U_HKD), axis=-2) for U_HKD, G_HKK in both)
    return _dominance(*(jnp.maximum(square_HD, 0) for square_HD in squares))


def layers(params: Any, factors: Callable, *, M: int, D: int) -> Layer:
    """What is measured of M layers, in the cheaper way. params: a score's, stacked; factors: score.Score's. Of the sum
    over heads that is mostly the definition: its factors have H K features, and where these are D or more the closed
    form takes several times longer."""

    def cheaper(closed: Callable, by_definition: Callable, of: tuple) -> jax.Array:
        K = max(U_HKD.shape[-2] for U_HKD in of)
        return closed(*of) if K < D else by_definition(form(*map(_unit, of)))

    def one(layer: Any) -> Layer:
        of_heads = factors(layer, D=D)
        of_sum = summed(*of_heads)
        (s,), (d,) = (cheaper(*way, of_sum) for way in (of_symmetry, (directionality, directionality_of)))
        return Layer(cheaper(*of_symmetry, of_heads), s, d)

    of_symmetry = symmetry, symmetry_of
    return jax.vmap(one, axis_size=M)(params)


def _dominance(square_r_HD: jax.Array, square_c_HD: jax.Array) -> jax.Array:
    """(R - C) / (R + C) from the squares of both norms."""

    def excess(square_HD: jax.Array) -> jax.Array:
        x_HD = jnp.sqrt(square_HD)
        usual_H1 = jnp.mean(x_HD, -1, keepdims=True) + OUTLIER * jnp.std(x_HD, -1, keepdims=True, ddof=1)
        return jnp.sum(_rounded(x_HD - usual_H1, usual_H1), axis=-1)

    R_H, C_H = excess(square_r_HD), excess(square_c_HD)
    both_H = R_H + C_H
    return (R_H - C_H) / jnp.where(both_H == 0, 1, both_H)


def _rounded(x: jax.Array, terms: jax.Array) -> jax.Array:
    """x, or 0 where it is negative, or no more than the rounding of the terms it was made from. NaN stays."""
    return jnp.where(x <= ROUNDING * jnp.finfo(x.dtype).eps * terms, 0, x)


def _unit(U_HKD: jax.Array) -> jax.Array:
    """Every matrix with a largest entry of 1, so that no fourth power of a small or large one leaves float32."""
    U_HKD = linear.to_float32(U_HKD)
    largest_H11 = jnp.max(jnp.abs(U_HKD), axis=(-2, -1), keepdims=True)
    return U_HKD / jnp.where(largest_H11 > 0, largest_H11, 1)


def weights(A_MBHNN: jax.Array, real_BN: jax.Array | None = None) -> dict[str, jax.Array]:
    """What the attention weights of every layer are like, (M,): the mean over all its matrices; NaN where none has any.

    entropy: the mean over queries of - sum_s A_{n,s} ln A_{n,s}, in nats: 0 for one key, ln S for all alike. diagonal:
    the mean over tokens of A_{n,n}, their attention to themselves; behind a causal mask it is 1 for the first.
    asymmetry: |A - A^T| / |A| (Frobenius), 0 to sqrt(2). real_BN: tokens that are no padding; None: all. A token that
    sees nothing (a row of zeros), or that is not real, is left out, for the asymmetry also as a key.
    """
    A_MBHNN = linear.to_float32(A_MBHNN)
    counted_MBHN = jnp.sum(A_MBHNN, axis=-1) > 0
    counted_MBHN &= True if real_BN is None else jnp.asarray(real_BN, bool)[:, None]
    square_MBHNN = jnp.where(counted_MBHN[..., None] & counted_MBHN[..., None, :], A_MBHNN, 0)
    difference, size = (jnp.sum(jnp.square(A), (-2, -1)) for A in (square_MBHNN - square_MBHNN.mT, square_MBHNN))
    of_matrices = {
        "entropy": _mean(jnp.sum(special.entr(A_MBHNN), axis=-1), counted_MBHN, -1),
        "diagonal": _mean(jnp.diagonal(A_MBHNN, axis1=-2, axis2=-1), counted_MBHN, -1),
        "asymmetry": jnp.sqrt(_ratio(difference, size)),
    }
    return {name: mean(x_MBH, axis=(1, 2)) for name, x_MBH in of_matrices.items()}


def mean(x: jax.Array, axis: int | tuple[int, ...]) -> jax.Array:
    """The mean over these axes of what is not NaN; NaN where all is."""
    return _mean(x, ~jnp.isnan(x), axis)


def _mean(x: jax.Array, counted: jax.Array, axis: int | tuple[int, ...]) -> jax.Array:
    return _ratio(jnp.sum(jnp.where(counted, x, 0), axis), jnp.sum(counted, axis))


def _ratio(above: jax.Array, below: jax.Array) -> jax.Array:
    """NaN where nothing is below the line."""
    return jnp.where(below > 0, above / jnp.where(below > 0, below, 1), jnp.nan)

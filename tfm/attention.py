"""Attention: every token becomes a weighted average of values, with weights computed from the tokens themselves.

A way of computing it is a function `(q_BHNK, k_BHSK, v_BHSK, *, mask, scale) -> (y_BHNK, A_BHNS)`; one that never
forms the weights returns None for A. `explicit` is the definition.
"""

import jax
import jax.numpy as jnp

from tfm import mask as masks


def logits(q_BHNK: jax.Array, k_BHSK: jax.Array, *, scale: float) -> jax.Array:
    """l_{n,s} = scale * q_n . k_s in float32 or wider (the exponents of E6)."""
    wide = jnp.promote_types(q_BHNK.dtype, jnp.float32)
    return scale * jnp.matmul(q_BHNK, k_BHSK.swapaxes(-1, -2), preferred_element_type=wide)


def weights(l_BHNS: jax.Array, allowed: jax.Array | None = None) -> jax.Array:
    """A_{n,s} = exp(l_{n,s}) / sum_s' exp(l_{n,s'}) over the keys that are allowed: rows sum to one (E3, E22).

    `allowed` is (N, S) or (B, N, S), or None for all. A query with no key allowed gets zeros, with zero gradient.
    The lowest finite number stands for E22's -inf, which would make such a row NaN.
    """
    if allowed is None:
        return jax.nn.softmax(l_BHNS, axis=-1)
    allowed = allowed if allowed.ndim == 2 else allowed[:, None]
    A_BHNS = jax.nn.softmax(jnp.where(allowed, l_BHNS, jnp.finfo(l_BHNS.dtype).min), axis=-1)
    return jnp.where(allowed, A_BHNS, 0)


def shield(k_BHSK: jax.Array, v_BHSK: jax.Array, allowed: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Keys and values without NaN or infinity, and the queries that were allowed to see one (True in (B or 1, N)).

    A weight of zero does not keep NaN out of an average (0 * NaN = NaN); replacing the value does.
    """
    sound_BS = jnp.isfinite(k_BHSK).all((1, 3)) & jnp.isfinite(v_BHSK).all((1, 3))
    hit_BN = (allowed & ~sound_BS[:, None, :]).any(-1)
    clean = [jnp.where(sound_BS[:, None, :, None], x, 0) for x in (k_BHSK, v_BHSK)]
    return clean[0], clean[1], hit_BN


def explicit(
    q_BHNK: jax.Array, k_BHSK: jax.Array, v_BHSK: jax.Array, *, mask: masks.Mask | None, scale: float
) -> tuple[jax.Array, jax.Array]:
    """y_n = sum_s A_{n,s} v_s with the N x S weights in memory (E3): the definition, and the weights to look at."""
    if mask is None:
        A_BHNS = weights(logits(q_BHNK, k_BHSK, scale=scale))
        return jnp.matmul(A_BHNS.astype(v_BHSK.dtype), v_BHSK), A_BHNS
    allowed = masks.dense(mask, N=q_BHNK.shape[2], S=k_BHSK.shape[2])
    k_BHSK, v_BHSK, hit_BN = shield(k_BHSK, v_BHSK, allowed)
    A_BHNS = weights(logits(q_BHNK, k_BHSK, scale=scale), allowed)
    y_BHNK = jnp.matmul(A_BHNS.astype(v_BHSK.dtype), v_BHSK)
    return jnp.where(hit_BN[:, None, :, None], jnp.nan, y_BHNK), A_BHNS


def multihead(
    params: dict, x_BND: jax.Array, x_BSD: jax.Array, *, score, value, mask: masks.Mask | None, scale, compute
) -> tuple[jax.Array, jax.Array | None]:
    """Y = sum_h V_h X A_h: each head compares (score), averages (compute), is mapped back (value) (E9; seed 003 eq. 4).

    x_BND attend, x_BSD are attended to (the same array in self-attention). `scale` maps (K, D) to the factor on the
    logits (a value of score.SCALES).
    """
    with jax.named_scope("score"):
        q_BHNK, k_BHSK = score.apply(params["score"], x_BND, x_BSD)
    with jax.named_scope("value"):
        v_BHSK = value.apply(params["value"], x_BSD)
    with jax.named_scope("average"):
        factor = scale(q_BHNK.shape[-1], x_BND.shape[-1])
        y_BHNK, A_BHNS = compute(q_BHNK, k_BHSK, v_BHSK, mask=mask, scale=factor)
    with jax.named_scope("combine"):
        return value.combine(params["value"], y_BHNK), A_BHNS


WAYS = {"explicit": explicit}

"""Attention as it is defined, with all N x S weights in memory: what every other way of computing it must equal."""

import jax
import jax.numpy as jnp

from tfm.attention import groups, mask as masks


def logits(q_BHNK: jax.Array, k_BHSK: jax.Array, *, scale: float, cap: float = 0.0) -> jax.Array:
    """l_{n,s} = scale * q_n . k_s in float32 or wider (the exponents of E6), softly capped."""
    wide = jnp.promote_types(q_BHNK.dtype, jnp.float32)
    return capped(scale * jnp.matmul(q_BHNK, k_BHSK.swapaxes(-1, -2), preferred_element_type=wide), cap)


def capped(l_BHNS: jax.Array, cap: float) -> jax.Array:
    """cap tanh(l / cap): about l where it is small, never beyond +-cap (Gemma Team 2024, section 2); 0: l as it is."""
    return cap * jnp.tanh(l_BHNS / cap) if cap else l_BHNS


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


def attention(
    q_BHNK: jax.Array,
    k_BHSK: jax.Array,
    v_BHSV: jax.Array,
    *,
    mask: masks.Mask | None,
    scale: float,
    cap: float = 0.0,
    bias: masks.Bias | None = None,
    n: jax.Array | None = None,
    axis: None = None,
    by_keys: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Return y_n = sum_s A_{n,s} v_s (E3) and A: the definition, and the weights to look at.

    mask, bias: functions of positions; bias(n, s_S), (H, N, S) or (B, H, N, S), is added to the scaled and capped
    logits. n: the positions of the queries, (N,) or (B, N); None: the last N of the keys' positions 0 ... S-1.
    by_keys: with logits from k q^T instead of q k^T, by which few queries read the keys without a copy. axis: None;
    flash.py computes attention to tokens that devices share.
    """
    if axis is not None:
        raise ValueError(f"the tokens are spread over the mesh axis {axis!r}: use flash.attention")
    if groups.count(q_BHNK, k_BHSK, v_BHSV) > 1:
        call = {"mask": mask, "scale": scale, "cap": cap, "bias": bias, "n": n, "by_keys": by_keys}
        return groups.each(attention, q_BHNK, k_BHSK, v_BHSV, **call)
    first, second = (k_BHSK, q_BHNK) if by_keys else (q_BHNK, k_BHSK)
    l_BHNS = logits(first, second, scale=scale, cap=cap)
    l_BHNS = l_BHNS.swapaxes(-1, -2) if by_keys else l_BHNS
    N, S = l_BHNS.shape[-2:]
    n, s_S = jnp.arange(S - N, S) if n is None else n, jnp.arange(S)
    allowed = None if mask is None else mask(n, s_S)
    A_BHNS = weights(l_BHNS if bias is None else l_BHNS + bias(n, s_S), allowed)
    return jnp.matmul(A_BHNS.astype(v_BHSV.dtype), v_BHSV), A_BHNS

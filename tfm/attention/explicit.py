"""Attention by its definition, with all N x S weights in memory. All implementations must give the same result."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from tfm.attention import groups, mask as masks


def logits(q_BHNK: jax.Array, k_BHSK: jax.Array, *, scale: float, cap: float = 0.0) -> jax.Array:
    """Return l_{n,s} = scale * q_n . k_s (the exponents of E6), soft-capped, in float32 (float64 for float64)."""
    dtype = jnp.promote_types(q_BHNK.dtype, jnp.float32)
    return soft_cap(scale * jnp.matmul(q_BHNK, k_BHSK.swapaxes(-1, -2), preferred_element_type=dtype), cap)


def soft_cap(l_BHNS: jax.Array, cap: float) -> jax.Array:
    """Return cap tanh(l / cap), which is close to l for small |l| and stays within +-cap (Gemma Team 2024, section 2).

    If cap is 0, return l unchanged.
    """
    return cap * jnp.tanh(l_BHNS / cap) if cap else l_BHNS


def weights(l_BHNS: jax.Array, allowed: jax.Array | None = None) -> jax.Array:
    """Return A_{n,s} = exp(l_{n,s}) / sum_s' exp(l_{n,s'}) over the allowed keys; each row sums to one (E3, E22).

    allowed: (N, S), (B, N, S), or of four axes as l; None allows all. A query without an allowed key gets zeros, with
    zero gradient. The lowest finite number replaces E22's -inf, because -inf would make such a row NaN.
    """
    if allowed is None:
        return jax.nn.softmax(l_BHNS, axis=-1)
    allowed = allowed[:, None] if allowed.ndim == 3 else allowed
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
    weigh: Callable[[jax.Array, jax.Array | None], jax.Array] | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Return y_n = sum_s A_{n,s} v_s (E3), and the weights A.

    mask, bias: functions of positions (mask.py). The bias is added to the scaled and capped logits.
    n: positions of the queries, (N,) or (B, N); None: the last N of the keys' positions 0 ... S-1.
    weigh: (l_BHNS, allowed) -> A_BHNS; None: `weights`. It gets the logits of all heads.
    """
    if weigh:
        q_BHNK, k_BHSK, v_BHSV = groups.repeat(q_BHNK, k_BHSK, v_BHSV)
    if groups.count(q_BHNK, k_BHSK, v_BHSV) > 1:
        options = {"mask": mask, "scale": scale, "cap": cap, "bias": bias, "n": n}
        return groups.map_groups(attention, q_BHNK, k_BHSK, v_BHSV, **options)
    if q_BHNK.shape[2] == 1:  # without a copy of the keys
        l_BHNS = logits(k_BHSK, q_BHNK, scale=scale, cap=cap).swapaxes(-1, -2)
    else:
        l_BHNS = logits(q_BHNK, k_BHSK, scale=scale, cap=cap)
    N, S = l_BHNS.shape[-2:]
    n, s_S = jnp.arange(S - N, S) if n is None else n, jnp.arange(S)
    l_BHNS = l_BHNS if bias is None else l_BHNS + bias(n, s_S)
    A_BHNS = (weigh or weights)(l_BHNS, None if mask is None else mask(n, s_S))
    return jnp.matmul(A_BHNS.astype(v_BHSV.dtype), v_BHSV), A_BHNS

"""Attention by its definition, with the weights in memory. All implementations must give the same result.

`attention` has all N x S weights at once. `attend_chunks` is for a few hundred tokens: the queries are cut into chunks,
and each chunk reads one span of keys, those that the mask allows to any query of the chunk. The chunks are unrolled, so
the mask must be known during tracing. With a causal mask, four chunks compute 5/8 of the weights. A mask that depends
on traced arrays, such as padding, is unknown: each span then has all keys. A mask of documents does not shorten a span.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from tfm import linear
from tfm.attention import groups, mask as masks

# Forward and gradient in ms on two CPU cores (Zen 4), JAX 0.10.2:
#   8 x 256 tokens, 6 heads, K = 64, causal:   `attention` 34; loops of flash.py 42; 1, 2, 4, 8 chunks 35, 27, 23, 28
#   128 x 50 tokens, 4 heads, K = 16, no mask: `attention` 9.6; loops of flash.py 6.7; 1 chunk 7.0
MAX_KEYS, MAX_CHUNKS, MIN_QUERIES = 512, 4, 64  # keys and chunks of a call; queries of a chunk
MAX_SHARE = 0.8  # share of the N x S weights up to which chunks are faster than the loops of flash.py
MAX_TOKENS = 128  # queries and keys of the single chunk that is used if the spans exceed MAX_SHARE
MAX_WEIGHTS = 2**24  # weights of a chunk: 64 MiB in float32
MAX_SAVED = 2**22  # weights of all chunks that are saved for the gradient; more are recomputed
Chunk = tuple[slice, slice]  # the queries of a chunk, and its span of keys


def logits(q_BHNK: jax.Array, k_BHSK: jax.Array, *, scale: float, dtype: jnp.dtype | None = None) -> jax.Array:
    """Return l_{n,s} = scale * q_n . k_s (the exponents of E6), summed in float32 (float64 for float64).

    dtype: of the result, to which scale * q and k are rounded, too; None: the dtype of the sums.
    """
    wide = jnp.promote_types(q_BHNK.dtype, jnp.float32)
    if dtype is None:
        return scale * jnp.matmul(q_BHNK, k_BHSK.swapaxes(-1, -2), preferred_element_type=wide)
    return jnp.matmul((scale * q_BHNK.astype(wide)).astype(dtype), k_BHSK.astype(dtype).swapaxes(-1, -2))


def soft_cap(l_BHNS: jax.Array, cap: float) -> jax.Array:
    """Return cap tanh(l / cap), which is close to l for small |l| and stays within +-cap (Gemma Team 2024, section 2).

    If cap is 0, return l unchanged.
    """
    return cap * jnp.tanh(linear.to_float32(l_BHNS) / cap) if cap else l_BHNS


def weights(l_BHNS: jax.Array, allowed: jax.Array | None = None) -> jax.Array:
    """Return A_{n,s} = exp(l_{n,s}) / sum_s' exp(l_{n,s'}) over the allowed keys; each row sums to one (E3, E22).

    allowed: (N, S), (B, N, S), or of four axes as l; None allows all. A query without an allowed key gets zeros, with
    zero gradient. The lowest finite number replaces E22's -inf, because -inf would make such a row NaN.
    """
    if allowed is None:
        return _softmax(l_BHNS)
    allowed = allowed[:, None] if allowed.ndim == 3 else allowed
    A_BHNS = _softmax(jnp.where(allowed, l_BHNS, jnp.finfo(l_BHNS.dtype).min))
    return jnp.where(allowed, A_BHNS, 0)


def _softmax(l_BHNS: jax.Array) -> jax.Array:
    """Return exp(l - max l) / sum_s exp(l - max l) in float32 or float64. The difference has the dtype of l."""
    if l_BHNS.dtype != jnp.bfloat16:
        return jax.nn.softmax(l_BHNS, axis=-1)
    largest_BHN1 = jax.lax.stop_gradient(l_BHNS.max(-1, keepdims=True))
    exp_BHNS = jnp.exp(linear.to_float32(l_BHNS - largest_BHN1))
    return exp_BHNS / exp_BHNS.sum(-1, keepdims=True)


def average(
    q_BHNK: jax.Array,
    k_BHSK: jax.Array,
    v_BHSV: jax.Array,
    positions: tuple[jax.Array, jax.Array],
    *,
    mask: masks.Mask | None,
    scale: float,
    cap: float = 0.0,
    bias: masks.Bias | None = None,
    weigh: Callable[[jax.Array, jax.Array | None], jax.Array] | None = None,
    dtype: jnp.dtype | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Return y_n = sum_s A_{n,s} v_s (E3), and the weights A_BHNS.

    positions: (n, s_S) of the queries and keys, the arguments of mask and bias. Other arguments: as of `attention`.
    """
    if q_BHNK.shape[2] == 1:  # without a copy of the keys
        l_BHNS = logits(k_BHSK, q_BHNK, scale=scale, dtype=dtype).swapaxes(-1, -2)
    else:
        l_BHNS = logits(q_BHNK, k_BHSK, scale=scale, dtype=dtype)
    l_BHNS = soft_cap(l_BHNS, cap)
    l_BHNS = l_BHNS if bias is None else l_BHNS + bias(*positions)
    A_BHNS = (weigh or weights)(l_BHNS, None if mask is None else mask(*positions))
    return jnp.matmul(A_BHNS.astype(v_BHSV.dtype), v_BHSV), A_BHNS


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
    dtype: jnp.dtype | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Return y_n = sum_s A_{n,s} v_s (E3) in v's dtype, and the weights A in float32 (float64 for float64).

    mask, bias: functions of positions (mask.py). The bias is added to the scaled and capped logits.
    n: positions of the queries, (N,) or (B, N); None: the last N of the keys' positions 0 ... S-1.
    weigh: (l_BHNS, allowed) -> A_BHNS; None: `weights`. It gets the logits of all heads. dtype: of the logits.
    """
    if weigh:
        q_BHNK, k_BHSK, v_BHSV = groups.repeat(q_BHNK, k_BHSK, v_BHSV)
    if groups.count(q_BHNK, k_BHSK, v_BHSV) > 1:
        options = {"mask": mask, "scale": scale, "cap": cap, "bias": bias, "n": n, "dtype": dtype}
        return groups.map_groups(attention, q_BHNK, k_BHSK, v_BHSV, **options)
    N, S = q_BHNK.shape[2], k_BHSK.shape[2]
    positions = jnp.arange(S - N, S) if n is None else n, jnp.arange(S)
    options = {"mask": mask, "scale": scale, "cap": cap, "bias": bias, "weigh": weigh, "dtype": dtype}
    y_BHNV, A_BHNS = average(q_BHNK, k_BHSK, v_BHSV, positions, **options)
    return checkpoint_name(y_BHNV, "attention"), A_BHNS


def cut_chunks(mask, N: int, S: int, *, tables: int) -> list[Chunk] | None:
    """Return the chunks of N queries at the last N of S positions; None if the loops of flash.py are faster.

    A chunk is a range of queries and the range of keys that they attend to. tables: the number of sequences times
    heads.
    """
    size = -(-N // max(1, min(MAX_CHUNKS, N // MIN_QUERIES)))
    if S > MAX_KEYS or tables * size * S > MAX_WEIGHTS:
        return None
    within = dataclasses.replace(masks.as_mask(mask), document_BS=None)
    allowed = masks.evaluate(within, np.arange(S - N, S), np.arange(S))
    allowed_NS = np.ones((N, S), bool) if allowed is None else allowed.reshape(-1, N, S).any(0)
    chunks, work = [], 0
    for first in range(0, N, size):
        last = min(first + size, N)
        (s,) = np.nonzero(allowed_NS[first:last].any(0))
        span = slice(int(s[0]), int(s[-1]) + 1) if s.size else slice(0, 1)  # a span is never empty
        chunks.append((slice(first, last), span))
        work += (last - first) * (span.stop - span.start)
    if work <= MAX_SHARE * N * S:
        return chunks
    return [(slice(0, N), slice(0, S))] if max(N, S) <= MAX_TOKENS else None


def attend_chunks(
    q_BHNK, k_BHSK, v_BHSV, *, chunks: list[Chunk], mask, scale, cap=0.0, bias=None
) -> tuple[jax.Array, None]:
    """Return y_n = sum_s A_{n,s} v_s (E3), chunk by chunk, and None in place of the weights A.

    chunks: slices of queries and of their keys (`cut_chunks`). Other arguments: see `attention`.
    """
    N, S = q_BHNK.shape[2], k_BHSK.shape[2]
    n, s_S, size, averages = jnp.arange(S - N, S), jnp.arange(S), 0, []
    for rows, span in chunks:
        size += q_BHNK.shape[0] * q_BHNK.shape[1] * (rows.stop - rows.start) * (span.stop - span.start)
    for rows, span in chunks:
        chunk = functools.partial(average, positions=(n[rows], s_S[span]), mask=mask, scale=scale, cap=cap, bias=bias)
        chunk = chunk if size <= MAX_SAVED else jax.checkpoint(chunk)
        averages.append(chunk(q_BHNK[:, :, rows], k_BHSK[:, :, span], v_BHSV[:, :, span])[0])
    return checkpoint_name(jnp.concatenate(averages, axis=2), "attention"), None

"""Attention over a few hundred tokens: the queries are cut into chunks, and each chunk reads one span of keys.

The span covers the keys that the mask allows to any query of the chunk. The chunks are unrolled, so the mask must be
known during tracing. With a causal mask, four chunks compute 5/8 of the N x S weights. A mask that depends on traced
arrays, such as padding, is unknown: each span then has all keys. A mask of documents does not shorten a span.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from tfm.attention import explicit, mask as masks

# Forward and gradient in ms on two CPU cores (Zen 4), JAX 0.10.2:
#   8 x 256 tokens, 6 heads, K = 64, causal:   explicit.py 34; loops of flash.py 42; 1, 2, 4, 8 chunks 35, 27, 23, 28
#   128 x 50 tokens, 4 heads, K = 16, no mask: explicit.py 9.6; loops of flash.py 6.7; 1 chunk 7.0
MAX_KEYS, MAX_CHUNKS, MIN_QUERIES = 512, 4, 64  # keys and chunks of a call; queries of a chunk
MAX_SHARE = 0.8  # share of the N x S weights up to which chunks are faster than the loops of flash.py
MAX_TOKENS = 128  # queries and keys of the single chunk that is used if the spans exceed MAX_SHARE
MAX_WEIGHTS = 2**24  # weights of a chunk: 64 MiB in float32
MAX_SAVED = 2**22  # weights of all chunks that are saved for the gradient; more are recomputed
Chunk = tuple[slice, slice]  # the queries of a chunk, and its span of keys


def cut(mask, N: int, S: int, *, tables: int) -> list[Chunk] | None:
    """Return the chunks of N queries at the last N of S positions; None if the loops of flash.py are faster.

    tables: the number of N x S tables of weights, sequences x heads.
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


def attention(q_BHNK, k_BHSK, v_BHSV, chunks: list[Chunk], *, mask, scale, cap=0.0, bias=None) -> jax.Array:
    """Return y_n = sum_s A_{n,s} v_s (E3), chunk by chunk. Other arguments: see explicit.attention."""
    N, S = q_BHNK.shape[2], k_BHSK.shape[2]
    n, s_S = jnp.arange(S - N, S), jnp.arange(S)

    def average(rows: slice, span: slice, q_BHNK: jax.Array, k_BHSK: jax.Array, v_BHSV: jax.Array) -> jax.Array:
        l_BHNS = explicit.logits(q_BHNK, k_BHSK, scale=scale, cap=cap)
        l_BHNS = l_BHNS if bias is None else l_BHNS + bias(n[rows], s_S[span])
        A_BHNS = explicit.weights(l_BHNS, None if mask is None else mask(n[rows], s_S[span]))
        return jnp.matmul(A_BHNS.astype(v_BHSV.dtype), v_BHSV)

    weights, averages = 0, []
    for rows, span in chunks:
        weights += q_BHNK.shape[0] * q_BHNK.shape[1] * (rows.stop - rows.start) * (span.stop - span.start)
    for rows, span in chunks:
        chunk = functools.partial(average, rows, span)
        chunk = chunk if weights <= MAX_SAVED else jax.checkpoint(chunk)
        averages.append(chunk(q_BHNK[:, :, rows], k_BHSK[:, :, span], v_BHSV[:, :, span]))
    return checkpoint_name(jnp.concatenate(averages, axis=2), "attention")

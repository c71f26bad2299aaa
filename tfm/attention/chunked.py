"""Attention over a few hundred tokens: chunks of queries, each with the span of keys that the mask lets it see.

The chunks are unrolled, so the mask must be known while the program is traced. A causal mask is: four chunks have 5/8
of its weights. A mask that depends on traced arrays, such as padding, is not: every chunk then sees all keys.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from tfm.attention import explicit

# Forward and gradient on two CPU cores (Zen 4), JAX 0.10.2, in ms: by explicit.py; in the loops of flash.py; in 1, 2,
# 4, 8 chunks. 8 x 256 tokens, 6 heads, K = 64, causal: 34; 42; 35, 27, 23, 28. 128 x 50 tokens, 4 heads, K = 16, no
# mask: 9.6; 6.7; 7.0 in one chunk.
KEYS, COUNT, SIDE = 512, 4, 64  # the most keys; the most chunks; the fewest queries of a chunk
ALONE = 128  # the most keys in a single chunk, if the mask hides nothing
WORTH = 0.8  # the largest share of all weights for which chunks are faster than loops
WEIGHTS = 2**24  # the most weights of a chunk: 64 MiB in float32
KEPT = 2**22  # the most weights of all chunks that are saved for the gradient; more are recomputed
Chunk = tuple[slice, slice]  # queries, and the keys that they see


def cut(mask, N: int, S: int, *, tables: int) -> list[Chunk] | None:
    """Return the chunks for N queries, the last of S keys; None if the loops of flash.py are faster.

    tables: sequences x heads, each of which has a table of weights.
    """
    rows = -(-N // max(1, min(COUNT, N // SIDE)))
    if S > KEYS or tables * rows * S > WEIGHTS:
        return None
    seen_NS = np.ones((N, S), bool)
    arrays = jax.tree.leaves(mask)
    if mask is not None and not any(isinstance(array, jax.core.Tracer) for array in arrays):
        with jax.ensure_compile_time_eval():
            allowed = mask(np.arange(S - N, S), np.arange(S))
        if not isinstance(allowed, jax.core.Tracer):
            seen_NS = np.asarray(allowed).reshape(-1, N, S).any(0)
    chunks, work = [], 0
    for first in range(0, N, rows):
        last = min(first + rows, N)
        (s,) = np.nonzero(seen_NS[first:last].any(0))
        span = slice(int(s[0]), int(s[-1]) + 1) if s.size else slice(0, 1)  # one key if none is seen
        chunks.append((slice(first, last), span))
        work += (last - first) * (span.stop - span.start)
    if work <= WORTH * N * S:
        return chunks
    return [(slice(0, N), slice(0, S))] if max(N, S) <= ALONE else None


def attention(q_BHNK, k_BHSK, v_BHSV, chunks: list[Chunk], *, mask, scale, cap=0.0, bias=None) -> jax.Array:
    """Return y_n = sum_s A_{n,s} v_s (E3), chunk by chunk; other arguments as of explicit.attention."""
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
        chunk = chunk if weights <= KEPT else jax.checkpoint(chunk)
        averages.append(chunk(q_BHNK[:, :, rows], k_BHSK[:, :, span], v_BHSV[:, :, span]))
    return checkpoint_name(jnp.concatenate(averages, axis=2), "attention")

"""Attention of a few hundred tokens: chunks of queries, each against the span of keys that the mask lets any of it see.

A chunk is written out, without a loop, so the mask must be known while the program is made: a causal one, of which four
chunks have 5/8 of the weights, is. One of the lengths of a batch is not, and then every chunk sees all.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from tfm.attention import block_mask, online_softmax

# Forward and gradient on two CPU cores (Zen 4), JAX 0.10.2, in ms, by explicit.py, in the loops of flash.py, in 1, 2,
# 4, 8 chunks: 8 x 256 tokens, 6 heads, K = 64, causal: 34, 42, 35, 27, 23, 28; 128 x 50 tokens, 4 heads, K = 16, no
# mask: 9.6, 6.7, 7.0 in one.
KEYS, COUNT, SIDE = 512, 4, 64  # up to so many keys; at most so many chunks, of at least so many queries
ALONE = 128  # so many keys in one chunk, where no mask saves anything
WORTH = 0.8  # of all weights at most, or loops compute them
WEIGHTS = 2**24  # of a chunk at most: 64 MiB in float32
Chunk = tuple[slice, slice]  # the queries, and the keys that they see


def cut(mask, N: int, S: int, *, tables: int, side: int = SIDE, count: int = COUNT) -> list[Chunk] | None:
    """The chunks for N queries, the last of S keys, with so many tables of weights (sequences x heads); None: loops.

    A mask of arrays that are traced, or a function around them, is not known yet, and every chunk sees all.
    """
    rows = -(-N // max(1, min(count, N // side)))
    if S > KEYS or tables * rows * S > WEIGHTS:
        return None
    seen_NS = np.ones((N, S), bool)
    arrays = jax.tree.leaves(block_mask.arrays_of(mask))
    if mask is not None and not any(isinstance(array, jax.core.Tracer) for array in arrays):
        with jax.ensure_compile_time_eval():
            allowed = mask(np.arange(S - N, S), np.arange(S))
        if not isinstance(allowed, jax.core.Tracer):
            seen_NS = np.asarray(allowed).reshape(-1, N, S).any(0)
    chunks, work = [], 0
    for first in range(0, N, rows):
        (s,) = np.nonzero(seen_NS[first : first + rows].any(0))
        span = slice(int(s[0]), int(s[-1]) + 1) if s.size else slice(0, 1)  # one key where none is seen
        chunks.append((slice(first, min(first + rows, N)), span))
        work += (min(first + rows, N) - first) * (span.stop - span.start)
    if work <= WORTH * N * S:
        return chunks
    return [(slice(0, N), slice(0, S))] if max(N, S) <= ALONE else None


def attention(q_BHNK, k_BHSK, v_BHSV, chunks: list[Chunk], *, mask, scale, cap=0.0, bias=None) -> jax.Array:
    """y_n = sum_s A_{n,s} v_s (E3), the chunks one beside the other; arguments as of explicit.attention."""
    N, S, wide = q_BHNK.shape[2], k_BHSK.shape[2], jnp.promote_types(q_BHNK.dtype, jnp.float32)
    rules = block_mask.Rules(block_mask.arrays_of(mask), block_mask.arrays_of(bias), cap)
    zero = block_mask.zero((q_BHNK, k_BHSK, v_BHSV, rules))
    n, s_S, narrow = jnp.arange(S - N, S) + zero, jnp.arange(S) + zero, v_BHSV.dtype
    q_BHNK = scale * q_BHNK.astype(wide)

    def chunk(rows: slice, span: slice) -> jax.Array:
        query = {"n": n[rows], "q": q_BHNK[:, :, rows] + zero}
        key = {"s": s_S[span], "k": k_BHSK[:, :, span].astype(wide) + zero, "v": v_BHSV[:, :, span].astype(wide) + zero}
        return _average(rules, query, key)

    return jnp.concatenate([chunk(*one) for one in chunks], axis=2).astype(narrow)


@jax.custom_vjp
def _average(rules: block_mask.Rules, query: dict, key: dict) -> jax.Array:
    """y_BHNV of one chunk."""
    return _forward(rules, query, key)[0]


def _forward(rules: block_mask.Rules, query: dict, key: dict) -> tuple[jax.Array, Any]:
    sums = online_softmax.empty(rules, query, key)
    sums = online_softmax.block_forward(rules, query, key, rules.allowed(query, key), *sums)
    y_BHNV, lse_BHN1 = (checkpoint_name(x, "attention") for x in online_softmax.finish(sums))
    return y_BHNV, (rules, query, key, y_BHNV, lse_BHN1)


def _backward(saved: Any, dy_BHNV: jax.Array) -> tuple[block_mask.Rules, dict, dict]:
    rules, query, key, y_BHNV, lse_BHN1 = saved
    query = online_softmax.for_gradient(query, y_BHNV, lse_BHN1, dy_BHNV)
    sums = *(jnp.zeros_like(key[name].swapaxes(-1, -2)) for name in "kv"), jnp.zeros_like(query["q"])
    dbias = online_softmax.empty_bias(rules, query, key)
    allowed = rules.allowed(query, key)
    dk_BHKS, dv_BHVS, dq_BHNK, dbias = online_softmax.block_backward(rules, query, key, allowed, *sums, dbias)
    dkey = {"s": None, "k": dk_BHKS.swapaxes(-1, -2), "v": dv_BHVS.swapaxes(-1, -2)}
    return rules.gradient(rules.into_learned(query, key, dbias)), {"n": None, "q": dq_BHNK}, dkey


_average.defvjp(_forward, _backward)

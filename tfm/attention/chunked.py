"""Attention of a few hundred tokens: strips of queries, each against the span of keys that the mask lets any of it see.

What is in a strip is written out, without a loop, so the mask must be known while the program is made: a causal one is,
one that closes over the lengths of a batch is not, and then every strip sees all. Under a causal mask four strips have
5/8 of the weights.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tfm.attention import block_mask, nan_guard, online_softmax
from tfm.attention import mask as masks

# Forward and gradient on two CPU cores (Zen 4), JAX 0.10.2, in ms, as `explicit`, in the loops of `flash`, in 1, 2,
# 4, 8 strips: 8 x 256 tokens, 6 heads, K = 64, causal: 34, 42, 35, 27, 23, 28; 128 x 50 tokens, 4 heads, K = 16, no
# mask: 9.6, 6.7, 7.0 in one.
KEYS, COUNT, SIDE = 512, 4, 64  # up to so many keys; at most so many strips, of at least so many queries
ALONE = 128  # so many keys in one strip, where no mask saves anything
WORTH = 0.8  # of all weights at most, or loops compute them
WEIGHTS = 2**24  # of a strip at most: 64 MiB in float32
Strip = tuple[slice, slice]  # the queries, and the keys that they see


def cut(mask: masks.Mask | None, N: int, S: int, *, tables: int) -> list[Strip] | None:
    """The strips for N queries, the last of S keys, with so many tables of weights (sequences x heads); None: loops."""
    count = max(1, min(COUNT, N // SIDE))
    side = -(-N // count)
    if S > KEYS or tables * side * S > WEIGHTS:
        return None
    seen_NS = _seen(mask, N, S)
    strips = [(slice(i, min(i + side, N)), _span(seen_NS[i : i + side].any(0))) for i in range(0, N, side)]
    work = sum((rows.stop - rows.start) * (span.stop - span.start) for rows, span in strips)
    if work <= WORTH * N * S:
        return strips
    return [(slice(0, N), slice(0, S))] if max(N, S) <= ALONE else None


def _seen(mask: masks.Mask | None, N: int, S: int) -> np.ndarray:
    """Whether any sequence allows query n to see key s, as far as that is known now: (N, S)."""
    if mask is None:
        return np.ones((N, S), bool)
    n, s_S = np.arange(S - N, S), np.arange(S)
    rules, consts = block_mask.rules(mask, None, {"n": n}, {"s": s_S})
    if any(isinstance(const, jax.core.Tracer) for const in consts["mask"]):
        return np.ones((N, S), bool)
    with jax.ensure_compile_time_eval():
        return np.asarray(rules.mask(consts["mask"], n, s_S)).reshape(-1, N, S).any(0)


def _span(seen_S: np.ndarray) -> slice:
    """From the first key that is seen to the last; one key where none is."""
    (s,) = np.nonzero(seen_S)
    return slice(int(s[0]), int(s[-1]) + 1) if s.size else slice(0, 1)


def average(
    q_BHNK: jax.Array,
    k_BHSK: jax.Array,
    v_BHSV: jax.Array,
    strips: list[Strip],
    *,
    mask: masks.Mask | None,
    scale: float,
    bias: Callable[[jax.Array, jax.Array], jax.Array] | None = None,
) -> jax.Array:
    """y_n = sum_s A_{n,s} v_s (E3), the strips one beside the other; arguments as of `explicit`."""
    N, S, wide = q_BHNK.shape[2], k_BHSK.shape[2], jnp.promote_types(q_BHNK.dtype, jnp.float32)
    zero = block_mask.zero((q_BHNK, k_BHSK, v_BHSV))
    n, s_S, narrow = jnp.arange(S - N, S) + zero, jnp.arange(S) + zero, v_BHSV.dtype
    if mask is not None:
        k_BHSK, v_BHSV, sound_BS = nan_guard.clean(k_BHSK, v_BHSV)
    q_BHNK = scale * q_BHNK.astype(wide)

    def strip(rows: slice, span: slice) -> jax.Array:
        rules, consts = block_mask.rules(mask, bias, {"n": n[rows]}, {"s": s_S[span]})
        same = zero + block_mask.zero(consts)
        query = {"n": n[rows], "q": q_BHNK[:, :, rows] + same}
        key = {"s": s_S[span], "k": k_BHSK[:, :, span].astype(wide) + same, "v": v_BHSV[:, :, span].astype(wide) + same}
        if mask is not None:
            key["sound"] = sound_BS[:, span] & (same == 0)
        return _average(rules, query, key, consts)

    return jnp.concatenate([strip(*one) for one in strips], axis=2).astype(narrow)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _average(rules: block_mask.Rules, query: dict, key: dict, consts: Any) -> jax.Array:
    """y_BHNV of one strip."""
    return _forward(rules, query, key, consts)[0]


def _forward(rules: block_mask.Rules, query: dict, key: dict, consts: Any) -> tuple[jax.Array, Any]:
    allowed = rules.allowed(query, key, consts)
    none = online_softmax.empty(rules, query, key, consts)
    y_BHNV, lse_BHN1 = online_softmax.finish(online_softmax.block_forward(rules, query, key, consts, allowed, *none))
    return y_BHNV, (query, key, consts, y_BHNV, lse_BHN1)


def _backward(rules: block_mask.Rules, saved: Any, dy_BHNV: jax.Array) -> tuple[dict, dict, dict]:
    query, key, consts, y_BHNV, lse_BHN1 = saved
    query = online_softmax.for_gradient(query, y_BHNV, lse_BHN1, dy_BHNV)
    bias = rules.added(query, key, consts["bias"])
    none = *(jnp.zeros_like(key[name].swapaxes(-1, -2)) for name in "kv"), jnp.zeros_like(query["q"])
    dbias = None if bias is None else jnp.zeros_like(bias) + block_mask.zero((query, key, consts))
    allowed = rules.allowed(query, key, consts)
    dk_BHKS, dv_BHVS, dq_BHNK, dbias = online_softmax.block_backward(rules, query, key, consts, allowed, *none, dbias)
    dkey = dict.fromkeys(key) | {"k": dk_BHKS.swapaxes(-1, -2), "v": dv_BHVS.swapaxes(-1, -2)}
    dconsts = {"mask": [None] * len(consts["mask"]), "bias": rules.into_consts(query, key, consts["bias"], dbias)}
    return {"q": dq_BHNK, "n": None}, dkey, dconsts


_average.defvjp(_forward, _backward)

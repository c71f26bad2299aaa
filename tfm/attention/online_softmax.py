"""One block of weights in the online softmax: what it adds to the averages of its queries, and the gradients from it.

Blocks are dicts as in block_mask.py, with `q`, or `k` and `v`, beside positions. Sums are scaled down whenever a larger
logit turns up (Milakov and Gimelshein 2018); the gradient forms each block of weights again from the logarithm of the
row sums (Dao et al. 2022).
"""

import jax
import jax.numpy as jnp

from tfm.attention import block_mask, explicit


def _compared(q_BHNK: jax.Array, k_BHSK: jax.Array) -> jax.Array:
    """q . k; on a CPU XLA multiplies them as they lie, where `matmul` would copy k first."""
    return jnp.einsum("...nk,...sk->...ns", q_BHNK, k_BHSK)


def logits(rules: block_mask.Rules, query: dict, key: dict, allowed: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """q . k, softly capped; and that + bias, and -inf where a key is not allowed."""
    bias, c_BHNS = rules.added(query, key), explicit.capped(_compared(query["q"], key["k"]), rules.cap)
    l_BHNS = c_BHNS if bias is None else c_BHNS + bias.astype(c_BHNS.dtype)
    if allowed is None:
        return c_BHNS, l_BHNS
    return c_BHNS, jnp.where(allowed if allowed.ndim == 2 else allowed[:, None], l_BHNS, -jnp.inf)


def empty(rules: block_mask.Rules, query: dict, key: dict) -> tuple:
    """The sums over no key, of the shapes that the block of keys says."""
    l_BHNS = jax.eval_shape(lambda: logits(rules, query, key, None)[1])
    y_BHNV = jax.eval_shape(jnp.matmul, l_BHNS, key["v"])
    zero = block_mask.zero((query, key, rules)).astype(l_BHNS.dtype)
    row_BHN1 = jnp.full((*l_BHNS.shape[:-1], 1), zero)
    return row_BHN1 - jnp.inf, row_BHN1, jnp.full(y_BHNV.shape, zero)


def empty_bias(rules: block_mask.Rules, query: dict, key: dict) -> jax.Array | None:
    """The gradient of a block of the bias before any weight; None where the bias learns nothing."""
    if not jax.tree.leaves(rules.learned()):
        return None
    return jnp.zeros_like(rules.added(query, key)) + block_mask.zero((query, key, rules))


def block_forward(rules: block_mask.Rules, query: dict, key: dict, allowed: jax.Array | None, *sums) -> tuple:
    """The largest logit, the sum of exp(logit - largest), the sum of that times the value, with one more block."""
    top, total, y_BHNV = sums
    _, l_BHNS = logits(rules, query, key, allowed)
    higher = jnp.maximum(top, l_BHNS.max(-1, keepdims=True))
    finite = jnp.where(higher == -jnp.inf, 0, higher)  # -inf - -inf would be NaN
    p_BHNS, shrink = jnp.exp(l_BHNS - finite), jnp.exp(top - finite)
    total = total * shrink + p_BHNS.sum(-1, keepdims=True)
    return higher, total, y_BHNV * shrink + jnp.matmul(p_BHNS, key["v"])


def finish(sums: tuple) -> tuple[jax.Array, jax.Array]:
    """y_BHNV of one block of queries, and log sum_s exp(l_{n,s}): infinite for queries that see nothing."""
    top, total, y_BHNV = sums
    blind = total == 0
    total = jnp.where(blind, 1, total)
    return y_BHNV / total, jnp.where(blind, jnp.inf, top + jnp.log(total))


def for_gradient(query: dict, y_BHNV: jax.Array, lse_BHN1: jax.Array, dy_BHNV: jax.Array) -> dict:
    """The queries with what `block_backward` wants of them, from their averages and the gradient of those."""
    quiet = lse_BHN1 == jnp.inf
    dy_BHNV = jnp.where(quiet, 0, dy_BHNV)
    inner = jnp.where(quiet, 0, y_BHNV * dy_BHNV).sum(-1, keepdims=True)
    if lse_BHN1.shape[-3] == 1:  # weights that all heads share collect the gradients of all
        inner = inner.sum(-3, keepdims=True)
    query = query | {"dy": dy_BHNV, "lse": lse_BHN1, "inner": inner}
    return query | {f"{name}_across": query[name].swapaxes(-1, -2) for name in ("q", "dy")}


def block_backward(rules, query, key, allowed, dk_BHKS, dv_BHVS, dq_BHNK, dbias) -> tuple:
    """The gradients of keys, values and queries with those from one block of weights, and the gradient of its bias.

    From the weights A = exp(l - lse), formed again: dl = A (dA - sum_s A dA), and sum_s A dA = y . dy. The slope of a
    capped product c is 1 - (c / cap)^2.
    A^T x is formed as (x^T A)^T from transposed queries and gradients: five times as fast on a CPU (512 x 512, K = 32).
    """
    q_BHNK, k_BHSK, v_BHSV, dy_BHNV = query["q"], key["k"], key["v"], query["dy"]
    c_BHNS, l_BHNS = logits(rules, query, key, allowed)
    A_BHNS = jnp.exp(l_BHNS - query["lse"])
    dA_BHNS = _fold(_compared(dy_BHNV, v_BHSV), A_BHNS)
    dl_BHNS = A_BHNS * (dA_BHNS - query["inner"])
    dc_BHNS = dl_BHNS * (1 - jnp.square(c_BHNS / rules.cap)) if rules.cap else dl_BHNS
    return (
        dk_BHKS + _fold(jnp.matmul(query["q_across"], dc_BHNS), dk_BHKS),
        dv_BHVS + _fold(jnp.matmul(query["dy_across"], A_BHNS), dv_BHVS),
        dq_BHNK + _fold(jnp.matmul(dc_BHNS, k_BHSK), q_BHNK),
        None if dbias is None else _fold(dl_BHNS, dbias).astype(dbias.dtype),
    )


def _fold(x: jax.Array, like: jax.Array) -> jax.Array:
    """Summed over the axes along which `like` was broadcast to the shape of x: the gradient of that."""
    x = x.sum(tuple(range(x.ndim - like.ndim)))
    return x.sum([i for i in range(x.ndim) if like.shape[i] == 1 < x.shape[i]], keepdims=True)

"""One block of weights in the online softmax: its share of the averages of its queries, and its gradients.

Blocks are the dicts of block_mask.py, with `q`, or with `k` and `v`, next to the positions. The sums are scaled down
whenever a larger logit appears (Milakov and Gimelshein 2018). The gradient computes each block of weights again from
the logarithm of the row sums (Dao et al. 2022).
"""

import jax
import jax.numpy as jnp

from tfm.attention import block_mask, explicit


def _dot(q_BHNK: jax.Array, k_BHSK: jax.Array) -> jax.Array:
    """Return q . k. On a CPU einsum multiplies the arrays as they are stored; `matmul` would copy k first."""
    return jnp.einsum("...nk,...sk->...ns", q_BHNK, k_BHSK)


def logits(rules: block_mask.Rules, query: dict, key: dict, allowed: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Return c = q . k, softly capped, and the logits: c + bias, and -inf if the key is not allowed."""
    bias, c_BHNS = rules.logit_bias(query, key), explicit.soft_cap(_dot(query["q"], key["k"]), rules.cap)
    l_BHNS = c_BHNS if bias is None else c_BHNS + bias.astype(c_BHNS.dtype)
    if allowed is None:
        return c_BHNS, l_BHNS
    return c_BHNS, jnp.where(allowed if allowed.ndim == 2 else allowed[:, None], l_BHNS, -jnp.inf)


def empty(rules: block_mask.Rules, query: dict, key: dict) -> tuple:
    """Return the sums over no key, of the shapes that this block of keys gives."""
    l_BHNS = jax.eval_shape(lambda: logits(rules, query, key, None)[1])
    y_BHNV = jax.eval_shape(jnp.matmul, l_BHNS, key["v"])
    zero = block_mask.zero((query, key, rules)).astype(l_BHNS.dtype)
    row_BHN1 = jnp.full((*l_BHNS.shape[:-1], 1), zero)
    return row_BHN1 - jnp.inf, row_BHN1, jnp.full(y_BHNV.shape, zero)


def empty_bias(rules: block_mask.Rules, query: dict, key: dict) -> jax.Array | None:
    """Return the zero gradient of a block of the bias; None if the bias learns nothing."""
    if not jax.tree.leaves(rules.learned()):
        return None
    return jnp.zeros_like(rules.logit_bias(query, key)) + block_mask.zero((query, key, rules))


def block_forward(rules: block_mask.Rules, query: dict, key: dict, allowed: jax.Array | None, *sums) -> tuple:
    """Add one block of keys to the sums: the largest logit, sum_s exp(l - largest), and sum_s exp(l - largest) v_s."""
    top, total, y_BHNV = sums
    _, l_BHNS = logits(rules, query, key, allowed)
    higher = jnp.maximum(top, l_BHNS.max(-1, keepdims=True))
    finite = jnp.where(higher == -jnp.inf, 0, higher)  # -inf - -inf would be NaN
    p_BHNS, shrink = jnp.exp(l_BHNS - finite), jnp.exp(top - finite)
    total = total * shrink + p_BHNS.sum(-1, keepdims=True)
    return higher, total, y_BHNV * shrink + jnp.matmul(p_BHNS, key["v"])


def finish(sums: tuple) -> tuple[jax.Array, jax.Array]:
    """Return y_BHNV of one block of queries, and log sum_s exp(l_{n,s}), which is infinite if a query sees no key."""
    top, total, y_BHNV = sums
    blind = total == 0
    total = jnp.where(blind, 1, total)
    return y_BHNV / total, jnp.where(blind, jnp.inf, top + jnp.log(total))


def prepare_gradient(query: dict, y_BHNV: jax.Array, lse_BHN1: jax.Array, dy_BHNV: jax.Array) -> dict:
    """Return the queries with the arrays that `block_backward` needs: dy, lse, y . dy, and transposes of q and dy."""
    blind = lse_BHN1 == jnp.inf
    dy_BHNV = jnp.where(blind, 0, dy_BHNV)
    inner = jnp.where(blind, 0, y_BHNV * dy_BHNV).sum(-1, keepdims=True)
    if lse_BHN1.shape[-3] == 1:  # weights that all heads share collect the gradients of all
        inner = inner.sum(-3, keepdims=True)
    query = query | {"dy": dy_BHNV, "lse": lse_BHN1, "inner": inner}
    return query | {"q_transposed": query["q"].swapaxes(-1, -2), "dy_transposed": dy_BHNV.swapaxes(-1, -2)}


def block_backward(rules, query, key, allowed, dk_BHKS, dv_BHVS, dq_BHNK, dbias) -> tuple:
    """Add the gradients of one block of weights to those of keys, values and queries; return the block's of the bias.

    The weights A = exp(l - lse) are computed again. dl = A (dA - sum_s A dA), and sum_s A dA = y . dy. The derivative
    of a capped product c is 1 - (c / cap)^2. A^T x is computed as (x^T A)^T from transposed queries and gradients,
    which takes a fifth of the time on a CPU (512 x 512, K = 32).
    """
    q_BHNK, k_BHSK, v_BHSV, dy_BHNV = query["q"], key["k"], key["v"], query["dy"]
    c_BHNS, l_BHNS = logits(rules, query, key, allowed)
    A_BHNS = jnp.exp(l_BHNS - query["lse"])
    dA_BHNS = _sum_to(_dot(dy_BHNV, v_BHSV), A_BHNS)
    dl_BHNS = A_BHNS * (dA_BHNS - query["inner"])
    dc_BHNS = dl_BHNS * (1 - jnp.square(c_BHNS / rules.cap)) if rules.cap else dl_BHNS
    return (
        dk_BHKS + _sum_to(jnp.matmul(query["q_transposed"], dc_BHNS), dk_BHKS),
        dv_BHVS + _sum_to(jnp.matmul(query["dy_transposed"], A_BHNS), dv_BHVS),
        dq_BHNK + _sum_to(jnp.matmul(dc_BHNS, k_BHSK), q_BHNK),
        None if dbias is None else _sum_to(dl_BHNS, dbias).astype(dbias.dtype),
    )


def _sum_to(x: jax.Array, like: jax.Array) -> jax.Array:
    """Return x summed over the axes along which `like` was broadcast: the gradient of broadcasting."""
    x = x.sum(tuple(range(x.ndim - like.ndim)))
    return x.sum([i for i in range(x.ndim) if like.shape[i] == 1 < x.shape[i]], keepdims=True)

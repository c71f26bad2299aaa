"""Online softmax: what one block of weights adds to the averages of its queries, and its gradients.

Blocks are the dicts of block_mask.py with more arrays: `q`, multiplied by the scale, in a block of queries, and `k` and
`v` in a block of keys. The sums are scaled down whenever a larger logit appears (Milakov and Gimelshein 2018). The
gradient recomputes the weights from lse, the logarithm of the sums of exp(logits) (Dao et al. 2022).
"""

import jax
import jax.numpy as jnp

from tfm import layout as layouts
from tfm.attention import block_mask, explicit


def _dot(q_BHNK: jax.Array, k_BHSK: jax.Array) -> jax.Array:
    """Return q . k for all queries and keys. On a CPU `matmul` would copy k first, but einsum does not."""
    return jnp.einsum("...nk,...sk->...ns", q_BHNK, k_BHSK)


def logits(rules: block_mask.Rules, query: dict, key: dict, allowed: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Return c_BHNS = q . k, soft-capped, and the logits: c + bias, or -inf if the key is not `allowed` (None: all)."""
    bias, c_BHNS = rules.logit_bias(query, key), explicit.soft_cap(_dot(query["q"], key["k"]), rules.cap)
    l_BHNS = c_BHNS if bias is None else c_BHNS + bias.astype(c_BHNS.dtype)
    if allowed is None:
        return c_BHNS, l_BHNS
    return c_BHNS, jnp.where(allowed if allowed.ndim == 2 else allowed[:, None], l_BHNS, -jnp.inf)


def start_sums(rules: block_mask.Rules, query: dict, key: dict) -> tuple:
    """Return the sums of `block_forward` before any key: top -inf, total 0, y 0. key: any block, for the shapes."""
    l_BHNS = jax.eval_shape(lambda: logits(rules, query, key, None)[1])
    y_BHNV = jax.eval_shape(jnp.matmul, l_BHNS, key["v"])
    row_BHN1 = jnp.zeros((*l_BHNS.shape[:-1], 1), l_BHNS.dtype)
    sums = row_BHN1 - jnp.inf, row_BHN1, jnp.zeros(y_BHNV.shape, l_BHNS.dtype)
    return layouts.vary_alike(sums, query, key, rules)


def zero_bias_gradient(rules: block_mask.Rules, query: dict, key: dict) -> jax.Array | None:
    """Return zeros with the shape of one block's bias, which `block_backward` replaces by the gradient of this bias.

    None if no array of the bias has a gradient. query["n"], key["s"]: the positions in a block of queries and in a
    block of keys.
    """
    if not jax.tree.leaves(rules.bias_arrays()):
        return None
    return layouts.vary_alike(jnp.zeros_like(rules.logit_bias(query, key)), query, key, rules)


def block_forward(rules: block_mask.Rules, query: dict, key: dict, allowed: jax.Array | None, *sums) -> tuple:
    """Add one block of keys to the sums: the largest logit, sum_s exp(l - largest), and sum_s exp(l - largest) v_s.

    sums: these three before the block, at first `start_sums`. Returns them after it. allowed: the block's mask; None:
    all keys are allowed.
    """
    top, total, y_BHNV = sums
    _, l_BHNS = logits(rules, query, key, allowed)
    higher = jnp.maximum(top, l_BHNS.max(-1, keepdims=True))
    finite = jnp.where(higher == -jnp.inf, 0, higher)  # -inf - -inf would be NaN
    p_BHNS, shrink = jnp.exp(l_BHNS - finite), jnp.exp(top - finite)
    total = total * shrink + p_BHNS.sum(-1, keepdims=True)
    return higher, total, y_BHNV * shrink + jnp.matmul(p_BHNS, key["v"])


def finish(sums: tuple) -> tuple[jax.Array, jax.Array]:
    """Return y_BHNV and lse_BHN1 = log sum_s exp(l_{n,s}) for a block of queries; lse is inf without an allowed key."""
    top, total, y_BHNV = sums
    no_key = total == 0
    total = jnp.where(no_key, 1, total)
    return y_BHNV / total, jnp.where(no_key, jnp.inf, top + jnp.log(total))


def prepare_gradient(query: dict, y_BHNV: jax.Array, lse_BHN1: jax.Array, dy_BHNV: jax.Array) -> dict:
    """Return the queries and what `block_backward` needs: dy, lse, inner = y . dy, and the transposes of q and dy."""
    no_key = lse_BHN1 == jnp.inf
    dy_BHNV = jnp.where(no_key, 0, dy_BHNV)
    inner = jnp.where(no_key, 0, y_BHNV * dy_BHNV).sum(-1, keepdims=True)
    if lse_BHN1.shape[-3] == 1:  # all heads share the weights, whose gradient is the sum over heads
        inner = inner.sum(-3, keepdims=True)
    query = query | {"dy": dy_BHNV, "lse": lse_BHN1, "inner": inner}
    return query | {"q_transposed": query["q"].swapaxes(-1, -2), "dy_transposed": dy_BHNV.swapaxes(-1, -2)}


def block_backward(rules, query, key, allowed, dk_BHKS, dv_BHVS, dq_BHNK, dbias) -> tuple:
    """Return dk, dv and dq plus the gradients from one block of weights, and the gradient of this block of the bias.

    query: the dict of `prepare_gradient`. key: the dict of a block with k and v. allowed: as in `block_forward`. dbias:
    an array like this block of the bias; None: return None as its gradient.
    The weights A = exp(l - lse) are recomputed. dl = A (dA - sum_s A dA), and sum_s A dA = y . dy. The derivative
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
    """Return x summed to the shape of `like`: the gradient of broadcasting `like` to the shape of x."""
    x = x.sum(tuple(range(x.ndim - like.ndim)))
    return x.sum([i for i in range(x.ndim) if like.shape[i] == 1 < x.shape[i]], keepdims=True)

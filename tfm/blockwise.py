"""Attention block by block: the averages of `explicit` without its N x S weights, in memory linear in N and S.

The softmax of a query runs over one block of keys at a time, rescaling what it has summed whenever a larger logit turns
up (Milakov and Gimelshein 2018); the gradient forms each block of weights again from the logarithm of the row sums (Dao
et al. 2022). I and J count the blocks of queries and of keys; N and S are the tokens of one block.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tfm import mask as masks
from tfm import ring, shield, tiles

# Forward and gradient under the causal mask on two CPU cores, JAX 0.10.2, K = 32, in seconds: for 8,192 tokens and 4
# heads 0.26 in blocks of 512 x 512, 0.28 of 512 x 256, 0.30 of 1024 x 256, 0.45 of 256 x 256 (one core alone computes
# products so small); for 16 x 1,024 tokens and 8 heads 0.96, 0.65, 0.47, 0.52 in square blocks of 512, 256, 128, 64.
SIDES, WEIGHTS = (512, 256, 128), 2**21  # the largest side of a block with which so many weights are not exceeded
Tree = Any


def blockwise(
    q_BHNK: jax.Array,
    k_BHSK: jax.Array,
    v_BHSV: jax.Array,
    *,
    mask: masks.Mask | None,
    scale: float,
    bias: Callable[[jax.Array, jax.Array], jax.Array] | None = None,
    n: jax.Array | None = None,
    queries: int | None = None,
    keys: int | None = None,
    axis: str | None = None,
) -> tuple[jax.Array, None]:
    """y_n = sum_s A_{n,s} v_s (E3) from at most `queries` x `keys` weights at a time; arguments as of `explicit`.

    None: as many as were measured to be fast, fewer for many sequences and heads. Logits, weights and sums are float32
    or wider. Blocks in which the mask allows nothing are passed over. Differentiable in reverse mode, also with respect
    to the arrays that `bias` closes over.

    axis: the axis of a device mesh over which the tokens are spread (inside `jax.shard_map`): q, k, v, n and y are a
    device's own tokens, which attend to those of all devices; mask and bias are asked for positions of all. ValueError
    where n is None, or not as many keys as queries are given.
    """
    N, S, wide = q_BHNK.shape[2], k_BHSK.shape[2], jnp.promote_types(q_BHNK.dtype, jnp.float32)
    side = _side(q_BHNK.shape[0] * max(x.shape[1] for x in (q_BHNK, k_BHSK, v_BHSV)))
    queries, keys, narrow = tiles.size(N, queries or side), tiles.size(S, keys or side), v_BHSV.dtype
    zero = tiles.zero((q_BHNK, k_BHSK, v_BHSV, n, None if axis is None else jax.lax.axis_index(axis)))
    n, s_S = (x + zero for x in ring.positions(n, N, S, axis))
    if s_S.ndim == 2:
        mask, bias = ring.paired(mask, 3), ring.paired(bias, 4)
    # Filled up with the last position, so that what fills up a block is not what makes it needed.
    query, key = {"n": tiles.cut(n, -1, queries, mode="edge")}, {"s": tiles.cut(s_S, -1, keys, mode="edge")}
    rules, consts = tiles.rules(mask, bias, *jax.tree.map(lambda x: x[0], (query, key)))
    zero += tiles.zero(consts)
    if mask is not None:
        k_BHSK, v_BHSV, sound_BS = shield.clean(k_BHSK, v_BHSV)
        key["sound"] = tiles.cut(sound_BS & (zero == 0), 1, keys)
    if S % keys:
        key["real"] = tiles.cut(jnp.broadcast_to(zero == 0, S), 0, keys)
    key["k"], key["v"] = (tiles.cut(x + zero, 2, keys) for x in (k_BHSK, v_BHSV))
    query["q"] = tiles.cut(scale * q_BHNK.astype(wide) + zero, 2, queries)
    return tiles.join(_average(rules, axis, query, key, consts), N).astype(narrow), None


def _side(tables: int) -> int:
    """How many queries and keys are in a block, where it has a table of weights for so many sequences x heads."""
    return next((side for side in SIDES if tables * side**2 <= WEIGHTS), SIDES[-1])


def _compared(q_BHNK: jax.Array, k_BHSK: jax.Array) -> jax.Array:
    """q . k of every query and key; XLA multiplies them as they lie on a CPU, where `matmul` would copy k first."""
    return jnp.einsum("...nk,...sk->...ns", q_BHNK, k_BHSK)


def _logits(q_BHNK: jax.Array, k_BHSK: jax.Array, bias: jax.Array | None, allowed: jax.Array | None) -> jax.Array:
    """q . k + bias, and -inf where a key is not allowed."""
    l_BHNS = _compared(q_BHNK, k_BHSK)
    l_BHNS = l_BHNS if bias is None else l_BHNS + bias.astype(l_BHNS.dtype)
    if allowed is None:
        return l_BHNS
    return jnp.where(allowed if allowed.ndim == 2 else allowed[:, None], l_BHNS, -jnp.inf)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _average(rules: tiles.Rules, axis: str | None, query: dict, key: dict, consts: Tree) -> jax.Array:
    """y_IBHNV for blocks of queries and of keys."""
    return _forward(rules, axis, query, key, consts)[0]


# ------------------------------------------------------------------------------------------------------------ forward


def _forward(rules: tiles.Rules, axis: str | None, query: dict, key: dict, consts: Tree) -> tuple[jax.Array, Tree]:
    own = _widened(key, query)

    def empty(block: dict) -> tuple:
        return _empty(rules, block, own, consts)

    def whole(block: dict, need_J: jax.Array) -> tuple:
        return _over_keys(rules, empty(block), block, need_J, own, consts)

    def turn(sums_I: tuple, key: dict) -> tuple:
        key = _widened(key, query)
        need_IJ = rules.needs(query, key, consts)
        return jax.lax.map(lambda block: _over_keys(rules, *block, key, consts), (sums_I, query, need_IJ))

    if axis is None:  # sums of one block at a time: a third less memory, 15 % faster (16 x 1,024 tokens, 8 heads)
        need_IJ = rules.needs(query, key, consts)
        finished = jax.lax.map(lambda block: _finish(whole(*block)), (query, need_IJ))
    else:  # what is needed of other devices' keys is not kept for the gradient
        need_IJ, finished = None, jax.lax.map(_finish, ring.around(turn, jax.lax.map(empty, query), key, axis))
    y_IBHNV, lse_IBHN1 = finished
    return y_IBHNV, (query, key, consts, y_IBHNV, lse_IBHN1, need_IJ)


def _widened(key: dict, query: dict) -> dict:
    """Keys and values as wide as the queries: they travel as they are given, and are kept so for the gradient."""
    return key | {name: key[name].astype(query["q"].dtype) for name in "kv"}


def _over_keys(rules: tiles.Rules, sums: tuple, query: dict, need_J: jax.Array, key: dict, consts: Tree) -> tuple:
    """The sums of one block of queries, with what all blocks of keys add to them."""

    def add(j: jax.Array, sums: tuple) -> tuple:
        block = jax.tree.map(lambda x: x[j], key)
        return rules.as_needed(need_J[j], functools.partial(_add, rules), query, block, consts, *sums)

    return tiles.each(need_J, add, sums)


def _finish(sums: tuple) -> tuple[jax.Array, jax.Array]:
    """y_BHNV of one block of queries, and log sum_s exp(l_{n,s}): infinite for queries that pass on no gradient."""
    top, total, y_BHNV, hit_BN = sums
    blind = total == 0
    total = jnp.where(blind, 1, total)
    y_BHNV = shield.strike(y_BHNV / total, hit_BN)
    return y_BHNV, jnp.where(blind | hit_BN[:, None, :, None], jnp.inf, top + jnp.log(total))


def _empty(rules: tiles.Rules, query: dict, key: dict, consts: Tree) -> tuple:
    """The sums over no key."""
    first = jax.tree.map(lambda x: x[0], key)
    l_BHNS = jax.eval_shape(lambda: _logits(query["q"], first["k"], rules.added(query, first, consts["bias"]), None))
    y_BHNV = jax.eval_shape(jnp.matmul, l_BHNS, first["v"])
    zero = tiles.zero((query, key, consts)).astype(l_BHNS.dtype)
    row_BHN1 = jnp.full((*l_BHNS.shape[:-1], 1), zero)
    return row_BHN1 - jnp.inf, row_BHN1, jnp.full(y_BHNV.shape, zero), row_BHN1[:, 0, :, 0] > 0


def _add(
    rules: tiles.Rules, query: dict, key: dict, consts: Tree, allowed: jax.Array | None, *sums: jax.Array
) -> tuple:
    """The largest logit, the sum of exp(logit - largest), the sum of that times the value, with one more block."""
    top, total, y_BHNV, hit_BN = sums
    l_BHNS = _logits(query["q"], key["k"], rules.added(query, key, consts["bias"]), allowed)
    higher = jnp.maximum(top, l_BHNS.max(-1, keepdims=True))
    finite = jnp.where(higher == -jnp.inf, 0, higher)  # -inf - -inf would be NaN
    p_BHNS, shrink = jnp.exp(l_BHNS - finite), jnp.exp(top - finite)
    if "sound" in key:
        struck = functools.partial(_struck, allowed, key["sound"])
        hit_BN = jax.lax.cond(key["sound"].all(), lambda hit_BN: hit_BN, struck, hit_BN)
    total = total * shrink + p_BHNS.sum(-1, keepdims=True)
    return higher, total, y_BHNV * shrink + jnp.matmul(p_BHNS, key["v"]), hit_BN


def _struck(allowed: jax.Array | None, sound_BS: jax.Array, hit_BN: jax.Array) -> jax.Array:
    return hit_BN | (~sound_BS.all(-1, keepdims=True) if allowed is None else shield.hit(allowed, sound_BS))


# ----------------------------------------------------------------------------------------------------------- gradient


def _backward(rules: tiles.Rules, axis: str | None, saved: Tree, dy_IBHNV: jax.Array) -> tuple[dict, dict, Tree]:
    """Gradients from the weights A = exp(l - lse), formed again: dl = A (dA - sum_s A dA), and sum_s A dA = y . dy."""
    query, key, consts, y_IBHNV, lse_IBHN1, need_IJ = saved
    quiet = lse_IBHN1 == jnp.inf
    dy_IBHNV = jnp.where(quiet, 0, dy_IBHNV)
    inner = jnp.where(quiet, 0, y_IBHNV * dy_IBHNV).sum(-1, keepdims=True)
    if lse_IBHN1.shape[2] == 1:  # weights that all heads share collect the gradients of all
        inner = inner.sum(2, keepdims=True)
    query = query | {"dy": dy_IBHNV, "lse": lse_IBHN1, "inner": inner}
    query |= {f"{name}_across": query[name].swapaxes(-1, -2) for name in ("q", "dy")}

    def step(carry: tuple, key: tuple) -> tuple[tuple, tuple]:
        key, need_I = key
        return _over_queries(rules, query, need_I, key, consts, carry)

    def turn(carry: tuple, key: dict) -> tuple:
        *carry, dkv_J = carry
        key = _widened(key, query)
        needed_IJ = rules.needs(query, key, consts) if need_IJ is None else need_IJ
        carry, more_J = jax.lax.scan(step, tuple(carry), (key, needed_IJ.T))
        # The sums follow their keys one turn later, so that this turn need not be over before they are sent.
        return *carry, jax.tree.map(jnp.add, ring.onward(dkv_J, axis), more_J)

    own = _widened(key, query)
    start = jax.tree.map(jnp.zeros_like, (query["q"], tiles.smooth(consts["bias"]), (own["k"], own["v"])))
    dq_IBHNK, dconsts, dkv_J = ring.around(turn, start, key, axis)
    dkey = {name: x.astype(key[name].dtype) for name, x in zip("kv", ring.onward(dkv_J, axis), strict=True)}
    dkey = dict.fromkeys(key) | dkey
    return {"q": dq_IBHNK, "n": None}, dkey, {"mask": [None] * len(consts["mask"]), "bias": dconsts}


def _over_queries(rules, query, need_I, key, consts, sums: tuple) -> tuple[tuple, tuple]:
    """The gradients of queries and bias with what one block of keys adds to them, and those of its keys and values."""

    def step(i: jax.Array, carry: tuple) -> tuple:
        dk_BHKS, dv_BHVS, dq_IBHNK, dconsts = carry
        block = jax.tree.map(lambda x: x[i], query)
        bias = rules.added(block, key, consts["bias"])
        dbias = None if bias is None else jnp.zeros_like(bias) + tiles.zero((query, key, consts))
        pull, arguments = functools.partial(_pull, rules), (dk_BHKS, dv_BHVS, dq_IBHNK[i], dbias)
        dk_BHKS, dv_BHVS, dq_BHNK, dbias = rules.as_needed(need_I[i], pull, block, key, consts, *arguments)
        # Outside of the branch: inside `shard_map` this sums over devices, and not all may take the same branch.
        more = rules.into_consts(block, key, consts["bias"], dbias)
        return dk_BHKS, dv_BHVS, dq_IBHNK.at[i].set(dq_BHNK), jax.tree.map(jnp.add, dconsts, more)

    start = jax.tree.map(lambda x: jnp.zeros_like(x.swapaxes(-1, -2)), (key["k"], key["v"]))
    every = bool(jax.tree.leaves(tiles.smooth(consts["bias"])))  # or devices would wait for sums that others never make
    dk_BHKS, dv_BHVS, *sums = tiles.each(need_I, step, (*start, *sums), every=every)
    return tuple(sums), (dk_BHKS.swapaxes(-1, -2), dv_BHVS.swapaxes(-1, -2))


def _pull(rules, query, key, consts, allowed, dk_BHKS, dv_BHVS, dq_BHNK, dbias) -> tuple:
    """The gradients of keys, values and queries with those from one block of weights, and the gradient of its bias.

    A^T x is formed as (x^T A)^T from transposed queries and gradients: five times as fast on a CPU (512 x 512, K = 32).
    """
    q_BHNK, k_BHSK, v_BHSV, dy_BHNV = query["q"], key["k"], key["v"], query["dy"]
    l_BHNS = _logits(q_BHNK, k_BHSK, rules.added(query, key, consts["bias"]), allowed)
    A_BHNS = jnp.exp(l_BHNS - query["lse"])
    dA_BHNS = _fold(_compared(dy_BHNV, v_BHSV), A_BHNS)
    dl_BHNS = A_BHNS * (dA_BHNS - query["inner"])
    return (
        dk_BHKS + _fold(jnp.matmul(query["q_across"], dl_BHNS), dk_BHKS),
        dv_BHVS + _fold(jnp.matmul(query["dy_across"], A_BHNS), dv_BHVS),
        dq_BHNK + _fold(jnp.matmul(dl_BHNS, k_BHSK), q_BHNK),
        None if dbias is None else _fold(dl_BHNS, dbias).astype(dbias.dtype),
    )


def _fold(x: jax.Array, like: jax.Array) -> jax.Array:
    """Summed over the axes along which `like` was broadcast to the shape of x: the gradient of that."""
    x = x.sum(tuple(range(x.ndim - like.ndim)))
    return x.sum([i for i in range(x.ndim) if like.shape[i] == 1 < x.shape[i]], keepdims=True)


_average.defvjp(_forward, _backward)

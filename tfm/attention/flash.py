"""Flash attention: the averages of explicit.py block by block, without its N x S weights, in memory linear in N and S.

Each block is one of online_softmax.py; I and J count the blocks of queries and of keys, N and S are the tokens of one.
A few hundred tokens are written out (chunked.py); keys of tokens that devices share go around (ring.py).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from tfm.attention import block_mask, chunked, groups, online_softmax, ring

# Forward and gradient under the causal mask on two CPU cores (Zen 4), JAX 0.10.2, K = 32, in seconds: for 8,192 tokens
# and 4 heads 0.47 in blocks of 512 x 512 and of 512 x 256, 0.52 of 1024 x 256, 0.85 of 256 x 256 (one core alone
# computes products so small); for 16 x 1,024 tokens and 8 heads 0.74, 0.74, 0.65, 0.59 in square blocks of 512, 256,
# 128, 64.
SIDES, WEIGHTS = (512, 256, 128), 2**21  # the largest side of a block with which so many weights are not exceeded
Tree = Any


def attention(
    q_BHNK, k_BHSK, v_BHSV, *, mask, scale, cap=0.0, bias=None, n=None, queries=None, keys=None, axis=None, of: int = 1
) -> tuple[jax.Array, None]:
    """y_n = sum_s A_{n,s} v_s (E3) from at most `queries` x `keys` weights at a time; arguments as of explicit.py.

    None: as many as were measured to be fast, fewer for many sequences and heads. Logits, weights and sums are float32
    or wider. Blocks in which the mask allows nothing are passed over. Differentiable in reverse mode, also with respect
    to the arrays of the bias.

    axis: the axis of a device mesh over which the tokens are spread (inside `jax.shard_map`): q, k, v, n and y are a
    device's own tokens, which attend to those of all devices; mask and bias are asked for positions of all. ValueError
    where n is not (N,), or not as many keys as queries are given. of: groups of heads that are computed at once.
    """
    if (G := groups.count(q_BHNK, k_BHSK, v_BHSV)) > 1:
        call = {"mask": mask, "scale": scale, "cap": cap, "bias": bias, "n": n, "axis": axis}
        return groups.each(attention, q_BHNK, k_BHSK, v_BHSV, of=G, queries=queries, keys=keys, **call)
    N, S, wide = q_BHNK.shape[2], k_BHSK.shape[2], jnp.promote_types(q_BHNK.dtype, jnp.float32)
    tables = of * q_BHNK.shape[0] * max(x.shape[1] for x in (q_BHNK, k_BHSK, v_BHSV))
    chunks = chunked.cut(mask, N, S, tables=tables) if (n, queries, keys, axis) == (None,) * 4 else None
    if chunks:
        return chunked.attention(q_BHNK, k_BHSK, v_BHSV, chunks, mask=mask, scale=scale, cap=cap, bias=bias), None
    side = next((side for side in SIDES if tables * side**2 <= WEIGHTS), SIDES[-1])
    queries, keys, narrow = block_mask.size(N, queries or side), block_mask.size(S, keys or side), v_BHSV.dtype
    varying = None if axis is None else jax.lax.axis_index(axis)
    rules = block_mask.Rules(block_mask.arrays_of(mask), block_mask.arrays_of(bias), cap)
    zero = block_mask.zero((q_BHNK, k_BHSK, v_BHSV, n, varying, rules))
    n, s_S = (x + zero for x in ring.positions(n, N, S, axis))
    # Filled up with the last position, so that what fills up a block is not what makes it needed.
    query, key = {"n": block_mask.cut(n, -1, queries, mode="edge")}, {"s": block_mask.cut(s_S, -1, keys, mode="edge")}
    if S % keys:
        key["real"] = block_mask.cut(jnp.broadcast_to(zero == 0, S), 0, keys)
    key["k"], key["v"] = (block_mask.cut(x + zero, 2, keys) for x in (k_BHSK, v_BHSV))
    query["q"] = block_mask.cut(scale * q_BHNK.astype(wide) + zero, 2, queries)
    y_BHINV = jnp.moveaxis(_average(axis, rules, query, key), 0, 2)
    return y_BHINV.reshape(*y_BHINV.shape[:2], -1, y_BHINV.shape[-1])[:, :, :N].astype(narrow), None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _average(axis: str | None, rules: block_mask.Rules, query: dict, key: dict) -> jax.Array:
    """y_IBHNV for blocks of queries and of keys."""
    return _forward(axis, rules, query, key)[0]


def _forward(axis: str | None, rules: block_mask.Rules, query: dict, key: dict) -> tuple[jax.Array, Tree]:
    own = _widened(key, query)

    def empty(block: dict) -> tuple:
        return online_softmax.empty(rules, block, jax.tree.map(lambda x: x[0], own))

    def whole(block: tuple) -> tuple:
        return online_softmax.finish(_over_keys(rules, empty(block[0]), *block, own))

    def one_turn(sums_I: tuple, key: dict) -> tuple:
        key = _widened(key, query)
        need_IJ = rules.needs(query, key)
        return jax.lax.map(lambda block: _over_keys(rules, *block, key), (sums_I, query, need_IJ))

    if axis is None:  # sums of one block at a time: a third less memory, 15 % faster (16 x 1,024 tokens, 8 heads)
        need_IJ = rules.needs(query, key)
        finished = jax.lax.map(whole, (query, need_IJ))
    else:  # what is needed of other devices' keys is not kept for the gradient
        sums_I = ring.around(one_turn, jax.lax.map(empty, query), key, axis)
        need_IJ, finished = None, jax.lax.map(online_softmax.finish, sums_I)
    y_IBHNV, lse_IBHN1 = (checkpoint_name(x, "attention") for x in finished)
    return y_IBHNV, (rules, query, key, y_IBHNV, lse_IBHN1, need_IJ)


def _widened(key: dict, query: dict) -> dict:
    """Keys and values as wide as the queries: they travel as they are given, and are kept so for the gradient."""
    return key | {name: key[name].astype(query["q"].dtype) for name in "kv"}


def _over_keys(rules: block_mask.Rules, sums: tuple, query: dict, need_J: jax.Array, key: dict) -> tuple:
    """The sums of one block of queries with what all blocks of keys add."""

    def add(j: jax.Array, sums: tuple) -> tuple:
        block = jax.tree.map(lambda x: x[j], key)
        return rules.as_needed(need_J[j], online_softmax.block_forward, query, block, *sums)

    return block_mask.each(need_J, add, sums)


def _backward(axis: str | None, saved: Tree, dy_IBHNV: jax.Array) -> tuple[block_mask.Rules, dict, dict]:
    rules, query, key, y_IBHNV, lse_IBHN1, need_IJ = saved
    query = online_softmax.for_gradient(query, y_IBHNV, lse_IBHN1, dy_IBHNV)

    def one_turn(carry: tuple, key: dict) -> tuple:
        *carry, dkv_J = carry
        key = _widened(key, query)
        needed_IJ = rules.needs(query, key) if need_IJ is None else need_IJ
        step = functools.partial(_over_queries, rules, query)
        carry, more_J = jax.lax.scan(step, tuple(carry), (key, needed_IJ.T))
        # The sums follow their keys one turn later, so that this turn need not be over before they are sent.
        return *carry, jax.tree.map(jnp.add, ring.onward(dkv_J, axis), more_J)

    own = _widened(key, query)
    start = jax.tree.map(jnp.zeros_like, (query["q"], rules.learned(), (own["k"], own["v"])))
    dq_IBHNK, dlearned, dkv_J = ring.around(one_turn, start, key, axis)
    dkey = {name: x.astype(key[name].dtype) for name, x in zip("kv", ring.onward(dkv_J, axis), strict=True)}
    return rules.gradient(dlearned), {"n": None, "q": dq_IBHNK}, dict.fromkeys(key) | dkey


def _over_queries(rules: block_mask.Rules, query: dict, sums: tuple, needed: tuple) -> tuple[tuple, tuple]:
    """The gradients of queries and bias with what one block of keys adds to them, and those of its keys and values."""
    key, need_I = needed

    def step(i: jax.Array, carry: tuple) -> tuple:
        dk_BHKS, dv_BHVS, dq_IBHNK, dlearned = carry
        block = jax.tree.map(lambda x: x[i], query)
        sums = dk_BHKS, dv_BHVS, dq_IBHNK[i], online_softmax.empty_bias(rules, block, key)
        sums = rules.as_needed(need_I[i], online_softmax.block_backward, block, key, *sums)
        dk_BHKS, dv_BHVS, dq_BHNK, dbias = sums
        # Outside of the branch: inside `shard_map` this sums over devices, and not all may take the same branch.
        more = rules.into_learned(block, key, dbias)
        return dk_BHKS, dv_BHVS, dq_IBHNK.at[i].set(dq_BHNK), jax.tree.map(jnp.add, dlearned, more)

    start = jax.tree.map(lambda x: jnp.zeros_like(x.swapaxes(-1, -2)), (key["k"], key["v"]))
    every = bool(jax.tree.leaves(rules.learned()))  # or devices would wait for sums that others never make
    dk_BHKS, dv_BHVS, *sums = block_mask.each(need_I, step, (*start, *sums), every=every)
    return tuple(sums), (dk_BHKS.swapaxes(-1, -2), dv_BHVS.swapaxes(-1, -2))


_average.defvjp(_forward, _backward)

"""Flash attention: the averages of explicit.py block by block, in memory linear in N and S.

online_softmax.py computes one block. I and J count the blocks of queries and of keys; N and S are the tokens of one
block. A few hundred tokens are computed in unrolled chunks instead (chunked.py). If devices share the tokens, the keys
travel around a ring (ring.py).
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
SIDES, WEIGHTS = (512, 256, 128), 2**21  # the first side for which a block has at most so many weights is taken
Tree = Any


def attention(
    q_BHNK,
    k_BHSK,
    v_BHSV,
    *,
    mask,
    scale,
    cap=0.0,
    bias=None,
    n=None,
    queries=None,
    keys=None,
    axis=None,
    parallel_groups: int = 1,
) -> tuple[jax.Array, None]:
    """Return y_n = sum_s A_{n,s} v_s (E3), and None for the weights; arguments as of explicit.attention.

    Logits, weights and sums are float32 or float64. Blocks in which the mask allows nothing are skipped. Differentiable
    in reverse mode, also with respect to the arrays of the bias.

    queries, keys: the most tokens of a block; None: a size that was measured to be fast. axis: the mesh axis over which
    the tokens are sharded (inside `jax.shard_map`): q, k, v, n and y are the device's own tokens, which attend to those
    of all devices. parallel_groups: groups of heads that are computed at once (groups.py). Raises ValueError if, with
    an axis, n is not (N,) or N is not S.
    """
    if (G := groups.count(q_BHNK, k_BHSK, v_BHSV)) > 1:
        options = {"mask": mask, "scale": scale, "cap": cap, "bias": bias, "n": n, "axis": axis}
        options |= {"parallel_groups": G, "queries": queries, "keys": keys}
        return groups.map_groups(attention, q_BHNK, k_BHSK, v_BHSV, **options)
    N, S = q_BHNK.shape[2], k_BHSK.shape[2]
    tables = parallel_groups * q_BHNK.shape[0] * max(q_BHNK.shape[1], k_BHSK.shape[1], v_BHSV.shape[1])
    chunks = chunked.cut(mask, N, S, tables=tables) if (n, queries, keys, axis) == (None,) * 4 else None
    if chunks:
        return chunked.attention(q_BHNK, k_BHSK, v_BHSV, chunks, mask=mask, scale=scale, cap=cap, bias=bias), None
    side = next((side for side in SIDES if tables * side**2 <= WEIGHTS), SIDES[-1])
    sizes = block_mask.size(N, queries or side), block_mask.size(S, keys or side)
    rules = block_mask.Rules(block_mask.as_partial(mask), block_mask.as_partial(bias), cap)
    query, key = _cut_blocks(scale, q_BHNK, k_BHSK, v_BHSV, rules=rules, n=n, sizes=sizes, axis=axis)
    y_BHINV = jnp.moveaxis(_average(axis, rules, query, key), 0, 2)
    return y_BHINV.reshape(*y_BHINV.shape[:2], -1, y_BHINV.shape[-1])[:, :, :N].astype(v_BHSV.dtype), None


def _cut_blocks(scale, q_BHNK, k_BHSK, v_BHSV, *, rules, n, sizes: tuple[int, int], axis: str | None) -> tuple:
    """Return the blocks of queries, times the scale in float32 or float64, and the blocks of keys and values."""
    (queries, keys), N, S = sizes, q_BHNK.shape[2], k_BHSK.shape[2]
    varying = None if axis is None else jax.lax.axis_index(axis)
    zero = block_mask.zero((q_BHNK, k_BHSK, v_BHSV, n, varying, rules))
    n, s_S = (x + zero for x in ring.positions(n, N, S, axis))
    # Blocks are padded with the last position, so that padding never makes a block needed.
    query, key = {"n": block_mask.cut(n, -1, queries, mode="edge")}, {"s": block_mask.cut(s_S, -1, keys, mode="edge")}
    if S % keys:
        key["real"] = block_mask.cut(jnp.broadcast_to(zero == 0, S), 0, keys)
    key["k"], key["v"] = (block_mask.cut(x + zero, 2, keys) for x in (k_BHSK, v_BHSV))
    q_BHNK = scale * q_BHNK.astype(jnp.promote_types(q_BHNK.dtype, jnp.float32))
    query["q"] = block_mask.cut(q_BHNK + zero, 2, queries)
    return query, key


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _average(axis: str | None, rules: block_mask.Rules, query: dict, key: dict) -> jax.Array:
    """Return y_IBHNV for blocks of queries and of keys."""
    return _forward(axis, rules, query, key)[0]


def _forward(axis: str | None, rules: block_mask.Rules, query: dict, key: dict) -> tuple[jax.Array, Tree]:
    wide_key = _widen(key, query)

    def empty(query: dict) -> tuple:
        return online_softmax.empty(rules, query, jax.tree.map(lambda x: x[0], wide_key))

    def average(block: tuple) -> tuple:
        return online_softmax.finish(_add_keys(rules, empty(block[0]), *block, wide_key))

    def hop(sums_I: tuple, key: dict) -> tuple:
        key = _widen(key, query)
        need_IJ = rules.needs(query, key)
        return jax.lax.map(lambda block: _add_keys(rules, *block, key), (sums_I, query, need_IJ))

    if axis is None:  # one block of queries at a time: a third less memory, 15 % faster (16 x 1,024 tokens, 8 heads)
        need_IJ = rules.needs(query, key)
        finished = jax.lax.map(average, (query, need_IJ))
    else:  # the gradient computes again which keys of the other devices are needed
        sums_I = ring.scan_ring(hop, jax.lax.map(empty, query), key, axis)
        need_IJ, finished = None, jax.lax.map(online_softmax.finish, sums_I)
    y_IBHNV, lse_IBHN1 = (checkpoint_name(x, "attention") for x in finished)
    return y_IBHNV, (rules, query, key, y_IBHNV, lse_IBHN1, need_IJ)


def _widen(key: dict, query: dict) -> dict:
    """Return keys and values in the queries' dtype. They travel and are saved for the gradient in their own."""
    return key | {name: key[name].astype(query["q"].dtype) for name in "kv"}


def _add_keys(rules: block_mask.Rules, sums: tuple, query: dict, need_J: jax.Array, key: dict) -> tuple:
    """Add all blocks of keys to the sums of one block of queries."""

    def add(j: jax.Array, sums: tuple) -> tuple:
        block = jax.tree.map(lambda x: x[j], key)
        return rules.apply_if_needed(need_J[j], online_softmax.block_forward, query, block, *sums)

    return block_mask.loop(need_J, add, sums)


def _backward(axis: str | None, saved: Tree, dy_IBHNV: jax.Array) -> tuple[block_mask.Rules, dict, dict]:
    rules, query, key, y_IBHNV, lse_IBHN1, need_IJ = saved
    query = online_softmax.prepare_gradient(query, y_IBHNV, lse_IBHN1, dy_IBHNV)

    def hop(carry: tuple, key: dict) -> tuple:
        dq_IBHNK, dlearned, dkv_J = carry
        key = _widen(key, query)
        needed_IJ = rules.needs(query, key) if need_IJ is None else need_IJ
        step = functools.partial(_add_query_gradients, rules, query)
        (dq_IBHNK, dlearned), own_dkv_J = jax.lax.scan(step, (dq_IBHNK, dlearned), (key, needed_IJ.T))
        # The sums follow their keys one hop later, so that they can be sent before this hop has ended.
        return dq_IBHNK, dlearned, jax.tree.map(jnp.add, ring.send_to_next(dkv_J, axis), own_dkv_J)

    wide_key = _widen(key, query)
    start = jax.tree.map(jnp.zeros_like, (query["q"], rules.learned(), (wide_key["k"], wide_key["v"])))
    dq_IBHNK, dlearned, dkv_J = ring.scan_ring(hop, start, key, axis)
    dk_J, dv_J = ring.send_to_next(dkv_J, axis)
    dkey = dict.fromkeys(key) | {"k": dk_J.astype(key["k"].dtype), "v": dv_J.astype(key["v"].dtype)}
    return rules.gradient(dlearned), {"n": None, "q": dq_IBHNK}, dkey


def _add_query_gradients(rules: block_mask.Rules, query: dict, sums: tuple, block: tuple) -> tuple[tuple, tuple]:
    """Add one block of keys to the gradients of all queries and of the bias; return its own dk and dv as well."""
    key, need_I = block

    def step(i: jax.Array, carry: tuple) -> tuple:
        dk_BHKS, dv_BHVS, dq_IBHNK, dlearned = carry
        block = jax.tree.map(lambda x: x[i], query)
        sums = dk_BHKS, dv_BHVS, dq_IBHNK[i], online_softmax.empty_bias(rules, block, key)
        sums = rules.apply_if_needed(need_I[i], online_softmax.block_backward, block, key, *sums)
        dk_BHKS, dv_BHVS, dq_BHNK, dbias = sums
        # Outside of the branch: inside `shard_map` this sums over devices, and not all may take the same branch.
        block_dlearned = rules.learned_gradient(block, key, dbias)
        return dk_BHKS, dv_BHVS, dq_IBHNK.at[i].set(dq_BHNK), jax.tree.map(jnp.add, dlearned, block_dlearned)

    start = jax.tree.map(lambda x: jnp.zeros_like(x.swapaxes(-1, -2)), (key["k"], key["v"]))
    every = bool(jax.tree.leaves(rules.learned()))  # or devices would wait for sums that others never compute
    dk_BHKS, dv_BHVS, *sums = block_mask.loop(need_I, step, (*start, *sums), every=every)
    return tuple(sums), (dk_BHKS.swapaxes(-1, -2), dv_BHVS.swapaxes(-1, -2))


_average.defvjp(_forward, _backward)

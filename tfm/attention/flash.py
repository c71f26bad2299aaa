"""Flash attention: the averages of explicit.py, computed block by block, in memory linear in N and S.

online_softmax.py computes one block. I and J are the numbers of blocks of queries and of keys; N and S are the numbers
of tokens in one block. Sequences of a few hundred tokens are computed in unrolled chunks instead (explicit.py). If
sequences are sharded over devices, keys and values travel around a ring of these devices (ring.py).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from tfm import layout as layouts
from tfm.attention import block_mask, explicit, groups, mask as masks, online_softmax, ring

# Forward and gradient in seconds with a causal mask on two CPU cores (Zen 4), JAX 0.10.2, K = 32:
#   8,192 tokens, 4 heads: 0.47 (blocks of 512 x 512), 0.47 (512 x 256), 0.52 (1024 x 256), 0.85 (256 x 256)
#   16 x 1,024 tokens, 8 heads: 0.74 (512 x 512), 0.74 (256 x 256), 0.65 (128 x 128), 0.59 (64 x 64)
# 0.85 is slow because XLA computes products of this size on one core.
SIDES = (512, 256, 128)  # the side of a block is the first that gives it at most MAX_WEIGHTS weights
MAX_WEIGHTS = 2**21  # of one block, over all sequences and heads; the last side may exceed it
Tree = Any


def attention(
    q_BHNK, k_BHSK, v_BHSV, *, mask, scale, cap=0.0, bias=None, n=None, axis: str | None = None
) -> tuple[jax.Array, None]:
    """Return y_n = sum_s A_{n,s} v_s (E3), and None for the weights. Other arguments: see explicit.attention.

    Logits, weights and sums are float32 or float64. Blocks in which the mask allows no key are skipped. The result has
    gradients in reverse mode, also with respect to the arrays of the bias.

    axis: the mesh axis over which sequences are sharded (inside `jax.shard_map`). q, k, v, n and y then hold the tokens
    of this device, which attend to the tokens of all devices.
    Raises ValueError if `axis` is set and n is not (N,) or N is not S.
    """
    N, S, options = q_BHNK.shape[2], k_BHSK.shape[2], {"mask": mask, "scale": scale, "cap": cap}
    tables = q_BHNK.shape[0] * max(q_BHNK.shape[1], k_BHSK.shape[1], v_BHSV.shape[1])
    chunks = explicit.cut_chunks(mask, N, S, tables=tables) if n is None and axis is None else None
    if chunks:
        attend = functools.partial(explicit.attend_chunks, chunks=chunks, **options)
    else:
        attend = functools.partial(_attend_blocks, n=n, sizes=choose_sizes(N, S, tables=tables), axis=axis, **options)
    if groups.count(q_BHNK, k_BHSK, v_BHSV) > 1:
        return groups.map_groups(attend, q_BHNK, k_BHSK, v_BHSV, bias=bias)
    return attend(q_BHNK, k_BHSK, v_BHSV, bias=bias)


def choose_sizes(N: int, S: int, *, tables: int) -> tuple[int, int]:
    """Return the numbers of queries and of keys in a block. tables: the number of sequences times heads.

    The limit of both is the largest of SIDES with which a block has at most MAX_WEIGHTS weights over all tables, or the
    smallest. `block_mask.size` makes the blocks equal within this limit.
    """
    side = next((side for side in SIDES if tables * side**2 <= MAX_WEIGHTS), SIDES[-1])
    return block_mask.size(N, side), block_mask.size(S, side)


def _attend_blocks(q_BHNK, k_BHSK, v_BHSV, *, mask, scale, cap, bias, axis, **cut) -> tuple[jax.Array, None]:
    """Return the averages block by block, and None for the weights. cut: the arguments n and sizes of `_cut_blocks`."""
    rules = block_mask.Rules(None if mask is None else masks.as_mask(mask), masks.as_partial(bias), cap)
    query, key = _cut_blocks(scale, q_BHNK, k_BHSK, v_BHSV, rules=rules, axis=axis, **cut)
    y_BHINV = jnp.moveaxis(_average(axis, rules, query, key), 0, 2)
    y_BHNV = y_BHINV.reshape(*y_BHINV.shape[:2], -1, y_BHINV.shape[-1])[:, :, : q_BHNK.shape[2]]
    return y_BHNV.astype(v_BHSV.dtype), None


def _cut_blocks(scale, q_BHNK, k_BHSK, v_BHSV, *, rules, n, sizes: tuple[int, int], axis: str | None) -> tuple:
    """Return two dicts of arrays in blocks, of queries and of keys and values (online_softmax.py).

    Queries are multiplied by the scale in float32 or float64. sizes: tokens in a block of queries and in a block of
    keys.
    """
    (queries, keys), N, S = sizes, q_BHNK.shape[2], k_BHSK.shape[2]
    device = None if axis is None else jax.lax.axis_index(axis)
    arrays = q_BHNK, k_BHSK, v_BHSV, *ring.positions(n, N, S, axis), jnp.ones(S, bool)
    q_BHNK, k_BHSK, v_BHSV, n, s_S, real_S = layouts.vary_alike(arrays, device, rules)
    # Padding repeats the last position, so that it never makes an EMPTY block PARTIAL.
    query, key = {"n": block_mask.cut(n, -1, queries, mode="edge")}, {"s": block_mask.cut(s_S, -1, keys, mode="edge")}
    if S % keys:
        key["real"] = block_mask.cut(real_S, 0, keys)
    key["k"], key["v"] = (block_mask.cut(x, 2, keys) for x in (k_BHSK, v_BHSV))
    q_BHNK = scale * q_BHNK.astype(jnp.promote_types(q_BHNK.dtype, jnp.float32))
    query["q"] = block_mask.cut(q_BHNK, 2, queries)
    return query, key


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _average(axis: str | None, rules: block_mask.Rules, query: dict, key: dict) -> jax.Array:
    """Return y_IBHNV for blocks of queries and of keys."""
    return _forward(axis, rules, query, key)[0]


def _forward(axis: str | None, rules: block_mask.Rules, query: dict, key: dict) -> tuple[jax.Array, Tree]:
    """Return y_IBHNV, and the arrays that `_backward` needs."""
    float_key = _promote_keys(key, query)

    def start_sums(query: dict) -> tuple:
        return online_softmax.start_sums(rules, query, jax.tree.map(lambda x: x[0], float_key))

    def average(block: tuple) -> tuple:
        return online_softmax.finish(_add_keys(rules, start_sums(block[0]), *block, float_key))

    def hop(sums_I: tuple, key: dict) -> tuple:
        key = _promote_keys(key, query)
        need_IJ = rules.needs(query, key)
        return jax.lax.map(lambda block: _add_keys(rules, *block, key), (sums_I, query, need_IJ))

    # Finishing one block of queries before the next takes a third less memory than `hop` and is 15 % faster (16 x 1,024
    # tokens, 8 heads), but a ring needs the sums of all queries at every hop.
    if axis is None:
        need_IJ = rules.needs(query, key)
        results = jax.lax.map(average, (query, need_IJ))
    else:  # need_IJ differs at every hop, so `_backward` computes it again
        sums_I = ring.scan_ring(hop, jax.lax.map(start_sums, query), key, axis)
        need_IJ, results = None, jax.lax.map(online_softmax.finish, sums_I)
    y_IBHNV, lse_IBHN1 = (checkpoint_name(x, "attention") for x in results)
    return y_IBHNV, (rules, query, key, y_IBHNV, lse_IBHN1, need_IJ)


def _promote_keys(key: dict, query: dict) -> dict:
    """Return keys and values in the queries' dtype, for products. They are sent and saved in their original dtype."""
    return key | {name: key[name].astype(query["q"].dtype) for name in "kv"}


def _add_keys(rules: block_mask.Rules, sums: tuple, query: dict, need_J: jax.Array, key: dict) -> tuple:
    """Return the sums (online_softmax.block_forward) of one block of queries after adding all blocks of keys."""

    def add(j: jax.Array, sums: tuple) -> tuple:
        block = jax.tree.map(lambda x: x[j], key)
        return rules.apply_if_needed(need_J[j], online_softmax.block_forward, query, block, *sums)

    return block_mask.loop(need_J, add, sums)


def _backward(axis: str | None, saved: Tree, dy_IBHNV: jax.Array) -> tuple[block_mask.Rules, dict, dict]:
    """Return the gradients of the bias's arrays (as Rules), of the queries, and of the keys and values."""
    rules, query, key, y_IBHNV, lse_IBHN1, need_IJ = saved
    query = online_softmax.prepare_gradient(query, y_IBHNV, lse_IBHN1, dy_IBHNV)

    def hop(carry: tuple, key: dict) -> tuple:
        dq_IBHNK, darrays, dkv_J = carry
        key = _promote_keys(key, query)
        hop_need_IJ = rules.needs(query, key) if need_IJ is None else need_IJ
        step = functools.partial(_add_query_gradients, rules, query)
        (dq_IBHNK, darrays), new_dkv_J = jax.lax.scan(step, (dq_IBHNK, darrays), (key, hop_need_IJ.T))
        # dk and dv are sent one hop later than their keys, so that sending them need not wait for this hop's results.
        return dq_IBHNK, darrays, jax.tree.map(jnp.add, ring.send_to_next(dkv_J, axis), new_dkv_J)

    float_key = _promote_keys(key, query)
    start = jax.tree.map(jnp.zeros_like, (query["q"], rules.bias_arrays(), (float_key["k"], float_key["v"])))
    dq_IBHNK, darrays, dkv_J = ring.scan_ring(hop, start, key, axis)
    dk_J, dv_J = ring.send_to_next(dkv_J, axis)
    dkey = dict.fromkeys(key) | {"k": dk_J.astype(key["k"].dtype), "v": dv_J.astype(key["v"].dtype)}
    return rules.pack_gradient(darrays), {"n": None, "q": dq_IBHNK}, dkey


def _add_query_gradients(rules: block_mask.Rules, query: dict, sums: tuple, block: tuple) -> tuple[tuple, tuple]:
    """Add the contributions of one block of keys to sums = (dq, darrays). Return sums, and (dk, dv) of the block.

    darrays: the gradients of the bias's arrays. block: the block of keys, and need_I for it.
    """
    key, need_I = block

    def step(i: jax.Array, carry: tuple) -> tuple:
        dk_BHKS, dv_BHVS, dq_IBHNK, darrays = carry
        block = jax.tree.map(lambda x: x[i], query)
        sums = dk_BHKS, dv_BHVS, dq_IBHNK[i], online_softmax.zero_bias_gradient(rules, block, key)
        sums = rules.apply_if_needed(need_I[i], online_softmax.block_backward, block, key, *sums)
        dk_BHKS, dv_BHVS, dq_BHNK, dbias = sums
        # Not inside apply_if_needed: in `shard_map` this sums over devices, whose branches may differ.
        block_darrays = rules.bias_gradient(block, key, dbias)
        return dk_BHKS, dv_BHVS, dq_IBHNK.at[i].set(dq_BHNK), jax.tree.map(jnp.add, darrays, block_darrays)

    start = jax.tree.map(lambda x: jnp.zeros_like(x.swapaxes(-1, -2)), (key["k"], key["v"]))
    # `bias_gradient` sums over devices: if one device skipped a block, the others would wait for it forever.
    run_all = bool(jax.tree.leaves(rules.bias_arrays()))
    dk_BHKS, dv_BHVS, *sums = block_mask.loop(need_I, step, (*start, *sums), run_all=run_all)
    return tuple(sums), (dk_BHKS.swapaxes(-1, -2), dv_BHVS.swapaxes(-1, -2))


_average.defvjp(_forward, _backward)

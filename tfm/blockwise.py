"""Attention block by block: the averages of `explicit` without its N x S weights, in memory linear in N and S.

The softmax of a query runs over one block of keys at a time, rescaling what it has summed whenever a larger logit turns
up (Milakov and Gimelshein 2018); the gradient forms each block of weights again from the logarithm of the row sums (Dao
et al. 2022). In this file N and S are the tokens of one block, and I and J count the blocks of queries and of keys.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tfm import mask as masks
from tfm import shield

QUERIES, KEYS = 512, 512
Tree = Any


class Rules(NamedTuple):
    """What holds between two blocks of tokens: `allowed(consts, n, s_S)` and `bias(consts, n, s_S)`, each or None."""

    allowed: Callable | None
    bias: Callable | None


def blockwise(
    q_BHNK: jax.Array,
    k_BHSK: jax.Array,
    v_BHSV: jax.Array,
    *,
    mask: masks.Mask | None,
    scale: float,
    bias: Callable[[jax.Array, jax.Array], jax.Array] | None = None,
    n: jax.Array | None = None,
    queries: int = QUERIES,
    keys: int = KEYS,
) -> tuple[jax.Array, None]:
    """y_n = sum_s A_{n,s} v_s (E3) from at most `queries` x `keys` weights at a time; arguments as of `explicit`.

    Logits, weights and sums are float32 or wider. Blocks in which the mask allows nothing are passed over.
    Differentiable in reverse mode, also with respect to the arrays that `bias` closes over.
    """
    N, S, narrow = q_BHNK.shape[2], k_BHSK.shape[2], v_BHSV.dtype
    wide = jnp.promote_types(q_BHNK.dtype, jnp.float32)
    sound_BS = None
    if mask is not None:
        k_BHSK, v_BHSV, sound_BS = shield.clean(k_BHSK, v_BHSV)
    zero = _zero((q_BHNK, k_BHSK, v_BHSV, n))
    n = (jnp.arange(S - N, S) if n is None else n) + zero
    s_S = jnp.arange(S) + zero
    query = {"q": scale * q_BHNK.astype(wide), "n": n}
    key = {"k": k_BHSK.astype(wide), "v": v_BHSV.astype(wide), "s": s_S, "sound": sound_BS}
    queries, keys = _even(N, queries), _even(S, keys)
    key["real"] = jnp.arange(S) < S if S % keys else None  # False for what fills the last block up
    query = _cut(query, {"q": 2, "n": -1}, queries)
    key = _cut(key, {"k": 2, "v": 2, "s": 0, "sound": 1, "real": 0}, keys)
    rules, consts = _closed(mask, bias, query["n"][0], key["s"][0])
    zero = zero + _zero(consts)
    query["q"], key["k"], key["v"] = query["q"] + zero, key["k"] + zero, key["v"] + zero
    y_IBHNV = _average(rules, query, key, consts)
    y_BHNV = jnp.moveaxis(y_IBHNV, 0, 2)
    return y_BHNV.reshape(*y_BHNV.shape[:2], -1, y_BHNV.shape[-1])[:, :, :N].astype(narrow), None


# ------------------------------------------------------------------------------------------------------------- blocks


def _even(length: int, most: int) -> int:
    """The size of equal blocks of at most `most` tokens; a multiple of eight where there are several."""
    count = -(-length // most)
    return length if count == 1 else -(-length // count // 8) * 8


def _cut(tree: dict, axes: dict, size: int) -> dict:
    """Each array in blocks of `size` along its axis, counted by a new first axis; the last is filled up.

    Positions are filled up with the last one, so that a mask or bias is never asked beyond them.
    """

    def cut(name: str, x: jax.Array) -> jax.Array:
        axis = axes[name] % x.ndim
        pad = [(0, -x.shape[axis] % size if i == axis else 0) for i in range(x.ndim)]
        x = jnp.pad(x, pad, mode="edge" if name in ("n", "s") else "constant")
        return jnp.moveaxis(x.reshape(*x.shape[:axis], -1, size, *x.shape[axis + 1 :]), axis, 0)

    return {name: cut(name, x) for name, x in tree.items() if x is not None}


def _zero(tree: Tree) -> jax.Array:
    """0, varying over every axis of a device mesh over which a leaf of the tree varies.

    Adding it makes types equal inside `shard_map`, where loops and branches ask for that; elsewhere it does nothing.
    """
    return sum(jnp.zeros_like(leaf, jnp.int32, ()) for leaf in jax.tree.leaves(tree))


def _closed(mask: Callable | None, bias: Callable | None, n: jax.Array, s_S: jax.Array) -> tuple[Rules, Tree]:
    """Mask and bias as functions of positions and of the arrays they close over, and those arrays.

    A gradient cannot reach an array that a function closes over, nor may a loop's body be called again with it.
    """
    allowed, mask_consts = _hoisted(mask, n, s_S)
    bias, bias_consts = _hoisted(bias, n, s_S)
    return Rules(allowed, bias), {"mask": mask_consts, "bias": bias_consts}


def _hoisted(function: Callable | None, *examples: jax.Array) -> tuple[Callable | None, list]:
    if function is None:
        return None, []
    closed = jax.make_jaxpr(function)(*examples)
    return (lambda consts, *positions: jax.core.eval_jaxpr(closed.jaxpr, consts, *positions)[0]), closed.consts


def _allowed(rules: Rules, query: dict, key: dict, consts: Tree) -> jax.Array | None:
    """Which queries may attend to which keys: (N, S) or (B, N, S), or None for all."""
    allowed = None if rules.allowed is None else rules.allowed(consts["mask"], query["n"], key["s"])
    if "real" not in key:
        return allowed
    real_NS = jnp.broadcast_to(key["real"], (query["n"].shape[-1], key["real"].size))
    return real_NS if allowed is None else allowed & real_NS


def _logits(q_BHNK: jax.Array, k_BHSK: jax.Array, bias: jax.Array | None, allowed: jax.Array | None) -> jax.Array:
    """q . k + bias, and -inf where a key is not allowed."""
    l_BHNS = jnp.matmul(q_BHNK, k_BHSK.swapaxes(-1, -2))
    l_BHNS = l_BHNS if bias is None else l_BHNS + bias
    if allowed is None:
        return l_BHNS
    return jnp.where(allowed if allowed.ndim == 2 else allowed[:, None], l_BHNS, -jnp.inf)


def _bias(rules: Rules, query: dict, key: dict, consts: list) -> jax.Array | None:
    return None if rules.bias is None else rules.bias(consts, query["n"], key["s"])


def _if_any(allowed: jax.Array | None, function: Callable, *arguments: Tree) -> Tree:
    """function(*arguments), or the arguments where nothing is allowed."""
    if allowed is None:
        return function(*arguments)
    return jax.lax.cond(allowed.any(), function, lambda *unchanged: unchanged, *arguments)


# ------------------------------------------------------------------------------------------------------------ forward


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _average(rules: Rules, query: dict, key: dict, consts: Tree) -> jax.Array:
    """y_IBHNV for blocks of queries and of keys."""
    return _forward(rules, query, key, consts)[0]


def _forward(rules: Rules, query: dict, key: dict, consts: Tree) -> tuple[jax.Array, Tree]:
    y_IBHNV, lse_IBHN1 = jax.lax.map(lambda block: _over_keys(rules, block, key, consts), query)
    return y_IBHNV, (query, key, consts, y_IBHNV, lse_IBHN1)


def _over_keys(rules: Rules, query: dict, key: dict, consts: Tree) -> tuple[jax.Array, jax.Array]:
    """y_BHNV of one block of queries, and log sum_s exp(l_{n,s}): infinite for queries that pass on no gradient."""

    def step(sums: tuple, key: dict) -> tuple[tuple, None]:
        allowed = _allowed(rules, query, key, consts)
        return _if_any(allowed, lambda *sums: _add(sums, rules, query, key, consts, allowed), *sums), None

    first = {name: x[0] for name, x in key.items()}
    l_BHNS = jax.eval_shape(lambda: _logits(query["q"], first["k"], _bias(rules, query, first, consts["bias"]), None))
    y_BHNV = jax.eval_shape(jnp.matmul, l_BHNS, first["v"])
    zero = _zero((query, key, consts)).astype(l_BHNS.dtype)
    row = (*l_BHNS.shape[:-1], 1)
    hit_BN = jnp.zeros((y_BHNV.shape[0], row[2]), bool) | (zero > 0)
    sums = jnp.full(row, -jnp.inf) + zero, jnp.zeros(row) + zero, jnp.zeros(y_BHNV.shape) + zero, hit_BN
    (top, total, y, hit_BN), _ = jax.lax.scan(step, sums, key)
    blind = total == 0
    y = shield.strike(y / jnp.where(blind, 1, total), hit_BN)
    quiet = blind | hit_BN[:, None, :, None]
    return y, jnp.where(quiet, jnp.inf, top + jnp.log(jnp.where(blind, 1, total)))


def _add(sums: tuple, rules: Rules, query: dict, key: dict, consts: Tree, allowed: jax.Array | None) -> tuple:
    """The largest logit, the sum of exp(logit - largest), the sum of that times the value, with one more block."""
    top, total, y, hit_BN = sums
    l_BHNS = _logits(query["q"], key["k"], _bias(rules, query, key, consts["bias"]), allowed)
    higher = jnp.maximum(top, l_BHNS.max(-1, keepdims=True))
    finite = jnp.where(higher == -jnp.inf, 0, higher)  # -inf - -inf would be NaN
    p_BHNS, shrink = jnp.exp(l_BHNS - finite), jnp.exp(top - finite)
    if "sound" in key:
        struck = lambda: hit_BN | shield.hit(allowed, key["sound"])
        hit_BN = jax.lax.cond(key["sound"].all(), lambda: hit_BN, struck)
    total = total * shrink + p_BHNS.sum(-1, keepdims=True)
    return higher, total, y * shrink + jnp.matmul(p_BHNS, key["v"]), hit_BN


# ----------------------------------------------------------------------------------------------------------- gradient


def _backward(rules: Rules, saved: Tree, dy_IBHNV: jax.Array) -> tuple[dict, dict, Tree]:
    """Gradients from the weights A = exp(l - lse), formed again: dl = A (dA - sum_s A dA), and sum_s A dA = y . dy."""
    query, key, consts, y_IBHNV, lse_IBHN1 = saved
    dy_IBHNV = jnp.where(lse_IBHN1 == jnp.inf, 0, dy_IBHNV)
    inner = jnp.where(lse_IBHN1 == jnp.inf, 0, y_IBHNV * dy_IBHNV).sum(-1, keepdims=True)
    if lse_IBHN1.shape[2] == 1:  # weights that all heads share collect the gradients of all
        inner = inner.sum(2, keepdims=True)
    zero = _zero((query, key, consts))
    query = query | {"dy": dy_IBHNV, "lse": lse_IBHN1, "inner": inner}

    def over_queries(carry: tuple, key: dict) -> tuple[tuple, tuple]:
        def step(carry: tuple, query: dict) -> tuple[tuple, jax.Array]:
            dk_BHSK, dv_BHSV, dconsts = carry
            bias = _bias(rules, query, key, consts["bias"])
            none = None if bias is None else jnp.zeros_like(bias) + zero
            allowed = _allowed(rules, query, key, consts)
            pull = functools.partial(_pull, rules, query, key, consts, allowed)
            dk_BHSK, dv_BHSV, dq_BHNK, dbias = _if_any(allowed, pull, dk_BHSK, dv_BHSV, query["dq"], none)
            # Outside of the branch, since inside `shard_map` this sums over devices, which may take different branches.
            dconsts = jax.tree.map(jnp.add, dconsts, _into_consts(rules, query, key, consts["bias"], dbias))
            return (dk_BHSK, dv_BHSV, dconsts), dq_BHNK

        dq_IBHNK, dconsts = carry
        start = jnp.zeros_like(key["k"]), jnp.zeros_like(key["v"]), dconsts
        (dk_BHSK, dv_BHSV, dconsts), dq_IBHNK = jax.lax.scan(step, start, query | {"dq": dq_IBHNK})
        return (dq_IBHNK, dconsts), (dk_BHSK, dv_BHSV)

    start = jnp.zeros_like(query["q"]), [jnp.zeros_like(c) if _smooth(c) else None for c in consts["bias"]]
    (dq_IBHNK, dconsts), (dk_JBHSK, dv_JBHSV) = jax.lax.scan(over_queries, start, key)
    dkey = dict.fromkeys(key) | {"k": dk_JBHSK, "v": dv_JBHSV}
    return {"q": dq_IBHNK, "n": None}, dkey, {"mask": [None] * len(consts["mask"]), "bias": dconsts}


def _smooth(const: jax.Array) -> bool:
    return jnp.issubdtype(const.dtype, jnp.inexact)


def _pull(rules, query, key, consts, allowed, dk_BHSK, dv_BHSV, dq_BHNK, dbias) -> tuple:
    """The gradients of keys, values and queries with those from one block of weights, and the gradient of its bias."""
    bias = None if dbias is None else _bias(rules, query, key, consts["bias"]) + jnp.zeros_like(dbias)
    l_BHNS, pull_l = jax.vjp(lambda *qkb: _logits(*qkb, allowed), query["q"], key["k"], bias)
    A_BHNS = jnp.exp(l_BHNS - query["lse"])
    _, pull_y = jax.vjp(jnp.matmul, A_BHNS, key["v"])
    dA_BHNS, dv = pull_y(query["dy"])
    dq, dk, dbias = pull_l(A_BHNS * (dA_BHNS - query["inner"]))
    return dk_BHSK + dk, dv_BHSV + dv, dq_BHNK + dq, dbias


def _into_consts(rules: Rules, query: dict, key: dict, consts: list, dbias: jax.Array | None) -> list:
    """The gradient of what the bias closes over, None for integers."""
    smooth = [c if _smooth(c) else None for c in consts]
    if dbias is None or not any(c is not None for c in smooth):
        return smooth
    others = [None if _smooth(c) else c for c in consts]

    def bias(smooth: list) -> jax.Array:
        merged = [one if other is None else other for one, other in zip(smooth, others, strict=True)]
        return _bias(rules, query, key, merged) + jnp.zeros_like(dbias)

    return jax.vjp(bias, smooth)[1](dbias)[0]


_average.defvjp(_forward, _backward)

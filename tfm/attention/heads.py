"""Heads: several averages side by side, each with its own comparison and its own values (E8-E10), over the tokens
themselves (self-attention) or over those of another sequence (cross-attention, E26).

Keys and values may be kept (KV cache): a token that comes later then needs only its own query, key and value (E23).
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import Partial

from tfm import kernels
from tfm import layout as layouts
from tfm.attention import block_mask, explicit, flash, nan_guard, relative_position, score, value
from tfm.attention import mask as masks

KVCache = dict[str, jax.Array]  # k_BHSK and v_BHSV


class Parts(NamedTuple):
    """The function that fills each place of the attention; the files of the same names say what each must be."""

    score: score.Score
    value: value.Value
    relative_position: relative_position.RelativePosition
    compute: Callable[..., tuple[jax.Array, jax.Array | None]]  # one of attention.IMPLEMENTATIONS
    scale: Callable[[int, int], float]  # (K, D) -> the factor on the logits
    H: int  # heads, for relative positions that have no parameter of their own to tell them by
    itself: bool = True  # whether a token attends to itself where it may attend to others too


def self_attention(
    params: dict,
    x_BND: jax.Array,
    *,
    parts: Parts,
    mask: masks.Mask | None,
    n: jax.Array | None = None,
    cache: KVCache | None = None,
    layout: layouts.Layout = layouts.ONE,
) -> tuple[jax.Array, jax.Array | None, KVCache]:
    """Y = sum_h V_h X A_h, the tokens attending to each other (E9; seed 003 eq. 4).

    n: their positions, (N,) or (B, N); None: 0 .. N-1. With a cache of S places, where place s is for the token at
    position s, they attend to those before them too, and `mask` must forbid what comes later.
    Returns (Y, A_BHNS or None, the keys and values attended to).
    """
    with jax.named_scope("score"):
        q_BHNK, k_BHSK = parts.score.apply(params["score"], x_BND, x_BND)
        if rotate := getattr(parts.relative_position, "rotate", None):
            here = jnp.arange(x_BND.shape[1]) if n is None else n
            q_BHNK, k_BHSK = rotate(params["relative_position"], q_BHNK, k_BHSK, here)
    with jax.named_scope("value"):
        attended = {"k_BHSK": k_BHSK, "v_BHSV": parts.value.apply(params["value"], x_BND)}
    if cache is not None:
        attended = {name: kernels.write(cache[name], attended[name], n) for name in attended}
    call = {"mask": mask, "n": n, "bias": bias_of(params["relative_position"], (x_BND, n), parts, layout)}
    call |= {"D": x_BND.shape[-1], "cached": cache is not None, "layout": layout}
    y_BHNV, A_BHNS = average(q_BHNK, attended, parts, **call)
    return combine(params["value"], y_BHNV, parts, layout), A_BHNS, attended


def bias_of(params: dict, tokens: Any, parts: Parts, layout: layouts.Layout) -> masks.Bias | None:
    """The bias of the positions, with what keeps tokens from themselves; of this device's heads where devices share
    them."""
    bias, positions = None, parts.relative_position
    if getattr(positions, "bias", None) is not None:
        if layout.batch:  # the gradients of all blocks are added up here first, and then once over the devices
            params = jax.tree.map(lambda leaf: leaf + block_mask.zero(tokens), params)
        bias = Partial(functools.partial(positions.bias, H=parts.H), params)
    bias = bias if parts.itself else relative_position.apart(bias)
    if bias is None or layout.tensor is None:
        return bias
    return Partial(functools.partial(_own_heads, layout.tensor, parts.H), bias)


def _own_heads(axis: str, H: int, bias: masks.Bias, n: jax.Array, s_S: jax.Array) -> jax.Array:
    """This device's heads of a bias; one made from shared parameters has these alone already."""
    b_HNS, own = bias(n, s_S), H // jax.lax.axis_size(axis)
    if b_HNS.shape[-3] <= own:
        return b_HNS
    return jax.lax.dynamic_slice_in_dim(b_HNS, jax.lax.axis_index(axis) * own, own, b_HNS.ndim - 3)


def cross_attention(
    params: dict,
    x_BND: jax.Array,
    *,
    parts: Parts,
    memory: Any,
    cache: KVCache | None = None,
    layout: layouts.Layout = layouts.ONE,
) -> tuple[jax.Array, jax.Array | None, KVCache]:
    """Y = sum_h V_h X' A_h, the tokens attending to those of the memory, X' (block.Memory; E26).

    A cache holds the memory's keys and values from an earlier call. Returns (Y, A_BHNS or None, those).
    """
    cached = cache is not None
    with jax.named_scope("score"):
        source = x_BND if cached else memory.x_BSD  # with a cache only the queries are used
        q_BHNK, k_BHSK = parts.score.apply(params["score"], x_BND, source)
    if cache is None:
        with jax.named_scope("value"):
            cache = {"k_BHSK": k_BHSK, "v_BHSV": parts.value.apply(params["value"], source)}
    whole = layout.whole  # every device has the whole memory
    y_BHNV, A_BHNS = average(q_BHNK, cache, parts, D=x_BND.shape[-1], cached=cached, layout=whole, mask=memory.mask)
    return combine(params["value"], y_BHNV, parts, layout), A_BHNS, cache


def average(
    q_BHNK: jax.Array, attended: KVCache, parts: Parts, *, D: int, cached: bool, layout: layouts.Layout, **call: Any
) -> tuple[jax.Array, jax.Array | None]:
    """The averages of the values y_BHNV, and the weights where they are formed. call: mask, n, bias.

    Newest words alone have so few weights that these are formed; tokens that devices share go around (ring attention).
    """
    with jax.named_scope("average"):
        call |= {"scale": parts.scale(q_BHNK.shape[-1], D)}
        qkv = q_BHNK, attended["k_BHSK"], attended["v_BHSV"]
        if cached:
            plain = functools.partial(nan_guard.guarded(explicit.attention), **call)
            return kernels.few_queries(plain, functools.partial(explicit.by_keys, **call), *qkv)
        if layout.sequence:
            return nan_guard.guarded(flash.attention)(*qkv, axis=layout.sequence, **call)
        return nan_guard.guarded(parts.compute)(*qkv, **call)


def combine(params: dict, y_BHNV: jax.Array, parts: Parts, layout: layouts.Layout) -> jax.Array:
    """The heads' averages mapped back to D features and summed (tensor parallelism: over devices too)."""
    with jax.named_scope("combine"):
        return layouts.on(layout, parts.value, "combine")(params, y_BHNV)

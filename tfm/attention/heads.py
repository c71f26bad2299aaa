"""Heads: several averages side by side, each with its own comparison and its own values (E8-E10), over the tokens
themselves (self-attention) or over those of another sequence (cross-attention, E26).

`design` is the block's (block.py): score, relative_position, compute, scale and value are functions of their own rooms.
Keys and values may be kept (KV cache): a token that comes later then needs only its own query, key and value (E23).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tfm import layout as layouts
from tfm.attention import block_mask, relative_position
from tfm.attention import mask as masks

KVCache = dict[str, jax.Array]  # k_BHSK and v_BHSV


def self_attention(
    params: dict,
    x_BND: jax.Array,
    *,
    design: Any,
    mask: masks.Mask | None,
    n: jax.Array | None = None,
    cache: KVCache | None = None,
) -> tuple[jax.Array, jax.Array | None, KVCache]:
    """Y = sum_h V_h X A_h, the tokens attending to each other (E9; seed 003 eq. 4).

    n: their positions, (N,) or (B, N); None: 0 .. N-1. With a cache of S places, where place s is for the token at
    position s, they attend to those before them too, and `mask` must forbid what comes later.
    Returns (Y, A_BHNS or None, the keys and values attended to).
    """
    with jax.named_scope("score"):
        q_BHNK, k_BHSK = design.score.apply(params["score"], x_BND, x_BND)
        here = jnp.arange(x_BND.shape[1]) if n is None else n
        q_BHNK, k_BHSK = design.relative_position.rotate(params["relative_position"], q_BHNK, k_BHSK, here)
    with jax.named_scope("value"):
        kept = {"k_BHSK": k_BHSK, "v_BHSV": design.value.apply(params["value"], x_BND)}
    if cache is not None:
        kept = {name: write(cache[name], kept[name], n) for name in kept}
    y_BND, A_BHNS = average(
        params["value"],
        q_BHNK,
        kept,
        design=design,
        mask=mask,
        n=n,
        bias=bias_of(params["relative_position"], (x_BND, n), design),
        D=x_BND.shape[-1],
        **({"axis": design.layout.sequence} if design.layout.sequence else {}),
    )
    return y_BND, A_BHNS, kept


def bias_of(params: dict, tokens: Any, design: Any) -> Callable | None:
    """The bias of the positions, with what keeps tokens from themselves; of this device's heads where devices share
    them."""
    if design.layout.batch:  # the gradients of all blocks are added up here first, and then once over the devices
        params = jax.tree.map(lambda leaf: leaf + block_mask.zero(tokens), params)
    bias, axis = design.relative_position.bias(params, design.H), design.layout.tensor
    bias = bias if design.itself else relative_position.apart(bias)
    if bias is None or axis is None:
        return bias
    heads = design.H // jax.lax.axis_size(axis)

    def own(n: jax.Array, s_S: jax.Array) -> jax.Array:  # a bias made from shared parameters has these heads already
        b_HNS = bias(n, s_S)
        return layouts.part(b_HNS, axis, dimension=b_HNS.ndim - 3, size=heads) if b_HNS.shape[-3] > heads else b_HNS

    return own


def cross_attention(
    params: dict, x_BND: jax.Array, *, design: Any, memory: Any, cache: KVCache | None = None
) -> tuple[jax.Array, jax.Array | None, KVCache]:
    """Y = sum_h V_h X' A_h, the tokens attending to those of the memory, X' (block.Memory; E26).

    A cache holds the memory's keys and values from an earlier call. Returns (Y, A_BHNS or None, those).
    """
    with jax.named_scope("score"):
        source = memory.x_BSD if cache is None else x_BND  # with a cache only the queries are used
        q_BHNK, k_BHSK = design.score.apply(params["score"], x_BND, source)
    if cache is None:
        with jax.named_scope("value"):
            cache = {"k_BHSK": k_BHSK, "v_BHSV": design.value.apply(params["value"], source)}
    y_BND, A_BHNS = average(params["value"], q_BHNK, cache, design=design, mask=memory.mask, D=x_BND.shape[-1])
    return y_BND, A_BHNS, cache


def average(
    value_params: dict,
    q_BHNK: jax.Array,
    kept: KVCache,
    *,
    design: Any,
    mask: masks.Mask | None,
    D: int,
    n=None,
    bias=None,
    **ring: str,
) -> tuple[jax.Array, jax.Array | None]:
    """The averages of the values, mapped back to D features, and the weights where they are formed.

    ring: the mesh `axis` around which keys and values travel, where devices share the tokens.
    """
    with jax.named_scope("average"):
        scale = design.scale(q_BHNK.shape[-1], D)
        of = q_BHNK, kept["k_BHSK"], kept["v_BHSV"]
        y_BHNV, A_BHNS = design.compute(*of, mask=mask, scale=scale, bias=bias, n=n, **ring)
    with jax.named_scope("combine"):
        shared = {"tensor": design.layout.tensor} if design.layout.tensor else {}
        return design.value.combine(value_params, y_BHNV, **shared), A_BHNS


def write(cache_BHSK: jax.Array, new_BHNK: jax.Array, n: jax.Array) -> jax.Array:
    """The cache with the new tokens at their places n, (N,) or (B, N); places beyond its end are not written."""
    B, _, N, _ = new_BHNK.shape
    n_BN = jnp.broadcast_to(n, (B, N))
    new_BHNK = new_BHNK.astype(cache_BHSK.dtype)

    def at_once(cache_BHSK: jax.Array) -> jax.Array:
        return cache_BHSK.at[jnp.arange(B)[:, None], :, n_BN].set(new_BHNK.swapaxes(1, 2))

    def one_by_one(cache_BHSK: jax.Array) -> jax.Array:
        """In place: XLA:CPU copies the whole cache where it merges a write with the product that follows."""
        inside_B = jnp.nonzero(n_BN[:, 0] < cache_BHSK.shape[2], size=B)[0]

        def put(i: jax.Array, cache_BHSK: jax.Array) -> jax.Array:
            b = inside_B[i]
            new_1HNK = jax.lax.dynamic_slice_in_dim(new_BHNK, b, 1)
            return jax.lax.dynamic_update_slice(cache_BHSK, new_1HNK, (b, 0, n_BN[b, 0], 0))

        return jax.lax.fori_loop(0, jnp.sum(n_BN[:, 0] < cache_BHSK.shape[2]), put, cache_BHSK)

    if N > 1:
        return at_once(cache_BHSK)
    return jax.lax.platform_dependent(cache_BHSK, cpu=one_by_one, default=at_once)

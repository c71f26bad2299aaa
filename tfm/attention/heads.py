"""Heads: several averages side by side, each with its own comparison and values (E8-E10), over the tokens themselves
(self-attention) or those of another sequence (cross-attention, E26). Keys and values may be kept (KV cache): a token
that comes later then needs only its own query, key and value (E23)."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import Partial

from tfm import kernels, layout as layouts
from tfm.attention import block_mask, explicit, flash, groups, mask as masks, nan_guard, relative_position, score, value

# k_BHSK and v_BHSV, of G heads where these are shared (groups.py); the first alone where they are the same.
KVCache = dict[str, jax.Array]


class Parts(NamedTuple):
    """The function that fills each place of the attention; the files of the same names say what each must be."""

    score: score.Score
    value: value.Value
    relative_position: relative_position.RelativePosition
    compute: Callable[..., tuple[jax.Array, jax.Array | None]]  # one of attention.IMPLEMENTATIONS
    scale: Callable[[int, int], float]  # (K, D) -> the factor on the logits
    H: int  # heads, for relative positions that have no parameter of their own to tell them by
    itself: bool = True  # whether a token attends to itself where it may attend to others too
    cap: float = 0.0  # which no logit passes; 0: none (explicit.capped)


def self_attention(
    params: dict,
    x_BND: jax.Array,
    *,
    parts: Parts,
    mask: masks.Mask | None,
    n: jax.Array | None = None,
    cache: KVCache | None = None,
    layout: layouts.Layout = layouts.ONE,
    embedded: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | None, KVCache]:
    """Y = sum_h V_h X A_h, the tokens attending to each other (E9; seed 003 eq. 4).

    n: their positions, (N,) or (B, N); None: 0 .. N-1. With a cache of S places, where place s is for the token at
    position s, they attend to those before them too, and `mask` must forbid what comes later. embedded: e_BHNK, of
    which each head adds a learned multiple to the values, v_h,n + mix_h e_h,n (embed.values).
    Returns (Y, A_BHNS or None, the keys and values attended to).
    """
    with jax.named_scope("score"):
        q_BHNK, plain_BHSK = parts.score.apply(params["score"], x_BND, x_BND)
        k_BHSK = plain_BHSK
        if rotate := getattr(parts.relative_position, "rotate", None):
            here = jnp.arange(x_BND.shape[1]) if n is None else n
            q_BHNK, k_BHSK = rotate(params["relative_position"], q_BHNK, k_BHSK, here)
    with jax.named_scope("value"):
        own_BHNV = _values(params, x_BND, plain_BHSK, parts)
        if embedded is not None:
            mix_H = next(leaf for name, leaf in params["value"].items() if name.startswith("mix"))
            own_BHNV = own_BHNV + mix_H[:, None, None] * embedded
    attended = _kept(k_BHSK, own_BHNV)
    if cache is not None:
        attended = {name: kernels.write(cache[name], attended[name], n) for name in attended}
    bias, positions, offsets = None, parts.relative_position, params["relative_position"]
    if getattr(positions, "bias", None) is not None:
        if layout.batch:  # the gradients of all blocks are added up here first, and then once over the devices
            offsets = jax.tree.map(lambda leaf: leaf + block_mask.zero((x_BND, n)), offsets)
        bias = Partial(functools.partial(positions.bias, H=parts.H), offsets)
    if not parts.itself:
        bias = Partial(relative_position.apart, bias)
    if bias is not None and layout.tensor is not None:
        own = parts.H // jax.lax.axis_size(layout.tensor)
        bias = Partial(functools.partial(groups.own_heads, own), bias, jax.lax.axis_index(layout.tensor))
    call = {"mask": mask, "n": n, "bias": bias, "cached": cache is not None}
    if layout.sequence and cache is None:
        call["axis"] = layout.sequence
    return _attention(params, x_BND, q_BHNK, attended, parts, layout, own_BHNV=own_BHNV, **call)


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
    with jax.named_scope("score"):  # with a cache only the queries are used
        source = memory.x_BSD if cache is None else x_BND
        q_BHNK, k_BHSK = parts.score.apply(params["score"], x_BND, source)
    attended = cache
    if cache is None:
        with jax.named_scope("value"):
            attended = _kept(k_BHSK, _values(params, source, k_BHSK, parts))
    return _attention(params, x_BND, q_BHNK, attended, parts, layout, mask=memory.mask, cached=cache is not None)


def _values(params: dict, x_BSD: jax.Array, k_BHSK: jax.Array, parts: Parts) -> jax.Array:
    return parts.value.apply(params["value"], k_BHSK if getattr(parts.value, "of_keys", False) else x_BSD)


def _kept(k_BHSK: jax.Array, v_BHSV: jax.Array) -> KVCache:
    return {"k_BHSK": k_BHSK} | ({} if v_BHSV is k_BHSK else {"v_BHSV": v_BHSV})


def _attention(params, x_BND, q_BHNK, attended, parts, layout, *, cached: bool, own_BHNV=None, **call: Any) -> tuple:
    """The averages of the values, mapped back to D features and summed (tensor parallelism: over devices too).

    Newest words alone have so few weights that these are formed; tokens that devices share, those of the `axis`, go
    around (ring attention). Of a score that is no product all weights are formed. call: mask, n, bias and axis.
    """
    with jax.named_scope("average"):
        call |= {"scale": parts.scale(q_BHNK.shape[-1], x_BND.shape[-1])} | ({"cap": parts.cap} if parts.cap else {})
        k_BHSK, compute = attended["k_BHSK"], parts.compute
        qkv = q_BHNK, k_BHSK, attended.get("v_BHSV", k_BHSK)
        if compare := getattr(parts.score, "logits", None):
            call["compare"] = functools.partial(compare, params["score"])
            compute = compute if getattr(compute, "__wrapped__", None) is explicit.attention else explicit.attention
        if cached:
            plain = functools.partial(nan_guard.guarded(explicit.attention), **call)
            by_keys = functools.partial(explicit.attention, by_keys=True, **call)
            y_BHNV, A_BHNS = kernels.few_queries(plain, by_keys, *qkv)
        else:
            compute = flash.attention if "axis" in call and compute is explicit.attention else compute
            y_BHNV, A_BHNS = nan_guard.guarded(compute, platform=layout.platform)(*qkv, **call)
    with jax.named_scope("combine"):
        if between := getattr(parts.value, "between", None):
            y_BHNV = between(params["value"], y_BHNV, x_BND, own_BHNV)
        return layouts.on(layout, parts.value, "combine")(params["value"], y_BHNV), A_BHNS, attended

"""Heads in groups: the H/G query heads of a group share its key and its value. G = H is an own one for each head, G = 1
one for all (MQA, multi-query attention, Shazeer 2019), and what lies between is GQA, grouped-query attention (Ainslie
et al. 2023). Query head h is of group h // (H/G). Parameters of G < H heads have G in their names, those of H heads H.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import Partial

from tfm import linear, shapes
from tfm.attention import block_mask, mask as masks


def named(name: str, H: int, G: int | None) -> str:
    """The name of a leaf of G heads: 'Uk_GKD', and 'Uk_HKD' where each query head has its own. ValueError where G does
    not divide H."""
    if G is not None and (G < 1 or H % G):
        raise ValueError(f"G = {G} heads of keys and values do not divide H = {H} heads")
    return name.replace("_G", "_H") if G in (None, H) else name


def heads(params: dict, name: str, x_BSD: jax.Array) -> jax.Array:
    """Return U_h x_s (+ b_h) for every head of a matrix U and its bias b, with `name` 'k' or 'v': (B, H or G, S, K)."""
    return linear.matmul_heads(x_BSD, shapes.find(params, f"U{name}"), shapes.find(params, f"b{name}"))


def count(*qkv: jax.Array) -> int:
    """How many groups queries, keys and values, (B, heads, ...), make; 1 where an axis of size one is all there is to
    share, of which the products know."""
    several = {x.shape[1] for x in qkv} - {1}
    return min(several) if len(several) > 1 else 1


def each(compute: Callable, *qkv: jax.Array, bias: masks.Bias | None, **call: Any) -> tuple:
    """(y_BHNV, A_BHNS or None) of compute(q, k, v, bias=..., **call), an implementation (implementations.py), which is
    called for one group at a time, with one head of keys and values; all groups are one program. Mask and positions are
    the same for all groups, so they are formed once."""
    H, G = max(x.shape[1] for x in qkv), count(*qkv)

    def one(g: jax.Array, *qkv: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        own = None if bias is None else Partial(functools.partial(own_heads, H // G), block_mask.arrays_of(bias), g)
        return compute(*qkv, bias=own, **call)

    split = [x if x.shape[1] == 1 else x.reshape(x.shape[0], G, -1, *x.shape[2:]) for x in qkv]
    axes = [None if x.ndim == 4 else 1 for x in split]
    answer = jax.vmap(one, in_axes=(0, *axes), out_axes=1)(jnp.arange(G), *split)
    return jax.tree.map(lambda x: x.reshape(x.shape[0], -1, *x.shape[3:]), answer)


def own_heads(size: int, bias: masks.Bias, part: jax.Array, n: jax.Array, s_S: jax.Array) -> jax.Array:
    """The `size` heads of this part of a bias; one of no more heads is shared, or has these alone already."""
    b_HNS = bias(n, s_S)
    if b_HNS.shape[-3] <= size:
        return b_HNS
    return jax.lax.dynamic_slice_in_dim(b_HNS, part * size, size, b_HNS.ndim - 3)

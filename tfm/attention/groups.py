"""Groups of heads: the H/G query heads of a group share one head of keys and values (GQA; Ainslie et al. 2023).

G = H gives each query head its own keys and values; G = 1 is multi-query attention (MQA; Shazeer 2019). Query head h
belongs to group h // (H/G). Parameters of keys and values have G in their names if G < H (Uk_GKD), else H.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import Partial

from tfm.attention import mask as masks


def name_leaf(name: str, H: int, G: int | None) -> str:
    """Return `name`, such as 'Uk_GKD'; if G is None or equals H, with H in place of G: 'Uk_HKD'.

    Raises ValueError if G does not divide H.
    """
    if G is not None and (G < 1 or H % G):
        raise ValueError(f"G = {G} heads of keys and values do not divide H = {H} query heads. Choose a divisor.")
    return name.replace("_G", "_H") if G in (None, H) else name


def find_matrix(params: dict, name: str) -> tuple[jax.Array, jax.Array | None]:
    """Return the matrix U of the keys (name "k") or the values (name "v") of a layer, and its bias b or None.

    U is (H, K, D) with a matrix for each head, or (G, K, D) if heads share them; b is (H, K) or (G, K).
    """
    head = "G" if f"U{name}_GKD" in params else "H"
    return params[f"U{name}_{head}KD"], params.get(f"b{name}_{head}K")


def count(q_BHNK: jax.Array, k_BHSK: jax.Array, v_BHSV: jax.Array) -> int:
    """Return G, the smallest number of heads above one, if two arrays have different numbers of heads above one.

    Otherwise return 1: equal numbers need no groups, and a single head broadcasts.
    """
    several = {q_BHNK.shape[1], k_BHSK.shape[1], v_BHSV.shape[1]} - {1}
    return min(several) if len(several) > 1 else 1


def repeat(*qkv: jax.Array) -> list[jax.Array]:
    """Return [q, k, v]. Arrays of more than one head get as many heads as the array with most heads, by repeating."""
    H = max(x.shape[1] for x in qkv)
    return [x if x.shape[1] in (1, H) else jnp.repeat(x, H // x.shape[1], axis=1) for x in qkv]


def map_groups(attend: Callable, *qkv: jax.Array, bias: masks.Bias | None, **options: Any) -> tuple:
    """Return (y_BHNV, A_BHNS or None): attend(q, k, v, bias=..., **options) for every group, by jax.vmap.

    `attend` is an implementation (implementations.py). Each of its calls receives the H/G query heads of a group and
    one head of keys and values. Mask and positions are the same for all groups, so they are computed once. A is None
    if `attend` never forms the weights.
    """
    H, G = max(x.shape[1] for x in qkv), count(*qkv)

    def attend_group(g: jax.Array, *qkv: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        group_bias = bias and Partial(functools.partial(slice_heads, H // G), masks.as_partial(bias), g)
        return attend(*qkv, bias=group_bias, **options)

    split = [x if x.shape[1] == 1 else x.reshape(x.shape[0], G, -1, *x.shape[2:]) for x in qkv]
    axes = [None if x.ndim == 4 else 1 for x in split]
    result = jax.vmap(attend_group, in_axes=(0, *axes), out_axes=1)(jnp.arange(G), *split)
    return jax.tree.map(lambda x: x.reshape(x.shape[0], -1, *x.shape[3:]), result)


def slice_heads(size: int, bias: masks.Bias, index: jax.Array, n: jax.Array, s_S: jax.Array) -> jax.Array:
    """Return heads index * size ... (index + 1) * size - 1 of bias(n, s_S).

    If the bias has at most `size` heads, return all of them: they are shared, or sliced already.
    """
    b_HNS = bias(n, s_S)
    if b_HNS.shape[-3] <= size:
        return b_HNS
    return jax.lax.dynamic_slice_in_dim(b_HNS, index * size, size, b_HNS.ndim - 3)

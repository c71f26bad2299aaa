"""Multi-head attention: averages with different scores and values, added up (E8-E10).

The tokens attend to each other (self-attention) or to those of another sequence (cross-attention, E26). Keys and values
can be kept in a cache: a later token then needs only its own query, key and value (E23).
"""

import functools

import jax
import jax.numpy as jnp
from jax.tree_util import Partial

from tfm import platform
from tfm.attention import block_mask, explicit, groups, mask as masks, relative_position
from tfm.attention.spec import Call, KVCache, Spec


@jax.named_scope("attention")
def self_attention(params: dict, x_BND: jax.Array, spec: Spec, call: Call) -> tuple[jax.Array, dict]:
    """Return Y = sum_h V_h X A_h, the tokens attending to each other (Turner 2023; E9), and {"A", "cache"}.

    With a cache of S positions, tokens attend to earlier ones too, and `call.mask` must forbid later positions.
    """
    n = jnp.arange(x_BND.shape[1]) if call.n is None else call.n
    with jax.named_scope("score"):
        q_BHNK, plain_BHNK = spec.score.apply(params["score"], x_BND, x_BND)
        q_BHNK, k_BHNK = spec.relative_position.rotate(params["relative_position"], q_BHNK, plain_BHNK, n)
    with jax.named_scope("value"):
        v_BHNV = spec.value.apply(params["value"], plain_BHNK if spec.value.from_keys else x_BND)
    cache = join_cache(k_BHNK, v_BHNV)
    with jax.named_scope("average"):
        scale, bias = spec.scale(q_BHNK.shape[-1], x_BND.shape[-1]), logit_bias(params, x_BND, spec, call)
        options = {"mask": call.mask, "scale": scale, "cap": spec.cap, "bias": bias, "n": call.n}
        if call.cache is None:
            y_BHNV, A_BHNS = spec.attend(q_BHNK, k_BHNK, v_BHNV, axis=call.layout.sequence, **options)
        else:
            cache = {name: platform.write_cache(call.cache["self"][name], new, call.n) for name, new in cache.items()}
            y_BHNV, A_BHNS = explicit.attention(q_BHNK, *split_cache(cache), by_keys=True, **options)
    with jax.named_scope("combine"):
        y_BHNV = spec.value.post_process(params["value"], y_BHNV, x_BND, v_BHNV)
        y_BND = spec.value.out_proj(params["value"], y_BHNV, layout=call.layout)
    return y_BND, {"A": A_BHNS, "cache": cache}


@jax.named_scope("cross")
def cross_attention(params: dict, x_BND: jax.Array, spec: Spec, call: Call) -> tuple[jax.Array, dict]:
    """Return Y = sum_h V_h X' A_h, the tokens attending to the memory X' (E26), and {"A", "cache"}.

    A cache holds the keys and values of the memory from an earlier call.
    """
    source_BSD = x_BND if call.cache else call.memory.x_BSD  # with a cache only the queries are used
    with jax.named_scope("score"):
        q_BHNK, k_BHSK = spec.score.apply(params["score_cross"], x_BND, source_BSD)
    options = {"mask": call.memory.mask, "scale": spec.scale(q_BHNK.shape[-1], x_BND.shape[-1]), "cap": spec.cap}
    if call.cache:
        cache = call.cache["cross"]
        with jax.named_scope("average"):
            y_BHNV, A_BHNS = explicit.attention(q_BHNK, *split_cache(cache), by_keys=True, **options)
    else:
        with jax.named_scope("value"):
            v_BHSV = spec.value.apply(params["value_cross"], k_BHSK if spec.value.from_keys else source_BSD)
        cache = join_cache(k_BHSK, v_BHSV)
        with jax.named_scope("average"):
            y_BHNV, A_BHNS = spec.attend(q_BHNK, k_BHSK, v_BHSV, **options)
    with jax.named_scope("combine"):
        y_BHNV = spec.value.post_process(params["value_cross"], y_BHNV, x_BND, None)
        y_BND = spec.value.out_proj(params["value_cross"], y_BHNV, layout=call.layout)
    return y_BND, {"A": A_BHNS, "cache": cache}


def join_cache(k_BHSK: jax.Array, v_BHSV: jax.Array) -> KVCache:
    """Return keys and values by name; if they are the same array, it is kept once."""
    return {"k_BHSK": k_BHSK} if v_BHSV is k_BHSK else {"k_BHSK": k_BHSK, "v_BHSV": v_BHSV}


def split_cache(cache: KVCache) -> tuple[jax.Array, jax.Array]:
    """Return keys and values."""
    return cache["k_BHSK"], cache.get("v_BHSV", cache["k_BHSK"])


def logit_bias(params: dict, x_BND: jax.Array, spec: Spec, call: Call) -> masks.Bias | None:
    """Return the function of positions that is added to the logits, or None.

    It is the sum of the bias of relative positions and, if the score has attend_to_self = False, of self_bias.
    """
    bias, table, layout = None, params["relative_position"], call.layout
    if spec.relative_position.bias is not None:
        if layout.batch:  # sum the gradients of all blocks here first, and then once over the devices
            table = jax.tree.map(lambda leaf: leaf + block_mask.zero((x_BND, call.n)), table)
        bias = Partial(functools.partial(spec.relative_position.bias, H=spec.H), table)
    if not spec.score.attend_to_self:
        bias = Partial(relative_position.self_bias, bias)
    if bias is not None and layout.tensor is not None:
        H = spec.H // jax.lax.axis_size(layout.tensor)
        bias = Partial(functools.partial(groups.slice_heads, H), bias, jax.lax.axis_index(layout.tensor))
    return bias

"""Multi-head attention: every head averages values by its weights, and the outputs of the heads are added (E8-E10).

Tokens attend to each other (self-attention) or to the tokens of another sequence (cross-attention, E26). Keys and
values can be stored in a cache: then only the query, key and value of a new token are computed (E23).
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.tree_util import Partial

from tfm import layout as layouts, platform, shapes, variant
from tfm.attention import explicit, groups, mask as masks, relative_position
from tfm.attention.spec import Call, KVCache, Spec


@jax.named_scope("attention")
def self_attention(params: dict, x_BND: jax.Array, spec: Spec, call: Call) -> tuple[jax.Array, dict]:
    """Return Y = sum_h V_h X A_h (Turner 2023; E9), and a dict: "cache", keys and values; "measures", those of score
    and value (variant.py); "look", activations by name. Its weights "A" are None unless call.look names them.

    With call.cache, keys and values are written to the positions call.n of the cache, and the tokens attend to all of
    its S positions. `call.mask` must then forbid later positions.
    """
    n, look = jnp.arange(x_BND.shape[1]) if call.n is None else call.n, {}
    with jax.named_scope("score"):
        pair = spec.score.apply(params["score"], x_BND, x_BND)
        (q_BHNK, plain_BHNK), measures = variant.split_measures(spec.score, pair)
        q_BHNK, k_BHNK = spec.relative_position.rotate(params["relative_position"], q_BHNK, plain_BHNK, n)
        q_BHNK, k_BHNK = call.visit(look, "q", q_BHNK), call.visit(look, "k", k_BHNK)
    with jax.named_scope("value"):
        v_BHNV = spec.value.apply(params["value"], plain_BHNK if spec.value.from_keys else x_BND)
        v_BHNV, value_measures = variant.split_measures(spec.value, v_BHNV)
        v_BHNV = call.visit(look, "v", v_BHNV)
        measures = variant.add_measures(measures, value_measures)
    cache = join_cache(k_BHNK, v_BHNV)
    with jax.named_scope("average"):
        scale, bias = spec.scale(q_BHNK.shape[-1], x_BND.shape[-1]), logit_bias(params, x_BND, spec, call)
        options = {"mask": call.mask, "scale": scale, "cap": spec.cap, "bias": bias, "n": call.n}
        if call.cache is not None:
            cache = {name: platform.write_cache(call.cache["self"][name], new, call.n) for name, new in cache.items()}
        attend = choose_attend(spec, call, "A", axis=call.layout.sequence)
        y_BHNV, look["A"] = attend(q_BHNK, *split_cache(cache), **options)
    with jax.named_scope("combine"):
        y_BND = combine(params["value"], y_BHNV, x_BND, v_BHNV, spec, call)
        y_BND = call.visit(look, "attention", y_BND)
    return y_BND, {"cache": cache, "measures": measures, "look": look}


@jax.named_scope("cross")
def cross_attention(params: dict, x_BND: jax.Array, spec: Spec, call: Call) -> tuple[jax.Array, dict]:
    """Return Y = sum_h V_h X' A_h, where tokens attend to the memory X' (E26), and a dict as self_attention does.

    call.cache has the keys and values of the memory from an earlier call.
    """
    source_BSD = x_BND if call.cache else call.memory.x_BSD  # with a cache, the keys of x_BND are not used
    with jax.named_scope("score"):
        pair = spec.score.apply(params["score_cross"], x_BND, source_BSD)
        (q_BHNK, k_BHSK), measures = variant.split_measures(spec.score, pair)
    if call.cache:
        cache = call.cache["cross"]
    else:
        with jax.named_scope("value"):
            v_BHSV = spec.value.apply(params["value_cross"], k_BHSK if spec.value.from_keys else source_BSD)
            v_BHSV, value_measures = variant.split_measures(spec.value, v_BHSV)
            measures = variant.add_measures(measures, value_measures)
        cache = join_cache(k_BHSK, v_BHSV)
    with jax.named_scope("average"):
        options = {"mask": call.memory.mask, "scale": spec.scale(q_BHNK.shape[-1], x_BND.shape[-1]), "cap": spec.cap}
        y_BHNV, A_BHNS = choose_attend(spec, call, "A_cross")(q_BHNK, *split_cache(cache), **options)
    with jax.named_scope("combine"):
        y_BND = combine(params["value_cross"], y_BHNV, x_BND, None, spec, call)
    return y_BND, {"cache": cache, "measures": measures, "look": {"A_cross": A_BHNS}}


def combine(
    params: dict, y_BHNV: jax.Array, x_BND: jax.Array, v_BHNV: jax.Array | None, spec: Spec, call: Call
) -> jax.Array:
    """Return the output tokens y_BND from the averages of all heads. v_BHNV: see value.Value's post_process."""
    processed_BHNV = spec.value.post_process(params, y_BHNV, x_BND, v_BHNV)
    shapes.check_shape(spec.value.post_process, processed_BHNV, y_BHNV)
    y_BND = spec.value.out_proj(params, processed_BHNV, layout=call.layout)
    return shapes.check_shape(spec.value.out_proj, y_BND, x_BND)


def choose_attend(spec: Spec, call: Call, name: str, *, axis: str | None = None) -> Callable:
    """Return the function that computes the averages: spec.attend, or explicit.attention.

    It is explicit with a cache, and if the weights of this name are looked at, edited, or the user's (which become 0
    for forbidden keys). axis: the mesh axis over which keys are sharded; if attention must be explicit, it raises
    ValueError.
    """
    is_changed = spec.weigh or name in call.edit
    if not (is_changed or name in call.look or call.cache is not None):
        return functools.partial(spec.attend, axis=axis) if axis else spec.attend
    if axis:
        raise ValueError(f"the weights {name} need all keys of a query, but devices share the tokens of a sequence.")
    if not is_changed:
        return explicit.attention

    def weigh(l_BHNS: jax.Array, allowed: jax.Array | None) -> jax.Array:
        allowed = jnp.ones(l_BHNS.shape[-2:], bool) if allowed is None else allowed
        allowed = allowed[:, None] if allowed.ndim == 3 else allowed  # broadcasts over heads
        A_BHNS = shapes.check_shape(weights, weights(l_BHNS, allowed), l_BHNS)
        return call.visit({}, name, jnp.where(allowed, A_BHNS, 0))

    weights = spec.weigh or explicit.weights
    return functools.partial(explicit.attention, weigh=weigh)


def join_cache(k_BHSK: jax.Array, v_BHSV: jax.Array) -> KVCache:
    """Return keys and values as a cache; if they are the same array, the cache has it once."""
    return {"k_BHSK": k_BHSK} if v_BHSV is k_BHSK else {"k_BHSK": k_BHSK, "v_BHSV": v_BHSV}


def split_cache(cache: KVCache) -> tuple[jax.Array, jax.Array]:
    """Return the keys and the values of a cache."""
    return cache["k_BHSK"], cache.get("v_BHSV", cache["k_BHSK"])


def logit_bias(params: dict, x_BND: jax.Array, spec: Spec, call: Call) -> masks.Bias | None:
    """Return the bias of the logits as a function of positions (mask.Bias), or None.

    The bias is the sum of the bias of relative positions and, if the score has attend_to_self = False, of self_bias. If
    heads are sharded over devices, it has the heads of this device.
    """
    bias, table, layout = None, params["relative_position"], call.layout
    if spec.relative_position.bias is not None:
        if layout.batch:  # the gradient of the table is then summed over devices once, after all blocks
            table = layouts.vary_alike(table, x_BND, call.n)
        bias = Partial(functools.partial(spec.relative_position.bias, H=spec.H), table)
    if not spec.score.attend_to_self:
        bias = Partial(relative_position.self_bias, bias)
    if bias is not None and layout.tensor is not None:
        H = spec.H // jax.lax.axis_size(layout.tensor)
        bias = Partial(functools.partial(groups.slice_heads, H), bias, jax.lax.axis_index(layout.tensor))
    return bias

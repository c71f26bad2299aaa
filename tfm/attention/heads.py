"""Multi-head attention: every head averages values by its weights, and the outputs of the heads are added (E8-E10).

Tokens attend to each other (self-attention) or to the tokens of another sequence (cross-attention, E26). Keys and
values can be stored in a cache: then only the query, key and value of a new token are computed (E23). `Spec` has the
functions of an attention layer, and `Call` the arguments of a forward pass, which every layer receives.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import Partial

from tfm import layout as layouts, platform, variant
from tfm.attention import explicit, groups, mask as masks, relative_position, score, value

# {"k_BHSK": keys, "v_BHSV": values}, with G heads if heads share them (groups.py); without "v_BHSV" if values are keys.
KVCache = dict[str, jax.Array]
Edit = Callable[[jax.Array, jax.Array], jax.Array]


class Spec(NamedTuple):
    """The functions of an attention layer. The modules score, value and relative_position state their signatures."""

    score: score.Score
    value: value.Value
    relative_position: relative_position.RelativePosition
    attend: Callable[..., tuple[jax.Array, jax.Array | None]]  # computes the averages (implementations.py)
    scale: Callable[[int, int], float]  # (K, D) -> the factor on the logits
    H: int  # number of heads, for a bias without parameters (relative_position.alibi)
    cap: float = 0.0  # soft cap of the logits (explicit.soft_cap); 0: no cap
    weigh: Callable | None = None  # the user's (l_BHNS, allowed) -> A_BHNS; None: the softmax (explicit.weights)


class Memory(NamedTuple):
    """The encoder's tokens (None if call.cache has their keys and values), and the mask of the valid tokens."""

    x_BSD: jax.Array | None
    mask: masks.Mask | None  # None: all tokens are valid


class Call(NamedTuple):
    """The arguments of one forward pass: mask, positions, random keys, devices, caches, activations to see or edit."""

    mask: masks.Mask | None = None
    n: jax.Array | None = None  # positions of the tokens, (N,) or (B, N); None: 0 ... N-1
    code_n: jax.Array | None = None  # positions for the position code, if it restarts in a sequence; None: n
    key_B: jax.Array | None = None  # a random key for each sequence in training; None in evaluation
    layout: layouts.Layout = layouts.ONE  # the devices that share the model, inside shard_map
    memory: Memory | None = None
    cache: dict[str, KVCache] | None = None  # this layer's keys and values of earlier tokens, "self" and "cross"
    keep: bool = False  # return keys and values as aux["cache"]
    look: tuple[str, ...] = ()  # names of activations to return in aux["look"] (block.Order)
    edit: dict[str, Edit] | tuple[()] = ()  # name -> function (activation, m) -> its replacement; () can be hashed
    m: jax.Array | int = 0  # number of this layer, 0 ... M-1

    def visit(self, look: dict, name: str, x: jax.Array) -> jax.Array:
        """Return x, or its replacement edit[name](x, m) if `edit` has the name, and store the result in `look`.

        Raises ValueError if the replacement has another shape.
        """
        if name in self.edit:
            edit = self.edit[name]
            x = variant.check_shape(edit, edit(x, self.m), x).astype(x.dtype)
        look[name] = x
        return x


@jax.named_scope("attention")
def self_attention(params: dict, x_BND: jax.Array, spec: Spec, call: Call, aux: dict) -> jax.Array:
    """Return Y = sum_h V_h X A_h (Turner 2023; E9).

    aux: receives measures, activations, keys and values (block.Order); the weights "A" are None unless call.look names
    them. With call.cache, keys and values are written to the positions call.n of the cache, and the tokens attend to
    all of its S positions. `call.mask` must then forbid later positions.
    """
    look, measures = aux["look"], aux["measures"]
    with jax.named_scope("score"):
        pair = spec.score.apply(params["score"], x_BND, x_BND)
        q_BHNK, plain_BHNK = variant.take_measures(spec.score, pair, measures)
        k_BHNK = plain_BHNK
        if spec.relative_position.rotate is not None:
            n = jnp.arange(x_BND.shape[1]) if call.n is None else call.n
            q_BHNK, k_BHNK = spec.relative_position.rotate(params["relative_position"], q_BHNK, plain_BHNK, n)
        q_BHNK, k_BHSK = call.visit(look, "q", q_BHNK), call.visit(look, "k", k_BHNK)
    with jax.named_scope("value"):
        v_BHNV = spec.value.apply(params["value"], plain_BHNK if spec.value.from_keys else x_BND)
        v_BHNV = v_BHSV = call.visit(look, "v", variant.take_measures(spec.value, v_BHNV, measures))
    with jax.named_scope("average"):
        scale, bias = spec.scale(q_BHNK.shape[-1], x_BND.shape[-1]), logit_bias(params, x_BND, spec, call)
        options = {"mask": call.mask, "scale": scale, "cap": spec.cap, "bias": bias, "n": call.n}
        if call.keep or call.cache is not None:
            cache = join_cache(k_BHSK, v_BHSV)
            if call.cache is not None:
                old = call.cache["self"]
                cache = {name: platform.write_cache(old[name], new, call.n) for name, new in cache.items()}
            k_BHSK, v_BHSV = split_cache(cache)
            aux["cache"]["self"] = cache
        attend = choose_attend(spec, call, "A", axis=call.layout.sequence)
        y_BHNV, look["A"] = attend(q_BHNK, k_BHSK, v_BHSV, **options)
    with jax.named_scope("combine"):
        if process := spec.value.post_process:
            y_BHNV = variant.check_shape(process, process(params["value"], y_BHNV, x_BND, v_BHNV), y_BHNV)
        y_BHNV = call.visit(look, "y", y_BHNV)
        y_BND = spec.value.out_proj(params["value"], y_BHNV, layout=call.layout)
        return call.visit(look, "attention", variant.check_shape(spec.value.out_proj, y_BND, x_BND))


@jax.named_scope("cross")
def cross_attention(params: dict, x_BND: jax.Array, spec: Spec, call: Call, aux: dict) -> jax.Array:
    """Return Y = sum_h V_h X' A_h, where tokens attend to the memory X' = call.memory.x_BSD (E26).

    call.cache, if set, has the keys and values of the memory from an earlier call, which are then used. aux: receives
    measures, the weights "A_cross" if call.look names them, and with call.keep or call.cache the keys and values
    (block.Order).
    """
    source_BSD = x_BND if call.cache else call.memory.x_BSD  # with a cache, the keys of x_BND are not used
    with jax.named_scope("score"):
        pair = spec.score.apply(params["score_cross"], x_BND, source_BSD)
        q_BHNK, k_BHSK = variant.take_measures(spec.score, pair, aux["measures"])
    if call.cache:
        cache = call.cache["cross"]
    else:
        with jax.named_scope("value"):
            v_BHSV = spec.value.apply(params["value_cross"], k_BHSK if spec.value.from_keys else source_BSD)
            cache = join_cache(k_BHSK, variant.take_measures(spec.value, v_BHSV, aux["measures"]))
    if call.keep or call.cache:
        aux["cache"]["cross"] = cache
    with jax.named_scope("average"):
        options = {"mask": call.memory.mask, "scale": spec.scale(q_BHNK.shape[-1], x_BND.shape[-1]), "cap": spec.cap}
        attend = choose_attend(spec, call, "A_cross")
        y_BHNV, aux["look"]["A_cross"] = attend(q_BHNK, *split_cache(cache), **options)
    with jax.named_scope("combine"):
        if process := spec.value.post_process:
            y_BHNV = variant.check_shape(process, process(params["value_cross"], y_BHNV, x_BND, None), y_BHNV)
        y_BND = spec.value.out_proj(params["value_cross"], y_BHNV, layout=call.layout)
        return variant.check_shape(spec.value.out_proj, y_BND, x_BND)


def choose_attend(spec: Spec, call: Call, name: str, *, axis: str | None = None) -> Callable:
    """Return the function that computes the weighted averages of the values: spec.attend, or explicit.attention.

    It is explicit.attention if call.cache or spec.weigh is set, or if `name` ("A" or "A_cross") is in call.look or
    call.edit. The weights of spec.weigh become 0 for forbidden keys. axis: the mesh axis over which keys are sharded.
    Raises ValueError if `axis` is set and attention must be explicit.
    """
    is_changed = spec.weigh or name in call.edit
    if not (is_changed or name in call.look or call.cache is not None):
        return functools.partial(spec.attend, axis=axis) if axis else spec.attend
    if axis:
        raise ValueError(
            f"the weights {name} need all keys of a query, but devices share the tokens of a sequence. "
            "Use a layout with sequence = None"
        )
    if not is_changed:
        return explicit.attention

    def weigh(l_BHNS: jax.Array, allowed: jax.Array | None) -> jax.Array:
        allowed = jnp.ones(l_BHNS.shape[-2:], bool) if allowed is None else allowed
        allowed = allowed[:, None] if allowed.ndim == 3 else allowed  # broadcasts over heads
        A_BHNS = variant.check_shape(weights, weights(l_BHNS, allowed), l_BHNS)
        return call.visit({}, name, jnp.where(allowed, A_BHNS, 0))

    weights = spec.weigh or explicit.weights
    return functools.partial(explicit.attention, weigh=weigh)


def join_cache(k_BHSK: jax.Array, v_BHSV: jax.Array) -> KVCache:
    """Return the cache {"k_BHSK": keys, "v_BHSV": values}, without "v_BHSV" if both are the same array."""
    return {"k_BHSK": k_BHSK} if v_BHSV is k_BHSK else {"k_BHSK": k_BHSK, "v_BHSV": v_BHSV}


def split_cache(cache: KVCache) -> tuple[jax.Array, jax.Array]:
    """Return the keys and the values of a cache. If the cache has no values, return the keys in their place."""
    return cache["k_BHSK"], cache.get("v_BHSV", cache["k_BHSK"])


def logit_bias(params: dict, x_BND: jax.Array, spec: Spec, call: Call) -> masks.Bias | None:
    """Return the bias of the logits as a function of positions (mask.Bias), or None.

    The bias is the sum of the bias of relative positions and, if the score has attend_to_self = False, of a bias
    against s = n (relative_position.self_bias). If heads are sharded over devices, it has the heads of this device.
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

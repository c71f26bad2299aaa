"""One more token at a time: X^(n) is the first n columns of X^(n+1), so what was computed for them is kept (E23).

`start` reads prompts and keeps every layer's keys and values; `step` adds one word to each sequence. Sequences may
stand at different positions. Keys and values have a place for each position, S = `capacity` of them.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tfm import block as blocks
from tfm import norm, transformer
from tfm.attention import explicit
from tfm.attention import mask as masks


def check(design: blocks.Design) -> None:
    """ValueError where a token's representation depends on later tokens, whatever the mask: nothing can be kept."""
    if design.norm is norm.instance:
        raise ValueError("instance norm looks at later tokens, so there is no incremental representation")


def start(
    params: dict, prompt_BN: jax.Array, length_B: jax.Array, *, capacity: int, mask: masks.Mask, design, **model: Any
) -> tuple[jax.Array, list[dict]]:
    """The logits_BW of the word after each prompt, and the cache: for each layer keys and values of `capacity` places.

    Prompts stand at the left of prompt_BN; what is right of length_B words is ignored, since the mask must be causal
    or let a token see at most the prompt. `model` are the other arguments of transformer.apply.
    """
    check(design)
    logits_BNW, seen = transformer.apply(params, prompt_BN, mask=mask, design=design, keep=True, **model)
    M = jax.tree.leaves(seen["cache"])[0].shape[0]
    return last(logits_BNW, length_B), grow([transformer.layer_of(seen["cache"], m) for m in range(M)], capacity)


def last(logits_BNW: jax.Array, length_B: jax.Array) -> jax.Array:
    """Of each sequence the logits at its last real word."""
    return jnp.take_along_axis(logits_BNW, (length_B - 1)[:, None, None], axis=1)[:, 0]


def places(cache: list[dict]) -> int:
    """How many tokens have a place."""
    return cache[0]["self"]["k_BHSK"].shape[2]


def grow(cache: list[dict], capacity: int) -> list[dict]:
    """The cache with `capacity` places for the own tokens' keys and values."""
    beyond = [(0, 0), (0, 0), (0, capacity - places(cache)), (0, 0)]
    return [dict(kept) | {"self": {name: jnp.pad(x, beyond) for name, x in kept["self"].items()}} for kept in cache]


def step(
    params: dict, cache: list[dict], w_B: jax.Array, n_B: jax.Array, *, mask: masks.Mask, design, **model: Any
) -> tuple[jax.Array, list[dict]]:
    """Word w_B at position n_B of each sequence: the logits_BW of the next one, and the cache with this one in it.

    mask must forbid later places (mask.causal, or its product with another): they hold nothing. params: those of the
    model, or from `by_layer`, with which a loop of steps is twice as fast on CPU.
    """
    design = design._replace(compute=attend)
    logits_B1W, seen = transformer.apply(
        params, w_B[:, None], n=n_B[:, None], mask=mask, design=design, caches=cache, **model
    )
    return logits_B1W[:, 0], seen["cache"]


def by_layer(params: dict) -> dict:
    """The parameters for many steps, made once: with a list of layers, so that no step cuts them out of the stack."""
    M = jax.tree.leaves(params["blocks"])[0].shape[0]
    return params | {"blocks": [transformer.layer_of(params["blocks"], m) for m in range(M)]}


def attend(
    q_BHNK: jax.Array,
    k_BHSK: jax.Array,
    v_BHSV: jax.Array,
    *,
    mask: masks.Mask | None,
    scale: float,
    bias: Callable[[jax.Array, jax.Array], jax.Array] | None = None,
    n: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`explicit.attention` for few queries and many keys; on CPU as k q^T, for which no key is copied.

    Keys and values are then read once: only where an answer is not finite are the values searched for what the mask
    hides. Other devices would wait for the host at such a question, and copy nothing anyway.
    """

    def as_defined(*qkv: jax.Array) -> tuple[jax.Array, jax.Array]:
        return explicit.attention(*qkv, mask=mask, scale=scale, bias=bias, n=n)

    def by_keys(q_BHNK: jax.Array, k_BHSK: jax.Array, v_BHSV: jax.Array) -> tuple[jax.Array, jax.Array]:
        N, S = q_BHNK.shape[2], k_BHSK.shape[2]
        at, s_S = jnp.arange(S - N, S) if n is None else n, jnp.arange(S)
        l_BHNS = explicit.logits(k_BHSK, q_BHNK, scale=scale).swapaxes(-1, -2)
        allowed = None if mask is None else mask(at, s_S)
        A_BHNS = explicit.weights(l_BHNS if bias is None else l_BHNS + bias(at, s_S), allowed)
        y_BHNV = jnp.matmul(A_BHNS.astype(v_BHSV.dtype), v_BHSV)
        finite = jnp.isfinite(y_BHNV).all()
        return jax.lax.cond(finite, lambda: y_BHNV, lambda: as_defined(q_BHNK, k_BHSK, v_BHSV)[0]), A_BHNS

    return jax.lax.platform_dependent(q_BHNK, k_BHSK, v_BHSV, cpu=by_keys, default=as_defined)

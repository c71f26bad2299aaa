"""KV cache: X^(n) is the first n columns of X^(n+1), so what was computed for them is kept, one token at a time (E23).

`start` reads prompts and keeps every layer's keys and values; `step` adds one word to each sequence. Sequences may
stand at different positions. Keys and values have a place for each position, S = `capacity` of them.
"""

from typing import Any

import jax
import jax.numpy as jnp

from tfm import transformer


def start(
    params: dict,
    prompt_BN: jax.Array,
    length_B: jax.Array,
    *,
    capacity: int,
    parts: transformer.Parts,
    dtype: Any = None,
    **model: Any,
) -> tuple[jax.Array, list[dict]]:
    """The logits_BW of the word after each prompt, and the cache: for each layer keys and values of `capacity` places.

    Prompts stand at the left of prompt_BN; what is right of length_B words is ignored, since the mask must be causal
    or let a token see at most the prompt. `model`: mask and the other arguments of transformer.apply. ValueError where
    a token's representation depends on later tokens, whatever the mask: nothing can be kept.
    """
    if getattr(parts.block.norm, "whole", False):
        raise ValueError("this norm looks at later tokens, so there is no incremental representation")
    params = transformer.cast(params, dtype)
    x_BND, aux = transformer.hidden_states(params, prompt_BN, parts=parts, keep=True, **model)
    last_B1D = jnp.take_along_axis(x_BND, (length_B - 1)[:, None, None], axis=1)
    return transformer.logits(params, last_B1D, parts=parts)[:, 0], grow(transformer.layers_of(aux["cache"]), capacity)


def places(cache: list[dict]) -> int:
    """How many tokens have a place."""
    return cache[0]["self"]["k_BHSK"].shape[2]


def grow(cache: list[dict], capacity: int) -> list[dict]:
    """The cache with `capacity` places for the own tokens' keys and values."""
    beyond = [(0, 0), (0, 0), (0, capacity - places(cache)), (0, 0)]
    return [dict(layer) | {"self": {name: jnp.pad(x, beyond) for name, x in layer["self"].items()}} for layer in cache]


def step(params: dict, cache: list[dict], w_B: jax.Array, n_B: jax.Array, **model: Any) -> tuple[jax.Array, list[dict]]:
    """Word w_B at position n_B of each sequence: the logits_BW of the next one, and the cache with this one in it.
    model: as in `start`; mask must forbid later places (mask.causal, or its product with another): they hold nothing.
    params: those of the model, or from `by_layer`, with which a loop of steps is twice as fast on CPU."""
    logits_B1W, aux = transformer.apply(params, w_B[:, None], n=n_B[:, None], caches=cache, **model)
    return logits_B1W[:, 0], aux["cache"]


def by_layer(params: dict, dtype: Any = None) -> dict:
    """The parameters for many steps, made once: with a list of layers, so that no step cuts them out of the stack, and
    in the dtype of the products (transformer.apply), so that none makes them narrower."""
    params = transformer.cast(params, dtype)
    return params | {"blocks": transformer.layers_of(params["blocks"])}

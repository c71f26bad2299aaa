"""KV cache: X^(n) is the first n columns of X^(n+1), so what was computed for them is kept, one token at a time (E23).

`start` reads prompts and keeps every layer's keys and values; `step` adds one token to each sequence. Sequences may
stand at different positions. Keys and values have a place for each position, S = `capacity` of them.
"""

from typing import Any

import jax
import jax.numpy as jnp

from tfm import transformer
from tfm.attention.spec import Call


def start(
    params: dict,
    prompt_BN: jax.Array,
    length_B: jax.Array,
    *,
    capacity: int,
    spec: transformer.Spec,
    call: Call,
) -> tuple[jax.Array, list[dict]]:
    """Return the logits_BW of the token after each prompt, and the cache: for each layer keys and values.

    Prompts stand at the left of prompt_BN; what is right of length_B tokens is ignored, since the mask must be causal
    or let a token see at most the prompt. Raises ValueError if a token depends on later tokens whatever the mask:
    nothing can be kept then.
    """
    if spec.block.norm.needs_all_tokens:
        raise ValueError("this norm looks at later tokens, so there is no incremental representation")
    x_BND, aux = transformer.hidden(params, prompt_BN, spec, call._replace(keep=True))
    last_B1D = jnp.take_along_axis(x_BND, (length_B - 1)[:, None, None], axis=1)
    logits_BW = transformer.logits(params, last_B1D, spec)[:, 0]
    return logits_BW, grow(transformer.unstack(aux["cache"]), capacity)


def count_positions(cache: list[dict]) -> int:
    """Return how many tokens have a place."""
    return cache[0]["self"]["k_BHSK"].shape[2]


def grow(cache: list[dict], capacity: int) -> list[dict]:
    """Return the cache with `capacity` places for the keys and values of the tokens themselves."""
    padding = [(0, 0), (0, 0), (0, capacity - count_positions(cache)), (0, 0)]
    return [dict(layer) | {"self": {name: jnp.pad(x, padding) for name, x in layer["self"].items()}} for layer in cache]


def step(
    params: dict, cache: list[dict], w_B: jax.Array, n_B: jax.Array, *, spec: transformer.Spec, call: Call
) -> tuple[jax.Array, list[dict]]:
    """Read token w_B at position n_B of each sequence. Return the logits_BW of the next one, and the new cache.

    call.mask must forbid later places (mask.causal, or its product with another): they hold nothing.
    params: those of the model, or from `by_layer`, with which a loop of steps is twice as fast on a CPU.
    """
    x_B1D, aux = transformer.hidden(params, w_B[:, None], spec, call._replace(n=n_B[:, None]), caches=cache)
    return transformer.logits(params, x_B1D, spec)[:, 0], aux["cache"]


def by_layer(params: dict, dtype: Any = None) -> dict:
    """Return the parameters for many steps: with a list of layers, so that no step cuts them out of the stack, and in
    the dtype of the products, so that none casts them."""
    params = transformer.cast(params, dtype)
    return params | {"blocks": transformer.unstack(params["blocks"])}

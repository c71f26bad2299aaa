"""KV cache: a new token does not change the keys and values of earlier tokens, so they are computed once (E23).

`start` reads prompts and stores the keys and values of every layer; `step` appends one token to each sequence.
Sequences may have different lengths. The cache has space for S = `capacity` positions.
"""

from typing import Any

import jax
import jax.numpy as jnp

from tfm import transformer
from tfm.attention.heads import Call


def start(
    params: dict,
    prompt_BN: jax.Array,
    length_B: jax.Array,
    *,
    capacity: int,
    spec: transformer.Spec,
    call: Call,
) -> tuple[jax.Array, list[dict]]:
    """Return the logits_BW of the token after each prompt, and the cache: keys and values of each layer.

    prompt_BN is right-padded, with length_B tokens each. call.mask must be causal, or allow no key beyond the prompt:
    then the padding has no effect. capacity: number of positions of the cache. Raises ValueError if the norm makes a
    token depend on later tokens.
    """
    if spec.block.norm.needs_all_tokens:
        raise ValueError(
            "the norm depends on later tokens, which a KV cache cannot know. Choose a norm of single tokens."
        )
    x_BND, aux = transformer.hidden(params, prompt_BN, spec, call._replace(keep=True))
    last_B1D = jnp.take_along_axis(x_BND, (length_B - 1)[:, None, None], axis=1)
    logits_BW = transformer.logits(params, last_B1D, spec)[:, 0]
    return logits_BW, grow(transformer.unstack(aux["cache"]), capacity)


def count_positions(cache: list[dict]) -> int:
    """Return the capacity of the cache, in positions."""
    return cache[0]["self"]["k_BHSK"].shape[2]


def grow(cache: list[dict], capacity: int) -> list[dict]:
    """Return the cache with the keys and values of self-attention padded to `capacity` positions."""
    padding = [(0, 0), (0, 0), (0, capacity - count_positions(cache)), (0, 0)]
    return [dict(layer) | {"self": {name: jnp.pad(x, padding) for name, x in layer["self"].items()}} for layer in cache]


def step(
    params: dict, cache: list[dict], w_B: jax.Array, n_B: jax.Array, *, spec: transformer.Spec, call: Call
) -> tuple[jax.Array, list[dict]]:
    """Read token w_B at position n_B of each sequence. Return the logits_BW of the next token, and the new cache.

    call.mask must forbid later positions, which are empty: masks.causal, or `both` of it and another mask. params: the
    parameters of the model, or by_layer(params), which makes a loop of steps twice as fast on a CPU.
    """
    x_B1D, aux = transformer.hidden(params, w_B[:, None], spec, call._replace(n=n_B[:, None]), caches=cache)
    return transformer.logits(params, x_B1D, spec)[:, 0], aux["cache"]


def by_layer(params: dict, dtype: Any = None) -> dict:
    """Return the parameters with a list of layers in place of stacked ones, in `dtype` (None: their own).

    Then no step needs to slice the layers or to cast their parameters.
    """
    params = transformer.cast(params, dtype)
    return params | {"blocks": transformer.unstack(params["blocks"])}

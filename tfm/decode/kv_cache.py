"""KV cache: X^(n) is the first n columns of X^(n+1), so keys and values of earlier tokens are kept (E23).

`start` reads prompts and keeps every layer's keys and values; `step` adds one token to each sequence. Sequences may be
at different positions. The cache has `capacity` positions S for keys and values.
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
    """Return the logits_BW of the token after each prompt, and the cache: keys and values of each layer.

    prompt_BN is right-padded: tokens after the first length_B are ignored, because the mask must be causal, or let a
    token see at most the prompt. Raises ValueError if the norm makes a token depend on later tokens.
    """
    if spec.block.norm.needs_all_tokens:
        raise ValueError("this norm depends on later tokens, so keys and values of earlier tokens cannot be kept")
    x_BND, aux = transformer.hidden(params, prompt_BN, spec, call._replace(keep=True))
    last_B1D = jnp.take_along_axis(x_BND, (length_B - 1)[:, None, None], axis=1)
    logits_BW = transformer.logits(params, last_B1D, spec)[:, 0]
    return logits_BW, grow(transformer.unstack(aux["cache"]), capacity)


def count_positions(cache: list[dict]) -> int:
    """Return the number of positions in the cache."""
    return cache[0]["self"]["k_BHSK"].shape[2]


def grow(cache: list[dict], capacity: int) -> list[dict]:
    """Return the cache with `capacity` positions for the keys and values of self-attention."""
    padding = [(0, 0), (0, 0), (0, capacity - count_positions(cache)), (0, 0)]
    return [dict(layer) | {"self": {name: jnp.pad(x, padding) for name, x in layer["self"].items()}} for layer in cache]


def step(
    params: dict, cache: list[dict], w_B: jax.Array, n_B: jax.Array, *, spec: transformer.Spec, call: Call
) -> tuple[jax.Array, list[dict]]:
    """Read token w_B at position n_B of each sequence. Return the logits_BW of the next token, and the new cache.

    call.mask must forbid later positions, which are empty (mask.causal, or its product with another mask). params: the
    model's, or from `by_layer`, with which a loop of steps is twice as fast on a CPU.
    """
    x_B1D, aux = transformer.hidden(params, w_B[:, None], spec, call._replace(n=n_B[:, None]), caches=cache)
    return transformer.logits(params, x_B1D, spec)[:, 0], aux["cache"]


def by_layer(params: dict, dtype: Any = None) -> dict:
    """Return the parameters for many steps: the layers as a list, in the dtype of the products.

    No step then slices the layers or casts their parameters.
    """
    params = transformer.cast(params, dtype)
    return params | {"blocks": transformer.unstack(params["blocks"])}

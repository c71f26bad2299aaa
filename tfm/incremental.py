"""One more token at a time: X^(n) is the first n columns of X^(n+1), so what was computed for them is kept (E23).

`start` reads prompts and keeps every layer's keys and values; `step` adds one word to each sequence. Sequences may
stand at different positions. Keys and values have a place for each position, S = `room` of them.
"""

from typing import Any

import jax
import jax.numpy as jnp

from tfm import block as blocks
from tfm import mask as masks
from tfm import norm, transformer


def check(design: blocks.Design) -> None:
    """ValueError where a token's representation depends on later tokens, whatever the mask: nothing can be kept."""
    if design.norm is norm.instance:
        raise ValueError("instance norm looks at later tokens, so there is no incremental representation")


def start(
    params: dict, prompt_BN: jax.Array, length_B: jax.Array, *, room: int, mask: masks.Mask, design, **model: Any
) -> tuple[jax.Array, list[dict]]:
    """The logits_BW of the word after each prompt, and the cache: for each layer keys and values of `room` places.

    Prompts stand at the left of prompt_BN; what is right of length_B words is ignored, since the mask must be causal
    or let a token see at most the prompt. `model` are the other arguments of transformer.apply.
    """
    check(design)
    logits_BNW, seen = transformer.apply(params, prompt_BN, mask=mask, design=design, keep=True, **model)
    return last(logits_BNW, length_B), roomy(seen["cache"], room)


def last(logits_BNW: jax.Array, length_B: jax.Array) -> jax.Array:
    """Of each sequence the logits at its last real word."""
    return jnp.take_along_axis(logits_BNW, (length_B - 1)[:, None, None], axis=1)[:, 0]


def roomy(stacked: dict, room: int) -> list[dict]:
    """The cache as a list over layers, the own tokens' keys and values with `room` places."""
    M = jax.tree.leaves(stacked)[0].shape[0]
    grown = dict(stacked) | {"self": jax.tree.map(lambda x: jnp.pad(x, _beyond(x, room)), stacked["self"])}
    return [transformer.layer_of(grown, m) for m in range(M)]


def _beyond(x_MBHSK: jax.Array, room: int) -> list[tuple[int, int]]:
    return [(0, 0)] * 3 + [(0, room - x_MBHSK.shape[3]), (0, 0)]


def step(
    params: dict, cache: list[dict], w_B: jax.Array, n_B: jax.Array, *, mask: masks.Mask, design, **model: Any
) -> tuple[jax.Array, list[dict]]:
    """Word w_B at position n_B of each sequence: the logits_BW of the next one, and the cache with this one in it.

    mask must forbid later places (mask.causal, or its product with another): they hold nothing.
    """
    logits_B1W, seen = transformer.apply(
        params, w_B[:, None], n=n_B[:, None], mask=mask, design=design, caches=cache, **model
    )
    return logits_B1W[:, 0], seen["cache"]

"""`Spec`: the functions of an attention layer. `Call`: the arguments of a forward pass, which every layer receives."""

from collections.abc import Callable
from typing import NamedTuple

import jax

from tfm import layout as layouts
from tfm.attention import mask as masks, relative_position, score, value

# Keys k_BHSK and values v_BHSV, with G heads if heads share them (groups.py); k_BHSK alone if they are the same array.
KVCache = dict[str, jax.Array]


class Spec(NamedTuple):
    """The function for each step of an attention layer; the module of the same name states its signature."""

    score: score.Score
    value: value.Value
    relative_position: relative_position.RelativePosition
    attend: Callable[..., tuple[jax.Array, jax.Array | None]]  # computes the averages (implementations.py)
    scale: Callable[[int, int], float]  # (K, D) -> the factor on the logits
    H: int  # number of heads, for relative positions without parameters
    cap: float = 0.0  # soft cap of the logits (explicit.soft_cap); 0: none


class Memory(NamedTuple):
    """The encoder's tokens, to which a decoder attends, and the mask of the valid ones."""

    x_BSD: jax.Array | None
    mask: masks.Mask | None


class Call(NamedTuple):
    """The arguments of one forward pass: mask, positions, random keys, devices, caches, and which aux to return."""

    mask: masks.Mask | None = None
    n: jax.Array | None = None  # positions of the tokens, (N,) or (B, N); None: 0 ... N-1
    key_B: jax.Array | None = None  # a random key for each sequence in training; None in evaluation
    layout: layouts.Layout = layouts.ONE  # the devices that share the model, inside shard_map
    memory: Memory | None = None
    cache: dict[str, KVCache] | None = None  # this layer's keys and values of earlier tokens, "self" and "cross"
    keep: bool = False  # return keys and values
    maps: bool = False  # return the attention weights A_BHNS

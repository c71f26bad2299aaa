"""What an attention layer is made of (`Spec`), and what one forward pass tells every layer (`Call`)."""

from collections.abc import Callable
from typing import NamedTuple

import jax

from tfm import layout as layouts
from tfm.attention import mask as masks, relative_position, score, value

# k_BHSK and v_BHSV, of G heads if these are shared (groups.py); the first alone if they are the same array.
KVCache = dict[str, jax.Array]


class Spec(NamedTuple):
    """The function that fills each place of an attention layer; the files of the same names say what each must be."""

    score: score.Score
    value: value.Value
    relative_position: relative_position.RelativePosition
    attend: Callable[..., tuple[jax.Array, jax.Array | None]]  # computes the averages (implementations.py)
    scale: Callable[[int, int], float]  # (K, D) -> the factor on the logits
    H: int  # heads, for relative positions that have no parameter of their own to count them by
    cap: float = 0.0  # soft cap of the logits; 0: none (explicit.capped)


class Memory(NamedTuple):
    """The tokens of the encoder, to which a decoder attends, and the mask of the real ones."""

    x_BSD: jax.Array | None
    mask: masks.Mask | None


class Call(NamedTuple):
    """One forward pass: who may attend to whom, where tokens stand, randomness, devices, and what to return."""

    mask: masks.Mask | None = None
    n: jax.Array | None = None  # positions of the tokens, (N,) or (B, N); None: 0 ... N-1
    key_B: jax.Array | None = None  # a random key for each sequence in training; None in evaluation
    layout: layouts.Layout = layouts.ONE  # the devices that share the model, inside shard_map
    memory: Memory | None = None
    cache: dict[str, KVCache] | None = None  # of this layer: keys and values of earlier tokens, 'self' and 'cross'
    keep: bool = False  # return keys and values
    maps: bool = False  # return the attention weights A_BHNS

"""`Spec`: the functions of an attention layer. `Call`: the arguments of a forward pass, which every layer receives."""

from collections.abc import Callable
from typing import NamedTuple

import jax

from tfm import layout as layouts, shapes
from tfm.attention import mask as masks, relative_position, score, value

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
    mask: masks.Mask | None


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
    look: tuple[str, ...] = ()  # activations to return in aux["look"] (block.Order)
    edit: dict[str, Edit] | tuple[()] = ()  # (activation, m) -> its replacement, by name; () can be hashed
    m: jax.Array | int = 0  # number of this layer, 0 ... M-1

    def visit(self, look: dict, name: str, x: jax.Array) -> jax.Array:
        """Return the activation, or its replacement if `edit` has its name, and store the result in `look`.

        Raises ValueError if the replacement has another shape.
        """
        if name in self.edit:
            edit = self.edit[name]
            x = shapes.check_shape(edit, edit(x, self.m), x).astype(x.dtype)
        look[name] = x
        return x

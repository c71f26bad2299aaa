"""Ring attention, of tokens that are spread over the devices of a mesh axis: queries stay, blocks of keys go around.

No device ever holds more than the keys of one (Liu et al. 2023). With a causal mask all have the same work in every
turn if device i of P holds the tokens i, i + P, i + 2P, ... (Brandon et al. 2023, striped attention).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Tree = Any


def positions(n: jax.Array | None, N: int, S: int, axis: str | None) -> tuple[jax.Array, jax.Array]:
    """Where the queries and the keys stand: with an axis at the same places.

    ValueError for tokens that are spread over an axis without their positions, (N,), or not as many keys as queries.
    """
    if axis is None:
        return jnp.arange(S - N, S) if n is None else n, jnp.arange(S)
    if n is None or n.ndim > 1 or N != S:
        raise ValueError(
            f"tokens spread over {axis!r} need positions n of (N,), and a key each: {N} queries and {S} keys"
        )
    return n, n


def onward(tree: Tree, axis: str | None) -> Tree:
    """What the device before this one on the mesh axis holds; without an axis there is one device, and it keeps all."""
    if axis is None:
        return tree
    devices = jax.lax.axis_size(axis)
    return jax.lax.ppermute(tree, axis, [(i, (i + 1) % devices) for i in range(devices)])


def around(turn: Callable[[Tree, Tree], Tree], carry: Tree, key: Tree, axis: str | None) -> Tree:
    """`carry = turn(carry, key)` once for the keys of every device of the axis, a device's own ones first."""
    if axis is None:
        return turn(carry, key)

    def step(state: tuple, _: None) -> tuple[tuple, None]:
        carry, key = state
        # Sending does not wait for the turn, so that the two can happen at the same time.
        return (turn(carry, key), onward(key, axis)), None

    return jax.lax.scan(step, (carry, key), None, length=jax.lax.axis_size(axis))[0][0]

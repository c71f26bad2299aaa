"""Ring attention: tokens are sharded over a mesh axis; queries stay, and the keys and values travel around the devices.

No device ever holds the keys of more than one device (Liu et al. 2023). With a causal mask all devices have the same
work in every turn if device i of P holds the tokens i, i + P, i + 2P, ... (Brandon et al. 2023, striped attention).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Tree = Any


def positions(n: jax.Array | None, N: int, S: int, axis: str | None) -> tuple[jax.Array, jax.Array]:
    """Return the positions of the queries and of the keys. With an axis they are the same.

    Raises ValueError if tokens are sharded over an axis and n is not (N,), or there are not as many keys as queries.
    """
    if axis is None:
        return jnp.arange(S - N, S) if n is None else n, jnp.arange(S)
    if n is None or n.ndim > 1 or N != S:
        raise ValueError(
            f"tokens sharded over {axis!r} need positions n of (N,), and N = S: here N = {N} queries and S = {S} keys"
        )
    return n, n


def send_to_next(tree: Tree, axis: str | None) -> Tree:
    """Return what the previous device of the mesh axis holds. Without an axis, return the tree itself."""
    if axis is None:
        return tree
    devices = jax.lax.axis_size(axis)
    return jax.lax.ppermute(tree, axis, [(i, (i + 1) % devices) for i in range(devices)])


def scan_ring(hop: Callable[[Tree, Tree], Tree], carry: Tree, key: Tree, axis: str | None) -> Tree:
    """Compute carry = hop(carry, key) once for the keys of every device of the axis, its own first."""
    if axis is None:
        return hop(carry, key)

    def step(state: tuple, _: None) -> tuple[tuple, None]:
        carry, key = state
        # The keys are sent without waiting for the hop, so that both can happen at the same time.
        return (hop(carry, key), send_to_next(key, axis)), None

    return jax.lax.scan(step, (carry, key), None, length=jax.lax.axis_size(axis))[0][0]

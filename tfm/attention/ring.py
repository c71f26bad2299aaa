"""Ring attention: sequences are sharded over a mesh axis; queries stay, and keys and values travel around the devices.

In each hop, a device computes with the keys of one device, and sends them to the next (Liu et al. 2023). With a causal
mask all devices have the same work in every hop if device i of P has the tokens i, i + P, i + 2P, ... (Brandon et al.
2023, striped attention).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Tree = Any


def positions(n: jax.Array | None, N: int, S: int, axis: str | None) -> tuple[jax.Array, jax.Array]:
    """Return the positions of N queries and S keys: n for both if the mesh axis `axis` shards the sequences.

    If `axis` is None, queries have the positions n (None: the last N of S), and keys 0 ... S - 1.
    Raises ValueError if `axis` is set and n is not (N,) or N is not S.
    """
    if axis is None:
        return jnp.arange(S - N, S) if n is None else n, jnp.arange(S)
    if n is None or n.ndim > 1 or N != S:
        raise ValueError(
            f"N = {N} queries and S = {S} keys are sharded over axis = {axis!r}, which needs N = S and n "
            "of shape (N,). Pass the positions n."
        )
    return n, n


def send_to_next(tree: Tree, axis: str | None) -> Tree:
    """Send the tree to the next device of the mesh axis, and return the tree of the previous device.

    If `axis` is None, return the tree unchanged.
    """
    if axis is None:
        return tree
    devices = jax.lax.axis_size(axis)
    return jax.lax.ppermute(tree, axis, [(i, (i + 1) % devices) for i in range(devices)])


def scan_ring(hop: Callable[[Tree, Tree], Tree], carry: Tree, key: Tree, axis: str | None) -> Tree:
    """Compute carry = hop(carry, key) for the keys of every device of the mesh axis, and return the last carry.

    key: a tree with the keys and values of this device, which come first. If `axis` is None, there is only this hop.
    """
    if axis is None:
        return hop(carry, key)

    def step(state: tuple, _: None) -> tuple[tuple, None]:
        carry, key = state
        # Sending the keys does not depend on the hop, so that both can run at the same time.
        return (hop(carry, key), send_to_next(key, axis)), None

    return jax.lax.scan(step, (carry, key), None, length=jax.lax.axis_size(axis))[0][0]

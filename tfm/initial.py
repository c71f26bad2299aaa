"""Initial parameters: a parameter's random key depends only on the root key and its path.

Adding, removing or reordering parameters therefore does not change the initial values of the others. Two models with
the same root key give a parameter the same initial value if its path, shape and std agree. Shapes follow from the names
(shapes.py).
"""

import zlib
from typing import Any

import jax
import jax.numpy as jnp

from tfm import shapes


def key(root: jax.Array, name: str) -> jax.Array:
    """Return the random key of the child `name` of a node with the key `root`: fold_in(root, crc32(name)).

    The result is equal on all machines and in all versions of Python.
    """
    return jax.random.fold_in(root, zlib.crc32(name.encode()))


def normal(root: jax.Array, name: str, std: float, **sizes: int) -> dict[str, jax.Array]:
    """Return {name: independent draws from N(0, std^2)}, of the shape that the name states (shapes.shape)."""
    return {name: std * jax.random.normal(key(root, name), shapes.shape(name, sizes))}


def zeros(name: str, **sizes: int) -> dict[str, jax.Array]:
    """Return {name: zeros}, for biases and shifts. The letters after _ in `name` give the shape: b_HK has (H, K)."""
    return {name: jnp.zeros(shapes.shape(name, sizes))}


def scaled(params: Any, factor: float | jax.Array, names: str | tuple[str, ...]) -> Any:
    """Return the parameters with the leaves multiplied by `factor` if their names begin with one of `names`."""

    def times(path: Any, leaf: jax.Array) -> jax.Array:
        return factor * leaf if shapes.names(path)[-1].startswith(names) else leaf

    return jax.tree_util.tree_map_with_path(times, params)

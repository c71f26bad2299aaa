"""Initial parameters: a parameter's random key depends only on the root key and its path.

Adding, removing or reordering parameters therefore does not change the initial values of the others. Two models start
with the same values if name and shape are the same. Shapes follow from the names (shapes.py).
"""

import zlib
from typing import Any

import jax
import jax.numpy as jnp

from tfm import shapes


def key(root: jax.Array, name: str) -> jax.Array:
    """Return the random key of the child `name`: fold_in(root, crc32(name)), the same on every machine and Python."""
    return jax.random.fold_in(root, zlib.crc32(name.encode()))


def normal(root: jax.Array, name: str, std: float, **sizes: int) -> dict[str, jax.Array]:
    """Return {name: independent draws from N(0, std^2)}, with the shape of the name."""
    return {name: std * jax.random.normal(key(root, name), shapes.size(name, sizes))}


def zeros(name: str, **sizes: int) -> dict[str, jax.Array]:
    """Return {name: 0}, for biases and shifts."""
    return {name: jnp.zeros(shapes.size(name, sizes))}


def scaled(params: Any, factor: float | jax.Array, names: str | tuple[str, ...]) -> Any:
    """Return the parameters with a factor on the leaves whose name begins with one of `names`."""

    def times(path: Any, leaf: jax.Array) -> jax.Array:
        return factor * leaf if shapes.names(path)[-1].startswith(names) else leaf

    return jax.tree_util.tree_map_with_path(times, params)

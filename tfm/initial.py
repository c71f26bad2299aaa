"""Initial parameters, with keys by name: a parameter's random key follows from the root key and its path alone.

Adding, removing or reordering weights therefore leaves the initial value of every other weight as it was, and two
models with a weight of the same name and shape start from the same values. Shapes come from the names (shapes.py).
"""

import zlib
from typing import Any

import jax
import jax.numpy as jnp

from tfm import shapes


def key(root: jax.Array, name: str) -> jax.Array:
    """The random key of the child `name`: fold_in(root, crc32(name)), the same on every machine and Python."""
    return jax.random.fold_in(root, zlib.crc32(name.encode()))


def normal(root: jax.Array, name: str, std: float, **sizes: int) -> dict[str, jax.Array]:
    """{name: independent draws from N(0, std^2)}, of the shape the name asks for."""
    return {name: std * jax.random.normal(key(root, name), shapes.size(name, sizes))}


def zeros(name: str, **sizes: int) -> dict[str, jax.Array]:
    """{name: 0}, for biases and shifts."""
    return {name: jnp.zeros(shapes.size(name, sizes))}


def scaled(params: Any, factor: float | jax.Array, names: str | tuple[str, ...]) -> Any:
    """The parameters with a factor on those leaves whose name begins with one of these."""

    def times(path: Any, leaf: jax.Array) -> jax.Array:
        return factor * leaf if shapes.names(path)[-1].startswith(names) else leaf

    return jax.tree_util.tree_map_with_path(times, params)

"""What a computation costs: floating-point operations counted from the program, bytes, and the machine's own rate."""

import math
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh


def flops(function: Callable, *arguments: Any) -> int:
    """Floating-point operations of all matrix products in function(*arguments), two per multiply-add.

    Counted on the traced program, so it holds for every variant and every loop over layers (XLA's own cost analysis
    counts the body of a loop once). Arguments may be abstract (`jax.ShapeDtypeStruct`).
    """
    return _count(jax.make_jaxpr(function)(*arguments).jaxpr)


def _count(jaxpr: Any) -> int:
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            total += _dot(equation)
        times = equation.params["length"] if equation.primitive.name == "scan" else 1
        for value in equation.params.values():  # a branch, of which the dearest counts, a body, or something else
            inner = [getattr(one, "jaxpr", one) for one in (value if isinstance(value, tuple) else (value,))]
            total += times * max((_count(one) for one in inner if hasattr(one, "eqns")), default=0)
    return total


def _dot(equation: Any) -> int:
    (contracted, _), _ = equation.params["dimension_numbers"]
    left = equation.invars[0].aval.shape
    return 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[axis] for axis in contracted)


def tree_bytes(tree: Any) -> int:
    """Bytes of all arrays, concrete or abstract, of a tree."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def device_bytes(tree: Any) -> int:
    """Bytes of a tree that one device holds, by the arrays' shardings."""
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def measured_peak(*, devices: Mesh, repeats: int = 5) -> float:
    """The float32 matrix-product rate of these devices in FLOP/s: the best of a few large products on one of them.

    All CPU "devices" are the same processor, whose rate one product already takes whole.
    """
    one = devices.local_devices[0]
    size, several = (1536, 1) if one.platform == "cpu" else (8192, devices.size)
    a = jax.device_put(jnp.ones((size, size)), one)
    product = jax.jit(jnp.matmul)
    jax.block_until_ready(product(a, a))
    best = math.inf
    for _ in range(repeats):
        begin = time.perf_counter()
        jax.block_until_ready(product(a, a))
        best = min(best, time.perf_counter() - begin)
    return several * 2 * size**3 / best

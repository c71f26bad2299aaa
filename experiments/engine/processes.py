"""Arrays and agreements of several processes that run the same program; with one process, nothing of it costs anything.

Where it says "all call it", a process that does not leaves the others waiting. With several processes each agreement
waits for the devices, which first finish the step under way; `Late` does not.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec


def main() -> bool:
    """Whether this is the process that writes and speaks for all: process 0."""
    return jax.process_index() == 0


def put(tree: Any, shardings: Any) -> Any:
    """The arrays of the host, the same in every process, on the devices: each process places its own parts."""
    if jax.process_count() == 1:
        return jax.device_put(tree, shardings)

    def place(x: Any, sharding: NamedSharding) -> jax.Array:
        x = np.asarray(x)
        return jax.make_array_from_callback(x.shape, sharding, x.__getitem__)

    return jax.tree.map(place, tree, shardings)


def fetch(tree: Any) -> Any:
    """The whole arrays on the host, as numpy, however they are spread over devices and processes: all call it.

    One leaf after the other, so that never more than one of them is whole on the devices.
    """
    return jax.device_get(tree) if jax.process_count() == 1 else jax.tree.map(_whole, tree)


def _whole(leaf: Any) -> Any:
    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable or leaf.is_fully_replicated:
        return jax.device_get(leaf)
    return jax.device_get(_gather(NamedSharding(leaf.sharding.mesh, PartitionSpec()))(leaf))


@functools.cache
def _gather(sharding: NamedSharding) -> Callable:
    return jax.jit(lambda x: x, out_shardings=sharding)


def agree(value: int) -> int:
    """The largest of the processes' values (as int32): all call it."""
    return value if jax.process_count() == 1 else int(_largest()(_spread(value)))


class Late:
    """`agree` in a loop, heard one turn later: a call returns what was asked in the call before it, at first 0.

    So the devices, which have the next step by then, never wait for the host. With one process it is `agree` itself.
    """

    def __init__(self) -> None:
        self.asked = 0  # what this process gave in the last call, if that is not answered yet
        self._under_way: jax.Array | int = 0

    def agree(self, value: int) -> int:
        """The largest of the values given in the last call: all call it."""
        if jax.process_count() == 1:
            return value
        before, self._under_way, self.asked = self._under_way, _largest()(_spread(value)), value
        return int(before)


def same(value: int) -> bool:
    """Whether the value (as int32) is the same in every process: all call it."""
    return agree(value) == -agree(-value)


def barrier() -> None:
    """Wait until every process is here: all call it."""
    agree(0)


@functools.cache
def _everywhere() -> NamedSharding:
    mesh = Mesh(np.array(jax.devices()), ("device",), axis_types=(AxisType.Auto,))
    return NamedSharding(mesh, PartitionSpec("device"))


def _spread(value: int) -> jax.Array:
    return put(np.full(jax.device_count(), value, np.int32), _everywhere())


@functools.cache
def _largest() -> Callable:
    return jax.jit(jax.numpy.max, out_shardings=NamedSharding(_everywhere().mesh, PartitionSpec()))

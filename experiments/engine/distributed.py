"""Several processes of one run, one on each host: join them, and agree on values.

"All call it" means: if one process does not call it, the others wait forever. JAX's coordination service misses a
process that dies, after HEARTBEAT_SECONDS at the latest, and ends the others; the same commands go on from the last
checkpoint.
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding

from experiments.engine import errors
from tfm import shapes

START_SECONDS = 120  # for all processes to be there
HEARTBEAT_SECONDS = 30  # without a heartbeat, a process is dead
VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")


class Group(NamedTuple):
    """The processes of a run: the address of process 0 (host:port), how many there are, which one this is."""

    coordinator: str
    processes: int
    process: int


def parse_group(coordinator: str | None, processes: int | None, process: int | None) -> Group | None:
    """Return the group from the flags or JAX's environment variables; None if neither sets anything.

    Raises UserError if something is missing or invalid.
    """
    flags = coordinator, processes, process
    values = [os.environ.get(name) if flag is None else flag for flag, name in zip(flags, VARIABLES, strict=True)]
    if not any(value not in (None, "") for value in values):
        return None
    sources = ", ".join(f"{name} = {value}" for name, value in zip(VARIABLES, values, strict=True))
    try:
        group = Group(str(values[0]), int(values[1]), int(values[2]))
    except (TypeError, ValueError):
        raise errors.UserError(f"--coordinator, --processes and --process go together ({sources})") from None
    host, _, port = group.coordinator.rpartition(":")
    if not (host and port.isdecimal() and 0 < int(port) < 2**16 and 0 <= group.process < group.processes):
        raise errors.UserError(f"several processes need host:port and 0 <= process < processes ({sources})")
    return group


@contextlib.contextmanager
def join(group: Group | None, *, detect: bool = False) -> Iterator[None]:
    """Run the block in all processes of the group; only process 0 prints. Enter it before a device is used.

    detect: without a group, JAX asks the cluster (Slurm, TPU pods, ...). With neither, nothing is changed.
    """
    if group is None and not detect:
        yield
        return
    start(group)
    with contextlib.ExitStack() as stack:
        if not is_main():
            stack.enter_context(contextlib.redirect_stdout(stack.enter_context(open(os.devnull, "w"))))
        yield
    jax.distributed.shutdown()


def start(group: Group | None) -> None:
    """Meet the other processes. Raises RunError if they do not come, UserError if no cluster can be detected."""
    options: dict[str, Any] = {"initialization_timeout": START_SECONDS, "heartbeat_timeout_seconds": HEARTBEAT_SECONDS}
    if group:
        options |= dict(zip(("coordinator_address", "num_processes", "process_id"), group, strict=True))
        options |= {"cluster_detection_method": "deactivate"}
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(**options)
    except (RuntimeError, ValueError, TypeError) as error:
        reason = str(error).strip().partition("\n")[0]
        if group is None:
            raise errors.UserError(
                f"--distributed finds no cluster ({reason}): set --coordinator, --processes, --process"
            ) from error
        raise errors.RunError(f"the processes cannot meet at {group.coordinator}: {reason}") from error


def call_in_main(action: Callable[[], int]) -> int:
    """Call `action` in process 0 and return its number in all: all call it. If it fails, all raise an error."""
    if jax.process_count() == 1:
        return action()
    value, failure = -1, None
    try:
        value = action() if is_main() else 0
    except (errors.UserError, errors.RunError) as error:
        failure = error
    values = multihost_utils.process_allgather(np.int32(value))
    if failure is not None:
        raise failure
    if values[0] < 0:
        raise errors.UserError("process 0 ends with an error, which it prints")
    return int(values[0])


def is_joined() -> bool:
    """Return True after `start`, without using a device."""
    return jax.distributed.is_initialized()


def is_main() -> bool:
    """Return True in process 0, which writes and prints for all."""
    return jax.process_index() == 0


def put(tree: Any, shardings: Any) -> Any:
    """Place arrays of the host, the same in every process, on the devices: each process places its own parts."""
    if jax.process_count() == 1:
        return jax.device_put(tree, shardings)

    def place(x: Any, sharding: NamedSharding) -> jax.Array:
        x = np.asarray(x)
        return jax.make_array_from_callback(x.shape, sharding, x.__getitem__)

    return jax.tree.map(place, tree, shardings)


def put_into(tree: Any, arrays: Mapping[str, Any]) -> Any:
    """Return the tree with these arrays, by path, in place of its leaves, on their devices; broadcast over runs."""
    leaves = shapes.flat(tree)
    for path in arrays.keys() & leaves.keys():
        leaf = leaves[path]
        leaves[path] = put(np.broadcast_to(np.asarray(arrays[path], leaf.dtype), leaf.shape), leaf.sharding)
    return jax.tree.unflatten(jax.tree.structure(tree), leaves.values())


def fetch(tree: Any) -> Any:
    """Return the whole arrays as numpy, however they are sharded over devices and processes: all call it.

    One leaf after the other, so that never more than one of them is whole on the devices.
    """

    def whole(leaf: Any) -> Any:
        apart = isinstance(leaf, jax.Array) and not (leaf.is_fully_addressable or leaf.is_fully_replicated)
        return multihost_utils.process_allgather(leaf, tiled=True) if apart else jax.device_get(leaf)

    return jax.tree.map(whole, tree)


def agree(value: int) -> int:
    """Return the largest of the processes' values (as int32): all call it."""
    return value if jax.process_count() == 1 else int(multihost_utils.process_allgather(np.int32(value)).max())


def is_same(value: int) -> bool:
    """Return True if the value (as int32) is the same in every process: all call it."""
    return agree(value) == -agree(-value)


def barrier() -> None:
    """Wait until every process is here: all call it."""
    multihost_utils.sync_global_devices("tfm")

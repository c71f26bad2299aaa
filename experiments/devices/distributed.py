"""A run with several processes, one on each host: connect them, and exchange values between them.

If every process must call a function and one does not, the others wait forever. JAX's coordination service detects a
dead process within HEARTBEAT_SECONDS, and ends the others. The same commands then resume from the last checkpoint.
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding

from experiments.config import errors
from tfm import shapes

START_SECONDS = 120  # timeout for all processes to connect
HEARTBEAT_SECONDS = 30  # a process without a heartbeat for so long is dead
VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")


class Group(NamedTuple):
    """The processes of a run: the address of process 0 (host:port), their number, the index of this one."""

    coordinator: str
    processes: int
    process: int


def parse_group(coordinator: str | None, processes: int | None, process: int | None) -> Group | None:
    """Return the group from the flags, or from JAX's environment variables; None if none of them is set.

    Raises UserError if a value is missing or invalid.
    """
    flags = coordinator, processes, process
    values = [os.environ.get(name) if flag is None else flag for flag, name in zip(flags, VARIABLES, strict=True)]
    if not any(value not in (None, "") for value in values):
        return None
    sources = ", ".join(f"{name} = {value}" for name, value in zip(VARIABLES, values, strict=True))
    rule = f"{sources}: --coordinator must be host:port, and 0 <= --process < --processes, two integers"
    try:
        group = Group(str(values[0]), int(values[1]), int(values[2]))
    except (TypeError, ValueError):
        raise errors.UserError(rule) from None
    host, _, port = group.coordinator.rpartition(":")
    valid = host and port.isdecimal() and 0 < int(port) < 2**16 and 0 <= group.process < group.processes
    errors.refuse((not valid, rule))
    return group


@contextlib.contextmanager
def join(group: Group | None, *, detect: bool = False) -> Iterator[None]:
    """Context manager, before any use of a device: connect the processes of the group; only process 0 prints.

    detect: without a group, JAX detects the cluster (Slurm, TPU pods, ...). Without a group and `detect`, do nothing.
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
    """Connect to the other processes of the group; None: to those of the cluster that JAX detects.

    If this fails, raises RunError, or UserError if group is None.
    """
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
                f"--distributed finds no cluster ({reason}). Set --coordinator, --processes and --process"
            ) from error
        remedy = f"Start all of them within {START_SECONDS} s, with the address of process 0 as --coordinator"
        raise errors.RunError(f"the processes cannot connect at {group.coordinator}: {reason}. {remedy}") from error


def call_in_main(action: Callable[[], int]) -> int:
    """Return action(), an integer >= 0, of process 0 in all processes. If it fails, all raise an error.

    Every process must call this. The action fails by UserError or RunError.
    """
    if jax.process_count() == 1:
        return action()
    value, failure = -1, errors.UserError("process 0 has failed, and prints its error")
    try:
        value = action() if is_main() else 0
    except (errors.UserError, errors.RunError) as error:
        failure = error
    result = int(multihost_utils.process_allgather(np.int32(value))[0])
    if result < 0:
        raise failure
    return result


def is_joined() -> bool:
    """Return True if the processes are connected (`start`). This does not use a device."""
    return jax.distributed.is_initialized()


def is_main() -> bool:
    """Return True in process 0, which writes and prints for all processes."""
    return jax.process_index() == 0


def put(tree: Any, shardings: Any) -> Any:
    """Place the host's arrays, equal in all processes, on the devices. Each process places its devices' shards."""
    if jax.process_count() == 1:
        return jax.device_put(tree, shardings)

    def place(x: Any, sharding: NamedSharding) -> jax.Array:
        x = np.asarray(x)
        return jax.make_array_from_callback(x.shape, sharding, x.__getitem__)

    return jax.tree.map(place, tree, shardings)


def put_into(tree: Any, arrays: Mapping[str, Any]) -> Any:
    """Return the tree, with the leaves at these paths replaced by the arrays, in the same dtype, shape and sharding.

    arrays: {path, as in shapes.flat: array}; other paths than those of the tree are ignored. An array is broadcast over
    the first axis if the leaf has one row for each run.
    """
    leaves = shapes.flat(tree)
    for path in arrays.keys() & leaves.keys():
        leaf = leaves[path]
        leaves[path] = put(np.broadcast_to(np.asarray(arrays[path], leaf.dtype), leaf.shape), leaf.sharding)
    return jax.tree.unflatten(jax.tree.structure(tree), leaves.values())


def fetch(tree: Any) -> Any:
    """Return the global arrays as numpy, from all devices and processes. Every process must call this.

    Leaves are gathered in sequence, so that the devices never hold more than one of them unsharded.
    """

    def gather(leaf: Any) -> Any:
        is_remote = isinstance(leaf, jax.Array) and not (leaf.is_fully_addressable or leaf.is_fully_replicated)
        return multihost_utils.process_allgather(leaf, tiled=True) if is_remote else jax.device_get(leaf)

    return jax.tree.map(gather, tree)


def agree(value: int) -> int:
    """Return the largest of the processes' values (as int32). Every process must call this."""
    return value if jax.process_count() == 1 else int(multihost_utils.process_allgather(np.int32(value)).max())


def is_same(value: int) -> bool:
    """Return True if the value (as int32) is the same in all processes. Every process must call this."""
    return agree(value) == -agree(-value)


def barrier() -> None:
    """Wait until all processes have called this. Every process must call this."""
    multihost_utils.sync_global_devices("tfm")

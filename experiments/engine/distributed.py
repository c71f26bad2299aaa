"""Several processes of one run, one on each host: who belongs to it, what they agree on, how they end.

With one process, nothing of it costs anything. Where it says "all call it", a process that does not leaves the others
waiting. Each agreement waits for the devices, which first finish the step under way; `Late` does not. A process that
fails says so through JAX's coordination service, and the others end with its sentence. One that dies without a word
breaks a collective (at once on CPU), or is missed by the service (HEARTBEAT_SECONDS), which ends the others itself.
"""

import contextlib
import functools
import gc
import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, NoReturn

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from experiments.engine import errors, signals
from tfm import shapes

START_SECONDS = 120  # for all processes to be there
HEARTBEAT_SECONDS = 30  # without a sign of life, a process is dead
POLL_SECONDS = 0.25  # between questions whether another process failed
LEAVE_SECONDS = 2  # for the others to hear of a failure
FAILED, END, FOREVER = "tfm/failed", "tfm/end", 7 * 24 * 3600 * 1000  # milliseconds
LOST = "another process of this run stopped or cannot be reached; the same commands go on from the last checkpoint"
LOSS = re.compile(
    "gloo|nccl|coordination|heartbeat|barrier|unavailable|(connection|socket) (closed|reset)", re.IGNORECASE
)
_leaving = threading.Event()  # this process ends, and knows why
_last_words = threading.Lock()


class Group(NamedTuple):
    """The processes of a run: where they meet, how many, which one this is."""

    coordinator: str
    processes: int
    process: int


def given(coordinator: str | None, processes: int | None, process: int | None) -> Group | None:
    """The group that flags, or else the environment, name; None: this process is alone. UserError for half a group."""
    flags = {"--coordinator": coordinator, "--processes": processes, "--process": process}
    variables = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
    values = {}
    for (flag, value), variable in zip(flags.items(), variables, strict=True):
        value = (os.environ.get(variable) or None) if value is None else value
        if isinstance(value, str) and flag != "--coordinator":
            if not re.fullmatch(r"\d+", value):
                raise errors.UserError(f'{variable} must be a number, and "{value}" is not')
            value = int(value)
        values[f"{flag} ({variable})"] = value
    missing = [name for name, value in values.items() if value is None]
    if len(missing) == len(values):
        return None
    if missing:
        raise errors.UserError(f"several processes need {', '.join(values)}; missing: {', '.join(missing)}")
    group = Group(*values.values())
    if not re.fullmatch(r".+:\d{1,5}", group.coordinator) or not 0 < _address(group)[1] < 2**16:
        raise errors.UserError(f'--coordinator must be host:port, as 10.0.0.1:8476, and "{group.coordinator}" is not')
    if group.processes < 1 or not 0 <= group.process < group.processes:
        raise errors.UserError(
            f"--process must lie between 0 and --processes - 1, and {group.process} of {group.processes} does not"
        )
    return group


def _address(group: Group) -> tuple[str, int]:
    host, _, port = group.coordinator.rpartition(":")
    return host.strip("[]"), int(port)


@contextlib.contextmanager
def joined(group: Group | None, *, detect: bool = False, how_to_go_on: str = "") -> Iterator[None]:
    """What is inside runs in all processes of the group; only the first one prints. Before a device is touched.

    detect: without a group, ask JAX for what the cluster says (Slurm, TPU pods, ...). With neither, nothing is changed.
    An error or a signal in one process ends the others, with its sentence and exit code. how_to_go_on: as `at_once`.
    """
    if group is None and not detect:
        yield
        return
    start(group)
    with contextlib.ExitStack() as stack:
        if not main():
            stack.enter_context(contextlib.redirect_stdout(stack.enter_context(open(os.devnull, "w"))))
        stack.enter_context(_together(how_to_go_on))
        yield
    jax.distributed.shutdown()


def start(group: Group | None) -> None:
    """Meet the other processes. RunError where they cannot be met, UserError where no cluster can be detected.

    Waits until the coordinator, which is in process 0, listens, as JAX would end this process with a stack trace. Where
    some of the others never come, it still does.
    """
    options: dict[str, Any] = {"initialization_timeout": START_SECONDS, "heartbeat_timeout_seconds": HEARTBEAT_SECONDS}
    if group:
        options |= dict(zip(("coordinator_address", "num_processes", "process_id"), group, strict=True))
        options |= {"cluster_detection_method": "deactivate"}
    until = time.monotonic() + START_SECONDS
    while group and group.process:
        try:
            socket.create_connection(_address(group), timeout=5).close()
            break
        except OSError as error:
            if time.monotonic() > until:
                raise errors.RunError(
                    f"the coordinator {group.coordinator} could not be reached within {START_SECONDS} s:"
                    f" {error.strerror or error}; is process 0 running there?"
                ) from error
        time.sleep(0.2)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(**options)
    except (RuntimeError, ValueError, TypeError) as error:
        if group is None:
            raise errors.UserError(f"--distributed finds no cluster to join ({_first_line(error)})") from error
        raise errors.RunError(f"the processes cannot meet at {group.coordinator}: {_first_line(error)}") from error


@contextlib.contextmanager
def _together(how_to_go_on: str) -> Iterator[None]:
    """Within this, the processes end together, as `joined` says; RunError where another one is gone without a word."""
    client = ocp.multihost.get_jax_distributed_client()
    threading.Thread(target=_watch, args=(client, how_to_go_on), daemon=True).start()

    def stop(number: int) -> NoReturn:
        # Not an exception: it could be lost in a callback of JAX, and would meet collectives that the others have left.
        _tell(client, 128 + number, "stopped")
        _end(128 + number, f"stopped{how_to_go_on}")

    with signals.calls(stop):  # also over JAX's own handler of SIGTERM, which says nothing
        try:
            yield
            client.wait_at_barrier(END, FOREVER)  # the first process may still be busy with figures
            _leaving.set()
        except BaseException as error:
            if isinstance(error, errors.RunError | ValueError | RuntimeError) and LOSS.search(str(error)):
                time.sleep(LEAVE_SECONDS)  # in which the other one's own reason may be heard
                error = errors.RunError(f"{LOST} ({_first_line(error)})")
            codes = {errors.UserError: 2, errors.Interrupted: getattr(error, "code", 0), KeyboardInterrupt: 130}
            code = next((code for kind, code in codes.items() if isinstance(error, kind)), 1)  # as the launcher's
            _tell(client, code, _first_line(error))
            raise error


def _watch(client: Any, how_to_go_on: str) -> None:
    """In the background: end this process, which may wait for another one in vain, when that one says that it fails."""
    while not _leaving.wait(POLL_SECONDS):
        try:
            who, code, sentence = json.loads(client.key_value_try_get(FAILED))
        except RuntimeError as error:
            if "NOT_FOUND" not in str(error):
                _end(1, LOST)
            continue
        if not _leaving.wait(POLL_SECONDS):  # else this one found out by itself
            time.sleep(LEAVE_SECONDS if main() else 0)  # with the first process goes what the others listen to
            _end(code, f"{sentence}{how_to_go_on}" if code > 128 else f"process {who} stopped: {sentence}")


def _tell(client: Any, code: int, sentence: str) -> None:
    """Tell the others. The first process, with which the service goes that they listen to, lets them leave before."""
    _leaving.set()
    with contextlib.suppress(RuntimeError):  # there may be no service any more, or another failure said already
        client.key_value_set(FAILED, json.dumps([jax.process_index(), code, sentence]))
    time.sleep(LEAVE_SECONDS if main() else 0)


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _end(code: int, sentence: str) -> NoReturn:
    """End this process at once, from any thread, with the sentence and code of the first of them."""
    with _last_words:
        os.write(2, f"{'' if code > 128 else 'error: '}{sentence}\n".encode())
        os._exit(code)


def leave(code: int) -> NoReturn:
    """End this process; but for code 0 at once: Python's own end crashes where a program of JAX is still under way, and
    JAX's would wait for processes that are no more."""
    if code:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(code)
    gc.freeze()  # Python would look through everything once more: half a second
    sys.exit(code)


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


def put_into(tree: Any, arrays: Mapping[str, Any]) -> Any:
    """The tree with these arrays, by path, in place of leaves, where these are; of several runs all get them."""
    leaves = shapes.flat(tree)
    for path in arrays.keys() & leaves.keys():
        leaf = leaves[path]
        leaves[path] = put(np.broadcast_to(np.asarray(arrays[path], leaf.dtype), leaf.shape), leaf.sharding)
    return jax.tree.unflatten(jax.tree.structure(tree), leaves.values())


def fetch(tree: Any) -> Any:
    """The whole arrays on the host, as numpy, however they are spread over devices and processes: all call it. One leaf
    after the other, so that never more than one of them is whole on the devices."""

    def whole(leaf: Any) -> Any:
        apart = isinstance(leaf, jax.Array) and not (leaf.is_fully_addressable or leaf.is_fully_replicated)
        return multihost_utils.process_allgather(leaf, tiled=True) if apart else jax.device_get(leaf)

    return jax.tree.map(whole, tree)


def agree(value: int) -> int:
    """The largest of the processes' values (as int32): all call it."""
    return value if jax.process_count() == 1 else int(multihost_utils.process_allgather(np.int32(value)).max())


def same(value: int) -> bool:
    """Whether the value (as int32) is the same in every process: all call it."""
    return agree(value) == -agree(-value)


def barrier() -> None:
    """Wait until every process is here: all call it."""
    multihost_utils.sync_global_devices("tfm")


class Late:
    """`agree` in a loop, heard one turn later: a call returns what was asked in the call before it, at first 0. So the
    devices, which have the next step by then, never wait for the host. With one process it is `agree` itself."""

    def __init__(self) -> None:
        self.asked = 0  # what this process gave in the last call, if that is not answered yet
        self._under_way: jax.Array | int = 0

    def agree(self, value: int) -> int:
        """The largest of the values given in the last call: all call it."""
        if jax.process_count() == 1:
            return value
        everywhere, largest = _largest()
        values = put(np.full(jax.device_count(), value, np.int32), everywhere)
        before, self._under_way, self.asked = self._under_way, largest(values), value
        return int(before)


@functools.cache
def _largest() -> tuple[NamedSharding, Callable]:
    """Where each device has a number, and the program that finds the largest of them."""
    mesh = Mesh(np.array(jax.devices()), ("device",), axis_types=(AxisType.Auto,))
    whole = NamedSharding(mesh, PartitionSpec())
    return NamedSharding(mesh, PartitionSpec("device")), jax.jit(jax.numpy.max, out_shardings=whole)

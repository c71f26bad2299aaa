"""Several processes of one run, one on each host: who belongs to it, what they agree on, how they end.

With one process, nothing of it costs anything. Where it says "all call it", a process that does not leaves the others
waiting. With several processes each agreement waits for the devices, which first finish the step under way; `Late` does
not. A process that fails tells the others through JAX's coordination service. One that dies without a word breaks a
collective (at once on CPU), or is missed by the service (HEARTBEAT_SECONDS), which has JAX end the others.
"""

import contextlib
import ctypes
import functools
import gc
import json
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, NoReturn

import jax
import numpy as np
from jax._src import distributed  # its client has no public name
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from experiments.engine import errors, signals

START_SECONDS = 120  # for all processes to be there
HEARTBEAT_SECONDS = 30  # without a sign of life, a process is dead
POLL_SECONDS = 0.5  # between questions whether another process failed
LEAVE_SECONDS = 5  # for the others to hear of a failure
ABORTS = (0, 10, 2)  # the first JAX that was seen to; 0.8.0 leaves with nothing but what it logs
ABOVE_FATAL = 4  # a level of absl's log
FOREVER = 7 * 24 * 3600 * 1000  # milliseconds
FAILED, LEFT, END = "tfm/failed", "tfm/left", "tfm/end"
LOST = "another process of this run stopped or cannot be reached; the same commands go on from the last checkpoint"
LOSS = re.compile(
    "gloo|nccl|coordination|heartbeat|barrier|unavailable|(connection|socket) (closed|reset)", re.IGNORECASE
)

_HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int)
_handlers: list[Any] = []
_leaving = threading.Event()  # this process ends, and knows why
_speaks = threading.Lock()  # taken by the one thread that says the last sentence
_codes: list[int] = []  # with which threads want to end the process


class Group(NamedTuple):
    """The processes of a run: where they meet, how many, which one this is."""

    coordinator: str
    processes: int
    process: int


def given(coordinator: str | None, processes: int | None, process: int | None) -> Group | None:
    """The group that flags, or else the environment, name; None: this process is alone. UserError for half a group."""
    values = {
        "--coordinator (JAX_COORDINATOR_ADDRESS)": coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS"),
        "--processes (JAX_NUM_PROCESSES)": _number(processes, "JAX_NUM_PROCESSES"),
        "--process (JAX_PROCESS_ID)": _number(process, "JAX_PROCESS_ID"),
    }
    missing = [name for name, value in values.items() if value is None]
    if len(missing) == len(values):
        return None
    if missing:
        raise errors.UserError(f"several processes need {', '.join(values)}; missing: {', '.join(missing)}")
    group = Group(*values.values())
    if not re.fullmatch(r".+:\d{1,5}", group.coordinator) or not 0 < _port(group) < 2**16:
        raise errors.UserError(f'--coordinator must be host:port, as 10.0.0.1:8476, and "{group.coordinator}" is not')
    if group.processes < 1 or not 0 <= group.process < group.processes:
        raise errors.UserError(
            f"--process must lie between 0 and --processes - 1, and {group.process} of {group.processes} does not"
        )
    return group


def _number(flag: int | None, variable: str) -> int | None:
    text = os.environ.get(variable)
    if flag is not None or not text:
        return flag
    if not re.fullmatch(r"\d+", text):
        raise errors.UserError(f'{variable} must be a number, and "{text}" is not')
    return int(text)


def _port(group: Group) -> int:
    return int(group.coordinator.rpartition(":")[2])


@contextlib.contextmanager
def joined(group: Group | None, *, detect: bool = False, how_to_go_on: str = "") -> Iterator[None]:
    """What is inside runs in all processes of the group; only the first one prints to stdout.

    detect: without a group, ask JAX for what the cluster says (Slurm, TPU pods, ...). With neither, nothing is changed.
    An error in one process ends the others with its sentence and its exit code, and so does a signal; how_to_go_on:
    what is said behind "stopped". Must begin before a device is touched.
    """
    if group is None and not detect:
        yield
        return
    start(group)
    with together(how_to_go_on) as first, contextlib.ExitStack() as stack:
        if not first:
            stack.enter_context(contextlib.redirect_stdout(stack.enter_context(open(os.devnull, "w"))))
        yield
    jax.distributed.shutdown()
    at_abort(None)


def start(group: Group | None) -> None:
    """Meet the other processes. RunError where they do not come, UserError where no cluster can be detected."""
    quiet()
    options: dict[str, Any] = {
        "initialization_timeout": START_SECONDS,
        "heartbeat_timeout_seconds": HEARTBEAT_SECONDS,
    }
    if group:
        _reach(group)
        at_abort(f"not all {group.processes} processes came to {group.coordinator} within {START_SECONDS} s")
        options |= dict(zip(("coordinator_address", "num_processes", "process_id"), group, strict=True))
        options |= {"cluster_detection_method": "deactivate"}
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(**options)
        at_abort(f"{LOST} (with TF_CPP_MIN_LOG_LEVEL=0, JAX says more)")
    except (RuntimeError, ValueError, TypeError) as error:
        reason = str(error).splitlines()[0]
        if group is None:
            raise errors.UserError(f"--distributed finds no cluster to join ({reason})") from error
        raise errors.RunError(f"the processes cannot meet at {group.coordinator}: {reason}") from error


def _reach(group: Group) -> None:
    """Wait until the coordinator, which is in process 0, listens: JAX would end this process with a stack trace."""
    host, until = group.coordinator.rpartition(":")[0].strip("[]"), time.monotonic() + START_SECONDS
    while group.process:
        try:
            socket.create_connection((host, _port(group)), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() > until:
                raise errors.RunError(
                    f"the coordinator {group.coordinator} could not be reached within {START_SECONDS} s:"
                    f" {error.strerror or error}; is process 0 running there?"
                ) from error
        time.sleep(0.2)


@contextlib.contextmanager
def together(how_to_go_on: str = "") -> Iterator[bool]:
    """Within this, the processes end together; the value: whether this is the first of them.

    A signal ends all of them at once, where the loop does not keep it; how_to_go_on: what this process says behind
    "stopped". Raises RunError, with its reason if it gave any, where another one is gone.
    """
    client, me = distributed.global_state.client, distributed.global_state.process_id
    threading.Thread(target=_watch, args=(client, me, how_to_go_on), daemon=True).start()

    def stop(number: int) -> NoReturn:
        # Not an exception: it could be lost in a callback of JAX, and would meet collectives that the others have left.
        _fail(client, me, 128 + number, "stopped")
        _end(128 + number, f"stopped{how_to_go_on}", client)

    with contextlib.ExitStack() as stack:
        # Also over the handler of SIGTERM that JAX has put there, and which says nothing.
        stack.enter_context(signals.heeded(signals.asked(), stop))
        stack.push(functools.partial(_tell, client, me))
        stack.enter_context(_loss_is_one_sentence(client, me))
        yield me == 0
        client.wait_at_barrier(END, FOREVER)  # the first process may still be busy with figures
    _leaving.set()


def _watch(client: Any, me: int, how_to_go_on: str) -> None:
    """In the background: end this process, which may wait for the other in vain, when that one says that it fails."""
    while not _leaving.wait(POLL_SECONDS):
        try:
            who, code, sentence = json.loads(client.key_value_try_get(FAILED))
        except RuntimeError as error:
            if "NOT_FOUND" not in str(error):
                _end(1, LOST)
            continue
        if who == me or _leaving.wait(1):  # the main thread found out by itself
            return
        _end(code, f"{sentence}{how_to_go_on}" if code > 128 else f"process {who} stopped: {sentence}", client)


@contextlib.contextmanager
def _loss_is_one_sentence(client: Any, me: int) -> Iterator[None]:
    """Within this, what JAX says where another process is gone is a RunError: that one's reason, if it gave any."""
    try:
        yield
    except (errors.RunError, ValueError, RuntimeError) as error:
        if not LOSS.search(str(error)):
            raise
        code, sentence = _heard(client, me) or (1, f"{LOST} ({_first_line(error)})")
        raise (errors.Interrupted(sentence, code) if code > 128 else errors.RunError(sentence)) from error


def _tell(client: Any, me: int, kind: Any, error: BaseException | None, traceback: Any) -> None:
    """The end of a `with`: if it is an error, the others hear of it."""
    if isinstance(error, errors.Interrupted):  # all have agreed on it, if all come
        with contextlib.suppress(RuntimeError):
            client.wait_at_barrier(END, LEAVE_SECONDS * 1000)
    if error is not None:
        _fail(client, me, _code(error), _first_line(error))


def _code(error: BaseException) -> int:
    """With which the launcher ends for this error."""
    if isinstance(error, errors.Interrupted):
        return error.code
    return 2 if isinstance(error, errors.UserError) else 130 if isinstance(error, KeyboardInterrupt) else 1


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _heard(client: Any, me: int) -> tuple[int, str] | None:
    """With which code and sentence another process left, if it said so; a code above 128: a signal ended it."""
    try:
        who, code, sentence = json.loads(client.blocking_key_value_get(FAILED, 2000))
    except RuntimeError:
        return None
    return None if who == me else (code, sentence if code > 128 else f"process {who} stopped: {sentence}")


def _fail(client: Any, me: int, code: int, sentence: str) -> None:
    """Tell the others. The first process, with which the service goes that they listen to, lets them leave before."""
    _leaving.set()
    with contextlib.suppress(RuntimeError):  # there may be no service any more, or another failure said already
        client.key_value_set(FAILED, json.dumps([me, code, sentence]))
    until = time.monotonic() + LEAVE_SECONDS
    for other in range(1, distributed.global_state.num_processes if me == 0 else 0):
        with contextlib.suppress(RuntimeError):
            client.blocking_key_value_get(f"{LEFT}/{other}", max(1, int(1000 * (until - time.monotonic()))))
    time.sleep(0.2 if me == 0 else 0)  # for the answers to the last of them


def leave(code: int) -> NoReturn:
    """End this process; but for code 0 at once. Python's own end crashes where a program of JAX is still under way, and
    JAX's would wait for processes that are no more."""
    client = distributed.global_state.client
    if not code and (not _leaving.is_set() or not client):
        gc.freeze()  # Python would look through everything once more: half a second
        sys.exit(code)
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    _end(code, client=client)


def _end(code: int, sentence: str = "", client: Any = None) -> NoReturn:
    """End this process at once, from any thread, with the sentence and code of the first of them."""
    _codes.append(code)
    if not _speaks.acquire(blocking=False):
        time.sleep(1)  # the first thread ends the process, if it does not wait for an answer of a service that is gone
        os._exit(_codes[0])
    os.write(2, f"{'' if code > 128 else 'error: '}{sentence}\n".encode() if sentence else b"")
    with contextlib.suppress(RuntimeError):
        if client:  # as the last thing: the first process leaves when it hears of it
            client.key_value_set(f"{LEFT}/{distributed.global_state.process_id}", "")
    os._exit(code)


def quiet() -> None:
    """From here on JAX's libraries in C++ log nothing, unless the user says how much.

    Where another process is gone they would, with a stack trace, before they end this one by abort().
    """
    usual = os.environ.get("TF_CPP_MIN_LOG_LEVEL", "1") == "1"  # JAX puts this there
    if usual and jax.__version_info__ >= ABORTS:
        from jax._src.lib import utils  # jax_logging_level knows no level above FATAL; here, where it is needed

        utils.absl_set_min_log_level(ABOVE_FATAL)


def at_abort(sentence: str | None) -> None:
    """This sentence, and code 1, where JAX's coordination client ends the process by abort(); None: nothing any more.

    Python's own handlers run too late for that. JAX 0.8.0 leaves without abort(), with its own sentence and code 1.
    """
    handler = _HANDLER(lambda number: _end(1, sentence)) if sentence else _HANDLER()
    _handlers.append(handler)  # it must not be collected while it is in use
    ctypes.CDLL(None).signal(signal.SIGABRT, handler)


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

"""How several processes of a run end: together, whichever of them ends first, and however.

A process that fails tells the others through JAX's coordination service. One that dies without a word breaks a
collective (at once on CPU), or is missed by the service (group.HEARTBEAT_SECONDS), which has JAX end the others.
"""

import contextlib
import ctypes
import functools
import gc
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, NoReturn

import jax
from jax._src import distributed  # its client has no public name

from experiments.engine import errors, signals

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

"""SIGTERM and SIGINT (Ctrl-C): a run that trains finishes its step and saves; any other command ends at once."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

import jax
from jax.experimental import multihost_utils

from experiments.config import errors
from experiments.devices import distributed

SIGNALS = (signal.SIGTERM, signal.SIGINT)
NOTICE = b"\nstopping after this stage or step; a training is saved (Ctrl-C: stop at once, without saving)\n"


class Requests:
    """Records the first SIGINT or SIGTERM in a block `with requests.collect():` as a request to stop.

    The handler raises nothing, because Python ignores exceptions in `__del__` and in callbacks of weak references. The
    caller reads the request after each step (`agree`) and after each stage of a command, such as a figure
    (`raise_if_requested`). A second Ctrl-C ends the command at once.
    """

    def __init__(self) -> None:
        self.signal = 0  # number of the first signal, or 0
        self._calls, self._is_called = 0, False  # number of calls of `agree`; whether a signal has arrived
        self._before = {}  # number of each collected signal -> its previous handler

    @contextlib.contextmanager
    def collect(self, *numbers: int) -> Iterator[None]:
        """Context manager: record the first of these signals that arrives in the block. Blocks may be nested.

        Without `numbers`: SIGNALS, but with several processes only SIGINT, because JAX handles SIGTERM. A second Ctrl-C
        ends a command at once. In a notebook it calls the previous handler, which raises KeyboardInterrupt.
        Ignored signals stay ignored. Outside the main thread, no handler can be set, and nothing is recorded.
        """
        numbers = numbers or SIGNALS[jax.process_count() > 1 :]
        is_main = threading.current_thread() is threading.main_thread()
        handlers = {number: signal.getsignal(number) for number in numbers if is_main}
        with contextlib.ExitStack() as stack:
            for number, handler in handlers.items():
                if handler not in (signal.SIG_IGN, self._record):
                    self._before[number] = handler
                    stack.callback(signal.signal, number, handler)
                    signal.signal(number, self._record)
            if handlers.get(signal.SIGINT) == signal.SIG_DFL:  # a command
                reader, writer = os.pipe()
                os.set_blocking(writer, False)
                stack.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(writer))
                threading.Thread(target=exit_at_second, args=[reader], daemon=True).start()
            yield

    def _record(self, number: int, frame: FrameType | None) -> None:
        """Handle a collected signal: record the first one, and at a second Ctrl-C call the previous handler.

        With several processes, send the first one to JAX as SIGTERM instead: JAX then notifies the other processes.
        """
        before, is_second, self._is_called = self._before.get(number), self._is_called, True
        if is_second:
            if number == signal.SIGINT and callable(before):  # in a command, `exit_at_second` ends the process
                before(number, frame)
            return
        os.write(2, NOTICE)
        if distributed.is_joined() and jax.process_count() > 1:  # JAX then notifies the other processes
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            self.signal = number

    def agree(self) -> int:
        """Return the number of the recorded signal, or 0. Every process must call this.

        With several processes, return SIGTERM in all if any of them received a signal.
        """
        if jax.process_count() > 1:
            self._calls += 1
            self.signal = signal.SIGTERM if multihost_utils.reached_preemption_sync_point(self._calls) else 0
        return self.signal

    def raise_if_requested(self, message: str = "stopped") -> None:
        """Raise Interrupted with this message if a signal was recorded."""
        if self.signal:
            raise errors.Interrupted(message, 128 + self.signal)


def current() -> Requests:
    """Return the Requests whose `collect` is running in a caller, such as launch.run; otherwise a new object."""
    collecting = getattr(signal.getsignal(signal.SIGINT), "__self__", None)
    return collecting if isinstance(collecting, Requests) else Requests()


def exit_at_second(pipe: int) -> None:
    """End the process at a Ctrl-C after another signal.

    pipe: the reading end of a pipe, to which Python writes the number of each signal. This runs in a thread:
    until a compilation ends, Python calls no handler in the main thread.
    """
    os.read(pipe, 1)
    while os.read(pipe, 1)[0] != signal.SIGINT:
        pass
    os._exit(128 + signal.SIGINT)

"""SIGTERM and SIGINT (Ctrl-C): a run that trains finishes its step and saves; any other command ends at once."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

import jax
from jax.experimental import multihost_utils

from experiments.engine import errors

SIGNALS = (signal.SIGTERM, signal.SIGINT)
NOTICE = b"\nstopping after a save (Ctrl-C: stop at once, without saving)\n"


class Requests:
    """Records the first SIGINT or SIGTERM in a block `with requests.collect():` as a request to stop.

    The training loop reads the request after each step (`agree`). A second Ctrl-C ends the command at once.
    """

    def __init__(self) -> None:
        self.signal = 0  # number of the first signal, or 0
        self._calls = 0  # number of calls of `agree`

    @contextlib.contextmanager
    def collect(self) -> Iterator[None]:
        """Context manager: record the first signal that arrives in the block.

        The first signal restores the previous handler of SIGINT. So a second Ctrl-C ends a command at once, and raises
        KeyboardInterrupt in a notebook. With several processes, JAX handles SIGTERM. Ignored signals stay ignored.
        Outside the main thread, no handler can be set, and nothing is recorded.
        """
        multi_process = jax.process_count() > 1
        handlers = {number: signal.getsignal(number) for number in (SIGNALS[multi_process:])}
        handlers = {number: handler for number, handler in handlers.items() if handler != signal.SIG_IGN}
        if threading.current_thread() is not threading.main_thread():
            handlers = {}

        def record(number: int, frame: FrameType | None) -> None:
            if not self.signal:
                os.write(2, NOTICE)
                self.signal = number
            if signal.SIGINT in handlers:
                signal.signal(signal.SIGINT, handlers[signal.SIGINT])
            if multi_process:  # JAX then notifies the other processes
                os.kill(os.getpid(), signal.SIGTERM)

        for number in handlers:
            signal.signal(number, record)
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def agree(self) -> int:
        """Return the number of the signal, or 0; the same in all processes. Every process must call this."""
        if jax.process_count() > 1:
            self._calls += 1
            self.signal = signal.SIGTERM if multihost_utils.reached_preemption_sync_point(self._calls) else 0
        return self.signal

    def raise_if_requested(self, message: str = "stopped") -> None:
        """Raise Interrupted with this message if a signal was recorded."""
        if self.signal:
            raise errors.Interrupted(message, 128 + self.signal)

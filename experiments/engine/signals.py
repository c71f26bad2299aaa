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
NOTICE = b"\nstopping; what is done is saved first (Ctrl-C: at once, without saving)\n"


class Requests:
    """Records the first SIGINT or SIGTERM in a block `with requests.collect():` as a request to stop.

    The training loop reads it after each step (`agree`). A second Ctrl-C ends the command at once.
    """

    def __init__(self) -> None:
        self.signal = 0  # number of the first signal, or 0
        self._calls = 0  # number of calls of `agree`

    @contextlib.contextmanager
    def collect(self) -> Iterator[None]:
        """Record the first signal of the block.

        It restores the handler that SIGINT had before: a second Ctrl-C ends a command at once, and raises
        KeyboardInterrupt in a notebook. With several processes JAX records SIGTERM. A signal that is ignored stays
        ignored, and threads other than the main one leave signals alone.
        """
        several = jax.process_count() > 1
        before = {number: signal.getsignal(number) for number in (SIGNALS[several:])}
        before = {number: old for number, old in before.items() if old != signal.SIG_IGN}
        if threading.current_thread() is not threading.main_thread():
            before = {}

        def record(number: int, frame: FrameType | None) -> None:
            if not self.signal:
                os.write(2, NOTICE)
                self.signal = number
            if signal.SIGINT in before:
                signal.signal(signal.SIGINT, before[signal.SIGINT])
            if several:
                os.kill(os.getpid(), signal.SIGTERM)

        for number in before:
            signal.signal(number, record)
        try:
            yield
        finally:
            for number, old in before.items():
                signal.signal(number, old)

    def agree(self) -> int:
        """Return the number of the signal, or 0: the same in all processes. All call it."""
        if jax.process_count() > 1:
            self._calls += 1
            self.signal = signal.SIGTERM if multihost_utils.reached_preemption_sync_point(self._calls) else 0
        return self.signal

    def raise_if_requested(self, message: str = "stopped") -> None:
        """Raise Interrupted with this message if a signal came."""
        if self.signal:
            raise errors.Interrupted(message, 128 + self.signal)

"""SIGTERM and SIGINT (Ctrl-C): a run that trains finishes its step and saves; any other command stops at once."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from experiments.engine import errors

SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def at_once() -> Iterator[None]:
    """SIGTERM raises Interrupted where the program stands, as SIGINT raises KeyboardInterrupt in Python anyway."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise errors.Interrupted("stopped", 128 + number)

    with handled({signal.SIGTERM: stop}):
        yield


class Requests:
    """Signals that came while a run trains: kept, for the loop to ask at the end of each step."""

    def __init__(self) -> None:
        self.signal = 0  # the first that came

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Within this, a signal is kept; a SIGINT after another signal ends the process where it stands."""

        def keep(number: int, frame: FrameType | None) -> None:
            if self.signal and number == signal.SIGINT:
                # Not an exception: that would wait for a save under way. Half a checkpoint is never taken for a whole.
                os.write(2, b"\nstopped at once; a run goes on from its last checkpoint\n")
                os._exit(128 + number)
            if not self.signal:
                os.write(2, b"\nstopping after this step (Ctrl-C: at once, without saving)\n")
                self.signal = int(number)

        with handled(dict.fromkeys(SIGNALS, keep)):
            yield


@contextmanager
def handled(handlers: dict) -> Iterator[None]:
    """These handlers, by signal, and at the end those from before; Python has handlers in the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

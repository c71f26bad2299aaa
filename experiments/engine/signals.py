"""SIGTERM and SIGINT (Ctrl-C): what trains finishes its step and saves; any other command stops at once."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from experiments.engine import errors

SIGNALS = (signal.SIGTERM, signal.SIGINT)
_owned: list[bool] = []  # not empty: this process is the command's own, which may end it
PATIENCE = 1.0  # seconds for Python to come to a signal, as it does not while a compiled program runs


@contextmanager
def at_once(how_to_go_on: str = "") -> Iterator[None]:
    """Within this, a signal ends the process where it stands; how_to_go_on: what is said behind "stopped".

    Not by an exception: one that comes in a callback of JAX is lost, and Python's own end, with JAX's threads still at
    work, may crash. A SIGINT that is ignored, as in a shell's background, stays so.
    """
    _owned.append(True)
    try:
        with heeded(asked(), lambda number: _leave(128 + number, f"stopped{how_to_go_on}")):
            yield
    finally:
        _owned.pop()


def asked() -> list[signal.Signals]:
    """The SIGNALS that are not ignored."""
    return [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]


def _leave(code: int, sentence: str) -> NoReturn:
    with contextlib.suppress(OSError, RuntimeError, ValueError):  # it may be in use, closed, or read by nobody
        sys.stdout.flush()
    os.write(2, f"{sentence}\n".encode())
    os._exit(code)


def from_the_start() -> None:
    """A signal ends the process where it stands, from here on: it may take seconds to import what does better."""
    for number in asked():
        signal.signal(number, lambda number, frame: _leave(128 + number, "stopped"))


@contextmanager
def heeded(numbers: Collection[int], stop: Callable[[int], NoReturn]) -> Iterator[None]:
    """Within this, each of these signals calls stop(number), in whichever thread is first there.

    That is the main one, unless it is outside of Python, in a compiled program, for longer than PATIENCE.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard = threading.Event()
    reads, writes = os.pipe()
    os.set_blocking(writes, False)

    def hear(number: int, frame: FrameType | None) -> None:
        heard.set()
        stop(number)

    def watch() -> None:
        while told := os.read(reads, 1):  # the system's own handler writes the number, whatever the main thread does
            if told[0] in numbers and not heard.wait(PATIENCE):
                stop(told[0])
        os.close(reads)

    threading.Thread(target=watch, daemon=True).start()
    try:
        with handled(dict.fromkeys(numbers, hear), told=writes):
            yield
    finally:
        os.close(writes)


class Requests:
    """Signals that came while a run trains: kept, for the loop to ask at the end of each step."""

    def __init__(self) -> None:
        self.signal = 0  # the first that came

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Within this, a signal is kept; a SIGINT after another signal stops at once.

        The process ends where it stands within `at_once`; elsewhere it is another program's, and goes on behind a
        KeyboardInterrupt, once a save under way is done.
        """

        def keep(number: int, frame: FrameType | None) -> None:
            if self.signal and number == signal.SIGINT:
                if not _owned:
                    raise KeyboardInterrupt
                # Not an exception: that would wait for a save under way. Half a checkpoint is never taken for a whole.
                os.write(2, b"\nstopped at once; a run goes on from its last checkpoint, a report stays as it was\n")
                os._exit(128 + number)
            if not self.signal:
                os.write(2, b"\nstopping; what is done is saved first (Ctrl-C: at once, without saving)\n")
                self.signal = int(number)

        with handled(dict.fromkeys(asked(), keep)):
            yield

    def heed(self, sentence: str = "stopped") -> None:
        """Raise Interrupted, with this sentence, where a signal has come."""
        if self.signal:
            raise errors.Interrupted(sentence, 128 + self.signal)


def pass_on(number: int) -> None:
    """Have a signal that was kept do what it would have done, but for SIGINT, for which there is an exception."""
    if number != signal.SIGINT:
        signal.raise_signal(number)


@contextmanager
def handled(handlers: dict, *, told: int = -1) -> Iterator[None]:
    """These handlers, by signal, and at the end those from before; Python has handlers in the main thread only.

    told: where the numbers of signals are written as they come, a file descriptor; -1 for nowhere.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    told = signal.set_wakeup_fd(told, warn_on_full_buffer=False)
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(told)

"""SIGTERM and SIGINT (Ctrl-C): what trains finishes its step and saves; any other command stops at once."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NoReturn

from experiments.engine import errors

SIGNALS = (signal.SIGTERM, signal.SIGINT)
PATIENCE = 1.0  # seconds for Python to come to a signal, as it does not while a compiled program runs
_owners: list[str] = []  # not empty: this process is a command's own, which may end it


def _leave(code: int, sentence: str) -> NoReturn:
    with contextlib.suppress(OSError, RuntimeError, ValueError):  # it may be in use, closed, or read by nobody
        sys.stdout.flush()
    os.write(2, f"{sentence}\n".encode())
    os._exit(code)


def from_the_start() -> None:
    """A signal ends the process where it stands, from here on: it may take seconds to import what does better."""
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda number, frame: _leave(128 + number, "stopped"))


@contextlib.contextmanager
def at_once(how_to_go_on: str = "") -> Iterator[None]:
    """Within this, a signal ends the process where it stands; how_to_go_on: what is said behind "stopped".

    Not by an exception, which is lost in a callback of JAX; and Python's own end may crash in JAX's threads.
    """
    _owners.append(how_to_go_on)
    try:
        with calls(lambda number: _leave(128 + number, f"stopped{how_to_go_on}")):
            yield
    finally:
        _owners.pop()


@contextlib.contextmanager
def calls(stop: Callable[[int], NoReturn]) -> Iterator[None]:
    """Within this, a signal calls stop(number): in the main thread, or in another one where that is in a compiled
    program for longer than PATIENCE."""
    heard = threading.Event()
    reads, writes = os.pipe()
    os.set_blocking(writes, False)

    def hear(number: int, frame: FrameType | None) -> None:
        heard.set()
        stop(number)

    def watch() -> None:
        while byte := os.read(reads, 1):  # the system's own handler writes the number, whatever the main thread does
            if byte[0] in SIGNALS and not heard.wait(PATIENCE):
                stop(byte[0])
        os.close(reads)

    threading.Thread(target=watch, daemon=True).start()
    try:
        with _handler(hear, wakeup=writes):
            yield
    finally:
        os.close(writes)


@contextlib.contextmanager
def _handler(handler: Callable[[int, FrameType | None], None], *, wakeup: int = -1) -> Iterator[None]:
    """This handler of the SIGNALS, but of one that is ignored, as in a shell's background; none in other threads.

    wakeup: a file descriptor to which the numbers of signals are written as they come; -1: none.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}
    before = {number: old for number, old in before.items() if old != signal.SIG_IGN}
    wakeup = signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
    for number in before:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
        signal.set_wakeup_fd(wakeup)


_lost: list[int] = []  # a Ctrl-C whose exception has not ended anything yet


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Within this, a Ctrl-C does what it does elsewhere in this process, as raise KeyboardInterrupt; if that is lost,
    as in a callback of JAX or a destructor, the next `heed` raises it, or the end."""
    usual = signal.getsignal(signal.SIGINT)

    def hear(number: int, frame: FrameType | None) -> None:
        _lost[:] = [number]
        usual(number, frame)

    _lost.clear()
    if not callable(usual) or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, hear)
    try:
        yield
        heed()
    finally:
        signal.signal(signal.SIGINT, usual)
        _lost.clear()


def heed() -> None:
    """Raise KeyboardInterrupt if a Ctrl-C came within `kept` and was lost."""
    if _lost:
        _lost.clear()
        raise KeyboardInterrupt


class Requests:
    """The signal that came while a run trains, for the loop to ask at the end of each step."""

    def __init__(self) -> None:
        self.signal = 0  # the first that came

    @contextlib.contextmanager
    def collect(self) -> Iterator[None]:
        """Within this, a signal waits here; a SIGINT after another signal stops at once.

        The process ends where it stands within `at_once`; elsewhere it is another program's, and goes on behind a
        KeyboardInterrupt, once a save under way is done.
        """

        def note(number: int, frame: FrameType | None) -> None:
            if not self.signal:
                os.write(2, b"\nstopping; what is done is saved first (Ctrl-C: at once, without saving)\n")
                self.signal = int(number)
            elif number == signal.SIGINT:
                if not _owners:
                    raise KeyboardInterrupt
                # Not an exception: that would wait for a save under way. Half a checkpoint is never taken for a whole.
                os.write(2, b"\nstopped at once; a run goes on from its last checkpoint, a report stays as it was\n")
                os._exit(128 + number)

        with _handler(note):
            if _lost:
                note(_lost.pop(), None)
            yield

    def heed(self, sentence: str = "stopped") -> None:
        """Raise Interrupted, with this sentence, where a signal has come."""
        if self.signal:
            raise errors.Interrupted(sentence, 128 + self.signal)

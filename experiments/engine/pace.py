"""How long training still takes, told by how its steps and evaluations went of late; and the line that tells it."""

import collections
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import tqdm


class Rate:
    """Seconds per unit of work. The first piece does not count, once there is another: it may compile, and fills
    caches."""

    RECENT = 100  # pieces whose median counts, as some of them wait for something that the others do not

    def __init__(self) -> None:
        self.seconds, self.work = 0.0, 0.0  # of all pieces but the first
        self._added, self._recent = 0, collections.deque(maxlen=self.RECENT)

    def add(self, seconds: float, work: float) -> None:
        """A piece of this work is done."""
        if self._added == 1:
            self.seconds, self.work = 0.0, 0.0
        self._added += 1
        self.seconds, self.work = self.seconds + seconds, self.work + work
        if self._added > 1:
            self._recent.append(seconds / work)

    def recent(self) -> float | None:
        """Seconds per unit of work of late; None where nothing is known yet."""
        return statistics.median(self._recent) if self._recent else None


class Pace:
    """The rates of the steps and of the evaluations of a program, in the same unit of work."""

    def __init__(self) -> None:
        self.steps, self.evaluations = Rate(), Rate()
        self._before, self._since = 0.0, time.perf_counter()  # seconds of the step before a pause; the clock's start

    def step(self, work: float) -> None:
        """A step of this work is done, and the next one begins."""
        self.pause()
        self.steps.add(self._before, work)
        self._before = 0.0
        self.resume()

    def pause(self) -> None:
        """What follows (an evaluation, a save) is no part of a step; ends at `resume`."""
        self._before += time.perf_counter() - self._since

    def resume(self) -> None:
        self._since = time.perf_counter()

    def timed(self, evaluate: Callable, work: float) -> Callable:
        """`evaluate`, whose seconds count for this work."""

        def timing(*arguments: Any) -> Any:
            began = time.perf_counter()
            found = evaluate(*arguments)
            self.evaluations.add(time.perf_counter() - began, work)
            return found

        return timing

    def left(self, steps: float, evaluations: float) -> float | None:
        """Seconds that this much work in steps and in evaluations takes; None where nothing is known yet.

        Until a second evaluation is seen, they are thought to take as long for their work as steps do.
        """
        rate = self.steps.recent()
        return None if rate is None else steps * rate + evaluations * (self.evaluations.recent() or rate)


class Cell:
    """What tqdm writes below a notebook's cell: a line takes the place of the one before."""

    encoding = "utf-8"  # with which tqdm draws a smooth bar

    def __init__(self, display: Callable):
        self._shown = display({"text/plain": ""}, raw=True, display_id=True)

    def write(self, text: str) -> None:
        if text := text.strip():
            self._shown.update({"text/plain": text}, raw=True)

    def flush(self) -> None:
        """There is nothing to wait for."""


def notebook() -> Callable | None:
    """IPython's `display` where this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    return ipython.display.display if hasattr(ipython and ipython.get_ipython(), "kernel") else None


class Line:
    """A live line on a terminal or below a notebook's cell; elsewhere a plain line every ten seconds."""

    EVERY_SECONDS = 10.0

    def __init__(self, begins: str, *, total: float, done: float = 0, live: bool = True):
        """begins: what tqdm writes before the rest. live: not where another process shows the line."""
        display, terminal = notebook() if live else None, sys.stderr.isatty()
        self._bar = tqdm.tqdm(
            total=total,
            initial=done,
            disable=not (live and (display or terminal)),
            file=Cell(display) if display else None,
            mininterval=0.5 if display else 0.1,
            bar_format=begins + "{postfix} |{bar:20}|",  # tqdm's own {remaining} counts all that waits
            dynamic_ncols=not display,
        )
        self._pace, self._spoke = Pace(), time.perf_counter()

    def _show(self, told: str, *, done: float, plain: str) -> None:
        """So much more is done. plain: the plain line, '' for none at this step."""
        self._bar.set_postfix_str(told, refresh=False)
        self._bar.update(done)
        if plain and self._bar.disable and time.perf_counter() - self._spoke > self.EVERY_SECONDS:
            self._spoke = time.perf_counter()
            print(plain, flush=True)

    def pause(self) -> None:
        """What follows (an evaluation, a save) is no part of a step; ends at `resume`."""
        self._pace.pause()

    def resume(self) -> None:
        self._pace.resume()

    def say(self, line: str) -> None:
        """A line that stays, above the live one."""
        if self._bar.disable:
            print(line, flush=True)
        else:
            self._bar.write(line)

    def close(self) -> None:
        """End the live line."""
        self._bar.close()


def clock(seconds: float | None) -> str:
    """61 -> '01:01'; '?' where nothing is known yet."""
    return "?" if seconds is None else tqdm.tqdm.format_interval(round(seconds))

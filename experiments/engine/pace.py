"""How long training still takes, told by how long its steps and evaluations took of late."""

import collections
import statistics
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


def clock(seconds: float | None) -> str:
    """61 -> '01:01'; '?' where nothing is known yet."""
    return "?" if seconds is None else tqdm.tqdm.format_interval(round(seconds))

"""The live line of a whole study: which program is under way, how much is done, how long the rest will take."""

import sys
import time
from collections.abc import Sequence

import tqdm


class Progress:
    """A line on a terminal; elsewhere a plain one every ten seconds. Work is counted in FLOPs."""

    EVERY_SECONDS = 10.0

    def __init__(self, work: Sequence[float], *, names: Sequence[str]):
        """work: of each program that is still to be trained."""
        self._work, self._names, self._current = work, names, 0
        self._bar = tqdm.tqdm(
            total=sum(work),
            disable=not sys.stderr.isatty(),
            bar_format="{desc}{postfix}, {remaining} left |{bar:20}|",
            dynamic_ncols=True,
        )
        self._began = self._spoke = time.perf_counter()
        self._resumed, self._done = 0.0, 0.0

    def begin(self, number: int, *, share: float) -> None:
        """The program of this number begins, or goes on after this share of it was done earlier."""
        self._current = number
        self._resumed += share * self._work[number]
        self._bar.initial = self._resumed  # what was done earlier says nothing of the time that is left
        self._at(share)
        self._bar.set_description_str(f"{number + 1} of {len(self._work)}, {self._names[number]}", refresh=False)

    def advance(self, step: int, steps: int, loss: float | None) -> None:
        """A step is done; the mean loss of the rows, where it was fetched."""
        self._at(step / steps)
        if loss is None:
            return
        told = f"step {step:,}/{steps:,}, loss {loss:.4f}"
        self._bar.set_postfix_str(told, refresh=False)
        if self._bar.disable and time.perf_counter() - self._spoke > self.EVERY_SECONDS:
            self._spoke = time.perf_counter()
            where = f"{self._current + 1} of {len(self._work)}, {self._names[self._current]}"
            print(f"{where}: {told}, {self._left()} left", flush=True)

    def _at(self, share: float) -> None:
        done = sum(self._work[: self._current]) + share * self._work[self._current]
        self._bar.update(done - self._done)
        self._done = done

    def _left(self) -> str:
        """Of the whole study, by the time that this session took for its part."""
        mine = self._done - self._resumed
        seconds = (time.perf_counter() - self._began) * (sum(self._work) - self._done) / mine if mine > 0 else 0.0
        return f"{round(seconds) // 60}:{round(seconds) % 60:02d}"

    def say(self, line: str) -> None:
        """A line that stays, above the live one."""
        if self._bar.disable:
            print(line, flush=True)
        else:
            self._bar.write(line)

    def close(self) -> None:
        """End the live line."""
        self._bar.close()

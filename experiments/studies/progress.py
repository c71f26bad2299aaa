"""The progress line of a whole study: the program that is trained, the work done, the time left."""

from collections.abc import Sequence
from typing import Any

from experiments.engine import log


class Progress(log.Line):
    """The line of a study. Work is counted in FLOPs."""

    def __init__(self, waiting: Sequence[Any]):
        """waiting: the programs.Checked that are still to be trained."""
        self._later, self._current, self._step, self._loss, self._title = [*waiting], None, 0, "", ""
        self._all, self._begun = len(waiting), 0
        super().__init__("{desc}", total=sum(one.ahead(0)[0] for one in waiting))
        self._known = self._pace  # of the newest program with a measured pace; self._pace is the current program's

    def begin(self, one: Any) -> None:
        """Begin one of the waiting programs: it is prepared and compiled now."""
        self._later = [other for other in self._later if other is not one]
        self._begun += 1
        self._current, self._step, self._loss, self._pace = one, 0, "", log.Pace()
        self._title = f"{self._begun} of {self._all}, {one.program.name}"
        self._bar.set_description_str(self._title, refresh=False)
        self._bar.set_postfix_str(f"compiling, {self._time_left()}")

    def replace(self, one: Any, rest: Sequence[Any]) -> None:
        """Replace a waiting program by the rest that another process has left of it."""
        self._later = [other for other in self._later if other is not one] + [*rest]
        self._all += len(rest) - 1
        self._bar.total += sum(some.ahead(0)[0] for some in rest) - one.ahead(0)[0]

    def go_on(self, step: int) -> None:
        """Begin after this step: the earlier steps were taken before."""
        self._bar.update(self._current.step * (step - self._step))
        self._step = step

    def advance(self, step: int, loss: float | None) -> None:
        """Show that a step is done, and the mean loss of the rows if it was fetched."""
        one = self._current
        self._pace.step(one.step)
        if self._pace.steps.recent() is not None:
            self._known = self._pace
        done, self._step = one.step * (step - self._step), step
        if loss is not None:
            self._loss = f", loss {loss:.4f}"
        text = f"step {step:,}/{one.steps:,}{self._loss}, {self._time_left()}"
        self._show(text, done=done, plain=f"{self._title}: {text}" if loss is not None else "")

    def evaluated(self, seconds: float) -> None:
        """Note the seconds of an evaluation of the current program."""
        self._pace.evaluations.add(seconds, self._current.step * self._current.evaluation)

    def _time_left(self) -> str:
        ahead = [self._current.ahead(self._step), *(one.ahead(0) for one in self._later)]
        return f"{log.clock(self._known.left(*map(sum, zip(*ahead, strict=True))))} left"

"""The live line of a whole study: which program is under way, how much is done, how long the rest will take."""

from collections.abc import Sequence
from typing import Any

from experiments.engine import log


class Progress(log.Line):
    """The line of a study. Work is counted in FLOPs."""

    def __init__(self, waiting: Sequence[Any]):
        """waiting: the programs that are still to be trained (programs.Checked)."""
        self._later, self._current, self._step, self._loss, self._title = [*waiting], None, 0, "", ""
        self._all, self._begun = len(waiting), 0
        super().__init__("{desc}", total=sum(one.ahead(0)[0] for one in waiting))
        self._known = self._pace  # of the newest program that tells something; self._pace is of the one under way

    def begin(self, one: Any) -> None:
        """This program, one of those that are waiting, is made ready and compiled from here on."""
        self._later = [other for other in self._later if other is not one]
        self._begun += 1
        self._current, self._step, self._loss, self._pace = one, 0, "", log.Pace()
        self._title = f"{self._begun} of {self._all}, {one.program.name}"
        self._bar.set_description_str(self._title, refresh=False)
        self._bar.set_postfix_str(f"compiling, {self._ahead()}")

    def replace(self, one: Any, left: Sequence[Any]) -> None:
        """Of a program that was waiting, these are what another process has left."""
        self._later = [other for other in self._later if other is not one] + [*left]
        self._all += len(left) - 1
        self._bar.total += sum(some.ahead(0)[0] for some in left) - one.ahead(0)[0]

    def go_on(self, step: int) -> None:
        """The program begins behind this step: those before it were taken earlier."""
        self._bar.update(self._current.step * (step - self._step))
        self._step = step

    def advance(self, step: int, loss: float | None) -> None:
        """A step is done; the mean loss of the rows, where it was fetched."""
        one = self._current
        self._pace.step(one.step)
        if self._pace.left(1.0) is not None:
            self._known = self._pace
        done, self._step = one.step * (step - self._step), step
        if loss is not None:
            self._loss = f", loss {loss:.4f}"
        told = f"step {step:,}/{one.steps:,}{self._loss}, {self._ahead()}"
        self._show(told, done=done, plain=f"{self._title}: {told}" if loss is not None else "")

    def _ahead(self) -> str:
        """What is left of steps and evaluations."""
        ahead = [self._current.ahead(self._step), *(one.ahead(0) for one in self._later)]
        return f"{log.clock(self._known.left(sum(map(sum, ahead))))} left"

"""The progress bar of a study: the current program, the work that is done, the time left."""

from collections.abc import Sequence
from typing import Any

from experiments.engine import log


class Progress(log.Line):
    """The line of a study. Work is counted in FLOPs."""

    def __init__(self, waiting: Sequence[Any]):
        """waiting: the programs that are still to be trained (programs.Checked)."""
        self._later, self._current, self._step, self._loss, self._title = [*waiting], None, 0, "", ""
        self._all, self._begun = len(waiting), 0
        super().__init__("{desc}", total=sum(job.ahead(0)[0] for job in waiting))
        self._known = self._pace  # the last pace that was measured; self._pace is the current program's

    def begin(self, job: Any) -> None:
        """Announce that this waiting program is now prepared and compiled."""
        self._later = [later for later in self._later if later is not job]
        self._begun += 1
        self._current, self._step, self._loss, self._pace = job, 0, "", log.Pace()
        self._title = f"{self._begun} of {self._all}, {job.program.name}"
        self._bar.set_description_str(self._title, refresh=False)
        self._bar.set_postfix_str(f"compiling, {self._ahead()}")

    def replace(self, job: Any, rest: Sequence[Any]) -> None:
        """Replace a waiting program by `rest`, the programs that another process has left of it."""
        self._later = [later for later in self._later if later is not job] + [*rest]
        self._all += len(rest) - 1
        self._bar.total += sum(part.ahead(0)[0] for part in rest) - job.ahead(0)[0]

    def go_on(self, step: int) -> None:
        """Start the program after this step: the steps before it were trained earlier."""
        self._bar.update(self._current.step * (step - self._step))
        self._step = step

    def advance(self, step: int, loss: float | None) -> None:
        """Show that `step` steps of the current program are done. loss: the mean over the rows, if it was fetched."""
        job = self._current
        self._pace.step(job.step)
        if self._pace.left(1.0) is not None:
            self._known = self._pace
        done, self._step = job.step * (step - self._step), step
        if loss is not None:
            self._loss = f", loss {loss:.4f}"
        text = f"step {step:,}/{job.steps:,}{self._loss}, {self._ahead()}"
        self._show(text, done=done, plain=f"{self._title}: {text}" if loss is not None else "")

    def _ahead(self) -> str:
        """Return the time left for steps and evaluations, as text."""
        ahead = [self._current.ahead(self._step), *(job.ahead(0) for job in self._later)]
        return f"{log.clock(self._known.left(sum(map(sum, ahead))))} left"

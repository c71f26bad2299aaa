"""The progress bar of a study: the current program, its steps, the time left."""

from collections.abc import Sequence
from typing import Any

from experiments.folder import log


class Progress(log.Line):
    """The progress bar of a study. It measures work in FLOPs."""

    def __init__(self, waiting: Sequence[Any]):
        """waiting: the programs that are still to be trained (programs.Checked)."""
        self._later, self._current, self._step, self._loss, self._title = [*waiting], None, 0, "", ""
        self._count, self._begun = len(waiting), 0
        super().__init__("{desc}", total=sum(job.remaining_flops(0)[0] for job in waiting))
        self._measured_pace = self._pace  # the last pace with an estimate; self._pace belongs to the current program

    def begin(self, job: Any) -> None:
        """Show that this waiting program is being compiled. advance() then counts its steps."""
        self._later = [later for later in self._later if later is not job]
        self._begun += 1
        self._current, self._step, self._loss, self._pace = job, 0, "", log.Pace()
        self._title = f"{self._begun} of {self._count}, {job.program.name}"
        self._bar.set_description_str(self._title, refresh=False)
        self._bar.set_postfix_str(f"compiling, {self._format_time_left()}")

    def replace(self, job: Any, rest: Sequence[Any]) -> None:
        """Replace a waiting program by `rest`: the programs with its runs that no other process has trained."""
        self._later = [later for later in self._later if later is not job] + [*rest]
        self._count += len(rest) - 1
        self._bar.total += sum(part.remaining_flops(0)[0] for part in rest) - job.remaining_flops(0)[0]

    def resume(self, step: int) -> None:
        """Count the steps up to `step`, which were trained in an earlier process, as done."""
        self._bar.update(self._current.step_flops * (step - self._step))
        self._step = step

    def advance(self, step: int, loss: float | None) -> None:
        """Show that `step` steps of the current program are done. loss: the mean over rows; None: not fetched."""
        job = self._current
        self._pace.step(job.step_flops)
        if self._pace.left(1.0) is not None:
            self._measured_pace = self._pace
        done, self._step = job.step_flops * (step - self._step), step
        if loss is not None:
            self._loss = f", loss {loss:.4f}"
        text = f"step {step:,}/{job.steps:,}{self._loss}, {self._format_time_left()}"
        self._show(text, done=done, plain=f"{self._title}: {text}" if loss is not None else "")

    def _format_time_left(self) -> str:
        """Return the time left for the steps and evaluations of all programs, as text."""
        work = [self._current.remaining_flops(self._step), *(job.remaining_flops(0) for job in self._later)]
        return f"{log.clock(self._measured_pace.left(sum(map(sum, work))))} left"

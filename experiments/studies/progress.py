"""The progress bar of a study: the current program, its steps, the time left of the whole study."""

import time
from collections.abc import Sequence
from typing import Any

from experiments.folder import log


class Progress(log.Line):
    """The progress bar of a study. It measures work in FLOPs."""

    def __init__(self, waiting: Sequence[Any], later: Sequence[Any] = ()):
        """waiting: the programs (programs.Checked) that are still to be trained.

        later: programs that a later bar shows, such as those of the arms if this bar is that of tuning.
        "program 1 of 7" counts `waiting`; the time left includes both.
        """
        self._later, self._count, self._begun, self._loss = [*waiting, *later], len(waiting), 0, ""
        super().__init__("{desc}{postfix}", total=sum(job.work for job in self._later))
        self.is_shared = False  # whether other processes train programs of the study; then this one does not train all
        self._start_seconds = 0.0  # of the last program: to load its data, compile it, and evaluate it at step 0

    def begin(self, job: Any) -> None:
        """Show that `job`, a waiting program (programs.Checked), is being compiled."""
        self._later = [later for later in self._later if later is not job]
        self._begun += 1
        self._job, self._step, self._loss, self._began = job, 0, "", time.perf_counter()
        kind = "tuning program" if job.program.tuning else "program"
        self._title = f"{kind} {self._begun} of {self._count}, {job.program.name}"
        self._bar.set_description_str(self._title, refresh=False)
        self._bar.set_postfix_str(f"compiling{self._left(1)}")

    def start(self, step: int) -> None:
        """Begin to count steps. Those up to `step` were trained in an earlier process."""
        self._start_seconds = time.perf_counter() - self._began
        self._bar.start_t += self._start_seconds  # so that tqdm's speed is that of the steps
        self._bar.total -= self._job.step_flops * step
        self._step = step

    def replace(self, job: Any, rest: Sequence[Any]) -> None:
        """Replace the waiting program `job` by programs of its remaining runs, `rest`.

        Other processes have trained the other runs of `job`.
        """
        self.is_shared = True
        self._later = [later for later in self._later if later is not job] + [*rest]
        self._count += len(rest) - 1
        self._bar.total += sum(part.work for part in rest) - job.work

    def advance(self, step: int, loss: float | None) -> None:
        """Show that `step` steps of the current program are done. loss: the mean over its runs; None: not fetched."""
        done, self._step = self._job.step_flops * (step - self._step), step
        self._loss = self._loss if loss is None else f", loss {loss:.4f}"
        is_end = step == self._job.steps and not self._later
        text = f"{'' if is_end else self._left(0, done)}{self._loss}"
        title = f"{self._title}, step {step:,}/{self._job.steps:,}"
        self._show(title, text.removeprefix(", "), done=done, prints=loss is not None)

    def _left(self, starting: int, done: float = 0.0) -> str:
        """Return ', 31:10 left in the study': steps, evaluations and compilations. starting: 1 if a program compiles.

        done: FLOPs since the bar's last update. This process is assumed to train all programs, so the time is an upper
        limit if other processes train some of them.
        """
        bar = self._bar.format_dict
        n = bar["n"] + done
        if not n:
            return ", ? left in the study"
        seconds = bar["elapsed"] / n * (bar["total"] - n) + self._start_seconds * (starting + len(self._later))
        return f", {'at most ' * self.is_shared}{self._bar.format_interval(seconds)} left in the study"

"""The training loop, for a single run and for the runs of a study, which are rows of the same arrays."""

import contextlib
import math
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from experiments.engine import checkpoint, distributed, errors, log, mesh, run_plan, signals, train_step

SAVE = 1  # the clock requests a save; larger requests are the numbers of signals
SUSPECT = 2  # steps skipped in a row, for which parameters that are not finite may be the reason
PATIENCE = 128  # steps skipped in a row, after which the run ends


def train(
    run: "Training",
    step: Callable[..., tuple[train_step.State, dict]],
    state: train_step.State,
    data: Iterator,
    *,
    start: int,
    alive: np.ndarray = np.True_,
    place: Callable[[Mesh, Any], dict] = mesh.place_batch,
) -> train_step.State:
    """Take the steps start + 1 ... run.plan.steps, and return the last state; end early if no run is active.

    The metrics of a step are logged while the devices take the next one, so that the devices never wait for the host.
    Before a save, an evaluation or a stop, they are logged at once. alive: which runs are active. place: puts a batch
    on the devices.
    """
    previous, alive = None, distributed.put(alive, mesh.replicated(run.plan.mesh))
    for n in range(start + 1, run.plan.steps + 1):
        batch = next(data)
        state, metrics = step(state, place(run.plan.mesh, batch), alive)
        alive = metrics["alive"]
        if previous and not run.log(*previous, state):
            break
        previous = n, batch, metrics
        if run.pauses(n):
            if not run.log(*previous, state):
                break
            previous = None
            with run.line.pause():
                run.save_if_due(n, state)
                run.stop_if_requested()
                if run.is_due("evaluate", n):
                    run.evaluate(n, state)
    return state


def ignore(*_: Any) -> None:
    """Do nothing."""


class Training:
    """The work between steps: log metrics, evaluate, save, and stop for a signal.

    A single run and the runs of a study differ in the functions that they pass.
    """

    def __init__(
        self,
        plan: run_plan.Plan,
        folder: pathlib.Path,
        runs: Sequence[pathlib.Path],
        saves: checkpoint.Checkpoints,
        *,
        start: int,
        line: log.Line,
        requests: signals.Requests,
        evaluate: Callable[..., dict],
        probe: Callable[[Any], dict] = lambda params: {},
        on_failure: Callable[..., None] = ignore,
        check: Callable[[int, Any], None] = ignore,
        scores: Callable[[dict], dict[str, float]] | None = None,
    ):
        """Open the logs. folder: the one that messages name. runs: the folder of each run.

        evaluate(params, on_batch) -> means, a number for each run. probe(params) -> further numbers to log with them.
        on_failure(n, state, batch, metrics): called if no run is active after step n. check(n, state): raises if this
        state must not be saved. scores(means) -> the numbers to print and to save with a checkpoint; None: no numbers.
        """
        self.plan, self.line, self._folder, self._saves, self._requests = plan, line, folder, saves, requests
        self._means, self._probe, self._scores_of = evaluate, probe, scores
        self._on_failure, self._check = on_failure, check
        self.final: dict[str, np.ndarray] = {}  # of the newest evaluation, a number for each run
        self._final_at = -1
        rows_by_run = [[row for row in log.read(run) if row["step"] == start] for run in runs]
        self._in_log = [
            any(f"{run_plan.EVAL}{train_step.LOSS}" in row for row in rows) for rows in rows_by_run
        ]  # at the start
        self._logs = [log.Log(run, start=start, writers=plan.log) for run in runs]
        # From the manifests of the checkpoints: a row of the log does not tell whether a checkpoint still exists.
        self._best = max((checkpoint.score(x, plan.keep_best) for x in saves.measured.values()), default=-math.inf)
        self._skipped, self._in_a_row = math.inf, 0
        self._saved, self._saved_at = start, time.monotonic()
        self._request = 0

    def is_due(self, action: str, n: int) -> bool:
        """Return True if `action` (log, evaluate or save) is due after step n by its number."""
        return run_plan.is_due(n, every=self.plan.every[action], steps=self.plan.steps)

    def log(self, n: int, batch: Any, metrics: dict, state: train_step.State) -> bool:
        """Log the metrics of step n, and show the progress. Return False if no run is active after it.

        state: the state before step n if this step failed, because later steps change nothing then. Raises RunError
        if PATIENCE steps in a row were skipped.
        """
        metrics = jax.block_until_ready(metrics)
        if not np.any(jax.device_get(metrics["alive"])):
            self._on_failure(n, state, batch, metrics)
            return False
        if "skipped" in metrics:
            self._count_skipped(n, int(jax.device_get(metrics["skipped"])), state)
        loss = None
        if self.is_due("log", n):
            values = jax.device_get({name: x for name, x in metrics.items() if name != "alive"})
            probe = train_step.PROBE  # its metrics belong to no batch
            names = [x.removeprefix(probe) if x.startswith(probe) else f"train/{x}" for x in values]
            self._write(n, dict(zip(names, values.values(), strict=True)))
            losses = np.atleast_1d(values[train_step.LOSS])
            losses = losses[np.isfinite(losses)]
            loss = float(losses.mean()) if losses.size else math.nan
        self.line.advance(n, loss)
        return True

    def _count_skipped(self, n: int, skipped: int, state: train_step.State) -> None:
        self._in_a_row = self._in_a_row + 1 if skipped > self._skipped else 0
        self._skipped = skipped
        if self._in_a_row == SUSPECT:
            self._check(n, state)
        if self._in_a_row >= PATIENCE:
            raise errors.RunError(
                f"step {n:,}: the last {PATIENCE} steps were skipped (train.nan). Resume from an earlier checkpoint"
                " with a smaller optim.learning_rate"
            )

    def _write(self, n: int, columns: dict[str, Any], *, but: Sequence[bool] = ()) -> None:
        """Write a number for each run into its log. but: for each run, True to leave it out."""
        for r, writer in enumerate(self._logs):
            if not (but and but[r]):
                writer.write(n, {name: float(np.atleast_1d(column)[r]) for name, column in columns.items()})

    def pauses(self, n: int) -> bool:
        """Return True if a save, an evaluation or a stop follows on step n. All processes give the same answer."""
        self._saves.check()
        self._agree(clock=self.is_due("log", n))
        return self.is_due("evaluate", n) or self.is_due("save", n) or self._request > 0

    def _agree(self, *, clock: bool) -> None:
        """Set `_request`, the same in all processes: the number of a signal, or SAVE if the clock requests a save.

        clock: several processes compare their clocks too, which makes the devices wait.
        """
        self._request = self._requests.agree()
        overdue = time.monotonic() - self._saved_at >= 60 * self.plan.save_minutes
        if not self._request and (clock or jax.process_count() == 1) and distributed.agree(overdue):
            self._request = SAVE

    def save_if_due(self, n: int, state: train_step.State) -> None:
        """Save if the step, the clock or a signal requests it. Call it before an evaluation, which takes long."""
        if self._request or self.is_due("save", n):
            self._save(n, state)

    def _save(self, n: int, state: train_step.State) -> None:
        self._check(n, state)
        self._saves.save(n, state, self.scores() if self._final_at == n else None)
        self._saved, self._saved_at = n, time.monotonic()

    def stop_if_requested(self, *, now: bool = False) -> None:
        """Raise Interrupted, after a save, if a signal has come. now: first agree with the other processes again."""
        if now:
            self._request = self._requests.agree()
        if self._request > SAVE:
            self._saves.wait()
            distributed.barrier()  # no process leaves while another one writes
            where = f" after step {self._saved:,}, which is saved in {self._folder}" if self._saved else ""
            raise errors.Interrupted(f"stopped{where}", 128 + self._request)

    def catch_up(self, n: int, state: train_step.State) -> None:
        """Evaluate the first state of this session, that of step n, if an earlier session stopped before it did."""
        missing = not all(self._in_log) or (self._scores_of and not self._saves.measured.get(n))
        if n == self.plan.steps or distributed.agree(bool(missing)):
            with self.line.pause():
                self.evaluate(n, state, but=self._in_log, saves=False)

    def finish(self, state: train_step.State) -> None:
        """Evaluate the last state if the last step was not taken because all runs have failed."""
        if self._final_at != self.plan.steps:
            self.evaluate(self.plan.steps, state, saves=False)

    def evaluate(self, n: int, state: train_step.State, *, but: Sequence[bool] = (), saves: bool = True) -> None:
        """Write the means over the held-out data into `final`, the logs (but: see `_write`) and the manifest of step n.

        Raises Interrupted for a signal, in all processes after the same batch. saves: save the state if the clock
        requests it, if the evaluation fails, or if it is the best so far.
        """

        def on_batch() -> None:
            self._agree(clock=True)
            if self._request and saves:
                self._save(n, state)
            self.stop_if_requested()

        try:
            means = self._means(state.params, on_batch)
        except BaseException:
            if saves and jax.process_count() == 1:  # if one of several processes fails, the others would not join in
                self._save(n, state)
            raise
        self.final, self._final_at = {f"{run_plan.EVAL}{name}": value for name, value in means.items()}, n
        self._write(n, self.final | jax.device_get(self._probe(state.params)), but=but)
        if scores := self.scores():
            self._saves.note(n, scores)
            self.line.say(f"step {n:,}: " + ", ".join(f"{name} {x:.4f}" for name, x in scores.items()))
        score = checkpoint.score(scores, self.plan.keep_best)
        if saves and distributed.agree(score > self._best) > 0:
            self._save(n, state)
        self._best = max(self._best, score)

    def scores(self) -> dict[str, float]:
        """Return the newest evaluation of a run alone; {} for the runs of a study."""
        return self._scores_of(self.final) if self._scores_of else {}

    def close(self) -> None:
        """Close all logs, even if one fails."""
        with contextlib.ExitStack() as stack:
            for writer in self._logs:
                stack.callback(writer.close)

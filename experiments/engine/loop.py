"""The training loop, for a single run or for the runs of a study, which are rows of the same arrays."""

import contextlib
import math
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from experiments.config import errors
from experiments.devices import distributed, mesh as meshes
from experiments.engine import run_plan, signals, train_step
from experiments.folder import checkpoint, log

SAVE = 1  # a request of the clock to save; a larger request is the number of a signal to stop
SUSPECT = 2  # after so few consecutive skipped steps, check whether the parameters are finite
PATIENCE = 128  # after this number of consecutive skipped steps, the run ends


def train(
    run: "Training",
    step: Callable[..., tuple[train_step.State, dict]],
    state: train_step.State,
    data: Iterator,
    *,
    start: int,
    alive: np.ndarray = np.True_,
    place: Callable[[Mesh, Any], dict] = meshes.place_batch,
) -> train_step.State:
    """Take the steps start + 1 ... run.plan.steps, and return the last state.

    End earlier if no run is active, or if train.patience says so.

    The metrics of a step are logged while the devices take the next one, so that the devices never wait for the host.
    Before a save, an evaluation or a stop, the metrics are logged immediately. alive: bool for each run, whether it is
    active. place: puts a batch on the devices.
    """
    previous, alive = None, distributed.put(alive, meshes.replicated(run.plan.mesh))
    for n in range(start + 1, run.plan.steps + 1):
        if run.ends_early(n - 1, state):
            break
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


def _evaluates(row: dict) -> bool:
    """Return whether a row of the log is of an evaluation."""
    return f"{run_plan.EVAL}{train_step.LOSS}" in row


def ignore(*_: Any) -> None:
    """Do nothing: the default of a callback."""


class Training:
    """The work between steps: log metrics, evaluate, save, and stop for a signal.

    A single run and the runs of a study pass different functions to the constructor.
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
        """Open the logs. folder: the folder that messages name. runs: the folder of each run.

        evaluate(params, on_batch) -> means, each a number for each run. probe(params) -> numbers to log with the means.
        on_failure(n, state, batch, metrics): called if no run is active after step n. check(n, state): raises RunError
        if the state must not be saved. scores(means) -> metrics to print and to save with a checkpoint; None: none.
        """
        self.plan, self.line, self._folder, self._saves, self._requests = plan, line, folder, saves, requests
        self._means, self._probe, self._scores_of = evaluate, probe, scores
        self._on_failure, self._check = on_failure, check
        self.final: dict[str, np.ndarray] = {}  # metrics of the newest evaluation, a number for each run
        self._final_step = -1
        self.last_step = plan.steps  # smaller if the run ends early
        rows = [row for row in log.read(runs[0]) if row["step"] <= start]
        # Step -> score of its evaluation. With several runs, which keep no best checkpoint, it is not used.
        self._scored = {row["step"]: checkpoint.score(row, plan.keep_best) for row in rows if _evaluates(row)}
        rows_by_run = [[row for row in log.read(run) if row["step"] == start] for run in runs]
        # For each run, whether its log has the evaluation of step `start`.
        self._has_evaluation = [any(map(_evaluates, rows)) for rows in rows_by_run]
        self._logs = [log.Log(run, start=start, writers=plan.log) for run in runs]
        # Taken from the manifests, because a row of the log does not show whether its checkpoint still exists.
        self._best = max((checkpoint.score(x, plan.keep_best) for x in saves.measured.values()), default=-math.inf)
        self._skipped, self._in_a_row = math.inf, 0
        self._saved, self._saved_at = start, time.monotonic()
        self._request = 0

    def is_due(self, action: str, n: int) -> bool:
        """Return True if the number of step n makes the action "log", "evaluate" or "save" due after it."""
        return run_plan.is_due(n, every=self.plan.every[action], steps=self.plan.steps)

    def log(self, n: int, batch: Any, metrics: dict, state: train_step.State) -> bool:
        """Log the metrics of step n, and show the progress. Return False if no run is active after it.

        state: the newest state. If step n failed, this is the state before it, because later steps then change nothing.
        Raises RunError after PATIENCE consecutive skipped steps.
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
        """Count the consecutive skipped steps up to step n. skipped: the number of all skipped steps so far."""
        self._in_a_row = self._in_a_row + 1 if skipped > self._skipped else 0
        self._skipped = skipped
        if self._in_a_row == SUSPECT:
            self._check(n, state)
        if self._in_a_row >= PATIENCE:
            raise errors.RunError(
                f"step {n:,}: the last {PATIENCE} steps were skipped (train.nan). Resume from an earlier checkpoint"
                " with a smaller optim.learning_rate"
            )

    def _write(self, n: int, columns: dict[str, Any], *, skip: Sequence[bool] = ()) -> None:
        """Write the numbers of each run into its log. skip: for each run, True to write nothing."""
        for r, writer in enumerate(self._logs):
            if not (skip and skip[r]):
                writer.write(n, {name: float(np.atleast_1d(column)[r]) for name, column in columns.items()})

    def pauses(self, n: int) -> bool:
        """Return True if a save, an evaluation or a stop follows step n. The result is the same in all processes."""
        self._saves.check()
        self._agree(clock=self.is_due("log", n))
        return self.is_due("evaluate", n) or self.is_due("save", n) or self._request > 0

    def _agree(self, *, clock: bool) -> None:
        """Set `_request` to the same value in all processes: a signal's number, SAVE if a save is overdue, or 0.

        clock: whether several processes compare their clocks, which makes the devices wait.
        """
        self._request = self._requests.agree()
        overdue = time.monotonic() - self._saved_at >= 60 * self.plan.save_minutes
        if not self._request and (clock or jax.process_count() == 1) and distributed.agree(overdue):
            self._request = SAVE

    def save_if_due(self, n: int, state: train_step.State) -> None:
        """Save if the step, the clock or a signal requests it. Call this before an evaluation, which may take long."""
        if self._request or self.is_due("save", n):
            self._save(n, state)

    def _save(self, n: int, state: train_step.State) -> None:
        """Check and save the state after step n, with its metrics if they are known."""
        self._check(n, state)
        self._saves.save(n, state, self.scores() if self._final_step == n else None)
        self._saved, self._saved_at = n, time.monotonic()

    def stop_if_requested(self, *, now: bool = False) -> None:
        """Raise Interrupted if a signal was received, once the save is on the disk. now: check for new signals."""
        if now:
            self._request = self._requests.agree()
        if self._request > SAVE:
            self._saves.wait()
            distributed.barrier()  # no process leaves while another one writes
            where = f" after step {self._saved:,}, which is saved in {self._folder}" if self._saved else ""
            raise errors.Interrupted(f"stopped{where}", 128 + self._request)

    def catch_up(self, n: int, state: train_step.State) -> None:
        """Evaluate the state of step n, at which this session resumes, if an earlier one stopped before its evaluation.

        The state of the last step is always evaluated.
        """
        missing = not all(self._has_evaluation) or (self._scores_of and not self._saves.measured.get(n))
        if n == self.plan.steps or distributed.agree(bool(missing) or self._is_stale()):
            with self.line.pause():
                self.evaluate(n, state, skip=self._has_evaluation, saves=False)

    def _is_stale(self) -> bool:
        """Return True if the last train.patience evaluations were not better than one before them."""
        if not self.plan.patience:
            return False
        best = max(self._scored, key=self._scored.__getitem__, default=0)  # the first of equal scores
        return sum(n > best for n in self._scored) >= self.plan.patience

    def ends_early(self, n: int, state: train_step.State) -> bool:
        """Return True if training ends after step n because of train.patience. The state is then saved."""
        if not self._is_stale():
            return False
        self._save(n, state)
        self.last_step, metric = n, self.plan.keep_best.metric
        self.line.say(f"step {n:,}: {metric} did not improve in {self.plan.patience} evaluations: training ends here")
        return True

    def finish(self, state: train_step.State) -> None:
        """Evaluate the last state if the last step was not taken because all runs have failed."""
        if self._final_step != self.plan.steps:
            self.evaluate(self.plan.steps, state, saves=False)

    def evaluate(self, n: int, state: train_step.State, *, skip: Sequence[bool] = (), saves: bool = True) -> None:
        """Evaluate, and write the means into `final`, the logs (skip: see `_write`) and the manifest of step n.

        Raises Interrupted for a signal, in all processes after the same batch. saves: whether to save the state if the
        clock requests it, if the evaluation fails, or if its score is the best so far.
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
        self.final, self._final_step = {f"{run_plan.EVAL}{name}": value for name, value in means.items()}, n
        self._write(n, self.final | jax.device_get(self._probe(state.params)), skip=skip)
        if scores := self.scores():
            self._saves.add_metrics(n, scores)
            self.line.say(f"step {n:,}: " + ", ".join(f"{name} {x:.4f}" for name, x in scores.items()))
        score = self._scored[n] = checkpoint.score(scores, self.plan.keep_best)
        if saves and distributed.agree(score > self._best) > 0:
            self._save(n, state)
        self._best = max(self._best, score)

    def scores(self) -> dict[str, float]:
        """Return the metrics of the newest evaluation of a single run; {} for the runs of a study."""
        return self._scores_of(self.final) if self._scores_of else {}

    def close(self) -> None:
        """Close all logs, even if one fails."""
        with contextlib.ExitStack() as stack:
            for writer in self._logs:
                stack.callback(writer.close)

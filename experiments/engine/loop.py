"""The training loop, for a single run or for the runs of a study, which are rows of the same arrays."""

import contextlib
import math
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from experiments.config import errors
from experiments.devices import distributed, mesh as meshes
from experiments.engine import run_plan, signals, train_step
from experiments.folder import checkpoint, log, records

SAVE = 1  # a request of the clock to save; a larger request is the number of a signal to stop
SUSPECT = 2  # after so few consecutive skipped steps, check whether the parameters are finite
PATIENCE = 128  # after this number of consecutive skipped steps, the run ends
LOSS = f"{run_plan.EVAL}{train_step.LOSS}"


class Clock:
    """Decide what is due after a step. Every process must call each method."""

    def __init__(self, plan: run_plan.Plan, requests: signals.Requests):
        self._plan, self._requests, self.saved_at = plan, requests, time.monotonic()
        self.request = 0  # a signal's number, SAVE if a save is overdue, or 0

    def is_due(self, action: str, n: int) -> bool:
        """Return True if the number of step n makes the action "log", "evaluate" or "save" due after it."""
        return run_plan.is_due(n, every=self._plan.every[action], steps=self._plan.steps)

    def listen(self, *, compares: bool = True) -> int:
        """Update and return `request`, equal in all processes: the number of a signal, SAVE if a save is due, or 0.

        compares: whether several processes compare their clocks, which makes the devices wait. If they do not, SAVE is
        not requested.
        """
        self.request = self._requests.agree()
        overdue = time.monotonic() - self.saved_at >= 60 * self._plan.save_minutes
        if not self.request and (compares or jax.process_count() == 1) and distributed.agree(overdue):
            self.request = SAVE
        return self.request

    def pauses(self, n: int) -> bool:
        """Return True if a save, an evaluation or a stop follows step n."""
        self.listen(compares=self.is_due("log", n))
        return self.saves(n) or self.is_due("evaluate", n)

    def saves(self, n: int) -> bool:
        """Return True if the number of step n, the time or a signal requests a save."""
        return self.request > 0 or self.is_due("save", n)


class Saver:
    """Save states, among them each new best one (train.keep_best), and decide if train.patience ends the run."""

    def __init__(
        self,
        plan: run_plan.Plan,
        folder: pathlib.Path,
        saves: checkpoint.Checkpoints,
        clock: Clock,
        rows: Sequence[dict],
        *,
        start: int,
        check: Callable[[int, Any], None] = lambda n, state: None,
    ):
        """folder: the folder that messages name. rows: evaluations of earlier sessions, from metrics.jsonl.

        check(n, state): raises RunError if the state must not be saved.
        """
        self._plan, self._folder, self.saves, self._clock, self.check = plan, folder, saves, clock, check
        self._scored = {row["step"]: checkpoint.score(row, plan.keep_best) for row in rows}
        # Taken from the manifests, because a row of the log does not show whether its checkpoint still exists.
        self._best = max((checkpoint.score(x, plan.keep_best) for x in saves.measured.values()), default=-math.inf)
        self._metrics: tuple[int, dict[str, float]] = (-1, {})  # step and metrics of the newest evaluation
        self.step = start  # of the newest save

    def save(self, n: int, state: train_step.State) -> None:
        """Save the state after step n, with its metrics if they are known.

        Raises RunError if the `check` of the constructor forbids it, or if this save cannot begin or the last failed.
        """
        self.check(n, state)
        self.saves.save(n, state, self._metrics[1] if self._metrics[0] == n else None)
        self.step, self._clock.saved_at = n, time.monotonic()

    def add_metrics(self, n: int, state: train_step.State, metrics: dict[str, float], *, saves: bool) -> None:
        """Write the metrics of step n into its checkpoint, if it has one. saves: save the state if it is a new best."""
        self._metrics = n, metrics
        self.saves.add_metrics(n, metrics)
        score = self._scored[n] = checkpoint.score(metrics, self._plan.keep_best)
        if saves and distributed.agree(score > self._best):
            self.save(n, state)
        self._best = max(self._best, score)

    def is_stale(self) -> bool:
        """Return True if none of the last train.patience (> 0) evaluations was better than the best one before them."""
        best = max(self._scored, key=self._scored.__getitem__, default=0)  # the first of equal scores
        return 0 < self._plan.patience <= sum(n > best for n in self._scored)

    def stop_if_requested(self, request: int) -> None:
        """Raise Interrupted if the request is a signal, once the newest save is on the disk."""
        if request > SAVE:
            self.saves.wait()
            distributed.barrier()  # no process leaves while another one writes
            where = f" after step {self.step:,}, which is saved in {self._folder}" if self.step else ""
            raise errors.Interrupted(f"stopped{where}", 128 + request)


class Logs:
    """The logs of all runs, and the progress bar. Call `close` after the training; it leaves the bar open."""

    def __init__(self, plan: run_plan.Plan, runs: Sequence[pathlib.Path], line: log.Line, *, start: int):
        """runs: the folder of each run. line: the progress bar. start: the step from which this session trains."""
        self._every, self._steps, self.line = plan.every["log"], plan.steps, line
        rows = [[row for row in records.read_metrics(run) if row["step"] <= start and LOSS in row] for run in runs]
        self.evaluations = rows[0]  # of the first run, in earlier sessions
        # For each run, whether its log has the evaluation of step `start`.
        self.has_evaluation = [any(row["step"] == start for row in run_rows) for run_rows in rows]
        self.final: dict[str, np.ndarray] = {}  # metrics of the newest evaluation, a number for each run
        self.final_step = -1
        self._logs = [log.Log(run, start=start, writers=plan.log) for run in runs]
        self._skipped, self._in_a_row = math.inf, 0

    def log(self, n: int, metrics: dict) -> int:
        """Log the metrics of step n if train.log_every divides n or n is the last step, and show the progress.

        Return how many steps up to n were skipped in a row. A step is skipped if its loss, gradient or
        another value is not finite (train.nan). Raises RunError at PATIENCE of them.
        """
        skipped = int(jax.device_get(metrics.get("skipped", 0)))
        self._in_a_row, self._skipped = self._in_a_row + 1 if skipped > self._skipped else 0, skipped
        if self._in_a_row >= PATIENCE:
            raise errors.RunError(
                f"step {n:,}: the last {PATIENCE} steps were skipped (train.nan), because the loss, the gradient or "
                "another value was not finite. Resume from an earlier checkpoint with a smaller optim.learning_rate"
            )
        loss = None
        if run_plan.is_due(n, every=self._every, steps=self._steps):
            values = jax.device_get({name: x for name, x in metrics.items() if name != "alive"})
            probe = train_step.PROBE  # its metrics belong to no batch
            names = [x.removeprefix(probe) if x.startswith(probe) else f"train/{x}" for x in values]
            self.write(n, dict(zip(names, values.values(), strict=True)))
            losses = np.atleast_1d(values[train_step.LOSS])
            losses = losses[np.isfinite(losses)]
            loss = float(losses.mean()) if losses.size else math.nan
        self.line.advance(n, loss)
        return self._in_a_row

    def write(self, n: int, columns: Mapping[str, Any], *, skip: Sequence[bool] = ()) -> None:
        """Write a row of step n into the log of each run. columns: name -> an array with a number for each run.

        A single run may have a plain number. skip: for each run, True to write nothing.
        """
        for r, writer in enumerate(self._logs):
            if not (skip and skip[r]):
                writer.write(n, {name: float(np.atleast_1d(column)[r]) for name, column in columns.items()})

    def close(self) -> None:
        """Close all logs, even if closing one raises an error. Raise this error afterwards."""
        with contextlib.ExitStack() as stack:
            for writer in self._logs:
                stack.callback(writer.close)


class Training(NamedTuple):
    """The objects that log, evaluate and save between the steps of a single run, or of the runs of a study."""

    plan: run_plan.Plan
    clock: Clock
    saver: Saver
    logs: Logs
    measure: Callable[..., dict]  # (params, on_batch) -> {metric: its mean, or the mean of each run}
    probe: Callable[[Any], dict] = lambda params: {}  # (params) -> numbers to log with the means
    # (n, state, batch, metrics): called if a single run is not active after step n; None: the runs of a study.
    on_failure: Callable[..., None] | None = None


def train(
    run: Training,
    step: Callable[..., tuple[train_step.State, dict]],
    state: train_step.State,
    data: Iterator,
    *,
    start: int,
    alive: np.ndarray = np.True_,
    place: Callable[[Mesh, Any], dict] = meshes.place_batch,
) -> train_step.State:
    """Take the steps start + 1 ... run.plan.steps, and return the last state.

    End earlier if no run is active (numbers that are not finite end a run), or if train.patience says so.

    The metrics of a step are logged while the devices take the next one, so that the devices never wait for the host.
    Before a save, an evaluation or a stop, the metrics are logged immediately. data: batches from step start + 1 on.
    alive: a bool, or one for each run: whether it is active. place: (mesh, batch) -> the batch on the devices.
    """
    previous, alive = None, distributed.put(alive, meshes.replicated(run.plan.mesh))
    for n in range(start + 1, run.plan.steps + 1):
        if _ends_early(run, n - 1, state):
            break
        batch = next(data)
        state, metrics = step(state, place(run.plan.mesh, batch), alive)
        alive = metrics["alive"]
        if previous and not _log(run, *previous, state):
            break
        previous = n, batch, metrics
        run.saver.saves.check()
        if n == start + 1:  # and not earlier, so that the first step comes soon
            jax.block_until_ready(metrics)
            run.logs.line.measure()
        if run.clock.pauses(n):
            if not _log(run, *previous, state):
                break
            previous = None
            with run.logs.line.pause():
                if run.clock.saves(n):  # before an evaluation, which may take long
                    run.saver.save(n, state)
                run.saver.stop_if_requested(run.clock.request)
                if run.clock.is_due("evaluate", n):
                    evaluate(run, n, state)
    return state


def _log(run: Training, n: int, batch: Any, metrics: dict, state: train_step.State) -> bool:
    """Log the metrics of step n. Return False if no run is active after it.

    state: the newest state. If step n failed, this is the state before it, because later steps then change nothing.
    """
    metrics = jax.block_until_ready(metrics)
    is_active = bool(np.any(jax.device_get(metrics["alive"])))
    if is_active and run.logs.log(n, metrics) == SUSPECT:
        run.saver.check(n, state)
    if not is_active and run.on_failure:
        run.on_failure(n, state, batch, metrics)
    return is_active


def _ends_early(run: Training, n: int, state: train_step.State) -> bool:
    """Return True if training ends after step n because of train.patience. The state is then saved."""
    if is_stale := run.saver.is_stale():
        run.saver.save(n, state)
        reason = f"{run.plan.keep_best.metric} did not improve in {run.plan.patience} evaluations"
        run.logs.line.say(f"step {n:,}: {reason}: training ends here")
    return is_stale


def catch_up(run: Training, n: int, state: train_step.State) -> None:
    """Evaluate the state of step n, from which this session resumes, if no earlier session evaluated it.

    If n is the last step, or train.patience ends the run here, the state is always evaluated.
    """
    missing = not all(run.logs.has_evaluation) or run.on_failure and not run.saver.saves.measured.get(n)
    if n == run.plan.steps or distributed.agree(bool(missing) or run.saver.is_stale()):
        with run.logs.line.pause():
            evaluate(run, n, state, skip=run.logs.has_evaluation, saves=False)


def evaluate(run: Training, n: int, state: train_step.State, *, skip: Sequence[bool] = (), saves: bool = True) -> None:
    """Evaluate, and write the means into `logs.final`, the log of each run, and a single run's checkpoint of step n.

    skip: for each of the runs that are trained together, True if its log gets nothing. saves: whether the state may be
    saved. It is if a signal or the time requests it (`Clock`), if the evaluation raises an error (one process), or if a
    single run's score is the best so far. Raises Interrupted for a signal, in all processes after the same batch.
    """

    def on_batch() -> None:
        if run.clock.listen() and saves:
            run.saver.save(n, state)
        run.saver.stop_if_requested(run.clock.request)

    try:
        means = run.measure(state.params, on_batch)
    except BaseException:
        if saves and jax.process_count() == 1:  # if one of several processes fails, the others would not join in
            run.saver.save(n, state)
        raise
    run.logs.final = {f"{run_plan.EVAL}{name}": value for name, value in means.items()}
    run.logs.final_step = n
    run.logs.write(n, run.logs.final | jax.device_get(run.probe(state.params)), skip=skip)
    if run.on_failure:  # a single run
        metrics = {name: float(value) for name, value in run.logs.final.items()}
        run.saver.add_metrics(n, state, metrics, saves=saves)
        run.logs.line.say(f"step {n:,}: " + ", ".join(f"{name} {x:.4f}" for name, x in metrics.items()))

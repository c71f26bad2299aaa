"""The one training loop, of a run alone and of the runs of a study, which are rows of the same arrays."""

import contextlib
import functools
import math
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from experiments.engine import (
    batches,
    checkpoint,
    compilation,
    distributed,
    errors,
    log,
    mesh,
    nonfinite,
    signals,
    train_step as training_step,
)

EVAL = "eval/"  # begins the names of what an evaluation measures
SAVE = 1  # what the processes agree on after a step, beside the number of a signal, which is larger: the clock saves
SUSPECT = 2  # steps skipped in a row, for which parameters that are not finite may be the reason
PATIENCE = 128  # steps skipped in a row, after which nothing more is expected of a run


def train(
    run: "Training", step: Callable, state: training_step.State, data: Iterator, *, start: int, **rows: Any
) -> training_step.State:
    """Take the steps start + 1 ... run.plan.steps, and return the last state.

    What a step measures is logged while the devices take the next one, so that they never wait for the host; but where
    more follows on a step, before that. It ends early where no run is alive. rows: `alive` and `place` of `steps`.
    """
    run.evaluate_before(start, state)
    late, ahead = None, steps(run.plan, step, state, data, start=start, **rows)
    for n, state, batch, metrics in ahead:
        if late and not run.log(*late, state):
            break
        late = n, batch, metrics
        if run.pauses(n):
            if not run.log(*late, state):
                break
            late = None
            with run.line.pause():
                run.save_if_due(n, state)
                run.stop_if_asked()
                run.evaluate_if_due(n, state)
    return state


def steps(
    plan: training_step.Plan,
    step: Callable[..., tuple[training_step.State, dict]],
    state: training_step.State,
    data: Iterator,
    *,
    start: int,
    alive: np.ndarray = np.True_,
    place: Callable[[Mesh, Any], dict] = mesh.place_batch,
) -> Iterator[tuple[int, training_step.State, Any, dict]]:
    """For each step, which is under way by then: its number, the state behind it, its batch on the host, its metrics.

    alive: which of several runs are. place: puts a batch on the devices.
    """
    alive = distributed.put(alive, mesh.replicated(plan.mesh))
    for n in range(start + 1, plan.steps + 1):
        batch = next(data)
        state, metrics = step(state, place(plan.mesh, batch), alive)
        alive = metrics["alive"]
        yield n, state, batch, metrics


class Training:
    """What is done beside the steps: metrics are written, the model is evaluated and saved, signals heeded."""

    def __init__(
        self,
        plan: training_step.Plan,
        folder: pathlib.Path,
        runs: Sequence[pathlib.Path],
        saves: checkpoint.Checkpoints,
        *,
        start: int,
        line: log.Line,
        requests: signals.Requests,
        evaluate: Callable[..., dict],
        failed: Callable[..., None] | None = None,
        probe: Callable[[Any], dict] | None = None,
    ):
        """folder: named where it is said what is saved. runs: the folder of each.

        evaluate: (params, between) -> means, a number for each run. failed(n, state, batch, metrics): raises, where
        step n of a run alone was refused. Without it there are several runs, which are evaluated untrained too; one
        that fails stays as it is. probe: params -> what is logged beside an evaluation.
        """
        self.plan, self.line, self._folder, self._saves, self._requests = plan, line, folder, saves, requests
        self._failed, self._probe, self._means = failed, probe, evaluate
        self.final: dict[str, np.ndarray] = {}  # of the newest evaluation, a number for each run
        self._final_at = -1
        rows = [[row for row in log.read(run) if row["step"] == start] for run in runs]
        self._in_log = [any(f"{EVAL}{training_step.LOSS}" in row for row in of_run) for of_run in rows]  # at the start
        self._logs = [log.Log(run, start=start, beside=plan.log) for run in runs]
        # Of what is kept, in its manifests: a line of the log says nothing of a checkpoint that is still there.
        self._best = max((checkpoint.score(one, plan.keep_best) for one in saves.measured.values()), default=-math.inf)
        self._skipped, self._in_a_row = math.inf, 0
        self._saved, self._saved_at = start, time.monotonic()
        self._wish, self._wishes = 0, distributed.Late()

    def _due(self, what: str, n: int) -> bool:
        """Whether this happens after n steps by their number alone."""
        return due(n, every=self.plan.every[what], steps=self.plan.steps)

    def log(self, n: int, batch: Any, metrics: dict, state: training_step.State) -> bool:
        """Write what step n measured, and show the progress; False where no run is alive behind it.

        state: that before step n where it was refused, as later steps change nothing then. Raises RunError where steps
        are skipped again and again: their loss will not come back by itself.
        """
        metrics = jax.block_until_ready(metrics)
        if not np.any(jax.device_get(metrics["alive"])):
            if self._failed:
                self._failed(n, state, batch, metrics)
            return False
        if "skipped" in metrics:
            skipped = int(jax.device_get(metrics["skipped"]))
            self._in_a_row = self._in_a_row + 1 if skipped > self._skipped else 0
            self._skipped = skipped
            if self._in_a_row == SUSPECT and self._failed:
                nonfinite.check(n, state)
            if self._in_a_row >= PATIENCE:
                raise errors.RunError(
                    f"step {n:,}: {PATIENCE} steps in a row have been skipped, so nothing is learnt any more: go back"
                    " to an earlier checkpoint with a smaller optim.learning_rate"
                )
        loss = None
        if self._due("log", n):
            values = jax.device_get({name: x for name, x in metrics.items() if name != "alive"})
            of_probe = training_step.PROBE  # which belongs to no batch
            names = [x.removeprefix(of_probe) if x.startswith(of_probe) else f"train/{x}" for x in values]
            self._write(n, dict(zip(names, values.values(), strict=True)))
            losses = np.atleast_1d(values[training_step.LOSS])
            losses = losses[np.isfinite(losses)]
            loss = float(losses.mean()) if losses.size else math.nan
        self.line.advance(n, loss)
        return True

    def _write(self, n: int, columns: dict[str, Any], *, but: Sequence[bool] = ()) -> None:
        """A number for each run into the logs of all; but: not of these."""
        for r, writer in enumerate(self._logs):
            if not (but and but[r]):
                writer.write(n, {name: float(np.atleast_1d(column)[r]) for name, column in columns.items()})

    def pauses(self, n: int) -> bool:
        """Whether more follows on step n than its metrics. All processes give the same answer: a signal that comes
        during a step is heeded behind this one, with several processes behind the next."""
        self._saves.check()
        self._ask(self._wishes)
        return self._due("evaluate", n) or self._due("save", n) or self._wish > 0

    def _ask(self, wishes: distributed.Late) -> None:
        """Whether the processes save now, by the clock or for a signal, into `_wish`."""
        wish = self._requests.signal
        minutes = (time.monotonic() - self._saved_at) / 60
        if minutes >= self.plan.save_minutes and distributed.main():
            wish = wish or (0 if wishes.asked else SAVE)  # once: the save comes after the next question
        self._wish = wishes.agree(wish)

    def save_if_due(self, n: int, state: training_step.State) -> None:
        """Save where the number of steps, the clock or a signal asks for it: before an evaluation, which takes long."""
        if self._wish or self._due("save", n):
            self._save(n, state)

    def _save(self, n: int, state: training_step.State) -> None:
        if self._failed:  # of several runs, those that failed are kept as they are
            nonfinite.check(n, state)
        self._saves.save(n, state, self.alone() if self._final_at == n else None)
        self._saved, self._saved_at = n, time.monotonic()

    def stop_if_asked(self, *, anew: bool = False) -> None:
        """Raise Interrupted, behind a save, where a signal has come; anew: where one has by now."""
        if anew:
            self._wish = distributed.agree(self._requests.signal)
        if self._wish > SAVE:
            self._saves.wait()
            distributed.barrier()  # none leaves while another one writes
            where = f" after step {self._saved:,}, which is saved in {self._folder}" if self._saved else ""
            raise errors.Interrupted(f"stopped{where}", 128 + self._wish)

    def evaluate_if_due(self, n: int, state: training_step.State) -> None:
        """Evaluate, where it is time to, and save what is the best so far; where that fails, n steps all the same."""
        if not self._due("evaluate", n):
            return
        try:
            self.evaluate(n, state)
        except BaseException:
            if jax.process_count() == 1:  # where one of several fails, the others would not join in
                self._save(n, state)
            raise
        new = checkpoint.score(self.alone(), self.plan.keep_best)
        if distributed.agree(new > self._best) > 0:
            self._save(n, state)
        self._best = max(self._best, new)

    def evaluate_before(self, n: int, state: training_step.State) -> None:
        """Evaluate where what goes on from n steps was stopped before that or its result; also several new runs."""
        if not self._due("evaluate", n) if n else self._failed:
            return
        lost = not all(self._in_log) or (self._failed and not self._saves.measured.get(n))
        if n == self.plan.steps or distributed.agree(bool(lost)):
            with self.line.pause():
                self.evaluate(n, state, but=self._in_log)
        self._best = max(self._best, checkpoint.score(self.alone(), self.plan.keep_best))

    def evaluate_behind(self, state: training_step.State) -> None:
        """Evaluate where the last step did not come to it, as all runs have stopped."""
        if self._final_at != self.plan.steps:
            self.evaluate(self.plan.steps, state, saves=False)

    def evaluate(self, n: int, state: training_step.State, *, but: Sequence[bool] = (), saves: bool = True) -> None:
        """The means over the held-out part: into `final`, the logs, but for these, and the manifest of n steps.

        Saves meanwhile where it is time to, and `saves` is so, and raises Interrupted where a signal comes; all
        processes stop behind the same batch.
        """
        wishes, began = distributed.Late(), time.perf_counter()

        def between() -> None:
            self._ask(wishes)
            if self._wish and n and saves:
                self._save(n, state)
            self.stop_if_asked()

        means = self._means(state.params, between)
        self.line.evaluated(time.perf_counter() - began)
        self.final, self._final_at = {f"{EVAL}{name}": value for name, value in means.items()}, n
        self._write(n, self.final | (jax.device_get(self._probe(state.params)) if self._probe else {}), but=but)
        if self._failed:
            self._saves.note(n, self.alone())
            self.line.say(f"step {n:,}: " + ", ".join(f"{name} {x:.4f}" for name, x in self.alone().items()))

    def alone(self) -> dict[str, float]:
        """The newest evaluation of a run alone; of several runs nothing."""
        return {name: float(value) for name, value in self.final.items()} if self._failed else {}

    def close(self) -> None:
        with contextlib.ExitStack() as stack:  # all of them, also where one fails
            for writer in self._logs:
                stack.callback(writer.close)


def due(n: Any, *, every: int, steps: int) -> Any:
    """Whether what happens every so many steps (0: only at the end) does so after step n, which may be an array."""
    return (n == steps) | (n % every == 0) if every else n == steps


def times(n: int, *, every: int, steps: int) -> int:
    """How often what is `due` so comes from the end of step n on."""
    return 1 + ((steps - 1) // every - (n - 1) // every if every else 0)


def evaluation_work(task: training_step.Task, *, batch: int) -> float:
    """How many steps of so many examples an evaluation is worth: it goes forward only, a third of their FLOPs."""
    examples = len(task.evaluation) * len(jax.tree.leaves(task.evaluation[0])[0])
    return examples / (3 * batch)


def train_and_save(
    plan: training_step.Plan, step: Any, folder: pathlib.Path, *, flops: int, params: dict[str, np.ndarray]
) -> tuple[training_step.State, dict[str, float]]:
    """A run alone, from the newest checkpoint, or from step 0 (initial_state), to the end: its state, final metrics and
    throughput. RunError where numbers, the disk or a device stop it, Interrupted, behind a save, for a signal."""
    task, requests, batch = plan.task, signals.Requests(), plan.growth.sizes[0]
    with contextlib.ExitStack() as stack:  # what is opened is closed however this ends: a save under way is finished
        saves = checkpoint.Checkpoints(folder / "checkpoints", keep=plan.keep, best=plan.keep_best)
        stack.enter_context(contextlib.closing(saves))
        stack.enter_context(training_step.device_errors())
        like = training_step.abstract_state(task, plan.optimiser, mesh=plan.mesh)  # never two states at once
        start, state = saves.resume(like, fall_back=plan.fall_back) or (0, None)
        if state is None:
            state = training_step.initial_state(task, plan.optimiser, seed=plan.seed, mesh=plan.mesh, params=params)
        elif distributed.main():
            print(f"resuming {folder} at step {start:,}")
        peak = compilation.measured_peak(devices=plan.mesh)
        if distributed.main():
            print(f"  100 % of matrix-product speed is {peak / 1e9:,.0f} GFLOP/s: large float32 products, timed here")
        line = log.Progress(
            start=start,
            steps=plan.steps,
            tokens_per_step=batch * task.tokens_per_example,
            flops_per_step=flops,
            work=lambda n: plan.growth.before(n) / batch,
            evaluation=evaluation_work(task, batch=batch),
            evaluations=functools.partial(times, every=plan.every["evaluate"], steps=plan.steps),
            peak=peak,
        )
        stack.enter_context(contextlib.closing(line))
        evaluate = training_step.evaluator(task, plan.mesh)
        failed = functools.partial(nonfinite.abort, plan, folder, saves)
        beside = {"line": line, "requests": requests, "evaluate": evaluate, "failed": failed}
        training = Training(plan, folder, [folder], saves, start=start, **beside)
        stack.enter_context(contextlib.closing(training))
        with requests.collect():
            state = train(training, step, state, batches.iterate(task.train, start=start), start=start)
            training.stop_if_asked(anew=True)  # by a signal that came behind the last step
    skipped = int(jax.device_get(state.step - training_step.updates_made(state.opt_state)))
    more = {"tokens_per_second": line.tokens_per_second()} | ({"skipped": skipped} if plan.may_skip or skipped else {})
    return state, training.alone() | more

"""What happens beside the steps of training: metrics are written, the model is evaluated and saved, signals heeded."""

import contextlib
import pathlib
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from experiments.engine import (
    batches,
    checkpoint,
    compilation,
    debug,
    distributed,
    errors,
    guard,
    log,
    plan,
    replay,
    signals,
)
from experiments.engine import (
    step as steps,
)

EVAL = "eval/"  # begins the names of what an evaluation measures
SAVE = 1  # what the processes agree on after a step, beside the number of a signal, which is larger: the clock saves


class Beside:
    """What `steps.fit` calls: after each step, where it stops, and where a step failed."""

    def __init__(self, made: plan.Plan, folder: pathlib.Path, saves: checkpoint.Checkpoints, start: int, flops: int):
        self._made, self._folder, self._saves = made, folder, saves
        self.final: dict[str, float] = {}  # of the newest evaluation
        self._final_at = 0
        self.requests = signals.Requests()
        rows = [row for row in log.read(folder) if row["step"] <= start]
        # Of what is kept, in its manifests: a line of the log says nothing of a checkpoint that is still there.
        self._best = max((_score(found, made.keep_best) for found in saves.measured().values()), default=-np.inf)
        self._evaluated_before = any(
            row["step"] == start and any(name.startswith(EVAL) for name in row) for row in rows
        )
        self._writer = log.Log(folder, start=start)
        self._progress = log.Progress(
            start=start,
            steps=made.steps,
            tokens_per_step=made.growth.sizes[0] * made.task.tokens_per_example,
            flops_per_step=flops,
            work=lambda n: made.growth.before(n) / made.growth.sizes[0],
            evaluation=plan.evaluation_work(made.task, batch=made.growth.sizes[0]),
            evaluations=lambda n: plan.times(n, every=made.every["evaluate"], steps=made.steps),
            peak=compilation.measured_peak(devices=made.mesh),
        )
        self._evaluate = self._progress.timed(steps.evaluator(made.task, made.mesh))
        self._patience = guard.Patience()
        self._saved_at, self._wish, self._wishes = time.monotonic(), 0, distributed.Late()

    def due(self, what: str, n: int) -> bool:
        """Whether this happens after n steps by their number alone."""
        return plan.due(n, every=self._made.every[what], steps=self._made.steps)

    def on_metrics(self, n: int, metrics: dict) -> None:
        """Log, and show the progress."""
        if "skipped" in metrics:
            self._patience(n, int(jax.device_get(metrics["skipped"])))
        values = {}
        if self.due("log", n):
            values = {_called(name): float(value) for name, value in jax.device_get(metrics).items()}
            self._writer.write(n, values)
        self._progress.advance(n, values.get("train/loss"))

    def stops(self, n: int) -> bool:
        """Whether `on_stop` has something to do after n steps. All processes give the same answer.

        A signal that comes during a step is heeded behind this one, with several processes behind the next.
        """
        self._saves.check()
        self._ask(self._wishes)
        return self.due("evaluate", n) or self.due("save", n) or self._wish > 0

    def _ask(self, wishes: distributed.Late) -> None:
        """Whether the processes save now, by the clock or for a signal, into `_wish`."""
        wish = self.requests.signal
        minutes = (time.monotonic() - self._saved_at) / 60
        if self._made.save_minutes and minutes >= self._made.save_minutes and distributed.main():
            wish = wish or (0 if wishes.asked else SAVE)  # once: the save comes after the next question
        self._wish = wishes.agree(wish)

    def on_stop(self, n: int, state: steps.State) -> None:
        """Save and evaluate, where it is time to. Raises Interrupted where a signal has come.

        In this order: an evaluation may take long, and a signal ends it; then the run that goes on begins with it.
        """
        self._progress.pause()
        if self._wish or self.due("save", n):
            self._save(n, state)
        self.heed(n)
        if self.due("evaluate", n):
            with self._saved_anyway(n, state):
                self._report(n, state)
            if distributed.agree(_score(self.final, self._made.keep_best) > self._best) > 0:
                self._save(n, state)
            self._best = max(self._best, _score(self.final, self._made.keep_best))
        self._progress.resume()

    def _save(self, n: int, state: steps.State) -> None:
        self._saves.save(n, state, self.final if self._final_at == n else None)
        self._saved_at = time.monotonic()

    @contextlib.contextmanager
    def _saved_anyway(self, n: int, state: steps.State) -> Iterator[None]:
        """Where what is within this fails, the state after n steps is saved all the same."""
        with contextlib.ExitStack() as failed:
            if jax.process_count() == 1:  # where one of several fails, the others would not join in
                failed.callback(self._saves.save, n, state)
            yield
            failed.pop_all()

    def on_start(self, n: int, state: steps.State) -> None:
        """Evaluate where the run, which goes on from n steps, was stopped before that, or before its result."""
        if n == 0 or not self.due("evaluate", n):
            return
        self._progress.pause()
        if distributed.agree(not self._evaluated_before):
            self._report(n, state)
        elif n == self._made.steps or distributed.agree(not self._saves.measured().get(n)):
            self.evaluate(n, state)
        self._best = max(self._best, _score(self.final, self._made.keep_best))
        self._progress.resume()

    def _report(self, n: int, state: steps.State) -> None:
        """Evaluate, into the log too."""
        self.evaluate(n, state)
        self._writer.write(n, self.final)
        self._progress.say(f"step {n:,}: " + ", ".join(f"{name} {x:.4f}" for name, x in self.final.items()))

    def evaluate(self, n: int, state: steps.State) -> None:
        """The means over the held-out part, into `final` and to the checkpoint, if there is one of n steps.

        Saves, where it is time to, and raises Interrupted, behind a save, where a signal comes meanwhile. All processes
        stop behind the same batch.
        """
        wishes = distributed.Late()

        def between() -> None:
            self._ask(wishes)
            if self._wish:
                self._save(n, state)
                self.heed(n)

        means = self._evaluate(state.params, between)
        self.final, self._final_at = {f"{EVAL}{name}": value for name, value in means.items()}, n
        self._saves.note(n, self.final)

    def heed(self, n: int) -> None:
        """Raise Interrupted where a signal stops the run here, after n steps, which are saved."""
        if self._wish > SAVE:
            self._saves.wait()
            distributed.barrier()  # none leaves while another one writes
            raise errors.Interrupted(f"stopped after step {n:,}, which is saved in {self._folder}", 128 + self._wish)

    def on_failure(self, n: int, state: steps.State, batch: dict, metrics: dict) -> None:
        """Raise RunError: what was not finite in step n, and where a bundle lies with which it can be looked at.

        The state before it is saved, so that the run can go on without this step, or look at it again.
        """
        made = self._made
        loss, norm = jax.device_get((metrics[steps.LOSS], metrics["gradient_norm"]))
        seen = replay.Seen(n, float(loss), float(norm), batch)
        bundle = replay.write(self._folder, seen, state)
        place = self._kept_before(n, state)
        options = {"accumulation": made.accumulation, "state": state, "batch": batch}
        try:
            culprits = replay.examine(made.task, made.optimiser, made.mesh, **options).culprits
        except jax.errors.JaxRuntimeError:  # the devices have no room for it beside the run
            culprits = {}
        raise errors.RunError(
            f"{replay.sentence(seen, culprits)}; python launch.py --replay {bundle} shows it again on one device, and"
            f" the run can go on with train.nan = skip from {place}"
        )

    def _kept_before(self, n: int, state: steps.State) -> str:
        """Save the state before step n, and say where a run can go on."""
        if n == 1:
            return "its beginning"
        try:
            self._saves.save(n - 1, state)
            self._saves.wait()
        except errors.RunError as error:  # beside what went wrong before
            return f"its last checkpoint ({error})"
        return f"step {n - 1:,}, which is saved"

    def close(self) -> None:
        """End the live line and the log."""
        self._progress.close()
        self._writer.close()

    def tokens_per_second(self) -> float:
        return self._progress.tokens_per_second()


def _called(metric: str) -> str:
    """The name under which a step's metric is written; what a probe has found belongs to no batch."""
    return metric.removeprefix(steps.PROBE) if metric.startswith(steps.PROBE) else f"train/{metric}"


def _score(values: dict[str, Any], metric: str) -> float:
    """How good an evaluation is, larger for better; -inf where it says nothing about the metric."""
    value = values.get(metric)
    if value is None or not np.isfinite(value):
        return -np.inf
    return -value if checkpoint.BETTER[metric.rpartition("/")[2]] is min else value


def train_and_save(made: plan.Plan, state: steps.State, step: Any, folder: pathlib.Path, flops: int):
    """From the newest checkpoint, or from step 0, to the end: (state, final metrics and throughput).

    Raises RunError where numbers, the disk or a device stop it, and Interrupted for a signal, behind a save.
    """
    with contextlib.ExitStack() as stack:  # what is opened is closed however this ends: a save under way is finished
        saves = stack.enter_context(
            contextlib.closing(checkpoint.Checkpoints(folder / "checkpoints", keep=made.keep, best=made.keep_best))
        )
        start, state = saves.resume(state, fall_back=made.fall_back) or (0, state)
        if start and distributed.main():
            print(f"resuming {folder} at step {start:,}")
        beside = stack.enter_context(contextlib.closing(Beside(made, folder, saves, start, flops)))
        inputs = batches.iterate(made.task.train, start=start)
        with beside.requests.kept(), device_errors(), debug.on(made.debug):
            beside.on_start(start, state)
            state = steps.fit(
                state,
                debug.checked_step(step) if made.debug.check_shapes else step,
                debug.checked_batches(inputs) if made.debug.check_shapes else inputs,
                start=start,
                steps=made.steps,
                mesh=made.mesh,
                on_metrics=beside.on_metrics,
                stops=beside.stops,
                on_stop=beside.on_stop,
                on_failure=beside.on_failure,
            )
        late = distributed.agree(beside.requests.signal)
        if late:  # it came behind the last step
            raise errors.Interrupted(f"stopped after step {made.steps:,}, which is saved in {folder}", 128 + late)
    skipped = int(jax.device_get(state.step - guard.updates_made(state.opt_state)))
    more = {"tokens_per_second": beside.tokens_per_second()} | ({"skipped": skipped} if made.may_skip else {})
    return state, beside.final | more


@contextlib.contextmanager
def device_errors():
    """Within this, what XLA or a device reports is one sentence, a RunError."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        first = (str(error).strip().splitlines() or ["it says no more"])[0]
        if "RESOURCE_EXHAUSTED" in first:
            raise errors.RunError(
                "a device ran out of memory: --dry_run shows what the step needs; a smaller train.batch_size or"
                " train.evaluate_batch, a larger train.accumulation, model.remat = True or a larger mesh.fsdp needs"
                f" less ({first})"
            ) from error
        raise errors.RunError(f"a device, or the way to another one, failed: {first}") from error

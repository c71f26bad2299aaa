"""One program of a study: its runs trained together, from step 0 or the last checkpoint to the results of each."""

import contextlib
import functools
import pathlib
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from experiments.compiler import topology
from experiments.engine import batches, checkpoint, debug, disk, errors, log, loop, manifest, mesh, plan, signals
from experiments.engine import (
    step as steps,
)
from experiments.studies import initial, preparing, results, vmapped_runs
from experiments.studies.progress import Progress


def run(
    ready: preparing.Ready,
    folder: pathlib.Path,
    progress: Progress,
    *,
    measure: bool,
    requests: signals.Requests,
) -> None:
    """Train the runs of the program, or go on with them, and write what each has found into its folder.

    measure: look into scores and attention too. requests: those of the study; Interrupted, behind a save, where there
    is one.
    """
    program, made, of, began = ready.program, ready.made, ready.together, time.perf_counter()
    saved = disk.folder(folder, "checkpoints") / program.folder
    seeds = [row.seed for row in program.rows]
    numbers = {name: jnp.asarray(column) for name, column in program.numbers.items()}
    with contextlib.ExitStack() as stack:
        stack.enter_context(loop.device_errors())
        state = vmapped_runs.initial_state(of, seeds, numbers)
        begun = initial.sketches(state.params)
        start, state = _resumed(saved, state)
        saves = stack.enter_context(contextlib.closing(checkpoint.Checkpoints(saved, keep=2)))
        progress.go_on(start)
        alive = np.asarray(jax.device_get(state.step) == start)
        step, seconds = _compiled(ready, state, numbers)
        requests.heed()  # before anything is written
        beside = Beside(ready, folder, saves, start, progress, measure, requests)
        stack.enter_context(contextlib.closing(beside))
        with debug.on(made.debug):
            beside.on_start(start, state)
            state = steps.fit(
                state,
                lambda state, batch, alive: step(state, batch, alive, numbers),
                _batches(ready, start),
                start=start,
                steps=made.steps,
                mesh=of.mesh,
                on_metrics=beside.on_metrics,
                stops=beside.stops,
                on_stop=beside.on_stop,
                on_failure=lambda *_: None,  # all have stopped
                place=mesh.place_rows,
                alive=alive,
            )
            beside.on_end(state)
        took = {"compile_seconds": seconds}
        if not start:  # else it would be that of the last part
            took["wall_seconds"] = (time.perf_counter() - began) / len(program.rows)
        results.write(
            ready,
            state,
            beside.final,
            folder,
            measure=measure,
            begun=begun,
            seconds=took,
            before=beside.heed,
        )
    shutil.rmtree(saved)  # behind the results: no one goes on from here


def _resumed(saved: pathlib.Path, state: steps.State) -> tuple[int, steps.State]:
    """The step and state of the checkpoint; 0 and the initial state where there is none, or only a damaged one."""
    with contextlib.closing(checkpoint.Checkpoints(saved, keep=2)) as saves:
        try:
            return saves.resume(state, fall_back=True) or (0, state)
        except manifest.Damaged as error:
            print(f"these runs begin anew: their checkpoint cannot be used ({error})", flush=True)
    aside = saved.with_name(saved.name + manifest.DAMAGED)
    disk.remove(aside)
    saved.rename(aside)
    return 0, state


def _batches(ready: preparing.Ready, start: int) -> Iterator[list[dict]]:
    """For every step the batches of all rows. Rows of the same seed have the same."""
    inputs = {seed: batches.iterate(task.train, start=start) for seed, task in ready.tasks.items()}
    while True:
        now = {seed: next(of_seed) for seed, of_seed in inputs.items()}
        yield [now[row.seed] for row in ready.program.rows]


def _compiled(ready: preparing.Ready, state: steps.State, numbers: dict) -> tuple[Callable, float]:
    """The step of all rows, compiled unless debug says otherwise, and the seconds it took."""
    step, began = vmapped_runs.step(ready.together), time.perf_counter()
    if not ready.made.debug.compiles_ahead:
        return step, 0.0
    return step.lower(state, *_abstract(ready), numbers).compile(), time.perf_counter() - began


def _abstract(ready: preparing.Ready) -> tuple[dict, jax.ShapeDtypeStruct]:
    """The step's batch, and which rows are alive."""
    devices, rows = ready.together.mesh, len(ready.program.rows)
    batch = mesh.abstract_batch(devices, ready.together.task.train[0], rows=rows)
    return batch, steps.abstract_alive(devices, rows)


def described(one: preparing.Checked, devices: Mesh, *, batched: bool) -> Iterator[topology.Wanted]:
    """The step of a program and its evaluation, for chips that need not be there."""
    ready = preparing.prepare(one.program, devices, batched=batched)
    of, rows, numbers = ready.together, len(one.program.rows), one.program.numbers
    state = vmapped_runs.abstract_state(of, rows, numbers)
    held_out = mesh.abstract_batch(devices, of.task.evaluation[0])
    flops, size = one.flops * rows, len(jax.tree.leaves(held_out)[0]) / ready.made.growth.sizes[0]
    arguments, name = (state, *_abstract(ready), numbers), one.program.name
    yield topology.Wanted(f"step of {name}", vmapped_runs.step(of), arguments, 3 * flops)
    arguments = state.params, held_out
    yield topology.Wanted(f"evaluation of {name}", vmapped_runs.held_out(of), arguments, flops * size, beside=True)


class Beside:
    """What `steps.fit` calls: metrics of every row are written, all are evaluated and saved, signals heeded."""

    def __init__(
        self,
        ready: preparing.Ready,
        folder: pathlib.Path,
        saves: checkpoint.Checkpoints,
        start: int,
        progress: Progress,
        measure: bool,
        requests: signals.Requests,
    ):
        self._made, self._folder, self._saves, self._progress = ready.made, folder, saves, progress
        self._logs = [log.Log(folder / row.name, start=start) for row in ready.program.rows]
        before = [log.read(folder / row.name) for row in ready.program.rows]
        self._reported = [any(_evaluated(line, start) for line in lines) for lines in before]
        self._evaluate = progress.timed(vmapped_runs.evaluator(ready.together))
        task = ready.together.task
        self._probe = jax.jit(jax.vmap(task.probe)) if measure and task.probe else None
        self.final: dict[str, np.ndarray] = {}  # R numbers of every metric, of the newest evaluation
        self._final_at = -1
        self._requests = requests
        self._saved_at, self._saved, self._saves_now = time.monotonic(), start, False

    def due(self, what: str, n: int) -> bool:
        """Whether this happens after n steps by their number alone."""
        return bool(plan.due(n, every=self._made.every[what], steps=self._made.steps))

    def on_metrics(self, n: int, metrics: dict) -> None:
        """Log, and show the progress."""
        loss = None
        if self.due("log", n):
            found = jax.device_get(metrics)
            self._write(n, {f"train/{name}": column for name, column in found.items()})
            known = found[steps.LOSS][np.isfinite(found[steps.LOSS])]
            loss = float(known.mean()) if known.size else None
        self._progress.advance(n, loss)

    def _write(self, n: int, columns: dict[str, Any], done: Sequence[bool] = ()) -> None:
        """Into the logs of all rows, but for those that have it already."""
        for r, writer in enumerate(self._logs):
            if not (done and done[r]):
                writer.write(n, {name: float(column[r]) for name, column in columns.items()})

    def stops(self, n: int) -> bool:
        """Whether `on_stop` has something to do after n steps."""
        self._saves.check()
        self._saves_now = self.due("save", n) or self._clock_saves()
        return self.due("evaluate", n) or self._saves_now or self._requests.signal > 0

    def _clock_saves(self) -> bool:
        minutes = self._made.save_minutes
        return minutes > 0 and time.monotonic() - self._saved_at >= 60 * minutes

    def on_stop(self, n: int, state: steps.State) -> None:
        """Save and evaluate, where it is time to, in this order. Raises Interrupted where a signal has come."""
        self._progress.pause()
        if self._saves_now:
            self._save(n, state)
        self._stop(n, state)
        if self.due("evaluate", n):
            self._report(n, state, functools.partial(self._stop, n, state))
        self._progress.resume()

    def _save(self, n: int, state: steps.State) -> None:
        self._saves.save(n, state)
        self._saved_at, self._saved = time.monotonic(), n

    def _stop(self, n: int, state: steps.State) -> None:
        """Save, where a signal has come or the clock says so; raise Interrupted in the former case."""
        if n and (self._requests.signal or self._clock_saves()):
            self._save(n, state)
        self.heed()

    def heed(self) -> None:
        """Raise Interrupted where a signal stops the study here, behind a save."""
        if self._requests.signal:
            self._saves.wait()
            where = f" after step {self._saved:,}, which is saved in {self._folder}" if self._saved else ""
            raise errors.Interrupted(f"stopped{where}", 128 + self._requests.signal)

    def on_start(self, n: int, state: steps.State) -> None:
        """Evaluate the untrained models; and where a program was stopped before that, or before its results."""
        if not all(self._reported) and (n == 0 or self.due("evaluate", n)):
            self._report(n, state, functools.partial(self._stop, n, state), done=self._reported)
        elif n == self._made.steps:
            self.final, self._final_at = self._evaluate(state.params, self.heed), n

    def on_end(self, state: steps.State) -> None:
        """Evaluate, where the last step did not come to it: all rows have stopped."""
        if self._final_at != self._made.steps:
            self._report(self._made.steps, state, self.heed)

    def _report(self, n: int, state: steps.State, between: Callable[[], None], done: Sequence[bool] = ()) -> None:
        """Evaluate, into the logs of all rows but those that are done; between: called between two batches."""
        self.final, self._final_at = self._evaluate(state.params, between), n
        found = jax.device_get(self._probe(state.params)) if self._probe else {}
        self._write(n, {f"{loop.EVAL}{name}": column for name, column in self.final.items()} | found, done)

    def close(self) -> None:
        """End the logs."""
        with contextlib.ExitStack() as stack:  # all of them, also where one fails
            for writer in self._logs:
                stack.callback(writer.close)


def _evaluated(line: dict[str, Any], step: int) -> bool:
    """Whether this line of metrics.jsonl is an evaluation at this step."""
    return line["step"] == step and f"{loop.EVAL}{steps.LOSS}" in line

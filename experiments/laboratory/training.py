"""One program of a study: its runs trained together, from step 0 or the last checkpoint to the results of each."""

import contextlib
import functools
import io
import pathlib
import shutil
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from experiments.engine import (
    checkpoint,
    config,
    cost,
    debug,
    errors,
    interruption,
    log,
    loop,
    mesh,
    plan,
    together,
    train,
    workdir,
)
from experiments.engine.data import batches
from experiments.laboratory import attention, study
from experiments.laboratory.progress import Progress
from tfm import shapes

SAVE_MINUTES = 1.0  # between checkpoints, where the config says nothing


class Prepared(NamedTuple):
    """A program that has been checked and can be trained."""

    program: study.Program
    made: plan.Plan  # of the first run
    together: together.Together
    tasks: dict[int, train.Task]  # by seed
    params: int  # of one run
    flops: int  # of the forward pass for one batch of one run

    @property
    def work(self) -> float:
        """FLOPs of all steps of all runs."""
        return 3.0 * self.flops * self.made.steps * len(self.program.rows)


def prepare(program: study.Program, devices: Mesh, *, batched: bool) -> Prepared:
    """Data, model and optimiser of a program; the config of every run is checked. UserError says which arm is wrong."""
    row, spread = program.rows[0], devices.shape.get(mesh.SEED, 1)
    if len(program.rows) % spread:
        raise errors.UserError(
            f"the {len(program.rows)} runs of {program.name} do not divide evenly over mesh.seed = {spread}"
        )
    with naming(row):
        tasks = {one.seed: _task(one, devices) for one in reversed(program.rows)}
        made = plan.plan(row.settings, tasks[row.seed], devices)
        _check(row.settings, tasks[row.seed])
        growth = plan.growth_of(row.settings, devices)
    for one in program.rows:
        with naming(one):
            plan.optimiser(one.settings, growth)
    task = tasks[row.seed]
    optimiser = functools.partial(plan.optimiser, row.settings, growth)
    of = together.Together(task, optimiser, devices, made.accumulation, batched)
    params = jax.eval_shape(task.init, jax.random.key(0))
    flops = cost.flops(task.measure, params, task.train[0], None)
    return Prepared(program, made, of, tasks, shapes.total(params), flops)


@contextlib.contextmanager
def naming(row: study.Row) -> Iterator[None]:
    """Within this, a UserError says whose it is."""
    try:
        yield
    except errors.UserError as error:
        raise errors.UserError(f"condition {row.condition}, arm {row.arm}: {error}") from error


def _task(row: study.Row, devices: Mesh) -> train.Task:
    """The task of one run. What its experiment says of its data is the same for all, and left out."""
    with contextlib.redirect_stdout(io.StringIO()):
        return config.experiment(row.settings.experiment).prepare(row.settings, devices).task


def _check(settings: config.Settings, task: train.Task) -> None:
    """UserError for settings of a run that have no meaning in a study."""
    t = settings.train
    if t.growth or t.nan != "abort" or t.spike or t.keep_best:
        raise errors.UserError(
            "train.growth, nan, spike and keep_best are not for a study: leave them as they are in configs/base.py"
            " (a run whose numbers go wrong stops there, and the others go on)"
        )
    for key in ("device", "compilation_cache", *(f"mesh.{axis}" for axis in settings.mesh.to_dict())):
        functools.reduce(getattr, key.split("."), settings)  # the whole study has read it
    settings.refuse_unused()


def run(prepared: Prepared, folder: pathlib.Path, progress: Progress, number: int, *, measure: bool) -> None:
    """Train the runs of the program, or go on with them, and write what each has found into its folder.

    number: that of the program, for the progress. measure: look into scores and attention too.
    """
    program, made, of = prepared.program, prepared.made, prepared.together
    began = time.perf_counter()
    saved = folder / "checkpoints" / program.folder
    seeds = [row.seed for row in program.rows]
    numbers = {name: jnp.asarray(column) for name, column in program.numbers.items()}
    with contextlib.ExitStack() as stack:
        stack.enter_context(loop.device_errors())
        state = together.initial_state(of, seeds, numbers)
        saves = stack.enter_context(contextlib.closing(checkpoint.Checkpoints(saved, keep=1)))
        start, state = saves.resume(state, fall_back=made.fall_back) or (0, state)
        progress.begin(number, share=start / made.steps)
        alive = np.asarray(jax.device_get(state.step) == start)
        step, seconds = _compiled(prepared, state, alive, numbers)
        beside = stack.enter_context(contextlib.closing(Beside(prepared, folder, saves, start, progress, measure)))
        with beside.requests.kept(), debug.on(made.debug):
            beside.on_start(start, state)
            state = train.fit(
                state,
                lambda state, batch, alive: step(state, batch, alive, numbers),
                _batches(prepared, start),
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
        write(prepared, state, beside.final, folder, measure=measure, seconds=(time.perf_counter() - began, seconds))
    shutil.rmtree(saved)  # behind the results: no one goes on from here


def _batches(prepared: Prepared, start: int) -> Iterator[list[dict]]:
    """For every step the batches of all rows. Rows of the same seed have the same."""
    inputs = {seed: batches.iterate(task.train, start=start) for seed, task in prepared.tasks.items()}
    while True:
        now = {seed: next(of_seed) for seed, of_seed in inputs.items()}
        yield [now[row.seed] for row in prepared.program.rows]


def _compiled(prepared: Prepared, state: train.State, alive: np.ndarray, numbers: dict) -> tuple[Callable, float]:
    """The step of all rows, compiled unless debug says otherwise, and the seconds it took."""
    step, began = together.step(prepared.together), time.perf_counter()
    if not prepared.made.debug.compiles_ahead:
        return step, 0.0
    first = mesh.place_rows(prepared.together.mesh, next(_batches(prepared, 0)))
    alive = jax.device_put(alive, mesh.replicated(prepared.together.mesh))
    return step.lower(state, first, alive, numbers).compile(), time.perf_counter() - began


class Beside:
    """What `train.fit` calls: metrics of every row are written, all are evaluated and saved, signals heeded."""

    def __init__(
        self,
        prepared: Prepared,
        folder: pathlib.Path,
        saves: checkpoint.Checkpoints,
        start: int,
        progress: Progress,
        measure: bool,
    ):
        self._made, self._folder, self._saves, self._progress = prepared.made, folder, saves, progress
        self._logs = [log.Log(folder / row.name, start=start) for row in prepared.program.rows]
        before = log.read(folder / prepared.program.rows[0].name)
        self._reported = any(row["step"] == start and f"{loop.EVAL}{train.LOSS}" in row for row in before)
        self._evaluate = together.evaluator(prepared.together)
        task = prepared.together.task
        self._probe = jax.jit(jax.vmap(task.probe)) if measure and task.probe else None
        self.final: dict[str, np.ndarray] = {}  # R numbers of every metric, of the newest evaluation
        self._final_at = -1
        self.requests = interruption.Requests()
        self._saved_at = time.monotonic()

    def due(self, what: str, n: int) -> bool:
        """Whether this happens after n steps by their number alone."""
        return n == self._made.steps or (self._made.every[what] > 0 and n % self._made.every[what] == 0)

    def on_metrics(self, n: int, metrics: dict) -> None:
        """Log, and show the progress."""
        loss = None
        if self.due("log", n):
            found = jax.device_get(metrics)
            self._write(n, {f"train/{name}": column for name, column in found.items()})
            loss = float(np.nanmean(found[train.LOSS]))
        self._progress.advance(n, self._made.steps, loss)

    def _write(self, n: int, columns: dict[str, Any]) -> None:
        for r, writer in enumerate(self._logs):
            writer.write(n, {name: float(column[r]) for name, column in columns.items()})

    def stops(self, n: int) -> bool:
        """Whether `on_stop` has something to do after n steps."""
        minutes = (time.monotonic() - self._saved_at) / 60
        self._saves_now = self.due("save", n) or minutes >= (self._made.save_minutes or SAVE_MINUTES)
        return self.due("evaluate", n) or self._saves_now or self.requests.signal > 0

    def on_stop(self, n: int, state: train.State) -> None:
        """Evaluate and save, where it is time to. Raises Interrupted where a signal has come."""
        signal = self.requests.signal
        if self.due("evaluate", n):
            self._report(n, state)
        if self._saves_now or signal:
            self._saves.save(n, state)
            self._saved_at = time.monotonic()
        if signal:
            self._saves.wait()
            raise errors.Interrupted(f"stopped after step {n:,}, which is saved in {self._folder}", 128 + signal)

    def on_start(self, n: int, state: train.State) -> None:
        """Evaluate the untrained models; and at the end of a program that was stopped before its results."""
        if self._reported:
            self.final, self._final_at = self._evaluate(state.params), n
        elif n in (0, self._made.steps):
            self._report(n, state)

    def on_end(self, state: train.State) -> None:
        """Evaluate, where the last step did not come to it: all rows have stopped."""
        if self._final_at != self._made.steps:
            self._report(self._made.steps, state)

    def _report(self, n: int, state: train.State) -> None:
        self.final, self._final_at = self._evaluate(state.params), n
        found = jax.device_get(self._probe(state.params)) if self._probe else {}
        self._write(n, {f"{loop.EVAL}{name}": column for name, column in self.final.items()} | found)

    def close(self) -> None:
        """End the logs."""
        for writer in self._logs:
            writer.close()


def write(
    prepared: Prepared,
    state: train.State,
    final: dict[str, np.ndarray],
    folder: pathlib.Path,
    *,
    measure: bool,
    seconds: tuple[float, float],
) -> None:
    """summary.json of every run and, of the first seed, maps.npz. seconds: of the whole program, and of compiling."""
    rows, made, task = prepared.program.rows, prepared.made, prepared.together.task
    taken_R, each = jax.device_get(state.step), made.growth.sizes[0] * task.tokens_per_example
    look = attention.looking(task) if measure and task.maps else None
    for r, row in enumerate(rows):
        params = jax.device_get(jax.tree.map(lambda x, r=r: x[r], state.params))
        found, maps = look(params) if look else ({}, None)
        summary = {
            "experiment": row.settings.experiment,
            "condition": row.condition,
            "arm": row.arm,
            "seed": row.seed,
            "steps": made.steps,
            "params": prepared.params,
            "params_sha256": checkpoint.digest(params),
            **{f"{loop.EVAL}{name}": log.finite(column[r]) for name, column in final.items()},
            **{f"baseline/{name}": value for name, value in task.baseline.items()},
            "diverged_at": None if taken_R[r] == made.steps else int(taken_R[r]) + 1,
            "flops_per_token": prepared.flops / each,
            "wall_seconds": seconds[0] / len(rows),
            "compile_seconds": seconds[1],
            "together": len(rows),
            "devices": prepared.together.mesh.size,
            "backend": jax.default_backend(),
            "versions": mesh.versions(),
        } | ({"attention": found} if found else {})
        if maps is not None and row.seed == rows[0].seed:
            attention.save(folder / row.name / "maps.npz", maps)
        workdir.write_json(folder / row.name / "summary.json", summary)

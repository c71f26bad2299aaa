"""One program of a study: checked, then its runs trained together, from step 0 or a checkpoint to the results."""

import contextlib
import functools
import pathlib
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from experiments.compiler import topology
from experiments.engine import (
    batches,
    by_name,
    checkpoint,
    compilation,
    config,
    disk,
    distributed,
    errors,
    log,
    loop,
    mesh,
    optim,
    run as single,
    signals,
    train_step,
    workdir,
)
from experiments.pretrained import adapters, warm_start
from experiments.studies import attention, runs, study, vmapped_runs
from experiments.studies.progress import Progress
from tfm import shapes


class Checked(NamedTuple):
    """What is known of a program that can be trained. It holds no data: a study may have many programs."""

    program: study.Program
    lines: Sequence[str]  # of the experiment, about its data
    steps: int
    params: int  # of one run
    flops: int  # of the forward pass for one batch of one run
    evaluation: float  # how many steps one is worth
    every: int  # steps between evaluations
    data: dict[str, Any] = {}  # single.Work.data

    @property
    def step(self) -> float:
        """FLOPs of a step of all runs; never 0, which only a model without a matrix product would have."""
        return 3.0 * max(self.flops, 1) * len(self.program.runs)

    def ahead(self, n: int) -> tuple[float, float]:
        """FLOPs of all runs from the end of step n on: of steps, and of evaluations."""
        evaluations = loop.times(n, every=self.every, steps=self.steps)
        return self.step * (self.steps - n), self.step * self.evaluation * evaluations

    def __str__(self) -> str:
        each = f"{self.params:,} parameters each, {len(self.program.runs)} x {self.steps:,} steps of"
        return f"{self.program.name}: {each} {single.si(3 * self.flops, 'FLOP')}"


def check(program: study.Program, devices: Mesh, *, metric: str) -> Checked:
    """UserError, which says whose it is, where a run of the program could not be trained, or not be compared."""
    first_of = {run.arm: run for run in reversed(program.runs)}
    for run in reversed(first_of.values()):
        with study.naming(f"condition {run.condition}, arm {run.arm}"):
            work = _work(program, run.settings, devices)
            task, t = work.task, run.settings.train
            warm_start.load(run.settings, task.init, resumed=False, files=work.files)
            plan = single.plan(run.settings, task, devices)
            if t.growth or t.nan != "abort" or t.keep_best:
                raise errors.UserError(
                    "train.growth, nan and keep_best are not for a study: leave them as they are in"
                    " configs/base.py (a run whose numbers go wrong stops there, and the others go on)"
                )
            if metric not in (measured := single.measured(task)):
                raise errors.UserError(f"study.metric = {metric}, but what is measured is {', '.join(measured)}")
            for axis in run.settings.mesh.to_dict():
                getattr(run.settings.mesh, axis)  # the whole study has read it
            run.settings.refuse_unused()
    count = shapes.total(jax.eval_shape(task.init, jax.random.key(0)))
    evaluation, every = loop.evaluation_work(task, batch=plan.growth.sizes[0]), plan.every["evaluate"]
    return Checked(program, work.lines, plan.steps, count, _forward(task), evaluation, every, work.data)


def _work(program: study.Program, settings: config.Settings, devices: Mesh) -> single.Work:
    """What the experiment makes of a run's settings. UserError where it has no third part, and that is asked for."""
    work = adapters.prepared(settings, by_name.experiment(settings.experiment), devices)
    if not program.tuning:
        return work
    if work.task.tuning is None:
        raise errors.UserError(
            f'the experiment "{settings.experiment}" has no third part of its data, on which study.tune could choose: '
            "let its task have `tuning`, as task.parts makes it"
        )
    return work._replace(task=work.task._replace(**work.task.tuning(), baseline={}, guess={}))


def _forward(task: train_step.Task) -> int:
    """FLOPs of the forward pass of one run, for one batch."""
    params = jax.eval_shape(task.init, jax.random.key(0))
    return compilation.flops(task.loss, params, task.train[0])


class Ready(NamedTuple):
    """A program with its data."""

    plan: train_step.Plan  # of the first run
    vmapped: vmapped_runs.VmappedRuns
    tasks: dict[int, train_step.Task]  # by seed
    abstract: tuple[dict, jax.ShapeDtypeStruct]  # the step's batch, and which rows are alive
    work: single.Work  # of the first run, with what all begin with in place of random parameters


def prepare(program: study.Program, devices: Mesh) -> Ready:
    """The program, which was checked."""
    first, rows = program.runs[0], len(program.rows)
    of_seed = {run.seed: run.settings for run in program.runs}
    works = {seed: _work(program, settings, devices) for seed, settings in of_seed.items()}
    work = works[first.seed]
    with contextlib.redirect_stdout(None):  # `check` has told it
        start = warm_start.load(first.settings, work.task.init, resumed=False, files=work.files)
    plan = single.plan(first.settings, work.task, devices)
    optimiser = functools.partial(optim.optimiser, first.settings, plan.task.frozen)
    batched = vmapped_runs.side_by_side(devices, 3 * _forward(plan.task))
    vmapped = vmapped_runs.VmappedRuns(plan.task, optimiser, devices, plan.accumulation, batched)
    batch, alive = mesh.abstract_batch(devices, plan.task.train[0], rows=rows), train_step.abstract_alive(devices, rows)
    tasks = {seed: work.task for seed, work in works.items()}
    return Ready(plan, vmapped, tasks, (batch, alive), work._replace(params={**work.params, **start}))


def train(
    one: Checked,
    folder: pathlib.Path,
    devices: Mesh,
    progress: Progress,
    *,
    measure: bool,
    requests: signals.Requests,
    sources: dict[str, str],
    weights: bool = False,
) -> None:
    """Train the runs of the program, or go on with them, and write the results of each into its folder: summary.json,
    of the first seed maps.npz too.

    measure: look into scores and attention too. weights: keep them, as a run alone does. requests: those of the study;
    Interrupted, behind a save, where there is one. sources: SHA-256 of the user's own files.
    """
    program, saved = one.program, disk.folder(folder, "checkpoints") / one.program.folder
    ready = prepare(program, devices)
    requests.heed()
    plan, vmapped, began = ready.plan, ready.vmapped, time.perf_counter()
    numbers = {name: jnp.asarray(column_R) for name, column_R in program.numbers.items()}
    initial = functools.partial(vmapped_runs.initial_state, vmapped, [run.seed for run in program.rows], numbers)

    def begin() -> train_step.State:
        state = initial()
        return state.replace(params=distributed.put_into(state.params, ready.work.params))

    with contextlib.ExitStack() as stack:
        stack.enter_context(train_step.device_errors())
        start, state = 0, begin()
        begun = runs.sketches(state.params)
        saves = stack.enter_context(contextlib.closing(checkpoint.Checkpoints(saved, keep=2)))
        if saves.measured:
            del state  # never two at once
            start, state = saves.resume(initial(abstract=True))
        progress.go_on(start)
        compiled, compiling, seconds = vmapped_runs.step(vmapped), time.perf_counter(), 0.0
        if not (jax.config.jax_debug_nans or jax.config.jax_disable_jit):  # which look into what is not yet compiled
            compiled = compiled.lower(state, *ready.abstract, numbers).compile()
            seconds = time.perf_counter() - compiling
        requests.heed()  # before anything is written
        training = loop.Training(
            plan,
            folder,
            [folder / run.name for run in program.runs],
            saves,
            start=start,
            line=progress,
            requests=requests,
            evaluate=vmapped_runs.evaluator(vmapped),
            probe=jax.jit(jax.vmap(vmapped.task.probe)) if measure and vmapped.task.probe else lambda params: {},
        )
        stack.enter_context(contextlib.closing(training))
        if not start or training.is_due("evaluate", start):  # untrained runs too
            training.catch_up(start, state)
        inputs = zip(*(batches.iterate(task.train, start=start) for task in ready.tasks.values()), strict=True)
        seed_R = [list(ready.tasks).index(run.seed) for run in program.rows]
        state = loop.train(
            training,
            lambda state, batch, alive: compiled(state, batch, alive, numbers),
            state,
            ([batch[i] for i in seed_R] for batch in inputs),  # rows of the same seed have the same
            start=start,
            alive=np.asarray(jax.device_get(state.step) == start),
            place=mesh.place_rows,
        )
        training.finish(state)
        took: dict[str, Any] = {"compile_seconds": seconds, "sources": sources}
        if not start:  # else it would be that of the last part
            took["wall_seconds"] = (time.perf_counter() - began) / len(program.runs)
            took["seconds_per_step"] = (took["wall_seconds"] - seconds / len(program.runs)) / one.steps
        look = attention.observer(vmapped.task) if measure and vmapped.task.maps else None
        common, taken_R = _of_all(one, ready) | took, jax.device_get(state.step)
        for r, run in enumerate(program.runs):
            training.stop_if_requested(now=True)
            if weights:
                _keep(folder / run.name, ready.work.files, jax.tree.map(lambda x, r=r: x[r], state), one.steps)
            params = jax.device_get(jax.tree.map(lambda x, r=r: x[r], state.params))
            own: dict[str, Any] = {
                "condition": run.condition,
                "arm": run.arm,
                "seed": run.seed,
                "params_sha256": checkpoint.digest(params),
                **{name: log.finite(column[r]) for name, column in training.final.items()},
                "diverged_at": None if taken_R[r] == one.steps else int(taken_R[r]) + 1,
                "training_crc32": runs.crc32(ready.tasks[run.seed].train[0]),
                "initial": begun[r],
            }
            if look:
                own["attention"], A_MHNN = look(params)
                if run.seed == program.runs[0].seed:
                    with disk.draft(folder / run.name / "maps.npz") as file:
                        np.savez_compressed(file, A_MHNS=A_MHNN)
            disk.write_json(folder / run.name / "summary.json", own | common)  # last: it says that the run is finished
    shutil.rmtree(saved)  # behind the results: no one goes on from here


def _of_all(one: Checked, ready: Ready) -> dict[str, Any]:
    """What summary.json tells of all runs of the program alike."""
    task, devices = ready.vmapped.task, ready.vmapped.mesh
    held_out = task.evaluation
    return {
        "experiment": one.program.runs[0].settings.experiment,
        "steps": one.steps,
        "params": one.params,
        "flops_per_step": 3 * one.flops,
        "flops_per_token": one.flops / (ready.plan.growth.sizes[0] * task.tokens_per_example),
        **{f"baseline/{name}": value for name, value in task.baseline.items()},
        "guess": dict(task.guess),
        "data": list(one.lines),
        "data_sha256": ready.work.data_sha256,
        "evaluation_crc32": runs.crc32(held_out[0]) ^ len(held_out) ^ (runs.crc32(held_out[-1]) if held_out[1:] else 0),
        "together": len(one.program.runs),
        "devices": devices.size,
        "device": mesh.describe(devices),
        "backend": mesh.backend(devices),
        "versions": mesh.versions(),
        "commit": workdir.commit(),
    }


def _keep(folder: pathlib.Path, files: Mapping[str, bytes], row: train_step.State, steps: int) -> None:
    """The last checkpoint of a run, and its other files, in its folder, from which it is opened as a run alone."""
    for name, content in files.items():
        disk.write(folder / name, content)
    with contextlib.closing(checkpoint.Checkpoints(folder / "checkpoints", keep=1)) as saves:
        saves.save(steps, row)


def requests(one: Checked, devices: Mesh) -> Iterator[topology.Request]:
    """The step of a program and its evaluation, for chips that need not be there."""
    _, of, _, abstract, _ = prepare(one.program, devices)
    numbers, name = one.program.numbers, one.program.name
    state = vmapped_runs.initial_state(of, [run.seed for run in one.program.rows], numbers, abstract=True)
    held_out = mesh.abstract_batch(devices, of.task.evaluation[0])
    yield topology.Request(f"step of {name}", vmapped_runs.step(of), (state, *abstract, numbers))
    arguments = state.params, held_out
    yield topology.Request(f"evaluation of {name}", vmapped_runs.held_out(of), arguments)

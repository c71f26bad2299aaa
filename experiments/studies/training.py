"""One program of a study: its runs trained together, from step 0 or the last checkpoint to the results of each."""

import contextlib
import functools
import pathlib
import shutil
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from experiments.compiler import topology
from experiments.engine import batches, checkpoint, disk, loop, manifest, mesh, signals, step
from experiments.studies import initial, preparing, results, vmapped_runs
from experiments.studies.progress import Progress


def run(
    ready: preparing.Ready, folder: pathlib.Path, progress: Progress, *, measure: bool, requests: signals.Requests
) -> None:
    """Train the runs of the program, or go on with them, and write the results of each into its folder.

    measure: look into scores and attention too. requests: those of the study; Interrupted, behind a save, where there
    is one.
    """
    program, plan, vmapped, began = ready.program, ready.plan, ready.vmapped, time.perf_counter()
    saved = disk.folder(folder, "checkpoints") / program.folder
    numbers = {name: jnp.asarray(column) for name, column in program.numbers.items()}
    with contextlib.ExitStack() as stack:
        stack.enter_context(step.device_errors())
        start, state, begun = _begin(ready, saved, numbers)
        saves = stack.enter_context(contextlib.closing(checkpoint.Checkpoints(saved, keep=2)))
        progress.go_on(start)
        compiled, seconds = _compiled(ready, state, numbers)
        requests.heed()  # before anything is written
        task = vmapped.task
        training = loop.Training(
            plan,
            folder,
            [folder / run.name for run in program.runs],
            saves,
            start=start,
            line=progress,
            requests=requests,
            evaluate=vmapped_runs.evaluator(vmapped),
            probe=jax.jit(jax.vmap(task.probe)) if measure and task.probe else None,
        )
        stack.enter_context(contextlib.closing(training))
        state = loop.train(
            training,
            lambda state, batch, alive: compiled(state, batch, alive, numbers),
            state,
            _batches(ready, start),
            start=start,
            alive=np.asarray(jax.device_get(state.step) == start),
            place=mesh.place_rows,
        )
        training.evaluate_behind(state)
        took = {"compile_seconds": seconds}
        if not start:  # else it would be that of the last part
            took["wall_seconds"] = (time.perf_counter() - began) / len(program.runs)
        heed = functools.partial(training.stop_if_asked, anew=True)
        results.write(ready, state, training.final, folder, measure=measure, begun=begun, seconds=took, before=heed)
    shutil.rmtree(saved)  # behind the results: no one goes on from here


def _begin(ready: preparing.Ready, saved: pathlib.Path, numbers: dict) -> tuple[int, step.State, list[initial.Sketch]]:
    """The step and state of the checkpoint, or 0 and the initial state; and with which values every run began."""

    def fresh() -> step.State:
        return vmapped_runs.initial_state(ready.vmapped, [run.seed for run in ready.program.runs], numbers)

    state = fresh()
    begun = initial.sketches(state.params)
    if checkpoint.newest(saved) is None:
        return 0, state, begun
    del state  # never two at once
    like = vmapped_runs.abstract_state(ready.vmapped, len(ready.program.runs), numbers)
    start, state = _resumed(saved, like)
    return start, fresh() if state is None else state, begun


def _resumed(saved: pathlib.Path, like: step.State) -> tuple[int, step.State | None]:
    """The step and state of the checkpoint; 0 and None where there is only a damaged one."""
    with contextlib.closing(checkpoint.Checkpoints(saved, keep=2)) as saves:
        try:
            return saves.resume(like, fall_back=True) or (0, None)
        except manifest.Damaged as error:
            print(f"these runs begin anew: their checkpoint cannot be used ({error})", flush=True)
    aside = saved.with_name(saved.name + manifest.DAMAGED)
    disk.remove(aside)
    saved.rename(aside)
    return 0, None


def _batches(ready: preparing.Ready, start: int) -> Iterator[list[dict]]:
    """For every step the batches of all rows. Rows of the same seed have the same."""
    inputs = {seed: batches.iterate(task.train, start=start) for seed, task in ready.tasks.items()}
    while True:
        now = {seed: next(of_seed) for seed, of_seed in inputs.items()}
        yield [now[run.seed] for run in ready.program.runs]


def _compiled(ready: preparing.Ready, state: step.State, numbers: dict) -> tuple[Callable, float]:
    """The step of all runs, compiled but where JAX's own flags look into what is not, and the seconds it took."""
    jitted, began = vmapped_runs.step(ready.vmapped), time.perf_counter()
    if jax.config.jax_debug_nans or jax.config.jax_disable_jit:
        return jitted, 0.0
    return jitted.lower(state, *_abstract(ready), numbers).compile(), time.perf_counter() - began


def _abstract(ready: preparing.Ready) -> tuple[dict, jax.ShapeDtypeStruct]:
    """The step's batch, and which rows are alive."""
    devices, rows = ready.vmapped.mesh, len(ready.program.runs)
    batch = mesh.abstract_batch(devices, ready.vmapped.task.train[0], rows=rows)
    return batch, step.abstract_alive(devices, rows)


def described(one: preparing.Checked, devices: Mesh, *, batched: bool) -> Iterator[topology.Request]:
    """The step of a program and its evaluation, for chips that need not be there."""
    ready = preparing.prepare(one.program, devices, batched=batched)
    of, rows, numbers = ready.vmapped, len(one.program.runs), one.program.numbers
    state = vmapped_runs.abstract_state(of, rows, numbers)
    held_out = mesh.abstract_batch(devices, of.task.evaluation[0])
    flops, size = one.flops * rows, len(jax.tree.leaves(held_out)[0]) / ready.plan.growth.sizes[0]
    arguments, name = (state, *_abstract(ready), numbers), one.program.name
    yield topology.Request(f"step of {name}", vmapped_runs.step(of), arguments, 3 * flops)
    arguments = state.params, held_out
    yield topology.Request(f"evaluation of {name}", vmapped_runs.held_out(of), arguments, flops * size, beside=True)

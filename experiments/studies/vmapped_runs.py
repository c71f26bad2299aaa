"""Several runs as one program: the states of R runs are rows of the same arrays, and one step updates them all.

A row is trained as the run would be alone: batches and initial values come from its seed. Rows can differ in learning
rate, weight decay and initial scale. If a row is no longer finite, its state stays as it is, and the others continue.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from experiments.devices import compilation, mesh as meshes
from experiments.engine import train_step

Numbers = dict[str, np.ndarray]  # field of studies.NUMBERS -> R numbers
OPTIMISER = ("learning_rate", "weight_decay")  # arguments of the optimiser; the other numbers are arguments of init

# FLOPs of a run's step above which a TPU computes runs one after the other. For eight runs side by side on v5e-1,
# libtpu 0.0.50 expects 4.5 times the time of one run at 4e9 FLOPs, and 12 times at 4e10, where VMEM is too small.
LARGE = 1e10


class VmappedRuns(NamedTuple):
    """The common properties of runs whose arrays have a row for each run, and how the rows are computed."""

    task: train_step.Task  # of one run: model and measures are the same in all
    # (learning_rate and weight_decay, if they differ between rows) -> (optax.Schedule, optax.GradientTransformation)
    optimiser: Callable
    mesh: Mesh
    accumulation: int  # microbatches of a step
    batched: bool  # rows side by side in every operation (vmap), or one after the other in a loop (lax.map)


def side_by_side(mesh: Mesh, flops: float) -> bool:
    """Return True if runs are computed side by side: with a mesh axis `seed`, or on GPUs, or on TPUs for small runs.

    flops: of a step of a run. A run is small up to LARGE.
    """
    busy = meshes.backend(mesh) == "tpu" and flops > LARGE
    return meshes.SEED in mesh.axis_names or (meshes.side_by_side(mesh) and not busy)


def over_rows(runs: VmappedRuns, function: Callable) -> Callable:
    """Return the function of a run, mapped over R rows of its arguments by jax.vmap or, one by one, by jax.lax.map."""
    return jax.vmap(function) if runs.batched else lambda *rows: jax.lax.map(lambda row: function(*row), rows)


def sharded(function: Callable, mesh: Mesh, *, in_specs: Any, out_specs: Any = meshes.WHOLE) -> Callable:
    """Return the shard_map of a function (`meshes.sharded`), in a form that jax.vmap can map over runs.

    If the mesh has an axis `seed`, the runs are sharded over it.
    """
    single = meshes.sharded(function, mesh, in_specs=in_specs, out_specs=out_specs)
    if meshes.SEED not in mesh.axis_names:
        return single
    # jax.vmap(jax.shard_map(...), spmd_axis_name=SEED) fails its own check_vma (JAX 0.8 to 0.12): define the vmap.
    batched = jax.custom_batching.custom_vmap(single)

    def add_seed_axis(spec: PartitionSpec, row: bool = True) -> PartitionSpec:
        return PartitionSpec(meshes.SEED, *spec) if row else spec

    @batched.def_vmap
    def map_runs(size: int, has_rows: Any, *arguments: Any) -> tuple[Any, Any]:
        specs = jax.tree.broadcast(tuple(in_specs), arguments, is_leaf=meshes.is_spec)
        rows_in = jax.tree.map(add_seed_axis, specs, tuple(has_rows), is_leaf=meshes.is_spec)
        rows_out = jax.tree.map(add_seed_axis, out_specs, is_leaf=meshes.is_spec)

        def local(*arguments: Any) -> Any:
            run = function if meshes.side_by_side(mesh) else jax.custom_batching.sequential_vmap(function)
            return jax.vmap(run, in_axes=jax.tree.map(lambda row: 0 if row else None, has_rows))(*arguments)

        rows = meshes.sharded(local, mesh, in_specs=rows_in, out_specs=rows_out)(*arguments)
        return rows, jax.tree.map(lambda _: True, rows)

    return batched


def initial_state(runs: VmappedRuns, seeds: Sequence[int], numbers: Numbers, *, abstract=False) -> train_step.State:
    """Return the state of all runs at step 0, R rows in each leaf. abstract: only shapes, dtypes and shardings.

    seeds: one for each row. numbers: only "score_std" is used.
    """
    _, optimiser = runs.optimiser()

    def init_run(key: jax.Array, initial: dict) -> train_step.State:
        return train_step.init_state(runs.task, optimiser, key, **initial)

    make, initial = over_rows(runs, init_run), {name: x_R for name, x_R in numbers.items() if name not in OPTIMISER}
    keys_R = jnp.stack([jax.random.key(seed) for seed in seeds])
    shape = jax.eval_shape(make, keys_R, initial)
    places = meshes.shardings(runs.mesh, shape, runs.task.layout, rows=True)
    if abstract:
        return jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shape, places)
    options = compilation.run_once_options(runs.mesh)
    return jax.jit(make, out_shardings=places, compiler_options=options)(keys_R, initial)


def step(runs: VmappedRuns) -> Callable[..., tuple[train_step.State, dict]]:
    """Return the jitted step of all runs, (state, batch, alive_R, numbers) -> (state, metrics); donates the state.

    Each array has a row for each of R runs. alive_R: False for runs whose state must not change. numbers: arrays by
    name, of which only learning_rate and weight_decay are used.
    """

    def step_run(state: train_step.State, batch: dict, alive: jax.Array, numbers: dict) -> tuple:
        rate, optimiser = runs.optimiser(**{name: x for name, x in numbers.items() if name in OPTIMISER})
        options = {"mesh": runs.mesh, "accumulation": runs.accumulation, "sharded": sharded}
        return train_step.train_step(state, batch, alive, task=runs.task, optimiser=optimiser, rate=rate, **options)

    def rows(state: train_step.State, *arguments: Any) -> tuple[train_step.State, dict]:
        new, metrics = over_rows(runs, step_run)(state, *arguments)
        places = meshes.shardings(runs.mesh, new, runs.task.layout, rows=True)
        whole = jax.tree.map(lambda _: meshes.replicated(runs.mesh), metrics)
        return jax.lax.with_sharding_constraint((new, metrics), (places, whole))  # the state stays on its devices

    deterministic = compilation.deterministic_options(runs.mesh, runs.task.deterministic)
    return jax.jit(rows, donate_argnums=0, compiler_options=meshes.compiler_options(runs.mesh) | deterministic)


def held_out(runs: VmappedRuns) -> Callable[[Any, dict], train_step.Ratios]:
    """Return the jitted function (params of all runs, held-out batch for all) -> {metric: (sum_R, count_R)}."""
    sums = train_step.make_held_out(runs.task, runs.mesh, sharded=sharded)
    options = compilation.deterministic_options(runs.mesh, runs.task.deterministic)
    return jax.jit(
        lambda params, batch: over_rows(runs, lambda params: sums(params, batch))(params), compiler_options=options
    )


def evaluator(runs: VmappedRuns) -> Callable[[Any], dict[str, np.ndarray]]:
    """Return a function: params of all rows -> the exact mean of each measure over the held-out data (R,)."""
    return functools.partial(train_step.evaluate, runs.task, runs.mesh, held_out(runs))

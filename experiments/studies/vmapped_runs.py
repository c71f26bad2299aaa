"""Several runs as one program: the states of R runs are rows of the same arrays, and one step updates them all.

A row is trained as it would be alone: batches and initial values come from its seed. Rows can differ in numbers:
learning rate, weight decay, initial scale. If a row is no longer finite, its state stays, and the others go on.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from experiments.engine import compilation, mesh as meshes, train_step as steps
from tfm import shapes

Numbers = dict[str, np.ndarray]  # name -> R numbers
OPTIMISER = ("learning_rate", "weight_decay")  # numbers of the optimiser; the others are of the initial values

# FLOPs of a run's step from which on a TPU computes runs one after the other. Eight side by side libtpu 0.0.50 expects
# to take 4.5 times one's time with 4e9 FLOPs (v5e-1), and 12 times with 4e10, which no longer stay in the fast memory.
LARGE = 1e10


class VmappedRuns(NamedTuple):
    """Properties that the runs share, and how their rows are computed."""

    task: steps.Task  # of any of the runs: model and measures are the same
    optimiser: Callable[..., tuple[optax.Schedule, optax.GradientTransformation]]  # by learning_rate, weight_decay
    mesh: Mesh
    accumulation: int
    batched: bool  # rows side by side in every operation (vmap), or one after the other in a loop (lax.map)


def side_by_side(mesh: Mesh, flops: float) -> bool:
    """Decide whether rows are computed side by side. flops: of a step of one run.

    True if devices share the rows. Else False on a CPU, and on a TPU if one run keeps it busy.
    """
    enough = meshes.backend(mesh) == "tpu" and flops > LARGE
    return meshes.SEED in mesh.axis_names or (meshes.side_by_side(mesh) and not enough)


def over_rows(runs: VmappedRuns, function: Callable) -> Callable:
    """Map the function of one run over R rows of every argument's leaves."""
    return jax.vmap(function) if runs.batched else lambda *rows: jax.lax.map(lambda row: function(*row), rows)


def sharded(function: Callable, mesh: Mesh, *, in_specs: Any, out_specs: Any = meshes.WHOLE) -> Callable:
    """Return the function as `sharded` of engine/mesh.py does, made for jax.vmap over runs.

    If the mesh has the axis `seed`, jax.vmap spreads the runs over the devices along it.
    """
    single = meshes.sharded(function, mesh, in_specs=in_specs, out_specs=out_specs)
    if meshes.SEED not in mesh.axis_names:
        return single
    # Written out: jax.vmap(jax.shard_map(...), spmd_axis_name=SEED) trips over its own check_vma (JAX 0.8 to 0.12).
    batched = jax.custom_batching.custom_vmap(single)

    def of_rows(spec: PartitionSpec, row: bool = True) -> PartitionSpec:
        return PartitionSpec(meshes.SEED, *spec) if row else spec

    @batched.def_vmap
    def of_runs(size: int, has_rows: Any, *arguments: Any) -> tuple[Any, Any]:
        specs = jax.tree.broadcast(tuple(in_specs), arguments, is_leaf=meshes.is_spec)
        rows_in = jax.tree.map(of_rows, specs, tuple(has_rows), is_leaf=meshes.is_spec)
        rows_out = jax.tree.map(of_rows, out_specs, is_leaf=meshes.is_spec)

        def local(*arguments: Any) -> Any:
            run = function if meshes.side_by_side(mesh) else jax.custom_batching.sequential_vmap(function)
            return jax.vmap(run, in_axes=jax.tree.map(lambda row: 0 if row else None, has_rows))(*arguments)

        rows = meshes.sharded(local, mesh, in_specs=rows_in, out_specs=rows_out)(*arguments)
        return rows, jax.tree.map(lambda _: True, rows)

    return batched


def initial_state(runs: VmappedRuns, seeds: Sequence[int], numbers: Numbers, *, abstract: bool = False) -> steps.State:
    """Return the state at step 0 of all runs, R rows of each leaf, on its devices.

    abstract: return shapes, types and shardings only.
    """
    _, optimiser = runs.optimiser()

    def init_run(key: jax.Array, initial: dict) -> steps.State:
        params = runs.task.init(key, **initial)
        return steps.State(step=jnp.int32(0), params=params, opt_state=optimiser.init(params), key=key)

    make, initial = over_rows(runs, init_run), {name: x_R for name, x_R in numbers.items() if name not in OPTIMISER}
    keys_R = jnp.stack([jax.random.key(seed) for seed in seeds])
    shape = jax.eval_shape(make, keys_R, initial)
    places = shardings(runs, shape)
    if abstract:
        return jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shape, places)
    return jax.jit(make, out_shardings=places, compiler_options=compilation.for_one_run(runs.mesh))(keys_R, initial)


def shardings(runs: VmappedRuns, rows: Any) -> Any:
    """Return the sharding of each leaf of a state, from the letters of its name after the row axis."""
    specs = shapes.specs(rows, runs.task.layout.rules)
    place = functools.partial(meshes.add_row_axis, runs.mesh)
    return jax.tree.map(lambda spec: NamedSharding(runs.mesh, place(spec)), specs, is_leaf=meshes.is_spec)


def step(runs: VmappedRuns) -> Callable[..., tuple[steps.State, dict]]:
    """Return the jitted step of all rows, (state, batch, alive_R, numbers) -> (state, metrics); donates the state."""

    def step_run(state: steps.State, batch: dict, alive: jax.Array, numbers: dict) -> tuple[steps.State, dict]:
        rate, optimiser = runs.optimiser(**{name: x for name, x in numbers.items() if name in OPTIMISER})
        options = {"mesh": runs.mesh, "accumulation": runs.accumulation, "sharded": sharded}
        return steps.train_step(state, batch, alive, task=runs.task, optimiser=optimiser, rate=rate, **options)

    def rows(state: steps.State, *arguments: Any) -> tuple[steps.State, dict]:
        new, metrics = over_rows(runs, step_run)(state, *arguments)
        places = shardings(runs, new), jax.tree.map(lambda _: meshes.replicated(runs.mesh), metrics)
        return jax.lax.with_sharding_constraint((new, metrics), places)  # the state where it was

    return jax.jit(rows, donate_argnums=0, compiler_options=meshes.compiler_options(runs.mesh))


def held_out(runs: VmappedRuns) -> Callable[[Any, dict], steps.Ratios]:
    """Return the jitted function of `steps.make_held_out` for the parameters of all rows."""
    sums = steps.make_held_out(runs.task, runs.mesh, sharded=sharded)
    return jax.jit(lambda params, batch: over_rows(runs, lambda params: sums(params, batch))(params))


def evaluator(runs: VmappedRuns) -> Callable[[Any], dict[str, np.ndarray]]:
    """Return params of all rows -> the exact mean of each measure over the held-out data, R numbers."""
    return functools.partial(steps.evaluate, runs.task, runs.mesh, held_out(runs))

"""Several runs as one program: the state of each is a row of the same arrays (R of them), and one step takes them all.

A row is trained as it would be alone: on batches of its own seed, from initial values of its own seed, with the numbers
(learning rate, weight decay, initial scale) in which it differs from the others. A row whose numbers are no longer
finite stays as it is, and the others go on.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding

from experiments.engine import compilation
from experiments.engine import mesh as meshes
from experiments.engine import step as steps
from tfm import shapes

Numbers = dict[str, np.ndarray]  # name -> R numbers
OPTIMISER = ("learning_rate", "weight_decay")  # numbers of the optimiser; the others are of the initial values


class VmappedRuns(NamedTuple):
    """What the runs have in common, and how they are computed."""

    task: steps.Task  # of any of the runs: model and measures are the same
    optimiser: Callable[..., tuple[optax.Schedule, optax.GradientTransformation]]  # by learning_rate, weight_decay
    mesh: Mesh
    accumulation: int
    batched: bool  # rows side by side in every operation (vmap), or one after the other in a loop (lax.map)


def over_rows(of: VmappedRuns, function: Callable) -> Callable:
    """The function of one run, for all of them; every argument's leaves have R rows."""
    return jax.vmap(function) if of.batched else lambda *rows: jax.lax.map(lambda row: function(*row), rows)


def initial_state(of: VmappedRuns, seeds: Sequence[int], numbers: Numbers) -> steps.State:
    """The state of step 0 of every run, R rows of each leaf, on the devices that are to hold it."""
    make, initial = _initial(of, numbers)
    keys_R = jnp.stack([jax.random.key(seed) for seed in seeds])
    places, options = shardings(of, jax.eval_shape(make, keys_R, initial)), compilation.for_one_run(of.mesh)
    return jax.jit(make, out_shardings=places, compiler_options=options)(keys_R, initial)


def abstract_state(of: VmappedRuns, rows: int, numbers: Numbers) -> steps.State:
    """Shapes, types and places of `initial_state` of so many runs."""
    make, initial = _initial(of, numbers)
    shape = jax.eval_shape(lambda initial: make(jax.random.split(jax.random.key(0), rows), initial), initial)
    return jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shape, shardings(of, shape)
    )


def _initial(of: VmappedRuns, numbers: Numbers) -> tuple[Callable[..., steps.State], Numbers]:
    """(keys_R, initial numbers) -> the state of every run, and these numbers."""
    _, optimiser = of.optimiser()

    def one(key: jax.Array, initial: dict) -> steps.State:
        params = of.task.init(key, **initial)
        return steps.State(step=jnp.int32(0), params=params, opt_state=optimiser.init(params), key=key)

    return over_rows(of, one), {name: x_R for name, x_R in numbers.items() if name not in OPTIMISER}


def shardings(of: VmappedRuns, rows: Any) -> Any:
    """Where the leaves of such a state lie, by the letters of their names behind the rows."""
    specs = shapes.specs(rows, of.task.layout.rules)
    place = functools.partial(meshes.of_rows, of.mesh)
    return jax.tree.map(lambda spec: NamedSharding(of.mesh, place(spec)), specs, is_leaf=meshes.is_spec)


def step(of: VmappedRuns) -> Callable[..., tuple[steps.State, dict]]:
    """The jitted step of all rows: (state, batch, alive_R, numbers) -> (state, metrics); the old state is donated."""

    def one(state: steps.State, batch: dict, alive: jax.Array, numbers: dict) -> tuple[steps.State, dict]:
        rate, optimiser = of.optimiser(**{name: x for name, x in numbers.items() if name in OPTIMISER})
        return steps.one_step(of.task, optimiser, rate, of.mesh, accumulation=of.accumulation)(state, batch, alive)

    def rows(state: steps.State, *arguments: Any) -> tuple[steps.State, dict]:
        new, metrics = over_rows(of, one)(state, *arguments)
        places = shardings(of, new), jax.tree.map(lambda _: meshes.replicated(of.mesh), metrics)
        return jax.lax.with_sharding_constraint((new, metrics), places)  # the state where it was

    return jax.jit(rows, donate_argnums=0)


def evaluator(of: VmappedRuns) -> Callable[[Any], dict[str, np.ndarray]]:
    """The parameters of all rows -> of each the exact mean of every measure over the held-out part, R numbers."""
    return functools.partial(steps.evaluate, of.task, of.mesh, held_out(of))


def held_out(of: VmappedRuns) -> Callable[[Any, dict], steps.Ratios]:
    """`steps.held_out` of the parameters of all rows, jitted."""
    sums = steps.held_out(of.task, of.mesh)

    def rows(params: Any, batch: dict) -> steps.Ratios:
        return over_rows(of, lambda params: sums(params, batch))(params)

    return jax.jit(rows)

"""The one training loop: every experiment hands it a Task and calls it."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import flax.struct
import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from experiments.engine import mesh as meshes
from tfm import shapes

Ratios = dict[str, tuple[jax.Array, jax.Array]]  # name -> (sum, count)
LOSS = "loss"
RUNNING = "running/"  # begins the names of statistics that a parameter follows
MOMENTUM = 0.9  # of running averages, for each step


class Task(NamedTuple):
    """What an experiment hands to the loop."""

    init: Callable[[jax.Array], Any]  # random key -> parameters
    # (params, batch, key_B) -> sums and counts; 'loss' is minimised. key_B: a random key for each example in training,
    # None in evaluation. What is called 'running/<path>' is followed by the parameter at that path (`running`).
    measure: Callable[[Any, dict, jax.Array | None], Ratios]
    train: grain.MapDataset  # train[step] is the batch of that step
    evaluation: grain.MapDataset  # every held-out example once
    tokens_per_example: int  # for the throughput
    baseline: dict[str, float]  # what a guess that ignores the input reaches, by the names of `measure`


@flax.struct.dataclass
class State:
    """All that training changes."""

    step: jax.Array
    params: Any
    opt_state: Any
    key: jax.Array


def initial_state(task: Task, optimiser: optax.GradientTransformation, *, seed: int, mesh: Mesh) -> State:
    """The state of step 0, whole on every device."""

    def make() -> State:
        key = jax.random.key(seed)
        params = task.init(key)
        return State(step=jnp.int32(0), params=params, opt_state=optimiser.init(params), key=key)

    return jax.jit(make, out_shardings=meshes.replicated(mesh))()


def gradient(task: Task, mesh: Mesh, *, accumulation: int) -> Callable:
    """(params, batch, key) -> (gradient, metrics) of psum(sums) / psum(counts), whole on every device.

    Every device adds up its share and `psum` adds the devices, numerator and denominator apart, so unequal numbers of
    masked tokens are right. Differentiating a psum inside shard_map gives the summed gradient of a parameter that all
    devices hold: no other collective is needed. Accumulation adds the parts' sums before the one division.
    """

    def sums(params: Any, part: dict, key_B: jax.Array) -> tuple[jax.Array, Ratios]:
        ratios = jax.tree.map(lambda x: jax.lax.psum(x, meshes.DATA), task.measure(params, part, key_B))
        return ratios[LOSS][0], ratios

    def one_part(params: Any, part: dict, key_B: jax.Array) -> tuple[Any, Ratios]:
        grads, ratios = jax.grad(sums, has_aux=True)(params, part, key_B)
        return grads, ratios

    def local(params: Any, batch: dict, key: jax.Array) -> tuple[Any, dict]:
        key_B = meshes.keys(key, len(jax.tree.leaves(batch)[0]))
        if accumulation == 1:
            grads, ratios = one_part(params, batch, key_B)
        else:
            parts = jax.tree.map(lambda x: x.reshape(accumulation, -1, *x.shape[1:]), (batch, key_B))

            def add(total: Any, part: Any) -> tuple[Any, None]:
                return jax.tree.map(jnp.add, total, one_part(params, *part)), None

            abstract = jax.eval_shape(one_part, params, *jax.tree.map(lambda x: x[0], parts))
            zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), abstract)
            (grads, ratios), _ = jax.lax.scan(add, zeros, parts)
        metrics = {name: total / jnp.maximum(count, 1) for name, (total, count) in ratios.items()}
        return jax.tree.map(lambda g: g / jnp.maximum(ratios[LOSS][1], 1), grads), metrics

    return meshes.over_data(local, mesh, batched=(False, True, False))


def update(
    task: Task, optimiser: optax.GradientTransformation, rate: optax.Schedule, mesh: Mesh, *, accumulation: int
) -> Callable[[State, dict], tuple[State, dict]]:
    """The jitted step (state, batch) -> (state, metrics); the old state is donated."""
    grads_and_metrics = gradient(task, mesh, accumulation=accumulation)

    def step(state: State, batch: dict) -> tuple[State, dict]:
        key = jax.random.fold_in(state.key, state.step)
        grads, metrics = grads_and_metrics(state.params, batch, key)
        with jax.named_scope("optimiser"):
            updates, opt_state = optimiser.update(grads, state.opt_state, state.params)
            params = follow(optax.apply_updates(state.params, updates), metrics)
        metrics = {name: value for name, value in metrics.items() if not name.startswith(RUNNING)}
        metrics |= {"gradient_norm": optax.tree.norm(grads), "learning_rate": rate(state.step)}
        return state.replace(step=state.step + 1, params=params, opt_state=opt_state), metrics

    return jax.jit(step, donate_argnums=0)


def running(seen: dict) -> Ratios:
    """What a model saw of its batch's statistics (`running`, a tree like the parameters'), for a task's `measure`."""
    leaves = jax.tree_util.tree_leaves_with_path(seen.get("running", {}))
    return {RUNNING + "/".join(shapes.names(path)): (leaf, jnp.float32(1)) for path, leaf in leaves}


def follow(params: Any, metrics: dict) -> Any:
    """The parameters, where those that keep a running average move towards their statistic of this batch (E17)."""

    def move(path: Any, leaf: jax.Array) -> jax.Array:
        new = metrics.get(RUNNING + "/".join(shapes.names(path)))
        return leaf if new is None else MOMENTUM * leaf + (1 - MOMENTUM) * new

    return jax.tree_util.tree_map_with_path(move, params)


def evaluator(task: Task, mesh: Mesh) -> Callable[[Any], dict[str, float]]:
    """params -> the exact mean of every measure over the held-out part: each example once, padding not counted."""

    def local(params: Any, batch: dict) -> Ratios:
        return jax.tree.map(lambda x: jax.lax.psum(x, meshes.DATA), task.measure(params, batch, None))

    sums = jax.jit(meshes.over_data(local, mesh, batched=(False, True)))

    def evaluate(params: Any) -> dict[str, float]:
        totals: dict[str, np.ndarray] = {}
        waiting: Ratios | None = None
        for i in range(len(task.evaluation) + 1):  # fetched one batch late, so that the devices never wait
            due = waiting
            if i < len(task.evaluation):
                waiting = sums(params, meshes.place_batch(mesh, task.evaluation[i]))
            for name, pair in jax.device_get(due or {}).items():
                totals[name] = totals.get(name, 0) + np.asarray(pair, np.float64)
        return {name: float(total / count) for name, (total, count) in totals.items()}

    return evaluate


def fit(
    state: State,
    step: Callable[[State, dict], tuple[State, dict]],
    batches: Iterator[dict],
    *,
    start: int,
    steps: int,
    mesh: Mesh,
    on_metrics: Callable[[int, dict], None],
    stops: Callable[[int], bool],
    on_stop: Callable[[int, State], None],
) -> State:
    """Take the steps start + 1 ... steps, and return the last state.

    `on_metrics(n, metrics)` gets the metrics of step n while step n + 1 is already under way, so that the devices never
    wait for the host. Where `stops(n)`, `on_stop(n, state)` is called with the state after n steps, behind the metrics.
    """
    late: tuple[int, dict] | None = None
    for n in range(start + 1, steps + 1):
        state, metrics = step(state, meshes.place_batch(mesh, next(batches)))
        if late:
            on_metrics(late[0], jax.block_until_ready(late[1]))
        late = (n, metrics)
        if stops(n) or n == steps:
            on_metrics(n, jax.block_until_ready(metrics))
            late = None
        if stops(n):
            on_stop(n, state)
    return state

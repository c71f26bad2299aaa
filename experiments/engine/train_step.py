"""The training step and the evaluation of a task, which an experiment hands over."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, PartitionSpec as P

from experiments.engine import batches, compilation, distributed, errors, mesh as meshes, optim, spikes
from tfm import layout as layouts, shapes

Ratios = dict[str, tuple[jax.Array, jax.Array]]  # name -> (sum, count)
LOSS = "loss"
RUNNING = "running"  # in what a loss returns besides its measures: statistics of the batch that parameters follow
PROBE = "probe/"  # begins the names of what a task's probe finds
MOMENTUM = 0.9  # of running averages, for each step
NAN = ("abort", "skip", "skip_spikes")  # what happens to a bad step
OUT_OF_MEMORY = (
    "a device ran out of memory; --dry_run shows what the step needs, and a smaller train.batch_size, a larger "
    "train.accumulation, model.remat = products or full or a larger mesh.fsdp needs less"
)


class Task(NamedTuple):
    """What an experiment hands to the loop.

    loss(params, batch, *, key_B=None, layout=layout.ONE) -> (measures, aux). measures: name -> (sum, count); the mean
    of "loss" is minimised. aux: {}, or {"running": statistics of the batch}, a tree like the parameters' that the
    parameters of the same paths follow. key_B: a random key for each example in training, None in evaluation. layout:
    the devices that share the model (inside shard_map).
    """

    init: Callable[..., Any]  # random key -> parameters; with numbers of the model, by name, in a study
    loss: Callable[..., tuple[Ratios, dict]]
    train: Sequence[dict]  # train[step] is the batch of that step
    evaluation: Sequence[dict]  # every held-out example once
    tokens_per_example: int  # for the throughput
    baseline: Mapping[str, float] = {}  # the measures of a guess that ignores the input
    guess: Mapping[str, str] = {}  # what this guess is
    layout: layouts.Layout = layouts.ONE  # how the model is shared over the mesh
    probe: Callable[[Any], dict[str, jax.Array]] | None = None  # params -> numbers to log with the loss
    maps: Callable[[Any, dict], jax.Array] | None = None  # (params, batch) -> the attention weights A_MBHNS
    lines: Sequence[str] = ()  # of the parameter table: how the model is computed ("attention: flash, in blocks")
    frozen: Sequence[str] = ()  # the parameters that are not trained (optim.trained)
    tuning: Callable[[], dict[str, Sequence[dict]]] | None = None  # `train`, `evaluation`: a split of the training part


@flax.struct.dataclass
class State:
    """All that training changes."""

    step: jax.Array
    params: Any
    opt_state: Any
    key: jax.Array


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything that a run needs, checked before anything is written (run.plan)."""

    task: Task
    mesh: Mesh
    optimiser: optax.GradientTransformation
    step: Callable  # `update`
    accumulation: int
    growth: batches.Growth  # the batch size of every step
    steps: int
    seed: int
    every: dict[str, int]  # log, evaluate, save: steps between these (0: only at the end)
    log: Sequence[str]  # the setting log: writers in addition to metrics.jsonl, and symmetry
    keep_best: str  # the name of a metric, or ''
    may_skip: bool  # whether skipped steps are counted
    resume: int | None = None  # the step of the checkpoint to go on from; None: the newest
    save_minutes: float = 5.0  # between checkpoints, whatever the steps
    keep: int = 2  # newest checkpoints that are kept


def initial_state(
    task: Task, optimiser: optax.GradientTransformation, *, seed: int, mesh: Mesh, params: Mapping | None = None
) -> State:
    """Return the state of step 0, each leaf on its devices. params: initial ones by path, in place of random ones."""
    make, options = functools.partial(_state, task, optimiser), compilation.for_one_run(mesh)
    places = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(task, optimiser, mesh=mesh))
    state = jax.jit(make, out_shardings=places, compiler_options=options)(jax.random.key(seed))
    return state.replace(params=distributed.put_into(state.params, params or {}))


def abstract_state(task: Task, optimiser: optax.GradientTransformation, *, mesh: Mesh) -> State:
    """Return shapes, types and places of `initial_state`, to compile a program for."""
    shape = jax.eval_shape(functools.partial(_state, task, optimiser), jax.random.key(0))
    places = meshes.shardings(mesh, shape, task.layout)
    return jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shape, places)


def _state(task: Task, optimiser: optax.GradientTransformation, key: jax.Array) -> State:
    params = task.init(key)
    return State(step=jnp.int32(0), params=params, opt_state=optimiser.init(params), key=key)


def abstract_alive(mesh: Mesh, *rows: int) -> jax.ShapeDtypeStruct:
    """Return the same of the step's argument `alive`. rows: the number of runs that are trained together."""
    return jax.ShapeDtypeStruct(rows, np.bool_, sharding=meshes.replicated(mesh))


def gradient(
    params: Any, batch: dict, key: jax.Array, *, task: Task, mesh: Mesh, accumulation: int
) -> tuple[Any, dict[str, jax.Array], dict[str, jax.Array]]:
    """Return, inside `sharded`, the gradient of psum(sums) / psum(counts), each leaf where its parameter is; the mean
    of every measure; and the running statistics by path.

    Each device adds its share, and `psum` the devices, separately for sums and counts, so unequal numbers of masked
    tokens are right. Differentiating a psum inside shard_map gives the summed gradient of a parameter that several
    devices hold: no other collective is needed. Accumulation adds the sums of the parts before the one division. No
    gradient reaches a frozen parameter.
    """
    is_trained = optim.trained(params, task.frozen)
    follows = shapes.flat(is_trained)

    def sums(params: Any, part: dict, key_B: jax.Array) -> tuple[jax.Array, tuple[Ratios, Ratios]]:
        params = jax.tree.map(lambda x, own: x if own else jax.lax.stop_gradient(x), params, is_trained)
        measures, aux = task.loss(params, part, key_B=key_B, layout=task.layout)
        statistics = shapes.flat(aux.get(RUNNING, {}))
        running = {path: (x, jnp.float32(1)) for path, x in statistics.items() if follows.get(path)}
        measures, running = meshes.total((measures, running), mesh)
        return measures[LOSS][0], (measures, running)

    one_part, key_B = jax.grad(sums, has_aux=True), meshes.keys(key, len(jax.tree.leaves(batch)[0]))
    if accumulation == 1:
        grads, found = one_part(params, batch, key_B)
    else:
        parts = jax.tree.map(lambda x: x.reshape(accumulation, -1, *x.shape[1:]), (batch, key_B))

        def add(so_far: Any, part: Any) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, so_far, one_part(params, *part)), None

        _, abstract = jax.eval_shape(one_part, params, *jax.tree.map(lambda x: x[0], parts))
        zero = 0 * jax.random.key_data(key)[0]  # its type varies over the mesh like that of the key
        none_yet = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype) + zero.astype(s.dtype), abstract)
        (grads, found), _ = jax.lax.scan(add, (jax.tree.map(jnp.zeros_like, params), none_yet), parts)
    measures, running = ({name: x / jnp.maximum(n, 1) for name, (x, n) in pairs.items()} for pairs in found)
    grads = jax.tree.map(lambda g: g / jnp.maximum(found[0][LOSS][1], 1), grads)
    return grads, measures, running


def gradient_specs(params: Any, batch: dict, task: Task, mesh: Mesh) -> dict[str, tuple]:
    """Return the specs of the arguments and results of `gradient`, for `sharded`."""
    specs = shapes.specs(params, task.layout.rules)
    return {"in_specs": (specs, meshes.batch_specs(mesh, batch), P()), "out_specs": (specs, P(), P())}


def probed(task: Task, state: State, due: Callable[[jax.Array], jax.Array]) -> dict[str, jax.Array]:
    """Return the numbers of the task's probe, named 'probe/...', if it is due after this step; else zeros."""
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(task.probe, state.params))
    with jax.named_scope("probe"):
        numbers = jax.lax.cond(due(state.step), lambda: task.probe(state.params), lambda: zeros)
    return {f"{PROBE}{name}": value for name, value in numbers.items()}


def train_step(
    state: State,
    batch: dict,
    alive: jax.Array | bool = True,
    *,
    task: Task,
    optimiser: optax.GradientTransformation,
    rate: optax.Schedule,
    mesh: Mesh,
    accumulation: int = 1,
    nan: str = "abort",
    probe_due: Callable[[jax.Array], jax.Array] | None = None,
    sharded: Callable = meshes.sharded,
) -> tuple[State, dict[str, jax.Array]]:
    """Return the state after one step, and its metrics. The guard keeps the old state if the loss, the gradient norm,
    the learning rate or a running statistic is not finite.

    nan="abort": then the metric `alive`, an argument of the next step, is False, and nothing changes from there on.
    nan="skip": the step counts, without an update; the metric `skipped` counts those. nan="skip_spikes": the same for a
    spike (spikes.py). The guard does not read the new parameters: the next loss shows whether they are finite, and
    `nonfinite.check` before a save. probe_due(n): whether the metrics contain the numbers of the task's probe.
    """
    key, weights = jax.random.fold_in(state.key, state.step), optim.trained_at(state.params, state.opt_state)
    of_device = functools.partial(gradient, task=task, mesh=mesh, accumulation=accumulation)
    on_mesh = sharded(of_device, mesh, **gradient_specs(weights, batch, task, mesh))
    grads, metrics, running = on_mesh(weights, batch, key)
    norm, loss, learning_rate = optax.tree.norm(grads), metrics[LOSS], rate(updates_made(state.opt_state))
    with jax.named_scope("guard"):
        # Decided before the update, in one pass. (optax.apply_if_finite sees no loss or spike.)
        numbers = [loss, norm, learning_rate, *running.values()]
        finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in numbers]))
        alive = (finite if nan == "abort" else True) & jnp.bool_(alive)
        usual = ~spikes.is_spike(state.opt_state.history, loss, norm) if nan == "skip_spikes" else True
        accepted = alive & finite & usual
    with jax.named_scope("optimiser"):
        rule = optax.with_extra_args_support(optimiser)
        updates, opt_state = rule.update(grads, state.opt_state, state.params, value=loss, norm=norm)
        new, old = follow(optax.apply_updates(state.params, updates), running), (state.params, state.opt_state)
        params, opt_state = jax.tree.map(lambda new, old: jnp.where(accepted, new, old), (new, opt_state), old)
    new = state.replace(step=state.step + alive, params=params, opt_state=opt_state)
    new = jax.lax.with_sharding_constraint(new, meshes.shardings(mesh, new, task.layout))  # where they were
    metrics |= {"gradient_norm": norm, "learning_rate": learning_rate, "alive": alive}
    if nan != "abort":
        metrics["skipped"] = new.step - updates_made(new.opt_state)
    return new, metrics | (probed(task, new, probe_due) if probe_due else {})


def update(**options: Any) -> Callable[..., tuple[State, dict]]:
    """Return `train_step` with these options, jitted; the old state is donated."""
    compiler = meshes.compiler_options(options["mesh"])
    return jax.jit(functools.partial(train_step, **options), donate_argnums=0, compiler_options=compiler)


def updates_made(opt_state: Any) -> jax.Array:
    """Return how many steps have changed the parameters: the count of the learning rate's schedule."""
    nodes = jax.tree.leaves(opt_state, is_leaf=lambda node: isinstance(node, optax.ScaleByScheduleState))
    return next(node.count for node in nodes if isinstance(node, optax.ScaleByScheduleState))


def follow(params: Any, running: dict[str, jax.Array]) -> Any:
    """Move the parameters that keep a running average towards their statistic of this batch (E17)."""
    leaves = shapes.flat(params)
    for path in running:
        leaves[path] = MOMENTUM * leaves[path] + (1 - MOMENTUM) * running[path]
    return jax.tree.unflatten(jax.tree.structure(params), leaves.values())


def held_out(params: Any, batch: dict, *, task: Task, mesh: Mesh, sharded: Callable = meshes.sharded) -> Ratios:
    """Return the sums and counts of all measures of a held-out batch."""

    def of_device(params: Any, batch: dict) -> Ratios:
        return meshes.total(task.loss(params, batch, layout=task.layout)[0], mesh)

    specs = shapes.specs(params, task.layout.rules), meshes.batch_specs(mesh, batch)
    return sharded(of_device, mesh, in_specs=specs)(params, batch)


def evaluator(task: Task, mesh: Mesh) -> Callable[..., dict[str, np.ndarray]]:
    """Return `evaluate` for the parameters of one run."""
    return functools.partial(evaluate, task, mesh, jax.jit(functools.partial(held_out, task=task, mesh=mesh)))


def evaluate(
    task: Task,
    mesh: Mesh,
    sums: Callable[[Any, dict], Ratios],
    params: Any,
    on_batch: Callable[[], None] = lambda: None,
) -> dict[str, np.ndarray]:
    """Return the exact mean of every measure over the held-out part: each example once, padding not counted.

    sums: `held_out`, jitted. on_batch: called between two batches; what it raises ends the evaluation.
    """
    totals, waiting = {}, None
    for i in range(len(task.evaluation) + 1):  # fetched one batch late, so that the devices never wait
        due = waiting
        if i:
            on_batch()
        if i < len(task.evaluation):
            waiting = sums(params, meshes.place_batch(mesh, task.evaluation[i]))
        for name, pair in jax.device_get(due or {}).items():
            totals[name] = totals.get(name, 0) + np.asarray(pair, np.float64)
    return {name: total / count for name, (total, count) in totals.items()}


@contextlib.contextmanager
def device_errors() -> Iterator[None]:
    """Context manager: convert XLA and device errors into a one-line RunError."""
    try:
        yield
    except FloatingPointError as error:
        raise errors.RunError(f"JAX_DEBUG_NANS: {str(error).strip().splitlines()[0]}") from error
    except jax.errors.JaxRuntimeError as error:
        first = (str(error).strip().splitlines() or ["it says no more"])[0]
        what = OUT_OF_MEMORY if "RESOURCE_EXHAUSTED" in first else "a device, or the way to another one, failed"
        raise errors.RunError(f"{what}: {first}") from error

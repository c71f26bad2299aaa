"""The training step, and the evaluation, of the task that an experiment defines."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, PartitionSpec as P

from experiments.engine import compilation, distributed, errors, freeze, mesh as meshes, optim, spikes
from tfm import layout as layouts, shapes

Ratios = dict[str, tuple[jax.Array, jax.Array]]  # name -> (sum, count)
LOSS = "loss"
RUNNING = "running"  # in aux of a loss: batch statistics that parameters follow as running averages
PROBE = "probe/"  # prefix of the metrics of a task's probe
MOMENTUM = 0.9  # of the running averages, per step
NAN = ("abort", "skip", "skip_spikes")  # settings of train.nan: what to do with a bad step
OUT_OF_MEMORY = (
    "a device ran out of memory. --dry_run shows what a step needs. A smaller train.batch_size, a larger "
    "train.accumulation, model.remat = products or full, or a larger mesh.fsdp needs less"
)


class Task(NamedTuple):
    """Everything that the loop needs to know of an experiment.

    loss(params, batch, *, key_B=None, layout=layout.ONE) -> (metrics, aux). metrics: name -> (sum, count); the mean of
    "loss" is minimised. aux: {}, or {"running": batch statistics}, a tree with the paths of the parameters that follow
    them. key_B: a random key for each example in training, None in evaluation. layout: the devices that share the
    model (inside shard_map).
    """

    init: Callable[..., Any]  # random key -> parameters; a study passes settings of single runs by name
    loss: Callable[..., tuple[Ratios, dict]]
    train: Sequence[dict]  # train[step] is the batch of that step
    evaluation: Sequence[dict]  # batches with every held-out example once
    tokens_per_example: int  # for the throughput
    baseline: Mapping[str, float] = {}  # the metrics of a guess that ignores the input
    guess: Mapping[str, str] = {}  # the description of this guess
    layout: layouts.Layout = layouts.ONE  # how the model is shared over the mesh
    probe: Callable[[Any], dict[str, jax.Array]] | None = None  # params -> metrics to log with the loss
    maps: Callable[[Any, dict], jax.Array] | None = None  # (params, batch) -> the attention weights A_MBHNS
    lines: Sequence[str] = ()  # printed below the parameter table, such as the implementation of attention
    frozen: Sequence[str] = ()  # patterns of the parameters that are not trained (freeze.select_trained)
    tuning: Callable[[], dict[str, Sequence[dict]]] | None = None  # a split of the training data


@flax.struct.dataclass
class State:
    """Everything that a training step changes."""

    step: jax.Array
    params: Any
    opt_state: Any
    key: jax.Array


def initial_state(
    task: Task, optimiser: optax.GradientTransformation, *, seed: int, mesh: Mesh, params: Mapping | None = None
) -> State:
    """Return the state of step 0, each leaf on its devices. params: initial values by path; the others are random."""
    make, options = functools.partial(_state, task, optimiser), compilation.for_one_run(mesh)
    places = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(task, optimiser, mesh=mesh))
    state = jax.jit(make, out_shardings=places, compiler_options=options)(jax.random.key(seed))
    return state.replace(params=distributed.put_into(state.params, params or {}))


def abstract_state(task: Task, optimiser: optax.GradientTransformation, *, mesh: Mesh) -> State:
    """Return the shapes, dtypes and shardings of `initial_state`."""
    shape = jax.eval_shape(functools.partial(_state, task, optimiser), jax.random.key(0))
    places = meshes.shardings(mesh, shape, task.layout)
    return jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shape, places)


def _state(task: Task, optimiser: optax.GradientTransformation, key: jax.Array) -> State:
    params = task.init(key)
    return State(step=jnp.int32(0), params=params, opt_state=optimiser.init(params), key=key)


def abstract_alive(mesh: Mesh, *rows: int) -> jax.ShapeDtypeStruct:
    """Return the shape and sharding of the step's argument `alive`. rows: number of runs that are trained together."""
    return jax.ShapeDtypeStruct(rows, np.bool_, sharding=meshes.replicated(mesh))


def gradient(
    params: Any, batch: dict, key: jax.Array, *, task: Task, mesh: Mesh, accumulation: int
) -> tuple[Any, dict[str, jax.Array], dict[str, jax.Array]]:
    """Return the gradient of sum(losses) / count, the mean of every metric, and the batch statistics by path.

    Runs inside `sharded`: sums and counts are added up separately over devices and microbatches, so unequal numbers of
    masked tokens are right, and each device holds the gradient of its own parameters. Differentiating a psum inside
    shard_map already sums the gradient of a replicated parameter. Frozen parameters receive no gradient.
    """
    frozen = freeze.find_frozen(params, task.frozen)

    def loss(params: Any, batch: dict, key_B: jax.Array) -> tuple[jax.Array, tuple[Ratios, Ratios]]:
        params = freeze.stop_gradients(params, frozen) if frozen else params
        metrics, aux = task.loss(params, batch, key_B=key_B, layout=task.layout)
        statistics = shapes.flat(aux.get(RUNNING, {}))
        running = {path: (x, jnp.float32(1)) for path, x in statistics.items() if path not in frozen}
        metrics, running = meshes.total((metrics, running), mesh)
        return metrics[LOSS][0], (metrics, running)

    gradient_of, key_B = jax.grad(loss, has_aux=True), meshes.keys(key, len(jax.tree.leaves(batch)[0]))
    if accumulation == 1:
        grads, (metrics, running) = gradient_of(params, batch, key_B)
    else:
        microbatches = jax.tree.map(lambda x: x.reshape(accumulation, -1, *x.shape[1:]), (batch, key_B))
        varying = 0 * jax.random.key_data(key)[0]  # 0, with the type of the key over the mesh
        grads, (metrics, running) = _accumulate(gradient_of, params, microbatches, varying)
    grads = jax.tree.map(lambda g: g / jnp.maximum(metrics[LOSS][1], 1), grads)
    return grads, _divide(metrics), _divide(running)


def _accumulate(gradient_of: Callable, params: Any, microbatches: tuple, varying: jax.Array) -> tuple:
    """Return the sums of gradient_of(params, *microbatch) over all microbatches."""

    def add(sums: Any, microbatch: tuple) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, sums, gradient_of(params, *microbatch)), None

    _, shape = jax.eval_shape(gradient_of, params, *jax.tree.map(lambda x: x[0], microbatches))
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype) + varying.astype(s.dtype), shape)
    return jax.lax.scan(add, (jax.tree.map(jnp.zeros_like, params), zeros), microbatches)[0]


def _divide(ratios: Ratios) -> dict[str, jax.Array]:
    """Return sum / count of each."""
    return {name: total / jnp.maximum(count, 1) for name, (total, count) in ratios.items()}


def gradient_specs(params: Any, batch: dict, task: Task, mesh: Mesh) -> dict[str, tuple]:
    """Return the PartitionSpecs of the arguments and results of `gradient`."""
    specs = shapes.specs(params, task.layout.rules)
    return {"in_specs": (specs, meshes.batch_specs(mesh, batch), P()), "out_specs": (specs, P(), P())}


def probe_metrics(task: Task, state: State, due: Callable[[jax.Array], jax.Array]) -> dict[str, jax.Array]:
    """Return the metrics of the task's probe, named 'probe/...'; zeros if it is not due after this step."""
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(task.probe, state.params))
    with jax.named_scope("probe"):
        metrics = jax.lax.cond(due(state.step), lambda: task.probe(state.params), lambda: zeros)
    return {f"{PROBE}{name}": value for name, value in metrics.items()}


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
    """Return the state after one step, and its metrics.

    A guard keeps the old parameters if the loss, the gradient norm, the learning rate or a batch statistic is not
    finite. nan="abort": the metric `alive`, an argument of the next step, is then False, and no later step changes the
    state. nan="skip": the step counts, without an update; the metric `skipped` is the number of such steps.
    nan="skip_spikes": skip spikes (spikes.py) as well. The next loss, and `nonfinite.check` before a save, show whether
    the new parameters are finite. probe_due(n): whether step n measures the task's probe.
    """
    key, weights = jax.random.fold_in(state.key, state.step), optim.training_params(state.params, state.opt_state)
    device_gradient = functools.partial(gradient, task=task, mesh=mesh, accumulation=accumulation)
    mesh_gradient = sharded(device_gradient, mesh, **gradient_specs(weights, batch, task, mesh))
    grads, metrics, running = mesh_gradient(weights, batch, key)
    norm, loss, learning_rate = optax.tree.norm(grads), metrics[LOSS], rate(updates_made(state.opt_state))
    with jax.named_scope("guard"):  # in one pass (optax.apply_if_finite knows neither the loss nor spikes)
        checked = [loss, norm, learning_rate, *running.values()]
        finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in checked]))
        alive = (finite if nan == "abort" else True) & jnp.bool_(alive)
        usual = ~spikes.is_spike(state.opt_state.history, loss, norm) if nan == "skip_spikes" else True
        accepted = alive & finite & usual
    with jax.named_scope("optimiser"):
        rule = optax.with_extra_args_support(optimiser)
        updates, opt_state = rule.update(grads, state.opt_state, state.params, value=loss, norm=norm)
        new = follow(optax.apply_updates(state.params, updates), running), opt_state
        old = state.params, state.opt_state
        params, opt_state = jax.tree.map(lambda new, old: jnp.where(accepted, new, old), new, old)
    new = state.replace(step=state.step + alive, params=params, opt_state=opt_state)
    new = jax.lax.with_sharding_constraint(new, meshes.shardings(mesh, new, task.layout))
    metrics |= {"gradient_norm": norm, "learning_rate": learning_rate, "alive": alive}
    if nan != "abort":
        metrics["skipped"] = new.step - updates_made(new.opt_state)
    return new, metrics | (probe_metrics(task, new, probe_due) if probe_due else {})


def update(**options: Any) -> Callable[..., tuple[State, dict]]:
    """Return the jitted `train_step` with these options. It donates the old state."""
    compiler = meshes.compiler_options(options["mesh"])
    return jax.jit(functools.partial(train_step, **options), donate_argnums=0, compiler_options=compiler)


def updates_made(opt_state: Any) -> jax.Array:
    """Return the number of steps that changed the parameters: the count of the learning rate's schedule."""
    nodes = jax.tree.leaves(opt_state, is_leaf=lambda node: isinstance(node, optax.ScaleByScheduleState))
    return next(node.count for node in nodes if isinstance(node, optax.ScaleByScheduleState))


def follow(params: Any, running: dict[str, jax.Array]) -> Any:
    """Return the parameters, with each running average moved towards its statistic of this batch (E17)."""
    leaves = shapes.flat(params)
    for path in running:
        leaves[path] = MOMENTUM * leaves[path] + (1 - MOMENTUM) * running[path]
    return jax.tree.unflatten(jax.tree.structure(params), leaves.values())


def make_held_out(task: Task, mesh: Mesh, *, sharded: Callable = meshes.sharded) -> Callable[[Any, dict], Ratios]:
    """Return the function (params, batch) -> (sum, count) of every metric of a held-out batch."""

    def held_out(params: Any, batch: dict) -> Ratios:
        return meshes.total(task.loss(params, batch, layout=task.layout)[0], mesh)

    params = jax.eval_shape(task.init, jax.random.key(0))
    specs = shapes.specs(params, task.layout.rules), meshes.batch_specs(mesh, task.evaluation[0])
    return sharded(held_out, mesh, in_specs=specs)


def evaluator(task: Task, mesh: Mesh) -> Callable[..., dict[str, np.ndarray]]:
    """Return `evaluate` for the parameters of one run."""
    return functools.partial(evaluate, task, mesh, jax.jit(make_held_out(task, mesh)))


def evaluate(
    task: Task,
    mesh: Mesh,
    sums: Callable[[Any, dict], Ratios],
    params: Any,
    on_batch: Callable[[], None] = lambda: None,
) -> dict[str, np.ndarray]:
    """Return the exact mean of every metric over the held-out data: each example once, padding not counted.

    sums: the jitted function of `make_held_out`. on_batch: called between batches; its exceptions end the evaluation.
    """
    totals, previous = {}, {}
    for i in range(len(task.evaluation) + 1):  # results are fetched one batch late, so that the devices never wait
        ready, previous = previous, {}
        if i:
            on_batch()
        if i < len(task.evaluation):
            previous = sums(params, meshes.place_batch(mesh, task.evaluation[i]))
        for name, pair in jax.device_get(ready).items():
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
        first = (str(error).strip().splitlines() or ["no message"])[0]
        cause = "a device, or the connection to another one, failed"
        cause = OUT_OF_MEMORY if "RESOURCE_EXHAUSTED" in first else cause
        raise errors.RunError(f"{cause}: {first}") from error

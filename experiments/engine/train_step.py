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

from experiments.config import by_name, errors
from experiments.devices import compilation, distributed, mesh as meshes
from experiments.engine import freeze, optim, watch as watches
from tfm import layout as layouts, shapes

Ratios = dict[str, tuple[jax.Array, jax.Array]]  # name -> (sum, count)
LOSS = "loss"
RUNNING = "running"  # key in the aux of a loss: batch statistics, whose running averages are parameters
MEASURES = "measures"  # key in the aux of a loss: metrics that stages of the model return
PROBE = "probe/"  # prefix of the metrics of a task's probe
MOMENTUM = 0.9  # of the running averages, per step
NAN = ("abort", "skip")  # values of train.nan: how to handle a bad step
OUT_OF_MEMORY = (
    "a device ran out of memory. --dry_run shows what a step needs. A smaller train.batch_size, a larger "
    "train.accumulation, model.remat = products or full, or a larger mesh.fsdp needs less"
)


# evaluation batches -> {metric: (its value for a guess that ignores the input, description of this guess)}
Baseline = Callable[[Sequence[dict]], dict[str, tuple[float, str]]]


class Task(NamedTuple):
    """The definition of an experiment: its model, loss and data, as the training loop uses them.

    loss(params, batch, *, key_B=None, layout=layouts.ONE) -> (metrics, aux). metrics: name -> (sum, count); the mean of
    "loss" is minimised. aux: {}, or {"running": batch statistics}, a tree with the paths of the parameters that follow
    them, and {"measures": further metrics}. key_B: a random key for each example in training, None in evaluation.
    layout: the devices that share the model (inside shard_map).
    """

    init: Callable[..., Any]  # random key -> parameters; a study adds a run's settings as keywords
    loss: Callable[..., tuple[Ratios, dict]]
    train: Sequence[dict]  # train[step] is the batch of that step
    evaluation: Sequence[dict]  # batches that have every held-out example once
    tokens_per_example: int  # for the throughput
    baseline: Baseline | None = None
    better: Mapping[str, str] = {}  # name of a metric of train.metrics -> "more" or "less"
    weights: Mapping[str, float] = {}  # training minimises the loss + the sum of weight * mean of these metrics
    layout: layouts.Layout = layouts.ONE  # how the mesh shards the model
    probe: Callable[[Any], dict[str, jax.Array]] | None = None  # params -> metrics to log with the loss
    lines: Sequence[str] = ()  # printed below the parameter table, such as the implementation of attention
    watch: Mapping[str, watches.Watch] = {}  # by their names in train.watch
    frozen: Sequence[str] = ()  # patterns of the parameters that are not trained (freeze.select_trained)
    fixed: Sequence[str] = ()  # patterns of arrays that are no parameters: optim.frozen cannot unfreeze them
    # () -> {"train": ..., "evaluation": ...}, both from training data, for the runs that tune a study's settings
    tuning: Callable[[], dict[str, Sequence[dict]]] | None = None
    deterministic: bool = False  # train.deterministic
    # (name, shift): the loss at token n may depend on batch[name] up to its token n - shift only (causality.py)
    causal: tuple[str, int] | tuple[()] = ()


@flax.struct.dataclass
class State:
    """Everything that a training step changes, and the random key."""

    step: jax.Array
    params: Any
    opt_state: Any
    key: jax.Array  # the same in all steps, each of which uses fold_in(key, step)
    watch: Any = ()  # the state of each measurement in train.watch


def initial_state(
    task: Task, optimiser: optax.GradientTransformation, *, seed: int, mesh: Mesh, params: Mapping | None = None
) -> State:
    """Return the state of step 0, each leaf on its devices. params: initial values by path; the others are random."""
    make, options = functools.partial(init_state, task, optimiser), compilation.run_once_options(mesh)
    places = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(task, optimiser, mesh=mesh))
    state = jax.jit(make, out_shardings=places, compiler_options=options)(jax.random.key(seed))
    return state.replace(params=distributed.put_into(state.params, params or {}))


def abstract_state(task: Task, optimiser: optax.GradientTransformation, *, mesh: Mesh) -> State:
    """Return the shapes, dtypes and shardings of `initial_state`."""
    shape = jax.eval_shape(functools.partial(init_state, task, optimiser), jax.random.key(0))
    places = meshes.shardings(mesh, shape, task.layout)
    return jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shape, places)


def init_state(task: Task, optimiser: optax.GradientTransformation, key: jax.Array, **options: Any) -> State:
    """Return the state of step 0. options: settings of a run of a study, for task.init."""
    params = task.init(key, **options)
    watch = tuple(watch.init(params) for watch in task.watch.values())
    return State(step=jnp.int32(0), params=params, opt_state=optimiser.init(params), key=key, watch=watch)


def abstract_alive(mesh: Mesh, *rows: int) -> jax.ShapeDtypeStruct:
    """Return the shape and sharding of `alive` in `train_step`: one bool, or one for each run.

    rows: the number of runs that are trained together; leave it out for a single run.
    """
    return jax.ShapeDtypeStruct(rows, np.bool_, sharding=meshes.replicated(mesh))


def gradient(
    params: Any, batch: dict, key: jax.Array, *, task: Task, mesh: Mesh, accumulation: int
) -> tuple[Any, dict[str, jax.Array], dict[str, jax.Array]]:
    """Return the gradient of the loss, the mean of every metric, and the batch statistics by path.

    accumulation: number of microbatches. The loss is sum(losses) / count + sum of weight * mean over task.weights. The
    mean of a microbatch is weighted with its count of losses.

    Call this inside `sharded`. Sums and counts are added separately over devices and microbatches, so the mean is exact
    if their numbers of masked tokens differ. Each device has the gradient of its own parameters. Differentiating a psum
    inside shard_map already sums the gradient of a replicated parameter. The gradient of frozen parameters is 0.
    """
    frozen = freeze.find_frozen(params, task.frozen) if task.frozen else set()

    def loss(params: Any, batch: dict, key_B: jax.Array) -> tuple[jax.Array, tuple[Ratios, Ratios]]:
        params = freeze.stop_gradients(params, frozen) if frozen else params
        metrics, aux = task.loss(params, batch, key_B=key_B, layout=task.layout)
        running: Ratios = {}
        if RUNNING in aux:
            statistics = shapes.flat(aux[RUNNING]).items()
            running = {path: (x, jnp.float32(1)) for path, x in statistics if path not in frozen}
        metrics, running = meshes.total((join_metrics(metrics, aux), running), mesh)
        losses, count = metrics[LOSS]
        for name, weight in task.weights.items():
            losses += count * weight * _divide(*metrics[name])
        return losses, (metrics, running)

    gradient_of, key_B = jax.grad(loss, has_aux=True), meshes.keys(key, len(jax.tree.leaves(batch)[0]))
    if accumulation == 1:
        grads, (metrics, running) = gradient_of(params, batch, key_B)
    else:
        microbatches = jax.tree.map(lambda x: x.reshape(accumulation, -1, *x.shape[1:]), (batch, key_B))
        varying = 0 * jax.random.key_data(key)[0]  # 0, which varies over the mesh as the key does
        grads, (metrics, running) = _accumulate(gradient_of, params, microbatches, varying)
    grads = jax.tree.map(functools.partial(_divide, count=metrics[LOSS][1]), grads)
    statistics = {path: _divide(*ratio) for path, ratio in running.items()}
    return grads, {name: _divide(*ratio) for name, ratio in metrics.items()}, statistics


def join_metrics(metrics: Ratios, aux: dict) -> Ratios:
    """Return the metrics and the measures of the model, from the results of a task's loss.

    Raises UserError if two have the same name.
    """
    measures = aux.get(MEASURES, {})
    if names := metrics.keys() & measures.keys():
        raise errors.UserError(
            f'the model returns a measure "{min(names)}", which is the name of a metric. Rename the measure'
        )
    return metrics | measures


def has_batch_norm(task: Task) -> bool:
    """Return whether training normalises with statistics of the batch, whose running averages it updates."""
    params, batch = jax.eval_shape(task.init, jax.random.key(0)), task.train[0]
    key_B = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), len(jax.tree.leaves(batch)[0])))
    return bool(
        jax.eval_shape(
            lambda *arrays: task.loss(*arrays[:2], key_B=arrays[2])[1].get(RUNNING, {}), params, batch, key_B
        )
    )


def _accumulate(gradient_of: Callable, params: Any, microbatches: tuple, varying: jax.Array) -> tuple:
    """Return the sums of gradient_of(params, *microbatch) over all microbatches.

    varying: a 0 that varies over the devices (shard_map), added to the initial sums so that they have this type, too.
    """

    def add(sums: Any, microbatch: tuple) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, sums, gradient_of(params, *microbatch)), None

    _, shape = jax.eval_shape(gradient_of, params, *jax.tree.map(lambda x: x[0], microbatches))
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype) + varying.astype(s.dtype), shape)
    return jax.lax.scan(add, (jax.tree.map(jnp.zeros_like, params), zeros), microbatches)[0]


def _divide(total: jax.Array, count: jax.Array) -> jax.Array:
    """Return total / count; the total, which should be 0, if the count is 0.

    max(count, 1) would be wrong: the count may be a sum of small weights, below 1.
    """
    return total / jnp.where(count == 0, 1, count)


def gradient_specs(params: Any, batch: dict, task: Task, mesh: Mesh) -> dict[str, tuple]:
    """Return the PartitionSpecs of `gradient`: "in_specs" of its arguments, "out_specs" of its results."""
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
    state. nan="skip": the step counts, without an update, in the metric `skipped`. The next loss, and
    `nonfinite.check` before a save, check the new parameters. probe_due(n): whether step n computes the task's probe.
    """
    key, weights = jax.random.fold_in(state.key, state.step), optim.training_params(state.params, state.opt_state)
    device_gradient = functools.partial(gradient, task=task, mesh=mesh, accumulation=accumulation)
    specs = gradient_specs(weights, batch, task, mesh)
    grads, metrics, running = sharded(device_gradient, mesh, **specs)(weights, batch, key)
    norm, loss, learning_rate = optax.tree.norm(grads), metrics[LOSS], rate(count_updates(state.opt_state))
    with jax.named_scope("guard"):  # optax.apply_if_finite does not see the loss
        finite = jnp.stack([jnp.isfinite(x).all() for x in (loss, norm, learning_rate, *running.values())]).all()
        alive = (finite if nan == "abort" else True) & jnp.bool_(alive)
    with jax.named_scope("optimiser"):
        update = optax.with_extra_args_support(optimiser).update
        updates, opt_state = update(grads, state.opt_state, state.params, value=loss)
        watch, watched = watch_step(task, state, grads, updates)
        new = update_running(optax.apply_updates(state.params, updates), running), opt_state, watch
        choose = functools.partial(jnp.where, alive & finite)
        params, opt_state, watch = jax.tree.map(choose, new, (state.params, state.opt_state, state.watch))
    new = state.replace(step=state.step + alive, params=params, opt_state=opt_state, watch=watch)
    new = jax.lax.with_sharding_constraint(new, meshes.shardings(mesh, new, task.layout))
    metrics |= watched | {"gradient_norm": norm, "learning_rate": learning_rate, "alive": alive}
    if nan != "abort":
        metrics["skipped"] = new.step - count_updates(new.opt_state)
    return new, metrics | (probe_metrics(task, new, probe_due) if probe_due else {})


def watch_step(task: Task, state: State, gradient: Any, updates: Any) -> tuple[tuple, dict[str, jax.Array]]:
    """Return the new state of each watch, and {name: number} of all watches."""
    results = [
        watch.update(watch_state, gradient=gradient, updates=updates, params=state.params)
        for watch, watch_state in zip(task.watch.values(), state.watch, strict=True)
    ]
    return tuple(new for new, _ in results), {name: x for _, numbers in results for name, x in numbers.items()}


def update(**options: Any) -> Callable[..., tuple[State, dict]]:
    """Return the jitted `train_step` with these options. It donates its argument `state`."""
    mesh, deterministic = options["mesh"], options["task"].deterministic
    compiler = meshes.compiler_options(mesh) | compilation.deterministic_options(mesh, deterministic)
    return jax.jit(functools.partial(train_step, **options), donate_argnums=0, compiler_options=compiler)


def count_updates(opt_state: Any) -> jax.Array:
    """Return the number of steps that changed the parameters, which the learning rate's schedule counts."""
    nodes = jax.tree.leaves(opt_state, is_leaf=lambda node: isinstance(node, optax.ScaleByScheduleState))
    return next(node.count for node in nodes if isinstance(node, optax.ScaleByScheduleState))


def update_running(params: Any, running: dict[str, jax.Array]) -> Any:
    """Return the parameters, with each running average r replaced by MOMENTUM r + (1 - MOMENTUM) b.

    running: path of r -> b, the statistic of this batch.
    """
    leaves = shapes.flat(params)
    for path in running:
        leaves[path] = MOMENTUM * leaves[path] + (1 - MOMENTUM) * running[path]
    return jax.tree.unflatten(jax.tree.structure(params), leaves.values())


def make_held_out(task: Task, mesh: Mesh, *, sharded: Callable = meshes.sharded) -> Callable[[Any, dict], Ratios]:
    """Return the function (params, held-out batch) -> {metric: (sum, count)}, which the caller jits.

    sharded(function, mesh, in_specs=...) -> the function that gives each device its shard of the arguments.
    """

    def held_out(params: Any, batch: dict) -> Ratios:
        return meshes.total(join_metrics(*task.loss(params, batch, layout=task.layout)), mesh)

    params = jax.eval_shape(task.init, jax.random.key(0))
    specs = shapes.specs(params, task.layout.rules), meshes.batch_specs(mesh, task.evaluation[0])
    return sharded(held_out, mesh, in_specs=specs)


def evaluator(task: Task, mesh: Mesh) -> Callable[..., dict[str, np.ndarray]]:
    """Return `evaluate` for a single run: (params, on_batch) -> {metric: mean}. It calls on_batch() between batches."""
    options = compilation.deterministic_options(mesh, task.deterministic)
    return functools.partial(evaluate, task, mesh, jax.jit(make_held_out(task, mesh), compiler_options=options))


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
    totals, pending = {}, {}
    for i in range(len(task.evaluation) + 1):  # results are fetched one batch late, so that the devices never wait
        ready, pending = pending, {}
        if i:
            on_batch()
        if i < len(task.evaluation):
            pending = sums(params, meshes.place_batch(mesh, task.evaluation[i]))
        for name, pair in jax.device_get(ready).items():
            totals[name] = totals.get(name, 0) + np.asarray(pair, np.float64)
    return {name: total / count for name, (total, count) in totals.items()}


@contextlib.contextmanager
def device_errors() -> Iterator[None]:
    """Context manager: convert errors of XLA, devices, callbacks and JAX_DEBUG_NANS into a one-line RunError."""
    try:
        yield
    except FloatingPointError as error:
        raise errors.RunError(f"JAX_DEBUG_NANS: {str(error).strip().splitlines()[0]}") from error
    except jax.errors.JaxRuntimeError as error:
        if description := by_name.describe_callback(str(error)):
            raise errors.RunError(description) from error
        first = (str(error).strip().splitlines() or ["no message"])[0]
        cause = "a device, or the connection to another one, failed"
        cause = OUT_OF_MEMORY if "RESOURCE_EXHAUSTED" in first else cause
        raise errors.RunError(f"{cause}: {first}") from error

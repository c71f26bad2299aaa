"""Everything a run needs, made and checked before anything is written."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from experiments.engine import batches, by_name, checkpoint, config, debug, errors, guard, mesh, optim
from experiments.engine import step as steps

NOT_NEGATIVE = ("learning_rate", "warmup_steps", "beta1", "beta2", "eps", "weight_decay", "clip")


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a run is made of."""

    task: steps.Task
    mesh: Mesh
    optimiser: optax.GradientTransformation
    step: Callable  # steps.update
    accumulation: int
    growth: batches.Growth  # the batch size of every step
    steps: int
    seed: int
    every: dict[str, int]  # of what happens every n steps (0: only at the end): log, evaluate, save
    save_minutes: float  # 0: the clock saves nothing
    keep: int
    keep_best: str  # '', or the name of a metric
    may_skip: bool  # steps are counted that changed nothing
    fall_back: bool  # resume from an earlier checkpoint where the newest is damaged
    debug: debug.Switches


def plan(settings: config.Settings, task: steps.Task, devices: Mesh) -> Plan:
    """Optimiser and step from the config. Raises UserError for what does not fit together."""
    t, switches = settings.train, debug.switches(settings.debug)
    if switches.check_shapes:
        debug.check(task.train[0], "a batch")
    config.at_least(1, {"train.steps": t.steps, "train.accumulation": t.accumulation, "train.keep": t.keep})
    every = {"log": t.log_every, "evaluate": t.evaluate_every, "save": t.save_every}
    config.at_least(0, {f"train.{what}_every": n for what, n in every.items()} | {"train.save_minutes": t.save_minutes})
    guard.check(t.nan, t.spike)
    checkpoint.check_best(t.keep_best)
    if settings.resume not in ("latest", "latest_valid"):
        raise errors.UserError(f'unknown resume "{settings.resume}"; the right ones are: latest, latest_valid')
    if t.accumulation > 1 and settings.model.norm == "batch":
        raise errors.UserError(
            "train.accumulation > 1 would give each part statistics of its own: not with model.norm = batch"
        )
    growth = growth_of(settings, devices)
    mesh.check_layout(devices, task.layout, jax.eval_shape(task.init, jax.random.key(0)), task.train[0])
    _check_best(t.keep_best, task)
    rate, made = optimiser(settings, growth)
    if t.spike:
        made = guard.remembering(made)
    options = {"accumulation": t.accumulation, "nan": t.nan, "spike": t.spike, "probe_due": _probe_due(settings, task)}
    return Plan(
        task=task,
        mesh=devices,
        optimiser=made,
        step=steps.update(task, made, rate, devices, **options),
        accumulation=t.accumulation,
        growth=growth,
        steps=t.steps,
        seed=settings.seed,
        every=every,
        save_minutes=t.save_minutes,
        keep=t.keep,
        keep_best=t.keep_best,
        may_skip=t.nan == "skip" or t.spike > 0,
        fall_back=settings.resume == "latest_valid",
        debug=switches,
    )


def due(n: Any, *, every: int, steps: int) -> Any:
    """Whether what happens every so many steps (0: only at the end) does so after step n, which may be an array."""
    return (n == steps) | (n % every == 0) if every else n == steps


def times(n: int, *, every: int, steps: int) -> int:
    """How often what is `due` so comes from the end of step n on."""
    return 1 + ((steps - 1) // every - (n - 1) // every if every else 0)


def evaluation_work(task: steps.Task, *, batch: int) -> float:
    """How many steps of so many examples an evaluation is worth: it goes forward only, a third of their FLOPs."""
    examples = len(task.evaluation) * len(jax.tree.leaves(task.evaluation[0])[0])
    return examples / (3 * batch)


def _probe_due(settings: config.Settings, task: steps.Task) -> Callable | None:
    """After which steps the probe's numbers are wanted: those that are logged. UserError where there is no probe."""
    if not settings.train.probe:
        return None
    if task.probe is None:
        raise errors.UserError(
            "train.probe = True, but there is nothing to look at: the scores here are no x^T M x, or have no `factors` "
            "that tell it (tfm/attention/score.py)"
        )
    return functools.partial(due, every=settings.train.log_every, steps=settings.train.steps)


def _check_best(best: str, task: steps.Task) -> None:
    """UserError unless train.keep_best is '' or what an evaluation of the task measures."""
    if not best:
        return
    if best not in measured(task):
        raise errors.UserError(f"train.keep_best = {best}, but what is measured is {', '.join(measured(task))}")


def measured(task: steps.Task) -> list[str]:
    """The names of what an evaluation of the task measures."""
    found = jax.eval_shape(
        task.loss_and_metrics, jax.eval_shape(task.init, jax.random.key(0)), task.evaluation[0], None
    )
    return sorted(f"eval/{name}" for name in found if not name.startswith(steps.RUNNING))


def growth_of(settings: config.Settings, devices: Mesh) -> batches.Growth:
    """The batch sizes of the config, each of which must divide over the devices."""
    t = settings.train
    growth = batches.growing(t.batch_size, t.growth)
    for key, size in zip(["train.batch_size"] + [batches.GROWTH] * len(t.growth), growth.sizes, strict=True):
        mesh.check_batch(devices, key, batch=size, parts=t.accumulation)
    mesh.check_batch(devices, "train.evaluate_batch", batch=t.evaluate_batch)
    return growth.reached(t.steps)


def optimiser(
    settings: config.Settings, growth: batches.Growth, **numbers: jax.Array
) -> tuple[optax.Schedule, optax.GradientTransformation]:
    """The learning rate of every step, and the optimiser with it.

    numbers: learning_rate and weight_decay, where they are not the config's but those of one of several runs.
    """
    o = settings.optim
    muon = ("muon_lr_multiplier", "momentum", "ns_steps") if o.name == "muon" else ()
    config.at_least(0, {f"optim.{name}": getattr(o, name) for name in NOT_NEGATIVE + muon})
    for name in ("beta1", "beta2") + muon[1:2]:
        if getattr(o, name) >= 1:
            raise errors.UserError(f"optim.{name} must be less than 1, and {getattr(o, name)} is not")
    rate = optim.schedule(
        o.schedule,
        peak=numbers.get("learning_rate", o.learning_rate),
        steps=settings.train.steps,
        warmup_steps=o.warmup_steps,
        final_fraction=o.final_fraction if o.schedule != "constant" else 1.0,
        decay_fraction=o.decay_fraction if o.schedule == "wsd" else 0.0,
    )
    if settings.train.growth:
        rate = optim.grown(rate, growth, o.batch_rule)
    decay = numbers.get("weight_decay", o.weight_decay)
    common = {"beta1": o.beta1, "beta2": o.beta2, "eps": o.eps, "weight_decay": decay, "clip": o.clip}
    if ":" in o.name:
        raise errors.UserError(f'unknown optimiser "{o.name}": an optimiser is named, and cannot be imported')
    made = {
        "adamw": lambda: optim.adamw(rate, **common),
        "muon": lambda: optim.muon(rate, **{name: getattr(o, name) for name in muon}, **common),
    }
    return rate, by_name.choose("optimiser", o.name, made)()

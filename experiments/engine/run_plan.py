"""The run plan: optimiser, training step and intervals, built from the settings and checked before any file output."""

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from experiments.config import by_name, errors, settings as configs
from experiments.devices import compilation, mesh as meshes
from experiments.engine import batches, causality, freeze, optim, train_step, watch as watches
from experiments.folder import checkpoint, log
from tfm import layout as layouts, shapes

EVAL = "eval/"  # prefix of the metrics of an evaluation


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything that a run needs, checked before the first file is written."""

    task: train_step.Task
    mesh: Mesh
    optimiser: optax.GradientTransformation
    step: Callable  # the result of train_step.update: (state, batch, alive) -> (state, metrics)
    accumulation: int
    growth: batches.Growth  # the batch size at every step
    steps: int
    seed: int
    every: dict[str, int]  # "log", "evaluate", "save" -> interval in steps (0: only at the end)
    log: Sequence[str]  # the setting `log`: writers in addition to metrics.jsonl, and symmetry
    keep_best: checkpoint.Best  # the metric whose best checkpoint is kept
    patience: int  # evaluations without a better metric after which the run ends; 0: never
    may_skip: bool  # whether steps may be skipped (train.nan)
    baseline: Mapping[str, tuple[float, str]]  # metric -> its value for a guess without a model, description
    resume: int | None = None  # step of the checkpoint to resume from; None: the newest
    save_minutes: float = 5.0  # minutes after which a checkpoint is written in any case
    keep: int = 2  # number of newest checkpoints to keep


def prepare(
    settings: configs.Settings, task: train_step.Task, devices: Mesh, *, dry_run: bool = False
) -> tuple[Plan, train_step.State]:
    """Return the plan of a run, and the shapes, dtypes and shardings of its state.

    Raises UserError if a setting is invalid or unused, if memory is too small, or if the user's code lets a token see
    later ones (causality.check). dry_run: accept up to compilation.UNLIMITED bytes, and do not check causality.
    """
    plan = make_plan(settings, task, devices)
    settings.refuse_unused()
    state = train_step.abstract_state(plan.task, plan.optimiser, mesh=devices)
    compilation.check_state(state, devices, dry_run=dry_run)
    if not dry_run:
        causality.check(settings, plan.task)
    return plan, state


def make_plan(settings: configs.Settings, task: train_step.Task, devices: Mesh) -> Plan:
    """Build the optimiser and the training step. Raises UserError if settings are invalid or exclude each other."""
    t, growth = settings.train, batches.parse_growth(settings.train.batch_size, settings.train.growth)
    check_training(settings, task, growth, devices)
    params, metrics = jax.eval_shape(task.init, jax.random.key(0)), list_metrics(task)
    meshes.check_layout(devices, task.layout, params, task.train[0])
    freeze.check_frozen(settings.optim.frozen, params, before=[*task.frozen, *task.fixed])
    watch = watches.choose(t.watch, params, taken=[name.removeprefix(EVAL) for name in metrics])
    frozen = [*task.frozen, *settings.optim.frozen, *task.fixed]  # fixed last: "!" in the setting cannot free them
    task = task._replace(frozen=frozen, watch=watch, deterministic=t.deterministic)
    by_name.choose("train.keep_best", t.keep_best, dict.fromkeys(["", *metrics]))
    problem = "train.metrics: this experiment does not measure {}; set train.metrics = []"
    errors.refuse(*((f"{EVAL}{name}" not in metrics, problem.format(name)) for name in task.better))
    rate, rule = optim.make_optimiser(settings, task.frozen)
    if ":" in settings.optim.name:
        optim.check_updates(settings.optim.name, rule, params)
    options = {"mesh": devices, "accumulation": t.accumulation, "nan": t.nan}
    if log.SYMMETRY in settings.log:
        options["probe_due"] = functools.partial(is_due, every=t.log_every, steps=t.steps)
    plan = Plan(
        task=task,
        mesh=devices,
        optimiser=rule,
        step=train_step.update(task=task, optimiser=rule, rate=rate, **options),
        accumulation=t.accumulation,
        growth=growth,
        steps=t.steps,
        seed=settings.seed,
        log=settings.log,
        every={"log": t.log_every, "evaluate": t.evaluate_every, "save": t.save_every},
        keep_best=checkpoint.choose_best(t.keep_best, task.better),
        patience=t.patience,
        may_skip=t.nan != "abort",
        baseline=task.baseline(task.evaluation) if task.baseline else {},
    )
    check_users_code(settings, plan)
    return plan


def check_users_code(settings: configs.Settings, plan: Plan) -> None:
    """Trace the step on the mesh if settings name the user's code. Raises UserError, with these settings, if it fails.

    So a function that does not sum over the devices that share its work (layout.tensor) fails before any file output.
    """
    code = ", ".join(f"{key} = {text}" for key, text in configs.find_code("", settings.to_dict()) if ":" in text)
    if code:
        state = train_step.abstract_state(plan.task, plan.optimiser, mesh=plan.mesh)
        batch, alive = meshes.abstract_batch(plan.mesh, plan.task.train[0]), train_step.abstract_alive(plan.mesh)
        with by_name.user_errors(f"{code} on the mesh {meshes.shape(plan.mesh)}"):
            jax.eval_shape(plan.step, state, batch, alive)


def check_training(settings: configs.Settings, task: train_step.Task, growth: batches.Growth, devices: Mesh) -> None:
    """Raise UserError if settings of training are invalid or exclude each other, or if a batch is invalid."""
    t = settings.train
    with by_name.user_errors("in a batch"):
        shapes.check(task.train[0])
    by_name.choose("train.nan", t.nan, dict.fromkeys(train_step.NAN))
    log.check(settings.log)
    for key, size in zip(["train.batch_size"] + [batches.GROWTH] * len(t.growth), growth.sizes, strict=True):
        meshes.check_batch(devices, key, batch=size, microbatches=t.accumulation)
    last, mup, patience = growth.firsts[-1], settings.model.mup, f"train.patience = {t.patience}"
    no_interval = f"{patience} counts evaluations: set train.evaluate_every, the steps between them"
    no_bilinear_form = f"log has {log.SYMMETRY}, but this model's scores have no bilinear form x^T M x. Remove it"
    errors.refuse(
        (mup and task.probe is None, f"model.mup = {mup} must be 0: it scales the transformer, which this run lacks"),
        (t.patience and not t.keep_best, f"{patience} needs train.keep_best, such as eval/loss"),
        (t.patience and not t.evaluate_every, no_interval),
        (last >= t.steps, f"{batches.GROWTH}: step {last} must be below train.steps = {t.steps}"),
        (log.SYMMETRY in settings.log and task.probe is None, no_bilinear_form),
    )


def list_metrics(task: train_step.Task) -> list[str]:
    """Return the sorted names of the metrics of an evaluation, such as "eval/loss"."""
    params = jax.eval_shape(task.init, jax.random.key(0))
    metrics = train_step.join_metrics(*jax.eval_shape(task.loss, params, task.evaluation[0]))
    return sorted(f"{EVAL}{name}" for name in metrics)


def compile_step(plan: Plan, state: train_step.State) -> tuple[Callable, float]:
    """Return the training step, compiled for every batch size, and the seconds of the compilation.

    JAX_DEBUG_NANS and JAX_DISABLE_JIT need the uncompiled function: with them, return the step as it is, and 0.
    """
    if jax.config.jax_debug_nans or jax.config.jax_disable_jit:
        return plan.step, 0.0
    began, alive, compiled = time.perf_counter(), train_step.abstract_alive(plan.mesh), compilation.Compiled()
    with train_step.device_errors():
        for size, first in zip(plan.growth.sizes, plan.growth.firsts, strict=True):
            if size not in compiled:
                batch = meshes.abstract_batch(plan.mesh, plan.task.train[first])
                compiled[size] = plan.step.lower(state, batch, alive).compile()
    compilation.check_step(compiled.largest(), plan.mesh)
    return compiled, time.perf_counter() - began


def forward_flops(plan: Plan, state: train_step.State, *, kernels: bool = False) -> int:
    """Return the FLOPs of all matrix products in the loss of the whole first batch (forward pass only).

    kernels: count only products inside Pallas kernels.
    """
    loss = functools.partial(plan.task.loss, layout=layouts.ONE._replace(platform=plan.task.layout.platform))
    return compilation.flops(loss, state.params, plan.task.train[0], kernels=kernels)


def is_due(n: Any, *, every: int, steps: int) -> Any:
    """Return True if n is the last step or a multiple of `every` (0: only the last). n may be an array."""
    return (n == steps) | (n % every == 0) if every else n == steps

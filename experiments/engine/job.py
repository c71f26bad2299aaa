"""A whole run of a config: show what is built, train it, evaluate, save, and write down the result."""

import dataclasses
import pathlib
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from experiments.engine import (
    checkpoint,
    config,
    cost,
    errors,
    initial_weights,
    log,
    mesh,
    optim,
    report,
    train,
    workdir,
)
from experiments.engine.data import batches
from tfm import shapes

NOT_NEGATIVE = ("learning_rate", "warmup_steps", "beta1", "beta2", "eps", "weight_decay", "clip")
# (params, folder, metrics) -> files written, or these and more final numbers by name
Figures = Callable[[Any, pathlib.Path, list[dict]], list[pathlib.Path] | tuple[list[pathlib.Path], dict[str, float]]]


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything a run needs, made and checked before anything is written."""

    task: train.Task
    mesh: Mesh
    optimiser: optax.GradientTransformation
    step: Callable
    batch: int
    steps: int
    seed: int
    every: dict[str, int]  # of what happens every n steps (0: only at the end): log, evaluate, save
    keep: int


def devices(settings: config.Settings) -> Mesh:
    """The mesh of a run; said to the person, who may think to have another."""
    config.check_seed(settings.seed)
    mesh.start(settings.device)
    devices = mesh.make(data=settings.mesh.data)
    print(mesh.describe(devices), flush=True)
    return devices


def plan(settings: config.Settings, task: train.Task, devices: Mesh) -> Plan:
    """Optimiser and compiled step from the config. Raises UserError for what does not fit together."""
    t, o = settings.train, settings.optim
    config.at_least(1, {"train.steps": t.steps, "train.accumulation": t.accumulation, "train.keep": t.keep})
    every = {"log": t.log_every, "evaluate": t.evaluate_every, "save": t.save_every}
    config.at_least(0, {f"train.{what}_every": n for what, n in every.items()})
    mesh.check_batch(devices, "train.batch", batch=t.batch, parts=t.accumulation)
    mesh.check_batch(devices, "train.evaluate_batch", batch=t.evaluate_batch)
    if t.accumulation > 1 and settings.model.norm == "batch":
        raise errors.UserError(
            "train.accumulation > 1 would give each part statistics of its own: not with model.norm = batch"
        )
    config.at_least(0, {f"optim.{name}": getattr(o, name) for name in NOT_NEGATIVE})
    for name in ("beta1", "beta2"):
        if getattr(o, name) >= 1:
            raise errors.UserError(f"optim.{name} must be less than 1, and {getattr(o, name)} is not")
    rate = optim.schedule(
        o.schedule,
        peak=o.learning_rate,
        steps=t.steps,
        warmup_steps=o.warmup_steps,
        final_fraction=o.final_fraction if o.schedule != "constant" else 1.0,
        decay_fraction=o.decay_fraction if o.schedule == "wsd" else 0.0,
    )
    optimiser = optim.adamw(rate, beta1=o.beta1, beta2=o.beta2, eps=o.eps, weight_decay=o.weight_decay, clip=o.clip)
    return Plan(
        task=task,
        mesh=devices,
        optimiser=optimiser,
        step=train.update(task, optimiser, rate, devices, accumulation=t.accumulation),
        batch=t.batch,
        steps=t.steps,
        seed=settings.seed,
        every=every,
        keep=t.keep,
    )


def run(
    settings: config.Settings,
    folder: pathlib.Path | None,
    task: train.Task,
    devices: Mesh,
    figures: Figures,
    kept: Mapping[str, bytes] | None = None,
) -> None:
    """Train `task` as the config says and write the results into `folder`; without one, only show what it would be.

    kept: small files, by their names, that the trained model cannot be used without (its words, its classes).
    """
    began = time.perf_counter()
    made = plan(settings, task, devices)
    resumed = folder is not None and checkpoint.newest(folder / "checkpoints") is not None
    imported = initial_weights.load(settings, task.init, resumed=resumed, kept=kept)
    settings.refuse_unused()
    if folder is not None and workdir.enter(folder, settings.to_dict()):
        print(f"{folder} holds a finished run: nothing to do. Its result is in {folder / 'summary.json'}")
        return
    for name, content in (kept or {}).items() if folder is not None else ():
        workdir.write(folder / name, content)
    state = train.initial_state(task, made.optimiser, seed=made.seed, mesh=devices)
    state = state.replace(params=initial_weights.placed(imported, state.params))
    flops = describe(made, state)
    compiled, seconds = compile_step(made, state)
    if folder is None:
        print(report.memory(state, compiled))
        return
    state, numbers = train_and_save(made, state, compiled, folder, flops)
    (folder / "figures").mkdir(exist_ok=True)
    shown = figures(jax.device_get(state.params), folder, log.read(folder))
    files, more = shown if isinstance(shown, tuple) else (shown, {})
    summary = {
        "experiment": settings.experiment,
        "steps": made.steps,
        "params": shapes.total(state.params),
        "params_sha256": checkpoint.digest(state.params),
        **numbers,
        **more,
        **{f"baseline/{name}": value for name, value in task.baseline.items()},
        "wall_seconds": time.perf_counter() - began,
        "compile_seconds": seconds,
        "devices": devices.size,
        "backend": jax.default_backend(),
        "versions": mesh.versions(),
    }
    workdir.write_json(folder / "summary.json", summary)
    print(report.result(summary, [str(file) for file in [*files, folder / "metrics.jsonl", folder / "summary.json"]]))


def describe(made: Plan, state: train.State) -> int:
    """Print the parameter table and the FLOPs of a step, and return these: three times the forward pass."""
    shapes.check(state.params)
    example = made.task.train[0]
    forward = cost.flops(made.task.measure, state.params, example, None)
    tokens = made.batch * made.task.tokens_per_example
    print(report.table(state.params))
    print(
        f"  {report.si(3 * forward, 'FLOP')} per step (3 x forward) of {made.batch} examples, {tokens:,} tokens;"
        f" {report.si(forward / tokens, 'FLOP')} per token forward",
        flush=True,
    )
    return 3 * forward


def compile_step(made: Plan, state: train.State) -> tuple[Any, float]:
    """The compiled training step, and the seconds it took."""
    began = time.perf_counter()
    batch = mesh.place_batch(made.mesh, made.task.train[0])
    compiled = made.step.lower(state, batch).compile()
    return compiled, time.perf_counter() - began


def train_and_save(made: Plan, state: train.State, compiled: Any, folder: pathlib.Path, flops: int):
    """From the newest checkpoint, or from step 0, to the end: (state, final metrics and throughput)."""
    saves = checkpoint.Checkpoints(folder / "checkpoints", keep=made.keep)
    start = saves.latest() or 0
    if start:
        state = saves.restore(start, state)
        print(f"resuming {folder} at step {start:,}")
    writer = log.Log(folder, start=start)
    evaluate = train.evaluator(made.task, made.mesh)
    progress = log.Progress(
        start=start,
        steps=made.steps,
        tokens_per_step=made.batch * made.task.tokens_per_example,
        flops_per_step=flops,
        peak=cost.measured_peak(devices=made.mesh.size),
    )
    final: dict[str, float] = {}

    def due(what: str, n: int) -> bool:
        return n == made.steps or (made.every[what] > 0 and n % made.every[what] == 0)

    def held_out(params: Any) -> dict[str, float]:
        return {f"eval/{name}": value for name, value in evaluate(params).items()}

    def on_metrics(n: int, metrics: dict) -> None:
        values = {f"train/{name}": float(value) for name, value in metrics.items()} if due("log", n) else {}
        if values:
            writer.write(n, values)
        progress.advance(n, values.get("train/loss"))

    def on_stop(n: int, state: train.State) -> None:
        progress.pause()
        if due("evaluate", n):
            final.update(held_out(state.params))
            writer.write(n, final)
            progress.say(f"step {n:,}: " + ", ".join(f"{name} {value:.4f}" for name, value in final.items()))
        if due("save", n):
            saves.save(n, state)
        progress.resume()

    try:
        if start == made.steps:  # trained to the end and evaluated, but stopped before its result was written
            final.update(held_out(state.params))
        state = train.fit(
            state,
            compiled,
            batches.iterate(made.task.train, start=start),
            start=start,
            steps=made.steps,
            mesh=made.mesh,
            on_metrics=on_metrics,
            stops=lambda n: due("evaluate", n) or due("save", n),
            on_stop=on_stop,
        )
    finally:  # also where a person stops the run: a checkpoint under way is finished
        for part in (progress, writer, saves):
            part.close()
    return state, final | {"tokens_per_second": progress.tokens_per_second()}


def loss_figure(file: pathlib.Path, rows: list[dict], *, unit: str, title: str) -> pathlib.Path:
    """Draw training and evaluation loss from the rows of metrics.jsonl."""
    from experiments.engine import figures  # matplotlib is slow to import, and only needed here

    curves = {
        part: {row["step"]: row[f"{part}/loss"] for row in rows if row.get(f"{part}/loss") is not None}
        for part in ("train", "eval")
    }
    figures.loss_curves(file, train=curves["train"], evaluation=curves["eval"], ylabel=f"loss, {unit}", title=title)
    return file

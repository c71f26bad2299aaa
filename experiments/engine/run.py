"""A plan run of a config: plan it, print the parameter table, train, evaluate, save, and write the result."""

import contextlib
import dataclasses
import functools
import json
import pathlib
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from experiments.engine import (
    batches,
    by_name,
    checkpoint,
    compilation,
    config,
    disk,
    distributed,
    errors,
    log,
    loop,
    mesh,
    optim,
    spikes,
    train_step,
    workdir,
)
from tfm import layout as layouts, shapes

TOKENIZER = "tokenizer.json"  # a run cannot resume with another tokenizer
DATA = "data.json"  # metadata that a model needs in use, such as the names of its classes
SHARED_SECONDS = 60  # until all processes see a new file; NFS caches a missing file for 30 s
# (params, folder, metrics) -> dicts of further final metrics, then the files written; drawing may fail
Figures = Callable[[Any, pathlib.Path, list[dict]], Iterable[pathlib.Path | dict[str, Any]]]


class Work(NamedTuple):
    """The result of an experiment's prepare(settings, mesh): task, figures, and files of the model."""

    task: train_step.Task
    figures: Figures | None = None  # None: the loss by step
    apply: Callable[[Any, dict], jax.Array] | None = None  # (params, batch) -> outputs, such as logits
    files: Mapping[str, bytes] = {}  # by name, needed to use the model: its tokenizer, its classes
    params: Mapping[str, np.ndarray] = {}  # initial parameters by path, in place of random ones
    lines: Sequence[str] = ()  # about the data, printed before training
    data_sha256: str | None = None  # of the data; None: generated, or unknown

    @property
    def data(self) -> dict[str, Any]:
        """The identity of the data: their digest, and the names of their classes in order."""
        return {"sha256": self.data_sha256, "classes": json.loads(self.files.get(DATA, b"{}")).get("classes")}


class Result(NamedTuple):
    """The result of a config's run; params, apply and batch only if one model was trained."""

    folder: pathlib.Path | None  # None if nothing was written
    summary: dict[str, Any]  # the content of summary.json; report.json of a study; the output of a tool
    params: Any = None  # the final ones (numpy); None if a finished run has lost its checkpoints
    apply: Callable[[Any, dict], jax.Array] | None = None  # (params, batch) -> outputs, such as logits
    batch: dict[str, np.ndarray] | None = None  # held-out examples by the names of their arrays
    figures: list[pathlib.Path] = []

    def __repr__(self) -> str:  # for notebooks: not thousands of lines of numbers
        return f"Result(folder={str(self.folder)!r}; {', '.join(self._fields[1:])})"


def make_mesh(
    settings: config.Settings, device: str = "any", *, seeds: int = 1, chips: Sequence[Any] | None = None
) -> Mesh:
    """Make the mesh of a run, and print it.

    device: see compilation.start. seeds: devices along the axis of runs, in a study. chips: the devices; None: JAX's.
    """
    config.check_seed(settings.seed)
    if chips is None:
        compilation.start(device)
    m = settings.mesh
    devices = mesh.make(data=m.data, fsdp=m.fsdp, tensor=m.tensor, sequence=m.sequence, seed=seeds, devices=chips)
    print(mesh.describe(devices, chips), flush=True)
    slow = settings.to_dict().get("model", {}).get("compute_dtype") == "bfloat16"
    if slow and mesh.backend(devices) == "cpu":
        print("  model.compute_dtype = bfloat16 is slower than float32 on a CPU: it is for GPUs and TPUs", flush=True)
    return devices


def run(
    settings: config.Settings, folder: pathlib.Path, work: Work, devices: Mesh, *, resume: int | None = None
) -> Result:
    """Train, and write the results into `folder`. resume: step of the checkpoint to resume from; None: the newest."""
    began = time.perf_counter()
    plan, state = prepare(settings, work, devices)
    plan = dataclasses.replace(plan, resume=resume)
    writes, resumed = distributed.is_main(), has_checkpoint(folder)
    with workdir.lock(folder) if writes else contextlib.nullcontext(), file_errors(folder):
        if open_run(settings, folder, devices, work.data, resume=resume):
            print(f"{folder} holds a finished run: nothing to do. Its result is in {folder / 'summary.json'}")
            params = checkpoint.parameters(folder / "checkpoints", plan.steps) if resumed else None
            summary = disk.read_json(folder / "summary.json", says="its result")
        else:
            sources = keep_files(settings, folder, work, resumed) if writes else {}
            flops, (compiled, seconds) = print_model(plan, state), compile_step(plan, state)
            state, numbers = loop.train_and_save(plan, compiled, folder, flops=flops, params=work.params)
            params = distributed.fetch(state.params)
            numbers |= {"compile_seconds": seconds, "sources": sources}
            summary = write_result(settings, plan, work, params, folder, numbers, began) if writes else {}
        check_result(summary or numbers, plan.steps, folder)
        apply = None if work.apply is None else jax.jit(work.apply)
        figures = sorted((folder / "figures").glob("*.png"))
        return Result(folder, summary, params, apply, work.task.evaluation[0], figures)


def keep_files(settings: config.Settings, folder: pathlib.Path, work: Work, resumed: bool) -> dict[str, str]:
    """Write the user's sources and the files of the model. Return the SHA-256 of each source.

    Raises UserError if a run would resume with another tokenizer.
    """
    sources = workdir.keep_sources(folder, settings.sources(), workdir.read_commit()[1])
    for name, content in work.files.items():
        file = folder / name
        if resumed and name == TOKENIZER and file.is_file() and file.read_bytes() != content:
            raise errors.UserError(
                f"{file} differs from the tokenizer of this config: a run cannot resume with another one"
            )
        disk.write(file, content)
    return sources


def has_checkpoint(folder: pathlib.Path | None) -> bool:
    """Return True if the folder of a run has a checkpoint to resume from."""
    return folder is not None and checkpoint.newest(folder / "checkpoints") is not None


def prepare(
    settings: config.Settings, work: Work, devices: Mesh, *, described: bool = False
) -> tuple[train_step.Plan, train_step.State]:
    """Return the plan of a run, and the shapes, dtypes and shardings of its state.

    described: for a dry run, accept any state that some device can hold. Raises UserError if memory is too small.
    """
    plan = make_plan(settings, work.task, devices)
    settings.refuse_unused()
    state = train_step.abstract_state(work.task, plan.optimiser, mesh=devices)
    compilation.check_state(state, devices, described=described)
    return plan, state


@contextlib.contextmanager
def file_errors(folder: pathlib.Path | None) -> Iterator[None]:
    """Context manager: convert an error of the file system, such as a full disk, into a RunError."""
    try:
        yield
    except BrokenPipeError:  # stdout has no reader
        raise
    except OSError as error:
        place = f"{error.filename or folder}: {disk.reason(error)}"
        raise errors.RunError(f"{place}. Fix it, then the same command resumes from the last checkpoint") from error


def open_run(
    settings: config.Settings,
    folder: pathlib.Path,
    devices: Mesh,
    data: Mapping[str, Any] | None = None,
    *,
    resume: int | None = None,
) -> bool:
    """Create or reopen the folder of a run. Return True if the run is finished. Every process must call this.

    Raises UserError as `workdir.open_run` does, and if processes have different configs, or no shared disk.
    """
    values = settings.to_dict()
    if not distributed.is_same(zlib.crc32(disk.as_json(values)) >> 1):
        raise errors.UserError("the processes have different configs: start all with the same command, but --process")
    hardware = f"{devices.size} x {devices.devices.flat[0].device_kind}"
    finished = distributed.call_in_main(lambda: workdir.open_run(folder, values, hardware, data=data, resume=resume))
    until = time.monotonic() + SHARED_SECONDS
    while not distributed.is_main() and not (folder / "config.json").exists():
        if time.monotonic() > until:
            raise errors.UserError(f"not all processes see what process 0 wrote in {folder}: its disk must be shared")
        time.sleep(0.5)
    return bool(finished)


def write_result(
    settings: config.Settings,
    plan: train_step.Plan,
    work: Work,
    params: Any,
    folder: pathlib.Path,
    final: dict,
    began: float,
) -> dict[str, Any]:
    """Write and print the summary of a trained model, draw its figures, and return the summary. final: its metrics."""
    first = {
        "experiment": settings.experiment,
        "steps": plan.steps,
        "params": shapes.total(params),
        "params_sha256": checkpoint.digest(params),
        **final,
    }
    last = {
        **{f"baseline/{name}": value for name, value in plan.task.baseline.items()},
        "guess": dict(plan.task.guess),
        "wall_seconds": time.perf_counter() - began,
        "data_sha256": work.data_sha256,
        "devices": plan.mesh.size,
        "device": mesh.describe(plan.mesh),
        "backend": mesh.backend(plan.mesh),
        "versions": mesh.versions(),
        "commit": workdir.describe_commit(),
    }
    if plan.keep_best:
        best = checkpoint.best(folder / "checkpoints", plan.keep_best)
        first["checkpoints"] = {"best": best, "last": {"step": plan.steps, plan.keep_best: final[plan.keep_best]}}
    disk.write_json(folder / "summary.json", first | last)
    files, metrics = draw(work, params, folder)
    summary = first | metrics | last
    disk.write_json(folder / "summary.json", summary)
    print(format_result(summary, [str(file) for file in [*files, folder / "metrics.jsonl", folder / "summary.json"]]))
    return summary


def check_result(summary: Mapping[str, Any], steps: int, folder: pathlib.Path) -> None:
    """Raise RunError if the final loss is not finite, or if more than half of the steps were skipped (train.nan)."""
    loss, skipped = summary.get(f"{loop.EVAL}{train_step.LOSS}", 0.0), summary.get("skipped") or 0
    faults = [f"{loop.EVAL}{train_step.LOSS} is not finite"] * (loss is None or not np.isfinite(loss))
    faults += [f"{skipped:,} of {steps:,} steps were skipped"] * (2 * skipped > steps)
    if faults:
        raise errors.RunError(
            f"the run in {folder} failed: {' and '.join(faults)}; train another one, with a smaller optim.learning_rate"
        )


def draw(work: Work, params: Any, folder: pathlib.Path) -> tuple[list[pathlib.Path], dict[str, Any]]:
    """Return the files that `work.figures` writes, and its metrics. An error is printed, and does not end the run."""
    files, metrics = [], {}
    try:
        disk.tidy(disk.folder(folder, "figures"))
        for item in work.figures(params, folder, log.read(folder)):
            if isinstance(item, dict):
                metrics.update(item)
            else:
                files.append(item)
    except errors.RunError:
        raise
    except (Exception, SystemExit) as error:  # from a plotting library, or the user's code
        reason = errors.line(error) or "no message"
        print(f"warning: not all figures in {folder} are drawn: {type(error).__name__}: {reason}", flush=True)
    return files, metrics


def format_result(summary: dict[str, Any], files: list[str]) -> str:
    """Return the lines to print at the end of a run: metrics, warnings, checkpoints, time, files."""
    lines, guess = [""], summary.get("guess", {})
    for name, value in summary.items():
        if name.startswith(("eval/", "baseline/")):
            number = f"{value:.4f}" if abs(value) < 1e9 else f"{value:.4g}"
            lines.append(f"  {name:<22} {number}  {guess.get(name.removeprefix('baseline/'), '')}".rstrip())
    for name in guess.keys() & checkpoint.BETTER.keys():
        if checkpoint.score(summary, f"eval/{name}") <= checkpoint.score(summary, f"baseline/{name}"):
            lines.append(f"  warning: eval/{name} is no better than the guess: {guess[name]}")
    for kind, row in summary.get("checkpoints", {}).items():
        metrics = ", ".join(f"{name} {x:.4f}" for name, x in (row or {}).items() if name != "step")
        lines.append(f"  {kind + ' checkpoint':<22} " + (f"step {row['step']:,}, {metrics}" if row else "none"))
    lines.append(f"  {'time':<22} {summary['wall_seconds']:.1f} s, {summary['compile_seconds']:.1f} s of it compiling")
    if summary["tokens_per_second"]:  # 0 if a run was resumed after its last step
        lines.append(f"  {'throughput':<22} {summary['tokens_per_second']:,.0f} tokens/s")
    return "\n".join([*lines, *(f"  {file}" for file in files)])


def format_table(params: Any, trained: Sequence[bool] = ()) -> str:
    """Return a line for each parameter (name, letters with their sizes, count) and the total.

    trained: for each parameter, False if it is frozen.
    """
    rows, n_trained, leaves = [], 0, jax.tree_util.tree_leaves_with_path(params)
    for (path, leaf), is_trained in zip(leaves, trained or [True] * len(leaves), strict=True):
        sizes = " ".join(f"{letter}={n}" for letter, n in zip(shapes.letters(path), leaf.shape, strict=True))
        rows.append(("/".join(shapes.names(path)), sizes, f"{leaf.size:,}", "" if is_trained else "  frozen"))
        n_trained += leaf.size * is_trained
    note = "" if all(trained) else f", of which {n_trained:,} are trained"
    rows.append(("total", "", f"{shapes.total(params):,}", note))
    a, b, c, _ = (max(map(len, column)) for column in zip(*rows, strict=True))
    lines = [f"  {name:<{a}}  {sizes:<{b}}  {count:>{c}}{note}" for name, sizes, count, note in rows]
    return "\n".join([*lines[:-1], "  " + "-" * (a + b + c + 4), lines[-1]])


def format_si(value: float, unit: str) -> str:
    """Return 1.23e9, "FLOP" as "1.23 GFLOP"."""
    for prefix in ("", "k", "M", "G", "T", "P"):
        if abs(value) < 1000 or prefix == "P":
            break
        value /= 1000
    return f"{value:.3g} {prefix}{unit}"


def print_model(plan: train_step.Plan, state: train_step.State) -> int:
    """Print the parameter table and the FLOPs of a step. Return the FLOPs: three times those of the forward pass."""
    shapes.check(state.params)
    forward = forward_flops(plan, state)
    batch, tokens = plan.growth.sizes[0], plan.task.tokens_per_example
    print(format_table(state.params, jax.tree.leaves(optim.select_trained(state.params, plan.task.frozen))))
    for line in plan.task.lines:
        print(f"  {line}")
    for first, size in zip(plan.growth.firsts, plan.growth.sizes, strict=True):
        token = f"; {format_si(forward / (batch * tokens), 'FLOP')} per token forward"
        begin, end = ("", f", after step {first:,}") if first else (" (3 x forward)", token)
        flops = format_si(3 * forward * size / batch, "FLOP")
        print(f"  {flops} per step{begin} of {size} examples, {size * tokens:,} tokens{end}", flush=True)
    return 3 * forward


def forward_flops(plan: train_step.Plan, state: train_step.State, *, kernels: bool = False) -> int:
    """Return `compilation.flops` of the loss of the first batch, on one device."""
    loss = functools.partial(plan.task.loss, layout=layouts.ONE._replace(platform=plan.task.layout.platform))
    return compilation.flops(loss, state.params, plan.task.train[0], kernels=kernels)


def compile_step(plan: train_step.Plan, state: train_step.State) -> tuple[Callable, float]:
    """Return the training step, compiled for every batch size, and the seconds that it took.

    With JAX_DEBUG_NANS or JAX_DISABLE_JIT, which need the uncompiled function, the step is not compiled yet.
    """
    if jax.config.jax_debug_nans or jax.config.jax_disable_jit:
        return plan.step, 0.0
    began, alive, compiled = time.perf_counter(), train_step.abstract_alive(plan.mesh), compilation.Compiled()
    with train_step.device_errors():
        for size, first in zip(plan.growth.sizes, plan.growth.firsts, strict=True):
            if size not in compiled:
                batch = mesh.abstract_batch(plan.mesh, plan.task.train[first])
                compiled[size] = plan.step.lower(state, batch, alive).compile()
    compilation.check_step(compiled.largest(), plan.mesh)
    return compiled, time.perf_counter() - began


def make_plan(settings: config.Settings, task: train_step.Task, devices: Mesh) -> train_step.Plan:
    """Make optimiser and step from the config. Raises UserError for settings that exclude each other."""
    t, growth = settings.train, batches.parse_growth(settings.train.batch_size, settings.train.growth)
    check_training(settings, task, growth, devices)
    params = jax.eval_shape(task.init, jax.random.key(0))
    mesh.check_layout(devices, task.layout, params, task.train[0])
    optim.check_frozen(settings.optim.frozen, params, before=task.frozen)
    task = task._replace(frozen=[*task.frozen, *settings.optim.frozen])
    by_name.choose("train.keep_best", t.keep_best, dict.fromkeys(["", *list_metrics(task)]))
    probes = log.SYMMETRY in settings.log
    rate, rule = optim.make_optimiser(settings, task.frozen)
    if ":" in settings.optim.name:
        optim.check_updates(settings.optim.name, rule, params)
    rule = spikes.remember(rule) if t.nan == "skip_spikes" else rule
    step = train_step.update(
        task=task,
        optimiser=rule,
        rate=rate,
        mesh=devices,
        accumulation=t.accumulation,
        nan=t.nan,
        probe_due=functools.partial(loop.is_due, every=t.log_every, steps=t.steps) if probes else None,
    )
    return train_step.Plan(
        task=task,
        mesh=devices,
        optimiser=rule,
        step=step,
        accumulation=t.accumulation,
        growth=growth,
        steps=t.steps,
        seed=settings.seed,
        log=settings.log,
        every={"log": t.log_every, "evaluate": t.evaluate_every, "save": t.save_every},
        keep_best=t.keep_best,
        may_skip=t.nan != "abort",
    )


def check_training(settings: config.Settings, task: train_step.Task, growth: batches.Growth, devices: Mesh) -> None:
    """Raise UserError for settings of training that exclude each other, and for an invalid batch."""
    t, name = settings.train, settings.optim.name
    with by_name.user_errors("in a batch"):
        shapes.check(task.train[0])
    config.at_least(1, {"train.steps": t.steps, "train.accumulation": t.accumulation})
    config.at_least(0, {f"train.{name}": getattr(t, name) for name in ("log_every", "evaluate_every", "save_every")})
    by_name.choose("train.nan", t.nan, dict.fromkeys(train_step.NAN))
    checkpoint.check_best(t.keep_best)
    log.check(settings.log)
    for key, size in zip(["train.batch_size"] + [batches.GROWTH] * len(t.growth), growth.sizes, strict=True):
        mesh.check_batch(devices, key, batch=size, parts=t.accumulation)
    fault = ""
    if t.accumulation > 1 and settings.model.norm.startswith("batch"):
        fault = "train.accumulation > 1 gives each part its own statistics: choose a model.norm other than batch"
    elif growth.firsts[-1] >= t.steps:
        fault = f"{batches.GROWTH} begins a batch size at step {growth.firsts[-1]}, and train.steps = {t.steps}"
    elif log.SYMMETRY in settings.log and task.probe is None:
        fault = f"log has {log.SYMMETRY}, but the scores of this model have no bilinear form x^T M x"
    elif name == "hyperball" and (settings.optim.lora or settings.model.output_std == 0):
        fault = "optim.name = hyperball keeps the norms of matrices: with optim.lora or model.output_std = 0 some are 0"
    if fault:
        raise errors.UserError(fault)


def list_metrics(task: train_step.Task) -> list[str]:
    """Return the names of the metrics of an evaluation."""
    params = jax.eval_shape(task.init, jax.random.key(0))
    metrics, _ = jax.eval_shape(task.loss, params, task.evaluation[0])
    return sorted(f"{loop.EVAL}{name}" for name in metrics)

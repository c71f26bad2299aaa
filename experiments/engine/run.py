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

WORDS = "tokenizer.json"  # a run cannot go on with another tokenizer
DATA = "data.json"  # what else is needed to use a model, as the names of its classes
SHARED_SECONDS = 60  # until all processes see a new file; NFS remembers for 30 s that there is none
# (params, folder, metrics) -> files written, and more final numbers by name: these first, as drawing may fail
Figures = Callable[[Any, pathlib.Path, list[dict]], Iterable[pathlib.Path | dict[str, Any]]]


class Work(NamedTuple):
    """What an experiment makes of a config, in prepare(settings, mesh)."""

    task: train_step.Task
    figures: Figures | None = None  # None: the loss by step
    apply: Callable[[Any, dict], jax.Array] | None = None  # (params, batch) -> the answer, such as logits
    files: Mapping[str, bytes] = {}  # by name, needed to use the model: its tokenizer, its classes
    params: Mapping[str, np.ndarray] = {}  # initial parameters by path, in place of random ones
    lines: Sequence[str] = ()  # about the data, printed before training
    data_sha256: str | None = None  # of the data; None: generated, or unknown

    @property
    def data(self) -> dict[str, Any]:
        """What identifies the data: their digest, and the names of their classes in order."""
        return {"sha256": self.data_sha256, "classes": json.loads(self.files.get(DATA, b"{}")).get("classes")}


class Result(NamedTuple):
    """The result of a config's run; params, apply and batch only if one model was trained."""

    folder: pathlib.Path | None  # None if nothing was written
    summary: dict[str, Any]  # the content of summary.json; report.json of a study; the output of a tool
    params: Any = None  # the final ones (numpy); None if a finished run has lost its checkpoints
    apply: Callable[[Any, dict], jax.Array] | None = None  # (params, batch) -> the answer, such as logits
    batch: dict[str, np.ndarray] | None = None  # held-out examples by the names of their arrays
    figures: list[pathlib.Path] = []

    def __repr__(self) -> str:  # for notebooks: not thousands of lines of numbers
        return f"Result(folder={str(self.folder)!r}; {', '.join(self._fields[1:])})"


def make_mesh(
    settings: config.Settings, device: str = "any", *, seeds: int = 1, chips: Sequence[Any] | None = None
) -> Mesh:
    """Make the mesh of a run, and print it. device: as of compilation.start. seeds: devices that share several runs.
    chips: the devices to use, in place of JAX's."""
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
    """Train as the config says, and write the results into `folder`. resume: as of train_step.Plan."""
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
    """Write the user's sources and the files of the model. Return the sources' SHA-256. UserError if a run would go on
    with another tokenizer."""
    sources = workdir.keep_sources(folder, settings.sources(), workdir.read_commit()[1])
    for name, content in work.files.items():
        file = folder / name
        if resumed and name == WORDS and file.is_file() and file.read_bytes() != content:
            raise errors.UserError(f"{file} is not the tokenizer of this config: the run cannot go on with another one")
        disk.write(file, content)
    return sources


def has_checkpoint(folder: pathlib.Path | None) -> bool:
    """Return True if the folder of a run has a checkpoint to go on from."""
    return folder is not None and checkpoint.newest(folder / "checkpoints") is not None


def prepare(
    settings: config.Settings, work: Work, devices: Mesh, *, described: bool = False
) -> tuple[train_step.Plan, train_step.State]:
    """Return the plan of a run, and shapes, types and places of its state. UserError if it would not fit into memory.

    described: for a dry run, refuse only what fits into no device.
    """
    plan = make_plan(settings, work.task, devices)
    settings.refuse_unused()
    state = train_step.abstract_state(work.task, plan.optimiser, mesh=devices)
    compilation.check_state(state, devices, described=described)
    return plan, state


@contextlib.contextmanager
def file_errors(folder: pathlib.Path | None) -> Iterator[None]:
    """Context manager: an error of the file system, as a full disk, is a RunError."""
    try:
        yield
    except BrokenPipeError:  # stdout has no reader
        raise
    except OSError as error:
        what = f"{error.filename or folder}: {disk.reason(error)}; once that is mended, the same command goes on"
        raise errors.RunError(f"{what} from the last checkpoint") from error


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
    """Write the summary of a trained model with these final metrics, draw its figures, print and return the summary."""
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
        kept = checkpoint.best(folder / "checkpoints", plan.keep_best)
        first["checkpoints"] = {"best": kept, "last": {"step": plan.steps, plan.keep_best: final[plan.keep_best]}}
    disk.write_json(folder / "summary.json", first | last)
    files, more = draw(work, params, folder)
    summary = first | more | last
    disk.write_json(folder / "summary.json", summary)
    print(format_result(summary, [str(file) for file in [*files, folder / "metrics.jsonl", folder / "summary.json"]]))
    return summary


def check_result(summary: Mapping[str, Any], steps: int, folder: pathlib.Path) -> None:
    """Raise RunError for a run whose result does not count: it ended with a loss that is no number, or more than half
    of its steps were skipped (train.nan)."""
    loss, skipped = summary.get(f"{loop.EVAL}{train_step.LOSS}", 0.0), summary.get("skipped") or 0
    faults = [f"{loop.EVAL}{train_step.LOSS} is not finite"] * (loss is None or not np.isfinite(loss))
    faults += [f"{skipped:,} of {steps:,} steps were skipped"] * (2 * skipped > steps)
    if faults:
        raise errors.RunError(
            f"the run in {folder} failed: {' and '.join(faults)}; train another one, with a smaller optim.learning_rate"
        )


def draw(work: Work, params: Any, folder: pathlib.Path) -> tuple[list[pathlib.Path], dict[str, Any]]:
    """Return the files that `work.figures` writes, and its numbers. An error is printed, and does not end the run."""
    files, numbers = [], {}
    try:
        disk.tidy(disk.folder(folder, "figures"))
        for one in work.figures(params, folder, log.read(folder)):
            numbers.update(one) if isinstance(one, dict) else files.append(one)
    except errors.RunError:
        raise
    except (Exception, SystemExit) as error:  # from a plotting library, or the user's code
        reason = errors.line(error) or "no reason is given"
        print(f"warning: not all figures in {folder} are drawn: {type(error).__name__}: {reason}", flush=True)
    return files, numbers


def format_result(summary: dict[str, Any], files: list[str]) -> str:
    """Return the block that is printed at the end of a run."""
    lines, guess = [""], summary.get("guess", {})
    for name, value in summary.items():
        if name.startswith(("eval/", "baseline/")):
            number = f"{value:.4f}" if abs(value) < 1e9 else f"{value:.4g}"
            lines.append(f"  {name:<22} {number}  {guess.get(name.removeprefix('baseline/'), '')}".rstrip())
    for name in guess.keys() & checkpoint.BETTER.keys():
        reached, constant = (checkpoint.score(summary, f"{part}/{name}") for part in ("eval", "baseline"))
        if reached <= constant:
            lines.append(f"  warning: eval/{name} is no better than the guess: {guess[name]}")
    for which, one in summary.get("checkpoints", {}).items():
        measured = ", ".join(f"{name} {x:.4f}" for name, x in (one or {}).items() if name != "step")
        lines.append(f"  {which + ' checkpoint':<22} " + (f"step {one['step']:,}, {measured}" if one else "none"))
    lines.append(f"  {'time':<22} {summary['wall_seconds']:.1f} s, {summary['compile_seconds']:.1f} s of it compiling")
    if summary["tokens_per_second"]:  # 0 if a run was resumed after its last step
        lines.append(f"  {'throughput':<22} {summary['tokens_per_second']:,.0f} tokens/s")
    return "\n".join([*lines, *(f"  {file}" for file in files)])


def format_table(params: Any, trained: Sequence[bool] = ()) -> str:
    """Return one line per parameter: name, letters with their sizes, count; and the total. trained: False for those
    marked as frozen."""
    rows, n_trained, leaves = [], 0, jax.tree_util.tree_leaves_with_path(params)
    for (path, leaf), own in zip(leaves, trained or [True] * len(leaves), strict=True):
        sizes = " ".join(f"{letter}={n}" for letter, n in zip(shapes.letters(path), leaf.shape, strict=True))
        rows.append(("/".join(shapes.names(path)), sizes, f"{leaf.size:,}", "" if own else "  frozen"))
        n_trained += leaf.size * own
    more = "" if all(trained) else f", of which {n_trained:,} are trained"
    rows.append(("total", "", f"{shapes.total(params):,}", more))
    a, b, c, _ = (max(map(len, column)) for column in zip(*rows, strict=True))
    lines = [f"  {name:<{a}}  {sizes:<{b}}  {count:>{c}}{more}" for name, sizes, count, more in rows]
    return "\n".join([*lines[:-1], "  " + "-" * (a + b + c + 4), lines[-1]])


def format_si(value: float, unit: str) -> str:
    """Return 1.23e9, "FLOP" as "1.23 GFLOP"."""
    for prefix in ("", "k", "M", "G", "T", "P"):
        if abs(value) < 1000 or prefix == "P":
            break
        value /= 1000
    return f"{value:.3g} {prefix}{unit}"


def print_model(plan: train_step.Plan, state: train_step.State) -> int:
    """Print the parameter table and the FLOPs of a step. Return these: three times the forward pass."""
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
    """Return the training step, compiled for every batch size, and the seconds it took. With JAX_DEBUG_NANS or
    JAX_DISABLE_JIT, which look into uncompiled functions, the step is not compiled yet."""
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
    """Make optimiser and step from the config. Raises UserError for what does not fit together."""
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
    """Raise UserError for settings of training that do not fit together, and for a batch of an invalid form."""
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
    wrong = ""
    if t.accumulation > 1 and settings.model.norm.startswith("batch"):
        wrong = "train.accumulation > 1 gives each part its own statistics: not with model.norm = batch"
    elif growth.firsts[-1] >= t.steps:
        wrong = f"{batches.GROWTH} begins a batch size at step {growth.firsts[-1]}, and train.steps = {t.steps}"
    elif log.SYMMETRY in settings.log and task.probe is None:
        wrong = f"log has {log.SYMMETRY}, but the scores of this model have no bilinear form x^T M x"
    elif name == "hyperball" and (settings.optim.lora or settings.model.output_std == 0):
        wrong = "optim.name = hyperball keeps the norms of matrices: with optim.lora or model.output_std = 0 some are 0"
    if wrong:
        raise errors.UserError(wrong)


def list_metrics(task: train_step.Task) -> list[str]:
    """Return the names of what an evaluation of the task measures."""
    params = jax.eval_shape(task.init, jax.random.key(0))
    measures, _ = jax.eval_shape(task.loss, params, task.evaluation[0])
    return sorted(f"{loop.EVAL}{name}" for name in measures)

"""A whole run of a config: plan it, show what is built, train it, evaluate, save, and write down the result."""

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
    train_step,
    workdir,
)
from tfm import layout as layouts, shapes

WORDS = "tokenizer.json"  # which ids would mean others, were they to change
DATA = "data.json"  # what else must be known to use a model, as the names of its classes
SHARED_SECONDS = 60  # in which a file that one process has written is there for all; NFS remembers for 30 what is not
# (params, folder, metrics) -> files written, and more final numbers by name: these first, if drawing may fail
Figures = Callable[[Any, pathlib.Path, list[dict]], Iterable[pathlib.Path | dict[str, Any]]]


class Work(NamedTuple):
    """What an experiment makes of a config, in prepare(settings, devices)."""

    task: train_step.Task
    figures: Figures | None = None  # the loss by step alone
    apply: Callable[[Any, dict], jax.Array] | None = None  # (params, batch) -> the answer, such as logits
    files: Mapping[str, bytes] = {}  # by name, without which the model cannot be used: its words, its classes
    params: Mapping[str, np.ndarray] = {}  # initial parameters, by path, in place of random ones
    lines: Sequence[str] = ()  # about the data, for a person
    data_sha256: str | None = None  # the same for the same data; None: they are made, or nobody tells

    @property
    def data(self) -> dict[str, Any]:
        """What identifies the data: their digest, and the names of their classes in order."""
        described = json.loads(self.files.get(DATA, b"{}"))
        return {"sha256": self.data_sha256, "classes": described.get("classes")}


class Result(NamedTuple):
    """What there is when a config has been run; params, apply and batch only where one model was trained."""

    folder: pathlib.Path | None  # None where nothing was written
    summary: dict[str, Any]  # what summary.json holds; report.json of a study; of a tool what it has told
    params: Any = None  # the final ones (numpy); None where a finished run has lost its checkpoints
    apply: Callable[[Any, dict], jax.Array] | None = None  # (params, batch) -> the answer, such as logits
    batch: dict[str, np.ndarray] | None = None  # held-out examples by the names of their arrays
    figures: list[pathlib.Path] = []

    def __repr__(self) -> str:  # what a notebook shows where a cell ends with it: not thousands of lines of numbers
        return f"Result(folder={str(self.folder)!r}; {', '.join(self._fields[1:])})"


def devices(settings: config.Settings, device: str = "any", *, seeds: int = 1) -> Mesh:
    """The mesh of a run; said to the person, who may think to have another. device: compilation.start's. seeds: devices
    that share several runs."""
    config.check_seed(settings.seed)
    compilation.start(device)
    m = settings.mesh
    devices = mesh.make(data=m.data, fsdp=m.fsdp, tensor=m.tensor, sequence=m.sequence, seed=seeds)
    print(mesh.describe(devices), flush=True)
    slow = settings.to_dict().get("model", {}).get("compute_dtype") == "bfloat16"
    if slow and mesh.backend(devices) == "cpu":
        print("  model.compute_dtype = bfloat16 is slower than float32 on a CPU: it is for GPUs and TPUs", flush=True)
    return devices


def run(
    settings: config.Settings, folder: pathlib.Path, work: Work, devices: Mesh, *, fall_back: bool = False
) -> Result:
    """Train as the config says, and write the results into `folder`. fall_back: train_step.Plan's."""
    began = time.perf_counter()
    plan, state = prepared(settings, work, devices)
    plan = dataclasses.replace(plan, fall_back=fall_back)
    writes, resumed = distributed.main(), begun(folder)
    with workdir.hold(folder) if writes else contextlib.nullcontext(), file_errors(folder):
        if enter(settings, folder, devices, work.data, fall_back=fall_back):
            print(f"{folder} holds a finished run: nothing to do. Its result is in {folder / 'summary.json'}")
            params = checkpoint.parameters(folder / "checkpoints", plan.steps) if resumed else None
            summary = disk.read_json(folder / "summary.json", says="its result")
        else:
            sources = workdir.keep_sources(folder, settings.sources(), workdir.checkout()[1]) if writes else {}
            for name, content in work.files.items() if writes else ():
                if resumed and name == WORDS and (folder / name).is_file() and (folder / name).read_bytes() != content:
                    wrong = "names other words than this config makes now, of its text and by the library that is here"
                    raise errors.UserError(f"{folder / name} {wrong}, and the run cannot go on with these")
                disk.write(folder / name, content)
            flops, compiled, seconds = describe(plan, state), plan.step, 0.0
            if not (jax.config.jax_debug_nans or jax.config.jax_disable_jit):  # which look into what is not compiled
                with train_step.device_errors():
                    compiled, seconds = compile_step(plan, state)
                compilation.check_step(compiled.largest(), devices)
            state, numbers = loop.train_and_save(plan, compiled, folder, flops=flops, params=work.params)
            params = distributed.fetch(state.params)
            numbers |= {"compile_seconds": seconds, "sources": sources}
            summary = write_result(settings, plan, work, params, folder, numbers, began) if writes else {}
        check_result(summary or numbers, plan.steps, folder)
        apply = None if work.apply is None else jax.jit(work.apply)
        figures = sorted((folder / "figures").glob("*.png"))
        return Result(folder, summary, params, apply, work.task.evaluation[0], figures)


def begun(folder: pathlib.Path | None) -> bool:
    """Whether there is a checkpoint in the folder of a run, to go on from."""
    return folder is not None and checkpoint.newest(folder / "checkpoints") is not None


def prepared(
    settings: config.Settings, work: Work, devices: Mesh, *, described: bool = False
) -> tuple[train_step.Plan, train_step.State]:
    """The plan of a run, and the shapes, types and places of its state. UserError where it would not fit into memory.

    described: nothing will be made on these devices, and what fits into no device is refused.
    """
    whole = plan(settings, work.task, devices)
    settings.refuse_unused()
    state = train_step.abstract_state(work.task, whole.optimiser, mesh=devices)
    compilation.check_state(state, devices, described=described)
    return whole, state


@contextlib.contextmanager
def file_errors(folder: pathlib.Path | None) -> Iterator[None]:
    """Within this, a file, or this workdir, that can no longer be written or read (a full disk) is a RunError."""
    try:
        yield
    except BrokenPipeError:  # of the reader of what is printed
        raise
    except OSError as error:
        what = f"{error.filename or folder}: {disk.reason(error)}; once that is mended, the same command goes on"
        raise errors.RunError(f"{what} from the last checkpoint") from error


def enter(
    settings: config.Settings,
    folder: pathlib.Path,
    devices: Mesh,
    data: Mapping[str, Any] | None = None,
    *,
    fall_back: bool = False,
) -> bool:
    """Whether the folder, which is made or come back to, holds the finished run. Several processes enter together.

    Raises UserError as `workdir.enter` does, and where processes have different configs, or not the same disk.
    """
    values = settings.to_dict()
    if not distributed.same(zlib.crc32(disk.as_json(values)) >> 1):
        raise errors.UserError("the processes have different configs: start all with the same command, but --process")
    hardware = f"{devices.size} x {devices.devices.flat[0].device_kind}"
    finished = distributed.main() and workdir.enter(folder, values, hardware, data=data, fall_back=fall_back)
    finished, until = bool(distributed.agree(finished)), time.monotonic() + SHARED_SECONDS
    while not distributed.main() and not (folder / "config.json").exists():
        if time.monotonic() > until:
            raise errors.UserError(f"not all processes see what process 0 wrote in {folder}: its disk must be shared")
        time.sleep(0.5)
    return finished


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
        "commit": workdir.commit(),
    }
    if plan.keep_best:
        kept = checkpoint.best(folder / "checkpoints", plan.keep_best)
        first["checkpoints"] = {"best": kept, "last": {"step": plan.steps, plan.keep_best: final[plan.keep_best]}}
    disk.write_json(folder / "summary.json", first | last)
    files, more = draw(work, params, folder)
    summary = first | more | last
    disk.write_json(folder / "summary.json", summary)
    print(result(summary, [str(file) for file in [*files, folder / "metrics.jsonl", folder / "summary.json"]]))
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
    """Return the files that `work.figures` writes, and its numbers. An error is printed: it ends no trained run."""
    files, numbers = [], {}
    try:
        disk.tidy(disk.folder(folder, "figures"))
        for one in work.figures(params, folder, log.read(folder)):
            numbers.update(one) if isinstance(one, dict) else files.append(one)
    except errors.RunError:  # of more than a drawing
        raise
    except (Exception, SystemExit) as error:  # of anything that draws, also of the user's
        reason = errors.line(error) or "no reason is given"
        print(f"warning: not all figures in {folder} are drawn: {type(error).__name__}: {reason}", flush=True)
    return files, numbers


def result(summary: dict[str, Any], files: list[str]) -> str:
    """The block at the end of a run."""
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
    if summary["tokens_per_second"]:  # 0 where a run was resumed behind its last step
        lines.append(f"  {'throughput':<22} {summary['tokens_per_second']:,.0f} tokens/s")
    return "\n".join([*lines, *(f"  {file}" for file in files)])


def table(params: Any, trained: Sequence[bool] = ()) -> str:
    """One line per parameter: name, letters with their sizes, count; and the total. trained: which of them are, where
    not all: the others are marked as frozen."""
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


def si(value: float, unit: str) -> str:
    """1.23e9, 'FLOP' -> '1.23 GFLOP'."""
    for prefix in ("", "k", "M", "G", "T", "P"):
        if abs(value) < 1000 or prefix == "P":
            break
        value /= 1000
    return f"{value:.3g} {prefix}{unit}"


def describe(plan: train_step.Plan, state: train_step.State) -> int:
    """Print the parameter table and the FLOPs of a step, and return these: three times the forward pass."""
    shapes.check(state.params)
    forward = forward_flops(plan, state)
    batch, each = plan.growth.sizes[0], plan.task.tokens_per_example
    print(table(state.params, jax.tree.leaves(optim.trained(state.params, plan.task.frozen))))
    for first, size in zip(plan.growth.firsts, plan.growth.sizes, strict=True):
        token = f"; {si(forward / (batch * each), 'FLOP')} per token forward"
        begin, end = ("", f", after step {first:,}") if first else (" (3 x forward)", token)
        flops = si(3 * forward * size / batch, "FLOP")
        print(f"  {flops} per step{begin} of {size} examples, {size * each:,} tokens{end}", flush=True)
    return 3 * forward


def forward_flops(plan: train_step.Plan, state: train_step.State, **how: Any) -> int:
    """`compilation.flops` of the first batch, as these devices compute it, but by one alone."""
    alone = layouts.ONE._replace(platform=plan.task.layout.platform)

    loss = functools.partial(plan.task.loss, layout=alone)
    return compilation.flops(loss, state.params, plan.task.train[0], **how)


def compile_step(plan: train_step.Plan, state: train_step.State) -> tuple[compilation.Compiled, float]:
    """The training step, compiled for every batch size, and the seconds it took."""
    began, alive, compiled = time.perf_counter(), train_step.abstract_alive(plan.mesh), compilation.Compiled()
    with compilation.remarks():
        for size, first in zip(plan.growth.sizes, plan.growth.firsts, strict=True):
            if size not in compiled:
                batch = mesh.abstract_batch(plan.mesh, plan.task.train[first])
                compiled[size] = plan.step.lower(state, batch, alive).compile()
    return compiled, time.perf_counter() - began


def plan(settings: config.Settings, task: train_step.Task, devices: Mesh) -> train_step.Plan:
    """Optimiser and step from the config. Raises UserError for what does not fit together."""
    t = settings.train
    try:
        shapes.check(task.train[0])
    except shapes.ShapeError as error:
        raise errors.UserError(f"in a batch, {error}") from error
    config.at_least(1, {"train.steps": t.steps, "train.accumulation": t.accumulation})
    every = {"log": t.log_every, "evaluate": t.evaluate_every, "save": t.save_every}
    config.at_least(0, {f"train.{what}_every": n for what, n in every.items()})
    if t.nan not in train_step.NAN:
        raise errors.UserError(f'unknown train.nan "{t.nan}"; the right ones are: {", ".join(train_step.NAN)}')
    checkpoint.check_best(t.keep_best)
    if t.accumulation > 1 and settings.model.norm.startswith("batch"):
        raise errors.UserError("train.accumulation > 1 gives each part its own statistics: not with model.norm = batch")
    growth = batches.growing(t.batch_size, t.growth)
    for key, size in zip(["train.batch_size"] + [batches.GROWTH] * len(t.growth), growth.sizes, strict=True):
        mesh.check_batch(devices, key, batch=size, parts=t.accumulation)
    if growth.firsts[-1] >= t.steps:
        raise errors.UserError(
            f"{batches.GROWTH} = {t.growth} has a batch size from {growth.firsts[-1]} steps on, and train.steps = "
            f"{t.steps} ends before: leave that pair out, or train for longer"
        )
    params, frozen = jax.eval_shape(task.init, jax.random.key(0)), [*task.frozen, *settings.optim.frozen]
    mesh.check_layout(devices, task.layout, params, task.train[0])
    if frozen:
        optim.check_frozen(settings.optim.frozen, params, before=task.frozen)
        task = task._replace(frozen=frozen)
    if t.keep_best and t.keep_best not in measured(task):
        raise errors.UserError(f"train.keep_best = {t.keep_best}, but what is measured is {', '.join(measured(task))}")
    log.check(settings.log)
    probes = log.SYMMETRY in settings.log
    if probes and task.probe is None:
        raise errors.UserError(
            f"log has {log.SYMMETRY}, but there is nothing to look at: the scores here are no x^T M x, or have no "
            "`factors` that tell it (tfm/attention/score.py)"
        )
    if settings.optim.name == "hyperball" and (settings.optim.lora or settings.model.output_std == 0):
        zeros = "optim.lora" if settings.optim.lora else "model.output_std = 0"
        raise errors.UserError(f"optim.name = hyperball keeps the norms of matrices, and with {zeros} some are 0")
    rate, rule = optim.optimiser(settings, frozen)
    if ":" in settings.optim.name:
        optim.check(settings.optim.name, rule, params)
    rule = train_step.remembering(rule) if t.nan == "skip_spikes" else rule
    due = functools.partial(loop.due, every=t.log_every, steps=t.steps) if probes else None
    options = {"task": task, "optimiser": rule, "rate": rate, "mesh": devices}
    options |= {"accumulation": t.accumulation, "nan": t.nan, "probe_due": due}
    return train_step.Plan(
        task=task,
        mesh=devices,
        optimiser=rule,
        step=train_step.update(**options),
        accumulation=t.accumulation,
        growth=growth.reached(t.steps),
        steps=t.steps,
        seed=settings.seed,
        log=settings.log,
        every=every,
        keep_best=t.keep_best,
        may_skip=t.nan != "abort",
    )


def measured(task: train_step.Task) -> list[str]:
    """The names of what an evaluation of the task measures."""
    params = jax.eval_shape(task.init, jax.random.key(0))
    measures, _ = jax.eval_shape(task.loss, params, task.evaluation[0])
    return sorted(f"{loop.EVAL}{name}" for name in measures)

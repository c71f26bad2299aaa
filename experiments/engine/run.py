"""A whole run of a config: show what is built, train it, evaluate, save, and write down the result."""

import contextlib
import pathlib
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from experiments.engine import (
    checkpoint,
    compilation,
    config,
    disk,
    distributed,
    errors,
    log,
    loop,
    mesh,
    report,
    workdir,
)
from experiments.engine import plan as plans
from experiments.engine import (
    step as steps,
)
from experiments.pretrained import warm_start
from tfm import shapes

SHARED_SECONDS = 60  # in which a file that one process has written is there for all; NFS remembers for 30 what is not
# (params, folder, metrics) -> files written, or these and more final numbers by name
Figures = Callable[[Any, pathlib.Path, list[dict]], list[pathlib.Path] | tuple[list[pathlib.Path], dict[str, float]]]

Show = Callable[[plans.Plan, steps.State, int], None]  # of an abstract state, and the FLOPs of a step


class Work(NamedTuple):
    """What an experiment makes of a config, in prepare(settings, devices).

    apply: (params, batch) -> what the model answers, such as logits. kept: small files, by their names, that the
    trained model cannot be used without (its words, its classes).
    """

    task: steps.Task
    figures: Figures
    apply: Callable[[Any, dict], jax.Array] | None = None
    kept: dict[str, bytes] = {}


class Result(NamedTuple):
    """What there is when a config has been run.

    folder: that of the run; None where nothing was written. summary: what summary.json holds; report.json of a study;
    of a tool what it has told. figures: the files that were drawn. Only where one model was trained: params, the final
    ones (numpy; None where a finished run has lost its checkpoints); batch, held-out examples by the names of their
    arrays; apply(params, batch), what the model answers, such as logits.
    """

    folder: pathlib.Path | None
    summary: dict[str, Any]
    params: Any = None
    apply: Callable[[Any, dict], jax.Array] | None = None
    batch: dict[str, np.ndarray] | None = None
    figures: list[pathlib.Path] = []


def devices(settings: config.Settings, *, seeds: int = 1) -> Mesh:
    """The mesh of a run; said to the person, who may think to have another. seeds: devices that share several runs."""
    config.check_seed(settings.seed)
    device = settings.device
    mesh.start(device)
    m = settings.mesh
    devices = mesh.make(data=m.data, fsdp=m.fsdp, tensor=m.tensor, sequence=m.sequence, seed=seeds)
    print(mesh.describe(devices), flush=True)
    return devices


def run(
    settings: config.Settings, folder: pathlib.Path | None, work: Work, devices: Mesh, *, show: Show | None = None
) -> Result | None:
    """Train as the config says and write the results into `folder`; without one, only `show` what it would be."""
    began = time.perf_counter()
    task, made = work.task, plans.plan(settings, work.task, devices)
    resumed = folder is not None and checkpoint.newest(folder / "checkpoints") is not None
    imported = warm_start.load(settings, task.init, resumed=resumed, kept=work.kept)
    settings.refuse_unused()
    if folder is None and not made.debug.compiles_ahead:
        raise errors.UserError("--dry_run shows the compiled step, but with debug.nans or debug.no_jit there is none")
    compilation.check_state(steps.abstract_state(task, made.optimiser, mesh=devices), devices, described=folder is None)
    writes = folder is not None and distributed.main()
    with workdir.hold(folder) if writes else contextlib.nullcontext(), file_errors(folder):
        if folder is not None and enter(settings, folder, devices):
            print(f"{folder} holds a finished run: nothing to do. Its result is in {folder / 'summary.json'}")
            params = checkpoint.parameters(folder / "checkpoints", made.steps) if resumed else None
            return result(folder, work, disk.read_json(folder / "summary.json", says="its result"), params)
        if writes:
            workdir.keep_sources(folder, settings.sources())
        for name, content in work.kept.items() if writes else ():
            disk.write(folder / name, content)
        with loop.device_errors():
            if folder is None:  # nothing is run: shapes are enough
                state = steps.abstract_state(task, made.optimiser, mesh=devices)
            else:
                state = steps.initial_state(task, made.optimiser, seed=made.seed, mesh=devices)
                state = state.replace(params=warm_start.placed(imported, state.params))
            flops = describe(made, state)
            if folder is None:
                return show(made, state, flops)
            step, seconds = compile_step(made, state)
        if made.debug.compiles_ahead:
            compilation.check_step(step.largest(), devices)
        state, numbers = loop.train_and_save(made, state, step, folder, flops)
        numbers["compile_seconds"] = seconds
        params = distributed.fetch(state.params)
        summary = write_result(settings, made, params, folder, work.figures, numbers, began=began) if writes else {}
        return result(folder, work, summary, params)


def result(folder: pathlib.Path, work: Work, summary: dict[str, Any], params: Any) -> Result:
    """What the finished run in this folder gives to a program that goes on with it."""
    apply = None if work.apply is None else jax.jit(work.apply)
    figures = sorted((folder / "figures").glob("*.png"))
    return Result(folder, summary, params, apply, work.task.evaluation[0], figures)


@contextlib.contextmanager
def file_errors(folder: pathlib.Path | None) -> Iterator[None]:
    """Within this, a file that can no longer be written or read (a full disk, a folder that is gone) is a RunError.

    folder: the workdir, for an error that names no file.
    """
    try:
        yield
    except BrokenPipeError:  # of the reader of what is printed
        raise
    except OSError as error:
        where = error.filename or folder
        what = f"{where}: " if where else ""
        raise errors.RunError(
            f"{what}{disk.reason(error)}; once that is mended, the same command goes on from the last checkpoint"
        ) from error


def enter(settings: config.Settings, folder: pathlib.Path, devices: Mesh) -> bool:
    """Whether the folder, which is made or come back to, holds the finished run. Several processes enter together.

    Raises UserError as `workdir.enter` does, and where processes have different configs, or not the same disk.
    """
    values = settings.to_dict()
    if not distributed.same(zlib.crc32(disk.as_json(values)) >> 1):
        raise errors.UserError("the processes have different configs: start all with the same command, but --process")
    here = values, settings.defaults(), workdir.hardware(devices)
    changed = workdir.changes(folder, values, devices) if distributed.main() else []  # before config.json is anew
    finished = distributed.agree(distributed.main() and workdir.enter(folder, *here))
    for line in changed if not finished else ():
        print(line, flush=True)
    until = time.monotonic() + SHARED_SECONDS
    while not distributed.main() and not (folder / "config.json").exists():
        if time.monotonic() > until:
            raise errors.UserError(f"not all processes see what process 0 wrote in {folder}: its disk must be shared")
        time.sleep(0.5)
    return bool(finished)


def write_result(
    settings: config.Settings,
    made: plans.Plan,
    params: Any,
    folder: pathlib.Path,
    figures: Figures,
    numbers: dict[str, float],
    *,
    began: float,
) -> dict[str, Any]:
    """Draw the figures of a trained model, and write, print and return its summary with these numbers.

    began: when the run did, in seconds of time.perf_counter.
    """
    disk.tidy(disk.folder(folder, "figures"))
    shown = figures(params, folder, log.read(folder))
    files, more = shown if isinstance(shown, tuple) else (shown, {})
    summary = {
        "experiment": settings.experiment,
        "steps": made.steps,
        "params": shapes.total(params),
        "params_sha256": checkpoint.digest(params),
        **numbers,
        **more,
        **{f"baseline/{name}": value for name, value in made.task.baseline.items()},
        "guess": dict(made.task.guess),
        "wall_seconds": time.perf_counter() - began,
        "devices": made.mesh.size,
        "backend": mesh.backend(made.mesh),
        "versions": mesh.versions(),
        "commit": workdir.commit(),
    }
    disk.write_json(folder / "summary.json", summary)
    print(report.result(summary, [str(file) for file in [*files, folder / "metrics.jsonl", folder / "summary.json"]]))
    return summary


def describe(made: plans.Plan, state: steps.State) -> int:
    """Print the parameter table and the FLOPs of a step, and return these: three times the forward pass."""
    shapes.check(state.params)
    example = made.task.train[0]
    forward = compilation.flops(made.task.loss_and_metrics, state.params, example, None)
    batch, each = made.growth.sizes[0], made.task.tokens_per_example
    print(report.table(state.params))
    print(
        f"  {report.si(3 * forward, 'FLOP')} per step (3 x forward) of {batch} examples, {batch * each:,} tokens;"
        f" {report.si(forward / (batch * each), 'FLOP')} per token forward",
        flush=True,
    )
    for first, size in list(zip(made.growth.firsts, made.growth.sizes, strict=True))[1:]:
        larger = report.si(3 * forward * size / batch, "FLOP")
        print(f"  {larger} per step of {size} examples, {size * each:,} tokens, after step {first:,}", flush=True)
    return 3 * forward


def compile_step(made: plans.Plan, state: steps.State) -> tuple[Any, float]:
    """The training step, compiled for every batch size unless debug says otherwise, and the seconds it took."""
    if not made.debug.compiles_ahead:
        return made.step, 0.0
    batches = (mesh.abstract_batch(made.mesh, made.task.train[first]) for first in made.growth.firsts)
    return compilation.ahead(made.step, state, batches, steps.abstract_alive(made.mesh))


def loss_figure(file: pathlib.Path, rows: list[dict], *, unit: str, title: str) -> pathlib.Path:
    """Draw training and evaluation loss from the rows of metrics.jsonl."""
    from experiments.engine import figures  # matplotlib is slow to import, and only needed here

    curves = {
        part: {row["step"]: row[f"{part}/loss"] for row in rows if row.get(f"{part}/loss") is not None}
        for part in ("train", "eval")
    }
    figures.loss_curves(file, train=curves["train"], evaluation=curves["eval"], ylabel=f"loss, {unit}", title=title)
    return file

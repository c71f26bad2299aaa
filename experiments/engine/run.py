"""A single run: plan it, print the parameter table, train, evaluate, save, and write the result."""

import contextlib
import dataclasses
import functools
import json
import pathlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from experiments.config import disk, errors, settings as configs
from experiments.devices import compilation, distributed, mesh as meshes
from experiments.engine import batches, loop, nonfinite, run_plan, signals, summary as summaries, train_step
from experiments.folder import checkpoint, log, records, workdir as workdirs

TOKENIZER = "tokenizer.json"  # a run cannot resume with another tokenizer
DATA = records.DATA
# (work, params, folder, rows of metrics.jsonl) -> dicts of further metrics, then paths of figures (drawing may fail)
Figures = Callable[[Any, Any, pathlib.Path, list[dict]], Iterable[pathlib.Path | dict[str, Any]]]


class Work(NamedTuple):
    """The result of an experiment's prepare(settings, mesh): what a run needs to train, evaluate, save and plot."""

    task: train_step.Task
    figures: Figures | None = None  # draws after the training, and may add metrics; None: the loss by step
    apply: Callable[[Any, dict], jax.Array] | None = None  # (params, batch) -> outputs, such as logits
    model: Any = None  # the functions of the model (tfm/models.py), for figures, samples and tools
    inputs: Callable[[dict], dict] | None = None  # batch -> the arguments of model.hidden
    files: Mapping[str, bytes] = {}  # name -> content of files that a use of the model needs: tokenizer, classes
    params: Mapping[str, np.ndarray] = {}  # initial parameters by path, in place of random ones
    lines: Sequence[str] = ()  # lines about the data, to print before training
    data_sha256: str | None = None  # digest of the data; None: generated, or unknown
    # for a user's experiment: the built-in experiment whose inputs and outputs `model` has, so that tools open the run
    kind: str = ""

    @property
    def data(self) -> dict[str, Any]:
        """{"sha256": digest of the data, "classes": the names of their classes in order}, each None if unknown."""
        return {"sha256": self.data_sha256, "classes": json.loads(self.files.get(records.DATA, b"{}")).get("classes")}


class Result(NamedTuple):
    """The result of a config's run. params, apply and batch are set only if a single model was trained."""

    folder: pathlib.Path | None  # None if nothing was written
    summary: dict[str, Any]  # the content of summary.json; report.json of a study; the output of a tool
    params: Any = None  # final parameters (numpy); None if a finished run has no checkpoint any more
    apply: Callable[[Any, dict], jax.Array] | None = None  # (params, batch) -> outputs, such as logits
    batch: dict[str, np.ndarray] | None = None  # the first batch of held-out examples
    figures: list[pathlib.Path] = []

    def __repr__(self) -> str:  # for notebooks: not thousands of lines of numbers
        return f"Result(folder={str(self.folder)!r}; {', '.join(self._fields[1:])})"


def make_mesh(
    settings: configs.Settings, device: str = "any", *, seeds: int = 1, chips: Sequence[Any] | None = None
) -> Mesh:
    """Make the mesh of a run, and print it. Raises UserError if it does not fit the devices.

    device: "any", "cpu", "gpu" or "tpu"; unused with `chips`. seeds: in a study, the number of devices along the axis
    of runs. chips: the devices to use; None: all that JAX lists.
    """
    if chips is None:
        compilation.start(device)
    m = settings.mesh
    devices = meshes.make(data=m.data, fsdp=m.fsdp, tensor=m.tensor, sequence=m.sequence, seed=seeds, devices=chips)
    print(meshes.describe(devices, chips), flush=True)
    values, backend = configs.flat(settings.to_dict()), meshes.backend(devices)
    if values.get("model.compute_dtype") == "bfloat16" and backend == "cpu":
        print("  model.compute_dtype = bfloat16 is slower than float32 on a CPU: it is for GPUs and TPUs", flush=True)
    if values.get("train.deterministic") and backend != "gpu":
        print(f"  train.deterministic = true changes nothing on a {backend.upper()}: it is for GPUs", flush=True)
    return devices


def run(
    settings: configs.Settings,
    folder: pathlib.Path,
    work: Work,
    devices: Mesh,
    *,
    resume: int | None = None,
    is_locked: bool = False,
) -> Result:
    """Train, and write the results into `folder`. If `folder` holds a finished run, only return its results.

    resume: the checkpoint's step to resume from; None: the newest. is_locked: whether the caller has locked the folder.
    Raises RunError if the final loss is not finite, or if more than half of the steps were skipped.
    """
    began = time.perf_counter()
    plan, state = run_plan.prepare(settings, work.task, devices)
    plan = dataclasses.replace(plan, resume=resume)
    writes = distributed.is_main()
    with workdirs.lock(folder) if writes and not is_locked else contextlib.nullcontext(), file_errors(folder):
        resumed = workdirs.has_checkpoint(folder)
        hardware = f"{devices.size} x {devices.devices.flat[0].device_kind}"
        if workdirs.open_run(folder, settings.to_dict(), hardware, data=work.data, resume=resume):
            print(f"{folder} holds a finished run: nothing to do. Its result is in {folder / records.SUMMARY}")
            params = checkpoint.parameters(folder / records.CHECKPOINTS, plan.steps) if resumed else None
            summary = records.read_summary(folder)
        else:
            sources = keep_files(settings, folder, work, resumed) if writes else {}
            flops, (step, seconds) = summaries.print_model(plan, state), run_plan.compile_step(plan, state)
            with open_training(plan, folder, flops=flops, params=work.params) as (training, start, state):
                data = batches.iterate(plan.task.train, start=start)
                state = loop.train(training, step, state, data, start=start)
            plan = dataclasses.replace(plan, steps=training.saver.step)  # fewer with train.patience
            summary, params = final_numbers(training, state), distributed.fetch(state.params)
            if writes:
                common = summaries.describe(plan, settings.experiment, work.data_sha256)
                common |= {"compile_seconds": seconds, "wall_seconds": time.perf_counter() - began, "sources": sources}
                figures = functools.partial(work.figures, work)
                summary = summaries.write_result(plan, figures, params, folder, summary, common)
        summaries.check_result(summary, plan.steps, folder)
        apply = None if work.apply is None else jax.jit(work.apply)
        figures = sorted((folder / "figures").glob("*.png"))
        return Result(folder, summary, params, apply, work.task.evaluation[0], figures)


@contextlib.contextmanager
def open_training(
    plan: run_plan.Plan, folder: pathlib.Path, *, flops: int, params: Mapping[str, np.ndarray]
) -> Iterator[tuple[loop.Training, int, train_step.State]]:
    """Context manager: open logs and checkpoints, and yield (training, step to start from, state of this step).

    The step is that of the checkpoint to resume from, or 0. flops: of the first step. params: initial values by path.
    Signals are recorded, and at any exit the pending save is completed. Raises RunError if a number is not finite or
    the disk or a device fails, and Interrupted for a signal.
    """
    requests = signals.current()
    requests.raise_if_requested()
    with contextlib.ExitStack() as stack:
        saves = checkpoint.Checkpoints(folder / records.CHECKPOINTS, keep=plan.keep, best=plan.keep_best)
        stack.enter_context(contextlib.closing(saves))
        stack.enter_context(train_step.device_errors())
        start, state = start_state(plan, saves, folder, params)
        line = make_progress(plan, start, flops)
        stack.enter_context(contextlib.closing(line))
        logs, clock = loop.Logs(plan, [folder], line, start=start), loop.Clock(plan, requests)
        stack.enter_context(contextlib.closing(logs))
        saver = loop.Saver(plan, folder, saves, clock, logs.evaluations, start=start, check=nonfinite.check)
        measure, on_failure = train_step.evaluator(plan.task, plan.mesh), nonfinite.abort(plan, folder, saves)
        training = loop.Training(plan, clock, saver, logs, measure, on_failure=on_failure)
        with requests.collect():
            if start and clock.is_due("evaluate", start):
                loop.catch_up(training, start, state)
            yield training, start, state
            saver.stop_if_requested(requests.agree())  # a signal after the last step
        requests.raise_if_requested()  # a signal after this check


def final_numbers(training: loop.Training, state: train_step.State) -> dict[str, Any]:
    """Return {name: number}: metrics of the last evaluation, "tokens_per_second", and "skipped".

    "skipped", the number of skipped steps, is left out if it is 0 and train.nan allows none.
    """
    numbers = {name: float(value) for name, value in training.logs.final.items()}
    numbers["tokens_per_second"] = training.logs.line.tokens_per_second()
    skipped = int(jax.device_get(state.step - train_step.count_updates(state.opt_state)))
    return numbers | ({"skipped": skipped} if training.plan.may_skip or skipped else {})


def keep_files(settings: configs.Settings, folder: pathlib.Path, work: Work, resumed: bool) -> dict[str, str]:
    """Write copies of the user's code, and work.files (such as a tokenizer). Return name -> SHA-256 of copied code.

    Raises UserError if a run would resume with another tokenizer.
    """
    sources = workdirs.keep_sources(folder, settings.sources(), workdirs.read_commit()[1])
    for name, content in work.files.items():
        file = folder / name
        if resumed and name == TOKENIZER and file.is_file() and disk.read_bytes(file) != content:
            raise errors.UserError(f"{file} differs from the tokenizer of this config. Resume with the same tokenizer")
        disk.write(file, content)
    return sources


@contextlib.contextmanager
def file_errors(folder: pathlib.Path | None) -> Iterator[None]:
    """Context manager: convert an error of the file system, such as a full disk, into a RunError.

    The message names the file of the error or, if the error has none, `folder`. BrokenPipeError passes unchanged.
    """
    try:
        yield
    except BrokenPipeError:  # stdout has no reader
        raise
    except OSError as error:
        place = f"{error.filename or folder}: {disk.reason(error)}"
        raise errors.RunError(f"{place}. Fix it, then the same command resumes from the last checkpoint") from error


def start_state(
    plan: run_plan.Plan, saves: checkpoint.Checkpoints, folder: pathlib.Path, params: Mapping[str, np.ndarray]
) -> tuple[int, train_step.State]:
    """Load the checkpoint to resume from, or initialise step 0. Return the step and the state.

    folder: of the run. params: initial values by path, which replace random ones at step 0.
    """
    like = train_step.abstract_state(plan.task, plan.optimiser, mesh=plan.mesh)  # memory never holds two states
    if resumed := saves.resume(like, plan.resume):
        if distributed.is_main():
            print(f"resuming {folder} at step {resumed[0]:,}")
        return resumed
    return 0, train_step.initial_state(plan.task, plan.optimiser, seed=plan.seed, mesh=plan.mesh, params=params)


def make_progress(plan: run_plan.Plan, start: int, flops: int) -> log.Progress:
    """Return the progress bar of a single run, which begins at step `start`. flops: FLOPs of the first step."""
    per_example = plan.task.tokens_per_example
    options = {"start": start, "steps": plan.steps, "flops": flops / (plan.growth.sizes[0] * per_example)}
    peak = functools.partial(compilation.measure_peak, devices=plan.mesh)
    return log.Progress(lambda n: plan.growth.before(n) * per_example, peak=peak, **options)

"""Check a program of a study, train its runs together from step 0 or a checkpoint, and write their results."""

import contextlib
import functools
import pathlib
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from experiments.config import by_name, disk, errors, settings as configs
from experiments.devices import compilation, distributed, mesh as meshes
from experiments.dry_run import topology as topologies
from experiments.engine import batches, causality, loop, optim, run as runs, run_plan, summary as summaries, train_step
from experiments.folder import checkpoint
from experiments.pretrained import adapters, warm_start
from experiments.studies import runs as study_runs, study as studies, vmapped_runs
from experiments.studies.progress import Progress
from tfm import shapes


class Session(NamedTuple):
    """Inputs shared by all programs of one command."""

    study: studies.Study
    devices: Mesh
    requests: Any  # signals.Requests
    measure: bool  # log the symmetry of scores
    keep_weights: bool  # keep the last checkpoint of every run in its folder
    printed: set[str]  # lines about the data that were printed already
    causal: set[tuple[str, str]] | None  # (condition, arm) that `causality.check` has accepted; None: a dry run


class Checked(NamedTuple):
    """A program that passed the checks, with its sizes. It holds no training data: a study may have many programs."""

    program: studies.Program
    lines: Sequence[str]  # about the data, as in runs.Work
    steps: int
    params: int  # of one run
    flops: int  # of the forward pass for one batch of one run
    data: dict[str, Any] = {}  # the identity of the data, as in runs.Work

    @property
    def step_flops(self) -> float:
        """FLOPs of one step of all runs; positive also for a model without matrix products."""
        return 3.0 * max(self.flops, 1) * len(self.program.runs)

    @property
    def work(self) -> float:
        """FLOPs of all steps of all runs."""
        return self.step_flops * self.steps

    def __str__(self) -> str:
        size = f"{self.params:,} parameters each, {len(self.program.runs)} x {self.steps:,} steps of"
        return f"{self.program.name}: {size} {summaries.format_si(3 * self.flops, 'FLOP')}"


class Ready(NamedTuple):
    """A checked program with the data of every seed, ready to be trained."""

    plan: run_plan.Plan  # of the first run
    vmapped: vmapped_runs.VmappedRuns
    tasks: dict[int, train_step.Task]  # by seed
    numbers: dict[str, jax.Array]  # setting -> its value in each of R rows, if it differs between them
    initial: Callable[..., train_step.State]  # returns the state of all rows at step 0 (vmapped_runs.initial_state)
    batch: dict[str, jax.ShapeDtypeStruct]  # shapes of the batch of a step
    work: runs.Work  # of the first run; `params` replace the random parameters of every run


def check(program: studies.Program, session: Session) -> Checked:
    """Check the first run of every arm, and return the program with its steps, and a run's parameters and FLOPs.

    The FLOPs are those of the forward pass for one batch. Raises UserError, which names the condition and the arm, if
    the run cannot be trained or does not measure the study's metric.
    """
    for run in {run.arm: run for run in reversed(program.runs)}.values():
        with studies.naming(f"condition {run.condition}, arm {run.arm}"):
            work, plan = _check_run(program, run, session)
    task, params = work.task, jax.eval_shape(work.task.init, jax.random.key(0))
    flops = compilation.flops(task.loss, params, task.train[0])
    return Checked(program, work.lines, plan.steps, shapes.total(params), flops, work.data)


def _check_run(program: studies.Program, run: studies.Run, session: Session) -> tuple[runs.Work, run_plan.Plan]:
    """Return a run's work and plan. Raises UserError if settings are invalid, or if it does not measure the metric."""
    settings, t = run.settings, run.settings.train
    metric = next(entry.metric for entry in session.study.conditions if entry.name == run.condition)
    work = prepare_work(program, settings, session.devices)
    warm_start.load(settings, work.task.init, resumed=False, files=work.files)
    plan = run_plan.make_plan(settings, work.task, session.devices)
    values = f"train.growth = {t.growth}, train.nan = {t.nan}, train.keep_best = {t.keep_best}"
    changed = f"{values}: a study needs the defaults. Leave these settings out."
    errors.refuse((t.growth or t.nan != "abort" or t.keep_best, changed))  # train.patience needs keep_best
    metrics = run_plan.list_metrics(work.task)
    choice = f"study.metric = {metric} is not measured. Choose one of: {', '.join(metrics)}"
    errors.refuse((metric not in metrics, choice))
    checkpoint.choose_best(metric, work.task.better, key="study.metric")
    for axis in settings.mesh.to_dict():
        getattr(settings.mesh, axis)  # counts as used: the study has read the mesh for all runs
    settings.refuse_unused()
    if session.causal is not None and (run.condition, run.arm) not in session.causal:
        causality.check(settings, plan.task)
        session.causal.add((run.condition, run.arm))
    return work, plan


def prepare_work(program: studies.Program, settings: configs.Settings, devices: Mesh) -> runs.Work:
    """Return the Work of a run; for tuning runs, on the tuning split. Raises UserError if that split is missing."""
    work = adapters.prepare_work(settings, by_name.load_experiment(settings.experiment), devices)
    if not program.tuning:
        return work
    missing = f'study.tune: the experiment "{settings.experiment}" has no tuning split of its data. '
    rule = "Build its task with splits.make_splits, or leave study.tune out."
    errors.refuse((work.task.tuning is None, missing + rule))
    return work._replace(task=work.task._replace(**work.task.tuning(), baseline=None))


def prepare(job: Checked, devices: Mesh) -> Ready:
    """Load the data of every seed of a program, which is several runs, and prepare their training together."""
    program = job.program
    first, settings = program.runs[0], {run.seed: run.settings for run in program.runs}
    works = {seed: prepare_work(program, settings[seed], devices) for seed in settings}
    work = works[first.seed]
    with contextlib.redirect_stdout(None):  # `check` has printed the same lines
        start = warm_start.load(first.settings, work.task.init, resumed=False, files=work.files)
    plan = run_plan.make_plan(first.settings, work.task, devices)
    optimiser = functools.partial(optim.make_optimiser, first.settings, plan.task.frozen)
    batched = vmapped_runs.side_by_side(devices, 3 * job.flops)
    vmapped = vmapped_runs.VmappedRuns(plan.task, optimiser, devices, plan.accumulation, batched)
    numbers = {name: jnp.asarray(column_R) for name, column_R in program.numbers.items()}
    initial = functools.partial(vmapped_runs.initial_state, vmapped, [run.seed for run in program.rows], numbers)
    batch = meshes.abstract_batch(devices, plan.task.train[0], rows=len(program.rows))
    tasks = {seed: work.task for seed, work in works.items()}
    return Ready(plan, vmapped, tasks, numbers, initial, batch, work._replace(params={**work.params, **start}))


def train(job: Checked, folder: pathlib.Path, session: Session, sources: Mapping[str, str], progress: Progress) -> None:
    """Train or resume the runs, and write their results into the study's folder. Raises Interrupted for a signal.

    sources: SHA-256 of each file of the user's code, by name.
    """
    program, saved = job.program, disk.folder(folder, "checkpoints") / job.program.folder
    ready = prepare(job, session.devices)
    session.requests.raise_if_requested()
    began, task = time.perf_counter(), ready.plan.task
    with contextlib.ExitStack() as stack:
        stack.enter_context(train_step.device_errors())
        saves = stack.enter_context(contextlib.closing(checkpoint.Checkpoints(saved, keep=2)))
        start, state, sketches = _begin(ready, saves)
        compiled, compile_seconds = _compile(ready, state)
        session.requests.raise_if_requested()  # before anything is written
        logs = loop.Logs(ready.plan, [folder / run.name for run in program.runs], progress, start=start)
        stack.enter_context(contextlib.closing(logs))
        clock = loop.Clock(ready.plan, session.requests)
        saver = loop.Saver(ready.plan, folder, saves, clock, [], start=start)
        training = loop.Training(ready.plan, clock, saver, logs, vmapped_runs.evaluator(ready.vmapped))
        if session.measure and task.probe:
            training = training._replace(probe=jax.jit(jax.vmap(task.probe)))
        if not start or clock.is_due("evaluate", start):  # also at step 0
            loop.catch_up(training, start, state)
        progress.start(start)
        state = loop.train(
            training,
            lambda state, batch, alive: compiled(state, batch, alive, ready.numbers),
            state,
            _batches(program, ready, start),
            start=start,
            alive=np.asarray(jax.device_get(state.step) == start),
            place=meshes.place_rows,
        )
        if logs.final_step != job.steps:  # all runs have failed before
            loop.evaluate(training, job.steps, state, saves=False)
        seconds = time.perf_counter() - began if start == 0 else None  # unknown after a resume
        common = _describe(job, ready, seconds, compile_seconds) | {"sources": dict(sources)}
        _write_results(job, ready, folder, session, training, state, sketches, common)
    shutil.rmtree(saved)  # last: until here, a restart resumes from it


def _begin(ready: Ready, saves: checkpoint.Checkpoints) -> tuple[int, train_step.State, list[study_runs.Sketch]]:
    """Return the step to start or resume from, the state of all runs after it, and a sketch of each run's weights.

    The sketches are of the initial weights, also in a resumed program.
    """
    start, state = 0, ready.initial()
    state = state.replace(params=distributed.put_into(state.params, ready.work.params))
    sketches = study_runs.sketches(state.params)
    if saves.measured:
        del state  # two states may not fit into memory
        start, state = saves.resume(ready.initial(abstract=True))
    return start, state, sketches


def _compile(ready: Ready, state: train_step.State) -> tuple[Callable, float]:
    """Compile the step. Return the compiled step and the seconds of compilation."""
    began, compiled = time.perf_counter(), vmapped_runs.step(ready.vmapped)
    if jax.config.jax_debug_nans or jax.config.jax_disable_jit:  # both need the jitted function
        return compiled, 0.0
    alive = train_step.abstract_alive(ready.vmapped.mesh, len(state.step))
    return compiled.lower(state, ready.batch, alive, ready.numbers).compile(), time.perf_counter() - began


def _batches(program: studies.Program, ready: Ready, start: int) -> Iterator[list[dict]]:
    """Yield for each step the list of batches, one for each row. Rows of the same seed share a batch."""
    for seed_batches in zip(*(batches.iterate(task.train, start=start) for task in ready.tasks.values()), strict=True):
        batch = dict(zip(ready.tasks, seed_batches, strict=True))
        yield [batch[run.seed] for run in program.rows]


def _describe(job: Checked, ready: Ready, seconds: float | None, compile_seconds: float) -> dict[str, Any]:
    """Return the entries of summary.json that all runs of the program share.

    seconds: the time of all runs together; None if unknown.
    """
    task, runs_together = ready.plan.task, len(job.program.runs)
    held_out = task.evaluation
    times: dict[str, float] = {"compile_seconds": compile_seconds}
    if seconds is not None:
        times["wall_seconds"] = seconds / runs_together
        times["seconds_per_step"] = (seconds - compile_seconds) / runs_together / job.steps
    return {
        **summaries.describe(ready.plan, job.program.runs[0].settings.experiment, ready.work.data_sha256),
        "flops_per_step": 3 * job.flops,
        "flops_per_token": job.flops / (ready.plan.growth.sizes[0] * task.tokens_per_example),
        "data": list(job.lines),
        "evaluation_crc32": study_runs.crc32(held_out[0])
        ^ len(held_out)
        ^ (study_runs.crc32(held_out[-1]) if held_out[1:] else 0),
        "together": runs_together,
        **times,
    }


def _write_results(
    job: Checked,
    ready: Ready,
    folder: pathlib.Path,
    session: Session,
    training: loop.Training,
    state: train_step.State,
    sketches: list[study_runs.Sketch],
    common: dict[str, Any],
) -> None:
    """Write the results of every run. common: the entries of summary.json that all runs share."""
    take_row = jax.jit(lambda state, r: jax.tree.map(lambda x: x[r], state))
    for r, run in enumerate(job.program.runs):
        training.saver.stop_if_requested(session.requests.agree())
        place, row = folder / run.name, take_row(state, r)
        last_step = int(row.step)
        if session.keep_weights:  # so that tools can open the run's folder as that of a single run
            for name, content in ready.work.files.items():
                disk.write(place / name, content)
            with contextlib.closing(checkpoint.Checkpoints(place / "checkpoints", keep=1)) as saves:
                saves.save(job.steps, row)
        summary = {
            "condition": run.condition,
            "arm": run.arm,
            "seed": run.seed,
            "params_sha256": checkpoint.digest(jax.device_get(row.params)),
            **{name: float(column[r]) for name, column in training.logs.final.items()},
            "diverged_at": None if last_step == job.steps else last_step + 1,
            "training_crc32": study_runs.crc32(ready.tasks[run.seed].train[0]),
            "initial": sketches[r],
        }
        disk.write_json(place / "summary.json", summary | common)  # last: it marks the run as finished


def requests(job: Checked, devices: Mesh) -> Iterator[topologies.Request]:
    """Yield the step and the evaluation of a program as requests for `topologies.compile_programs`."""
    ready, rows, name = prepare(job, devices), len(job.program.rows), job.program.name
    state, alive = ready.initial(abstract=True), train_step.abstract_alive(devices, rows)
    held_out = meshes.abstract_batch(devices, ready.plan.task.evaluation[0])
    arguments = state, ready.batch, alive, ready.numbers
    yield topologies.Request(f"step of {name}", vmapped_runs.step(ready.vmapped), arguments)
    yield topologies.Request(f"evaluation of {name}", vmapped_runs.held_out(ready.vmapped), (state.params, held_out))

"""A program of a study before it is trained: every run is checked, and data, model and optimiser are made."""

import contextlib
import functools
from collections.abc import Iterator
from typing import NamedTuple

import jax
from jax.sharding import Mesh

from experiments.engine import by_name, compilation, config, errors, loop, mesh, step
from experiments.engine import run as single
from experiments.studies import study, vmapped_runs
from tfm import shapes


class Checked(NamedTuple):
    """What is known of a program that can be trained. It holds no data: a study may have many programs."""

    program: study.Program
    lines: list[str]  # of the experiment, about its data
    steps: int
    params: int  # of one run
    flops: int  # of the forward pass for one batch of one run
    evaluation: float  # how many steps one is worth
    every: int  # steps between evaluations

    @property
    def step(self) -> float:
        """FLOPs of a step of all runs; never 0, which only a model without a matrix product would have."""
        return 3.0 * max(self.flops, 1) * len(self.program.runs)

    @property
    def work(self) -> float:
        """FLOPs of all steps of all runs."""
        return self.step * self.steps

    def ahead(self, n: int) -> tuple[float, float]:
        """FLOPs of all runs from the end of step n on: of steps, and of evaluations."""
        evaluations = loop.times(n, every=self.every, steps=self.steps)
        return self.step * (self.steps - n), self.step * self.evaluation * evaluations


class Ready(NamedTuple):
    """The program itself."""

    program: study.Program
    lines: list[str]
    plan: step.Plan  # of the first run
    vmapped: vmapped_runs.VmappedRuns
    tasks: dict[int, step.Task]  # by seed


def check(program: study.Program, devices: Mesh, *, metric: str) -> Checked:
    """UserError, which says whose it is, where a run of the program could not be trained, or not be compared."""
    spread = devices.shape.get(mesh.SEED, 1)
    if len(program.runs) % spread:
        raise errors.UserError(
            f"the {len(program.runs)} runs of {program.name} do not divide evenly over mesh.seed = {spread}"
        )
    first_of: dict[str, study.Run] = {}
    for run in program.runs:
        first_of.setdefault(run.arm, run)
    for one in first_of.values():
        with naming(one):
            work = _work(one, devices)
            plan = single.plan(one.settings, work.task, devices)
            _check(one.settings, work.task, metric)
    task = work.task
    params = jax.eval_shape(task.init, jax.random.key(0))
    flops = compilation.flops(task.loss_and_metrics, params, task.train[0], None)
    evaluation = loop.evaluation_work(task, batch=plan.growth.sizes[0])
    return Checked(
        program, list(work.lines), plan.steps, shapes.total(params), flops, evaluation, plan.every["evaluate"]
    )


def prepare(program: study.Program, devices: Mesh, *, batched: bool) -> Ready:
    """The program, which was checked, with its data."""
    first = program.runs[0]
    works = {seed: _work(run, devices) for seed, run in {run.seed: run for run in program.runs}.items()}
    task = works[first.seed].task
    plan = single.plan(first.settings, task, devices)
    optimiser = functools.partial(single.optimiser, first.settings)
    vmapped = vmapped_runs.VmappedRuns(task, optimiser, devices, plan.accumulation, batched)
    return Ready(program, list(works[first.seed].lines), plan, vmapped, {s: work.task for s, work in works.items()})


@contextlib.contextmanager
def naming(run: study.Run) -> Iterator[None]:
    """Within this, a UserError says whose it is."""
    try:
        yield
    except errors.UserError as error:
        raise errors.UserError(f"condition {run.condition}, arm {run.arm}: {error}") from error


def _work(run: study.Run, devices: Mesh) -> single.Work:
    """What the experiment makes of one run."""
    return by_name.experiment(run.settings.experiment).prepare(run.settings, devices)


def _check(settings: config.Settings, task: step.Task, metric: str) -> None:
    """UserError for settings of a run that have no meaning in a study, or a metric that it does not measure."""
    t = settings.train
    if t.growth or t.nan != "abort" or t.spike or t.keep_best:
        raise errors.UserError(
            "train.growth, nan, spike and keep_best are not for a study: leave them as they are in configs/base.py"
            " (a run whose numbers go wrong stops there, and the others go on)"
        )
    if metric not in single.measured(task):
        raise errors.UserError(f"study.metric = {metric}, but what is measured is {', '.join(single.measured(task))}")
    for key in ("device", *(f"mesh.{axis}" for axis in settings.mesh.to_dict())):
        functools.reduce(getattr, key.split("."), settings)  # the whole study has read it
    settings.refuse_unused()

"""A program of a study before it is trained: every run is checked, and data, model and optimiser are made."""

import contextlib
import functools
import io
from collections.abc import Iterator
from typing import NamedTuple

import jax
from jax.sharding import Mesh

from experiments.engine import by_name, compilation, config, debug, errors, mesh, plan
from experiments.engine import step as steps
from experiments.studies import study
from experiments.studies import vmapped_runs as together
from tfm import shapes


class Checked(NamedTuple):
    """What is known of a program that can be trained. It holds no data: a study may have many programs."""

    program: study.Program
    said: list[str]  # by the experiment, about its data
    steps: int
    params: int  # of one run
    flops: int  # of the forward pass for one batch of one run
    evaluation: float  # how many steps one is worth
    every: int  # steps between evaluations

    @property
    def step(self) -> float:
        """FLOPs of a step of all runs; never 0, which only a model without a matrix product would have."""
        return 3.0 * max(self.flops, 1) * len(self.program.rows)

    @property
    def work(self) -> float:
        """FLOPs of all steps of all runs."""
        return self.step * self.steps

    def ahead(self, n: int) -> tuple[float, float]:
        """FLOPs of all runs from the end of step n on: of steps, and of evaluations."""
        evaluations = plan.times(n, every=self.every, steps=self.steps)
        return self.step * (self.steps - n), self.step * self.evaluation * evaluations


class Ready(NamedTuple):
    """The program itself."""

    program: study.Program
    said: list[str]
    made: plan.Plan  # of the first run
    together: together.Together
    tasks: dict[int, steps.Task]  # by seed


def check(program: study.Program, devices: Mesh, *, metric: str) -> Checked:
    """UserError, which says whose it is, where a run of the program could not be trained, or not be compared."""
    spread = devices.shape.get(mesh.SEED, 1)
    if len(program.rows) % spread:
        raise errors.UserError(
            f"the {len(program.rows)} runs of {program.name} do not divide evenly over mesh.seed = {spread}"
        )
    first_of: dict[str, study.Row] = {}
    for row in program.rows:
        first_of.setdefault(row.arm, row)
    for one in first_of.values():
        with naming(one):
            task, said = _task(one, devices)
            made = plan.plan(one.settings, task, devices)
            _check(one.settings, task, metric)
    params = jax.eval_shape(task.init, jax.random.key(0))
    flops = compilation.flops(task.loss_and_metrics, params, task.train[0], None)
    evaluation = plan.evaluation_work(task, batch=made.growth.sizes[0])
    return Checked(program, said, made.steps, shapes.total(params), flops, evaluation, made.every["evaluate"])


def prepare(program: study.Program, devices: Mesh, *, batched: bool) -> Ready:
    """The program, which was checked, with its data."""
    row = program.rows[0]
    found = {seed: _task(first, devices) for seed, first in {one.seed: one for one in program.rows}.items()}
    task, said = found[row.seed]
    made, growth = plan.plan(row.settings, task, devices), plan.growth_of(row.settings, devices)
    optimiser = functools.partial(plan.optimiser, row.settings, growth)
    of = together.Together(task, optimiser, devices, made.accumulation, batched)
    return Ready(program, said, made, of, {seed: task for seed, (task, _) in found.items()})


@contextlib.contextmanager
def naming(row: study.Row) -> Iterator[None]:
    """Within this, a UserError says whose it is."""
    try:
        yield
    except errors.UserError as error:
        raise errors.UserError(f"condition {row.condition}, arm {row.arm}: {error}") from error


def _task(row: study.Row, devices: Mesh) -> tuple[steps.Task, list[str]]:
    """The task of one run, and what its experiment says of its data."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        task = by_name.experiment(row.settings.experiment).prepare(row.settings, devices).task
    return task, said.getvalue().splitlines()


def _check(settings: config.Settings, task: steps.Task, metric: str) -> None:
    """UserError for settings of a run that have no meaning in a study, or a metric that it does not measure."""
    t = settings.train
    if t.growth or t.nan != "abort" or t.spike or t.keep_best:
        raise errors.UserError(
            "train.growth, nan, spike and keep_best are not for a study: leave them as they are in configs/base.py"
            " (a run whose numbers go wrong stops there, and the others go on)"
        )
    if t.probe:
        raise errors.UserError("train.probe is for a run alone: a study has study.probe")
    if debug.switches(settings.debug).check_shapes:
        raise errors.UserError("debug.check_shapes is for a run alone, as any of a study's can be trained")
    if metric not in plan.measured(task):
        raise errors.UserError(f"study.metric = {metric}, but what is measured is {', '.join(plan.measured(task))}")
    for key in ("device", "compilation_cache", *(f"mesh.{axis}" for axis in settings.mesh.to_dict())):
        functools.reduce(getattr, key.split("."), settings)  # the whole study has read it
    settings.refuse_unused()

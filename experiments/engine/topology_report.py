"""What the compiler says of a step for chips that need not be there: for a person, and as JSON."""

from typing import Any

import jax

from experiments.engine import cost, errors, mesh, report, topology, train
from experiments.engine import plan as plans


def training(made: plans.Plan, state: train.State, flops: int) -> None:
    """Compile and show the steps of a run, one for each size of its batches, and its evaluation."""
    programs = []
    for first, size in zip(made.growth.firsts, made.growth.sizes, strict=True):
        batch = mesh.abstract_batch(made.mesh, made.task.train[first])
        name = f"the step of {size:,} examples"
        programs.append(topology.program(name, made.step, state, batch, train.abstract_alive(made.mesh)))
    batch = mesh.abstract_batch(made.mesh, made.task.evaluation[0])
    programs.append(topology.program("evaluation", jax.jit(train.held_out(made.task, made.mesh)), state.params, batch))
    for p in programs:
        print(p.name, p.seconds, p.reason, p.compiled and p.compiled.memory_analysis())

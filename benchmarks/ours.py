"""Our side: the very step that a run of a config takes, and the words that experiments/tools/sample.py draws.

python -m benchmarks.ours NAME, started by the harness (participant.py).
"""

import dataclasses
import itertools
import os
import pathlib
import runpy
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from benchmarks import inputs, participant, sizes
from experiments import model as models
from experiments.engine import by_name, config, config_file, hardware, loop, mesh, run
from experiments.engine import step as loops
from experiments.tools import sample
from tfm import head, shapes
from tfm.attention import mask as masks

LONG = 1_000_000  # steps of the learning-rate schedule: no measurement comes to its end


def base() -> config_file.Base:
    """get_config of configs/base.py, which is executed by its path, as launch.py executes the file of --config."""
    return runpy.run_path(str(participant.ROOT / "configs" / "base.py"))["get_config"]


def settings(changes: dict[str, Any]) -> config.Settings:
    """The settings of a config that changes these of configs/base.py, as `launch.py` makes them."""
    defaults = base()(changes["experiment"])
    return config.Settings(defaults, defaults).changed({"device": "cpu", "mesh.data": 1} | changes)


def model_changes(size: sizes.Workload) -> dict[str, Any]:
    """The fields of `model` that the workload has otherwise than base.py."""
    return {"model.M": size.M, "model.H": size.H, "model.D": size.D, "model.attention": size.attention}


def training(name: str, folder: pathlib.Path, **more: Any) -> config.Settings:
    """The config of a training step, whose data are written into the folder. more: what differs, by whole keys."""
    size = sizes.WORKLOADS[name]
    data = folder / ("data.txt" if size.kind == "words" else "data.npz")
    changes = {
        **model_changes(size),
        "mesh.data": min(size.devices, os.cpu_count() or 1),
        "train.batch_size": size.B,
        "train.evaluate_batch": size.B,
        "train.steps": LONG,
        **{f"optim.{field}": value for field, value in sizes.OPTIMISER.items()},
    }
    if size.kind == "words":
        inputs.write_text(data, size)
        changes |= {
            "experiment": "language",
            "text.source": str(data),
            "text.tokenizer": "characters",
            "text.N": size.N,
            "text.tied_output": True,
        }
    else:
        inputs.write_images(data, size)
        changes |= {
            "experiment": "vision",
            "image.source": str(data),
            "image.patch": size.patch,
            "image.head": "class_token",
        }
    return settings(changes | more)


def prepared(name: str, folder: pathlib.Path, **more: Any) -> loops.Plan:
    """Everything that a run of this workload needs, made as `experiments.language.run` and `run.run` make it."""
    made = training(name, folder, **more)
    hardware.of_cores(made.mesh.to_dict())
    devices = run.devices(made)
    work = by_name.experiment(made.experiment).prepare(made, devices)
    return run.plan(made, work.task, devices)


def started(plan: loops.Plan) -> tuple[loops.State, Callable]:
    """The first state, and the compiled step."""
    state = loops.initial_state(plan.task, plan.optimiser, seed=plan.seed, mesh=plan.mesh)
    return state, run.compile_step(plan, state)[0]


def build_step(name: str) -> participant.Built:
    """A training step, taken by the loop that takes every run's (loop.steps), on batches that are ready."""
    with tempfile.TemporaryDirectory() as folder:
        plan = prepared(name, pathlib.Path(folder))
        batches = itertools.cycle([plan.task.train[i] for i in range(sizes.KEPT)])
        state, step = started(plan)
    count = 0

    def steps(n: int) -> float:
        nonlocal state, count
        state, metrics = taken(plan, step, state, batches, start=count, n=n)
        count += n
        jax.block_until_ready(state)
        return float(metrics["loss"])

    return participant.Built(steps, shapes.total(state.params), facts())


def taken(
    plan: loops.Plan, step: Callable, state: loops.State, batches: Iterator, *, start: int, n: int, **rows: Any
) -> tuple[loops.State, dict]:
    """The state behind n steps of the loop that takes every run's, and the last metrics. rows: more of `loop.steps`.

    As there, each step is looked at while the devices take the next one.
    """
    late, plan = None, dataclasses.replace(plan, steps=start + n)
    for at, last, _, metrics in loop.steps(plan, step, state, batches, start=start, **rows):
        if late and not np.any(jax.device_get(late["alive"])):
            raise RuntimeError(f"the loss of step {at - 1} is not finite")
        late, state = metrics, last
    return state, late


def build_generation(name: str) -> participant.Built:
    """Words drawn as experiments/tools/sample.py does, told every few words, by a model with random parameters."""
    size = sizes.WORKLOADS[name]
    made = settings({"experiment": "language"} | model_changes(size))
    hardware.start(made.device)
    model = models.language(made.model, answer=head.next_word, W=size.W, N=size.N, tied_output=True)
    params = jax.jit(model.init)(jax.random.key(0))
    ids, chance = inputs.prompt(size).tolist(), {"temperature": sizes.TEMPERATURE, "top_k": 0, "top_p": 1.0}
    how = chance | {"steps": size.new, "mask": lambda *_: masks.causal}
    generator = sample.generator(model, params, np.array(ids, np.int32), **how)

    def rounds() -> Iterator[list[list[int]]]:
        return sample.rounds(generator, ids, made.seed, set())

    for _ in rounds():  # to the end, since programs for larger caches are compiled on the way
        pass

    def steps(n: int) -> float:
        for _ in range(n):
            gained = sum(len(row) for some in rounds() for row in some)
            if gained != size.counted:
                raise RuntimeError(f"{gained} words instead of {size.counted}")
        return 0.0

    return participant.Built(steps, shapes.total(params), facts())


def facts() -> dict[str, Any]:
    """What is written down of this process."""
    return {"versions": mesh.versions(), "threads": len(os.sched_getaffinity(0))}  # XLA has one for each core


def build(arguments: list[str]) -> participant.Built:
    """The workload of this name, after its first steps."""
    (name,) = arguments
    size = sizes.WORKLOADS[name]
    if size.kind == "generation":
        return build_generation(name)
    built = build_step(name)
    built.steps(size.warm_up)
    return built


if __name__ == "__main__":
    participant.serve(build)

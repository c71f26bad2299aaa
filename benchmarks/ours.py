"""Our side: the very step that a run of a config takes, and the words that experiments/tools/sample.py draws.

python -m benchmarks.participant ours SIZE, as the harness starts it (participant.py).
"""

import collections
import itertools
import os
import pathlib
import runpy
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import inputs, participant, sizes
from experiments import model as models
from experiments.engine import by_name, compilation, config, distributed, hardware, loop, mesh, run
from experiments.engine import step as training_step
from experiments.tools import sample
from tfm import head, shapes
from tfm.attention import mask as masks

LONG = 1_000_000  # steps of the learning-rate schedule: no measurement comes to its end


def settings(experiment: str, changes: dict[str, Any]) -> config.Settings:
    """The config of configs/base.py, which is executed by its path, as launch.py executes the file of --config."""
    get_config = runpy.run_path(str(participant.ROOT / "configs" / "base.py"))["get_config"]
    return config.Settings(get_config(experiment), get_config(experiment)).changed(changes)


def of_model(size: sizes.Workload) -> dict[str, Any]:
    """The fields of `model` that the workload has otherwise than base.py."""
    same = {f"model.{name}": getattr(size, name) for name in ("M", "H", "D", "attention", "unroll")}
    return same | {"model.compute_dtype": size.dtype}


def of_training(size: sizes.Workload, folder: pathlib.Path) -> config.Settings:
    """The config of a training step, whose data are written into the folder."""
    changes = {
        **of_model(size),
        "device": size.platform,
        "mesh.data": min(size.devices, os.cpu_count() or 1),
        "train.batch_size": size.B,
        "train.evaluate_batch": size.B,
        "train.steps": LONG,
        **{f"optim.{field}": value for field, value in sizes.OPTIMISER.items() if field != "eps"},
    }
    if size.kind == "images":
        data, more = inputs.write_images(folder / "data.npz", size), {"patch": size.patch, "head": "class_token"}
        return settings("vision", changes | {f"image.{key}": value for key, value in {"source": data, **more}.items()})
    data, more = inputs.write_text(folder / "data.txt", size), {"N": size.N, "tied_output": True}
    more |= {"source": data, "tokenizer": "characters"}
    return settings("language", changes | {f"text.{key}": value for key, value in more.items()})


def planned(size: sizes.Workload) -> training_step.Plan:
    """Everything that a run of this workload needs, made as the launcher makes it."""
    with tempfile.TemporaryDirectory() as folder:
        made = of_training(size, pathlib.Path(folder))
        hardware.of_cores(made.mesh.to_dict())
        devices = run.devices(made)
        work = by_name.experiment(made.experiment).prepare(made, devices)
        return run.plan(made, work.task, devices)


def training(size: sizes.Workload) -> participant.Built:
    """A training step, taken by the loop of every run, on batches that are ready. Facts: what compiling it took."""
    plan = planned(size)
    batches = itertools.cycle([plan.task.train[i] for i in range(sizes.KEPT)])
    alive = distributed.put(np.True_, mesh.replicated(plan.mesh))
    abstract = training_step.abstract_state(plan.task, plan.optimiser, mesh=plan.mesh)
    began = time.perf_counter()
    lowered = plan.step.lower(abstract, mesh.place_batch(plan.mesh, plan.task.train[0]), alive)
    traced = time.perf_counter()
    step = lowered.compile()
    compiled = time.perf_counter()
    state = training_step.initial_state(plan.task, plan.optimiser, seed=plan.seed, mesh=plan.mesh)
    parameters, taken = shapes.total(state.params), loop.steps(plan, step, state, batches, start=0)

    def steps(n: int) -> float:
        ((_, state, _, metrics),) = collections.deque(itertools.islice(taken, n), maxlen=1)
        jax.block_until_ready(state)
        if not metrics["alive"]:
            raise RuntimeError("the loss is not finite")
        return float(metrics["loss"])

    took = {"trace_seconds": traced - began, "compile_seconds": compiled - traced}
    took |= {"temporary_bytes": step.memory_analysis().temp_size_in_bytes, "step_flops": step_flops(size)}
    return participant.Built(steps, parameters, facts() | took)


def step_flops(size: sizes.Workload) -> int:
    """Floating-point operations that the equations of a training step ask for in matrix products: 3 x its forward pass.

    Pairs of tokens that the causal mask hides are not counted, whether a program leaves them out or not.
    """
    task = planned(size.changed(attention="explicit", devices=1)).task
    forward = compilation.flops(
        task.loss_and_metrics, jax.eval_shape(task.init, jax.random.key(0)), task.train[0], None
    )
    if size.kind == "words":  # of each hidden pair a product of q and k, and of A and v
        forward -= size.B * size.M * size.H * 4 * (size.D // size.H) * (size.N * (size.N - 1) // 2)
    return 3 * forward


def generation(size: sizes.Workload) -> participant.Built:
    """Words drawn as experiments/tools/sample.py does, told every few words, by a model with random parameters."""
    model = models.language(
        settings("language", of_model(size)).model, answer=head.next_word, W=size.W, N=size.N, tied_output=True
    )
    params = jax.jit(model.init)(jax.random.key(0))
    ids = inputs.prompt(size).tolist()
    how = sample.checked({"temperature": sizes.TEMPERATURE, "top_k": 0, "top_p": 1.0})
    how |= {"steps": size.new, "stop": [], "mask": lambda *_: masks.causal}
    generator = sample.Generator(model, params, np.array(ids, np.int32), **how)

    def rounds() -> Iterator[list[list[int]]]:
        return sample.rounds(generator, ids, 0, set())

    for _ in rounds():  # to the end, since programs for larger caches are compiled on the way
        pass

    def steps(n: int) -> float:
        for _ in range(n):
            gained = sum(len(row) for some in rounds() for row in some)
            if gained != size.counted:
                raise RuntimeError(f"{gained} words instead of {size.counted}")
        return 0.0

    return participant.Built(steps, shapes.total(params), facts())


def large(size: sizes.Workload) -> participant.Built:
    """Products of square matrices, or sums of many numbers, one after the other."""
    product = size.kind == "product"
    x = jnp.ones((size.N, size.N) if product else size.N, size.dtype)
    do = jax.jit(jnp.matmul if product else lambda x, _: jnp.sum(x))

    def steps(n: int) -> float:
        for _ in range(n):
            jax.block_until_ready(do(x, x))
        return 0.0

    return participant.Built(steps, 0, facts())


def facts() -> dict[str, Any]:
    """What is written down of this process."""
    (device,) = jnp.zeros(()).devices()
    return {"versions": mesh.versions(), "device": device.device_kind}


KINDS: dict[str, Callable[[sizes.Workload], participant.Built]] = {
    "words": training,
    "images": training,
    "generation": generation,
    "product": large,
    "read": large,
}


def build(size: sizes.Workload) -> participant.Built:
    """What is done of this size."""
    return KINDS[size.kind](size)

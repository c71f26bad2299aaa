"""Our side: the very step that a run of a config takes, and the words that experiments/tools/sample.py draws."""

import collections
import itertools
import os
import pathlib
import runpy
import string
import tempfile
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import participant, sizes
from experiments import model as models
from experiments.engine import by_name, compilation, config, distributed, mesh, run, train_step as training_step
from experiments.tools import generation as generating
from tfm import head, shapes
from tfm.attention import mask as masks

LONG = 1_000_000  # steps of the learning-rate schedule: no measurement comes to its end
WINDOWS = 200  # windows of text; a tenth of it is held out
IMAGES = 2048  # of each part


def settings(experiment: str, size: sizes.Workload, changes: dict[str, Any]) -> config.Settings:
    """The config of configs/base.py, which is executed by its path, as launch.py executes the file of --config, with
    the fields of `model` that the workload has otherwise, and these changes."""
    get_config = runpy.run_path(str(participant.ROOT / "configs" / "base.py"))["get_config"]
    same = {f"model.{name}": getattr(size, name) for name in ("M", "H", "D", "attention")}
    made = config.Settings(get_config(experiment), get_config(experiment))
    return made.changed(same | {"model.compute_dtype": size.dtype} | changes)


def write_text(file: pathlib.Path, size: sizes.Workload) -> None:
    """A text of as many different characters as the vocabulary has words; each comes often enough to be trained on."""
    alphabet = "\n" + string.printable
    if size.W > len(alphabet):
        alphabet = "".join(map(chr, range(0x10000, 0x10000 + size.W)))  # behind the last surrogate
    words = np.random.default_rng(0).integers(0, size.W, max(WINDOWS * size.N, 20 * size.W))
    words[: size.W] = np.arange(size.W)  # none is missing
    file.write_bytes("".join(np.array(list(alphabet[: size.W]))[words]).encode())


def planned(size: sizes.Workload) -> training_step.Plan:
    """Everything that a run of this workload needs, made as the launcher makes it, of data that are written for it."""
    rng, changes = np.random.default_rng(0), {f"optim.{field}": value for field, value in sizes.OPTIMISER.items()}
    del changes["optim.eps"]  # both have the same
    changes |= {"train.steps": LONG, "train.batch_size": size.B}
    changes |= {"mesh.data": min(size.devices, os.cpu_count() or 1)}
    with tempfile.TemporaryDirectory() as folder:
        if size.kind == "images":
            experiment, file, arrays = "vision", pathlib.Path(folder) / "data.npz", {}
            for part in ("train", "test"):
                arrays[f"x_{part}"] = rng.integers(0, 256, (IMAGES, size.Y, size.Y), np.uint8)
                arrays[f"y_{part}"] = (np.arange(IMAGES) % size.C).astype(np.int64)
            np.savez(file, **arrays)
            changes |= {"image.source": str(file), "image.patch": size.patch, "image.head": "class_token"}
        else:
            experiment, file = "language", pathlib.Path(folder) / "data.txt"
            write_text(file, size)
            changes |= {"text.source": str(file), "text.tokenizer": "characters"}
            changes |= {"text.N": size.N, "text.head": "tied"}
        made = settings(experiment, size, changes)
        compilation.split(made.mesh.to_dict(), size.platform)
        devices = run.devices(made, size.platform)
        return run.plan(made, by_name.experiment(experiment).prepare(made, devices).task, devices)


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
    parameters, latest = shapes.total(state.params), [state, alive]

    def steps(n: int) -> float:
        state, alive = latest
        for _ in range(n):
            state, metrics = step(state, mesh.place_batch(plan.mesh, next(batches)), alive)
            alive = metrics["alive"]
        latest[:] = jax.block_until_ready((state, alive))
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
    params = jax.eval_shape(task.init, jax.random.key(0))
    forward = compilation.flops(task.loss, params, task.train[0])
    if size.kind == "words":  # of each hidden pair a product of q and k, and of A and v
        forward -= size.B * size.M * size.H * 4 * (size.D // size.H) * (size.N * (size.N - 1) // 2)
    return 3 * forward


def generation(size: sizes.Workload) -> participant.Built:
    """Words drawn as experiments/tools/sample.py does, told every few words, by a model with random parameters."""
    m = settings("language", size, {}).model
    model = models.language(m, answer=head.next_word, W=size.W, N=size.N, output="tied")
    params = jax.jit(model.init)(jax.random.key(0))
    ids = sizes.prompt(size).tolist()
    how = {"temperature": sizes.TEMPERATURE, "top_k": 0, "top_p": 1.0}
    how |= {"stop": [], "mask": lambda *_: masks.causal}
    generator, key = generating.Generator(model, params, **how), jax.random.key(0)
    collections.deque(
        generating.rounds(generator, ids, key, steps=size.new), maxlen=0
    )  # larger caches are compiled on the way

    def steps(n: int) -> float:
        for _ in range(n):
            gained = sum(len(row) for some in generating.rounds(generator, ids, key, steps=size.new) for row in some)
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
    (device,) = jnp.zeros(()).devices()
    return {"versions": mesh.versions(), "device": device.device_kind}


def build(size: sizes.Workload) -> participant.Built:
    return {"generation": generation, "product": large, "read": large}.get(size.kind, training)(size)

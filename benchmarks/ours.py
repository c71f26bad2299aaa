"""This project as a participant: the training step of a run, and the generation of experiments/tools/sample.py."""

import itertools
import pathlib
import tempfile
import time
from typing import Any

import jax
import numpy as np

from benchmarks import participant, sizes
from experiments.config import by_name, settings as configs
from experiments.devices import distributed, mesh as meshes
from experiments.engine import run as runs, run_plan, train_step
from experiments.model import build as builders
from experiments.tools import generation
from tfm import head as heads, shapes
from tfm.attention import mask as masks

STEPS = 1_000_000  # of the learning-rate schedule, more than any measurement takes
WINDOWS = 200  # of text, a tenth of them held out
FIRST = 0x10000  # code point of token 0, after the last surrogate
IMAGES = 2048  # of each split


def make_settings(experiment: str, size: sizes.Workload, changes: dict[str, Any]) -> configs.Settings:
    """Return the default settings of the experiment with the model of the workload and these changes."""
    model = {"model.M": size.M, "model.H": size.H, "model.D": size.D, "model.attention": size.attention}
    return configs.Settings(configs.get_base(experiment)).replace(model | {"model.compute_dtype": size.dtype} | changes)


def write_data(folder: pathlib.Path, size: sizes.Workload) -> tuple[str, dict[str, Any]]:
    """Write random images, or a text that contains every token. Return the experiment and the settings for them."""
    rng = np.random.default_rng(0)
    if size.kind == "images":
        labels = (np.arange(IMAGES) % size.C).astype(np.int64)
        pixels = [rng.integers(0, 256, (IMAGES, size.Y, size.Y), np.uint8) for _ in range(2)]
        np.savez(folder / "data.npz", x_train=pixels[0], y_train=labels, x_test=pixels[1], y_test=labels)
        source = {"image.source": str(folder / "data.npz"), "image.patch": size.patch}
        return "vision", source | {"image.head": "class_token"}
    token_T = rng.integers(0, size.W, max(WINDOWS * size.N, 20 * size.W))
    token_T[: size.W] = np.arange(size.W)  # each token occurs
    (folder / "data.txt").write_text("".join(chr(FIRST + token) for token in token_T), encoding="utf-8")
    source = {"text.source": str(folder / "data.txt"), "text.tokenizer": "characters"}
    return "language", source | {"text.N": size.N, "text.head": "tied"}


def make_plan(size: sizes.Workload) -> run_plan.Plan:
    """Prepare a run of this workload as the launcher does."""
    changes = {f"optim.{field}": value for field, value in sizes.OPTIMISER.items() if field != "eps"}  # eps is fixed
    changes |= {"train.steps": STEPS, "train.batch_size": size.B, "mesh.data": min(size.devices, jax.device_count())}
    with tempfile.TemporaryDirectory() as folder:
        experiment, source = write_data(pathlib.Path(folder), size)
        settings = make_settings(experiment, size, changes | source)
        devices = runs.make_mesh(settings, size.platform)
        work = by_name.load_experiment(experiment).prepare(settings, devices)
        return run_plan.make_plan(settings, work.task, devices)


def build_training(size: sizes.Workload) -> participant.Built:
    """Build the training steps of a run. Their batches are loaded in advance."""
    plan = make_plan(size)
    batches = itertools.cycle([plan.task.train[i] for i in range(sizes.BATCHES)])
    alive = distributed.put(np.True_, meshes.replicated(plan.mesh))
    abstract = train_step.abstract_state(plan.task, plan.optimiser, mesh=plan.mesh)
    start = time.perf_counter()
    lowered = plan.step.lower(abstract, meshes.place_batch(plan.mesh, plan.task.train[0]), alive)
    traced = time.perf_counter()
    step = lowered.compile()
    facts = {"trace_seconds": traced - start, "compile_seconds": time.perf_counter() - traced}
    facts["temporary_bytes"] = step.memory_analysis().temp_size_in_bytes
    state = train_step.initial_state(plan.task, plan.optimiser, seed=plan.seed, mesh=plan.mesh)

    def steps(n: int) -> float:
        nonlocal state, alive
        for _ in range(n):
            state, metrics = step(state, meshes.place_batch(plan.mesh, next(batches)), alive)
            alive = metrics["alive"]
        jax.block_until_ready((state, alive))
        return float(metrics["loss"])

    return participant.Built(steps, shapes.total(state.params), facts)


def build_generation(size: sizes.Workload) -> participant.Built:
    """Build a model with random parameters that generates as the tool `sample` does."""
    m = make_settings("language", size, {}).model
    model = builders.language_model(m, head=heads.next_word, W=size.W, N=size.N, output="tied")
    params = jax.jit(model.init)(jax.random.key(0))
    options = {"temperature": sizes.TEMPERATURE, "top_k": 0, "top_p": 1.0, "stop": [], "mesh": meshes.make(data=1)}
    generator = generation.Generator(model, params, mask=lambda *_: masks.causal, **options)

    def steps(n: int) -> float:
        for _ in range(n):
            rounds = generation.rounds(generator, [[0]] * size.B, jax.random.key(0), steps=size.new)
            if (count := sum(len(row) for texts in rounds for row in texts)) != size.items_per_step:
                raise RuntimeError(f"{count} tokens instead of {size.items_per_step}")
        return 0.0

    return participant.Built(steps, shapes.total(params))


def build(size: sizes.Workload) -> participant.Built:
    """Build the model and its steps."""
    return (build_generation if size.kind == "generation" else build_training)(size)

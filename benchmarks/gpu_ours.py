"""Our side on a GPU: training steps in bfloat16, several seeds in one program, and XLA's matrix product.

python -m benchmarks.gpu_ours step|together|apart|product SIZE, started by benchmarks/gpu.py (participant.py).
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from benchmarks import gpu_sizes, ours, participant, sizes
from experiments import language
from experiments import model as models
from experiments.data import windows
from experiments.engine import batches, compilation, config, mesh
from experiments.engine import run as runs
from experiments.engine import step as loops
from experiments.studies import vmapped_runs
from tfm import head, shapes
from tfm import layout as layouts
from tfm.attention import mask as masks

WINDOWS = 400  # windows of the text
PLATFORMS = {"cpu": "cpu", "cuda": "cuda,cpu"}  # as jax_platforms has them; the first is the one that computes


def settings(size: gpu_sizes.Size, **more: Any) -> config.Settings:
    """The config of a run of this size."""
    changes = {
        "experiment": "language",
        "device": "cpu" if size.platform == "cpu" else "gpu",
        "model.M": size.M,
        "model.H": size.H,
        "model.D": size.D,
        "model.attention": size.attention,
        "model.compute_dtype": "bfloat16",
        "text.N": size.N,
        "text.tied_output": True,
        "train.batch_size": size.B,
        "train.evaluate_batch": size.B,
        "train.steps": ours.LONG,
        **{f"optim.{field}": value for field, value in sizes.OPTIMISER.items()},
    }
    return ours.settings(changes | more)


def task(made: config.Settings, devices: Mesh, *, W: int) -> loops.Task:
    """What experiments/language.py hands to the loop, on random words instead of a text: it needs no file."""
    N, objective = made.text.N, language.OBJECTIVES["causal"]
    word_T = np.random.default_rng(0).integers(0, W, WINDOWS * N).astype(np.int32)
    model = models.language(made.model, answer=head.next_word, W=W, N=N, tied_output=made.text.tied_output)
    fetch, n = windows.causal(word_T, N=N)
    fetch_evaluation, n_evaluation = windows.causal_evaluation(word_T[: 4 * N], N=N)

    def loss_and_metrics(
        params: Any, batch: dict, key_B: jax.Array | None, over: layouts.Layout = layouts.ONE
    ) -> loops.Ratios:
        mask: masks.Mask = models.masked(made.model, objective.mask(made, batch))
        logits_BNW, seen = model.apply(params, batch["w_BN"], mask=mask, key_B=key_B, over=over)
        return models.word_measures(logits_BNW, batch, over) | loops.running(seen)

    return loops.Task(
        init=model.init,
        loss_and_metrics=loss_and_metrics,
        train=batches.train(fetch, n=n, batch=made.train.batch_size, seed=made.seed),
        evaluation=batches.evaluation(fetch_evaluation, n=n_evaluation, batch=made.train.evaluate_batch),
        tokens_per_example=N,
        baseline={},
        layout=models.layout(made.model, devices, W=W),
    )


def planned(size: gpu_sizes.Size, **more: Any) -> tuple[config.Settings, loops.Plan]:
    """The config, and everything that a run of it needs."""
    made = settings(size, **more)
    devices = runs.devices(made)
    return made, runs.plan(made, task(made, devices, W=size.W), devices)


def flops(size: gpu_sizes.Size) -> int:
    """Floating-point operations of a step's matrix products: three times those of the forward pass, none left out."""
    _, made = planned(gpu_sizes.Size(**{**vars(size), "attention": "explicit"}))
    params = jax.eval_shape(made.task.init, jax.random.key(0))
    return 3 * compilation.flops(made.task.loss_and_metrics, params, made.task.train[0], None)


def stepping(step: Callable, state: loops.State, waiting: list, made: loops.Plan, **how: Any) -> Callable[[int], float]:
    """steps(n): the next n steps in the loop that takes every run's. how: more of `loop.steps`."""
    count, waiting = 0, itertools.cycle(waiting)

    def steps(n: int) -> float:
        nonlocal state, count
        state, metrics = ours.taken(made, step, state, waiting, start=count, n=n, **how)
        count += n
        jax.block_until_ready(state)
        return float(np.mean(jax.device_get(metrics["loss"])))

    return steps


def one_run(size: gpu_sizes.Size) -> tuple[Callable[[int], float], int]:
    """Steps of one model, and its number of parameters."""
    _, made = planned(size)
    state, step = ours.started(made)
    parameters = shapes.total(state.params)
    return stepping(step, state, [made.task.train[i] for i in range(gpu_sizes.KEPT)], made), parameters


def runs_apart(size: gpu_sizes.Size) -> tuple[Callable[[int], float], int]:
    """n steps of each of several seeds, one run after the other, all by the same compiled step."""
    _, made = planned(size)
    first, step = ours.started(made)
    waiting, parameters = [made.task.train[i] for i in range(gpu_sizes.KEPT)], shapes.total(first.params)
    states = [loops.initial_state(made.task, made.optimiser, seed=seed, mesh=made.mesh) for seed in range(size.seeds)]
    runs = [stepping(step, state, waiting, made) for state in states]
    return lambda n: sum(run(n) for run in runs) / size.seeds, parameters


def runs_together(size: gpu_sizes.Size) -> tuple[Callable[[int], float], int]:
    """n steps of several seeds, whose states are rows of the same arrays, in one program."""
    made, plan = planned(size)
    optimiser = functools.partial(runs.optimiser, made, plan.growth)
    of = vmapped_runs.VmappedRuns(plan.task, optimiser, plan.mesh, plan.accumulation, batched=True)
    state = vmapped_runs.initial_state(of, range(size.seeds), {})
    parameters = shapes.total(state.params) // size.seeds
    take = vmapped_runs.step(of)
    waiting = [[plan.task.train[i]] * size.seeds for i in range(gpu_sizes.KEPT)]
    how = {"place": mesh.place_rows, "alive": np.ones(size.seeds, bool)}
    return stepping(lambda *row: take(*row, {}), state, waiting, plan, **how), parameters


def products(size: gpu_sizes.Size) -> tuple[Callable[[int], float], int]:
    """Products of square matrices of bfloat16, each of the one before."""
    a = jnp.ones((size.product, size.product), jnp.bfloat16) / size.product
    multiply = jax.jit(jnp.matmul)

    def steps(n: int) -> float:
        b = a
        for _ in range(n):
            b = multiply(a, b)
        jax.block_until_ready(b)
        return 0.0

    return steps, 0


KINDS = {"step": one_run, "together": runs_together, "apart": runs_apart, "product": products}


def build(arguments: list[str]) -> participant.Built:
    """What is asked for, warmed up."""
    kind, size = arguments[0], gpu_sizes.read(arguments[1])
    jax.config.update("jax_platforms", PLATFORMS[size.platform])  # participants are told to take the CPU
    steps, parameters = KINDS[kind](size)
    steps(gpu_sizes.WARM)
    (device,) = jnp.zeros(()).devices()
    facts = {"device": device.device_kind, "backend": jax.default_backend()}
    if kind == "step":
        facts["step_flops"] = flops(size)
    return participant.Built(steps, parameters, facts)


if __name__ == "__main__":
    participant.serve(build)

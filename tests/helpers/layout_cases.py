"""Small tasks on meshes of devices, and the gradients of their first batches."""

import functools
from unittest import mock

import jax
import numpy as np
import pytest
import tiny

from experiments.devices import mesh as meshes
from experiments.dry_run import dry_run as dry_runs
from experiments.engine import optim, run as runs, train_step

SMALL = {"model__H": 4, "model__M": 1}
FAST_TO_COMPILE = {"model__bias": "none", "model__norm": "rms", "model__mlp": "relu"}  # a model without biases
KINDS = {  # (experiment, changes); the first three together have every sum over devices
    "masked_image": (
        "masked_image",
        {"model__norm": "instance", "model__mlp": "swiglu", "model__score": "tied", "model__value": "identity"}
        | {"model__relative_position": "relative", "model__remat": "none", "model__block": "post_norm"}
        | {"model__bias": "none", "image__patch": 2},
    ),
    "prefix": (
        "language",
        {"text__objective": "prefix", "model__window": 3, "model__norm": "batch"}
        | {"model__relative_position": "relative", "model__mlp": "two_hidden_gelu", "model__value": "full_rank"}
        | {"model__remat": "none"},
    ),
    "pairs": (
        "translation",
        {"pairs__N": 8, "pairs__vocabulary": 300, "model__relative_position": "rotary"} | FAST_TO_COMPILE,
    ),
    "vision": ("vision", {"image__patch": 2, "image__augment": ["shift", "cutmix"]}),
}
ADAMW = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1, "clip": 1.0}


def mesh_of(sizes):
    """Return a mesh from "2x2x2x1": data, fsdp, tensor, sequence."""
    return meshes.make(**dict(zip(meshes.AXES, map(int, sizes.split("x")), strict=True)))


def tasks(folder):
    """Return a function (experiment, mesh, **changes) -> task of a small config on this mesh."""
    (folder / "text.txt").write_bytes(tiny.TEXT)
    (folder / "pairs.txt").write_text("".join(f"one {i} two\tuno {i} dos\n" for i in range(200)))
    common = {"language": {"text__N": 8, "text__source": str(folder / "text.txt")}}
    common |= {"translation": {"pairs__source": str(folder / "pairs.txt")}}

    def task_of(experiment, mesh, **changes):
        settings = tiny.settings(experiment, **SMALL | common.get(experiment, {}) | changes)
        with mock.patch.object(runs, "make_mesh", return_value=mesh):
            with mock.patch("experiments.translation.translation_score.metrics"):
                return tiny.task_of(settings)

    return task_of


def compile_gradient(task, mesh, accumulation=1):
    """Compile the gradient of a batch. Return (program, abstract state)."""
    state = train_step.abstract_state(task, optim.adamw(lambda step: 0.1, **ADAMW), mesh=mesh)
    batch, key = meshes.abstract_batch(mesh, task.train[0]), jax.random.key(1)
    return tiny.gradient(task, mesh, accumulation).lower(state.params, batch, key).compile(), state


def gradient(task_of, kind, sizes, accumulation):
    """Return (metrics of the first batch, its gradient at random parameters, collectives of the program)."""
    mesh, (experiment, changes) = mesh_of(sizes), KINDS[kind]
    task = task_of(experiment, mesh, **changes)
    program, state = compile_gradient(task, mesh, accumulation)
    params = jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), tiny.draw_params(task), state.params)
    grads, metrics, _ = program(params, meshes.place_batch(mesh, task.train[0]), jax.random.key(1))
    jax.tree.map(lambda x, like: x.sharding.is_equivalent_to(like.sharding, x.ndim) or pytest.fail(), grads, params)
    return *jax.device_get((metrics, grads)), dry_runs.count_collectives(program.as_text())


def assert_agree(result, expected):
    """Assert that metrics and gradients differ by at most 1e-5, relative to the largest number of their leaf.

    A gradient that is only rounding error (the bias of the keys) may differ by 2e-6 of the largest gradient.
    """
    largest = max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(expected[1]))
    assert expected[0]["loss"] > 0 < largest

    def assert_near(actual, target, least=0.0):
        np.testing.assert_allclose(actual, target, rtol=0, atol=max(1e-5 * float(np.abs(target).max()), least))

    jax.tree.map(assert_near, result[0], expected[0])
    jax.tree.map(functools.partial(assert_near, least=2e-6 * largest), result[1], expected[1])

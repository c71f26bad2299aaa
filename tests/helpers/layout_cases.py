"""Small tasks on meshes of devices, and the gradients of their first batches."""

import functools
from unittest import mock

import jax
import numpy as np
import pytest
import tiny

from experiments.dry_run import dry_run
from experiments.engine import mesh as meshes, optim, run as runs, train_step as steps

SMALL = {"model__H": 4, "model__M": 1}
FEW = {"model__bias": "none", "model__norm": "rms", "model__mlp": "relu"}  # parameters, which are soon compiled
KINDS = {  # (experiment, changes): every sum over devices is in one of the first three
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
    "pairs": ("translation", {"pairs__N": 8, "pairs__vocabulary": 300, "model__relative_position": "rotary"} | FEW),
    "vision": ("vision", {"image__patch": 2, "image__augment": ["shift", "cutmix"]}),
}
ADAMW = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1, "clip": 1.0}


def mesh_of(sizes):
    """Return a mesh from "2x2x2x1": data, fsdp, tensor, sequence."""
    return meshes.make(**dict(zip(meshes.AXES, map(int, sizes.split("x")), strict=True)))


def tasks(folder):
    """Return (experiment, mesh, **changes) -> the task of a small config on a mesh."""
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


def compiled(task, mesh, accumulation=1):
    """Compile the gradient of a batch. Return the program and the abstract state."""
    state = steps.abstract_state(task, optim.adamw(lambda step: 0.1, **ADAMW), mesh=mesh)
    batch, key = meshes.abstract_batch(mesh, task.train[0]), jax.random.key(1)
    return tiny.gradient(task, mesh, accumulation).lower(state.params, batch, key).compile(), state


def gradient(task_of, kind, sizes, accumulation):
    """Return the first batch's metrics, its gradient at nonzero parameters, and the collectives of the program."""
    mesh, (experiment, changes) = mesh_of(sizes), KINDS[kind]
    task = task_of(experiment, mesh, **changes)
    program, state = compiled(task, mesh, accumulation)
    params = jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), tiny.drawn(task), state.params)
    grads, metrics, _ = program(params, meshes.place_batch(mesh, task.train[0]), jax.random.key(1))
    jax.tree.map(lambda x, like: x.sharding.is_equivalent_to(like.sharding, x.ndim) or pytest.fail(), grads, params)
    return *jax.device_get((metrics, grads)), dry_run.count_collectives(program.as_text())


def agree(found, expected):
    """Assert that metrics and gradients differ by at most 1e-5, relative to the largest number of their leaf.

    Leaves whose gradient is only rounding (the bias of the keys) may differ by 2e-6 of the largest gradient.
    """
    largest = max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(expected[1]))
    assert expected[0]["loss"] > 0 < largest

    def near(one, other, least=0.0):
        np.testing.assert_allclose(one, other, rtol=0, atol=max(1e-5 * float(np.abs(other).max()), least))

    jax.tree.map(near, found[0], expected[0])
    jax.tree.map(functools.partial(near, least=2e-6 * largest), found[1], expected[1])

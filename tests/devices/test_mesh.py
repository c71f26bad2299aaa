"""Every mesh trains like one device, each device has only its shard, and sizes that do not divide are refused."""

import contextlib
import functools
import io
import os
import pathlib
import subprocess
import sys

import halves
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from errors import raises
from jax.sharding import PartitionSpec as P
from layout_cases import ADAMW, FAST_TO_COMPILE, KINDS, assert_agree, compile_gradient, gradient, mesh_of, tasks

from experiments.config import errors
from experiments.devices import compilation, mesh as meshes
from experiments.dry_run import dry_run as dry_runs
from experiments.engine import optim, train_step
from tfm import head as heads, layout as layouts

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module")
def task_of(tmp_path_factory):
    return tasks(tmp_path_factory.mktemp("data"))


gradient_of_one_device = functools.cache(lambda task_of, kind: gradient(task_of, kind, "1x1x1x1", 1))


def test_every_layout_has_the_gradient_of_one_device(task_of):
    """This test has images in two microbatches; test_techniques.py tests text models."""
    *result, traffic = gradient(task_of, "masked_image", "2x1x2x2", 2)
    assert_agree(result, gradient_of_one_device(task_of, "masked_image"))
    # Tensor parallelism sums, sequence parallelism sends keys to the next device, and XLA may scatter the sums.
    assert traffic.keys() - {"reduce-scatter"} == {"all-reduce", "collective-permute"}


def test_pairs_have_the_loss_of_one_device(task_of):
    losses = []
    for sizes in ("1x2x1x2", "1x1x1x1"):
        mesh, (experiment, changes) = mesh_of(sizes), KINDS["pairs"]
        task = task_of(experiment, mesh, **changes)
        params = jax.device_get(tiny.draw_params(task))
        params = jax.device_put(params, meshes.shardings(mesh, params, task.layout))
        losses.append(train_step.evaluator(task, mesh)(params)["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) and losses[0] > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["prefix", "vision"])
@pytest.mark.parametrize("d", [1, 2, 4, 8])
@pytest.mark.parametrize("f", [1, 2, 4, 8])
@pytest.mark.parametrize("t", [1, 2, 4])
def test_every_mesh_of_eight_devices_has_the_gradient_of_one_device(task_of, kind, d, f, t):
    if d * f * t <= 8:
        assert_agree(
            gradient(task_of, kind, f"{d}x{f}x{t}x{8 // (d * f * t)}", 1), gradient_of_one_device(task_of, kind)
        )


def test_pooling_over_devices_has_the_gradient_of_one_device():
    """The tests above have no classification head."""
    mesh, init = mesh_of("1x1x1x4"), functools.partial(heads.pooled.init, C=7, D=5)
    rng = np.random.default_rng(0)
    x_BND, shapes = rng.standard_normal((3, 8, 5), np.float32), jax.eval_shape(init, jax.random.key(0))
    params = jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape, np.float32), shapes)

    def loss(params, x_BND, layout=layouts.ONE):
        return jnp.sin(heads.pooled.apply(params, x_BND, layout=layout)).sum()

    @jax.jit
    def gradients(params, x_BND):
        sharded = functools.partial(jax.grad(loss), layout=meshes.layout(mesh))
        sharded = meshes.sharded(sharded, mesh, in_specs=(P(), P(None, "sequence")))
        return sharded(params, x_BND), jax.grad(loss)(params, x_BND)

    result, expected = gradients(params, x_BND)
    assert_agree(({"loss": 1.0}, result), ({"loss": 1.0}, expected))


def test_sharded_parameters_train_as_on_one_device_and_keep_their_shardings():
    losses = {}
    for sizes in ("1x1x1x1", "4x2x1x1"):
        mesh, losses[sizes] = mesh_of(sizes), []
        task = halves.prepare(tiny.settings("halves", model=False), mesh).task
        rate = optim.schedule("constant", peak=0.01, steps=50, warmup_steps=3)
        optimiser = optim.adamw(rate, **ADAMW)
        state = train_step.initial_state(task, optimiser, seed=3, mesh=mesh)
        step = train_step.update(task=task, optimiser=optimiser, rate=rate, mesh=mesh, accumulation=1)
        for i in range(4):
            state, metrics = step(state, meshes.place_batch(mesh, task.train[i]))
            losses[sizes].append([float(metrics[name]) for name in ("loss", "gradient_norm", "learning_rate")])
        shardings = meshes.shardings(mesh, state, task.layout)
        jax.tree.map(
            lambda x, sharding: x.sharding.is_equivalent_to(sharding, x.ndim) or pytest.fail(), state, shardings
        )
    np.testing.assert_allclose(losses["4x2x1x1"], losses["1x1x1x1"], rtol=1e-5)
    assert len({loss for loss, *_ in losses["1x1x1x1"]}) == 4


def test_fsdp_holds_and_gathers_one_block_at_a_time(task_of):
    """Each device has 1/fsdp of parameters and moments. One block is gathered at a time; gradients are scattered."""
    mesh, parts = mesh_of("2x4x1x1"), 4
    program, state = compile_gradient(
        task_of("language", mesh, model__D=64, model__M=2, model__remat="none", **FAST_TO_COMPILE), mesh
    )
    for tree in (state.params, state.opt_state):
        assert 1 / parts <= compilation.device_bytes(tree) / compilation.tree_bytes(tree) < 1.05 / parts
    text, weights = program.as_text(), compilation.tree_bytes(state.params)
    traffic = dry_runs.count_collectives(text)
    assert {"all-gather", "reduce-scatter"} <= traffic.keys()
    block = compilation.tree_bytes(state.params["blocks"]) / 2
    assert all(traffic[kind]["bytes"] / traffic[kind]["times"] < block for kind in ("all-gather", "all-reduce"))
    gathered_bytes = weights - block  # the loop over two blocks counts once
    assert 1.5 * gathered_bytes < traffic["all-gather"]["bytes"] < 2.1 * gathered_bytes
    assert program.memory_analysis().argument_size_in_bytes < 1.1 * weights / parts
    assert traffic["all-reduce"]["bytes"] < 1.2 * weights / parts  # gradients are scattered before the sum over `data`


@pytest.mark.parametrize(
    ("sizes", "parts"),
    [
        ({"data": 3, "tensor": 3}, ["mesh.data = 3 x mesh.tensor = 3", "8 x cpu"]),
        ({"data": 0}, ["mesh.data = 0"]),
        ({"fsdp": -2}, ["mesh.fsdp = -2"]),
        ({"data": -1, "fsdp": -1}, ["mesh.data = -1", "mesh.fsdp = -1"]),
        ({"data": -1, "tensor": 3}, ["mesh.tensor = 3", "8 x cpu"]),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused(sizes, parts):
    with raises(errors.UserError, *parts):
        meshes.make(**sizes)


def test_minus_one_means_the_remaining_devices():
    assert dict(meshes.make(tensor=2, sequence=2).shape) == {"data": 2, "fsdp": 1, "tensor": 2, "sequence": 2}
    assert dict(meshes.make(data=1, fsdp=-1).shape) == {"data": 1, "fsdp": 8, "tensor": 1, "sequence": 1}


@pytest.mark.parametrize(
    ("experiment", "sizes", "changes", "parts"),
    [
        ("language", "1x4x1x1", {"model__D": 6, "model__H": 2}, ["D = 6 (blocks/", "mesh.fsdp = 4"]),
        ("language", "1x1x4x1", {"model__F": 6}, ["F = 6 (blocks/mlp/", "mesh.tensor = 4"]),
        ("language", "1x1x4x1", {"model__H": 2}, ["model.H = 2", "mesh.tensor = 4"]),
        ("language", "1x1x1x4", {"text__N": 7}, ["N = 7", "w_BN", "mesh.sequence = 4"]),
        ("vision", "1x1x1x2", {"image__head": "class_token"}, ["image.head", "mesh.sequence"]),
        ("vision", "1x1x1x8", {"image__patch": 4}, ["patches, 4", "mesh.sequence = 8"]),
        ("language", "1x1x2x1", {"model__score": "identity_query"}, ["model.score = identity_query", "mesh.tensor"]),
        ("language", "1x1x2x1", {"model__mlp": "test_mesh:local_mlp"}, ["test_mesh:local_mlp", "takes_layout"]),
    ],
)
def test_sizes_that_do_not_divide_are_refused_with_the_reason(task_of, experiment, sizes, changes, parts):
    mesh = mesh_of(sizes)
    with raises(errors.UserError, *parts), contextlib.redirect_stdout(io.StringIO()):
        task = task_of(experiment, mesh, **changes)
        meshes.check_layout(mesh, task.layout, jax.eval_shape(task.init, jax.random.key(0)), task.train[0])


class local_mlp:  # noqa: N801  (a user's MLP without support for sharding)
    init = staticmethod(lambda key, **sizes: {})
    apply = staticmethod(lambda params, x_BND: x_BND)


@pytest.mark.parametrize(("axis", "sizes"), [("fsdp", "1x2x1x1"), ("tensor", "4x1x2x1"), ("sequence", "1x1x1x2")])
def test_an_experiment_without_a_layout_refuses_every_axis_except_data(axis, sizes):
    with raises(errors.UserError, f"mesh.{axis}"):
        meshes.check_layout(mesh_of(sizes), layouts.ONE, {}, {})


def test_a_vocabulary_that_does_not_divide_is_whole_on_every_device():
    mesh = mesh_of("1x1x2x1")
    assert meshes.layout(mesh, W=256).vocab == "tensor"
    assert meshes.layout(mesh, W=257).vocab is None is meshes.layout(mesh).vocab


def test_device_i_of_n_has_every_nth_token_from_i_on():
    batch = {"w_BN": np.arange(24).reshape(2, 12), "valid_BS": np.ones((2, 12), bool), "label_B": np.arange(2)}
    device_batch = meshes.place_batch(mesh_of("2x1x1x4"), batch)
    shards = {shard.device.id: np.asarray(shard.data) for shard in device_batch["w_BN"].addressable_shards}
    assert shards[1].tolist() == [[1, 5, 9]] and shards[6].tolist() == [[14, 18, 22]]
    assert all(shard.data.shape == (1, 12) for shard in device_batch["valid_BS"].addressable_shards)

    def difference(x_BN, w_BN):
        return jnp.abs(layouts.take_own_tokens(x_BN, meshes.layout(mesh_of("2x1x1x4"))) - w_BN).sum()[None, None]

    specs = {"in_specs": (P("data"), P("data", "sequence")), "out_specs": P("data", "sequence")}
    assert not jax.jit(meshes.sharded(difference, mesh_of("2x1x1x4"), **specs))(
        batch["w_BN"], device_batch["w_BN"]
    ).any()


SPLIT_PROGRAM = """
import os, sys, jax
import launch
from experiments.devices import compilation

os.cpu_count = lambda: 2
for n in (3, 2):
    compilation.split(dict(data=n, fsdp=1), "any")
    print(max(1, jax.config.jax_num_cpu_devices), flush=True)
sys.exit(launch.main(["launch.py", *sys.argv[1:]]))
"""


def test_a_cpu_has_at_most_one_device_for_each_core_but_any_number_in_a_dry_run(tmp_path):
    sizes = {"mesh.data": 2, "train.batch_size": 24}
    file = tiny.config_file(tmp_path, "halves", **tiny.TRAIN | sizes)
    path = os.pathsep.join(map(str, (ROOT, ROOT / "tests/helpers")))
    environment = os.environ | {"XLA_FLAGS": "--xla_backend_optimization_level=0", "PYTHONPATH": path}
    options = {"cwd": ROOT, "env": environment, "capture_output": True, "text": True, "timeout": 120}
    flags = "--dry_run", "--config.mesh.data=6", "--config.mesh.fsdp=2"
    process = subprocess.run([sys.executable, "-c", SPLIT_PROGRAM, "--config", file, *flags], **options)
    assert process.returncode == 0, process.stderr
    assert process.stdout.startswith("1\n2\n")
    for words in ("12 devices, mesh data=6, fsdp=2", "of the whole", "all-gather", "reduce-scatter"):
        assert words in process.stdout
    # The biases are replicated.
    all_numbers, device_numbers = halves.C * halves.D + halves.C, halves.C * halves.D / 2 + halves.C
    assert float(process.stdout.split("(1/")[1].split()[0]) == pytest.approx(all_numbers / device_numbers, rel=0.05)


@pytest.mark.parametrize(
    ("sizes", "batch", "accumulation", "parts"),
    [({}, 12, 4, ["8 devices x 4 ", "32", "mesh.data = 3"]), ({"fsdp": 2}, 6, 3, ["24", "mesh.data = 1"])],
)
def test_a_batch_that_does_not_divide_is_refused_with_a_number_of_devices_that_fits(sizes, batch, accumulation, parts):
    with raises(errors.UserError, f"train.batch_size = {batch}", *parts):
        meshes.check_batch(meshes.make(**sizes), "train.batch_size", batch=batch, microbatches=accumulation)

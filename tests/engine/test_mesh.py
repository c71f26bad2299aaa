"""Any mesh trains as one device does, holds only its share, and refuses what does not divide."""

import contextlib
import functools
import io
import math
import os
import pathlib
import subprocess
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax.sharding import PartitionSpec as P

from experiments.compiler import hlo
from experiments.engine import compilation, errors, optim
from experiments.engine import mesh as meshes
from experiments.engine import run as runs
from experiments.engine import step as steps
from tfm import layout as layouts

AXES = meshes.AXES
STEPS = 4


def mesh_of(sizes):
    """A mesh from '2x2x2x1': data, fsdp, tensor, sequence."""
    return meshes.make(**dict(zip(AXES, map(int, sizes.split("x")), strict=True)))


def task_of(experiment, mesh, **changes):
    """The task of a small config on this mesh."""
    settings = tiny.settings(experiment, **changes)
    with mock.patch.object(runs, "devices", return_value=mesh):
        return tiny.task_of(settings)


def adamw():
    rate = optim.schedule("cosine", peak=0.01, steps=50, warmup_steps=3, final_fraction=0.1, decay_fraction=0.0)
    return rate, optim.adamw(rate, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, clip=1.0)


def trained(experiment, sizes, *, accumulation=1, **changes):
    """Losses and accuracies of so many AdamW steps, and the first gradient, clipped, as the optimiser has seen it."""
    mesh = mesh_of(sizes)
    task, (rate, optimiser) = task_of(experiment, mesh, **changes), adamw()
    state = steps.initial_state(task, optimiser, seed=3, mesh=mesh)
    step, losses = steps.update(task, optimiser, rate, mesh, accumulation=accumulation), []
    alive = jax.device_put(np.True_, meshes.replicated(mesh))
    for i in range(STEPS):
        state, metrics = step(state, meshes.place_batch(mesh, task.train[i]), alive)
        losses.append([float(metrics[name]) for name in ("loss", "accuracy") if name in metrics])
        if i == 0:
            (first,) = (part.mu for part in jax.tree.leaves(state.opt_state, is_leaf=is_adam) if is_adam(part))
            grads = jax.device_get(first)
    places = meshes.shardings(mesh, state, task.layout)
    jax.tree.map(lambda leaf, place: leaf.sharding.is_equivalent_to(place, leaf.ndim) or pytest.fail(), state, places)
    return losses, grads


def is_adam(part):
    return hasattr(part, "mu")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_bytes(tiny.TEXT)
    return str(file)


TEXT = {"text__N": 8, "train__evaluate_batch": 16, "model__H": 4}
IMAGE = {"image__patch": 2, "image__shift": 1, "model__H": 4, "train__evaluate_batch": 16}
KINDS = {  # what each room has beside the usual: every sum over devices is in one of these
    "vision": ("vision", IMAGE | {"model__M": 1}),
    "masked_image": ("masked_image", IMAGE | {"model__norm": "instance", "model__M": 1}),
    "one": (
        "language",
        TEXT
        | {"model__relative_position": "relative", "model__mlp": "two_hidden_gelu", "text__tied_output": True}
        | {"model__norm": "batch", "model__value": "full_rank", "model__unroll": 0, "model__window": 3},
    ),
    "other": (
        "language",
        TEXT
        | {"model__relative_position": "rotary", "model__mlp": "swiglu", "model__norm": "rms", "model__score": "tied"}
        | {"model__value": "identity", "model__remat": True, "model__bias": False, "model__block": "post_norm"},
    ),
    "prefix": (
        "language",
        TEXT
        | {"text__objective": "prefix", "text__transform": True, "sample__max_new_tokens": 4}
        | {"model__dropout": 0.2, "model__relative_position": "alibi", "model__M": 1},
    ),
    "masked": ("language", TEXT | {"text__objective": "masked"}),
}


@functools.cache
def alone(kind, source, accumulation=1):
    return trained_kind(kind, source, "1x1x1x1", accumulation)


def trained_kind(kind, source, sizes, accumulation=1):
    experiment, changes = KINDS[kind]
    changes = changes | ({"text__source": source} if experiment == "language" else {})
    return trained(experiment, sizes, accumulation=accumulation, **changes)


def agree(found, expected):
    """Losses and the first gradient within 1e-5, these relative to the largest number of their leaf.

    For leaves whose gradient is zero but for rounding (the bias of the keys): within 1e-6 of the largest of all.
    """
    losses, grads = found
    np.testing.assert_allclose(losses, expected[0], rtol=1e-5)
    assert len({loss for loss, *_ in losses}) == STEPS
    largest = max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(expected[1]))

    def near(one, other):
        np.testing.assert_allclose(one, other, rtol=0, atol=max(1e-5 * float(np.abs(other).max()), 1e-6 * largest))

    jax.tree.map(near, grads, expected[1])


@pytest.mark.parametrize(
    ("kind", "sizes", "accumulation"),
    [
        ("vision", "1x2x2x2", 1),
        ("masked_image", "2x2x1x2", 1),
        ("one", "1x2x2x2", 1),
        ("other", "2x2x2x1", 2),
        ("prefix", "1x1x2x4", 1),
    ],
)
def test_every_layout_trains_as_one_device(source, kind, sizes, accumulation):
    agree(trained_kind(kind, source, sizes, accumulation), alone(kind, source, accumulation))


FACTORS = [
    f"{d}x{f}x{t}x{s}"
    for d in (1, 2, 4, 8)
    for f in (1, 2, 4, 8)
    for t in (1, 2, 4)
    for s in (1, 2, 4, 8)
    if d * f * t * s == 8
]


@pytest.mark.slow
@pytest.mark.parametrize("sizes", FACTORS)
@pytest.mark.parametrize("kind", ["prefix", "masked", "vision"])
def test_every_way_to_arrange_eight_devices_trains_as_one(source, kind, sizes):
    agree(trained_kind(kind, source, sizes), alone(kind, source))


PAIRS = "".join(f"one {i} two\tuno {i} dos\n" for i in range(200))


def test_translation_trains_as_on_one_device(tmp_path):
    pytest.importorskip("tokenizers", reason="subwords need the extra [text]")
    file = tmp_path / "pairs.txt"
    file.write_text(PAIRS, encoding="utf-8")
    changes = {"pairs__source": str(file), "pairs__N": 8, "pairs__vocabulary": 300, "model__H": 4, "model__M": 1}
    with mock.patch("experiments.translation.translation_score.metrics"):
        of = functools.partial(trained, "translation", train__evaluate_batch=16, **changes)
        agree(of("1x2x2x2"), of("1x1x1x1"))


# ------------------------------------------------------------------------------------------------------- what it costs


def compiled(sizes, source, **changes):
    """The compiled step for a mesh, and the abstract state it is for: nothing is run."""
    mesh = mesh_of(sizes)
    task, (rate, optimiser) = task_of("language", mesh, text__source=source, **changes), adamw()
    state = steps.abstract_state(task, optimiser, mesh=mesh)
    alive = jax.device_put(np.True_, meshes.replicated(mesh))
    step = steps.update(task, optimiser, rate, mesh, accumulation=1)
    return step.lower(state, meshes.place_batch(mesh, task.train[0]), alive).compile(), state


def test_fsdp_holds_and_gathers_one_block_at_a_time(source):
    """Parameters and moments fall as 1/fsdp; never are all layers' weights gathered; gradients are scattered."""
    wide = TEXT | {"model__D": 64, "model__M": 3, "model__unroll": 0}
    (one, whole), (eight, part) = compiled("1x1x1x1", source, **wide), compiled("2x4x1x1", source, **wide)
    parts = 4
    for tree in ("params", "opt_state"):
        share = compilation.device_bytes(getattr(part, tree)) / compilation.device_bytes(getattr(whole, tree))
        assert 1 / parts <= share < 1.05 / parts
    found = hlo.traffic(eight.as_text())
    assert {"all-gather", "reduce-scatter"} <= found.keys() and "all-gather" not in hlo.traffic(one.as_text())
    blocks = compilation.tree_bytes(whole.params["blocks"])
    arrived = max(hlo.largest(eight.as_text(), "all-gather"), hlo.largest(eight.as_text(), "all-reduce"))
    assert arrived < blocks / 3  # one layer's, and of that one weight
    all_weights = compilation.tree_bytes(whole.params)
    assert 1.5 * all_weights < found["all-gather"].size < 2.1 * all_weights  # forward, and again in the backward pass
    arguments = [program.memory_analysis().argument_size_in_bytes for program in (one, eight)]
    assert arguments[1] < 1.1 * arguments[0] / parts
    assert found["all-reduce"].size < 1.2 * all_weights / parts  # scattered before they are summed over `data`


def test_tensor_and_sequence_pass_what_they_should(source):
    tensor = hlo.traffic(compiled("1x1x4x1", source, **TEXT, model__M=1)[0].as_text())
    assert tensor.keys() == {"all-reduce"}
    ring = compiled("1x1x1x4", source, **TEXT, model__M=1)[0].as_text()
    assert "collective-permute" in hlo.traffic(ring)
    assert hlo.largest(ring, "all-gather") <= 4 * (16 + 1) * 8  # a number for each token and place, never features


def test_the_memory_of_activations_falls_with_the_sequence_axis(tmp_path):
    source = str(tmp_path / "text.txt")
    (tmp_path / "text.txt").write_bytes(tiny.TEXT * 5)
    long = {
        "text__N": 256,
        "model__M": 1,
        "train__batch_size": 2,
        "train__evaluate_batch": 2,
        "model__D": 32,
        "model__attention": "flash",
    }
    one, eight = (compiled(s, source, **long)[0].memory_analysis().temp_size_in_bytes for s in ("1x1x1x1", "1x1x1x8"))
    assert eight < one / 3


# ----------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("sizes", "sentence"),
    [
        ({"data": 3, "tensor": 3}, "mesh.data = 3 x mesh.tensor = 3 does not fit JAX's devices, 8 x cpu (cpu)"),
        ({"data": 0}, "mesh.data = 0: choose at least 1"),
        ({"fsdp": -2}, "mesh.fsdp = -2: choose at least 1"),
        ({"data": -1, "fsdp": -1}, "mesh.data and mesh.fsdp are both -1"),
        ({"data": -1, "tensor": 3}, "mesh.tensor = 3 does not fit"),
        ({"data": 16}, "mesh.data = 16 does not fit"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused(sizes, sentence):
    with pytest.raises(errors.UserError) as refused:
        meshes.make(**sizes)
    assert sentence in str(refused.value)


def test_a_cpu_that_was_started_with_fewer_devices_than_it_has_cores(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 16)
    monkeypatch.delenv("XLA_FLAGS")
    with pytest.raises(errors.UserError, match=r"8 x cpu \(cpu\); JAX has started with these in this process"):
        meshes.make(data=16)


def test_minus_one_takes_what_is_left():
    assert dict(meshes.make(tensor=2, sequence=2).shape) == {"data": 2, "fsdp": 1, "tensor": 2, "sequence": 2}
    assert dict(meshes.make(data=1, fsdp=-1).shape) == {"data": 1, "fsdp": 8, "tensor": 1, "sequence": 1}


@pytest.mark.parametrize(
    ("experiment", "sizes", "changes", "sentence"),
    [
        ("language", "1x4x1x1", {"model__D": 6}, "D = 6 (blocks/"),
        ("language", "1x1x4x1", {"model__F": 6, "model__H": 4}, "F = 6 (blocks/mlp/"),
        ("language", "1x1x4x1", {"model__H": 2}, "model.H = 2 heads do not divide evenly over mesh.tensor = 4"),
        ("language", "1x1x1x4", {"text__N": 7}, "N = 7 tokens (w_BN) does not divide evenly over mesh.sequence = 4"),
        ("language", "1x1x1x2", {"model__attention": "fused"}, "fused needs whole sequences"),
        ("vision", "1x1x1x2", {"image__head": "class_token"}, "the class token is no part of the image"),
        ("vision", "1x1x1x8", {"image__patch": 4}, "4 patches do not divide evenly over mesh.sequence = 8"),
        ("language", "1x1x2x1", {"model__score": "identity_query"}, "cuts whole tokens into heads"),
        ("language", "1x1x2x1", {"model__mlp": "test_mesh:mine"}, "does not say `shared`"),
    ],
)
def test_what_does_not_divide_is_refused_with_the_reason(source, experiment, sizes, changes, sentence):
    mesh = mesh_of(sizes)
    changes = changes | ({"text__source": source} if experiment == "language" else {})
    with pytest.raises(errors.UserError) as refused, contextlib.redirect_stdout(io.StringIO()):
        task = task_of(experiment, mesh, **changes)
        meshes.check_layout(mesh, task.layout, jax.eval_shape(task.init, jax.random.key(0)), task.train[0])
    assert sentence in str(refused.value)


class mine:  # noqa: N801  (a user's MLP that knows nothing of devices)
    init = staticmethod(lambda key, **sizes: {})
    apply = staticmethod(lambda params, x_BND: x_BND)


def test_an_experiment_that_is_not_shared_says_so():
    mesh = mesh_of("4x1x2x1")
    with pytest.raises(errors.UserError, match="not shared over mesh.tensor, which must be 1"):
        meshes.check_layout(mesh, layouts.ONE, {}, {})


def test_words_that_do_not_divide_are_whole_on_every_device():
    mesh = mesh_of("1x1x2x1")
    assert meshes.layout(mesh, W=256).vocab == "tensor"
    assert meshes.layout(mesh, W=257).vocab is None is meshes.layout(mesh).vocab


# ------------------------------------------------------------------------------------------------------ small parts


def test_tokens_are_dealt_like_cards():
    batch = {"w_BN": np.arange(24).reshape(2, 12), "valid_BS": np.ones((2, 12), bool), "label_B": np.arange(2)}
    placed = meshes.place_batch(mesh_of("2x1x1x4"), batch)
    shards = {shard.device.id: np.asarray(shard.data) for shard in placed["w_BN"].addressable_shards}
    assert shards[1].tolist() == [[1, 5, 9]] and shards[6].tolist() == [[14, 18, 22]]
    assert all(shard.data.shape == (1, 12) for shard in placed["valid_BS"].addressable_shards)

    def own(x_BN, w_BN):
        return jnp.abs(layouts.own(x_BN, meshes.layout(mesh_of("2x1x1x4"))) - w_BN).sum()[None, None]

    specs = {"in_specs": (P("data"), P("data", "sequence")), "out_specs": P("data", "sequence")}
    assert not jax.jit(meshes.sharded(own, mesh_of("2x1x1x4"), **specs))(batch["w_BN"], placed["w_BN"]).any()


def test_traffic_counts_loops_and_bytes():
    mesh = mesh_of("8x1x1x1")

    def local(x):
        def turn(x, _):
            return jax.lax.ppermute(x, "data", [(i, (i + 1) % 8) for i in range(8)]), None

        x, _ = jax.lax.scan(turn, x, None, length=5)
        return jax.lax.psum(jnp.sin(x).sum(), "data"), jax.lax.all_gather(x, "data", tiled=True)

    out = (P(), P("data"))
    program = jax.jit(meshes.sharded(local, mesh, in_specs=P("data"), out_specs=out)).lower(np.ones(64, np.float32))
    found = hlo.traffic(program.compile().as_text())
    assert found["collective-permute"] == (5, 5 * 8 * 4, 0)
    assert found["all-gather"] == (1, 64 * 4, 0) and found["all-reduce"] == (1, 4, 0)


def test_dry_run_simulates_devices_that_are_not_there(source, tmp_path):
    changes = {"text.source": source, "text.N": 8} | tiny.MODEL | tiny.TRAIN | {"train.evaluate_batch": 16}
    command = [sys.executable, "launch.py", "--config", tiny.config_file(tmp_path, "language", **changes), "--dry_run"]
    found = subprocess.run(
        [
            *command,
            "--config.mesh.fsdp=4",
            "--config.mesh.data=3",
            "--config.train.batch_size=24",
            "--config.train.evaluate_batch=24",
        ],
        cwd=pathlib.Path(__file__).parents[2],
        env=os.environ | {"XLA_FLAGS": "--xla_backend_optimization_level=0", "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert found.returncode == 0, found.stderr
    for words in ("12 simulated devices, mesh data=3, fsdp=4", "of the whole", "all-gather", "reduce-scatter"):
        assert words in found.stdout
    assert math.isclose(float(found.stdout.split("(1/")[1].split()[0]), 4, rel_tol=0.05)


def says(program: str, *arguments: str) -> str:
    """What a process without simulated devices prints that runs this program from the project's root."""
    found = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=pathlib.Path(__file__).parents[2],
        env=os.environ | {"XLA_FLAGS": "", "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert found.returncode == 0, found.stderr
    return found.stdout


def test_a_cpu_is_no_more_devices_than_it_has_cores():
    program = """
import os
from experiments.engine import errors, hardware, mesh
os.cpu_count = lambda: 2
compilation.of_cores(dict(data=4, fsdp=1))
compilation.start("cpu")
try:
    mesh.make(data=4)
except errors.UserError as error:
    print(error)
"""
    assert "does not fit JAX's devices, 1 x cpu" in says(program)


def test_the_launcher_takes_a_device_for_each_core_that_the_config_asks_for(source, tmp_path):
    file = tiny.config_file(tmp_path, "language", **{"text.source": source, "mesh.data": 2} | tiny.TRAIN)
    program = "import os, sys, launch, jax; os.cpu_count = lambda: 2; "
    program += "launch.prepared(launch.asked(sys.argv)); print(jax.devices())"
    assert says(program, "--config", file) == "[CpuDevice(id=0), CpuDevice(id=1)]\n"

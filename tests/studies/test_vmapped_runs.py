"""Several runs as rows of one program: each is trained as it would be alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from errors import raises

from experiments.config import errors
from experiments.devices import compilation, mesh as meshes
from experiments.engine import optim, train_step
from experiments.model import build
from experiments.studies import vmapped_runs
from tfm import shapes

SEEDS = (3, 5, 3, 8)  # the third run differs from the first in numbers only
RATES, DECAYS, STDS = (1e-2, 1e-2, 5e-2, 5e-2), (0.1, 0.1, 0.0, 0.0), (1.0, 1.0, 1.0, 2.0)
NUMBERS = {name: np.float32(x) for name, x in [("learning_rate", RATES), ("weight_decay", DECAYS), ("std", STDS)]}
STEPS, ACCUMULATION = 3, 2


def optimiser(learning_rate=None, weight_decay=None) -> tuple[optax.Schedule, optax.GradientTransformation]:
    rate = optim.schedule("cosine", peak=learning_rate, steps=STEPS, warmup_steps=1)
    return rate, optim.adamw(rate, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=weight_decay, clip=1.0)


def task(seed: int) -> train_step.Task:
    linear = tiny.linear_task(seed=seed)

    def init(key, std=1.0):
        params = linear.init(key)
        return params | {"G_CD": std * params["G_CD"]}

    return linear._replace(init=init)


TASKS = {seed: task(seed) for seed in SEEDS}


@functools.cache
def program(learning_rate: float, weight_decay: float):
    """Return the optimiser of a single run and its step on one device. Data of all seeds have the same shapes."""
    rate, adamw = optimiser(learning_rate, weight_decay)
    options = {"mesh": meshes.make(data=1), "accumulation": ACCUMULATION}
    return adamw, train_step.update(task=TASKS[3], optimiser=adamw, rate=rate, **options)


@functools.cache
def train_alone(r: int):
    """Train run r on one device. Return its parameters, the metrics of each step, and its evaluation."""
    device, run_task, (adamw, step) = meshes.make(data=1), TASKS[SEEDS[r]], program(RATES[r], DECAYS[r])
    run_task = run_task._replace(init=functools.partial(run_task.init, std=STDS[r]))
    state, history = train_step.initial_state(run_task, adamw, seed=SEEDS[r], mesh=device), []
    for i in range(STEPS):
        state, metrics = step(state, meshes.place_batch(device, run_task.train[i]), np.True_)
        history.append(jax.device_get(metrics))
    return jax.device_get(state.params), history, train_step.evaluator(run_task, device)(state.params)


@pytest.mark.parametrize(("sizes", "is_batched"), [({"data": 2}, False), ({"data": 1, "seed": 2}, True)], ids=str)
def test_every_row_trains_as_if_alone_and_a_row_with_nan_stops(sizes, is_batched, monkeypatch):
    """The second row's batch of step 2 is NaN. Its state stays, and the other rows go on."""
    if "seed" in sizes and jax.__version_info__ >= (0, 10):  # vmap over rows, as on accelerators
        monkeypatch.setattr(meshes, "side_by_side", lambda devices: True)
    default = functools.partial(optimiser, learning_rate=1.0, weight_decay=0.0)  # every run replaces these numbers
    vmapped = vmapped_runs.VmappedRuns(TASKS[3], default, meshes.make(**sizes), ACCUMULATION, is_batched)
    state, step, history = vmapped_runs.initial_state(vmapped, SEEDS, NUMBERS), vmapped_runs.step(vmapped), []
    alive = np.array([True] * 4)
    for i in range(STEPS):
        batch_R = [TASKS[seed].train[i] for seed in SEEDS]
        if i == 1:
            batch_R[1] = batch_R[1] | {"x_BD": np.full_like(batch_R[1]["x_BD"], np.nan)}
        state, metrics = step(state, meshes.place_rows(vmapped.mesh, batch_R), alive, NUMBERS)
        alive = metrics["alive"]
        history.append(jax.device_get(metrics))
    assert [list(metrics["alive"]) for metrics in history] == [[True] * 4] + [[True, False, True, True]] * (STEPS - 1)
    assert list(jax.device_get(state.step)) == [STEPS, 1, STEPS, STEPS]
    params_R = jax.device_get(state.params)
    assert all(np.isfinite(leaf[1]).all() for leaf in jax.tree.leaves(params_R))
    if "seed" in sizes:
        assert {leaf.sharding.spec[0] for leaf in jax.tree.leaves(state.params)} == {"seed"}
    evaluation = vmapped_runs.evaluator(vmapped)(state.params)
    tolerance = {"rtol": 2e-5, "atol": 1e-6}
    for r in (2, 3):
        params, metrics, measures = train_alone(r)
        for row, single in zip(history, metrics, strict=True):
            for name in ("loss", "accuracy", "gradient_norm", "learning_rate"):
                np.testing.assert_allclose(row[name][r], single[name], **tolerance, err_msg=f"{name} of row {r}")
        row_params = jax.tree.map(lambda x, r=r: x[r], params_R)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **tolerance), row_params, params)
        assert {name: column[r] for name, column in evaluation.items()} == pytest.approx(measures, rel=2e-5)
    assert len(set(evaluation["loss"].round(3))) == len(SEEDS)


def test_score_std_can_be_a_traced_number_also_for_two_kinds_of_scores(monkeypatch):
    """test_pairing tests a model with one kind. Ones, in place of normal numbers, compile faster."""
    monkeypatch.setattr(jax.random, "normal", lambda key, shape=(), dtype=np.float32: jnp.ones(shape, dtype))

    def init(score_std: float):
        small = {"model__M": 1, "model__D": 4, "model__score": "tied", "model__value": "identity"}
        small |= {"model__bias": "none", "model__position": "sinusoidal", "model__score_std": score_std}
        m = tiny.settings("translation", **small).model
        return build.encoder_decoder(m, W=11, N=7, tied_output=False).init

    number = jax.jit(lambda std: init(1.0)(jax.random.key(3), score_std=std))
    params, smaller = (shapes.flat(jax.device_get(number(std))) for std in (1.0, 0.7))
    scaled = {"encoder/blocks/score/U_HKD", "decoder/blocks/score/U_HKD", "decoder/blocks/score_cross/U_HKD"}
    assert scaled < params.keys()
    for path, leaf in params.items():
        np.testing.assert_allclose(smaller[path], (0.7 if path in scaled else 1) * leaf, rtol=1e-6, err_msg=path)


def test_the_axis_seed_takes_devices_and_a_cpu_and_a_tpu_with_large_runs_compute_rows_one_by_one(monkeypatch):
    assert dict(meshes.make(data=-1, seed=2).shape) == {"seed": 2, "data": 4, "fsdp": 1, "tensor": 1, "sequence": 1}
    assert meshes.make(data=8).axis_names == meshes.AXES
    with raises(errors.UserError, "mesh.seed = 3"):
        meshes.make(seed=3)
    assert not meshes.side_by_side(meshes.make(data=1)) and not meshes.side_by_side(meshes.make(data=2, seed=4))
    single, two_devices = meshes.make(data=1), meshes.make(data=1, seed=2)
    for platform, expected in (("cpu", [False, False]), ("gpu", [True, True]), ("tpu", [True, False])):
        monkeypatch.setattr(meshes, "backend", lambda _, platform=platform: platform)
        assert [vmapped_runs.side_by_side(single, flops) for flops in (4e9, 4e10)] == expected
        assert vmapped_runs.side_by_side(two_devices, 4e10)


def test_vmapped_runs_are_compiled_with_the_options_of_their_mesh(monkeypatch):
    vmapped = vmapped_runs.VmappedRuns(TASKS[3], functools.partial(optimiser, 0.1, 0.1), meshes.make(data=1), 1, True)
    state, batch = vmapped_runs.initial_state(vmapped, [3], {}), meshes.place_rows(vmapped.mesh, [TASKS[3].train[0]])
    for owner, name, evaluates in ((meshes, "compiler_options", False), (compilation, "deterministic_options", True)):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, lambda mesh, on=True: {"none_such": "1"} if on else {})
            with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option"):
                vmapped_runs.step(vmapped)(state, batch, np.array([True]), {})
            if evaluates:
                with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option"):
                    vmapped_runs.evaluator(vmapped)(state.params)
        vmapped = vmapped._replace(task=vmapped.task._replace(deterministic=True))

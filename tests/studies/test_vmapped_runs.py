"""Several runs as rows of one program: each is trained as it would be alone."""

import functools

import jax
import numpy as np
import optax
import pytest
import tiny
from errors import raises

from experiments.build import model as models
from experiments.engine import errors, mesh, optim, train_step as steps
from experiments.studies import vmapped_runs
from tfm import shapes

SEEDS = (3, 5, 3, 8)  # the third is the first with other numbers
RATES, DECAYS, STDS = (1e-2, 1e-2, 5e-2, 1e-2), (0.1, 0.1, 0.0, 0.1), (1.0, 1.0, 1.0, 2.0)
NUMBERS = {name: np.float32(x) for name, x in [("learning_rate", RATES), ("weight_decay", DECAYS), ("std", STDS)]}
STEPS, ACCUMULATION = 3, 2


def optimiser(learning_rate=None, weight_decay=None) -> tuple[optax.Schedule, optax.GradientTransformation]:
    rate = optim.schedule("cosine", peak=learning_rate, steps=STEPS, warmup_steps=1)
    made = optim.adamw(rate, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=weight_decay, clip=1.0)
    return rate, made


def task(seed: int) -> steps.Task:
    linear = tiny.linear_task(seed=seed)

    def init(key, std=1.0):
        params = linear.init(key)
        return params | {"G_CD": std * params["G_CD"]}

    return linear._replace(init=init)


TASKS = {seed: task(seed) for seed in SEEDS}


@functools.cache
def program(learning_rate: float, weight_decay: float):
    """The optimiser of a run alone, on one device, and its step: the data of all seeds have the same shapes."""
    rate, made = optimiser(learning_rate, weight_decay)
    return made, steps.update(
        task=TASKS[3], optimiser=made, rate=rate, mesh=mesh.make(data=1), accumulation=ACCUMULATION
    )


@functools.cache
def alone(r: int):
    """(the parameters after STEPS, the metrics of each step, the evaluation) of one run, on one device."""
    one, own, (made, step) = mesh.make(data=1), TASKS[SEEDS[r]], program(RATES[r], DECAYS[r])
    own = own._replace(init=functools.partial(own.init, std=STDS[r]))
    state, seen = steps.initial_state(own, made, seed=SEEDS[r], mesh=one), []
    for i in range(STEPS):
        state, metrics = step(state, mesh.place_batch(one, own.train[i]), np.True_)
        seen.append(jax.device_get(metrics))
    return jax.device_get(state.params), seen, steps.evaluator(own, one)(state.params)


@pytest.mark.parametrize(("sizes", "batched"), [({"data": 2}, False), ({"data": 1, "seed": 2}, True)], ids=str)
def test_every_row_is_trained_as_it_would_be_alone_but_one_whose_numbers_go_wrong(sizes, batched, monkeypatch):
    """The second row's batch of step 2 is no numbers: it stays as it is, and the others go on."""
    if "seed" in sizes and jax.__version_info__ >= (0, 10):  # as on accelerators
        monkeypatch.setattr(mesh, "side_by_side", lambda devices: True)
    usual = functools.partial(optimiser, learning_rate=1.0, weight_decay=0.0)  # all runs have others
    of = vmapped_runs.VmappedRuns(TASKS[3], usual, mesh.make(**sizes), ACCUMULATION, batched)
    state, step, seen = vmapped_runs.initial_state(of, SEEDS, NUMBERS), vmapped_runs.step(of), []
    alive = np.array([True] * 4)
    for i in range(STEPS):
        each = [TASKS[seed].train[i] for seed in SEEDS]
        if i == 1:
            each[1] = each[1] | {"x_BD": np.full_like(each[1]["x_BD"], np.nan)}
        state, metrics = step(state, mesh.place_rows(of.mesh, each), alive, NUMBERS)
        alive = metrics["alive"]
        seen.append(jax.device_get(metrics))
    assert [list(metrics["alive"]) for metrics in seen] == [[True] * 4] + [[True, False, True, True]] * (STEPS - 1)
    assert list(jax.device_get(state.step)) == [STEPS, 1, STEPS, STEPS]
    assert all(np.isfinite(leaf[1]).all() for leaf in jax.tree.leaves(state.params))
    if "seed" in sizes:
        assert {leaf.sharding.spec[0] for leaf in jax.tree.leaves(state.params)} == {"seed"}
    evaluation = vmapped_runs.evaluator(of)(state.params)
    tolerance = {"rtol": 2e-5, "atol": 1e-6}
    for r in (2, 3):
        params, metrics, found = alone(r)
        for row, single in zip(seen, metrics, strict=True):
            for name in ("loss", "accuracy", "gradient_norm", "learning_rate"):
                np.testing.assert_allclose(row[name][r], single[name], **tolerance, err_msg=f"{name} of row {r}")
        own = jax.tree.map(lambda x, r=r: x[r], jax.device_get(state.params))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **tolerance), own, params)
        assert {name: column[r] for name, column in evaluation.items()} == pytest.approx(found, rel=2e-5)
    assert len(set(evaluation["loss"].round(3))) == len(SEEDS)


def test_the_initial_scale_is_a_number_of_a_model_with_two_kinds_of_scores():
    """As a row has it; test_pairing has that of a model with one kind."""

    def init(score_std: float):
        few = {"model__M": 1, "model__D": 4, "model__score": "tied", "model__value": "identity", "model__bias": "none"}
        m = tiny.settings("translation", model__score_std=score_std, model__position="sinusoidal", **few).model
        return models.build_encoder_decoder(m, W=11, N=7, tied_output=False).init

    key = jax.random.key(3, impl="unsafe_rbg")  # compiled six times as fast
    number = jax.jit(lambda std: init(1.0)(key, score_std=std))
    one, number = number(1.0), number(0.7)
    for (path, leaf), mine in zip(jax.tree_util.tree_leaves_with_path(one), jax.tree.leaves(number), strict=True):
        *_, of, name = shapes.names(path)
        scaled = "score" in of and name.startswith("U")
        np.testing.assert_allclose(mine, (0.7 if scaled else 1) * leaf, rtol=1e-6, err_msg=name)


def test_seeds_take_devices_like_every_other_axis_and_rows_side_by_side_are_for_accelerators():
    assert dict(mesh.make(data=-1, seed=2).shape) == {"seed": 2, "data": 4, "fsdp": 1, "tensor": 1, "sequence": 1}
    assert mesh.make(data=8).axis_names == mesh.AXES
    with raises(errors.UserError, "mesh.seed = 3"):
        mesh.make(seed=3)
    assert not mesh.side_by_side(mesh.make(data=1)) and not mesh.side_by_side(mesh.make(data=2, seed=4))


def test_a_tpu_computes_large_runs_one_after_the_other(monkeypatch):
    one, spread = mesh.make(data=1), mesh.make(data=1, seed=2)
    for platform, right in (("cpu", [False, False]), ("gpu", [True, True]), ("tpu", [True, False])):
        monkeypatch.setattr(mesh, "backend", lambda _, platform=platform: platform)
        assert [vmapped_runs.side_by_side(one, flops) for flops in (4e9, 4e10)] == right
        assert vmapped_runs.side_by_side(spread, 4e10)


def test_runs_together_are_compiled_with_the_options_of_their_mesh(monkeypatch):
    of = vmapped_runs.VmappedRuns(TASKS[3], functools.partial(optimiser, 0.1, 0.1), mesh.make(data=1), 1, True)
    state, batch = vmapped_runs.initial_state(of, [3], {}), mesh.place_rows(of.mesh, [TASKS[3].train[0]])
    monkeypatch.setattr(mesh, "compiler_options", lambda _: {"none_such": "1"})
    with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option"):
        vmapped_runs.step(of)(state, batch, np.array([True]), {})

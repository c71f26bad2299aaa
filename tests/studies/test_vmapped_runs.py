"""Several runs as rows of one program: each is trained as it would be alone."""

import functools

import jax
import numpy as np
import optax
import pytest
import tiny

from experiments import model as models
from experiments.engine import errors, mesh, optim
from experiments.engine import step as steps
from experiments.studies import vmapped_runs
from tfm import shapes

SEEDS = (3, 5, 3, 8)  # the third is the first with other numbers
RATES, DECAYS, STDS = (1e-2, 1e-2, 5e-2, 1e-2), (0.1, 0.1, 0.0, 0.1), (1.0, 1.0, 1.0, 2.0)
NUMBERS = {name: np.float32(x) for name, x in [("learning_rate", RATES), ("weight_decay", DECAYS), ("std", STDS)]}
STEPS = 5


def optimiser(learning_rate=None, weight_decay=None) -> tuple[optax.Schedule, optax.GradientTransformation]:
    rate = optim.schedule(
        "cosine", peak=learning_rate, steps=STEPS, warmup_steps=1, final_fraction=0.1, decay_fraction=0.0
    )
    made = optim.adamw(rate, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=weight_decay, clip=1.0)
    return rate, made


def task(seed: int) -> steps.Task:
    linear = tiny.linear_task(seed=seed)

    def init(key, std=1.0):
        params = linear.init(key)
        return params | {"G_CD": std * params["G_CD"]}

    return linear._replace(init=init)


TASKS = {seed: task(seed) for seed in SEEDS}


def rows(devices, *, batched: bool, accumulation: int = 1, tasks=TASKS) -> vmapped_runs.VmappedRuns:
    usual = functools.partial(optimiser, learning_rate=1.0, weight_decay=0.0)  # all runs have others
    return vmapped_runs.VmappedRuns(tasks[3], usual, devices, accumulation, batched)


def trained(of: vmapped_runs.VmappedRuns, alive=(True,) * 4, tasks=TASKS):
    """(the state after STEPS, the metrics of each step, on the host)."""
    state, step, seen = vmapped_runs.initial_state(of, SEEDS, NUMBERS), vmapped_runs.step(of), []
    for i in range(STEPS):
        batch = mesh.place_rows(of.mesh, [tasks[seed].train[i] for seed in SEEDS])
        state, metrics = step(state, batch, np.array(alive), NUMBERS)
        alive = metrics["alive"]
        seen.append(jax.device_get(metrics))
    return state, seen


@functools.cache
def alone(r: int, accumulation: int = 1):
    """The same for one run, on one device; and its evaluation."""
    one, own = mesh.make(data=1), TASKS[SEEDS[r]]
    rate, made = optimiser(RATES[r], DECAYS[r])
    own = own._replace(init=functools.partial(own.init, std=STDS[r]))
    state, seen = steps.initial_state(own, made, seed=SEEDS[r], mesh=one), []
    step = steps.update(own, made, rate, one, accumulation=accumulation)
    for i in range(STEPS):
        state, metrics = step(state, mesh.place_batch(one, own.train[i]), np.True_)
        seen.append(jax.device_get(metrics))
    return jax.device_get(state.params), seen, steps.evaluator(own, one)(state.params)


@pytest.mark.parametrize(
    ("sizes", "accumulation", "batched"),
    [
        ({"data": 1}, 1, False),
        ({"data": 1}, 1, True),
        ({"data": 1}, 2, True),
        ({"data": 2}, 2, False),
        ({"data": 2, "seed": 4}, 2, True),
        ({"data": 1, "seed": 2}, 1, True),
    ],
    ids=str,
)
def test_every_row_is_trained_as_it_would_be_alone(sizes, accumulation, batched):
    of = rows(mesh.make(**sizes), batched=batched, accumulation=accumulation)
    state, seen = trained(of)
    evaluation = vmapped_runs.evaluator(of)(state.params)
    if "seed" in sizes:
        assert {leaf.sharding.spec[0] for leaf in jax.tree.leaves(state.params)} == {"seed"}
    tolerance = {"rtol": 2e-5, "atol": 1e-6}
    for r in range(len(SEEDS)):
        params, metrics, found = alone(r, accumulation)
        for row, single in zip(seen, metrics, strict=True):
            for name in ("loss", "accuracy", "gradient_norm", "learning_rate"):
                np.testing.assert_allclose(row[name][r], single[name], **tolerance, err_msg=f"{name} of row {r}")
        own = jax.tree.map(lambda x, r=r: x[r], jax.device_get(state.params))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **tolerance), own, params)
        for name, value in found.items():
            np.testing.assert_allclose(evaluation[name][r], value, **tolerance)


@pytest.mark.parametrize("sizes", [{"data": 1}, {"data": 2, "seed": 2}], ids=str)
def test_a_row_whose_numbers_go_wrong_stays_as_it_is_and_the_others_go_on(sizes):
    def breaks(fetched: dict) -> dict:
        return fetched | {"x_BD": np.full_like(fetched["x_BD"], np.nan)}

    broken = TASKS | {
        5: TASKS[5]._replace(train=[TASKS[5].train[0], breaks(TASKS[5].train[1]), *[TASKS[5].train[2]] * 3])
    }
    of = rows(mesh.make(**sizes), batched="seed" in sizes, tasks=broken)
    state, seen = trained(of, tasks=broken)
    assert [list(metrics["alive"]) for metrics in seen] == [[True] * 4] + [[True, False, True, True]] * 4
    assert list(jax.device_get(state.step)) == [5, 1, 5, 5]
    for r in (0, 2, 3):
        own = jax.tree.map(lambda x, r=r: x[r], jax.device_get(state.params))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), own, alone(r)[0])
    assert all(np.isfinite(leaf[1]).all() for leaf in jax.tree.leaves(state.params))


@pytest.mark.parametrize("sizes", [{"data": 1}, {"data": 2, "seed": 2}], ids=str)
def test_every_row_is_evaluated_by_its_own_parameters(sizes):
    of = rows(mesh.make(**sizes), batched="seed" in sizes)
    params = vmapped_runs.initial_state(of, SEEDS, NUMBERS | {"std": np.float32([1.0, 1.0, 0.5, 2.0])}).params
    found, single = vmapped_runs.evaluator(of)(params), steps.evaluator(TASKS[3], mesh.make(data=1))
    assert len(set(found["loss"].round(3))) == len(SEEDS)
    for r in range(len(SEEDS)):
        own = single(jax.tree.map(lambda x, r=r: np.asarray(x[r]), params))
        assert {name: column[r] for name, column in found.items()} == pytest.approx(own, rel=1e-5)


def translation(score_std: float) -> models.Model:
    m = tiny.settings("translation", model__score_std=score_std).model
    return models.encoder_decoder(m, W=11, N=7, tied_output=False)


def test_the_initial_scale_of_a_row_is_its_own():
    """Of a model with two kinds of scores; test_pairing has one row after the other of a model with one."""
    seeds, stds = (3, 5, 3), (1.0, 0.7, 0.7)
    made = task(3)._replace(init=translation(1.0).init)
    of = rows(mesh.make(data=1), batched=True, tasks={3: made})
    params = vmapped_runs.initial_state(of, seeds, {"score_std": np.float32(stds)}).params
    init = {std: jax.jit(translation(std).init) for std in set(stds)}  # as the config of a run alone has it
    names = ["/".join(shapes.names(path)) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    for r, (seed, std) in enumerate(zip(seeds, stds, strict=True)):
        right = jax.tree.leaves(init[std](jax.random.key(seed)))
        for name, leaf, single in zip(names, jax.tree.leaves(params), right, strict=True):
            np.testing.assert_allclose(leaf[r], single, rtol=1e-6, err_msg=f"{name} of row {r}")
    scaled = {name for name, leaf in zip(names, jax.tree.leaves(params), strict=True) if (leaf[0] != leaf[2]).any()}
    assert scaled == {name for name in names if "/score" in name and name.split("/")[-1].startswith("U")} != set()


def test_rows_side_by_side_are_for_accelerators():
    assert not mesh.side_by_side(mesh.make(data=1)) and not mesh.side_by_side(mesh.make(data=2, seed=4))


def test_seeds_take_devices_like_every_other_axis():
    assert dict(mesh.make(data=-1, seed=2).shape) == {"seed": 2, "data": 4, "fsdp": 1, "tensor": 1, "sequence": 1}
    assert mesh.make(data=8).axis_names == mesh.AXES
    with pytest.raises(errors.UserError, match="mesh.seed = 3 does not fit"):
        mesh.make(seed=3)

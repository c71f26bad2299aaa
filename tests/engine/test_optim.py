"""Learning rates against their formulas; AdamW and Muon, decay and clipping, against plain numpy."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from errors import raises
from matrix_steps import (
    ADAM,
    ALL,
    DECAY,
    FEW,
    MATRIX_RATE,
    MOMENTUM,
    OTHERS,
    RATE,
    ROUNDS,
    D,
    F,
    M,
    drawn,
    matrix_step,
    near,
    taken,
)

from experiments.engine import errors, optim, orthogonal, train_step as steps
from tfm import shapes

PEAK, STEPS, WARMUP, FINAL = 0.6, 200, 40, 0.1


def rate(name, **changes):
    sizes = {"peak": PEAK, "steps": STEPS, "warmup_steps": WARMUP}
    return optim.schedule(name, **(sizes | changes))


def expected(name, step, FINAL=FINAL):
    if step < WARMUP:
        return PEAK * (step + 1) / WARMUP
    done = (step - WARMUP) / (STEPS - WARMUP)
    return (
        PEAK
        * {
            "constant": 1,
            "linear": 1 - done * (1 - FINAL),
            "cosine": FINAL + (1 - FINAL) * (1 + math.cos(math.pi * done)) / 2,
            "wsd": 1 - max(0, (step - (STEPS - 40)) / 40) * (1 - FINAL),
        }[name]
    )


@pytest.mark.parametrize("name", ["constant", "linear", "cosine", "wsd"])
def test_a_schedule_is_its_formula(name):
    at = np.array([0, 1, 19, WARMUP - 1, WARMUP, WARMUP + 1, 120, 159, 160, 161, 175, STEPS - 1, STEPS])
    np.testing.assert_allclose(jax.jit(jax.vmap(rate(name)))(at), [expected(name, step) for step in at], rtol=1e-5)
    if name != "constant":
        found = [float(rate(f"{name}:0.3")(step)) for step in (WARMUP, 175, STEPS)]
        np.testing.assert_allclose(found, [expected(name, step, 0.3) for step in (WARMUP, 175, STEPS)], rtol=1e-5)
    assert float(rate(name, warmup_steps=0)(0)) == pytest.approx(PEAK)
    assert float(rate(name, warmup_steps=1)(0)) == pytest.approx(PEAK)


@pytest.mark.parametrize(("steps", "warmup", "first"), [(2, 0, 1), (200, 190, 190)])
def test_wsd_falls_over_a_fifth_of_all_steps_or_what_the_warm_up_leaves(steps, warmup, first):
    stable, falling, last = map(rate("wsd", steps=steps, warmup_steps=warmup), (first, first + 1, steps))
    assert float(stable) == pytest.approx(PEAK) and falling < stable and float(last) == pytest.approx(PEAK * FINAL)


def test_what_no_schedule_can_be():
    with raises(errors.UserError, "warmup_steps = 200", "train.steps = 200"):
        rate("cosine", warmup_steps=STEPS)
    with raises(errors.UserError, '"cosin"', '"cosine"', "constant, linear, cosine, wsd"):
        rate("cosin")
    for wrong in ("constant:0.5", "linear:-1", "cosine:nan"):
        with raises(errors.UserError, f"optim.schedule = {wrong}"):
            rate(wrong)


def test_decay_is_for_matrices_only():
    """Of a whole model, biases, gains and class token included."""
    task = tiny.task_of(tiny.settings("vision", image__patch=4, image__head="class_token"))
    leaves = shapes.flat(optim.matrices(jax.eval_shape(task.init, jax.random.key(0))))
    assert {name for name, decays in leaves.items() if decays} == {
        "embed/W_DP",
        "position/P_ND",
        *(f"blocks/{name}" for name in ("score/Uq_HKD", "score/Uk_HKD", "value/Uv_HKD", "value/Uo_HDK")),
        *(f"blocks/{name}" for name in ("mlp/W1_FD", "mlp/W2_DF")),
        "head/G_CD",
    }
    assert {"class/c_D", "head/b_C", "norm/gain_D", "blocks/norm1/shift_D", "blocks/mlp/b2_D"} < leaves.keys()


def adamw_by_hand(params, gradients, *, rate, weight_decay, beta1, beta2, eps):
    """Loshchilov and Hutter 2019, algorithm 2, in float64; decay on names of two letters."""
    result = {}
    for name, theta in params.items():
        theta, m, v = np.asarray(theta, np.float64), 0.0, 0.0
        for t, gradient in enumerate(gradients, 1):
            g = np.asarray(gradient[name], np.float64)
            m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g**2
            step = (m / (1 - beta1**t)) / (np.sqrt(v / (1 - beta2**t)) + eps)
            decay = weight_decay * theta if len(name.split("_")[1]) == 2 else 0
            theta = theta - rate(t - 1) * (step + decay)
        result[name] = theta
    return result


def normal(seed):
    rng = np.random.default_rng(seed)
    sizes = {"W_FD": (3, 5), "b_F": (3,)}
    return {name: jnp.asarray(rng.standard_normal(shape), jnp.float32) for name, shape in sizes.items()}


@pytest.mark.parametrize("clip", [0.0, 2.0])
def test_adamw_is_its_formula_at_the_rate_of_the_step_for_gradients_clipped_over_all_leaves(clip):
    """The first is shorter than `clip`. eps is large: AdamW alone would not notice a factor on the gradient."""
    params, gradients = normal(0), [normal(seed) for seed in (1, 2, 3)]
    lengths = [math.sqrt(sum(float(np.sum(np.square(x))) for x in one.values())) for one in gradients]
    gradients[0] = {name: x * 0.5 / lengths[0] for name, x in gradients[0].items()}
    assert min(lengths[1:]) > 2.0
    shorter = [{name: x * min(1, 2.0 / n) for name, x in g.items()} for g, n in zip(gradients, lengths, strict=True)]
    used = [gradients[0], *shorter[1:]] if clip else gradients
    how = ADAM | {"eps": 1.0, "weight_decay": 0.5}
    found = taken(optim.adamw(lambda step: 0.1 * (step + 1), clip=clip, **how), params, gradients)
    near(found, adamw_by_hand(params, used, rate=lambda step: 0.1 * (step + 1), **how))


def muon_by_hand(name, value, gradients):
    value, mean = np.asarray(value, np.float64), np.zeros(value.shape)
    for gradient in gradients:
        mean = MOMENTUM * mean + np.asarray(gradient, np.float64)
        ahead = MOMENTUM * mean + np.asarray(gradient, np.float64)
        step = np.stack([matrix_step(name, ahead[m]) for m in range(M)])
        value = value - MATRIX_RATE * RATE * (step + DECAY * value)
    return value


def muon(rate=RATE, **changes):
    options = {"muon_lr_multiplier": MATRIX_RATE, "momentum": MOMENTUM, "ns_steps": ROUNDS, "weight_decay": DECAY}
    return optim.muon(lambda step: rate, **ADAM | options | {"clip": 0.0} | changes)


def test_a_step_is_its_formula_in_every_layer_and_the_rest_is_adamw():
    params, gradients = drawn(0), [drawn(seed) for seed in (1, 2)]
    found = shapes.flat(taken(muon(), params, gradients))
    plain = taken(optim.adamw(lambda step: RATE, weight_decay=DECAY, clip=0.0, **ADAM), params, gradients)
    for name in ALL:
        if name in OTHERS:
            near(found[name], shapes.flat(plain)[name], rtol=1e-6)
        else:
            wanted = muon_by_hand(name, shapes.flat(params)[name], [shapes.flat(one)[name] for one in gradients])
            near(found[name], wanted, rtol=1e-4, atol=2e-5)


def test_the_singular_values_become_alike_and_zeros_stay():
    W1_MFD = jnp.asarray(np.random.default_rng(0).standard_normal((M, F, D)), jnp.float32).at[1].set(0.0)
    newton_schulz = orthogonal.orthogonalise(ns_steps=5)
    steps, _ = jax.jit(newton_schulz.update)({"blocks": {"W1_FD": W1_MFD}}, newton_schulz.init({}))
    before, after = (np.linalg.svd(x[0], compute_uv=False) for x in (W1_MFD, steps["blocks"]["W1_FD"]))
    assert before.max() / before.min() > 3  # so that there was something to do
    assert np.sqrt(F / D) * 0.6 < after.min() and after.max() < np.sqrt(F / D) * 1.25
    assert not np.any(steps["blocks"]["W1_FD"][1])


def test_the_gradient_of_muon_is_clipped_over_all_leaves():
    """As if the gradient were as short; its length itself does not change the step of a matrix, only that of AdamW."""
    params, gradient = drawn(0, FEW[2:]), drawn(1, FEW[2:])
    norm = np.sqrt(sum(float(np.sum(np.square(x, dtype=np.float64))) for x in jax.tree.leaves(gradient)))
    step = jax.jit(lambda gradient: taken(muon(), params, [gradient]))
    found = taken(muon(clip=2.0), params, [gradient])
    near(found, step(jax.tree.map(lambda x: x * 2.0 / norm, gradient)))
    assert not np.allclose(found["embed"]["E_ND"], step(gradient)["embed"]["E_ND"], rtol=1e-3)


def test_rows_of_a_study_take_the_same_steps():
    params, gradient = (drawn(seed, FEW) for seed in (0, 1))
    step, rates = jax.jit(lambda rate, *of: taken(muon(rate, ns_steps=2), of[0], of[1:])), jnp.array([0.1, 0.02])
    alone = [step(rate, params, gradient) for rate in rates]
    rows = jax.vmap(step, (0, None, None))(rates, params, gradient)
    near(rows, jax.tree.map(lambda *each: np.stack(each), *alone), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"name": "moun"}, ['"moun"', '"muon"', "adamw, muon, normuon, hyperball"]),
        ({"name": "os:path"}, ['"os:path"']),
        ({"name": "optax:constant_schedule"}, ["optim.name = optax:constant_schedule", "optax.GradientTransformation"]),
        ({"name": "optax:lion", "betas": [0.5, 1.0]}, ["optim.betas", [0.5, 1.0]]),
        *[({"betas": no}, ["optim.betas", no]) for no in ([], [0.9], [0.9] * 3, [-0.1, 0.5], ["a", 0.5], [True, 0])],
        ({"schedule": "os:path"}, ['"os:path"']),
        ({"schedule": "test_optim:pairs"}, ["optim.schedule = test_optim:pairs", "(step, steps)"]),
        ({"name": "muon", "momentum": 1.0}, ["optim.momentum", "1.0"]),
        ({"name": "muon", "muon_lr_multiplier": -1.0}, ["optim.muon_lr_multiplier", "-1.0"]),
    ],
)
def test_what_is_refused(changes, words):
    with raises(errors.UserError, *words):
        optim.make_optimiser(chosen(**changes))


def root(step, steps):
    return 1 - jnp.sqrt(step / steps)


def pairs(step, steps):
    return jnp.stack([step, step])


def sign(rate, *, weight_decay, slope=1.0):
    """Of a rule that counts no steps, and holds them itself: the sign of the gradient."""
    state = optax.EmptyState()

    def update(gradient, state, params):
        step = jax.tree.map(lambda g, p: -slope * rate(0) * (jnp.sign(g) + weight_decay * p), gradient, params)
        return step, state

    return optax.GradientTransformation(lambda params: state, update)


def transposed(rate):
    return optax.stateless(lambda gradient, params: jax.tree.map(jnp.transpose, gradient))


def fails(rate):
    return optax.stateless(lambda gradient, params: gradient["nothing"])


def chosen(**changes):
    return tiny.settings("language", **{f"optim__{name}": value for name, value in changes.items()})


def test_a_schedule_of_ones_own_is_its_fraction_of_the_peak_behind_the_warm_up():
    found = rate("test_optim:root")
    at = np.array([0, WARMUP - 1, WARMUP, 100, STEPS])
    wanted = [PEAK / WARMUP, PEAK, PEAK, PEAK * (1 - math.sqrt(60 / 160)), 0]
    np.testing.assert_allclose([found(n) for n in at], wanted, rtol=1e-5, atol=1e-7)


def test_a_rule_of_ones_own_gets_what_it_asks_for_and_its_steps_are_counted():
    """Lion with the decay of matrices only, behind the clipping; and what it does not ask for is no setting of it."""
    params, gradient = normal(0), normal(1)
    same = dict(schedule="constant", warmup_steps=0, weight_decay=0.5)
    settings = chosen(name="optax:lion", betas=[0.8, 0.9], clip=1e-3, **same)
    _, lion = optim.make_optimiser(settings)
    found = taken(lion, params, [gradient, gradient])
    by_hand = optax.lion(1e-3, b1=0.8, b2=0.9, weight_decay=0.5, mask=optim.matrices)
    near(found, taken(by_hand, params, [gradient, gradient]))
    settings = chosen(name="test_optim:sign", momentum=0.5, betas=[0.5, 0.5], **same)
    _, rule = optim.make_optimiser(settings)
    updates, state = rule.update(gradient, rule.init(params), params)
    near(updates, jax.tree.map(lambda g, p: -1e-3 * (jnp.sign(g) + 0.5 * p), gradient, params))
    assert steps.updates_made(state) == 1
    with raises(errors.UserError, "optim.betas, optim.momentum, train"):
        settings.refuse_unused()


def test_a_rule_of_ones_own_is_tried_on_the_parameters():
    for name, words in (("transposed", ["shapes"]), ("fails", ["test_optim.py, line", "KeyError"])):
        with raises(errors.UserError, f"optim.name = test_optim:{name}", *words):
            settings = chosen(name=f"test_optim:{name}")
            optim.check_updates(
                settings.optim.name, optim.make_optimiser(settings)[1], jax.eval_shape(lambda: normal(0))
            )

"""Learning rates against their formulas; decay, clipping and one step of AdamW against plain numpy."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from experiments.engine import batches, errors, optim

PEAK, STEPS, WARMUP, FINAL = 0.6, 200, 40, 0.1
REST = STEPS - WARMUP


def rate(name, **changes):
    sizes = {"peak": PEAK, "steps": STEPS, "warmup_steps": WARMUP, "final_fraction": FINAL, "decay_fraction": 0.25}
    return optim.schedule(name, **(sizes | changes))


def expected(name, step):
    if step < WARMUP:
        return PEAK * (step + 1) / WARMUP
    done = (step - WARMUP) / REST
    if name == "linear":
        return PEAK * (1 - done * (1 - FINAL))
    if name == "cosine":
        return PEAK * (FINAL + (1 - FINAL) * (1 + math.cos(math.pi * done)) / 2)
    if name == "wsd":
        return PEAK * (1 - max(0, (step - (STEPS - 50)) / 50) * (1 - FINAL))
    return PEAK


@pytest.mark.parametrize("name", ["constant", "linear", "cosine", "wsd"])
def test_a_schedule_is_its_formula(name):
    for step in (0, 1, 19, WARMUP - 1, WARMUP, WARMUP + 1, 120, 149, 150, 151, 175, STEPS - 1, STEPS):
        assert float(rate(name)(step)) == pytest.approx(expected(name, step), rel=1e-5), step
    assert float(rate(name)(STEPS)) == pytest.approx(PEAK * (1 if name == "constant" else FINAL))
    assert float(rate(name, warmup_steps=0)(0)) == pytest.approx(PEAK)
    assert float(rate(name, warmup_steps=1)(0)) == pytest.approx(PEAK)


def test_the_first_step_already_learns_and_the_warm_up_ends_at_the_peak():
    assert [float(rate("constant", warmup_steps=4)(step)) for step in range(6)] == pytest.approx(
        [PEAK / 4, PEAK / 2, 3 * PEAK / 4, PEAK, PEAK, PEAK]
    )


@pytest.mark.parametrize(("fraction", "first"), [(0.0, STEPS - 1), (0.25, 150), (0.5, 100), (1.0, WARMUP)])
def test_wsd_falls_over_its_share_of_all_steps(fraction, first):
    stable = rate("wsd", decay_fraction=fraction)
    assert float(stable(first)) == pytest.approx(PEAK) and float(stable(first + 1)) < PEAK
    assert float(stable(STEPS)) == pytest.approx(PEAK * FINAL)


def test_what_no_schedule_can_be():
    with pytest.raises(errors.UserError, match="warmup_steps = 200 must be smaller than train.steps = 200"):
        rate("cosine", warmup_steps=STEPS)
    with pytest.raises(errors.UserError, match='"cosin".*"cosine".*constant, linear, cosine, wsd'):
        rate("cosin")


@pytest.mark.parametrize(("rule", "power"), [("none", 0), ("linear", 1), ("sqrt", 0.5)])
def test_the_rate_follows_the_batch_by_its_rule(rule, power):
    sizes = batches.growing(64, [[3, 128], [150, 192], [180, 32]])
    grown, plain = optim.grown(rate("cosine"), sizes, rule), rate("cosine")
    for step, size in ((0, 64), (2, 64), (3, 128), (149, 128), (150, 192), (179, 192), (180, 32), (199, 32)):
        expected = float(plain(step)) * (size / 64) ** power
        assert float(grown(step)) == pytest.approx(expected, rel=1e-6)
        assert float(jax.jit(grown)(jnp.int32(step))) == pytest.approx(expected, rel=1e-6)


def test_no_rule_of_that_name():
    with pytest.raises(errors.UserError, match='"square".*"sqrt".*none, linear, sqrt'):
        optim.grown(rate("constant"), batches.growing(64), "square")
    with pytest.raises(errors.UserError, match="cannot be imported"):
        optim.grown(rate("constant"), batches.growing(64), "os:path")


def adamw(*, learning_rate=0.1, weight_decay=0.5, clip=0.0, beta1=0.8, beta2=0.9, eps=1e-3):
    return optim.adamw(
        lambda step: learning_rate, beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay, clip=clip
    )


def test_decay_moves_matrices_only():
    """With zero gradients nothing else moves. The tree is a whole model's, biases, gains and class token included."""
    task = tiny.task_of(tiny.settings("vision", image__patch=4, image__head="class_token"))
    params = tiny.drawn(task)
    optimiser = adamw(learning_rate=0.1, weight_decay=0.5)
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, _ = jax.jit(lambda params: optimiser.update(zeros, optimiser.init(params), params))(params)
    moved, still = set(), set()
    for path, update in jax.tree_util.tree_leaves_with_path(updates):
        name = "/".join(str(entry.key) for entry in path)
        leaf = params
        for entry in path:
            leaf = leaf[entry.key]
        (moved if np.any(update) else still).add(name)
        np.testing.assert_allclose(update, -0.05 * leaf if np.any(update) else 0 * leaf, rtol=1e-6)
    assert moved == {
        "embed/W_DP",
        "position/P_ND",
        *(f"blocks/{name}" for name in ("score/Uq_HKD", "score/Uk_HKD", "value/Uv_HKD", "value/Uo_HDK")),
        *(f"blocks/{name}" for name in ("mlp/W1_FD", "mlp/W2_DF")),
        "head/G_CD",
    }
    assert still == {
        "embed/b_D",
        "class/c_D",
        *(f"{norm}/{name}" for norm in ("blocks/norm1", "blocks/norm2", "norm") for name in ("gain_D", "shift_D")),
        *(f"blocks/{name}" for name in ("score/bq_HK", "score/bk_HK", "value/bv_HK", "value/bo_D")),
        *(f"blocks/{name}" for name in ("mlp/b1_F", "mlp/b2_D")),
        "head/b_C",
    }


def steps(optimiser, params, gradients):
    opt_state = optimiser.init(params)
    for gradient in gradients:
        updates, opt_state = optimiser.update(gradient, opt_state, params)
        params = jax.tree.map(jnp.add, params, updates)
    return params


def by_hand(params, gradients, *, learning_rate, weight_decay, beta1, beta2, eps):
    """Loshchilov and Hutter 2019, algorithm 2, in float64; decay on names of two letters."""
    result = {}
    for name, theta in params.items():
        theta, m, v = np.asarray(theta, np.float64), 0.0, 0.0
        for t, gradient in enumerate(gradients, 1):
            g = np.asarray(gradient[name], np.float64)
            m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g**2
            step = (m / (1 - beta1**t)) / (np.sqrt(v / (1 - beta2**t)) + eps)
            decay = weight_decay * theta if len(name.split("_")[1]) == 2 else 0
            theta = theta - learning_rate * (step + decay)
        result[name] = theta
    return result


def normal(seed, scale=1.0):
    rng = np.random.default_rng(seed)
    shapes = {"W_FD": (3, 5), "b_F": (3,)}
    return {name: jnp.asarray(scale * rng.standard_normal(shape), jnp.float32) for name, shape in shapes.items()}


def test_adamw_is_its_formula():
    params, gradients = normal(0), [normal(seed) for seed in (1, 2, 3)]
    settings = {"learning_rate": 0.1, "weight_decay": 0.5, "beta1": 0.8, "beta2": 0.9, "eps": 1e-3}
    found = steps(adamw(**settings), params, gradients)
    for name, value in by_hand(params, gradients, **settings).items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-6)


def test_the_rate_is_that_of_the_step():
    optimiser = optim.adamw(lambda step: 0.1 * (step + 1), beta1=0.0, beta2=0.0, eps=0.0, weight_decay=0.0, clip=0.0)
    params = {"b_F": jnp.zeros(2)}
    found = steps(optimiser, params, [{"b_F": jnp.array([3.0, -3.0])}] * 3)  # each step is the rate times the sign
    np.testing.assert_allclose(found["b_F"], [-0.6, 0.6], rtol=1e-5)


@pytest.mark.parametrize("norm", [0.5, 20.0])
def test_gradients_are_clipped_by_their_norm_over_all_leaves(norm):
    """eps is large here: AdamW alone would not notice a factor on the gradient."""
    params, gradient = normal(0), normal(1)
    length = math.sqrt(sum(float(np.sum(np.square(leaf, dtype=np.float64))) for leaf in gradient.values()))
    gradient = {name: leaf * norm / length for name, leaf in gradient.items()}
    clipped = {name: leaf * min(1, 2.0 / norm) for name, leaf in gradient.items()}
    settings = {"learning_rate": 0.1, "weight_decay": 0.5, "beta1": 0.8, "beta2": 0.9, "eps": 1.0}
    for clip, used in ((2.0, clipped), (0.0, gradient)):
        found = steps(adamw(**settings, clip=clip), params, [used if clip == 0 else gradient])
        for name, value in by_hand(params, [used], **settings).items():
            np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-6)

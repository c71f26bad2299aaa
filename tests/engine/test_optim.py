"""Learning rates against their formulas; AdamW and Muon, decay and clipping, against plain numpy."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from experiments.engine import errors, mesh, optim
from experiments.engine import run as runs
from tfm import layout, shapes

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


# Muon: float64 loops, matrix by matrix

M, H, K, D, F = 2, 3, 5, 7, 11
SIZES = {"M": M, "H": H, "K": K, "D": D, "F": F, "N": 13}
HIDDEN = ["score/Uq_HKD", "score/P_HKK", "value/Uo_HDK", "value/V_HDD", "mlp/W1_FD", "mlp/W2_DF", "mlp/Wh_FF"]
OTHERS = ["blocks/norm1/gain_D", "blocks/value/bo_D", "embed/E_ND", "head/G_ND"]
RATE, MATRIX_RATE, MOMENTUM, DECAY, ROUNDS = 0.1, 3.0, 0.8, 0.5, 4


def drawn(seed, sizes=SIZES):
    names = [f"blocks/{name}" for name in HIDDEN] + OTHERS
    rng = np.random.default_rng(seed)
    tree = {}
    for name in names:
        node, *parts = tree, *name.split("/")
        for part in parts[:-1]:
            node = node.setdefault(part, {})
        shape = [sizes[letter] for letter in shapes.letters(name)]
        node[parts[-1]] = jnp.asarray(rng.standard_normal(shape), jnp.float32)
    return tree


def newton_schulz(x_RC):
    """Jordan et al. 2024, with the smaller product; float64."""
    x_RC = np.asarray(x_RC, np.float64)
    if x_RC.shape[0] > x_RC.shape[1]:
        return newton_schulz(x_RC.T).T
    x_RC = x_RC / np.sqrt(np.sum(x_RC * x_RC))
    for _ in range(ROUNDS):
        square_RR = x_RC @ x_RC.T
        x_RC = 3.4445 * x_RC - 4.7750 * square_RR @ x_RC + 2.0315 * square_RR @ square_RR @ x_RC
    return x_RC


def matrix_step(name, x):
    """One layer's step: each matrix written down with its rows and columns, by hand."""
    if name.endswith("Uq_HKD"):  # from D to the K features of all heads, one under the other
        W = newton_schulz(x.reshape(H * K, D))
        return np.sqrt(H * K / D) * W.reshape(H, K, D)
    if name.endswith(("Uo_HDK", "V_HDD")):  # the matrices of all heads beside each other
        W = newton_schulz(np.concatenate(list(x), axis=1))
        return np.stack(np.split(W, H, axis=1))
    if name.endswith("P_HKK"):  # a matrix in each head
        return np.stack([newton_schulz(P_KK) for P_KK in x])
    return newton_schulz(x) * np.sqrt(max(1, x.shape[0] / x.shape[1]))


def muon_by_hand(name, value, gradients):
    value, mean = np.asarray(value, np.float64), np.zeros(value.shape)
    for gradient in gradients:
        mean = MOMENTUM * mean + np.asarray(gradient, np.float64)
        ahead = MOMENTUM * mean + np.asarray(gradient, np.float64)
        step = np.stack([matrix_step(name, ahead[m]) for m in range(M)])
        value = value - MATRIX_RATE * RATE * (step + DECAY * value)
    return value


def muon(rate=RATE, **changes):
    options = {
        "muon_lr_multiplier": MATRIX_RATE,
        "momentum": MOMENTUM,
        "ns_steps": ROUNDS,
        "weight_decay": DECAY,
        "clip": 0.0,
    }
    options |= {"beta1": 0.8, "beta2": 0.9, "eps": 1e-3}
    return optim.muon(lambda step: rate, **options | changes)


def taken(made, params, gradients):
    state = made.init(params)
    for gradient in gradients:
        updates, state = jax.jit(made.update)(gradient, state, params)
        params = jax.tree.map(jnp.add, params, updates)
    return params


def leaf(tree, name):
    for part in name.split("/"):
        tree = tree[part]
    return tree


def test_a_step_is_its_formula_in_every_layer_and_the_rest_is_adamw():
    params, gradients = drawn(0), [drawn(seed) for seed in (1, 2, 3)]
    found = taken(muon(), params, gradients)
    for name in (f"blocks/{name}" for name in HIDDEN):
        expected = muon_by_hand(name, leaf(params, name), [leaf(gradient, name) for gradient in gradients])
        np.testing.assert_allclose(leaf(found, name), expected, rtol=1e-4, atol=2e-5, err_msg=name)
    adamw = optim.adamw(lambda step: RATE, beta1=0.8, beta2=0.9, eps=1e-3, weight_decay=DECAY, clip=0.0)
    plain = taken(adamw, params, gradients)
    for name in OTHERS:
        np.testing.assert_allclose(leaf(found, name), leaf(plain, name), rtol=1e-6, err_msg=name)


def test_the_singular_values_become_alike_and_zeros_stay():
    W1_MFD = jnp.asarray(np.random.default_rng(0).standard_normal((M, F, D)), jnp.float32).at[1].set(0.0)
    newton_schulz = optim.orthogonal(ns_steps=5)
    steps, _ = newton_schulz.update({"blocks": {"W1_FD": W1_MFD}}, newton_schulz.init({}))
    before, after = (np.linalg.svd(x[0], compute_uv=False) for x in (W1_MFD, steps["blocks"]["W1_FD"]))
    assert before.max() / before.min() > 3  # so that there was something to do
    assert np.sqrt(F / D) * 0.6 < after.min() and after.max() < np.sqrt(F / D) * 1.25
    assert not np.any(steps["blocks"]["W1_FD"][1])


def test_the_gradient_is_clipped_over_all_leaves():
    """As if the gradient were as short; its length itself does not change the step of a matrix, only that of AdamW."""
    params, gradient = drawn(0), drawn(1)
    norm = np.sqrt(sum(float(np.sum(np.square(x, dtype=np.float64))) for x in jax.tree.leaves(gradient)))
    shorter = jax.tree.map(lambda x: x * 2.0 / norm, gradient)
    found = taken(muon(clip=2.0), params, [gradient])
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(taken(muon(), params, [shorter])), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    unclipped = taken(muon(), params, [gradient])
    assert not np.allclose(found["embed"]["E_ND"], unclipped["embed"]["E_ND"], rtol=1e-3)


def test_devices_that_share_the_matrices_and_rows_of_a_study_take_the_same_steps():
    sizes = SIZES | {"H": 4, "D": 6, "F": 10}
    params, gradient = drawn(0, sizes=sizes), drawn(1, sizes=sizes)
    alone = {rate: taken(muon(rate, ns_steps=2), params, [gradient]) for rate in (0.1, 0.02)}
    devices = mesh.make(data=2, fsdp=2, tensor=2)
    place = mesh.shardings(devices, params, layout.Layout(batch=mesh.BATCH, fsdp="fsdp", tensor="tensor"))
    shared = taken(muon(ns_steps=2), jax.device_put(params, place), [jax.device_put(gradient, place)])
    assert not shared["blocks"]["score"]["Uq_HKD"].is_fully_replicated
    rows = jax.vmap(lambda rate: taken(muon(rate, ns_steps=2), params, [gradient]))(jnp.array([0.1, 0.02]))
    for i, (rate, found) in enumerate([(0.1, rows), (0.02, rows), (0.1, shared)]):
        for one, other in zip(jax.tree.leaves(alone[rate]), jax.tree.leaves(found), strict=True):
            np.testing.assert_allclose(other if i == 2 else other[i], one, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"optim__name": "moun"}, 'unknown optimiser "moun" (did you mean "muon"?); the right ones are: adamw, muon'),
        ({"optim__name": "os:path"}, 'unknown optimiser "os:path": an optimiser is named, and cannot be imported'),
        ({"optim__name": "muon", "optim__momentum": 1.0}, "optim.momentum must be less than 1, and 1.0 is not"),
        ({"optim__name": "muon", "optim__momentum": -0.1}, "optim.momentum must be at least 0, and -0.1 is not"),
        (
            {"optim__name": "muon", "optim__muon_lr_multiplier": -1.0},
            "optim.muon_lr_multiplier must be at least 0, and -1.0 is not",
        ),
    ],
)
def test_what_cannot_be(changes, sentence):
    made = tiny.settings("language", **changes)
    with pytest.raises(errors.UserError) as raised:
        runs.optimiser(made)
    assert str(raised.value) == sentence

"""Muon against plain float64 loops, matrix by matrix; on a mesh; in a study's rows; resumed; and what cannot be."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import tiny_study

from experiments.engine import batches, errors, optim, plan
from experiments.engine import mesh as meshes
from tfm import shapes

M, H, K, D, F = 2, 3, 5, 7, 11
SIZES = {"M": M, "H": H, "K": K, "D": D, "F": F, "N": 13}
HIDDEN = ["score/Uq_HKD", "score/P_HKK", "value/Uo_HDK", "value/V_HDD", "mlp/W1_FD", "mlp/W2_DF", "mlp/Wh_FF"]
REST = ["blocks/norm1/gain_D", "blocks/value/bo_D", "embed/E_ND", "head/G_ND"]
RATE, MATRIX_RATE, MOMENTUM, DECAY, ROUNDS = 0.1, 3.0, 0.8, 0.5, 4


def drawn(seed, names=None):
    names = [f"blocks/{name}" for name in HIDDEN] + REST if names is None else names
    rng = np.random.default_rng(seed)
    tree = {}
    for name in names:
        node, *parts = tree, *name.split("/")
        for part in parts[:-1]:
            node = node.setdefault(part, {})
        shape = [SIZES[letter] for letter in shapes.letters(name)]
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


def by_hand(name, value, gradients):
    value, mean = np.asarray(value, np.float64), np.zeros(value.shape)
    for gradient in gradients:
        mean = MOMENTUM * mean + np.asarray(gradient, np.float64)
        ahead = MOMENTUM * mean + np.asarray(gradient, np.float64)
        step = np.stack([matrix_step(name, ahead[m]) for m in range(M)])
        value = value - MATRIX_RATE * RATE * (step + DECAY * value)
    return value


def optimiser(**changes):
    options = {
        "muon_lr_multiplier": MATRIX_RATE,
        "momentum": MOMENTUM,
        "ns_steps": ROUNDS,
        "weight_decay": DECAY,
        "clip": 0.0,
    }
    options |= {"beta1": 0.8, "beta2": 0.9, "eps": 1e-3}
    return optim.muon(lambda step: RATE, **options | changes)


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
    found = taken(optimiser(), params, gradients)
    for name in (f"blocks/{name}" for name in HIDDEN):
        expected = by_hand(name, leaf(params, name), [leaf(gradient, name) for gradient in gradients])
        np.testing.assert_allclose(leaf(found, name), expected, rtol=1e-4, atol=2e-5, err_msg=name)
    adamw = optim.adamw(lambda step: RATE, beta1=0.8, beta2=0.9, eps=1e-3, weight_decay=DECAY, clip=0.0)
    plain = taken(adamw, params, gradients)
    for name in REST:
        np.testing.assert_allclose(leaf(found, name), leaf(plain, name), rtol=1e-6, err_msg=name)


def test_the_singular_values_become_alike():
    x_LRC = jnp.asarray(np.random.default_rng(0).standard_normal((M, D, F)), jnp.float32)
    values = np.linalg.svd(optim.orthogonal(x_LRC, ns_steps=5), compute_uv=False)
    assert values.shape == (M, D) and values.min() > 0.6 and values.max() < 1.25
    before = np.linalg.svd(x_LRC, compute_uv=False)
    assert before.max() / before.min() > 3  # so that there was something to do


def test_a_gradient_of_zeros_is_no_step():
    assert not np.any(optim.orthogonal(jnp.zeros((M, D, F)), ns_steps=5))


def test_the_gradient_is_clipped_over_all_leaves():
    """As if the gradient were as short; its length itself does not change the step of a matrix, only that of AdamW."""
    params, gradient = drawn(0), drawn(1)
    norm = np.sqrt(sum(float(np.sum(np.square(x, dtype=np.float64))) for x in jax.tree.leaves(gradient)))
    shorter = jax.tree.map(lambda x: x * 2.0 / norm, gradient)
    found = taken(optimiser(clip=2.0), params, [gradient])
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(taken(optimiser(), params, [shorter])), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    unclipped = taken(optimiser(), params, [gradient])
    assert not np.allclose(found["embed"]["E_ND"], unclipped["embed"]["E_ND"], rtol=1e-3)


CHANGES = {"optim__name": "muon", "optim__ns_steps": 3, "text__N": 8, "optim__weight_decay": 0.05}


def trained(folder, *, steps=3, **mesh):
    """Parameters and losses of a few steps on devices that are so arranged."""
    (folder / "text.txt").write_bytes(tiny.TEXT)
    sizes = {f"mesh__{axis}": n for axis, n in ({"data": 1} | mesh).items()}
    made = tiny.settings("language", text__source=str(folder / "text.txt"), **CHANGES, **sizes)
    task, devices = tiny.task_of(made), meshes.make(**({"data": 1} | mesh))
    rate, chosen = plan.optimiser(made, batches.growing(made.train.batch_size))
    state = steps.initial_state(task, chosen, seed=0, mesh=devices)
    step, losses = steps.update(task, chosen, rate, devices, accumulation=1), []
    for n in range(steps):
        state, metrics = step(state, meshes.place_batch(devices, task.train[n]), np.True_)
        losses.append(float(metrics["loss"]))
    return jax.device_get(state.params), losses


def test_devices_that_share_the_matrices_take_the_same_steps(tmp_path):
    alone, losses = trained(tmp_path)
    shared, same = trained(tmp_path, data=2, fsdp=2, tensor=2)
    np.testing.assert_allclose(same, losses, rtol=1e-5)
    for one, other in zip(jax.tree.leaves(alone), jax.tree.leaves(shared), strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-3, atol=2e-4)


def summary(folder):
    return json.loads((folder / "summary.json").read_text(encoding="utf-8"))


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr("experiments.language.figures", lambda *arguments: [])


def test_a_run_that_is_resumed_ends_as_one_that_was_not(tmp_path, quick):
    changes = CHANGES | {"train__steps": 4, "optim__schedule": "constant", "train__evaluate_every": 0}
    file = tiny_study.config_file(tmp_path, "language", **changes)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert tiny.run("--config", file, "--workdir", str(whole)).code == 0
    # 3 of the 4 steps, then the rest: another number of steps is another schedule, but for a constant one.
    assert tiny.run("--config", file, "--workdir", str(parts), "--config.train.steps=3").code == 0
    (parts / "summary.json").unlink()
    outcome = tiny.run("--config", file, "--workdir", str(parts))
    assert outcome.code == 0 and "at step 3" in outcome.out, outcome.err
    assert summary(whole)["params_sha256"] == summary(parts)["params_sha256"]


def test_the_rows_of_a_study_are_runs_alone(tmp_path, quick):
    """One program for two learning rates, which the matrices' rate follows."""
    arms = [["fast", {"optim.learning_rate": 1e-2}], ["slow", {}]]
    outcome = tiny_study.run(tmp_path, study__arms=arms, **CHANGES)
    assert outcome.code == 0, outcome.err
    file = tiny_study.config_file(tmp_path, "language", seed=5, optim__learning_rate=1e-2, **CHANGES)
    assert tiny.run("--config", file, "--workdir", str(tmp_path / "alone")).code == 0
    found, alone = tiny_study.summaries(tmp_path), summary(tmp_path / "alone")
    assert found["all/fast/seed_5"]["together"] == 4
    assert found["all/fast/seed_5"]["eval/loss"] == pytest.approx(alone["eval/loss"], rel=1e-5)
    assert found["all/slow/seed_5"]["eval/loss"] != pytest.approx(alone["eval/loss"], rel=1e-3)


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
        ({"optim__name": "muon", "optim__ns_steps": -1}, "optim.ns_steps must be at least 0, and -1 is not"),
    ],
)
def test_what_cannot_be(changes, sentence):
    made = tiny.settings("language", **changes)
    with pytest.raises(errors.UserError) as raised:
        plan.optimiser(made, batches.growing(made.train.batch_size))
    assert str(raised.value) == sentence


def test_its_settings_are_not_those_of_adamw(tmp_path):
    file = tiny_study.config_file(tmp_path, "language", optim__momentum=0.5)
    outcome = tiny.run("--config", file, "--workdir", str(tmp_path / "run"))
    assert outcome.code == 2 and "optim.momentum is set, but this experiment does not use it" in outcome.err

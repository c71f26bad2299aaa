"""The kin of Muon (NorMuon, hyperball) and averages of parameters, in plain numpy."""

import jax
import numpy as np
import optax
import pytest
import tiny
from matrix_steps import ADAM, DECAY, FEW, MATRIX_RATE, MOMENTUM, RATE, ROUNDS, M, drawn, matrix_step, near, taken

from experiments.engine import mesh, optim, run_plan, train_step as steps
from tfm import shapes

AXES = {"Uq_HKD": (2,), "P_HKK": (2,), "W2_DF": (1,)}  # of one layer: over which a row is averaged
WHOLE = {"Uq_HKD": (0, 1, 2), "P_HKK": (1, 2), "W2_DF": (0, 1)}  # one matrix of a layer; P has one in each head


def norm(x, name):
    return np.sqrt(np.sum(np.square(x), WHOLE[name], keepdims=True))


def by_hand(kind, name, value, gradients):
    """Float64, one layer after the other."""
    layers, last = np.asarray(value, np.float64), name.rpartition("/")[2]
    for m in range(M):
        W, mean, v = layers[m], 0.0, 0.0
        for gradient in gradients:
            g = np.asarray(gradient[m], np.float64)
            mean = MOMENTUM * mean + g
            u = matrix_step(name, MOMENTUM * mean + g)
            if kind == "normuon":
                v = ADAM["beta2"] * v + (1 - ADAM["beta2"]) * np.mean(u**2, AXES[last], keepdims=True)
                even = u / np.sqrt(v)
                u = even * norm(u, last) / norm(even, last)
                W = W - MATRIX_RATE * RATE * (u + DECAY * W)
            else:
                ends = W - MATRIX_RATE * RATE * norm(W, last) * u / norm(u, last)
                W = ends * norm(W, last) / norm(ends, last)
        layers[m] = W
    return layers


def kin(kind, **changes):
    options = {"muon_lr_multiplier": MATRIX_RATE, "momentum": MOMENTUM, "ns_steps": ROUNDS, "weight_decay": DECAY}
    return optim.OPTIMISERS[kind](lambda step: RATE, **ADAM | options | {"clip": 0.0} | changes)


@pytest.mark.parametrize("kind", ["normuon", "hyperball"])
def test_a_step_is_its_formula_and_the_rest_is_adamw(kind):
    params, *gradients = (drawn(seed, FEW) for seed in range(3))
    wanted = {
        name: by_hand(kind, name, leaf, [shapes.flat(one)[name] for one in gradients])
        for name, leaf in shapes.flat(params).items()
        if name.startswith("blocks")
    }
    found, plain = taken(kin(kind), params, gradients), taken(kin("muon"), params, gradients)
    for name, leaf in wanted.items():
        near(shapes.flat(found)[name], leaf, rtol=1e-4, atol=5e-5)
        assert not np.allclose(shapes.flat(plain)[name], leaf, rtol=1e-2)
    near(found["embed"], plain["embed"])


@pytest.mark.parametrize("kind", ["normuon", "hyperball"])
def test_a_gradient_of_zeros_moves_nothing(kind):
    params = drawn(0, FEW[:1])
    near(taken(kin(kind, weight_decay=0.0), params, [jax.tree.map(np.zeros_like, params)]), params)


def test_what_is_evaluated_is_the_average_of_what_is_trained_and_clipping_frozen_and_skipped_steps_are_as_without():
    """a_t = d a_{t-1} + (1 - d) w_t of the w_t that a run without it has, from the same beginning."""
    changes = {"optim__frozen": ["b_C"], "train__nan": "skip_spikes", "model": False, "optim__clip": 0.5}
    devices, task, decay = mesh.make(data=1), tiny.linear_task(), 0.7

    def trajectory(**more):
        plan = run_plan.make_plan(tiny.settings("vision", **changes | more), task, devices)
        state = steps.initial_state(plan.task, plan.optimiser, seed=0, mesh=devices)
        states, losses = [jax.device_get(state.params)], []
        for i in range(4):
            state, metrics = plan.step(state, mesh.place_batch(devices, task.train[i]), True)
            states.append(jax.device_get(state.params))
            losses.append(float(metrics["loss"]))
        return states, losses, jax.device_get(optim.training_params(state.params, state.opt_state))

    (w, losses, same), (found, ours, last) = trajectory(), trajectory(optim__ema=decay)
    near(ours, losses)
    near(last, w[-1]), near(same, w[-1])
    average = w[0]
    for one, a in zip(w[1:], found[1:], strict=True):
        average = jax.tree.map(lambda a, x: decay * a + (1 - decay) * x, average, one)
        near(a, average)
    assert np.abs(found[-1]["G_CD"] - w[-1]["G_CD"]).max() > 1e-3


def test_an_average_passes_on_what_a_rule_is_given():
    rule = optim.average(optax.sgd(0.1), 0.5)
    updates, state = rule.update({"x": np.float32(2)}, rule.init({"x": np.float32(1)}), {"x": np.float32(1)}, value=3.0)
    assert float(updates["x"]) == pytest.approx(-0.1) == float(state.ahead["x"])

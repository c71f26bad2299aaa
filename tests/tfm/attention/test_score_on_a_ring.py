"""What is certain of one head, one layer and no mask on a ring: a symmetric score cannot prefer every predecessor.

l(n, n-1) > l(n, n+1) = l(n+1, n) > l(n+1, n+2) = ... comes round to l(n, n-1) > l(n, n-1). So the log-odds of the
predecessor against the successor, log A(n, n-1) - log A(n, n+1), sum to zero over the ring, and at least one token
gives its predecessor at most half of the mass that the two share. (At all tokens but one it may do better: nothing is
said of a symmetric score's accuracy.) Training is slow, and only done where it is asked for: pytest -m slow.
"""

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from cases import B, H, K
from score_cases import SYMMETRIC, TURNED

from experiments import synthetic
from experiments.engine import mesh, run_plan, train_step as steps
from tfm.attention import explicit, relative_position, score

D, N = 34, 13  # `none` compares D features, of which rotary positions turn pairs


def log_odds(l_BNS):
    """l(n, n-1) - l(n, n+1) on the ring, (..., N): the softmax's sum is common to both and cancels."""
    n = np.arange(np.shape(l_BNS)[-1])
    l_BNS = np.asarray(l_BNS, np.float64)
    return l_BNS[..., n, n - 1] - l_BNS[..., n, (n + 1) % len(n)]


@cases.float64()
def test_the_log_odds_of_a_symmetric_score_sum_to_zero_over_a_ring_and_those_of_others_do_not():
    """With rotary positions only where the query is the key: (R_n u_n) . (R_s u_s) is symmetric, and
    (R_n sigma u_n) . (R_s u_s) is not, since sigma and R do not commute."""
    variants = {name: getattr(score, name) for name in (*SYMMETRIC, "asymmetric", "pairwise")}
    drawn = {
        name: cases.drawn(lambda key, one=one: one.init(key, H=H, K=2 * K, D=D, bias=True))
        for name, one in variants.items()
    }

    @jax.jit
    def logits(drawn, x_BND):
        qk = {name: variants[name].apply(params, x_BND, x_BND) for name, params in drawn.items()}
        turned = {name: relative_position.rotary.rotate({}, *both, jnp.arange(N)) for name, both in qk.items()}
        return [{name: explicit.logits(*both, scale=0.5) for name, both in of.items()} for of in (qk, turned)]

    for those, found in zip((SYMMETRIC, TURNED), logits(drawn, cases.normal(1, B, N, D)), strict=True):
        for name, l_BHNS in found.items():
            zero, odds_BHN = name in those, log_odds(l_BHNS)
            sum_BH = np.abs(odds_BHN.sum(-1)) / np.abs(odds_BHN).max()
            assert (sum_BH < 1e-10).all() if zero else (sum_BH > 1e-6).all(), name
            assert not zero or (odds_BHN.min(-1) <= 0).all(), name


def test_a_relative_bias_breaks_the_argument():
    """It may favour what is one place before, wherever that is, and so the predecessor of every token but the first."""
    params = {"b_HR": jnp.where(jnp.arange(2 * N - 1) == N - 2, 1.0, 0.0)[None]}
    odds_HN = log_odds(relative_position.relative.bias(params, jnp.arange(N), jnp.arange(N), H=1))
    np.testing.assert_array_equal(odds_HN, [[0, *[1] * (N - 1)]])


STUDIED = {"model.M": 1, "model.H": 1, "model.D": 64, "synthetic.task": "ring"}
STUDIED |= {"optim.learning_rate": 3e-3, "optim.warmup_steps": 50, "optim.weight_decay": 0.0}
STUDIED |= {"train.steps": 300, "train.batch_size": 32}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["asymmetric", *sorted(SYMMETRIC)])
def test_after_training_two_matrices_find_every_predecessor_and_symmetric_ones_do_not(name):
    """Of one head, from step 0 on."""
    settings, devices = tiny.settings("synthetic", **STUDIED | {"model.score": name}), mesh.make(data=1)
    task = synthetic.prepare(settings, devices).task
    made = run_plan.make_plan(settings, task, devices)
    state = steps.initial_state(task, made.optimiser, seed=settings.seed, mesh=devices)
    odds, metrics = [], {"alive": True}
    for step in range(made.steps + 1):
        if step in (0, made.steps):
            A_BNS = np.asarray(jax.jit(task.maps)(jax.device_get(state.params), task.evaluation[0]))
            A_BNS = np.where(np.eye(A_BNS.shape[-1]), 1, A_BNS[0, :, 0])
            assert (A_BNS > 0).all()
            odds.append(log_odds(np.log(A_BNS)))
        state, metrics = made.step(state, mesh.place_batch(devices, task.train[step]), metrics["alive"])
    assert metrics["alive"]
    for odds_BN in odds if name != "asymmetric" else ():
        largest = np.abs(odds_BN).max()
        assert largest > 1e-3 and (odds_BN.min(-1) <= 1e-4 * largest).all()  # at most half of what the two share
        np.testing.assert_allclose(odds_BN.sum(-1), 0, atol=1e-4 * largest)
    if name == "asymmetric":
        assert (np.abs(odds[0].sum(-1)) > 1e-3).all() and (odds[1] > 0).all() and (odds[1].sum(-1) > 1).all()
        value, count = tiny.measure(task)(state.params, task.evaluation[0], None)["accuracy"]
        assert value / count >= 0.999

"""What is certain of one head, one layer and no mask on a ring: a symmetric score cannot prefer every predecessor.

l(n, n-1) > l(n, n+1) = l(n+1, n) > l(n+1, n+2) = ... comes round to l(n, n-1) > l(n, n-1). So the log-odds of the
predecessor against the successor, log A(n, n-1) - log A(n, n+1), sum to zero over the ring, and at least one token
gives its predecessor at most half of the mass that the two share. (At all tokens but one it may do better: nothing is
said of a symmetric score's accuracy.) Training is slow, and only done where it is asked for: pytest -m slow.
"""

import contextlib
import functools
import io

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from cases import B, H, K

from experiments import synthetic
from experiments.engine import mesh
from experiments.engine import run as runs
from experiments.engine import step as steps
from tfm.attention import explicit, relative_position, score

D, N = 34, 13  # `none` compares D features, of which rotary positions turn pairs
SYMMETRIC = ["none", "tied", "tied_noself", "tied_wide", "tied_signed", "pairwise_sym", "l2_tied"]
SIDED = ["asymmetric", "pairwise"]
QUERY_IS_KEY = ["none", "tied", "tied_noself", "tied_wide"]


def log_odds(l_BNS):
    """l(n, n-1) - l(n, n+1) on the ring, (..., N): the softmax's sum is common to both and cancels."""
    n = np.arange(np.shape(l_BNS)[-1])
    l_BNS = np.asarray(l_BNS, np.float64)
    return l_BNS[..., n, n - 1] - l_BNS[..., n, (n + 1) % len(n)]


def drawn_odds(name, position):
    """Log-odds of the score with random parameters, over random tokens on a ring."""
    variant = getattr(score, name)
    params = cases.drawn(lambda key: variant.init(key, H=H, K=2 * K, D=D, bias=True))
    x_BND = cases.normal(1, B, N, D)
    q_BHNK, k_BHSK = variant.apply(params, x_BND, x_BND)
    if position.rotate:
        q_BHNK, k_BHSK = position.rotate({}, q_BHNK, k_BHSK, jnp.arange(N))
    odds_BHN = log_odds(explicit.logits(q_BHNK, k_BHSK, scale=0.5))
    return odds_BHN / np.abs(odds_BHN).max()


@pytest.mark.parametrize("name", SYMMETRIC)
@cases.float64()
def test_the_log_odds_of_a_symmetric_score_sum_to_zero_over_a_ring(name):
    odds_BHN = drawn_odds(name, relative_position.none)
    assert np.abs(odds_BHN.sum(-1)).max() < 1e-10
    assert (odds_BHN.min(-1) <= 0).all()


@pytest.mark.parametrize("name", SIDED)
@cases.float64()
def test_those_of_the_other_scores_do_not(name):
    assert (np.abs(drawn_odds(name, relative_position.none).sum(-1)) > 1e-3).all()


@pytest.mark.parametrize("name", SYMMETRIC)
@cases.float64()
def test_rotary_positions_leave_the_sum_zero_only_where_the_query_is_the_key(name):
    """(R_n u_n) . (R_s u_s) is symmetric. (R_n sigma u_n) . (R_s u_s) is not: sigma and R do not commute."""
    sum_BH = np.abs(drawn_odds(name, relative_position.rotary).sum(-1))
    assert (sum_BH < 1e-10).all() if name in QUERY_IS_KEY else (sum_BH > 1e-6).all()


def test_a_relative_bias_breaks_the_argument():
    """It may favour what is one place before, wherever that is, and so the predecessor of every token but the first."""
    params = {"b_HR": jnp.where(jnp.arange(2 * N - 1) == N - 2, 1.0, 0.0)[None]}
    odds_HN = log_odds(relative_position.relative.bias(params, jnp.arange(N), jnp.arange(N), H=1))
    np.testing.assert_array_equal(odds_HN, [[0, *[1] * (N - 1)]])


# ------------------------------------------------------------------------------------------------------- after training

STUDIED = {"model.M": 1, "model.H": 1, "model.D": 64, "model.unroll": 0, "synthetic.task": "ring"}
STUDIED |= {"optim.learning_rate": 3e-3, "optim.warmup_steps": 50, "optim.weight_decay": 0.0}
STUDIED |= {"train.steps": 300, "train.batch_size": 32, "train.evaluate_batch": 512, "synthetic.held_out": 512}


@functools.cache
def trained(name):
    """(task, parameters at step 0, after training) of one head with the score of this name."""
    settings, devices = tiny.settings("synthetic", **STUDIED | {"model.score": name}), mesh.make(data=1)
    with contextlib.redirect_stdout(io.StringIO()):
        task = synthetic.prepare(settings, devices).task
    made = runs.plan(settings, task, devices)
    state = steps.initial_state(task, made.optimiser, seed=settings.seed, mesh=devices)
    start, alive = jax.device_get(state.params), True
    for step in range(made.steps):
        state, metrics = made.step(state, mesh.place_batch(devices, task.train[step]), alive)
        alive = metrics["alive"]
    assert alive
    return task, start, jax.device_get(state.params)


def weights(task, params):
    """A_BNS of the held-out examples, in 64 bits, where no weight is so small that it would be 0."""
    with cases.float64():
        A_BNS = np.asarray(jax.jit(task.maps)(cases.wide(params), task.evaluation[0]))[0, :, 0]
    assert A_BNS.dtype == np.float64 and (A_BNS[:, ~np.eye(A_BNS.shape[-1], dtype=bool)] > 0).all()
    return A_BNS


def right(task, params):
    """The share of right answers at each place."""
    measure, batch = jax.jit(task.loss_and_metrics), task.evaluation[0]
    asked_NN = np.eye(batch["w_BN"].shape[1], dtype=np.float32)
    ratios = [measure(params, batch | {"weight_BN": asked_N * batch["weight_BN"]}, None) for asked_N in asked_NN]
    return np.array([float(ratio["accuracy"][0] / ratio["accuracy"][1]) for ratio in ratios])


@pytest.mark.slow
def test_two_matrices_find_every_predecessor():
    task, start, params = trained("asymmetric")
    assert (right(task, params) >= 0.999).all()
    odds_BN = log_odds(np.log(weights(task, params)))
    assert (odds_BN > 0).all()
    assert (odds_BN.sum(-1) > 1).all()
    assert (np.abs(log_odds(np.log(weights(task, start))).sum(-1)) > 1e-3).all()  # not zero before either


@pytest.mark.slow
@pytest.mark.parametrize("name", SYMMETRIC)
def test_a_symmetric_score_gives_some_predecessor_at_most_half(name):
    task, start, params = trained(name)
    for when in (start, params):
        A_BNS = weights(task, when)
        odds_BN = log_odds(np.log(np.where(np.eye(A_BNS.shape[-1]), 1, A_BNS)))
        largest = np.abs(odds_BN).max()
        assert largest > 1e-3
        np.testing.assert_allclose(odds_BN.sum(-1), 0, atol=1e-8 * largest)
        n = np.arange(A_BNS.shape[-1])
        before_BN, after_BN = A_BNS[:, n, n - 1], A_BNS[:, n, (n + 1) % len(n)]
        assert ((before_BN / (before_BN + after_BN)).min(-1) <= 0.5 + 1e-8).all()

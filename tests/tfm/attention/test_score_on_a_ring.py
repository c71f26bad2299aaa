"""On a ring, a symmetric score of one head, without a mask, cannot prefer every predecessor.

l(n, n-1) > l(n, n+1) = l(n+1, n) > l(n+1, n+2) = ... leads around to l(n, n-1) > l(n, n-1). So the log-odds of the
predecessor against the successor, log A(n, n-1) - log A(n, n+1), sum to zero over the ring. At least one token gives
its predecessor at most half of the mass of the two. (All other tokens may do better, so this does not bound a
symmetric score's accuracy.) test_score.py tests the symmetry; this test trains models: pytest -m slow.
"""

import jax
import numpy as np
import pytest
import tiny
from score_cases import SYMMETRIC

from experiments import synthetic as synthetic_task
from experiments.devices import mesh as meshes
from experiments.engine import run_plan, train_step
from experiments.model import task as tasks
from tfm.attention import explicit


def log_odds(l_BNS):
    """Return l(n, n-1) - l(n, n+1) on the ring, (..., N): the softmax's sum is common to both and cancels."""
    n = np.arange(np.shape(l_BNS)[-1])
    l_BNS = np.asarray(l_BNS, np.float64)
    return l_BNS[..., n, n - 1] - l_BNS[..., n, (n + 1) % len(n)]


SETTINGS = {"model.M": 1, "model.H": 1, "model.D": 64, "synthetic.task": "ring"}
SETTINGS |= {"optim.learning_rate": 3e-3, "optim.warmup_steps": 50, "optim.weight_decay": 0.0}
SETTINGS |= {"train.steps": 300, "train.batch_size": 32}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["asymmetric", *sorted(SYMMETRIC)])
def test_after_training_two_matrices_find_every_predecessor_and_symmetric_ones_do_not(name):
    """The model has one head, and the bounds hold from step 0 on."""
    settings, devices = tiny.settings("synthetic", **SETTINGS | {"model.score": name}), meshes.make(data=1)
    work = synthetic_task.prepare(settings, devices)
    task = work.task
    plan = run_plan.make_plan(settings, task, devices)
    state = train_step.initial_state(task, plan.optimiser, seed=settings.seed, mesh=devices)
    odds, metrics = [], {"alive": True}

    @jax.jit
    def logits(params, batch):
        """Return the logits of the only layer and head. A weight would underflow, and its logarithm be infinite."""
        activations = tasks.look(work, params, batch, ("q", "k"))
        return explicit.logits(activations["q"][0, :, 0], activations["k"][0, :, 0], scale=1.0)

    for step in range(plan.steps + 1):
        if step in (0, plan.steps):
            odds.append(log_odds(logits(jax.device_get(state.params), task.evaluation[0])))
        state, metrics = plan.step(state, meshes.place_batch(devices, task.train[step]), metrics["alive"])
    assert metrics["alive"]
    for odds_BN in odds if name != "asymmetric" else ():
        largest = np.abs(odds_BN).max()
        # Some token gives its predecessor at most half of the mass of both neighbours.
        assert largest > 1e-3 and (odds_BN.min(-1) <= 1e-4 * largest).all()
        np.testing.assert_allclose(odds_BN.sum(-1), 0, atol=1e-4 * largest)
    if name == "asymmetric":
        assert (np.abs(odds[0].sum(-1)) > 1e-3).all() and (odds[1] > 0).all() and (odds[1].sum(-1) > 1).all()
        value, count = tiny.measure(task)(state.params, task.evaluation[0], None)["accuracy"]
        assert value / count >= 0.999

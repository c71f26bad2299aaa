"""Losses against the slow reference, as (sum, count)."""

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from cases import B, N, W

from tfm import loss


@cases.float64()
def test_cross_entropy_equals_the_reference():
    """In nats, over what is asked for only; a target there may be anything, and so may its logits."""
    logits, target_BN = jax.device_get((cases.normal(0, B, N, W, std=3.0), cases.words(1)))
    weight_BN = np.random.default_rng(2).integers(0, 3, (B, N)) / 2.0
    assert (weight_BN == 0).any() and (weight_BN == 0.5).any()
    slow = 0.0
    for b in range(B):
        slow += reference.cross_entropy([reference.softmax(row) for row in logits[b]], target_BN[b], weight_BN[b])
    dirty, anything = np.where(weight_BN[..., None] == 0, np.nan, logits), np.where(weight_BN == 0, W + 5, target_BN)
    cross_entropy = jax.jit(loss.cross_entropy)
    for given in ((logits, target_BN), (dirty, anything)):
        total, count = cross_entropy(*given, weight_BN)
        cases.close(total, slow)
        cases.close(count, float(weight_BN.sum()))
    assert cross_entropy(logits, target_BN, 0 * weight_BN) == (0, 0)


def test_cross_entropy_has_no_gradient_where_nothing_is_asked():
    weight_BN = jnp.ones((B, N)).at[1, 3:].set(0.0)
    gradient = jax.jit(jax.grad(lambda logits: loss.cross_entropy(logits, cases.words(1), weight_BN)[0]))
    gradient = gradient(cases.normal(0, B, N, W))
    np.testing.assert_array_equal(gradient.any(-1), weight_BN > 0)
    np.testing.assert_allclose(gradient.sum(-1), 0, atol=1e-6)


def test_losses_of_large_and_of_bfloat16_logits_are_float32():
    """Of equal logits it is the logarithm of their number, however large they are."""
    cross_entropy = jax.jit(loss.cross_entropy)
    total, count = cross_entropy(np.full((3, 5), 1000.0), np.arange(3), np.ones(3))
    assert float(total / count) == pytest.approx(np.log(5), abs=1e-4)
    logits, target_BN, weight_BN = cases.normal(0, B, N, W).astype(jnp.bfloat16), cases.words(1), jnp.ones((B, N))
    total, _ = cross_entropy(logits, target_BN, weight_BN)
    assert total.dtype == jnp.float32
    cases.close(total, cross_entropy(logits.astype(jnp.float32), target_BN, weight_BN)[0], 1e-6)


def test_accuracy_by_hand():
    logits = jnp.array([[1.0, 2.0, 0.0], [5.0, 1.0, 1.0], [0.0, 0.0, 1.0], [1.0, 0.0, 0.0]])
    assert loss.accuracy(logits, jnp.array([1, 0, 0, 0]), jnp.array([1.0, 1.0, 1.0, 0.0])) == (2, 3)
    assert loss.accuracy(logits, jnp.array([0, 2, 2, 0]), jnp.array([1.0, 1.0, 0.0, 0.0])) == (0, 2)

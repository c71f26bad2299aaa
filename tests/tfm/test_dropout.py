"""Dropout: its share of zeros, which depend on a sequence's own key alone."""

import itertools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import B, D, N
from jax.sharding import PartitionSpec as P

from experiments.engine import mesh
from tfm import dropout


def keys(n: int) -> jax.Array:
    return jax.random.split(jax.random.key(0), n)


@pytest.mark.parametrize("rate", [0.1, 0.37, 0.9])
def test_dropout_makes_its_share_of_zeros_and_keeps_the_mean(rate):
    """What is left is x / (1 - rate), in every example and at every place. Bounds are five standard deviations."""
    x = jnp.full((7, 101, 61), 3.0)
    y = np.asarray(dropout.drop(keys(7), x, rate))
    left = y != 0
    np.testing.assert_allclose(y[left], 3 / (1 - rate), rtol=1e-6)
    for axes in ((0, 1, 2), (1, 2), (0, 2), (0, 1)):
        count = np.prod([x.shape[axis] for axis in axes])
        deviation = np.sqrt(rate * (1 - rate) / count)
        assert np.abs(left.mean(axes) - (1 - rate)).max() < 5 * deviation
        assert np.abs(y.mean(axes) - 3).max() < 5 * 3 * deviation / (1 - rate)


def test_no_dropout_at_rate_zero_or_without_keys():
    x_BND = cases.normal(1, B, N, D)
    assert dropout.drop(keys(B), x_BND, 0.0) is x_BND
    assert dropout.drop(None, x_BND, 0.5) is x_BND


@pytest.mark.parametrize("rate", [-0.1, 1.0, 1.5, float("nan")])
def test_a_wrong_rate_is_refused(rate):
    for keys_or_none in (keys(B), None):
        with pytest.raises(ValueError, match=f"a dropout rate of {rate}; it must be at least 0 and less than 1"):
            dropout.drop(keys_or_none, cases.normal(1, B, N, D), rate)


def test_the_zeros_of_an_example_depend_on_its_key_alone():
    """Not on its place in the batch, its neighbours, the numbers it has, or compilation; another key has others."""
    x_BND, key_B = jnp.ones((5, N, D)), keys(5)
    y_BND = np.asarray(dropout.drop(key_B, x_BND, 0.5))
    order = np.array([3, 1, 4, 0])
    np.testing.assert_array_equal(dropout.drop(key_B[order], x_BND[order], 0.5), y_BND[order])
    np.testing.assert_array_equal(dropout.drop(key_B[2:3], -x_BND[2:3], 0.5), -y_BND[2:3])
    np.testing.assert_array_equal(jax.jit(lambda key_B, x: dropout.drop(key_B, x, 0.5))(key_B, x_BND), y_BND)
    for one, other in itertools.combinations(range(5), 2):
        assert 0.3 < (y_BND[one] == y_BND[other]).mean() < 0.7


def test_dropout_on_eight_devices_is_dropout_on_one():
    x_BND, key_B = cases.normal(1, 16, N, D), keys(16)

    def loss(key_B, x_BND, w_D):
        return jnp.sum(jnp.sin(dropout.drop(key_B, x_BND * w_D, 0.3)))

    def local(key_B, x_BND, w_D):
        return jax.grad(lambda w_D: jax.lax.psum(loss(key_B, x_BND, w_D), mesh.DATA))(w_D)

    spread = jax.jit(mesh.sharded(local, mesh.make(data=8), in_specs=(P("data"), P("data"), P())))
    w_D = cases.normal(2, D)
    cases.close(spread(key_B, x_BND, w_D), jax.grad(loss, argnums=2)(key_B, x_BND, w_D), 1e-5)


def test_the_gradient_passes_where_the_number_did():
    x_BND, key_B = cases.normal(1, B, N, D), keys(B)
    gradient = jax.grad(lambda x: jnp.sum(dropout.drop(key_B, x, 0.25)))(x_BND)
    np.testing.assert_allclose(gradient, dropout.drop(key_B, jnp.ones_like(x_BND), 0.25))


def test_dropout_in_bfloat16():
    """The same zeros as in float32, and the dtype stays."""
    x_BND, key_B = cases.normal(1, B, N, D), keys(B)
    y_BND = dropout.drop(key_B, x_BND.astype(jnp.bfloat16), 0.1)
    exact = dropout.drop(key_B, x_BND, 0.1)
    assert y_BND.dtype == jnp.bfloat16
    np.testing.assert_array_equal(y_BND == 0, exact == 0)
    np.testing.assert_allclose(y_BND.astype(np.float32), exact, rtol=2.0**-7)

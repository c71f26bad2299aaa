"""The one contraction of the last axis, of few rows and of many."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tfm import kernels, linear


@pytest.mark.parametrize("rows", [1, 2, kernels.FEW, kernels.FEW + 1])
def test_few_rows_are_multiplied_as_many_are(rows):
    x_TD, W_HKD, b_HK = (
        jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate([(rows, 5), (2, 3, 5), (2, 3)])
    )
    expected = np.einsum("td,hkd->thk", x_TD, W_HKD) + np.asarray(b_HK)
    np.testing.assert_allclose(jax.jit(linear.rows)(x_TD, W_HKD, b_HK), expected, rtol=1e-5, atol=1e-5)
    slope = jax.grad(lambda x: jnp.sum(jnp.sin(linear.rows(x, W_HKD, b_HK))))(x_TD)
    np.testing.assert_allclose(slope, np.einsum("thk,hkd->td", np.cos(expected), W_HKD), rtol=1e-4, atol=1e-5)


def test_answers_of_bfloat16_are_added_up_in_float32():
    x_BND, W_OD = jnp.full((2, 3, 257), 1.0, jnp.bfloat16), jnp.full((5, 257), 1.0, jnp.bfloat16)
    y_BNO = linear.answers(x_BND, W_OD, jnp.ones(5))
    assert y_BNO.dtype == jnp.float32
    np.testing.assert_array_equal(y_BNO, np.full((2, 3, 5), 258))  # 257 in bfloat16 is 256

"""Products with a matrix for few and for many rows, in their forms for CPUs and TPUs."""

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tfm import linear, platform


def draw(*shapes) -> list[np.ndarray]:
    return [np.random.default_rng(i).standard_normal(shape, np.float32) for i, shape in enumerate(shapes)]


@pytest.mark.parametrize("rows", [1, 2, platform.FEW_ROWS, platform.FEW_ROWS + 1])
def test_products_of_few_and_of_many_rows_equal_their_definition(rows):
    arrays = x_TD, W_HKD, b_HK, y_BHNV, U_HDV = draw((rows, 5), (2, 3, 5), (2, 3), (1, 3, rows, 5), (3, 7, 5))

    @jax.jit
    def compute(x_TD, W_HKD, b_HK, y_BHNV, U_HDV):
        slope = jax.grad(lambda x: jnp.sum(jnp.sin(linear.matmul(x, W_HKD, b_HK))))(x_TD)
        return linear.matmul(x_TD, W_HKD, b_HK), slope, platform.sum_heads(y_BHNV, U_HDV)

    expected = np.einsum("td,hkd->thk", x_TD, W_HKD) + b_HK
    slope = np.einsum("thk,hkd->td", np.cos(expected), W_HKD)
    all_expected = expected, slope, np.einsum("bhnv,hdv->bnd", y_BHNV, U_HDV)
    cases.assert_trees_close(compute(*arrays), all_expected, 1e-5)


def test_logits_of_bfloat16_are_summed_in_float32():
    x_BND, W_OD = (np.ones(shape, jnp.bfloat16) for shape in ((2, 3, 257), (5, 257)))
    y_BNO = jax.jit(linear.logits)(x_BND, W_OD, np.ones(5, np.float32))
    assert y_BNO.dtype == jnp.float32
    np.testing.assert_array_equal(y_BNO, np.full((2, 3, 5), 258))  # 257 in bfloat16 is 256


@pytest.mark.parametrize("D", [3, 128])
def test_a_mean_computed_as_a_product_equals_the_mean(D):
    (x,) = draw((2, 5, D))
    cases.assert_close(jax.jit(lambda x: platform.spread_mean(x)[..., 0])(x), x.mean(-1), 1e-6)


CPU_FORMS = {  # name: (function, shapes of its arguments, text that only the program for a CPU has)
    "one row": (linear.matmul, [(1, 5), (7, 5)], "optimization_barrier"),
    "few rows": (linear.matmul, [(3, 5), (7, 5)], "tensor<7x3xf32>"),
    "few rows of heads": (platform.sum_heads, [(1, 2, 3, 5), (2, 7, 5)], "tensor<2x5x3xf32>"),
    "many rows of heads": (linear.matmul_heads, [(2, 32, 5), (2, 3, 5)], "tensor<64x5xf32>"),
    "many heads of rows": (platform.sum_heads, [(2, 3, 32, 5), (3, 7, 5)], "tensor<64x15xf32>"),
    "one new token": (platform.write_cache, [(1, 2, 7, 5), (1, 2, 1, 5), (1, 1)], "stablehlo.while"),
}


def lower(function, *arrays) -> tuple[str, str]:
    """Return the lowered programs for a CPU and for a TPU."""
    trace = jax.jit(lambda *arrays: function(*arrays)).trace(*arrays)  # a new function, which JAX has not cached
    cpu, tpu = (trace.lower(lowering_platforms=(platform,)).as_text() for platform in ("cpu", "tpu"))
    return cpu, tpu


def compute_like_tpu(monkeypatch, function, *arrays) -> jax.Array:
    """Compute a function with its form for a TPU on this CPU."""
    with monkeypatch.context() as patch:
        patch.setattr(jax.lax, "platform_dependent", lambda *xs, cpu, tpu=None, default: (tpu or default)(*xs))
        return jax.jit(lambda *arrays: function(*arrays))(*arrays)


@pytest.mark.parametrize("name", CPU_FORMS)
def test_a_program_for_a_tpu_does_not_have_the_form_for_a_cpu(name):
    function, shapes, mark = CPU_FORMS[name]
    dtypes = [jnp.float32, jnp.float32, jnp.int32 if name == "one new token" else jnp.float32]
    cpu, tpu = lower(function, *map(jax.ShapeDtypeStruct, shapes, dtypes))
    assert mark in cpu and mark not in tpu


def test_writing_a_token_into_the_cache_is_equal_on_a_tpu_and_a_cpu(monkeypatch):
    cache_BHSK, new_BHNK = draw((1, 3, 7, 5), (1, 3, 1, 5))

    def write(cache_BHSK, new_BHNK):
        return platform.write_cache(cache_BHSK, new_BHNK, np.array([[4]]))

    assert "LayoutConstraint" in lower(write, cache_BHSK, new_BHNK)[1]
    expected = np.where(np.arange(7)[:, None] == 4, new_BHNK, cache_BHSK)
    np.testing.assert_array_equal(jax.jit(write)(cache_BHSK, new_BHNK), expected)
    np.testing.assert_array_equal(compute_like_tpu(monkeypatch, write, cache_BHSK, new_BHNK), expected)


ROW_FORMS = [  # function, shapes of its arguments, text that only the program for a TPU has
    (linear.matmul, [(1, 5), (7, 5)], "tensor<8x5xf32>"),
    (platform.sum_heads, [(1, 3, 1, 5), (3, 7, 5)], "1x3x8x5xf32"),
]


@pytest.mark.parametrize(("function", "shapes", "mark"), ROW_FORMS)
def test_a_tpu_pads_a_single_row_to_eight(function, shapes, mark, monkeypatch):
    arrays = draw(*shapes)
    cpu, tpu = lower(function, *arrays)
    assert mark in tpu and mark not in cpu
    expected = jax.jit(function)(*arrays)
    np.testing.assert_allclose(compute_like_tpu(monkeypatch, function, *arrays), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("function", [linear.matmul, linear.matmul_heads])
def test_many_tokens_keep_their_axes_on_a_tpu_with_the_same_product(function, monkeypatch):
    arrays = draw((2, 33, 5), (3, 7, 5))
    cpu, tpu = lower(function, *arrays)
    assert "tensor<66x5xf32>" in cpu and "tensor<66x5xf32>" not in tpu

    def value_and_gradient(x, W):
        return function(x, W), jax.grad(lambda x, W: jnp.sum(jnp.sin(function(x, W))), (0, 1))(x, W)

    results = compute_like_tpu(monkeypatch, value_and_gradient, *arrays), jax.jit(value_and_gradient)(*arrays)
    cases.assert_trees_close(*results, 1e-5)


def test_many_new_tokens_are_not_unrolled():
    B, rest = platform.MAX_UNROLLED + 1, ((3, 7, 5), (3, 1, 5))
    arrays = [jax.ShapeDtypeStruct((B, *shape), jnp.float32) for shape in rest]
    assert "stablehlo.scatter" in lower(platform.write_cache, *arrays, np.zeros((B, 1), int))[1]

"""The one contraction of the last axis, of few rows and of many, and what of it is for CPUs alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tfm import kernels, linear
from tfm.attention import explicit, fused, mask


@pytest.mark.parametrize("rows", [1, 2, kernels.FEW, kernels.FEW + 1])
def test_few_rows_are_multiplied_as_many_are(rows):
    x_TD, W_HKD, b_HK = (
        jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate([(rows, 5), (2, 3, 5), (2, 3)])
    )
    expected = np.einsum("td,hkd->thk", x_TD, W_HKD) + np.asarray(b_HK)
    np.testing.assert_allclose(jax.jit(linear.rows)(x_TD, W_HKD, b_HK), expected, rtol=1e-5, atol=1e-5)
    slope = jax.jit(jax.grad(lambda x: jnp.sum(jnp.sin(linear.matmul(x, W_HKD, b_HK)))))(x_TD)
    np.testing.assert_allclose(slope, np.einsum("thk,hkd->td", np.cos(expected), W_HKD), rtol=1e-4, atol=1e-5)


def test_answers_of_bfloat16_are_added_up_in_float32():
    x_BND, W_OD = jnp.full((2, 3, 257), 1.0, jnp.bfloat16), jnp.full((5, 257), 1.0, jnp.bfloat16)
    y_BNO = linear.logits(x_BND, W_OD, jnp.ones(5))
    assert y_BNO.dtype == jnp.float32
    np.testing.assert_array_equal(y_BNO, np.full((2, 3, 5), 258))  # 257 in bfloat16 is 256


QUERIES = [functools.partial(explicit.attention, mask=None, scale=1.0, by_keys=by_keys) for by_keys in (False, True)]
FOR_CPUS = {  # name -> (function, the shapes of its arguments, what stands in the program of a CPU only)
    "one row": (linear.rows, [(1, 5), (7, 5)], "optimization_barrier"),
    "few rows": (linear.rows, [(3, 5), (7, 5)], "tensor<7x3xf32>"),
    "few rows of heads": (kernels.combined, [(1, 2, 3, 5), (2, 7, 5)], "tensor<2x5x3xf32>"),
    "many rows of heads": (kernels.heads, [(2, 32, 5), (2, 3, 5)], "tensor<64x5xf32>"),
    "many heads of rows": (kernels.combined, [(2, 3, 32, 5), (3, 7, 5)], "tensor<64x15xf32>"),
    "one new token": (kernels.write, [(1, 2, 7, 5), (1, 2, 1, 5), (1, 1)], "stablehlo.while"),
    "few queries": (
        functools.partial(kernels.few_queries, *QUERIES),
        [(1, 2, 1, 5), (1, 2, 7, 5), (1, 2, 7, 5)],
        "stablehlo.is_finite",
    ),
    "fused": (
        functools.partial(fused.attention, mask=mask.causal, scale=1.0),
        [(1, 2, 8, 16)] * 3,
        "tensor<1x8x2x16xbf16>) -> tensor<1x8x2x16xf32>",
    ),
    "one after the other": (kernels.after, [(3,), (5,)], "stablehlo.maximum"),
}


@pytest.mark.parametrize("name", FOR_CPUS)
def test_what_is_for_cpus_alone_is_in_no_tpus_program(name):
    function, shapes, mark = FOR_CPUS[name]
    whole = {"one new token": 2, "one after the other": 0}.get(name)  # which argument is of whole numbers
    dtype = jnp.bfloat16 if name == "fused" else jnp.float32
    arguments = [jax.ShapeDtypeStruct(s, jnp.int32 if i == whole else dtype) for i, s in enumerate(shapes)]
    traced = jax.jit(function).trace(*arguments)
    other = "cuda" if name == "few queries" else "tpu"
    cpu, other = (traced.lower(lowering_platforms=(platform,)).as_text() for platform in ("cpu", other))
    assert mark in cpu and mark not in other


NEWEST = {  # what a TPU computes in its own way: (function, shapes, the same sums, what stands in a TPU's program only)
    "a row": (kernels.product, [(1, 5), (7, 5)], lambda x, W: x @ W.T, "tensor<8x5xf32>"),
    "heads": (
        kernels.combined,
        [(1, 3, 1, 5), (3, 7, 5)],
        functools.partial(np.einsum, "bhnv,hdv->bnd"),
        "1x3x8x5xf32",
    ),
    "a query": (
        lambda *qkv: kernels.few_queries(*QUERIES, *qkv)[0],
        [(2, 3, 1, 5), (2, 3, 7, 5), (2, 3, 7, 5)],
        lambda *qkv: QUERIES[0](*qkv)[0],
        "2x3x8x5xf32",
    ),
    "a place": (
        lambda cache_BHSK, new_BHNK: kernels.write(cache_BHSK, new_BHNK, jnp.array([[4]])),
        [(1, 3, 7, 5), (1, 3, 1, 5)],
        lambda cache_BHSK, new_BHNK: np.where(np.arange(7)[:, None] == 4, new_BHNK, cache_BHSK),
        "LayoutConstraint",
    ),
}


@pytest.mark.parametrize("name", NEWEST)
def test_of_the_newest_words_a_tpus_way_is_the_same(name, monkeypatch):
    function, shapes, slow, mark = NEWEST[name]
    arrays = [np.random.default_rng(i).standard_normal(shape, np.float32) for i, shape in enumerate(shapes)]
    traced = jax.jit(function).trace(*arrays)
    cpu, tpu = (traced.lower(lowering_platforms=(platform,)).as_text() for platform in ("cpu", "tpu"))
    assert mark in tpu and mark not in cpu
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *xs, tpu=None, default, cpu: (tpu or default)(*xs))
    found = jax.jit(lambda *arrays: function(*arrays))(*arrays)
    np.testing.assert_allclose(found, slow(*arrays), rtol=1e-5, atol=1e-5)


def test_many_newest_words_are_not_written_out():
    many = [jax.ShapeDtypeStruct((kernels.FEW + 1, *shape), jnp.float32) for shape in ((3, 7, 5), (3, 1, 5))]
    traced = jax.jit(lambda *arrays: kernels.write(*arrays, jnp.zeros((kernels.FEW + 1, 1), int))).trace(*many)
    assert "stablehlo.scatter" in traced.lower(lowering_platforms=("tpu",)).as_text()

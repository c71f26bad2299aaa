"""Norms (E14-E17) against the slow reference, and the statistics of the batch norm on one device and on eight."""

import functools
import itertools
import re

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference_alternatives
import reference_tokens
import translate
from cases import B, D, N
from jax.sharding import PartitionSpec as P

from experiments.config import by_name
from experiments.devices import mesh as meshes
from tfm import layout as layouts, linear, norm

NORMS = by_name.candidates(norm)
STATISTICS = {"batch": reference_tokens.batch_statistics, "batch_features": reference_alternatives.position_statistics}
# The axes over which each norm standardises
AXES = {"batch": (0, 1), "batch_features": (0, 2), "token": -1, "instance": 1, "layer_sequence": (1, 2)}
LEAVES = {"token": {"gain_D", "shift_D"}, "token_plain": set(), "rms": {"gain_D"}, "instance": {"gain_D", "shift_D"}}
LEAVES |= {"batch": {"gain_D", "shift_D", "mean_D", "var_D"}, "none": set(), "layer_sequence": {"gain_D", "shift_D"}}
LEAVES |= {"batch_features": {"gain_D", "shift_D", "mean_N", "var_N"}, "dyt": {"alpha", "gain_D", "shift_D"}}


def norm_params(name: str) -> dict:
    """Draw parameters, with positive variances."""
    params = jax.device_get(cases.draw_params(lambda key: NORMS[name].init(key, D=D, N=N)))
    return {leaf: x * x + np.float32(0.1) if leaf.startswith("var") else x for leaf, x in params.items()}


def draw_tokens(n: int = N, std: float = 3.0, mean: float = 2.0) -> np.ndarray:
    return std * np.asarray(cases.normal(1, B, n, D)) + mean


@pytest.mark.parametrize("mean", [0.0, 30.0])
def test_bfloat16_tokens_need_one_pass_on_a_tpu_and_are_as_exact_as_on_a_cpu(mean):
    """The mean may be ten deviations: tokens are rounded to 8 bits, and the statistics are float32."""
    x_BND = jnp.asarray(mean + 3 * cases.normal(1, 2, 5, 200), jnp.bfloat16)  # more than MAX_SPREAD features

    def apply(platform):
        layout = layouts.Layout(platform=platform)

        def loss(x):
            y = norm.token_plain.apply({}, x, eps=1e-5, layout=layout)
            return jnp.sum(jnp.sin(y.astype(jnp.float32))), y

        return jax.jit(jax.grad(loss, has_aux=True))(x_BND)

    x = np.asarray(x_BND, np.float64)
    expected = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    (tpu_gradient, tpu), (gradient, cpu) = jax.device_get((apply("tpu"), apply("cpu")))
    for y in (tpu, cpu):
        np.testing.assert_allclose(np.asarray(y, np.float64), expected, rtol=2**-8, atol=2**-8)
    np.testing.assert_allclose(np.float32(tpu_gradient), np.float32(gradient), rtol=2**-6, atol=2**-8)

    def has_maximum(platform):  # the variance of one pass could be below 0
        apply = functools.partial(norm.token_plain.apply, {}, eps=0.0, layout=layouts.Layout(platform=platform))
        return "max " in str(jax.make_jaxpr(apply)(x_BND))

    assert has_maximum("tpu") and not has_maximum("cpu")


def slow_statistics(name: str, x_BND) -> list:
    return [*STATISTICS[name](list(map(translate.columns, x_BND)))]


def slow_norm(name: str, params: dict, X, *, eps: float):
    """Return the reference's result for one sequence. The reference takes X, the parameters in `order`, and eps."""
    order = ("mean_D", "mean_N", "var_D", "var_N", "gain_D", "shift_D")
    if name == "dyt":  # tanh(alpha x) gain + shift (Zhu et al. 2025)
        alpha, gain_D, shift_D = (np.asarray(params[leaf], np.float64) for leaf in ("alpha", "gain_D", "shift_D"))
        return np.tanh(alpha * X) * gain_D[:, None] + shift_D[:, None]
    if name in ("none", "token", "token_plain"):
        return X if name == "none" else translate.norm(params, X, eps=eps)
    module = reference_alternatives if name in ("layer_sequence", "batch_features") else reference_tokens
    leaves = [np.asarray(params[leaf], np.float64) for leaf in order if leaf in params]
    return getattr(module, f"{name}_norm")(X, *leaves, eps)


@cases.float64()
def test_norms_and_statistics_equal_the_reference():
    all_params, x_BND = {name: norm_params(name) for name in LEAVES}, draw_tokens()
    tpu = layouts.Layout(platform="tpu")  # a TPU computes the statistics of few features as products
    calls = [*itertools.product(LEAVES, [0.0, 1e-5, 0.7], [layouts.ONE, tpu])]

    @jax.jit
    def compute_all(p, x_BND):
        results = [NORMS[name].apply(p[name], x_BND, eps=eps, layout=layout) for name, eps, layout in calls]
        return results, {name: NORMS[name].observe(x_BND) for name in STATISTICS}

    results, statistics = jax.device_get(compute_all(all_params, x_BND))
    for (name, eps, _), y_BND in zip(calls, results, strict=True):
        assert set(all_params[name]) == LEAVES[name]
        for b in range(B):
            cases.assert_close(y_BND[b], slow_norm(name, all_params[name], translate.columns(x_BND[b]), eps=eps).T)
    for name, letter in (("batch", "D"), ("batch_features", "N")):
        leaves = f"mean_{letter}", f"var_{letter}"
        cases.assert_trees_close(statistics[name], dict(zip(leaves, slow_statistics(name, x_BND), strict=True)))
    assert NORMS.keys() == LEAVES.keys()
    assert {name for name, variant in NORMS.items() if variant.observe is not None} == STATISTICS.keys()


def test_norms_start_as_standardisation():
    """Gains and variances are 1, shifts and means 0, alpha is 1/2."""
    initial = jax.jit(lambda key: {name: NORMS[name].init(key, D=D, N=N) for name in LEAVES})(jax.random.key(0))
    for name, leaves in LEAVES.items():
        expected = {leaf: leaf.startswith(("gain", "var")) * np.ones(D if leaf.endswith("D") else N) for leaf in leaves}
        expected |= {"alpha": 0.5} if name == "dyt" else {}
        jax.tree.map(np.testing.assert_array_equal, initial[name], expected)


def test_norms_of_bfloat16_tokens_are_rounded_once():
    """Gain and shift are float32.

    The statistics of the batch norm are also float32: with a mean of 9, a bfloat16 sum would lose its last bits.
    """
    x_BND, all_params = draw_tokens(47, 1.0, 9.0).astype(jnp.bfloat16), {name: norm_params(name) for name in NORMS}

    @jax.jit
    def compute_all(p, x_BND):
        statistics = {name: NORMS[name].observe(x_BND) for name in STATISTICS}
        return {name: NORMS[name].apply(p[name] | statistics.get(name, {}), x_BND, eps=1e-6) for name in p}, statistics

    results, all_statistics = jax.device_get(compute_all(all_params, x_BND))
    for name, statistics in all_statistics.items():
        assert all(leaf.dtype == np.float32 for leaf in statistics.values())
        cases.assert_trees_close([*statistics.values()], slow_statistics(name, x_BND), 1e-5)
    for name, y_BND in results.items():
        assert y_BND.dtype == jnp.bfloat16
        params = all_params[name] | all_statistics.get(name, {})
        exact = slow_norm(name, params, translate.columns(x_BND[0]), eps=1e-6).T
        assert (np.abs(np.float64(y_BND[0]) - exact) <= np.abs(exact) * 2.0**-8 + 1e-5).all(), name


DATA = layouts.Layout(batch=(meshes.DATA,))


def run_on_eight_devices(function, *in_specs: P):
    return meshes.sharded(function, meshes.make(data=8), in_specs=in_specs)


def gather(x_BND: jax.Array) -> jax.Array:
    """Return the batch of all devices on every device: each device pads its shard with zeros, and all are added."""
    share = jnp.arange(8) == jax.lax.axis_index(meshes.DATA)
    return jax.lax.psum(share[:, None, None, None] * x_BND, meshes.DATA).reshape(-1, *x_BND.shape[1:])


def test_the_variance_is_accurate_if_the_mean_is_large():
    """float32 rounds 10000^2 to a multiple of 8, so E[x^2] - E[x]^2 would be noise. Means are accurate to 0.001."""
    x_BND = np.asarray(cases.normal(1, 8, 64, D)) + np.float32(1e4)
    layouts_and_specs = (DATA, P("data")), (layouts.Layout(sequence="data"), P(None, "data"))
    functions = [run_on_eight_devices(functools.partial(norm.batch.observe, layout=x), y) for x, y in layouts_and_specs]
    compute_all = jax.jit(lambda x_BND: [observe(x_BND)["var_D"] for observe in (norm.batch.observe, *functions)])
    exact_D = np.var(np.float64(x_BND), axis=(0, 1))
    for var_D in compute_all(x_BND):
        cases.assert_close(var_D, exact_D, 1e-3)


def loss_of_all(params: dict, x_BND: jax.Array, layout: layouts.Layout = layouts.ONE):
    """Return (loss over all devices that depends on every pair of tokens, (statistics, output))."""
    statistics = norm.batch.observe(x_BND, layout=layout)
    y_BND = norm.batch.apply(params | statistics, x_BND, eps=1e-5)
    total = jnp.sum(jnp.sin(y_BND) * jnp.cos(x_BND) + y_BND**3)
    total = jax.lax.psum(total, meshes.DATA) if layout.batch else total
    return total + jnp.sum(statistics["mean_D"] * statistics["var_D"]), (statistics, y_BND)


def test_eight_devices_equal_one_in_statistics_output_and_gradients():
    """The shards have different means, so the statistics need all devices.

    Training does not use the running averages: their gradient is exactly zero, so no optimiser moves them.
    """
    rng, params = np.random.default_rng(1), norm_params("batch")
    x_BND = np.float32(rng.standard_normal((16, N, D)) + 10 * rng.standard_normal((16, 1, D)))
    differentiate = jax.value_and_grad(loss_of_all, argnums=(0, 1), has_aux=True)

    def local(params, x_BND):
        (loss, (statistics, y_BND)), (of_params, of_x) = differentiate(params, x_BND, DATA)
        return (loss, (statistics, gather(y_BND))), (of_params, gather(of_x))

    sharded = run_on_eight_devices(local, P(), P("data"))
    compute_both = jax.jit(lambda *arrays: (sharded(*arrays), differentiate(*arrays)))
    result, expected = jax.device_get(compute_both(params, x_BND))
    cases.assert_trees_close(result, expected, 1e-5)
    of_params, of_x = expected[1]
    assert min(np.abs(leaf).max() for leaf in (of_params["gain_D"], of_params["shift_D"], of_x)) > 1
    assert not of_params["mean_D"].any() and not of_params["var_D"].any()


@pytest.mark.parametrize("name", ["batch", "token", "layer_sequence"])
@cases.float64()
def test_gradients_pass_through_the_statistics(name):
    """Gradients equal those of the formula in which mean and variance are functions of the tokens."""
    params, x_BND, w_BND = norm_params(name), cases.normal(1, B, N, D), cases.normal(2, B, N, D)

    def formula_loss(x_BND):
        mean, variance = (function(x_BND, AXES[name], keepdims=True) for function in (jnp.mean, jnp.var))
        return jnp.sum(w_BND * params["gain_D"] * (x_BND - mean) / jnp.sqrt(variance + 0.1))

    def norm_loss(x_BND):
        statistics = NORMS[name].observe(x_BND) if name in STATISTICS else {}
        return jnp.sum(w_BND * NORMS[name].apply(params | statistics, x_BND, eps=0.1))

    cases.assert_close(*jax.jit(lambda x_BND: [jax.grad(loss)(x_BND) for loss in (norm_loss, formula_loss)])(x_BND))


@pytest.mark.parametrize("name", ["instance", "layer_sequence"])
@cases.float64()
def test_a_norm_over_sharded_tokens_has_the_output_and_gradient_of_one_device(name):
    params, x_BND = norm_params(name), draw_tokens(16)

    def loss(x_BND, **options):
        return jnp.sin(NORMS[name].apply(params, x_BND, eps=0.1, **options)).sum((1, 2))

    def local(x_BND):
        def total(x_BND):
            return jax.lax.psum(loss(x_BND, layout=layouts.Layout(sequence="data")), "data")

        dx_BND = jax.grad(lambda x_BND: total(x_BND).sum())(x_BND)
        return total(x_BND), jax.lax.psum(dx_BND.mean(1) ** 2, "data")

    def on_one_device(x_BND):
        dx_BND = jax.grad(lambda x_BND: loss(x_BND).sum())(x_BND)
        return loss(x_BND), (dx_BND.reshape(B, 8, -1, D).mean(2) ** 2).sum(1)

    sharded = run_on_eight_devices(local, P(None, "data"))
    cases.assert_trees_close(*jax.jit(lambda x_BND: (sharded(x_BND), on_one_device(x_BND)))(x_BND))


def test_no_layer_adds_the_gradients_of_later_layers_again():
    """A fusion of six residual layers has as few operands as one of two: each sum is stored once."""

    def residual(W_MDD, x_BND):
        for W_DD in W_MDD:
            x_BND = x_BND + linear.matmul(jnp.tanh(norm.token_plain.apply({}, x_BND, eps=1e-5)), W_DD)
        return jnp.sum(x_BND**2)

    steps = (jax.jit(jax.grad(residual)).lower(jnp.ones((M, D, D)), draw_tokens()) for M in (2, 6))
    fusions = (re.findall(r" fusion\((.*?)\)", step.compile().as_text()) for step in steps)
    two, six = (max(fusion.count("%") for fusion in found) for found in fusions)
    assert 0 < six <= two + 1

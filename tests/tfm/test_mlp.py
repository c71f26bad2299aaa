"""The MLPs (E12) against the slow reference."""

import functools
import itertools
import math

import cases
import jax
import jax.numpy as jnp
import numpy as np
import reference
import reference_decoders
import reference_tokens
import translate
from cases import B, D, F, N
from jax.sharding import PartitionSpec as P

from experiments.config import by_name
from experiments.devices import mesh as meshes
from tfm import layout as layouts, mlp, shapes

MLPS = by_name.candidates(mlp)
MATRICES = dict.fromkeys(("relu", "gelu", "gelu_tanh"), {"W1_FD", "W2_DF"})
MATRICES |= dict.fromkeys(("two_hidden_relu", "two_hidden_gelu"), {"W1_FD", "Wh_FF", "W2_DF"})
MATRICES |= dict.fromkeys(("quick_gelu", "silu", "tanh", "relu_squared"), {"W1_FD", "W2_DF"})
MATRICES |= dict.fromkeys(("swiglu", "geglu", "geglu_tanh", "reglu"), {"W1_FD", "Wg_FD", "W2_DF"})
GATES = {"geglu": reference.gelu, "geglu_tanh": reference_tokens.gelu_tanh, "reglu": reference.relu}
PLAIN = {"gelu_tanh": reference_tokens.gelu_tanh, "quick_gelu": reference_decoders.quick_gelu}
PLAIN |= {"silu": reference_tokens.silu, "tanh": math.tanh, "relu_squared": lambda z: z * z if z > 0 else 0.0}


def mlp_params(name: str, bias: bool) -> dict:
    return cases.draw_params(lambda key: MLPS[name].init(key, D=D, F=F, M=1, bias=bias), std=0.5)


def slow_mlp(name: str, params: dict, X):
    """Return the reference's result for one sequence. The reference multiplies x W_1, so matrices are transposed."""

    def transpose_matrix(matrix: str, bias: str):
        W = np.asarray(params[matrix], np.float64)
        return W.T, np.asarray(params.get(bias, np.zeros(len(W))), np.float64)

    first, last = transpose_matrix("W1_FD", "b1_F"), transpose_matrix("W2_DF", "b2_D")
    if name == "swiglu":
        return reference_tokens.swiglu(X, *transpose_matrix("Wg_FD", "bg_F"), *first, *last)
    if name in GATES:
        return reference_decoders.gated_mlp(X, *transpose_matrix("Wg_FD", "bg_F"), *first, *last, GATES[name])
    if name in PLAIN:
        return reference.mlp(X, *first, *last, PLAIN[name])
    activation = getattr(reference, name.removeprefix("two_hidden_"))
    if name.startswith("two_hidden"):
        return reference_tokens.two_hidden_mlp(X, *first, *transpose_matrix("Wh_FF", "bh_F"), *last, activation)
    return reference.mlp(X, *first, *last, activation)


def test_mlp_equals_the_reference_and_keeps_bfloat16():
    """Every MLP is tested with and without biases. The reference computes one token at a time."""
    variants = [*itertools.product(MATRICES, [True, False])]

    @jax.jit
    def apply_all(trees, x_BND):
        return [MLPS[name].apply(params, x_BND) for (name, _), params in zip(variants, trees, strict=True)]

    with cases.float64():
        trees, x_BND = jax.device_get(([mlp_params(*one) for one in variants], cases.normal(1, B, N, D)))
        result = jax.device_get(apply_all(trees, x_BND))
    narrow = apply_all(*jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), (trees, x_BND)))
    for (name, bias), params, y_BND, narrow_BND in zip(variants, trees, result, jax.device_get(narrow), strict=True):
        assert {key for key in params if key.startswith("W")} == MATRICES[name]
        assert len(params) == (2 if bias else 1) * len(MATRICES[name])
        for b in range(B):
            cases.assert_close(y_BND[b], slow_mlp(name, params, translate.columns(x_BND[b])).T)
        assert narrow_BND.dtype == jnp.bfloat16
        cases.assert_close(np.float32(narrow_BND), y_BND, 0.05)


def test_gradients_of_mlps_on_eight_devices_equal_those_on_one_device():
    """Every activation can be differentiated inside shard_map, in every supported version of JAX."""
    names = ("relu", "gelu_tanh", "two_hidden_gelu", "swiglu")
    all_params, x_BND = {name: mlp_params(name, True) for name in names}, cases.normal(1, 8, N, D)

    def loss(all_params, x_BND):
        return sum(jnp.sum(jnp.sin(MLPS[name].apply(params, x_BND))) for name, params in all_params.items())

    def local(all_params, x_BND):
        return jax.grad(lambda all_params: jax.lax.psum(loss(all_params, x_BND), meshes.DATA))(all_params)

    sharded = meshes.sharded(local, meshes.make(data=8), in_specs=(P(), P("data")))
    compute_both = jax.jit(lambda *arrays: (sharded(*arrays), jax.grad(loss)(*arrays)))
    cases.assert_trees_close(*compute_both(all_params, x_BND), 1e-5)


def test_hidden_units_on_two_devices_have_the_output_of_one_device():
    devices, x_BND = meshes.make(data=1, tensor=2), cases.normal(1, B, N, D)
    params, layout = cases.draw_params(lambda key: mlp.gelu.init(key, D=D, F=6, M=1, bias=True)), meshes.layout(devices)
    apply_on_device = functools.partial(mlp.gelu.apply, layout=layout)
    in_specs = shapes.specs(params, layout.rules), P()
    sharded = meshes.sharded(apply_on_device, devices, in_specs=in_specs, out_specs=P())
    cases.assert_close(*jax.jit(lambda *arrays: (sharded(*arrays), mlp.gelu.apply(*arrays)))(params, x_BND), 1e-5)


def test_a_tpu_computes_the_same_mlp_without_joining_the_axes_of_tokens():
    params, x_BND = (
        cases.draw_params(lambda key: mlp.relu.init(key, D=D, F=6, M=1, bias=True)),
        cases.normal(1, 2, 40, D),
    )
    layout = layouts.Layout(platform="tpu")
    tpu, cpu = jax.jit(functools.partial(mlp.relu.apply, layout=layout)), jax.jit(mlp.relu.apply)
    cases.assert_close(tpu(params, x_BND), cpu(params, x_BND), 1e-6)
    rows = "tensor<80x6xf32>"
    assert rows in cpu.lower(params, x_BND).as_text()
    assert rows not in tpu.trace(params, x_BND).lower(lowering_platforms=("tpu",)).as_text()


@cases.float64()
def test_the_derivative_of_gelu_is_its_difference_quotient():
    h, gelu = 1e-5, mlp.exact_gelu

    @jax.jit
    def compute(x):
        slope = (gelu(x + h) - gelu(x - h)) / (2 * h)
        return gelu(x), jax.nn.gelu(x, approximate=False), jax.vmap(jax.grad(gelu))(x), slope

    y, expected, derivative, slope = compute(np.linspace(-6, 6, 101))
    cases.assert_close(derivative, slope, 1e-8)
    cases.assert_close(y, expected, 1e-12)

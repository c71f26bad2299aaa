"""The MLPs (E12) against the slow reference."""

import functools
import itertools
import math

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import reference_decoders
import reference_tokens
import translate
from cases import B, D, F, N
from jax.sharding import PartitionSpec as P

from experiments.engine import by_name, mesh
from tfm import layout, mlp, shapes

MLPS = by_name.candidates(mlp)
MATRICES = dict.fromkeys(("relu", "gelu", "gelu_tanh"), {"W1_FD", "W2_DF"})
MATRICES |= dict.fromkeys(("two_hidden_relu", "two_hidden_gelu"), {"W1_FD", "Wh_FF", "W2_DF"})
MATRICES |= dict.fromkeys(("quick_gelu", "silu", "tanh", "relu_squared"), {"W1_FD", "W2_DF"})
MATRICES |= dict.fromkeys(("swiglu", "geglu", "geglu_tanh", "reglu"), {"W1_FD", "Wg_FD", "W2_DF"})
GATES = {"geglu": reference.gelu, "geglu_tanh": reference_tokens.gelu_tanh, "reglu": reference.relu}
PLAIN = {"gelu_tanh": reference_tokens.gelu_tanh, "quick_gelu": reference_decoders.quick_gelu}
PLAIN |= {"silu": reference_tokens.silu, "tanh": math.tanh, "relu_squared": lambda z: z * z if z > 0 else 0.0}


def mlp_params(name: str, bias: bool) -> dict:
    return cases.drawn(lambda key: MLPS[name].init(key, D=D, F=F, M=1, bias=bias), std=0.5)


def slow_mlp(name: str, params: dict, X):
    """Return the reference's result for one sequence; its matrices are transposed, since the reference has x W_1."""

    def of(matrix: str, bias: str):
        W = np.asarray(params[matrix], np.float64)
        return W.T, np.asarray(params.get(bias, np.zeros(len(W))), np.float64)

    first, last = of("W1_FD", "b1_F"), of("W2_DF", "b2_D")
    if name == "swiglu":
        return reference_tokens.swiglu(X, *of("Wg_FD", "bg_F"), *first, *last)
    if name in GATES:
        return reference_decoders.gated_mlp(X, *of("Wg_FD", "bg_F"), *first, *last, GATES[name])
    if name in PLAIN:
        return reference.mlp(X, *first, *last, PLAIN[name])
    activation = getattr(reference, name.removeprefix("two_hidden_"))
    if name.startswith("two_hidden"):
        return reference_tokens.two_hidden_mlp(X, *first, *of("Wh_FF", "bh_F"), *last, activation)
    return reference.mlp(X, *first, *last, activation)


@pytest.mark.parametrize("platform", ["", "tpu"])
def test_mlp_equals_the_reference_and_keeps_bfloat16(platform):
    """Every MLP, with biases and without; the reference treats each token alike and alone."""
    chosen, over = [*itertools.product(MATRICES, [True, False])], {"layout": layout.Layout(platform=platform)}
    every = jax.jit(
        lambda trees, x_BND: [MLPS[name].apply(p, x_BND, **over) for (name, _), p in zip(chosen, trees, strict=True)]
    )
    with cases.float64():
        trees, x_BND = jax.device_get(([mlp_params(*one) for one in chosen], cases.normal(1, B, N, D)))
        found = jax.device_get(every(trees, x_BND))
    narrow = every(*jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), (trees, x_BND)))
    for (name, bias), params, y_BND, narrow_BND in zip(chosen, trees, found, narrow, strict=True):
        assert {key for key in params if key.startswith("W")} == MATRICES[name]
        assert len(params) == (2 if bias else 1) * len(MATRICES[name])
        for b in range(B):
            cases.close(y_BND[b], slow_mlp(name, params, translate.columns(x_BND[b])).T)
        assert narrow_BND.dtype == jnp.bfloat16
        cases.close(narrow_BND.astype(np.float32), y_BND, 0.05)


def test_gradients_of_mlps_on_eight_devices_are_those_on_one():
    """Every activation can be differentiated inside shard_map, whichever JAX it is."""
    chosen = ("relu", "gelu_tanh", "two_hidden_gelu", "swiglu")
    all_params, x_BND = {name: mlp_params(name, True) for name in chosen}, cases.normal(1, 8, N, D)

    def loss(all_params, x_BND):
        return sum(jnp.sum(jnp.sin(MLPS[name].apply(params, x_BND))) for name, params in all_params.items())

    def local(all_params, x_BND):
        return jax.grad(lambda all_params: jax.lax.psum(loss(all_params, x_BND), mesh.DATA))(all_params)

    one = jax.jit(jax.grad(loss))(all_params, x_BND)
    eight = jax.jit(mesh.sharded(local, mesh.make(data=8), in_specs=(P(), P("data"))))(all_params, x_BND)
    cases.agree(eight, one, 1e-5)


def test_two_devices_that_share_the_hidden_units_add_their_products_on_a_tpu_too():
    devices, x_BND = mesh.make(data=1, tensor=2), cases.normal(1, B, N, D)
    params, over = cases.drawn(lambda key: mlp.gelu.init(key, D=D, F=6, M=1, bias=True)), mesh.layout(devices)
    spread = functools.partial(mlp.gelu.apply, layout=over._replace(platform="tpu"))
    two = mesh.sharded(spread, devices, in_specs=(shapes.specs(params, over.rules), P()), out_specs=P())
    cases.close(jax.jit(two)(params, x_BND), jax.jit(mlp.gelu.apply)(params, x_BND), 1e-5)


@cases.float64()
def test_the_derivative_of_gelu_is_its_difference_quotient():
    x, h, gelu = np.linspace(-6, 6, 101), 1e-5, jax.jit(mlp.exact_gelu)
    slope = (gelu(x + h) - gelu(x - h)) / (2 * h)
    cases.close(jax.jit(jax.vmap(jax.grad(mlp.exact_gelu)))(x), slope, 1e-8)
    cases.close(gelu(x), jax.jit(functools.partial(jax.nn.gelu, approximate=False))(x), 1e-12)

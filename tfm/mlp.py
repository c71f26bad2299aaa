"""The second stage: a small network applied to each token by itself, with the same parameters for all (E12).

An MLP is `(init, apply)`, `apply(params, x_BND, *, layout) -> y_BND`: over the devices that each have some of the
hidden units (tensor parallelism, layout.py) the second product is added up.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from tfm import initial, linear
from tfm import layout as layouts
from tfm.variant import Variant

Activation = Callable[[jax.Array], jax.Array]


def _init(key: jax.Array, *, D: int, F: int, M: int, bias: bool) -> dict:
    """W2 starts at 1/sqrt(2 M F), so that the 2 M residual terms of a stack add up to unit variance."""
    params = initial.normal(key, "W1_FD", D**-0.5, F=F, D=D)
    params |= initial.normal(key, "W2_DF", (2 * M * F) ** -0.5, D=D, F=F)
    return params | (initial.zeros("b1_F", F=F) | initial.zeros("b2_D", D=D) if bias else {})


def _two_hidden_init(key: jax.Array, *, D: int, F: int, M: int, bias: bool) -> dict:
    """A second hidden layer between the two matrices, as wide as the first."""
    params = _init(key, D=D, F=F, M=M, bias=bias) | initial.normal(key, "Wh_FF", F**-0.5, F=F)
    return params | (initial.zeros("bh_F", F=F) if bias else {})


def _gated_init(key: jax.Array, *, D: int, F: int, M: int, bias: bool) -> dict:
    """A gate for each hidden unit, so 3 D F weights: F = 8/3 D has as many as the MLP without a gate at F = 4 D."""
    params = _init(key, D=D, F=F, M=M, bias=bias) | initial.normal(key, "Wg_FD", D**-0.5, F=F, D=D)
    return params | (initial.zeros("bg_F", F=F) if bias else {})


def _apply(
    activation: Activation, params: dict, x_BND: jax.Array, *, layout: layouts.Layout = layouts.ONE
) -> jax.Array:
    """W_2 activation(W_1 x_n + b_1) + b_2 for every token (E12; in seed 004 with row vectors, x W_1)."""
    h_BNF = activation(linear.rows(x_BND, params["W1_FD"], params.get("b1_F")))
    return linear.rows(h_BNF, params["W2_DF"], params.get("b2_D"), tensor=layout.tensor)


def _two_hidden(
    activation: Activation, params: dict, x_BND: jax.Array, *, layout: layouts.Layout = layouts.ONE
) -> jax.Array:
    """W_2 activation(W_h activation(W_1 x_n + b_1) + b_h) + b_2 for every token (E12 with two hidden layers)."""
    h_BNF = activation(linear.rows(x_BND, params["W1_FD"], params.get("b1_F")))
    if layout.tensor:
        h_BNF = jax.lax.all_gather(h_BNF, layout.tensor, axis=2, tiled=True)
    h_BNF = activation(linear.rows(h_BNF, params["Wh_FF"], params.get("bh_F")))
    return linear.rows(h_BNF, params["W2_DF"], params.get("b2_D"), tensor=layout.tensor)


def _gated(
    activation: Activation, params: dict, x_BND: jax.Array, *, layout: layouts.Layout = layouts.ONE
) -> jax.Array:
    """W_2 (activation(W_g x_n + b_g) * (W_1 x_n + b_1)) + b_2 for every token (Shazeer 2020, eq. 6, without biases)."""
    gate_BNF = activation(linear.rows(x_BND, params["Wg_FD"], params.get("bg_F")))
    h_BNF = gate_BNF * linear.rows(x_BND, params["W1_FD"], params.get("b1_F"))
    return linear.rows(h_BNF, params["W2_DF"], params.get("b2_D"), tensor=layout.tensor)


def _Phi(x: jax.Array) -> jax.Array:
    """The distribution function of the standard normal, to the rounding of 1: far below 0 only its size is right.

    In float32 x Phi(x) is then within 7e-7, as it is with erfc, which takes twice as long.
    """
    return (1 + jax.lax.erf(x * math.sqrt(0.5))) / 2


@jax.custom_jvp
def exact_gelu(x: jax.Array) -> jax.Array:
    """x Phi(x), Phi the distribution function of the standard normal; not the tanh approximation."""
    return x * _Phi(x)


@exact_gelu.defjvp
def _exact_gelu_jvp(primals: tuple, tangents: tuple) -> tuple:
    """d/dx x Phi(x) = Phi(x) + x phi(x), computed from x alone: behind the barrier XLA keeps nothing but x for it."""
    (x,), (dx,) = primals, tangents
    again = jax.lax.optimization_barrier(x)
    density = jnp.exp(-again * again / 2) / math.sqrt(2 * math.pi)
    return exact_gelu(x), dx * (_Phi(again) + again * density)


def tanh_gelu(x: jax.Array) -> jax.Array:
    """x / 2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))): GELU as GPT-2 has it (Hendrycks and Gimpel 2016, section 2)."""
    return x / 2 * (1 + jnp.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def silu(x: jax.Array) -> jax.Array:
    """x / (1 + exp(-x)), also called swish."""
    return x * jax.lax.logistic(x)


relu = Variant(_init, functools.partial(_apply, jax.nn.relu), shared=True)
gelu = Variant(_init, functools.partial(_apply, exact_gelu), shared=True)
gelu_tanh = Variant(_init, functools.partial(_apply, tanh_gelu), shared=True)
two_hidden_relu = Variant(_two_hidden_init, functools.partial(_two_hidden, jax.nn.relu), shared=True)
two_hidden_gelu = Variant(_two_hidden_init, functools.partial(_two_hidden, exact_gelu), shared=True)
swiglu = Variant(_gated_init, functools.partial(_gated, silu), shared=True)

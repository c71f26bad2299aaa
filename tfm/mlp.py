"""MLPs: the second stage of a block, a small network applied to each token with the same parameters (E12).

An MLP is `(init, apply)`: `init(key, *, D, F, M, bias) -> params` and `apply(params, x_BND, *, layout) -> y_BND`. With
tensor parallelism (layout.py) each device holds some hidden units, and the devices sum the product with W2.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from tfm import initial, layout as layouts, linear
from tfm.variant import Variant


def _init(key: jax.Array, *, D: int, F: int, M: int, bias: bool, extra: tuple[str, ...] = ()) -> dict:
    """Draw W1_FD, W2_DF and the matrices in `extra`: Wh_FF for a second hidden layer, Wg_FD for a gate. Biases are 0.

    W2 has std 1/sqrt(2 M F), so that the 2 M residual terms of M layers add up to unit variance. A gated MLP has 3 D F
    weights: with F = 8/3 D it has the same number as an MLP without a gate with F = 4 D.
    """
    stds = {"W1_FD": D**-0.5, "W2_DF": (2 * M * F) ** -0.5, "Wh_FF": F**-0.5, "Wg_FD": D**-0.5}
    params = {}
    for name in ("W1_FD", "W2_DF", *extra):
        params |= initial.normal(key, name, stds[name], D=D, F=F)
        params |= initial.zeros(f"b{name[1]}_{name[3]}", D=D, F=F) if bias else {}
    return params


def _apply(activation: Callable, params: dict, x_BND: jax.Array, *, layout: layouts.Layout = layouts.ONE) -> jax.Array:
    """Return W_2 h + b_2 for every token, h = activation(W_1 x_n + b_1) (E12).

    With a second hidden layer, h = activation(W_h activation(W_1 x_n + b_1) + b_h).
    With a gate, h = activation(W_g x_n + b_g) * (W_1 x_n + b_1) (Shazeer 2020, eq. 5 and 6).
    """
    # One row per token: with (B, N, D) XLA:CPU takes longer, and with rows a TPU, if N is no multiple of 8.
    x = x_BND if layout.platform == "tpu" else x_BND.reshape(-1, x_BND.shape[-1])
    product = linear.matmul
    if "Wg_FD" in params:
        gate = activation(product(x, params["Wg_FD"], params.get("bg_F")))
        h = gate * product(x, params["W1_FD"], params.get("b1_F"))
    else:
        h = activation(product(x, params["W1_FD"], params.get("b1_F")))
    if "Wh_FF" in params:
        if layout.tensor:
            h = jax.lax.all_gather(h, layout.tensor, axis=h.ndim - 1, tiled=True)
        h = activation(product(h, params["Wh_FF"], params.get("bh_F")))
    return product(h, params["W2_DF"], params.get("b2_D"), tensor=layout.tensor).reshape(x_BND.shape)


def _Phi(x: jax.Array) -> jax.Array:
    """Return Phi(x), the distribution function of the standard normal, with an absolute error of about eps.

    For x far below 0 the relative error is large, and below about -5.6 the result is 0. The error of x Phi(x) is still
    below 1e-6 in float32. With erfc this error is the same, but erfc takes twice as long.
    """
    return (1 + jax.lax.erf(x * math.sqrt(0.5))) / 2


@jax.custom_jvp
def exact_gelu(x: jax.Array) -> jax.Array:
    """Return x Phi(x): GELU with the exact distribution function, not the tanh approximation."""
    return x * _Phi(x)


@exact_gelu.defjvp
def _exact_gelu_jvp(primals: tuple, tangents: tuple) -> tuple:
    """Compute the derivative Phi(x) + x phi(x) from x. Because of the barrier XLA saves x alone for the gradient."""
    (x,), (dx,) = primals, tangents
    same_x = jax.lax.optimization_barrier(x)
    density = jnp.exp(-same_x * same_x / 2) / math.sqrt(2 * math.pi)
    return exact_gelu(x), dx * (_Phi(same_x) + same_x * density)


def tanh_gelu(x: jax.Array) -> jax.Array:
    """Return x / 2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), GPT-2's GELU (Hendrycks and Gimpel 2016, section 2)."""
    return x / 2 * (1 + jnp.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def sigmoid_gelu(x: jax.Array) -> jax.Array:
    """Return x sigma(1.702 x), an approximation of GELU (Hendrycks and Gimpel 2016, section 2)."""
    return x * jax.nn.sigmoid(1.702 * x)


def squared_relu(x: jax.Array) -> jax.Array:
    """Return max(x, 0)^2 (So et al. 2021, Primer, section 4)."""
    return jnp.square(jax.nn.relu(x))


ACTIVATIONS = {  # each is also the name of the MLP with this activation in a config
    "relu": jax.nn.relu,
    "relu_squared": squared_relu,
    "gelu": exact_gelu,
    "gelu_tanh": tanh_gelu,
    "quick_gelu": sigmoid_gelu,
    "silu": jax.nn.silu,
    "tanh": jnp.tanh,
}


def _variant(activation: Callable, *extra: str) -> Variant:
    """Return the MLP with this activation and the matrices `extra` of `_init`."""
    init, apply = functools.partial(_init, extra=extra), functools.partial(_apply, activation)
    return Variant(init, apply, takes_layout=True, output=("W2_DF",))


relu, relu_squared, gelu, gelu_tanh, quick_gelu, silu, tanh = map(_variant, ACTIVATIONS.values())
two_hidden_relu = _variant(jax.nn.relu, "Wh_FF")
two_hidden_gelu = _variant(exact_gelu, "Wh_FF")
swiglu = _variant(jax.nn.silu, "Wg_FD")
geglu = _variant(exact_gelu, "Wg_FD")
geglu_tanh = _variant(tanh_gelu, "Wg_FD")  # the MLP of Gemma
reglu = _variant(jax.nn.relu, "Wg_FD")

"""Token norms: each token is standardised over its own features, so nothing is exchanged between tokens (E14-E16)."""

import jax
import jax.numpy as jnp

from tfm import initial, linear
from tfm.variant import Variant


def standardise(x_BND: jax.Array, *, eps: float) -> jax.Array:
    """(x_n - mean(x_n)) / sqrt(var(x_n) + eps), var dividing by D, over the features of each token (E15; eps: E16).

    Statistics are in float32 or wider whatever the dtype of x. With eps = 0 a constant token is 0/0 = NaN, as in E15.
    """
    x = linear.wide(x_BND)
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
    return (centred * jax.lax.rsqrt(variance + eps)).astype(x_BND.dtype)


def apply(params: dict, x_BND: jax.Array, *, eps: float) -> jax.Array:
    """LayerNorm(X)_{d,n} = (x_{d,n} - mean(x_n)) / sqrt(var(x_n) + eps) * gain_d + shift_d (E14 with eps = 0, E16).

    Gain and shift are used where the tree has them (E15 has neither).
    """
    y = standardise(x_BND, eps=eps)
    if "gain_D" in params:
        y = y * params["gain_D"]
    if "shift_D" in params:
        y = y + params["shift_D"]
    return y


def _gain_and_shift(key: jax.Array, *, D: int) -> dict:
    return initial.ones("gain_D", D=D) | initial.zeros("shift_D", D=D)


def _nothing(key: jax.Array, *, D: int) -> dict:
    return {}


token = Variant(_gain_and_shift, apply)  # TokenNorm with gain and shift: E14, E16
token_plain = Variant(_nothing, apply)  # without: E15

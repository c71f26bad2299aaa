"""The second stage: a small network applied to each token by itself, with the same parameters for all (E12)."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from tfm import initial, linear
from tfm.variant import Variant


def _init(key: jax.Array, *, D: int, F: int, M: int, bias: bool) -> dict:
    """W2 starts at 1/sqrt(2 M F), so that the 2 M residual terms of a stack add up to unit variance."""
    params = initial.normal(key, "W1_FD", D**-0.5, F=F, D=D)
    params |= initial.normal(key, "W2_DF", (2 * M * F) ** -0.5, D=D, F=F)
    return params | (initial.zeros("b1_F", F=F) | initial.zeros("b2_D", D=D) if bias else {})


def _apply(activation: Callable[[jax.Array], jax.Array]) -> Callable[[dict, jax.Array], jax.Array]:
    def apply(params: dict, x_BND: jax.Array) -> jax.Array:
        """W_2 activation(W_1 x_n + b_1) + b_2 for every token (E12; in seed 004 with row vectors, x W_1)."""
        h_BNF = activation(linear.rows(x_BND, params["W1_FD"], params.get("b1_F")))
        return linear.rows(h_BNF, params["W2_DF"], params.get("b2_D"))

    return apply


@jax.custom_jvp
def _Phi(x: jax.Array) -> jax.Array:
    """The distribution function of the standard normal, erfc(-x / sqrt(2)) / 2.

    Its derivative, the density, is given: JAX 0.12 cannot differentiate erfc inside shard_map.
    """
    return jax.lax.erfc(-x * math.sqrt(0.5)) / 2


_Phi.defjvps(lambda dx, _, x: dx * jnp.exp(-x * x / 2) / math.sqrt(2 * math.pi))


def exact_gelu(x: jax.Array) -> jax.Array:
    """x Phi(x), Phi the distribution function of the standard normal; not the tanh approximation."""
    return x * _Phi(x)


relu = Variant(_init, _apply(jax.nn.relu))
gelu = Variant(_init, _apply(exact_gelu))

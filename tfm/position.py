"""Where a token stands: attention alone does not know, so the position is put into the token (E21).

A position code is `(init, apply)`: `init(key, *, N, D) -> params` for up to N tokens, and
`apply(params, x_BND, n=None) -> x_BND`, where `n` says where the tokens stand: (N,), or (B, N) when every sequence of a
batch stands at its own positions, or None for 0, 1, 2, ... Positions inside the attention are in relative_position.py.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from tfm import initial, linear
from tfm.variant import Variant

BASE = 10000.0  # Vaswani et al. 2017, section 3.5: wavelengths from 2 pi to 10000 * 2 pi


def angles(n: jax.Array, K: int, *, base: float = BASE) -> jax.Array:
    """n / base^(2i/K) for i = 0 ... ceil(K/2) - 1, radians, in the default float: the shape of n, then the pairs.

    In bfloat16 a position above 256 would already be rounded to its neighbour.
    """
    frequency_I = base ** (-np.arange(0, K, 2) / K)
    return jnp.asarray(n)[..., None] * jnp.asarray(frequency_I, float)


def sinusoids(n: jax.Array, D: int) -> jax.Array:
    """p_{n,2i} = sin(n / 10000^(2i/D)), p_{n,2i+1} = cos(the same): p_ND, or p_BND for n of (B, N)."""
    angle = angles(n, D)
    return jnp.stack([jnp.sin(angle), jnp.cos(angle)], axis=-1).reshape(*angle.shape[:-1], -1)[..., :D]


def _sinusoidal_codes(params: dict, x_BND: jax.Array, n: jax.Array | None) -> jax.Array:
    n = jnp.arange(x_BND.shape[1]) if n is None else n
    return sinusoids(n, x_BND.shape[2]).astype(x_BND.dtype)


def _learned_codes(params: dict, x_BND: jax.Array, n: jax.Array | None) -> jax.Array:
    """p_n from the table. ValueError for more tokens than it has; NaN for a single position beyond its end."""
    N, longest = x_BND.shape[1], params["P_ND"].shape[0]
    if N > longest:
        raise ValueError(f"{N} tokens, but the position table holds {longest}")
    return params["P_ND"][:N] if n is None else jnp.take(params["P_ND"], n, axis=0, mode="fill", fill_value=jnp.nan)


def _no_init(key: jax.Array, *, N: int, D: int) -> dict:
    return {}


def _learned_init(key: jax.Array, *, N: int, D: int) -> dict:
    return initial.normal(key, "P_ND", D**-0.5, N=N, D=D)


def _none(params: dict, x_BND: jax.Array, n: jax.Array | None = None) -> jax.Array:
    """x_n: the tokens are a set, and the transformer is permutation-equivariant."""
    return x_BND


def _added(init: Callable[..., dict], codes: Callable[..., jax.Array]) -> Variant:
    """x_n + p_n (E21)."""
    return Variant(init, lambda params, x_BND, n=None: x_BND + codes(params, x_BND, n))


def _concatenated(init: Callable[..., dict], codes: Callable[..., jax.Array]) -> Variant:
    """[W_x W_p] [x_n; p_n] = W_x x_n + W_p p_n: 2D features are mapped back to D by one matrix (E21).

    Adding is the case W_x = W_p = 1. Both halves start at 1/sqrt(D), so that the output has the variance of x plus p.
    """

    def both_init(key: jax.Array, *, N: int, D: int) -> dict:
        params = init(key, N=N, D=D) | initial.normal(key, "Wx_DD", D**-0.5, D=D)
        return params | initial.normal(key, "Wp_DD", D**-0.5, D=D)

    def apply(params: dict, x_BND: jax.Array, n: jax.Array | None = None) -> jax.Array:
        return linear.rows(x_BND, params["Wx_DD"]) + linear.rows(codes(params, x_BND, n), params["Wp_DD"])

    return Variant(both_init, apply)


learned = _added(_learned_init, _learned_codes)
sinusoidal = _added(_no_init, _sinusoidal_codes)
none = Variant(_no_init, _none)
learned_concatenated = _concatenated(_learned_init, _learned_codes)
sinusoidal_concatenated = _concatenated(_no_init, _sinusoidal_codes)

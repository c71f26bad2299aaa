"""Where a token stands: attention alone does not know, so the position is put into the token (E21).

A position code is `(init, apply)`: `init(key, *, N, D) -> params` for up to N tokens, and
`apply(params, x_BND, n=None) -> x_BND`, where `n` says where the tokens stand: (N,), or (B, N) when every sequence of a
batch stands at its own positions, or None for 0, 1, 2, ... Positions inside the attention are in relative_position.py.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from tfm import initial, linear, shapes
from tfm.variant import Variant

BASE = 10000.0  # Vaswani et al. 2017, section 3.5: wavelengths from 2 pi to 10000 * 2 pi


def angles(n: jax.Array, K: int, *, base: float = BASE) -> jax.Array:
    """n / base^(2i/K) for i = 0 ... ceil(K/2) - 1, radians, in the default float: the shape of n, then the pairs. In
    bfloat16 a position above 256 would already be rounded to its neighbour."""
    frequency_I = base ** (-np.arange(0, K, 2) / K)
    return jnp.asarray(n)[..., None] * jnp.asarray(frequency_I, float)


def sinusoids(n: jax.Array, D: int) -> jax.Array:
    """p_{n,2i} = sin(n / 10000^(2i/D)), p_{n,2i+1} = cos(the same): p_ND, or p_BND for n of (B, N)."""
    angle = angles(n, D)
    return jnp.stack([jnp.sin(angle), jnp.cos(angle)], axis=-1).reshape(*angle.shape[:-1], -1)[..., :D]


def _codes(params: dict, x_BND: jax.Array, n: jax.Array | None) -> jax.Array:
    """p_n: sinusoids, or from the table where there is one. ValueError for more tokens than it has; NaN for a single
    position beyond its end."""
    _, N, D = x_BND.shape
    P_ND = shapes.find(params, "P")
    if P_ND is None:
        return sinusoids(jnp.arange(N) if n is None else n, D).astype(x_BND.dtype)
    if N > (longest := len(P_ND)):
        raise ValueError(f"{N} tokens, but the position table holds {longest}")
    return P_ND[:N] if n is None else jnp.take(P_ND, n, axis=0, mode="fill", fill_value=jnp.nan)


def _init(key: jax.Array, *, N: int, D: int, E: int = 0, names: tuple[str, ...] = ()) -> dict:
    """E: features of a token at this place (embed.py); 0: D."""
    params = {}
    for name in names:
        params |= initial.normal(key, name.replace("D", "E") if E else name, (E or D) ** -0.5, N=N, D=D, E=E)
    return params


def _none(params: dict, x_BND: jax.Array, n: jax.Array | None = None) -> jax.Array:
    """x_n: the tokens are a set, and the transformer is permutation-equivariant."""
    return x_BND


def _added(params: dict, x_BND: jax.Array, n: jax.Array | None = None) -> jax.Array:
    """x_n + p_n (E21)."""
    return x_BND + _codes(params, x_BND, n)


def _concatenated(params: dict, x_BND: jax.Array, n: jax.Array | None = None) -> jax.Array:
    """[W_x W_p] [x_n; p_n] = W_x x_n + W_p p_n: 2D features are mapped back to D by one matrix (E21). Adding is the
    case W_x = W_p = 1. Both halves start at 1/sqrt(D), so that the output has the variance of x plus p."""
    return linear.matmul(x_BND, shapes.find(params, "Wx")) + linear.matmul(
        _codes(params, x_BND, n), shapes.find(params, "Wp")
    )


none = Variant(_init, _none)
sinusoidal = Variant(_init, _added)
sinusoidal_concatenated = Variant(functools.partial(_init, names=("Wx_DD", "Wp_DD")), _concatenated)
learned = Variant(functools.partial(_init, names=("P_ND",)), _added)
learned_concatenated = Variant(functools.partial(_init, names=("P_ND", "Wx_DD", "Wp_DD")), _concatenated)

"""Position codes, added to the tokens or concatenated with them, because attention alone ignores their order (E21).

A position code is `(init, apply)`: `init(key, *, N, D) -> params` for up to N tokens, and `apply(params, x_BND, n=None)
-> x_BND`. n: the positions of the tokens, (N,), or (B, N) if every sequence has its own; None: 0, 1, 2, ... Positions
that act inside the attention are in relative_position.py.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from tfm import initial, linear
from tfm.variant import Variant

BASE = 10000.0  # Vaswani et al. 2017, section 3.5: wavelengths from 2 pi to 10000 * 2 pi


def angles(n: jax.Array, K: int, *, base: float = BASE) -> jax.Array:
    """Return n / base^(2i/K) in radians for i = 0 ... ceil(K/2) - 1: shape (*n.shape, ceil(K/2)).

    The dtype is JAX's default float: bfloat16 would round positions above 256.
    """
    frequency_I = base ** (-np.arange(0, K, 2) / K)
    return jnp.asarray(n)[..., None] * jnp.asarray(frequency_I, float)


def sinusoids(n: jax.Array, D: int) -> jax.Array:
    """Return p_{n,2i} = sin(n / 10000^(2i/D)), p_{n,2i+1} = cos(n / 10000^(2i/D)): p_ND, or p_BND for n of (B, N)."""
    angle = angles(n, D)
    return jnp.stack([jnp.sin(angle), jnp.cos(angle)], axis=-1).reshape(*angle.shape[:-1], -1)[..., :D]


def _codes(params: dict, x_BND: jax.Array, n: jax.Array | None) -> jax.Array:
    """Return p_n: rows of the table P_ND if `params` has it, else sinusoids.

    A position n past the end of the table gives NaN. Raises ValueError if there are more tokens than rows in the table.
    """
    _, N, D = x_BND.shape
    P_ND = params.get("P_ND")
    if P_ND is None:
        return sinusoids(jnp.arange(N) if n is None else n, D).astype(x_BND.dtype)
    if N > len(P_ND):
        raise ValueError(
            f"{N} tokens are more than the position table of {len(P_ND)} rows holds. "
            "Pass fewer tokens or make a model with a larger N"
        )
    return P_ND[:N] if n is None else jnp.take(P_ND, n, axis=0, mode="fill", fill_value=jnp.nan)


def _init(key: jax.Array, *, N: int, D: int, names: tuple[str, ...] = ()) -> dict:
    """Draw the leaves `names` with variance 1/D."""
    params = {}
    for name in names:
        params |= initial.normal(key, name, D**-0.5, N=N, D=D)
    return params


def _none(params: dict, x_BND: jax.Array, n: jax.Array | None = None) -> jax.Array:
    """Return x_n: without positions the transformer is permutation-equivariant."""
    return x_BND


def _added(params: dict, x_BND: jax.Array, n: jax.Array | None = None) -> jax.Array:
    """Return x_n + p_n (E21)."""
    return x_BND + _codes(params, x_BND, n)


def _concatenated(params: dict, x_BND: jax.Array, n: jax.Array | None = None) -> jax.Array:
    """Return [W_x W_p] [x_n; p_n] = W_x x_n + W_p p_n: one matrix maps 2 D features back to D (E21).

    W_x = W_p = 1 would add x_n and p_n. Both matrices have std 1/sqrt(D), so the output has the variance of x plus p.
    """
    p_BND = _codes(params, x_BND, n)
    return linear.matmul(x_BND, params["Wx_DD"]) + linear.matmul(p_BND, params["Wp_DD"])


none = Variant(_init, _none)
sinusoidal = Variant(_init, _added)
sinusoidal_concatenated = Variant(functools.partial(_init, names=("Wx_DD", "Wp_DD")), _concatenated)
learned = Variant(functools.partial(_init, names=("P_ND",)), _added)
learned_concatenated = Variant(functools.partial(_init, names=("P_ND", "Wx_DD", "Wp_DD")), _concatenated)

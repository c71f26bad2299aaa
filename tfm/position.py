"""Where a token stands: attention alone does not know, so the position is put into the token (E21).

A position code is `(init, apply)`: `init(key, *, N, D) -> params`, `apply(params, x_BND) -> x_BND`.
"""

import jax
import jax.numpy as jnp
import numpy as np

from tfm import initial
from tfm.variant import Variant


def sinusoids(N: int, D: int) -> np.ndarray:
    """P_{n,2i} = sin(n / 10000^(2i/D)), P_{n,2i+1} = cos(the same): p_ND (Vaswani et al. 2017, section 3.5)."""
    angle = np.arange(N)[:, None] / 10000.0 ** (2 * (np.arange(D) // 2) / D)[None, :]
    return np.where(np.arange(D) % 2 == 0, np.sin(angle), np.cos(angle))


def _learned_init(key: jax.Array, *, N: int, D: int) -> dict:
    return initial.normal(key, "P_ND", D**-0.5, N=N, D=D)


def _learned(params: dict, x_BND: jax.Array) -> jax.Array:
    """x_n + p_n, the p_n free parameters (E21). ValueError for more tokens than the table has."""
    N, longest = x_BND.shape[1], params["P_ND"].shape[0]
    if N > longest:
        raise ValueError(f"{N} tokens, but the position table holds {longest}")
    return x_BND + params["P_ND"][:N]


def _nothing(key: jax.Array, *, N: int, D: int) -> dict:
    return {}


def _sinusoidal(params: dict, x_BND: jax.Array) -> jax.Array:
    """x_n + p_n, the p_n fixed sinusoids of many frequencies (E21)."""
    return x_BND + jnp.asarray(sinusoids(*x_BND.shape[1:]), x_BND.dtype)


def _none(params: dict, x_BND: jax.Array) -> jax.Array:
    """x_n: the tokens are a set, and the transformer is permutation-equivariant."""
    return x_BND


learned = Variant(_learned_init, _learned)
sinusoidal = Variant(_nothing, _sinusoidal)
none = Variant(_nothing, _none)

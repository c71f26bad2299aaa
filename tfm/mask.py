"""Who may attend to whom. A mask is a function `mask(n_N, s_S) -> bool` of query and key positions, True = may attend.

The result has shape (N, S), or (B, N, S) where it depends on the sequence. Because a mask is a function of positions,
a way of computing attention may ask for any block of it and need never hold all of it (`dense` does).
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

Mask = Callable[[jax.Array, jax.Array], jax.Array]


def everything(n_N: jax.Array, s_S: jax.Array) -> jax.Array:
    """No restriction."""
    return jnp.ones((n_N.size, s_S.size), bool)


def causal(n_N: jax.Array, s_S: jax.Array) -> jax.Array:
    """A token attends to itself and to what came before: s <= n.

    E22 has A_{n,n'} = 0 for n > n' with columns attending (upper-triangular); with rows it is lower-triangular.
    """
    return s_S[None, :] <= n_N[:, None]


def padding(valid_BS: jax.Array) -> Mask:
    """Only real tokens may be attended to: valid_BS is False at padding."""
    valid_BS = jnp.asarray(valid_BS)
    return lambda n_N, s_S: jnp.broadcast_to(valid_BS[:, s_S][:, None, :], (valid_BS.shape[0], n_N.size, s_S.size))


def both(first: Mask, second: Mask) -> Mask:
    """The product of two masks: what both allow."""
    return lambda n_N, s_S: first(n_N, s_S) & second(n_N, s_S)


def dense(mask: Mask, *, N: int, S: int) -> jax.Array:
    """The whole mask as 0/1 for N queries and S keys; the last query stands at the last key, so that a cache works."""
    return mask(jnp.arange(S - N, S), jnp.arange(S))

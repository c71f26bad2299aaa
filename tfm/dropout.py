"""Dropout: in training a part of the numbers is replaced by zeros (Srivastava et al. 2014)."""

import jax
import jax.numpy as jnp

from tfm import layout as layouts


def drop(key_B: jax.Array | None, x: jax.Array, rate: float, *, layout: layouts.Layout = layouts.ONE) -> jax.Array:
    """Each number of x (B, ...) is 0 with probability `rate`, else x / (1 - rate), so that the mean stays what it was.

    Sequence b has its own random key: its zeros depend on that key alone, not on its neighbours, the number of devices
    or the parts of an accumulation. Of a sequence whose tokens (axis 1) devices share, each draws the zeros of all and
    takes its own. Without keys (evaluation) or at rate 0 the result is x. ValueError for a rate outside [0, 1).
    """
    if not 0 <= rate < 1:
        raise ValueError(f"a dropout rate of {rate}; it must be at least 0 and less than 1")
    if key_B is None or rate == 0:
        return x
    shape = list(x.shape[1:])
    if layout.sequence:
        shape[0] *= jax.lax.axis_size(layout.sequence)
    keep = jax.vmap(lambda key: jax.random.bernoulli(key, 1 - rate, shape))(key_B)
    return jnp.where(layouts.own(keep, layout), x / (1 - rate), 0)

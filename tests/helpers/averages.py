"""Masks, a learned bias, and the gradients of averages, for the implementations of attention."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial

from tfm.attention import mask, relative_position

H, V = 3, 7
LENGTH_B = np.array([40, 3])  # with a window, queries of the second sequence see nothing


def offsets(b_HR: jax.Array) -> Partial:
    """Return a learned bias for every offset s - n."""
    return Partial(functools.partial(relative_position.relative.bias, H=H), {"b_HR": b_HR})


def padded(N: int) -> mask.Mask:
    """Return a causal window over sequences of unequal lengths, an array that every device has."""
    valid_BS = jnp.arange(N) < LENGTH_B[:, None]
    return mask.both(mask.both(mask.causal, mask.window(9)), mask.padding(valid_BS))


MASKS = {"padding": padded, "prefix": lambda N: mask.either(mask.causal, mask.prefix(LENGTH_B))}


def gradients(arrays, n, *, attend, name: str, bias: bool, N: int, over=(), **cap: float) -> tuple[dict, jax.Array]:
    """Return the gradients of a number that depends on every output, summed over the devices, and the outputs."""

    def total(arrays: dict) -> tuple[jax.Array, jax.Array]:
        call = dict(mask=MASKS[name](N), bias=offsets(arrays["b_HR"]) if bias else None, n=n, scale=0.7, **cap)
        y_BHNV, _ = attend(*[arrays[x] for x in "qkv"], **call)
        return jax.lax.psum(jnp.sin(y_BHNV + jnp.arange(V)).sum(), over), y_BHNV

    return jax.grad(total, has_aux=True)(arrays)

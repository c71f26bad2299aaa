"""Masks, a learned bias, and the gradients of averages, for the implementations of attention."""

import functools
from collections.abc import Callable
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial

from tfm.attention import block_mask, explicit, flash, mask as masks, relative_position

H, V = 3, 7
LENGTH_B = np.array([40, 3])  # with a window, late queries of the second sequence have no keys


def offsets(b_HR: jax.Array) -> Partial:
    """Return a relative-position bias with the parameters b_HR."""
    return Partial(functools.partial(relative_position.relative.bias, H=H), {"b_HR": b_HR})


def padded_window(N: int) -> masks.Mask:
    """Return a causal window over sequences of unequal lengths; every device has the whole padding array."""
    valid_BS = jnp.arange(N) < LENGTH_B[:, None]
    return masks.both(masks.both(masks.causal, masks.window(9)), masks.padding(valid_BS))


MASKS = {"padding": padded_window, "prefix": lambda N: masks.prefix(LENGTH_B)}


def in_blocks(queries: int, keys: int) -> Callable:
    """Return flash.attention with blocks of at most so many queries and keys, also for short sequences."""

    def sizes(N: int, S: int, *, tables: int) -> tuple[int, int]:
        return block_mask.size(N, queries), block_mask.size(S, keys)

    def attend(*qkv, **call) -> tuple:
        with (
            mock.patch.object(flash, "choose_sizes", sizes),
            mock.patch.object(explicit, "cut_chunks", return_value=None),
        ):
            return flash.attention(*qkv, **call)

    return attend


def gradients(
    arrays, n, *, attend, name: str, bias: bool, N: int, axis_names=(), **cap: float
) -> tuple[dict, jax.Array]:
    """Return (gradients of a number that depends on every output, outputs). The number is summed over axis_names."""

    def total(arrays: dict) -> tuple[jax.Array, jax.Array]:
        call = dict(mask=MASKS[name](N), bias=offsets(arrays["b_HR"]) if bias else None, n=n, scale=0.7, **cap)
        y_BHNV, _ = attend(*[arrays[x] for x in "qkv"], **call)
        return jax.lax.psum(jnp.sin(y_BHNV + jnp.arange(V)).sum(), axis_names), y_BHNV

    return jax.grad(total, has_aux=True)(arrays)

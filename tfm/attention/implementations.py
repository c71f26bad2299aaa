"""Implementations of attention: the functions that compute the averages. A model chooses one before tracing.

An implementation is `attend(q_BHNK, k_BHSK, v_BHSV, *, mask, scale, cap, bias, n) -> (y_BHNV, A_BHNS)`. A is
None if the implementation never forms the weights. explicit.attention explains the arguments. All implementations agree
on the following. A single head of keys or values is shared by all query heads; each of G heads is shared by H/G query
heads (groups.py). Finite keys and values that the mask forbids do not change an output. A query without an allowed key
gets zeros, with zero gradient.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from tfm.attention import explicit, flash, fused, mask as masks, splash

NAMES = ("explicit", "explicit_bfloat16", "flash")  # settings of model.attention
MIN_KEYS = 256  # with fewer keys, explicit attention is faster on a TPU than the kernel


class Implementation(NamedTuple):
    """An attention function, its name, and the reason why it is not the fused kernel of the device.

    The reason is '' for the kernel, for a device that has none, for another `name` than "flash" in `choose`, and for
    attention around a ring of devices.
    """

    attend: Callable[..., tuple[jax.Array, jax.Array | None]]  # -> y_BHNV, and the weights A_BHNS or None
    name: str
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.name} ({self.reason})" if self.reason else self.name


EXPLICIT = Implementation(explicit.attention, "explicit, all weights in memory")
# Two layers of ViT-S/16 take 15 % less time than with float32 logits (v5e, estimated).
EXPLICIT_BFLOAT16 = Implementation(
    functools.partial(explicit.attention, dtype=jnp.bfloat16), "explicit, all weights in memory, logits in bfloat16"
)
FLASH = Implementation(flash.attention, "flash attention in blocks")


def choose(
    name: str,
    platform: str,
    q_BHNK: jax.ShapeDtypeStruct,
    k_BHSK: jax.ShapeDtypeStruct,
    v_BHSV: jax.ShapeDtypeStruct,
    *,
    mask: masks.Mask | None,
    bias: bool = False,
    cap: float = 0.0,
    axis: str | None = None,
) -> Implementation:
    """Return the attention function for arrays of these shapes on this platform (cpu, gpu, tpu, or '' for any).

    name: one of NAMES. mask: a mask of the same kind as the masks of later calls. bias: whether the logits have a bias.
    cap: c if the logits become c tanh(l/c), else 0. axis: the mesh axis over which tokens are sharded; if it is set,
    all names give flash attention around a ring.
    """
    if axis is not None:
        return Implementation(flash.attention, "flash attention in blocks, around a ring of devices")
    if name != "flash":
        return EXPLICIT if name == "explicit" else EXPLICIT_BFLOAT16
    call = {"mask": mask, "bias": bias}
    if platform == "tpu":
        if k_BHSK.shape[2] < MIN_KEYS:
            return EXPLICIT._replace(reason=f"fewer than {MIN_KEYS} keys")
        reason = splash.find_limitation(q_BHNK, k_BHSK, v_BHSV, **call)
        if not reason:
            return Implementation(splash.attention, "flash attention by the splash kernel (TPU)")
        return FLASH._replace(reason=f"no kernel: {reason}")
    if platform == "gpu":
        reason = fused.find_limitation(q_BHNK, k_BHSK, v_BHSV, cap=cap, **call)
        if not reason:
            return Implementation(fused.attention, "flash attention by cuDNN's kernel (GPU)")
        return FLASH._replace(reason=f"no kernel: {reason}")
    return FLASH

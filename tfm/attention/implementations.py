"""Implementations of attention: which function computes the averages, chosen once for a model, before tracing.

Each is `attend(q_BHNK, k_BHSK, v_BHSV, *, mask, scale, cap, bias, n, axis) -> (y_BHNV, A_BHNS)`; A is None if the
weights are never formed. For all of them: a head axis of size one is shared by all heads, and G heads of keys and
values by groups of H/G queries (groups.py). A finite value that the mask hides never reaches an output. A query that
sees nothing gets zeros, with zero gradient.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax

from tfm.attention import explicit, flash, fused, mask as masks, splash

NAMES = ("explicit", "flash")  # settings of model.attention
FEWEST = 256  # keys from which on a TPU's kernel is faster than all weights at once


class Implementation(NamedTuple):
    """The function that computes attention, its name, and the reason if it is not a kernel of the device."""

    attend: Callable[..., tuple[jax.Array, jax.Array | None]]
    name: str
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.name} ({self.reason})" if self.reason else self.name


DEFINED = Implementation(explicit.attention, "explicit, all weights in memory")
BLOCKS = Implementation(flash.attention, "flash attention in blocks")


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
    """Return the implementation for arrays of these shapes on this platform (cpu, gpu, tpu, or '' for any).

    name: one of NAMES. mask: like the masks of the calls. bias: whether logits have a bias. axis: the mesh axis over
    which tokens are sharded; both names then mean flash attention around a ring.
    """
    if axis is not None:
        return Implementation(flash.attention, "flash attention in blocks, around a ring of devices")
    if name == "explicit":
        return DEFINED
    call = {"mask": mask, "bias": bias, "axis": axis}
    if platform == "tpu":
        if k_BHSK.shape[2] < FEWEST:
            return Implementation(explicit.attention, "all weights at once", f"fewer than {FEWEST} keys")
        reason = splash.refuse(q_BHNK, k_BHSK, v_BHSV, **call)
        if not reason:
            return Implementation(splash.attention, "flash attention by the splash kernel (TPU)")
        return BLOCKS._replace(reason=f"no kernel: {reason}")
    if platform == "gpu":
        reason = fused.refuse(q_BHNK, k_BHSK, v_BHSV, cap=cap, **call)
        if not reason:
            return Implementation(fused.attention, "flash attention by cuDNN's kernel (GPU)")
        return BLOCKS._replace(reason=f"no kernel: {reason}")
    return BLOCKS

"""Attention: every token becomes a weighted average of values, with weights computed from the tokens themselves.

| file                                       | what it is                                                              |
|--------------------------------------------|-------------------------------------------------------------------------|
| heads.py                                   | multi-head self-attention and cross-attention: from tokens to tokens    |
| score.py, score_symmetric.py, value.py     | how two tokens are compared; what is averaged                           |
| groups.py                                  | query heads that share keys and values (MQA, GQA)                       |
| mask.py, relative_position.py              | who may attend to whom; positions inside the attention                  |
| explicit.py                                | the average as it is defined, with the N x S weights in memory          |
| flash.py                                   | flash attention: the same averages, block by block                      |
| online_softmax.py, block_mask.py           | one block of it: its softmax; what its mask allows                      |
| chunked.py                                 | flash attention of a few hundred tokens, written out                    |
| ring.py                                    | ring attention: flash attention of tokens that devices share            |
| splash.py, fused.py                        | flash attention by the kernels of a TPU, and of a GPU                   |
| nan_guard.py                               | what a mask hides never reaches an average                              |

A way of computing the average is a function `(q_BHNK, k_BHSK, v_BHSV, *, mask, scale, bias, n) -> (y_BHNV, A_BHNS)`,
which is given `cap` too where there is one, and returns None for A if it never forms the weights. (A score that is no
product of q and k is for explicit.py alone, which is given `compare`.) Common to all: an
axis of heads of size one is shared by all heads, and one of G keys and values by groups of H/G queries (groups.py); a
value that a mask hides never reaches an output, even if it is NaN; a query that sees nothing gets zeros, with zero
gradient.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tfm.attention import block_mask, chunked, explicit, flash, fused, heads, mask, nan_guard, online_softmax  # noqa: F401

# isort: split
from tfm.attention import relative_position, ring, score, score_symmetric, splash, value  # noqa: F401

IMPLEMENTATIONS = {"explicit": explicit.attention, "flash": flash.attention}


def on(platform: str, dtype: Any, *, shared: bool = False, cap: float = 0.0) -> Callable:
    """Flash attention by the devices' kernels: splash on a TPU, cuDNN's for 16-bit numbers on a GPU, else ours. shared:
    of tokens that devices share, which cuDNN does not know, as it knows no cap."""
    if platform == "gpu" and not shared and not cap and dtype in (jnp.bfloat16, jnp.float16):
        return fused.attention
    return splash.attention if platform == "tpu" else flash.attention


def way(compute: Callable, *qkv: jax.Array, scale: float, cap: float = 0.0, **call: Any) -> str:
    """What `compute`, one of these, does with such queries, keys and values, and why no kernel does: for a person."""
    kernels = (splash, "the splash kernel (TPU)", "in blocks"), (fused, "cuDNN's kernel (GPU)", "by XLA")
    for module, kernel, other in kernels:
        if compute is module.attention:
            if module is splash and splash.few(*qkv[:2], axis=call.get("axis")):
                return "flash, all weights at once: few keys"
            reason = module.refused(*qkv, **call)
            return f"flash, {other}: {reason}" if reason else f"flash, {kernel}"
    if compute is not flash.attention:
        return "explicit, all weights in memory" + (": the score is no product" if call.get("compare") else "")
    return "flash, in blocks" + (": logits with a cap are for no other kernel than a TPU's" if cap else "")

"""Products of tokens with a matrix.

A matrix is stored as the papers write it: it maps its last letter to the letters before it (`W1_FD` maps D to F).
Tokens are rows. The forms of these products on each platform are in platform.py.
"""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from tfm import platform


def matmul(
    x: jax.Array,
    W: jax.Array,
    b: jax.Array | None = None,
    *,
    tensor: str | None = None,
    dtype: jnp.dtype | None = None,
) -> jax.Array:
    """Return y = W x (+ b) for every token x. Shapes: x (..., D), W (out..., D), b (out...) -> y (..., out...).

    tensor: the mesh axis over which the features of x and the columns of W are sharded; W x is then summed over it.
    dtype: of the sums and of W x; None: the dtype of x.
    """
    y = platform.matmul(x, W, dtype)
    y = checkpoint_name(y if tensor is None else jax.lax.psum(y, tensor), "product")
    return y if b is None else y + b


def logits(x: jax.Array, W: jax.Array, b: jax.Array | None = None) -> jax.Array:
    """Return W x (+ b) like `matmul`, but accumulated and returned in float32 (float64 if x is float64)."""
    return matmul(x, W, b, dtype=jnp.promote_types(x.dtype, jnp.float32))


def to_float32(x: jax.Array) -> jax.Array:
    """Return x in float32 (float64 stays float64), for statistics, logits and losses."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def matmul_heads(x_BND: jax.Array, U_HKD: jax.Array, b_HK: jax.Array | None = None) -> jax.Array:
    """Return q_BHNK = U_h x_n (+ b_h) for every head and token.

    Heads come before tokens because later products of (B, H, N, K) arrays take a CPU half as long as with (B, N, H, K)
    arrays. The bias is added before the axes are swapped: afterwards it would take 4 % of GPT-2's step on a TPU.
    """
    return matmul(x_BND, U_HKD, b_HK).swapaxes(1, 2)

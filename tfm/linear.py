"""Products of tokens with a matrix.

A matrix is stored as the papers write it: it maps its last letter to the letters before it (`W1_FD` maps D to F).
Tokens are rows. Products with matrices that have a head axis are in platform.py.
"""

import jax
import jax.numpy as jnp

from tfm import platform


def matmul(x: jax.Array, W: jax.Array, b: jax.Array | None = None, *, tensor: str | None = None) -> jax.Array:
    """Return y = W x (+ b) for every token x. Shapes: x (..., D), W (out..., D), b (out...) -> y (..., out...).

    tensor: the mesh axis over which the features of x and the columns of W are sharded; W x is then summed over it. The
    leading axes of x are flattened into rows: with three-dimensional contractions a training step takes 1.4 times as
    long on XLA:CPU. On a GPU or TPU there is no difference.
    """
    y_TO = platform.matmul_rows(x.reshape(-1, x.shape[-1]), W.reshape(-1, x.shape[-1]))
    y_TO = y_TO if tensor is None else jax.lax.psum(y_TO, tensor)
    y_TO = y_TO if b is None else y_TO + b.reshape(-1)
    return y_TO.reshape(*x.shape[:-1], *W.shape[:-1])


def logits(x: jax.Array, W: jax.Array, b: jax.Array | None = None) -> jax.Array:
    """Return W x (+ b) like `matmul`, but accumulated and returned in float32 (float64 if x is float64)."""
    y_TO = platform.matmul_rows(x.reshape(-1, x.shape[-1]), W, jnp.promote_types(x.dtype, jnp.float32))
    y = y_TO.reshape(*x.shape[:-1], W.shape[0])
    return y if b is None else y + b


def to_float32(x: jax.Array) -> jax.Array:
    """Return x in float32 (float64 stays float64), for statistics, logits and losses."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))

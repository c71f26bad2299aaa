"""The one contraction of the last axis. Every matrix is stored as the papers write it: it maps its last letter to the
letters before it (`W1_FD` maps D to F), and tokens are rows."""

import jax
import jax.numpy as jnp

from tfm import platform


def matmul(x: jax.Array, W: jax.Array, b: jax.Array | None = None, *, tensor: str | None = None) -> jax.Array:
    """Return y = W x (+ b) for every token x. Shapes: x (..., D), W (out..., D), b (out...) -> y (..., out...).

    tensor: the mesh axis whose devices each have some of the features of x, and those columns of W: W x is their sum.
    All leading axes are flattened into rows: on XLA:CPU three-dimensional contractions make the whole training step
    1.4 times slower; on a GPU or TPU it makes no difference.
    """
    y_TO = platform.matmul_rows(x.reshape(-1, x.shape[-1]), W.reshape(-1, x.shape[-1]))
    y_TO = y_TO if tensor is None else jax.lax.psum(y_TO, tensor)
    y_TO = y_TO if b is None else y_TO + b.reshape(-1)
    return y_TO.reshape(*x.shape[:-1], *W.shape[:-1])


def matmul_heads(x_BND: jax.Array, U_HKD: jax.Array, b_HK: jax.Array | None = None) -> jax.Array:
    """Return U_h x_n (+ b_h) for every head and token: q_BHNK. Heads come before tokens because products of (B, H, N,
    K) operands take about half the time of (B, N, H, K) ones on a CPU."""
    q_BNHK = platform.matmul_heads(x_BND, U_HKD)
    q_BNHK = q_BNHK if b_HK is None else q_BNHK + b_HK  # later a TPU would take 4 % longer for GPT-2's step
    return q_BNHK.swapaxes(1, 2)


def logits(x: jax.Array, W: jax.Array, b: jax.Array | None = None) -> jax.Array:
    """Return W x (+ b) like `matmul`, but summed and kept in float32 (or float64) whatever the dtype of x."""
    y_TO = platform.matmul_rows(x.reshape(-1, x.shape[-1]), W, jnp.promote_types(x.dtype, jnp.float32))
    y = y_TO.reshape(*x.shape[:-1], W.shape[0])
    return y if b is None else y + b


def to_float32(x: jax.Array) -> jax.Array:
    """Return x in float32, or in float64 if it is that already: for statistics, logits and losses."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))

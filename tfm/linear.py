"""The one contraction of the last axis. Every matrix is stored as the papers write it: it maps its last letter to the
ones before it (`W1_FD` maps D to F), and tokens are rows."""

import jax
import jax.numpy as jnp

from tfm import kernels


def rows(x: jax.Array, W: jax.Array, b: jax.Array | None = None, *, tensor: str | None = None) -> jax.Array:
    """y = W x (+ b) for every token x. Shapes: x (..., D), W (out..., D), b (out...) -> y (..., out...).

    tensor: the mesh axis whose devices each have some of the features of x, and those columns of W: W x is their sum.
    All leading axes are flattened into rows: on XLA:CPU three-dimensional contractions make the whole training step
    1.4 times slower; on a GPU it makes no difference, and on a TPU sometimes one (`tokens`).
    """
    y_TO = kernels.product(x.reshape(-1, x.shape[-1]), W.reshape(-1, x.shape[-1]))
    y_TO = y_TO if tensor is None else jax.lax.psum(y_TO, tensor)
    y_TO = y_TO if b is None else y_TO + b.reshape(-1)
    return y_TO.reshape(*x.shape[:-1], *W.shape[:-1])


def tokens(x_BND: jax.Array, W_OD: jax.Array, b_O: jax.Array | None = None, *, tensor: str | None = None) -> jax.Array:
    """As `rows`, of tokens that stay as they lie: on a TPU, of which mlp.py says when."""
    y_BNO = jnp.matmul(x_BND, W_OD.T)
    y_BNO = y_BNO if tensor is None else jax.lax.psum(y_BNO, tensor)
    return y_BNO if b_O is None else y_BNO + b_O


def answers(x: jax.Array, W: jax.Array, b: jax.Array | None = None) -> jax.Array:
    """As `rows`, but the products are added up, and stay, in float32 (or float64) whatever the dtype of x: logits."""
    y_TO = kernels.product(x.reshape(-1, x.shape[-1]), W, jnp.promote_types(x.dtype, jnp.float32))
    y = y_TO.reshape(*x.shape[:-1], W.shape[0])
    return y if b is None else y + b


def wide(x: jax.Array) -> jax.Array:
    """x in float32, or in float64 where it is that already: for statistics, logits and losses."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def heads(x_BND: jax.Array, U_HKD: jax.Array, b_HK: jax.Array | None = None) -> jax.Array:
    """U_h x_n (+ b_h) for every head and token: q_BHNK. Heads come before tokens because products of (B, H, N, K)
    operands cost about half of (B, N, H, K) ones on CPU."""
    return kernels.heads(x_BND, U_HKD, b_HK)

"""Products of tokens with a matrix, computed in the form that is fastest on each platform.

A matrix is stored as the papers write it: it maps its last letter to the letters before it (`W1_FD` maps D to F).
Tokens are rows. `jax.lax.platform_dependent` chooses the form when a program is compiled. Times on a CPU are of two
cores (Zen 4) with JAX 0.10.2; times on a TPU (v5e) are estimates by the compiler of libtpu 0.0.50.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from tfm import layout as layouts

FEW_ROWS = 32  # up to this many rows (new tokens of a few texts), copying a matrix takes longer than the product
TPU_ROWS = 8  # a TPU's matrix unit takes equally long for 1 to this many rows


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
    dtype: of the sums and of W x; None: the dtype of x. The leading axes of x are flattened into rows: with
    three-dimensional contractions a training step takes 1.4 times as long on XLA:CPU. On a GPU or TPU there is no
    difference.
    """
    x_TD, W_OD = x.reshape(-1, x.shape[-1]), W.reshape(-1, x.shape[-1])
    if len(x_TD) > FEW_ROWS:
        y_TO = jnp.matmul(x_TD, W_OD.T, preferred_element_type=dtype)
    else:
        y_TO = _multiply_few_rows(x_TD, W_OD, dtype)
    y_TO = y_TO if tensor is None else jax.lax.psum(y_TO, tensor)
    y_TO = y_TO if b is None else y_TO + b.reshape(-1)
    return y_TO.reshape(*x.shape[:-1], *W.shape[:-1])


def logits(x: jax.Array, W: jax.Array, b: jax.Array | None = None) -> jax.Array:
    """Return W x (+ b) like `matmul`, but accumulated and returned in float32 (float64 if x is float64)."""
    return matmul(x, W, b, dtype=jnp.promote_types(x.dtype, jnp.float32))


def to_float32(x: jax.Array) -> jax.Array:
    """Return x in float32 (float64 stays float64), for statistics, logits and losses."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _multiply_few_rows(x_TD: jax.Array, W_OD: jax.Array, dtype: jnp.dtype | None) -> jax.Array:
    """Return x W^T for at most FEW_ROWS rows.

    XLA:CPU copies W^T for a product x W^T, so several rows are computed as (W x^T)^T. For one row, x W^T between
    barriers copies nothing and reads W twice as fast. Without barriers XLA:CPU would fuse the product with its
    neighbours, such as the bias, and copy W^T after all.
    """

    def plain(x_TD: jax.Array, W_OD: jax.Array) -> jax.Array:
        return jnp.matmul(x_TD, W_OD.T, preferred_element_type=dtype)

    def on_cpu(x_TD: jax.Array, W_OD: jax.Array) -> jax.Array:
        if len(x_TD) > 1:
            return jnp.matmul(W_OD, x_TD.T, preferred_element_type=dtype).T
        barrier = jax.lax.optimization_barrier
        return barrier(plain(barrier(x_TD), W_OD))

    tpu = _pad_rows(plain) if len(x_TD) == 1 else plain
    return jax.lax.platform_dependent(x_TD, W_OD, cpu=on_cpu, tpu=tpu, default=plain)


def _pad_rows(function: Callable, before: int = 0, after: int = 0) -> Callable:
    """Return `function` for an x of one row: repeat the row TPU_ROWS times, and return the first row of the result.

    before, after: the axis of the rows in x and in the result. A TPU computes a single row in its vector unit, which
    takes 2 to 20 times as long as its matrix unit. A token of GPT-2's shape would take 1.56 ms instead of 0.81.
    """

    def pad_and_apply(x: jax.Array, *arrays: jax.Array) -> jax.Array:
        return jax.lax.slice_in_dim(function(jnp.repeat(x, TPU_ROWS, before), *arrays), 0, 1, axis=after)

    return pad_and_apply


def matmul_heads(x_BND: jax.Array, U_HKD: jax.Array, b_HK: jax.Array | None = None) -> jax.Array:
    """Return q_BHNK = U_h x_n (+ b_h) for every head and token.

    A CPU computes a product over rows, other platforms a contraction. A TPU's compiler lays out the contraction as the
    next operation needs it; with rows, the estimated step of configs/causal_lm.py takes 14 % longer. Heads come before
    tokens because later products of (B, H, N, K) arrays take a CPU half as long as with (B, N, H, K) arrays.
    """
    if x_BND.shape[0] * x_BND.shape[1] > FEW_ROWS:
        contraction = functools.partial(jnp.einsum, "bnd,hkd->bnhk")
        q_BNHK = choose_product(matmul, contraction, *layouts.vary_alike((x_BND, U_HKD)))
        q_BNHK = checkpoint_name(q_BNHK, "product")
    else:
        q_BNHK = matmul(x_BND, U_HKD)
    # The bias is added before the axes are swapped: afterwards it would take 4 % of GPT-2's step on a TPU.
    q_BNHK = q_BNHK if b_HK is None else q_BNHK + b_HK
    return q_BNHK.swapaxes(1, 2)


def sum_heads(y_BHNV: jax.Array, U_HDV: jax.Array) -> jax.Array:
    """Return y_BND = sum_h U_h y_{h,n}.

    A CPU computes one product of the concatenated heads (E10). For up to FEW_ROWS tokens it computes one product per
    head, which needs no transposed copy of U.
    """
    B, H, N, V = y_BHNV.shape

    def side_by_side(y_BHNV: jax.Array, U_HDV: jax.Array) -> jax.Array:
        y_TC, U_DC = y_BHNV.swapaxes(1, 2).reshape(B * N, H * V), U_HDV.swapaxes(0, 1).reshape(-1, H * V)
        return jnp.matmul(y_TC, U_DC.T).reshape(B, N, -1)

    def head_by_head(y_BHNV: jax.Array, U_HDV: jax.Array) -> jax.Array:
        return jnp.matmul(U_HDV, y_BHNV.transpose(1, 3, 0, 2).reshape(H, V, B * N)).sum(0).T.reshape(B, N, -1)

    contraction = functools.partial(jnp.einsum, "bhnv,hdv->bnd")
    cpu = head_by_head if B * N <= FEW_ROWS else side_by_side
    default = _pad_rows(contraction, 2, 1) if B * N == 1 else contraction
    return checkpoint_name(choose_product(cpu, default, *layouts.vary_alike((y_BHNV, U_HDV))), "product")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def choose_product(cpu: Callable, default: Callable, x: jax.Array, W: jax.Array) -> jax.Array:
    """Return cpu(x, W) on a CPU, default(x, W) elsewhere: two forms of one product, linear in x and in W.

    The gradient uses the same form, and saves x and W. Without custom_vjp JAX would save what either form needs.
    """
    return jax.lax.platform_dependent(x, W, cpu=cpu, default=default)


def _forward(cpu: Callable, default: Callable, x: jax.Array, W: jax.Array) -> tuple[jax.Array, tuple]:
    return choose_product(cpu, default, x, W), (x, W)


def _backward(cpu: Callable, default: Callable, operands: tuple, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    def transpose(product: Callable, x: jax.Array, W: jax.Array, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.vjp(product, x, W)[1](dy)

    forms = {"cpu": functools.partial(transpose, cpu), "default": functools.partial(transpose, default)}
    return jax.lax.platform_dependent(*operands, dy, **forms)


choose_product.defvjp(_forward, _backward)

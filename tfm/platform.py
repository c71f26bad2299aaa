"""Special cases for CPUs, GPUs and TPUs: one result, computed in the form that is fastest on each platform.

`jax.lax.platform_dependent` chooses the form when a program is compiled. Times on a CPU are of two cores (Zen 4) with
JAX 0.10.2; times on a TPU (v5e) are estimates by the compiler of libtpu 0.0.50, or 0.0.42 where it says so.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import layout as memory_layout

from tfm import layout as layouts

FEW_ROWS = 32  # up to this many rows (new tokens of a few texts), copying a matrix takes longer than the product
TPU_ROWS = 8  # a TPU's matrix unit takes equally long for 1 to this many rows
TPU_LANES = 128  # elements in a row of a TPU's vector registers
MAX_SPREAD = 128  # up to this many features, a TPU computes means with `spread_mean`
MAX_UNROLLED = 32  # up to this many sequences, a TPU writes into a cache without a loop


def matmul(x: jax.Array, W: jax.Array, dtype: jnp.dtype | None = None) -> jax.Array:
    """Return W x for every token x. Shapes: x (..., D), W (out..., D) -> (..., out...).

    dtype: of the sums and of the result; None: the dtype of x. With a dtype (logits), or on a CPU, x becomes a matrix
    with a row for each token. If x kept its axes, a training step would take 1.4 times as long on a CPU. On other
    platforms x keeps its axes, and a TPU's compiler lays out W x as the next operation needs it. With rows, the
    estimated step takes 14 % longer for configs/causal_lm.py. It takes 10 % longer for two layers of ViT-S/16, because
    196 tokens do not fill the tiles of 8 rows.
    """

    def rows(x: jax.Array, W: jax.Array) -> jax.Array:
        x_TD, W_OD = x.reshape(-1, x.shape[-1]), W.reshape(-1, W.shape[-1])
        y_TO = jnp.matmul(x_TD, W_OD.T, preferred_element_type=dtype)
        return y_TO.reshape(*x.shape[:-1], *W.shape[:-1])

    def contraction(x: jax.Array, W: jax.Array) -> jax.Array:
        return jnp.tensordot(x, W, (-1, -1))

    if x.size <= FEW_ROWS * x.shape[-1]:
        y_TO = _multiply_few_rows(x.reshape(-1, x.shape[-1]), W.reshape(-1, W.shape[-1]), dtype)
        return y_TO.reshape(*x.shape[:-1], *W.shape[:-1])
    if dtype is not None or x.ndim == W.ndim == 2:
        return rows(x, W)
    return choose_product(rows, contraction, *layouts.vary_alike((x, W)))


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
        (dx,) = jax.linear_transpose(lambda x: product(x, W), x)(dy)
        (dW,) = jax.linear_transpose(lambda W: product(x, W), W)(dy)
        return dx, dW

    forms = {"cpu": functools.partial(transpose, cpu), "default": functools.partial(transpose, default)}
    return jax.lax.platform_dependent(*operands, dy, **forms)


choose_product.defvjp(_forward, _backward)


def spread_mean(x: jax.Array) -> jax.Array:
    """Return the mean over the last axis, repeated along this axis, as a product with a matrix of ones.

    For up to MAX_SPREAD features a TPU takes a third of the time of a sum and a broadcast. With sums, the estimated
    step takes 15 % longer for configs/vit.py and 24 % longer for configs/causal_lm.py. The ones are exact in bfloat16,
    so only x needs the highest precision.
    """
    ones_DD = jnp.ones_like(x, shape=(x.shape[-1],) * 2)
    return jnp.matmul(x * (1 / x.shape[-1]), ones_DD, precision=("highest", "default"))


def write_cache(cache_BHSK: jax.Array, new_BHNK: jax.Array, n: jax.Array) -> jax.Array:
    """Return the cache with new tokens written at positions n, (N,) or (B, N).

    Tokens past the end of the cache are dropped, but a TPU writes a single such token to the last position. On a CPU, a
    loop writes one token per sequence in place; otherwise XLA:CPU would fuse the write with the next product and copy
    the cache. On a TPU, the layout constraint puts positions along the lanes. Otherwise XLA would store the heads of a
    position next to each other, in up to 2.7 times the memory, and copy the cache around every loop. A step of 8 texts
    takes 1.2 ms instead of 9.0 (GPT-2 124 M, 1,024 positions).
    """
    B, _, N, _ = new_BHNK.shape
    n_BN = jnp.broadcast_to(n, (B, N))
    new_BHNK = new_BHNK.astype(cache_BHSK.dtype)

    def scatter(cache_BHSK: jax.Array) -> jax.Array:
        return cache_BHSK.at[jnp.arange(B)[:, None], :, n_BN].set(new_BHNK.swapaxes(1, 2))

    def sequence_by_sequence(cache_BHSK: jax.Array) -> jax.Array:
        fits_B = n_BN[:, 0] < cache_BHSK.shape[2]
        fitting_B = jnp.nonzero(fits_B, size=B)[0]  # the sequences whose position is inside the cache

        def write(i: jax.Array, cache_BHSK: jax.Array) -> jax.Array:
            b = fitting_B[i]
            new_1HNK = jax.lax.dynamic_slice_in_dim(new_BHNK, b, 1)
            return jax.lax.dynamic_update_slice(cache_BHSK, new_1HNK, (b, 0, n_BN[b, 0], 0))

        return jax.lax.fori_loop(0, jnp.sum(fits_B), write, cache_BHSK)

    def unrolled(cache_BHSK: jax.Array) -> jax.Array:
        for b in range(B):
            start = b, 0, n_BN[b, 0], 0
            cache_BHSK = jax.lax.dynamic_update_slice(cache_BHSK, new_BHNK[b : b + 1], start)
        major_to_minor = (0, 1, 3, 2) if cache_BHSK.shape[3] < TPU_LANES else (0, 1, 2, 3)
        return memory_layout.with_layout_constraint(cache_BHSK, memory_layout.Layout(major_to_minor))

    if N > 1:
        return scatter(cache_BHSK)
    tpu = unrolled if B <= MAX_UNROLLED else scatter  # the unrolled program grows with the number of sequences
    return jax.lax.platform_dependent(cache_BHSK, cpu=sequence_by_sequence, tpu=tpu, default=scatter)

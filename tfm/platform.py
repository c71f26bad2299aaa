"""What CPUs and TPUs need to be fast: the same sums, written as the compiler of that platform likes them.

`jax.lax.platform_dependent` chooses when a program is compiled, so nothing of this reaches other devices. Times are of
two CPU cores (Zen 4) with JAX 0.10.2; times of a TPU (v5e) are estimates by the compiler of libtpu 0.0.50.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import layout as memory_layout

FEW = 32  # rows, such as the newest tokens of some texts: copying a matrix takes longer than multiplying by it
ROWS = 8  # of which a TPU's matrix unit takes no longer than of one
LANES = 128  # of a TPU
SPREAD = 128  # features up to which a TPU forms means by a product (`spread_mean`)


def matmul_rows(x_TD: jax.Array, W_OD: jax.Array, dtype: jnp.dtype | None = None) -> jax.Array:
    """Return x W^T. A CPU computes few rows as (W x^T)^T, because it copies a W^T on the right for every product.

    For a single row x W^T reads W twice as fast. The barriers keep XLA:CPU from merging the product with what comes
    before and after, such as the bias: then it would copy W^T after all.
    """

    def plain(x_TD: jax.Array, W_OD: jax.Array) -> jax.Array:
        return jnp.matmul(x_TD, W_OD.T, preferred_element_type=dtype)

    def few(x_TD: jax.Array, W_OD: jax.Array) -> jax.Array:
        if len(x_TD) > 1:
            return jnp.matmul(W_OD, x_TD.T, preferred_element_type=dtype).T
        barrier = jax.lax.optimization_barrier
        return barrier(plain(barrier(x_TD), W_OD))

    if len(x_TD) > FEW:
        return plain(x_TD, W_OD)
    tpu = pad_rows(plain) if len(x_TD) == 1 else plain
    return jax.lax.platform_dependent(x_TD, W_OD, cpu=few, tpu=tpu, default=plain)


def pad_rows(function: Callable, before: int = 0, after: int = 0) -> Callable:
    """Return function(x, ...) for x with one row, on the axis `before`, computed as the first of ROWS equal rows, on
    the axis `after` of the result. A single row is no work for a TPU's matrix unit but for its vector unit, which takes
    2 to 20 times as long: without it a token of GPT-2's shape takes 1.56 instead of 0.81 ms.
    """

    def padded(x: jax.Array, *more: jax.Array) -> jax.Array:
        return jax.lax.slice_in_dim(function(jnp.repeat(x, ROWS, before), *more), 0, 1, axis=after)

    return padded


def matmul_heads(x_BND: jax.Array, U_HKD: jax.Array) -> jax.Array:
    """Return U_h x_n for every token and head, (B, N, H, K): on a CPU as one product of rows.

    A TPU's compiler lays out a contraction as what follows needs it: with rows the estimated step of
    configs/causal_lm.py takes 14 % longer.
    """
    (B, N, D), (H, K) = x_BND.shape, U_HKD.shape[:2]

    def rows(x_BND: jax.Array, U_HKD: jax.Array) -> jax.Array:
        return jnp.matmul(x_BND.reshape(-1, D), U_HKD.reshape(-1, D).T).reshape(B, N, H, K)

    def contraction(x_BND: jax.Array, U_HKD: jax.Array) -> jax.Array:
        return jnp.einsum("bnd,hkd->bnhk", x_BND, U_HKD)

    if B * N > FEW:
        return choose_product(rows, contraction, x_BND, U_HKD)
    return matmul_rows(x_BND.reshape(-1, D), U_HKD.reshape(-1, D)).reshape(B, N, H, K)


def sum_heads(y_BHNV: jax.Array, U_HDV: jax.Array) -> jax.Array:
    """Return sum_h U_h y_{h,n}, (B, N, D): on a CPU as one product of the heads side by side (E10), or for few tokens
    head by head, with each U_h as it is stored."""
    B, H, N, V = y_BHNV.shape

    def side_by_side(y_BHNV: jax.Array, U_HDV: jax.Array) -> jax.Array:
        y_TC, U_DC = y_BHNV.swapaxes(1, 2).reshape(B * N, H * V), U_HDV.swapaxes(0, 1).reshape(-1, H * V)
        return jnp.matmul(y_TC, U_DC.T).reshape(B, N, -1)

    def head_by_head(y_BHNV: jax.Array, U_HDV: jax.Array) -> jax.Array:
        return jnp.matmul(U_HDV, y_BHNV.transpose(1, 3, 0, 2).reshape(H, V, B * N)).sum(0).T.reshape(B, N, -1)

    def contraction(y_BHNV: jax.Array, U_HDV: jax.Array) -> jax.Array:
        return jnp.einsum("bhnv,hdv->bnd", y_BHNV, U_HDV)

    default = pad_rows(contraction, 2, 1) if B * N == 1 else contraction
    return choose_product(head_by_head if B * N <= FEW else side_by_side, default, y_BHNV, U_HDV)


def choose_product(cpu: Callable, default: Callable, x: jax.Array, W: jax.Array) -> jax.Array:
    """Return cpu(x, W) on a CPU, default(x, W) elsewhere: two ways to write one product, linear in x and in W.

    The gradient is chosen too, and only x and W are kept for it: of a plain choice JAX would keep what either needs.
    """
    zero = sum(jnp.zeros_like(one, jnp.int32, ()) for one in (x, W)).astype(x.dtype)  # of both types in shard_map
    return checkpoint_name(_choose(cpu, default, x + zero, W + zero.astype(W.dtype)), "product")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _choose(cpu: Callable, default: Callable, x: jax.Array, W: jax.Array) -> jax.Array:
    return jax.lax.platform_dependent(x, W, cpu=cpu, default=default)


def _forward(cpu: Callable, default: Callable, x: jax.Array, W: jax.Array) -> tuple[jax.Array, tuple]:
    return _choose(cpu, default, x, W), (x, W)


def _backward(cpu: Callable, default: Callable, saved: tuple, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    def transpose(function: Callable, x: jax.Array, W: jax.Array, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
        (dx,) = jax.linear_transpose(lambda x: function(x, W), x)(dy)
        (dW,) = jax.linear_transpose(lambda W: function(x, W), W)(dy)
        return dx, dW

    ways = {"cpu": functools.partial(transpose, cpu), "default": functools.partial(transpose, default)}
    return jax.lax.platform_dependent(*saved, dy, **ways)


_choose.defvjp(_forward, _backward)


def spread_mean(x: jax.Array) -> jax.Array:
    """Return the mean over the last axis, repeated along it, as a product with a matrix of ones.

    Up to SPREAD features a TPU takes a third of the time of a sum that is spread again. Without it the estimated step
    of configs/vit.py takes 15 % longer, that of configs/causal_lm.py 24 %. The ones are exact in 16 bits; x is not
    narrowed.
    """
    ones_DD = jnp.ones_like(x, shape=(x.shape[-1],) * 2)
    return jnp.matmul(x * (1 / x.shape[-1]), ones_DD, precision=("highest", "default"))


def write_cache(cache_BHSK: jax.Array, new_BHNK: jax.Array, n: jax.Array) -> jax.Array:
    """Return the cache with the new tokens at positions n, (N,) or (B, N). Positions past its end are not written
    (a TPU writes a single token there to the last place).

    A CPU writes one token of each sequence in place; merged with the product that follows, XLA:CPU copies the whole
    cache. A TPU would keep the heads of a position side by side, in up to 2.7 times the memory, and copy the cache
    around every loop. With positions along the lanes it does neither: 1.2 ms for a step of 8 texts instead of 9.0
    (GPT-2's 124 M, 1,024 positions).
    """
    B, _, N, _ = new_BHNK.shape
    n_BN = jnp.broadcast_to(n, (B, N))
    new_BHNK = new_BHNK.astype(cache_BHSK.dtype)

    def scatter(cache_BHSK: jax.Array) -> jax.Array:
        return cache_BHSK.at[jnp.arange(B)[:, None], :, n_BN].set(new_BHNK.swapaxes(1, 2))

    def sequence_by_sequence(cache_BHSK: jax.Array) -> jax.Array:
        fits_B = n_BN[:, 0] < cache_BHSK.shape[2]
        inside_B = jnp.nonzero(fits_B, size=B)[0]

        def put(i: jax.Array, cache_BHSK: jax.Array) -> jax.Array:
            b = inside_B[i]
            new_1HNK = jax.lax.dynamic_slice_in_dim(new_BHNK, b, 1)
            return jax.lax.dynamic_update_slice(cache_BHSK, new_1HNK, (b, 0, n_BN[b, 0], 0))

        return jax.lax.fori_loop(0, jnp.sum(fits_B), put, cache_BHSK)

    def unrolled(cache_BHSK: jax.Array) -> jax.Array:
        for b in range(B):
            place = b, 0, n_BN[b, 0], 0
            cache_BHSK = jax.lax.dynamic_update_slice(cache_BHSK, new_BHNK[b : b + 1], place)
        major_to_minor = (0, 1, 3, 2) if cache_BHSK.shape[3] < LANES else (0, 1, 2, 3)
        return memory_layout.with_layout_constraint(cache_BHSK, memory_layout.Layout(major_to_minor))

    if N > 1:
        return scatter(cache_BHSK)
    tpu = unrolled if B <= FEW else scatter  # a long program otherwise
    return jax.lax.platform_dependent(cache_BHSK, cpu=sequence_by_sequence, tpu=tpu, default=scatter)

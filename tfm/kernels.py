"""What is written in another way for CPUs, and for the newest words on TPUs: the same sums, in the order that XLA is
fast at there.

`jax.lax.platform_dependent` chooses when a program is made for its devices, so nothing of this reaches others. Each
with what was measured, on two cores (Zen 4) with JAX 0.10.2; of a TPU (v5e) what the compiler of libtpu 0.0.50
estimates for a step of GPT-2's 124 M and a cache of 1,024 places.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import layout

FEW = 32  # rows, such as the newest words of some texts: copying a matrix would take longer than multiplying by it
ROWS = 8  # of which a TPU's matrix unit takes no longer than of one
LANES = 128  # of a TPU


def product(x_TD: jax.Array, W_OD: jax.Array, dtype: Any = None) -> jax.Array:
    """x W^T; of few rows as (W x^T)^T, because W^T on the right is copied for every product. One row alone is x W^T
    again, which reads W twice as fast as W x^T does. The barriers keep XLA:CPU from merging it with what comes before
    and after, such as the bias: then it would copy W^T after all."""

    def plain(x_TD: jax.Array, W_OD: jax.Array) -> jax.Array:
        return jnp.matmul(x_TD, W_OD.T, preferred_element_type=dtype)

    def few(x_TD: jax.Array, W_OD: jax.Array) -> jax.Array:
        if len(x_TD) > 1:
            return jnp.matmul(W_OD, x_TD.T, preferred_element_type=dtype).T
        alone = jax.lax.optimization_barrier
        return alone(plain(alone(x_TD), W_OD))

    if len(x_TD) > FEW:
        return plain(x_TD, W_OD)
    tpu = not_alone(plain) if len(x_TD) == 1 else plain
    return jax.lax.platform_dependent(x_TD, W_OD, cpu=few, tpu=tpu, default=plain)


def not_alone(way: Callable, before: int = 0, after: int = 0) -> Callable:
    """way(x, ...) of x with one row, on the axis `before`, and in what comes out `after`, as that of ROWS equal ones:
    one alone is no work for a TPU's matrix unit but for its vector unit, which takes 2 to 20 times as long."""

    def several(x: jax.Array, *more: jax.Array) -> Any:
        found = way(jnp.repeat(x, ROWS, before), *more)
        return jax.tree.map(lambda y: jax.lax.slice_in_dim(y, 0, 1, axis=after), found)

    return several


def heads(x_BND: jax.Array, U_HKD: jax.Array, b_HK: jax.Array | None = None) -> jax.Array:
    """q_{h,n} = U_h x_n (+ b_h): (B, H, N, K). On a CPU as one product of rows: contractions of three axes make a
    training step 1.4 times slower. A TPU's compiler lays out a contraction as what follows needs it (see `chosen`)."""
    (B, N, D), (H, K) = x_BND.shape, U_HKD.shape[:2]

    def rows(x_BND: jax.Array, U_HKD: jax.Array) -> jax.Array:
        return product(x_BND.reshape(-1, D), U_HKD.reshape(-1, D)).reshape(B, N, H, K).swapaxes(1, 2)

    def contraction(x_BND: jax.Array, U_HKD: jax.Array) -> jax.Array:
        return jnp.einsum("bnd,hkd->bhnk", x_BND, U_HKD)

    few = B * N <= FEW
    q_BHNK = rows(x_BND, U_HKD) if few else chosen(rows, contraction, x_BND, U_HKD)
    if few or b_HK is None:
        return q_BHNK if b_HK is None else q_BHNK + b_HK[:, None]
    return _plus(q_BHNK, b_HK + jnp.zeros_like(q_BHNK, shape=()))


@jax.custom_vjp
def _plus(q_BHNK: jax.Array, b_HK: jax.Array) -> jax.Array:
    return q_BHNK + b_HK[:, None]


def _plus_backward(_: None, dq_BHNK: jax.Array) -> tuple[jax.Array, jax.Array]:
    """db_h = sum_n dq_{h,n}. A TPU's matrix units, with eight rows of ones (one row would be no product to the
    compiler), take an eighth of the estimated time in which it adds up the kernel's heads, 12 x 0.12 ms of GPT-2's."""

    def product(dq_BHNK: jax.Array) -> jax.Array:
        ones_8BN = jax.lax.optimization_barrier(jnp.ones_like(dq_BHNK, shape=(8, len(dq_BHNK), dq_BHNK.shape[2])))
        return jnp.einsum("rbn,bhnk->rhk", ones_8BN, dq_BHNK)[0]

    return dq_BHNK, jax.lax.platform_dependent(dq_BHNK, cpu=lambda dq_BHNK: dq_BHNK.sum((0, 2)), default=product)


_plus.defvjp(lambda q_BHNK, b_HK: (_plus(q_BHNK, b_HK), None), _plus_backward)


def combined(y_BHNV: jax.Array, U_HDV: jax.Array) -> jax.Array:
    """sum_h U_h y_{h,n}: (B, N, D). On a CPU of few tokens each U_h as it is stored, else all side by side in one
    product (E10); elsewhere as the compiler likes."""
    B, H, N, V = y_BHNV.shape

    def side_by_side(y_BHNV: jax.Array, U_HDV: jax.Array) -> jax.Array:
        y_TC, U_DC = y_BHNV.swapaxes(1, 2).reshape(B * N, H * V), U_HDV.swapaxes(0, 1).reshape(-1, H * V)
        return product(y_TC, U_DC).reshape(B, N, -1)

    def one_by_one(y_BHNV: jax.Array, U_HDV: jax.Array) -> jax.Array:
        return jnp.matmul(U_HDV, y_BHNV.transpose(1, 3, 0, 2).reshape(H, V, B * N)).sum(0).T.reshape(B, N, -1)

    def contraction(y_BHNV: jax.Array, U_HDV: jax.Array) -> jax.Array:
        return jnp.einsum("bhnv,hdv->bnd", y_BHNV, U_HDV)

    default = not_alone(contraction, 2, 1) if B * N == 1 else contraction
    return chosen(one_by_one if B * N <= FEW else side_by_side, default, y_BHNV, U_HDV)


def chosen(cpu: Callable, default: Callable, x: jax.Array, W: jax.Array) -> jax.Array:
    """cpu(x, W) on a CPU, default(x, W) elsewhere: two ways of the same product, linear in x and in W. The gradient is
    chosen too, and x and W are all that is kept for it: of a plain choice JAX would keep what either way needs."""
    zero = sum(jnp.zeros_like(one, jnp.int32, ()) for one in (x, W)).astype(x.dtype)  # of both their types in shard_map
    return checkpoint_name(_chosen(cpu, default, x + zero, W + zero.astype(W.dtype)), "product")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _chosen(cpu: Callable, default: Callable, x: jax.Array, W: jax.Array) -> jax.Array:
    return jax.lax.platform_dependent(x, W, cpu=cpu, default=default)


def _forward(cpu: Callable, default: Callable, x: jax.Array, W: jax.Array) -> tuple[jax.Array, tuple]:
    return _chosen(cpu, default, x, W), (x, W)


def _backward(cpu: Callable, default: Callable, saved: tuple, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    def gradient(way: Callable, x: jax.Array, W: jax.Array, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
        (dx,) = jax.linear_transpose(lambda x: way(x, W), x)(dy)
        (dW,) = jax.linear_transpose(lambda W: way(x, W), W)(dy)
        return dx, dW

    ways = {"cpu": functools.partial(gradient, cpu), "default": functools.partial(gradient, default)}
    return jax.lax.platform_dependent(*saved, dy, **ways)


_chosen.defvjp(_forward, _backward)


def write(cache_BHSK: jax.Array, new_BHNK: jax.Array, n: jax.Array) -> jax.Array:
    """The cache with the new tokens at their places n, (N,) or (B, N); places beyond its end are not written (on a TPU
    the last one is, by a single token). One token of each sequence is put there by itself, in place: XLA:CPU copies the
    whole cache where it merges a write with the product that follows. A TPU would keep the cache with the heads of a
    place side by side, in up to 2.7 times the memory, and copy it before and after every loop: with places along the
    lanes, where a head has fewer features, it does neither (8 texts: 9.0 ms a step with, 1.2 without)."""
    B, _, N, _ = new_BHNK.shape
    n_BN = jnp.broadcast_to(n, (B, N))
    new_BHNK = new_BHNK.astype(cache_BHSK.dtype)

    def at_once(cache_BHSK: jax.Array) -> jax.Array:
        return cache_BHSK.at[jnp.arange(B)[:, None], :, n_BN].set(new_BHNK.swapaxes(1, 2))

    def one_by_one(cache_BHSK: jax.Array) -> jax.Array:
        fits_B = n_BN[:, 0] < cache_BHSK.shape[2]
        inside_B = jnp.nonzero(fits_B, size=B)[0]

        def put(i: jax.Array, cache_BHSK: jax.Array) -> jax.Array:
            b = inside_B[i]
            new_1HNK = jax.lax.dynamic_slice_in_dim(new_BHNK, b, 1)
            return jax.lax.dynamic_update_slice(cache_BHSK, new_1HNK, (b, 0, n_BN[b, 0], 0))

        return jax.lax.fori_loop(0, jnp.sum(fits_B), put, cache_BHSK)

    def written_out(cache_BHSK: jax.Array) -> jax.Array:
        for b in range(B):
            here = b, 0, n_BN[b, 0], 0
            cache_BHSK = jax.lax.dynamic_update_slice(cache_BHSK, new_BHNK[b : b + 1], here)
        major_to_minor = (0, 1, 3, 2) if cache_BHSK.shape[3] < LANES else (0, 1, 2, 3)
        return layout.with_layout_constraint(cache_BHSK, layout.Layout(major_to_minor))

    if N > 1:
        return at_once(cache_BHSK)
    tpu = written_out if B <= FEW else at_once  # or the program would be long
    return jax.lax.platform_dependent(cache_BHSK, cpu=one_by_one, tpu=tpu, default=at_once)


def few_queries(plain: Callable, by_keys: Callable, *qkv: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(y, A) of few queries and many keys as by_keys(*qkv), where keys and values are read once, without a copy. Only
    where an answer is not finite are they searched for what the mask hides, by plain(*qkv). A GPU would wait for the
    host at such a question, and copies nothing anyway."""

    def searched(way: Callable, *qkv: jax.Array) -> tuple[jax.Array, jax.Array]:
        y_BHNV, A_BHNS = way(*qkv)
        return jax.lax.cond(jnp.isfinite(y_BHNV).all(), lambda: y_BHNV, lambda: plain(*qkv)[0]), A_BHNS

    several = not_alone(by_keys, 2, 2) if qkv[0].shape[2] == 1 else by_keys
    cpu, tpu = (functools.partial(searched, way) for way in (by_keys, several))
    return jax.lax.platform_dependent(*qkv, cpu=cpu, tpu=tpu, default=plain)


def after(x: jax.Array, y: jax.Array) -> jax.Array:
    """The whole numbers x >= 0, computed behind y. Of two collectives that do not wait for each other, the devices of a
    CPU may begin either, and hang."""

    def behind(x: jax.Array, y: jax.Array) -> jax.Array:
        at_most_zero = (y.ravel()[0] != 0).astype(x.dtype) - 1  # which the compiler cannot know before it has y
        return jnp.maximum(x, at_most_zero)

    return jax.lax.platform_dependent(x, y, cpu=behind, default=lambda x, y: x)

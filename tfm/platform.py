"""Special cases for CPUs, GPUs and TPUs: the same sums, written in the form that each compiler makes fast.

`jax.lax.platform_dependent` chooses when a program is compiled, so no form reaches the devices of another platform.
Times on a CPU are of two cores (Zen 4) with JAX 0.10.2; times on a TPU (v5e) are estimates by the compiler of libtpu
0.0.50.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import layout as memory_layout

FEW = 32  # rows, such as the newest tokens of some texts, for which copying a matrix takes longer than the product
ROWS = 8  # a TPU's matrix unit takes as long for one row as for so many
LANES = 128  # of a TPU
SPREAD = 128  # features up to which a TPU computes means by a product (`spread_mean`)


def matmul_rows(x_TD: jax.Array, W_OD: jax.Array, dtype: jnp.dtype | None = None) -> jax.Array:
    """Return x W^T. A CPU computes few rows as (W x^T)^T, because it copies a W^T on the right for every product.

    For a single row x W^T reads W twice as fast. The barriers keep XLA:CPU from merging the product with the operations
    before and after it, such as adding the bias: then it would copy W^T after all.
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
    """Return `function` for an x with one row, computed as the first of ROWS equal rows.

    before, after: the axis of the rows in x and in the result. A TPU computes a single row in its vector unit, which
    takes 2 to 20 times as long as its matrix unit: a token of GPT-2's shape would take 1.56 ms instead of 0.81.
    """

    def padded(x: jax.Array, *arrays: jax.Array) -> jax.Array:
        return jax.lax.slice_in_dim(function(jnp.repeat(x, ROWS, before), *arrays), 0, 1, axis=after)

    return padded


def matmul_heads(x_BND: jax.Array, U_HKD: jax.Array, b_HK: jax.Array | None = None) -> jax.Array:
    """Return q_BHNK = U_h x_n (+ b_h) for every head and token.

    A CPU computes one product of rows. A TPU's compiler lays out a contraction as the next operation needs it: with
    rows the estimated step of configs/causal_lm.py takes 14 % longer. Heads come before tokens because products of
    (B, H, N, K) operands take about half the time of (B, N, H, K) ones on a CPU.
    """
    (B, N, D), (H, K) = x_BND.shape, U_HKD.shape[:2]

    def rows(x_BND: jax.Array, U_HKD: jax.Array) -> jax.Array:
        return jnp.matmul(x_BND.reshape(-1, D), U_HKD.reshape(-1, D).T).reshape(B, N, H, K)

    def contraction(x_BND: jax.Array, U_HKD: jax.Array) -> jax.Array:
        return jnp.einsum("bnd,hkd->bnhk", x_BND, U_HKD)

    if B * N > FEW:
        q_BNHK = choose_product(rows, contraction, *vary_alike(x_BND, U_HKD))
        q_BNHK = checkpoint_name(q_BNHK, "product")
    else:
        q_BNHK = matmul_rows(x_BND.reshape(-1, D), U_HKD.reshape(-1, D)).reshape(B, N, H, K)
    # Before the swap: after it the bias takes 4 % of GPT-2's step on a TPU.
    q_BNHK = q_BNHK if b_HK is None else q_BNHK + b_HK
    return q_BNHK.swapaxes(1, 2)


def sum_heads(y_BHNV: jax.Array, U_HDV: jax.Array) -> jax.Array:
    """Return y_BND = sum_h U_h y_{h,n}.

    A CPU computes one product of the heads side by side (E10), or, for few tokens, one for each head with U_h as it is
    stored.
    """
    B, H, N, V = y_BHNV.shape

    def side_by_side(y_BHNV: jax.Array, U_HDV: jax.Array) -> jax.Array:
        y_TC, U_DC = y_BHNV.swapaxes(1, 2).reshape(B * N, H * V), U_HDV.swapaxes(0, 1).reshape(-1, H * V)
        return jnp.matmul(y_TC, U_DC.T).reshape(B, N, -1)

    def head_by_head(y_BHNV: jax.Array, U_HDV: jax.Array) -> jax.Array:
        return jnp.matmul(U_HDV, y_BHNV.transpose(1, 3, 0, 2).reshape(H, V, B * N)).sum(0).T.reshape(B, N, -1)

    def contraction(y_BHNV: jax.Array, U_HDV: jax.Array) -> jax.Array:
        return jnp.einsum("bhnv,hdv->bnd", y_BHNV, U_HDV)

    cpu = head_by_head if B * N <= FEW else side_by_side
    default = pad_rows(contraction, 2, 1) if B * N == 1 else contraction
    return checkpoint_name(choose_product(cpu, default, *vary_alike(y_BHNV, U_HDV)), "product")


def vary_alike(x: jax.Array, W: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return x and W, both varying over the mesh axes over which either varies (inside shard_map)."""
    zero = (jnp.zeros_like(x, jnp.int32, ()) + jnp.zeros_like(W, jnp.int32, ())).astype(x.dtype)
    return x + zero, W + zero.astype(W.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def choose_product(cpu: Callable, default: Callable, x: jax.Array, W: jax.Array) -> jax.Array:
    """Return cpu(x, W) on a CPU, default(x, W) elsewhere: two forms of one product, linear in x and in W.

    The gradient is chosen as well, and saves only x and W: JAX would save what the gradient of either form needs.
    """
    return jax.lax.platform_dependent(x, W, cpu=cpu, default=default)


def _forward(cpu: Callable, default: Callable, x: jax.Array, W: jax.Array) -> tuple[jax.Array, tuple]:
    return choose_product(cpu, default, x, W), (x, W)


def _backward(cpu: Callable, default: Callable, saved: tuple, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    def transpose(product: Callable, x: jax.Array, W: jax.Array, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
        (dx,) = jax.linear_transpose(lambda x: product(x, W), x)(dy)
        (dW,) = jax.linear_transpose(lambda W: product(x, W), W)(dy)
        return dx, dW

    forms = {"cpu": functools.partial(transpose, cpu), "default": functools.partial(transpose, default)}
    return jax.lax.platform_dependent(*saved, dy, **forms)


choose_product.defvjp(_forward, _backward)


def spread_mean(x: jax.Array) -> jax.Array:
    """Return the mean over the last axis, repeated along it, as a product with a matrix of ones.

    For up to SPREAD features a TPU takes a third of the time of a sum that is broadcast again. Without it the estimated
    step of configs/vit.py takes 15 % longer, that of configs/causal_lm.py 24 %. The ones are exact in 16 bits; x keeps
    its precision.
    """
    ones_DD = jnp.ones_like(x, shape=(x.shape[-1],) * 2)
    return jnp.matmul(x * (1 / x.shape[-1]), ones_DD, precision=("highest", "default"))


def write_cache(cache_BHSK: jax.Array, new_BHNK: jax.Array, n: jax.Array) -> jax.Array:
    """Return the cache with the new tokens at positions n, (N,) or (B, N). Positions past its end are not written
    (a TPU writes a single token there to the last position).

    A CPU writes one token of each sequence in place; merged with the next product, XLA:CPU would copy the whole cache.
    A TPU would store the heads of a position side by side, in up to 2.7 times the memory, and copy the cache around
    every loop. With positions along the lanes it does neither: a step of 8 texts takes 1.2 ms instead of 9.0 (GPT-2's
    124 M, 1,024 positions).
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
    tpu = unrolled if B <= FEW else scatter  # unrolled, many sequences make a long program
    return jax.lax.platform_dependent(cache_BHSK, cpu=sequence_by_sequence, tpu=tpu, default=scatter)

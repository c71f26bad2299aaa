"""What CPUs and TPUs need to be fast: the same sums, written as the compiler of that platform likes them.

`jax.lax.platform_dependent` chooses when a program is compiled, so nothing of this reaches other devices. Times are of
two CPU cores (Zen 4) with JAX 0.10.2; times of a TPU (v5e) are estimates by the compiler of libtpu 0.0.50.
"""

import jax
import jax.numpy as jnp
from jax.experimental import layout as memory_layout

FEW = 32  # rows, such as the newest tokens of some texts: copying a matrix takes longer than multiplying by it
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
    return jax.lax.platform_dependent(x_TD, W_OD, cpu=few, default=plain)


def sum_heads(y_BHNV: jax.Array, U_HDV: jax.Array) -> jax.Array:
    """Return sum_h U_h y_{h,n}, (B, N, D), as one product of the heads side by side (E10).

    A CPU computes few tokens head by head, with each U_h as it is stored.
    """
    B, H, N, V = y_BHNV.shape

    def side_by_side(y_BHNV: jax.Array, U_HDV: jax.Array) -> jax.Array:
        y_TC, U_DC = y_BHNV.swapaxes(1, 2).reshape(B * N, H * V), U_HDV.swapaxes(0, 1).reshape(-1, H * V)
        return jnp.matmul(y_TC, U_DC.T).reshape(B, N, -1)

    def head_by_head(y_BHNV: jax.Array, U_HDV: jax.Array) -> jax.Array:
        return jnp.matmul(U_HDV, y_BHNV.transpose(1, 3, 0, 2).reshape(H, V, B * N)).sum(0).T.reshape(B, N, -1)

    if B * N > FEW:
        return side_by_side(y_BHNV, U_HDV)
    return jax.lax.platform_dependent(y_BHNV, U_HDV, cpu=head_by_head, default=side_by_side)


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

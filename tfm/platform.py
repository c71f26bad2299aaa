"""Special cases for TPUs and CPUs that are not products with a matrix of parameters (linear.py).

`jax.lax.platform_dependent` chooses the form when a program is compiled. Times on a TPU (v5e) are estimates by the
compiler of libtpu 0.0.50.
"""

import jax
import jax.numpy as jnp
from jax.experimental import layout as memory_layout

TPU_LANES = 128  # elements in a row of a TPU's vector registers
MAX_SPREAD = 128  # up to this many features, a TPU computes means with `spread_mean`
MAX_UNROLLED = 32  # up to this many sequences, a TPU writes into a cache without a loop


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

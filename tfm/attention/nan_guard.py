"""What a mask hides must not reach an average even if it is NaN: a weight of zero does not keep it out (0 * NaN = NaN).
Keys that are not finite are replaced before the average, and queries that were allowed to see one get NaN after it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from tfm import kernels
from tfm.attention import block_mask, fused


def guarded(compute: Callable, *, keys: int = 512, platform: str = "") -> Callable:
    """`compute`, one of attention.IMPLEMENTATIONS or the like, behind the guard. Without a mask nothing is hidden.

    The mask is asked only where a key is not finite, and of more keys than `keys` block by block. A TPU or GPU is
    always asked of fewer: it has the time, and JAX 0.12 takes types for wrong where a vmap of such a choice stands
    inside shard_map.
    """

    def attention(q_BHNK, k_BHSK, v_BHSV, *, mask, n=None, **call: Any) -> tuple[jax.Array, jax.Array | None]:
        if mask is None:
            return compute(q_BHNK, k_BHSK, v_BHSV, mask=None, n=n, **call)
        sound_BS = _sound(k_BHSK, platform) & _sound(v_BHSV, platform)
        sound_BS = checkpoint_name(sound_BS, "attention")
        k_BHSK, v_BHSV = _finite(k_BHSK), _finite(v_BHSV)
        y_BHNV, A_BHNS = compute(q_BHNK, k_BHSK, v_BHSV, mask=mask, n=n, **call)
        if call.get("axis") is not None:
            sound_BS = kernels.after(sound_BS + block_mask.zero(y_BHNV), y_BHNV) > 0
        if A_BHNS is None and getattr(compute, "__wrapped__", compute) is not fused.attention:
            hit_BN = _hit(mask, n, sound_BS, N=q_BHNK.shape[2], keys=keys, axis=call.get("axis"), platform=platform)
        else:  # who forms all weights, or asks a kernel for them, has formed the whole mask too
            N, S = q_BHNK.shape[2], k_BHSK.shape[2]
            hit_BN = (mask(jnp.arange(S - N, S) if n is None else n, jnp.arange(S)) & ~sound_BS[:, None]).any(-1)
        return jnp.where(hit_BN[:, None, :, None], jnp.nan, y_BHNV), A_BHNS

    return attention


def _sound(x_BHSK: jax.Array, platform: str) -> jax.Array:
    """Which keys are finite, (B, S). A TPU's matrix units, with eight rows of ones (one would be no product to the
    compiler), find those that are not in a tenth of the estimated time of a reduction over heads and features."""
    if platform != "tpu":
        return jnp.isfinite(x_BHSK).all((1, 3))
    wrong_BHSK = (~jnp.isfinite(x_BHSK)).astype(jnp.bfloat16)
    ones_8HK = jax.lax.optimization_barrier(jnp.ones_like(wrong_BHSK, shape=(8, *x_BHSK.shape[1::2])))
    return jnp.einsum("rhk,bhsk->bsr", ones_8HK, wrong_BHSK)[..., 0] == 0


@jax.custom_jvp
def _finite(x: jax.Array) -> jax.Array:
    """x with 0 for what is not finite. Its gradient is that of x, as no query has one for such a key: those that see it
    are NaN, and the weight of the others is 0."""
    return jnp.where(jnp.isfinite(x), x, 0)


_finite.defjvps(lambda dx, y, x: dx)


def _hit(mask, n, sound_BS: jax.Array, *, N: int, keys: int, axis: str | None, platform: str) -> jax.Array:
    """The queries allowed to see a key that is not sound, (B, N); axis: the keys are those of all its devices."""
    if axis is not None:
        zero = block_mask.zero((n, sound_BS, jax.lax.axis_index(axis)))
        both = jnp.concatenate([sound_BS + zero, jnp.atleast_2d(n) + zero])
        both, B = jax.lax.all_gather(both, axis, axis=1, tiled=True), len(sound_BS)
        sound_BS, s_S = both[:B] > 0, both[B]
    S = sound_BS.shape[1]
    if axis is None:
        n, s_S = jnp.arange(S - N, S) if n is None else n, jnp.arange(S)
    ask = block_mask.arrays_of(mask)
    zero = block_mask.zero((n, sound_BS, ask))
    none_BN = jnp.broadcast_to(zero > 0, (len(sound_BS), N))

    def some() -> jax.Array:
        if S <= keys:
            return none_BN | (ask(n, s_S) & ~sound_BS[:, None]).any(-1)
        blocks = block_mask.cut(s_S + zero, -1, keys, mode="edge"), block_mask.cut(~sound_BS & (zero == 0), 1, keys)

        def step(hit_BN: jax.Array, block: tuple) -> tuple[jax.Array, None]:
            s_S, hidden_BS = block
            return hit_BN | (ask(n, s_S) & hidden_BS[:, None]).any(-1), None

        return jax.lax.scan(step, none_BN, blocks)[0]

    if S <= keys and platform in ("tpu", "gpu"):
        return some()
    return jax.lax.cond(sound_BS.all(), lambda: none_BN, some)

"""How far apart two tokens stand: positions inside the attention, where logits learn of n - s (E21, seed 003).

A relative position is `(init, rotate, bias)`: `init(key, *, H, K, N) -> params` of a layer, for up to N tokens;
`rotate(params, q_BHNK, k_BHNK, n) -> (q, k)` turns queries and keys that stand at n, (N,) or (B, N), before keys are
cached. `bias(params, n, s_S, *, H)` of query and key positions is what is added to the logits after their scale,
(H, N, S), or (B, H, N, S) for n of (B, N), in float32: like a mask, it may be asked for any block. Each one turns or
adds, and the other is None; `none` does neither.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tfm import initial, linear, position
from tfm.attention import mask, rotary_scaling

ALONE = -1e5  # Kitaev et al. 2020 (Reformer); a larger one would leave float32 too few digits for the logit itself
BUCKETS, FARTHEST = 32, 128  # Raffel et al. 2020, section 2.1: 32 embeddings, all offsets beyond 128 share one


def keep(params: dict, q_BHNK: jax.Array, k_BHNK: jax.Array, n: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return queries and keys as they are."""
    return q_BHNK, k_BHNK


class RelativePosition(NamedTuple):
    """`init(key, *, H, K, N) -> params`; `rotate(params, q_BHNK, k_BHNK, n)` turns queries and keys; `bias(params, n,
    s_S, *, H)`, (H, N, S) or (B, H, N, S), is added to the logits, or None."""

    init: Callable[..., dict]
    rotate: Callable[[dict, jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]] = keep
    bias: Callable[..., jax.Array] | None = None


def _no_init(key: jax.Array, *, H: int, K: int, N: int) -> dict:
    return {}


def offsets(n: jax.Array, s_S: jax.Array) -> jax.Array:
    """s - n, how many positions after the query a key stands: (N, S), or (B, N, S)."""
    return s_S - jnp.asarray(n)[..., None]


def _gathered(b_HR: jax.Array, index: jax.Array) -> jax.Array:
    return jnp.moveaxis(linear.to_float32(jnp.asarray(b_HR))[:, index], 0, -3)


def self_bias(bias: mask.Bias | None, n: jax.Array, s_S: jax.Array) -> jax.Array:
    """Return the bias plus ALONE if query and key are one token: it attends to itself only if nothing else is allowed.

    Finite, unlike the -inf of a mask: a token that may see no other has weight one on itself.
    """
    own_NS = jnp.where(offsets(n, s_S) == 0, ALONE, 0.0)[..., None, :, :]
    return own_NS if bias is None else bias(n, s_S) + own_NS


def rotated(
    x_BHNK: jax.Array, n: jax.Array, *, base: float, halves: bool, scaling: Callable = rotary_scaling.none
) -> jax.Array:
    """Pair i of the features turned by the angle n / base^(2i/K), in float32 (Su et al. 2021, equation 34), or another
    one that the scaling makes (rotary_scaling.py).

    (a, b) becomes (a cos - b sin, a sin + b cos), so that q_n . k_s depends on n - s only. Pair i is (x_2i, x_2i+1), or
    with `halves` (x_i, x_{i+K/2}). ValueError for an odd number of features.
    """
    K = x_BHNK.shape[-1]
    if K % 2:
        raise ValueError(f"rotary positions turn pairs of features, and {K} features per head are not an even number")
    angle, length = scaling(n, K, base)
    angle = angle[..., None, :, :]  # an axis for the heads
    axis = -2 if halves else -1  # of the two members of a pair
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    if length != 1:
        cos, sin = cos * length, sin * length
    cos_NK, sin_NK = (jnp.stack(pair, axis=axis).reshape(*angle.shape[:-1], K) for pair in ((cos, cos), (-sin, sin)))
    x = linear.to_float32(x_BHNK)  # as a whole: cutting pairs apart and stacking them again is slow on CPU
    turned = x * cos_NK
    if halves:
        partner = jnp.roll(x, K // 2, axis=-1)
    else:
        partner = jnp.where(jnp.arange(K) % 2 == 0, jnp.roll(x, -1, axis=-1), jnp.roll(x, 1, axis=-1))
    return (turned + partner * sin_NK).astype(x_BHNK.dtype)


def rotary_of(base: float, *, halves: bool = False, scaling: Callable = rotary_scaling.none) -> RelativePosition:
    """Rotary positions (Su et al. 2021) with wavelengths up to 2 pi base: 10000 there, 500000 in Llama 3.

    halves: features i and i + K/2 are a pair, as in the published Llama weights, instead of neighbours.
    scaling: of the angles for longer texts, one of rotary_scaling.KINDS with its numbers.
    """
    how = {"base": base, "halves": halves, "scaling": scaling}

    def rotate(params: dict, q_BHNK: jax.Array, k_BHNK: jax.Array, n: jax.Array) -> tuple[jax.Array, jax.Array]:
        return rotated(q_BHNK, n, **how), rotated(k_BHNK, n, **how)

    return RelativePosition(_no_init, rotate=rotate)


def _relative_init(key: jax.Array, *, H: int, K: int, N: int) -> dict:
    return initial.zeros("b_HR", H=H, R=2 * N - 1)


def _relative(params: dict, n: jax.Array, s_S: jax.Array, *, H: int) -> jax.Array:
    """b_h(s - n), a free parameter for each of the offsets -(N-1) ... N-1; offsets beyond share the last one."""
    farthest = params["b_HR"].shape[1] // 2
    return _gathered(params["b_HR"], jnp.clip(offsets(n, s_S), -farthest, farthest) + farthest)


def _bucket(offset: int) -> int:
    """The bucket of an offset s - n; the second half is for keys after the query. Whole numbers: nothing is rounded.

    Of one direction's 16, the first 8 hold one distance each; the j-th of the others begins at 8 * (128 / 8)^(j / 8),
    and the last has no end (Raffel et al. 2020, section 2.1, and the code published with it).
    """
    one_way, near, wide, distance = BUCKETS // 2, BUCKETS // 4, BUCKETS // 4, abs(offset)
    begun = sum(distance**wide >= near ** (wide - j) * FARTHEST**j for j in range(1, wide))
    return (one_way if offset > 0 else 0) + (distance if distance < near else near + begun)


_BUCKET_OF = np.array([_bucket(offset) for offset in range(-FARTHEST, FARTHEST + 1)], np.int32)


def _buckets_init(key: jax.Array, *, H: int, K: int, N: int) -> dict:
    return initial.zeros("b_HR", H=H, R=BUCKETS)


def _buckets(params: dict, n: jax.Array, s_S: jax.Array, *, H: int) -> jax.Array:
    """b_h(bucket of s - n): a parameter for each near offset, and one for ever wider ranges of far ones (T5)."""
    index = jnp.clip(offsets(n, s_S), -FARTHEST, FARTHEST) + FARTHEST
    return _gathered(params["b_HR"], jnp.asarray(_BUCKET_OF)[index])


def slopes(H: int) -> list[float]:
    """2^(-8h/H) for h = 1 ... H (Press et al. 2022, section 3).

    Where H is no power of two, those of the largest power below, then every second one of the next power (the code
    published with the paper).
    """
    power = 2 ** math.floor(math.log2(H))
    first = [2 ** (-8 * h / power) for h in range(1, power + 1)]
    return first + [2 ** (-8 * h / (2 * power)) for h in range(1, 2 * power, 2)][: H - power]


def _alibi(params: dict, n: jax.Array, s_S: jax.Array, *, H: int) -> jax.Array:
    """-slope_h |n - s|: far tokens count less, in each head at its own rate (Press et al. 2022)."""
    slope_H = jnp.asarray(slopes(H), float)
    return -slope_H[:, None, None] * jnp.abs(offsets(n, s_S))[..., None, :, :]


none = RelativePosition(_no_init)
rotary = rotary_of(position.BASE)
rotary_halves = rotary_of(position.BASE, halves=True)
relative = RelativePosition(_relative_init, bias=_relative)
buckets = RelativePosition(_buckets_init, bias=_buckets)
alibi = RelativePosition(_no_init, bias=_alibi)

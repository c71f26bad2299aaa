"""Relative positions: attention depends on the distance s - n of key and query (E21; Turner 2023).

A relative position is `(init, rotate, bias)`. `init(key, *, H, K, N) -> params` for up to N tokens. `rotate(params,
q_BHNK, k_BHNK, n) -> (q, k)` rotates queries and keys at positions n, (N,) or (B, N), before keys are cached.
`bias(params, n, s_S, *, H)`, (H, N, S) or (B, H, N, S) for n of (B, N), is added to the scaled logits in float32. Like
a mask, it can be computed for any block. Each relative position rotates or adds; `none` does neither.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tfm import initial, linear, position
from tfm.attention import mask, rotary_scaling

ALONE = -1e5  # Kitaev et al. 2020 (Reformer); a larger number would leave too few digits of float32 for the logit
BUCKETS, FARTHEST = 32, 128  # Raffel et al. 2020, section 2.1: 32 buckets; all offsets beyond 128 share one


def keep(params: dict, q_BHNK: jax.Array, k_BHNK: jax.Array, n: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return queries and keys unchanged."""
    return q_BHNK, k_BHNK


class RelativePosition(NamedTuple):
    """The functions `init`, `rotate` and `bias` (None: no bias) of a relative position, as above."""

    init: Callable[..., dict]
    rotate: Callable[[dict, jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]] = keep
    bias: Callable[..., jax.Array] | None = None


def _no_init(key: jax.Array, *, H: int, K: int, N: int) -> dict:
    """Return no parameters."""
    return {}


def offsets(n: jax.Array, s_S: jax.Array) -> jax.Array:
    """Return s - n, the number of positions from query to key: (N, S), or (B, N, S)."""
    return s_S - jnp.asarray(n)[..., None]


def _gather(b_HR: jax.Array, index: jax.Array) -> jax.Array:
    """Return the columns `index` of a table of biases, with the heads before the last two axes."""
    return jnp.moveaxis(linear.to_float32(jnp.asarray(b_HR))[:, index], 0, -3)


def self_bias(bias: mask.Bias | None, n: jax.Array, s_S: jax.Array) -> jax.Array:
    """Return the bias plus ALONE if query and key are the same token, so that it attends to itself only if it must.

    ALONE is finite, unlike the -inf of a mask: a token that may see no other has weight one on itself.
    """
    alone_NS = jnp.where(offsets(n, s_S) == 0, ALONE, 0.0)[..., None, :, :]
    return alone_NS if bias is None else bias(n, s_S) + alone_NS


def rotate_pairs(
    x_BHNK: jax.Array, n: jax.Array, *, base: float, halves: bool, scaling: Callable = rotary_scaling.none
) -> jax.Array:
    """Return x with pair i of its features rotated by the angle n / base^(2i/K) (Su et al. 2021, equation 34).

    (a, b) becomes (a cos - b sin, a sin + b cos), so that q_n . k_s depends only on n - s. Pair i is (x_2i, x_2i+1), or
    with `halves` (x_i, x_{i+K/2}). scaling: another angle, for longer texts (rotary_scaling.py). Computed in float32.
    Raises ValueError if the number of features is odd.
    """
    K = x_BHNK.shape[-1]
    if K % 2:
        raise ValueError(f"rotary positions rotate pairs of features: K = {K} features a head must be even")
    angle, length = scaling(n, K, base)
    angle = angle[..., None, :, :]  # an axis for the heads
    axis = -2 if halves else -1  # of the two members of a pair
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    if length != 1:
        cos, sin = cos * length, sin * length
    cos_NK, sin_NK = (jnp.stack(pair, axis=axis).reshape(*angle.shape[:-1], K) for pair in ((cos, cos), (-sin, sin)))
    x = linear.to_float32(x_BHNK)  # slicing pairs and stacking them again is slow on a CPU
    if halves:
        partner = jnp.roll(x, K // 2, axis=-1)
    else:
        partner = jnp.where(jnp.arange(K) % 2 == 0, jnp.roll(x, -1, axis=-1), jnp.roll(x, 1, axis=-1))
    return (x * cos_NK + partner * sin_NK).astype(x_BHNK.dtype)


def rotary_of(base: float, *, halves: bool = False, scaling: Callable = rotary_scaling.none) -> RelativePosition:
    """Return rotary positions (Su et al. 2021) with wavelengths up to 2 pi base: 10000 in the paper, 500000 in Llama 3.

    halves: features i and i + K/2 are a pair, as in the published Llama weights, instead of neighbours. scaling: one of
    rotary_scaling.KINDS with its numbers bound.
    """

    def rotate(params: dict, q_BHNK: jax.Array, k_BHNK: jax.Array, n: jax.Array) -> tuple[jax.Array, jax.Array]:
        turn = functools.partial(rotate_pairs, n=n, base=base, halves=halves, scaling=scaling)
        return turn(q_BHNK), turn(k_BHNK)

    return RelativePosition(_no_init, rotate=rotate)


def _relative_init(key: jax.Array, *, H: int, K: int, N: int) -> dict:
    """Return zeros b_HR for the R = 2 N - 1 offsets."""
    return initial.zeros("b_HR", H=H, R=2 * N - 1)


def _relative(params: dict, n: jax.Array, s_S: jax.Array, *, H: int) -> jax.Array:
    """Return b_h(s - n): a parameter for each offset -(N-1) ... N-1; farther offsets use the last one."""
    farthest = params["b_HR"].shape[1] // 2
    return _gather(params["b_HR"], jnp.clip(offsets(n, s_S), -farthest, farthest) + farthest)


def _bucket(offset: int) -> int:
    """Return the bucket of an offset s - n in integer arithmetic; the second half of the buckets is for later keys.

    Of the 16 buckets of one direction the first 8 hold one distance each. The j-th of the others begins at 8 * (128 /
    8)^(j / 8), and the last has no end (Raffel et al. 2020, section 2.1, and their code).
    """
    near, distance = BUCKETS // 4, abs(offset)
    ranges = sum(distance**near >= near ** (near - j) * FARTHEST**j for j in range(1, near))
    return (BUCKETS // 2 if offset > 0 else 0) + (distance if distance < near else near + ranges)


_BUCKET_OF = np.array([_bucket(offset) for offset in range(-FARTHEST, FARTHEST + 1)], np.int32)


def _buckets_init(key: jax.Array, *, H: int, K: int, N: int) -> dict:
    """Return zeros b_HR for R = BUCKETS."""
    return initial.zeros("b_HR", H=H, R=BUCKETS)


def _buckets(params: dict, n: jax.Array, s_S: jax.Array, *, H: int) -> jax.Array:
    """Return b_h(bucket of s - n): near offsets have a parameter each, far ones share it in growing ranges (T5)."""
    index = jnp.clip(offsets(n, s_S), -FARTHEST, FARTHEST) + FARTHEST
    return _gather(params["b_HR"], jnp.asarray(_BUCKET_OF)[index])


def slopes(H: int) -> list[float]:
    """Return 2^(-8h/H) for h = 1 ... H (Press et al. 2022, section 3).

    If H is not a power of two: the slopes of the next lower power, then every second one of the next higher power (the
    authors' code).
    """
    power = 2 ** math.floor(math.log2(H))
    lower = [2 ** (-8 * h / power) for h in range(1, power + 1)]
    return lower + [2 ** (-8 * h / (2 * power)) for h in range(1, 2 * power, 2)][: H - power]


def _alibi(params: dict, n: jax.Array, s_S: jax.Array, *, H: int) -> jax.Array:
    """Return -slope_h |n - s|: far tokens count less, in each head at its own rate (Press et al. 2022)."""
    slope_H = jnp.asarray(slopes(H), float)
    return -slope_H[:, None, None] * jnp.abs(offsets(n, s_S))[..., None, :, :]


none = RelativePosition(_no_init)
rotary = rotary_of(position.BASE)
rotary_halves = rotary_of(position.BASE, halves=True)
relative = RelativePosition(_relative_init, bias=_relative)
buckets = RelativePosition(_buckets_init, bias=_buckets)
alibi = RelativePosition(_no_init, bias=_alibi)

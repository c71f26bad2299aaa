"""Relative positions: attention depends on the offset s - n from query to key (E21; Turner 2023).

A relative position is `(init, rotate, bias)`. `init(key, *, H, K, N) -> params` for up to N tokens. `rotate(params,
q_BHNK, k_BHNK, n) -> (q, k)` rotates queries and keys at positions n, (N,) or (B, N), before keys are cached.
`bias(params, n, s_S, *, H)`, (H, N, S) or (B, H, N, S) for n of (B, N), is added to the scaled logits in float32. Like
a mask, the bias can be computed for any block of queries and keys. Each relative position either rotates or has a bias;
`none` does neither.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tfm import initial, linear, position
from tfm.attention import mask as masks, rotary_scaling

SELF_BIAS = -1e5  # Kitaev et al. 2020 (Reformer); a larger magnitude leaves too few digits of float32 to the logit
BUCKETS, MAX_DISTANCE = 32, 128  # Raffel et al. 2020, section 2.1: 32 buckets; all distances beyond 128 share one


class RelativePosition(NamedTuple):
    """The functions `init`, `rotate` and `bias` of a relative position, as the module says; None: no rotation, no bias.

    init(key, *, H, K, N) -> params. rotate(params, q_BHNK, k_BHNK, n) -> (q, k), rotated at positions n.
    bias(params, n, s_S, *, H) -> bias of the logits, (H, N, S) or (B, H, N, S).
    is_rotary: True if `rotate` turns pairs of features, of which there must be an even number. The score must declare
    supports_rope. is_dynamic: True if the rotation from query to key depends on their positions, not only on the
    offset.
    """

    init: Callable[..., dict]
    rotate: Callable[[dict, jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]] | None = None
    bias: Callable[..., jax.Array] | None = None
    is_rotary: bool = False
    is_dynamic: bool = False


def _no_init(key: jax.Array, *, H: int, K: int, N: int) -> dict:
    """Return no parameters."""
    return {}


def offsets(n: jax.Array, s_S: jax.Array) -> jax.Array:
    """Return s - n, the number of positions from query to key: (N, S), or (B, N, S)."""
    return s_S - jnp.asarray(n)[..., None]


def _gather(b_HR: jax.Array, index: jax.Array) -> jax.Array:
    """Return b_HR[:, index] in float32, (H, N, S) or (B, H, N, S) for an index of (N, S) or (B, N, S)."""
    return jnp.moveaxis(linear.to_float32(jnp.asarray(b_HR))[:, index], 0, -3)


def self_bias(bias: masks.Bias | None, n: jax.Array, s_S: jax.Array) -> jax.Array:
    """Return bias(n, s_S) (None: 0), plus SELF_BIAS if s = n: no token attends to itself unless it must.

    n: positions of the queries, (N,) or (B, N). SELF_BIAS is negative and finite, so a token whose mask allows no other
    token still has weight one on itself.
    """
    self_bias_NS = jnp.where(offsets(n, s_S) == 0, SELF_BIAS, 0.0)[..., None, :, :]
    return self_bias_NS if bias is None else bias(n, s_S) + self_bias_NS


def rotate_pairs(
    x_BHNK: jax.Array, n: jax.Array, *, base: float, halves: bool, scaling: Callable = rotary_scaling.none
) -> jax.Array:
    """Return x with pair i of its features rotated by the angle n / base^(2i/K) (Su et al. 2021, equation 34).

    (a, b) becomes (a cos - b sin, a sin + b cos), so that q_n . k_s depends only on n - s. Pair i is (x_2i, x_2i+1), or
    with `halves` (x_i, x_{i+K/2}). scaling: returns other angles, and a factor on x (rotary_scaling.py). Computed in
    float32, returned in the dtype of x. Raises ValueError if the number of features is odd.
    """
    K = x_BHNK.shape[-1]
    if K % 2:
        raise ValueError(f"K = {K} features per head are odd, but rotary positions rotate pairs. Choose an even K.")
    angle, length = scaling(n, K, base)
    angle = angle[..., None, :, :]  # an axis for the heads
    axis = -2 if halves else -1  # of the two features of a pair
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    if length != 1:
        cos, sin = cos * length, sin * length
    cos_NK, sin_NK = (jnp.stack(pair, axis=axis).reshape(*angle.shape[:-1], K) for pair in ((cos, cos), (-sin, sin)))
    x = linear.to_float32(x_BHNK)
    if halves:  # jnp.roll, because slicing pairs and stacking them again is slow on a CPU
        partner = jnp.roll(x, K // 2, axis=-1)
    else:
        partner = jnp.where(jnp.arange(K) % 2 == 0, jnp.roll(x, -1, axis=-1), jnp.roll(x, 1, axis=-1))
    return (x * cos_NK + partner * sin_NK).astype(x_BHNK.dtype)


def rotary_of(base: float, *, halves: bool = False, scaling: Callable = rotary_scaling.none) -> RelativePosition:
    """Return rotary positions (Su et al. 2021) with wavelengths up to 2 pi base.

    base: 10000 in the paper, 500000 in Llama 3. halves: pairs are the features i and i + K/2, as in the published Llama
    weights, instead of 2i and 2i + 1. scaling: (positions n, K, base) -> (angles, factor on queries and keys), such as
    a value of rotary_scaling.KINDS with its further arguments bound by functools.partial.
    """

    def rotate(params: dict, q_BHNK: jax.Array, k_BHNK: jax.Array, n: jax.Array) -> tuple[jax.Array, jax.Array]:
        rotate_array = functools.partial(rotate_pairs, n=n, base=base, halves=halves, scaling=scaling)
        return rotate_array(q_BHNK), rotate_array(k_BHNK)

    return RelativePosition(_no_init, rotate=rotate, is_rotary=True)


def _relative_init(key: jax.Array, *, H: int, K: int, N: int) -> dict:
    """Return zeros b_HR for the R = 2 N - 1 offsets."""
    return initial.zeros("b_HR", H=H, R=2 * N - 1)


def _relative(params: dict, n: jax.Array, s_S: jax.Array, *, H: int) -> jax.Array:
    """Return b_h(s - n): one parameter for each offset -(N-1) ... N-1; farther offsets use the nearest one."""
    farthest = params["b_HR"].shape[1] // 2
    return _gather(params["b_HR"], jnp.clip(offsets(n, s_S), -farthest, farthest) + farthest)


def _bucket(offset: int) -> int:
    """Return the bucket of an offset s - n, in integer arithmetic (Raffel et al. 2020, section 2.1, and their code).

    Buckets 0 to 15 are for s <= n, 16 to 31 for s > n. In each direction, distances 0 to 7 have one bucket each. Then
    bucket 8 + j (24 + j if s > n) begins at distance 8 * (128 / 8)^(j / 8) for j = 0 to 7. The last one has no end.
    """
    near, distance = BUCKETS // 4, abs(offset)
    ranges = sum(distance**near >= near ** (near - j) * MAX_DISTANCE**j for j in range(1, near))
    return (BUCKETS // 2 if offset > 0 else 0) + (distance if distance < near else near + ranges)


_BUCKET_TABLE = np.array([_bucket(offset) for offset in range(-MAX_DISTANCE, MAX_DISTANCE + 1)], np.int32)


def _buckets_init(key: jax.Array, *, H: int, K: int, N: int) -> dict:
    """Return zeros b_HR for R = BUCKETS."""
    return initial.zeros("b_HR", H=H, R=BUCKETS)


def _buckets(params: dict, n: jax.Array, s_S: jax.Array, *, H: int) -> jax.Array:
    """Return b_h(bucket of s - n): near offsets have one parameter each, far offsets one for each range (T5)."""
    index = jnp.clip(offsets(n, s_S), -MAX_DISTANCE, MAX_DISTANCE) + MAX_DISTANCE
    return _gather(params["b_HR"], jnp.asarray(_BUCKET_TABLE)[index])


def slopes(H: int) -> list[float]:
    """Return 2^(-8h/H) for h = 1 ... H (Press et al. 2022, section 3).

    If H is not a power of two, return the slopes for the next lower power of two. Then add the first, third, ... slope
    for the next higher power until there are H (the authors' code).
    """
    power = 2 ** math.floor(math.log2(H))
    lower = [2 ** (-8 * h / power) for h in range(1, power + 1)]
    return lower + [2 ** (-8 * h / (2 * power)) for h in range(1, 2 * power, 2)][: H - power]


def _alibi(params: dict, n: jax.Array, s_S: jax.Array, *, H: int) -> jax.Array:
    """Return -slope_h |n - s|: far tokens get less weight, at another rate in each head (Press et al. 2022)."""
    slope_H = jnp.asarray(slopes(H), float)
    return -slope_H[:, None, None] * jnp.abs(offsets(n, s_S))[..., None, :, :]


none = RelativePosition(_no_init)
rotary = rotary_of(position.BASE)
rotary_halves = rotary_of(position.BASE, halves=True)
relative = RelativePosition(_relative_init, bias=_relative)
buckets = RelativePosition(_buckets_init, bias=_buckets)
alibi = RelativePosition(_no_init, bias=_alibi)

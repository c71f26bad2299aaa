"""Positions inside the attention (E21) against the slow reference."""

import functools
import itertools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference_decoders as slow_decoders
import reference_positions as slow
from cases import ANY_BN, ANY_N, B, H, K, N, S
from errors import raises

from tfm import shapes
from tfm.attention import relative_position, rotary_scaling

EVEN_K = 14  # features of a head, in pairs
# Offsets around the borders of the buckets, 8 * 16^(j/8): 8, 11.3, 16, 22.6, 32, 45.3, 64, 90.5
BUCKET_BORDERS = np.array([0, 1, 7, 8, 11, 12, 15, 16, 22, 23, 31, 32, 45, 46, 63, 64, 90, 91, 127, 128, 129, 500])
ROTARY = {"rotary": relative_position.rotary, "rotary_halves": relative_position.rotary_halves}
BIASES = {name: getattr(relative_position, name) for name in ("relative", "buckets", "alibi")}
each_rotary, each_bias = pytest.mark.parametrize("name", ROTARY), pytest.mark.parametrize("name", BIASES)


@each_rotary
@cases.float64()
def test_rotary_equals_the_reference(name):
    halves = name == "rotary_halves"
    q_BHNK, k_BHNK = vectors = jax.device_get([cases.normal(i, B, heads, N, EVEN_K) for i, heads in ((1, H), (2, 1))])
    for base, n in ((1e4, ANY_BN), (5e5, ANY_N)):
        variant = ROTARY[name] if base == 1e4 else relative_position.rotary_of(base, halves=halves)
        rotated = jax.device_get(jax.jit(variant.rotate)({}, q_BHNK, k_BHNK, n))
        for b, positions in enumerate(np.broadcast_to(n, (B, N))):
            for plain, fast in zip(vectors, rotated, strict=True):
                for h in range(plain.shape[1]):
                    cases.assert_close(fast[b, h], slow.rotary(plain[b, h].T, positions, base=base, halves=halves).T)


# With these numbers, some pairs of features are unscaled, some are scaled, and some are in between.
SCALINGS = {
    "linear": ((2.5,), 1.0),
    "dynamic": ((3.0, 4.0), 1.0),
    "llama3": ((4.0, 1.0, 5.0, 60.0), 1.0),
    "yarn": ((4.0, 200.0, 12.0, 2.0), slow_decoders.yarn_length(4.0)),
    "yarn, past the last pair": ((4.0, 200.0, 12.0, 0.1), slow_decoders.yarn_length(4.0)),
}


@pytest.mark.parametrize("kind", SCALINGS)
@cases.float64()
def test_scaled_rotary_equals_the_reference_and_changes_nothing_at_factor_one(kind):
    (numbers, length), kind = SCALINGS[kind], kind.split(",")[0]
    q_BHNK, k_BHNK = jax.device_get([cases.normal(i, B, heads, N, EVEN_K) for i, heads in ((1, H), (2, 1))])
    base, n, reference_scaling = 500.0, np.stack([ANY_N + 9 * b for b in range(B)]), getattr(slow_decoders, kind)
    neutral = (3.0, 1000.0) if kind == "dynamic" else (1.0, *numbers[1:])

    @jax.jit
    def rotate_all(q_BHNK, k_BHNK, n) -> list:
        results = []
        for halves, of_kind in ((True, numbers), (False, neutral)):
            scaling = lambda n, K, base, of_kind=of_kind: rotary_scaling.KINDS[kind](n, K, base, *of_kind)  # noqa: E731
            results.append(relative_position.rotary_of(base, halves=halves, scaling=scaling))
        return [variant.rotate({}, q_BHNK, k_BHNK, n) for variant in (*results, relative_position.rotary_of(base))]

    scaled, neutrally_scaled, unscaled = jax.device_get(rotate_all(q_BHNK, k_BHNK, n))
    for plain, fast in zip((q_BHNK, k_BHNK), scaled, strict=True):
        for b, h in itertools.product(range(B), range(plain.shape[1])):
            options = dict(base=base, halves=True, length=length)
            expected = slow_decoders.scaled_rotary(
                plain[b, h].T, n[b], lambda *arguments: reference_scaling(*arguments, *numbers), **options
            )
            cases.assert_close(fast[b, h], expected.T)
    cases.assert_trees_close(neutrally_scaled, unscaled)


@each_rotary
def test_rotary_keeps_the_dtype_does_not_round_the_angle_and_needs_an_even_k(name):
    qk = [np.asarray(cases.normal(i, B, H, 1, EVEN_K)).astype(jnp.bfloat16) for i in (1, 2)]
    rotate = jax.jit(functools.partial(ROTARY[name].rotate, {}))
    rotated, exact = (rotate(*arrays, np.array([1001])) for arrays in (qk, [x.astype(np.float32) for x in qk]))
    for narrow, wide in zip(rotated, exact, strict=True):
        assert narrow.dtype == jnp.bfloat16
        np.testing.assert_array_equal(narrow, np.asarray(wide).astype(jnp.bfloat16))
    with raises(ValueError, "K = 13"):
        jax.eval_shape(rotate, qk[0][..., 1:], qk[1][..., 1:], np.arange(1))


# Biases


def slow_bias(name: str, params: dict, h: int):
    """Return b_h as a function of n' - n alone."""
    if name == "alibi":
        return lambda offset: -slow.alibi_slopes(H)[h] * abs(offset)
    b = np.asarray(params["b_HR"])[h]
    return functools.partial(slow.relative, b) if name == "relative" else lambda offset: b[slow.bucket(offset)]


@each_bias
@cases.float64()
def test_biases_equal_the_reference(name):
    """A bias keeps symmetric logits symmetric if b(k) = b(-k), as in ALiBi."""
    params = jax.device_get(cases.draw_params(lambda key: BIASES[name].init(key, H=H, K=K, N=N)))  # NumPy arrays
    bias = jax.jit(functools.partial(BIASES[name].bias, params, H=H))
    s_S = np.concatenate([np.arange(S), BUCKET_BORDERS])
    for n in (ANY_N, ANY_BN, BUCKET_BORDERS):
        b_BHNS = np.asarray(bias(n, s_S))
        assert b_BHNS.shape == (*n.shape[:-1], H, n.shape[-1], len(s_S))
        for b, h in itertools.product(range(len(n) if n.ndim == 2 else 1), range(H)):
            b_NS = b_BHNS[b, h] if n.ndim == 2 else b_BHNS[h]
            cases.assert_close(b_NS, slow.biases(slow_bias(name, params, h), s_S, n[b] if n.ndim == 2 else n).T)
    b_HNN = np.asarray(bias(np.arange(N), np.arange(N)))
    assert np.array_equal(b_HNN, b_HNN.swapaxes(1, 2)) == (name == "alibi")


def test_alibi_slopes_equal_the_reference():
    for heads in (1, 2, 3, 5, 8, 12, 16, 20):
        np.testing.assert_allclose(relative_position.slopes(heads), slow.alibi_slopes(heads), rtol=1e-12)


@pytest.mark.parametrize("name", ["none", *ROTARY, *BIASES])
def test_each_relative_position_rotates_or_adds_and_starts_without_preference(name):
    variant = getattr(relative_position, name)
    leaves = {"relative": {"H": H, "R": 2 * N - 1}, "buckets": {"H": H, "R": 32}}
    assert (variant.rotate is not None, variant.bias is not None) == (name in ROTARY, name in BIASES)
    params = variant.init(jax.random.key(0), H=H, K=K, N=N)
    assert shapes.check(params) == leaves.get(name, {}) and not any(map(shapes.is_matrix, params))
    if name in BIASES:
        narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
        bias = jax.jit(functools.partial(variant.bias, H=H))(narrow, np.arange(N), np.arange(S))
        assert bias.dtype == jnp.float32 and bias.any() == (name == "alibi")

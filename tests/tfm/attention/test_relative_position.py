"""Positions inside the attention (E21) against the slow reference; attention contains convolution (E28)."""

import functools
import itertools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference_positions as slow
import translate
from cases import B, D, H, K, N, S

from tfm import shapes
from tfm.attention import explicit, relative_position, score

EVEN = 14  # features of a head that can be turned
ANY_N = np.array([9, 2, 5, 2, 0, 31, 7])  # N positions in no order, one of them twice
ANY_BN = np.stack([ANY_N, (3 * ANY_N + 1) % 37])
WIDE = np.array([0, 1, 7, 8, 11, 12, 90, 91, 127, 128, 129, 500])  # around the borders of the buckets
ROTARY = {"rotary": relative_position.rotary, "rotary_halves": relative_position.rotary_halves}
BIASES = {
    "relative": relative_position.relative,
    "buckets": relative_position.buckets,
    "alibi": relative_position.alibi,
}


# ------------------------------------------------------------------------------------------ turned queries and keys


@pytest.mark.parametrize("name", ROTARY)
@pytest.mark.parametrize(("base", "n"), [(1e4, ANY_BN), (5e5, ANY_N)])
@cases.float64()
def test_rotary_equals_the_reference(name, base, n):
    halves = name == "rotary_halves"
    turn = relative_position.rotary_of(base, halves=halves).rotate if base != 1e4 else ROTARY[name].rotate
    q_BHNK, k_BHNK = cases.normal(1, B, H, N, EVEN), cases.normal(2, B, 1, N, EVEN)  # one head of keys for all
    turned = turn({}, q_BHNK, k_BHNK, n)
    for b, positions in enumerate(np.broadcast_to(n, (B, N))):
        for plain, fast in zip((q_BHNK, k_BHNK), turned, strict=True):
            for h in range(plain.shape[1]):
                cases.close(fast[b, h], slow.rotary(plain[b, h].T, positions, base=base, halves=halves).T)


@pytest.mark.parametrize("name", ROTARY)
@cases.float64()
def test_rotary_logits_depend_on_the_difference_of_positions_only(name):
    q_BHNK, k_BHNK = (jnp.broadcast_to(cases.normal(i, B, H, 1, EVEN), (B, H, N, EVEN)) for i in (1, 2))

    def logits(n):
        return np.asarray(explicit.logits(*ROTARY[name].rotate({}, q_BHNK, k_BHNK, n), scale=1.0))

    l_BHNS = logits(jnp.arange(N))
    cases.close(logits(jnp.arange(N) + 1000), l_BHNS)
    for offset in range(1 - N, N):
        along = np.diagonal(l_BHNS, offset, axis1=2, axis2=3)
        cases.close(along, np.broadcast_to(along[..., :1], along.shape))
    assert np.ptp(l_BHNS[0, 0, 0]) > 0.1 and not np.allclose(l_BHNS, l_BHNS.swapaxes(2, 3), atol=0.1)


@cases.float64()
def test_interleaved_and_half_split_rotary_differ_by_an_order_of_the_features():
    order = np.concatenate([np.arange(0, EVEN, 2), np.arange(1, EVEN, 2)])
    q_BHNK, k_BHNK = cases.normal(1, B, H, N, EVEN), cases.normal(2, B, H, N, EVEN)
    neighbours = relative_position.rotary.rotate({}, q_BHNK, k_BHNK, ANY_N)
    halves = relative_position.rotary_halves.rotate({}, q_BHNK[..., order], k_BHNK[..., order], ANY_N)
    for one, other in zip(neighbours, halves, strict=True):
        cases.close(one[..., order], other)
    assert not np.allclose(
        relative_position.rotary_halves.rotate({}, q_BHNK, k_BHNK, ANY_N)[0], neighbours[0], atol=0.1
    )


@pytest.mark.parametrize("name", ROTARY)
def test_an_odd_number_of_features_cannot_be_turned(name):
    q_BHNK = cases.normal(1, B, H, N, K)
    with pytest.raises(ValueError, match=f"turn pairs of features, and {K} features per head are not an even number$"):
        ROTARY[name].rotate({}, q_BHNK, q_BHNK, jnp.arange(N))


@pytest.mark.parametrize("name", ROTARY)
def test_rotary_keeps_the_dtype_and_does_not_round_the_angle(name):
    q_BHNK, k_BHNK = (cases.normal(i, B, H, 1, EVEN).astype(jnp.bfloat16) for i in (1, 2))
    turned = ROTARY[name].rotate({}, q_BHNK, k_BHNK, jnp.array([1001]))
    exact = ROTARY[name].rotate({}, q_BHNK.astype(jnp.float32), k_BHNK.astype(jnp.float32), jnp.array([1001]))
    for narrow, wide in zip(turned, exact, strict=True):
        assert narrow.dtype == jnp.bfloat16
        np.testing.assert_array_equal(narrow, wide.astype(jnp.bfloat16))


# --------------------------------------------------------------------------------------------------- added to logits


def drawn_bias(name: str, heads: int = H):
    """Parameters with random numbers, and the bias function of them."""
    params = cases.drawn(lambda key: BIASES[name].init(key, H=heads, K=K, N=N))
    return params, jax.jit(functools.partial(BIASES[name].bias, params, H=heads))


def slow_bias(name: str, params: dict, h: int, heads: int = H):
    """b_h as a function of n' - n alone."""
    if name == "alibi":
        return lambda offset: -slow.alibi_slopes(heads)[h] * abs(offset)
    b = np.asarray(params["b_HR"])[h]
    return functools.partial(slow.relative, b) if name == "relative" else lambda offset: b[slow.bucket(offset)]


@pytest.mark.parametrize("name", BIASES)
@pytest.mark.parametrize("n", [ANY_N, ANY_BN, WIDE], ids=["(N,)", "(B, N)", "far"])
@cases.float64()
def test_biases_equal_the_reference(name, n):
    params, bias = drawn_bias(name)
    s_S = np.concatenate([np.arange(S), WIDE])
    b_BHNS = bias(jnp.asarray(n), jnp.asarray(s_S))
    assert b_BHNS.shape == (*n.shape[:-1], H, n.shape[-1], len(s_S))
    for b, h in itertools.product(range(len(n) if n.ndim == 2 else 1), range(H)):
        one = b_BHNS[b, h] if n.ndim == 2 else b_BHNS[h]
        cases.close(one, slow.biases(slow_bias(name, params, h), s_S, n[b] if n.ndim == 2 else n).T)


def test_buckets_by_hand():
    """The edges 8 * 16^(j/8): 8, 11.3, 16, 22.6, 32, 45.3, 64, 90.5, and no end; keys after the query in 16 ... 31."""
    b_HR = jnp.broadcast_to(jnp.arange(32.0), (H, 32))
    bias = functools.partial(relative_position.buckets.bias, {"b_HR": b_HR}, H=H)
    distance = jnp.array([0, 1, 7, 8, 11, 12, 15, 16, 22, 23, 31, 32, 45, 46, 63, 64, 90, 91, 128, 10**6])
    literal = [0, 1, 7, 8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13, 14, 14, 15, 15, 15]
    np.testing.assert_array_equal(bias(distance, jnp.array([0]))[0, :, 0], literal)
    np.testing.assert_array_equal(bias(jnp.array([0]), distance[1:])[0, 0], 16 + np.array(literal[1:]))


@pytest.mark.parametrize("heads", [1, 2, 3, 5, 8, 12, 16, 20])
def test_alibi_slopes_equal_the_reference(heads):
    np.testing.assert_allclose(relative_position.slopes(heads), slow.alibi_slopes(heads), rtol=1e-12)
    assert len(set(relative_position.slopes(heads))) == heads


def test_alibi_slopes_by_hand():
    """Press et al. 2022, section 3: for 8 heads 1/2, 1/4 ... 1/256, for 16 heads every second one lies between."""
    assert relative_position.slopes(8) == [2.0**-h for h in range(1, 9)]
    assert relative_position.slopes(16)[1::2] == relative_position.slopes(8)
    assert relative_position.slopes(3) == [2.0**-4, 2.0**-8, 2.0**-2]


@pytest.mark.parametrize("name", BIASES)
def test_biases_are_float32_and_start_without_preference(name):
    params = BIASES[name].init(jax.random.key(0), H=H, K=K, N=N)
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    bias = BIASES[name].bias(narrow, jnp.arange(N), jnp.arange(S), H=H)
    assert bias.dtype == jnp.float32
    if name == "alibi":
        assert params == {}
    else:
        assert shapes.check(params) == {"H": H, "R": 2 * N - 1 if name == "relative" else 32}
        assert not bias.any() and not any(map(shapes.is_matrix, params))


def test_each_relative_position_rotates_or_adds_and_none_does_neither():
    assert not any(variant.rotate for variant in (relative_position.none, *BIASES.values()))
    for variant in (relative_position.none, *ROTARY.values()):
        assert variant.bias is None and variant.init(jax.random.key(0), H=H, K=K, N=N) == {}


# -------------------------------------------------------------------------------------------------------- properties


@pytest.mark.parametrize("name", ROTARY)
@cases.float64()
def test_tied_logits_stay_symmetric_when_turned(name):
    params = cases.drawn(lambda key: score.tied.init(key, H=H, K=EVEN, D=D, bias=True))
    q_BHNK, k_BHNK = score.tied.apply(params, *[cases.normal(1, B, N, D)] * 2)
    l_BHNS = explicit.logits(*ROTARY[name].rotate({}, q_BHNK, k_BHNK, jnp.asarray(ANY_N)), scale=1.0)
    assert not np.allclose(l_BHNS, explicit.logits(q_BHNK, k_BHNK, scale=1.0), atol=0.1)
    cases.close(l_BHNS, l_BHNS.swapaxes(2, 3), 1e-13)


@pytest.mark.parametrize(("name", "symmetric"), [("alibi", True), ("relative", False), ("buckets", False)])
def test_a_bias_keeps_tied_logits_symmetric_only_if_it_is_even(name, symmetric):
    """b(k) = b(-k) in ALiBi, and in tables only by accident."""
    params = cases.drawn(lambda key: score.tied.init(key, H=H, K=K, D=D, bias=True))
    l_BHNS = explicit.logits(*score.tied.apply(params, *[cases.normal(1, B, N, D)] * 2), scale=1.0)
    np.testing.assert_array_equal(l_BHNS, l_BHNS.swapaxes(2, 3))
    n = jnp.arange(N)
    l_BHNS = l_BHNS + drawn_bias(name)[1](n, n)
    assert np.array_equal(l_BHNS, l_BHNS.swapaxes(2, 3)) == symmetric
    if name == "relative":
        even = cases.normal(3, H, N)
        b_HR = jnp.concatenate([even[:, :0:-1], even], axis=1)
        mirrored = relative_position.relative.bias({"b_HR": b_HR}, n, n, H=H)
        np.testing.assert_array_equal(mirrored, mirrored.swapaxes(1, 2))


@pytest.mark.parametrize("name", [*ROTARY, *BIASES])
def test_positions_of_a_batch_are_those_of_each_sequence_alone(name):
    n_BN = jnp.asarray(ANY_BN)
    if name in ROTARY:
        q_BHNK = cases.normal(1, B, H, N, EVEN)
        whole = ROTARY[name].rotate({}, q_BHNK, 2 * q_BHNK, n_BN)[1]
        alone = [ROTARY[name].rotate({}, q_BHNK[b][None], 2 * q_BHNK[b][None], n_BN[b])[1][0] for b in range(B)]
    else:
        _, bias = drawn_bias(name)
        whole, alone = bias(n_BN, jnp.arange(S)), [bias(n_BN[b], jnp.arange(S)) for b in range(B)]
    assert not np.allclose(*alone)
    cases.close(whole, np.stack(alone), 1e-6)


# -------------------------------------------------------------------------------- attention contains convolution (E28)

OFFSETS = (-2, -1, 0, 3)  # of the keys, one head each


def convolved(x_BND: jax.Array, kernel_HD: np.ndarray, b_HR: np.ndarray) -> jax.Array:
    """Y = sum_h V_h X A_h with all scores 0, V_h = diag(kernel_h), and A_h from the biases alone."""
    n, heads = jnp.arange(x_BND.shape[1]), len(kernel_HD)
    bias = relative_position.relative.bias({"b_HR": jnp.asarray(b_HR)}, n, n, H=heads)
    A_BHNS = explicit.weights(explicit.logits(*score.constant.apply({}, x_BND, x_BND), scale=1.0) + bias)
    V_HDD = jnp.stack([jnp.diag(kernel) for kernel in kernel_HD])
    return jnp.einsum("hed,bhns,bsd->bne", V_HDD, A_BHNS, x_BND)


def falling(longest: int) -> np.ndarray:
    """b_h(r) = -1000 |r - offset_h|: exp(-1000) is 0, so the weight of the nearest key there is, is exactly 1."""
    return -1000.0 * np.abs(np.arange(1 - longest, longest) - np.array(OFFSETS)[:, None])


@pytest.mark.parametrize("edge", [True, False], ids=["the end goes on", "zeros beyond the end"])
@cases.float64()
def test_attention_by_position_is_a_depthwise_convolution(edge):
    """Exactly. At the ends the nearest token stands in for the missing ones; with tokens of zeros there, a zero does.

    Three zeros on each side, the longest offset: the convolution of Conv1d(padding=...) with values that have no bias.
    """
    x_BND, kernel_HD = cases.normal(1, B, N, D), np.asarray(cases.normal(2, len(OFFSETS), D))
    if edge:
        y_BND = convolved(x_BND, kernel_HD, falling(N))
    else:
        y_BND = convolved(jnp.pad(x_BND, [(0, 0), (3, 3), (0, 0)]), kernel_HD, falling(N + 6))[:, 3:-3]
    for b in range(B):
        Y = slow.depthwise_convolution(translate.columns(x_BND[b]), kernel_HD.T, OFFSETS, edge=edge)
        cases.close(y_BND[b], Y.T, 1e-14)


def test_the_weights_of_a_convolution_are_shifted_identities():
    b_HR, n = jnp.asarray(falling(5), jnp.float32), jnp.arange(5)
    bias = relative_position.relative.bias({"b_HR": b_HR}, n, n, H=len(OFFSETS))
    zeros = score.constant.apply({}, *[cases.normal(1, 1, 5, D)] * 2)
    assert [z.shape for z in zeros] == [(1, 1, 5, 1)] * 2 and not any(z.any() for z in zeros)
    A_BHNS = explicit.weights(explicit.logits(*zeros, scale=1.0) + bias)
    np.testing.assert_array_equal(A_BHNS[0, 2], np.eye(5))
    np.testing.assert_array_equal(A_BHNS[0, 0], np.eye(5)[[0, 0, 0, 1, 2]])  # two before, the first stands in
    np.testing.assert_array_equal(A_BHNS[0, 3], np.eye(5)[[3, 4, 4, 4, 4]])

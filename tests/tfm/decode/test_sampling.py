"""From logits to tokens (E24): filters against their definitions, and the frequencies of drawn tokens."""

import functools
import itertools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from errors import raises

from tfm.decode import sampling

LOGITS = np.array([1.0, 0.0, -0.5, 2.0, -3.0, 1.5, 0.5])
W = len(LOGITS)


def softmax(logits) -> np.ndarray:
    p = np.exp(np.float64(logits) - np.max(logits))
    return p / p.sum()


def find_finite(logits_BW) -> list[set[int]]:
    """Return the tokens with finite logits, for each sequence."""
    return [set(np.flatnonzero(np.isfinite(row)).tolist()) for row in np.asarray(logits_BW)]


def find_nucleus(probability, p: float) -> set[int]:
    """Return the smallest set of tokens whose probability is at least p; of several sets, the most likely."""
    for size in range(1, len(probability) + 1):
        sets = itertools.combinations(range(len(probability)), size)
        best = max(sets, key=lambda tokens: sum(probability[w] for w in tokens))
        if sum(probability[w] for w in best) >= p:
            return set(best)
    raise AssertionError("all tokens together have probability 1")


def find_top_k(logits, k: int) -> set[int]:
    """Return the k most likely tokens, or all if k is 0 or large. Lower ids win ties."""
    return set(sorted(range(W), key=lambda w: (-logits[w], w))[: k or W])


def find_min_p(logits, p: float) -> set[int]:
    return {w for w in range(W) if softmax(logits)[w] >= p * softmax(logits).max()}


TIES_BW = np.random.default_rng(0).integers(0, 4, (11, W)).astype(np.float32)
LOGITS_BW = np.float32(2 * np.random.default_rng(0).standard_normal((11, W)))
FILTERS = [
    (sampling.keep_top_p, p, LOGITS_BW, lambda logits, p: find_nucleus(softmax(logits), p)) for p in (0.0, 0.5, 0.95)
]
FILTERS += [(sampling.keep_top_k, k, TIES_BW, find_top_k) for k in (1, W - 1, 0, W + 2)]
FILTERS += [(sampling.keep_min_p, p, LOGITS_BW, find_min_p) for p in (0.07, 1.0)]


@pytest.mark.parametrize(("apply_filter", "number", "logits_BW", "define"), FILTERS)
def test_a_filter_keeps_the_logits_of_its_definition_and_no_others(apply_filter, number, logits_BW, define):
    result_BW = np.asarray(apply_filter(jnp.asarray(logits_BW), number))
    assert find_finite(result_BW) == [define(logits_W, number) for logits_W in logits_BW]
    np.testing.assert_array_equal(result_BW, np.where(np.isfinite(result_BW), logits_BW, -np.inf))


@pytest.mark.parametrize(
    ("p_BW", "p", "tokens"),
    [
        ([[0.125, 0.25, 0.125, 0.25, 0.25], [0.2] * 5], 0.7, [{1, 3, 4}, {0, 1, 2, 3}]),
        ([[0.125, 0.25, 0.125, 0.25, 0.25], [0.2] * 5], 0.76, [{0, 1, 3, 4}, {0, 1, 2, 3}]),
        ([[0.125, 0.25, 0.125, 0.25, 0.25], [0.2] * 5], 0.1, [{1}, {0}]),
        ([[1.0] * 4], 0.25, [{0}]),  # four equal logits: 1/4 and its multiples are exact
        ([[1.0] * 4], 0.5, [{0, 1}]),
        ([[1.0] * 4], 0.5 + 2**-20, [{0, 1, 2}]),
        ([[1.0, 1e-18, 1e-36]], 1.0, [{0, 1, 2}]),
    ],
)
def test_the_nucleus_is_exact_and_prefers_the_lower_of_equally_likely_ids(p_BW, p, tokens):
    with np.errstate(divide="ignore"):  # padded to the shape of the other tests, to reuse their programs
        logits_BW = np.log(np.float32([(row + [0.0] * W)[:W] for row in p_BW]))
    result_BW = sampling.keep_top_p(jnp.asarray(np.resize(logits_BW, (11, W))), p)
    assert find_finite(result_BW)[: len(tokens)] == tokens


@pytest.mark.parametrize("penalty", [1.7, 0.5])
def test_tokens_of_the_text_are_less_likely_and_its_padding_does_not_count(penalty):
    logits_BW, w_BN = cases.normal(0, 3, W), np.array([[1, 4, 1, 6], [5, 6, 2, 0], [0, 3, 3, 2]])
    expected = np.array(logits_BW)
    for b, length in enumerate((4, 2, 1)):
        for w in set(w_BN[b, :length].tolist()):
            expected[b, w] = expected[b, w] / penalty if expected[b, w] > 0 else expected[b, w] * penalty
    result = sampling.filter_logits(logits_BW, w_BN, np.array([4, 2, 1]), repetition_penalty=penalty)
    cases.assert_close(jax.nn.softmax(result), jax.nn.softmax(expected), 1e-6)


def test_logits_are_divided_by_any_positive_temperature():
    logits_BW = cases.normal(0, 3, W)
    cases.assert_close(
        jax.nn.softmax(sampling.apply_temperature(logits_BW, 0.7)), jax.nn.softmax(logits_BW / 0.7), 1e-6
    )
    for temperature in (1e-30, 1e-38, 1e-45):
        result = jax.nn.softmax(sampling.apply_temperature(100 * logits_BW, temperature))
        np.testing.assert_array_equal(result, jax.nn.one_hot(logits_BW.argmax(axis=-1), W))


SETTINGS = [(0.5, 0, 1.0, 0.0), (2.0, 5, 0.8, 0.0), (2.0, 5, 0.9, 0.5)]


@pytest.mark.parametrize(("temperature", "top_k", "top_p", "min_p"), SETTINGS)
def test_frequencies_equal_the_softmax_after_the_filters_in_their_order(temperature, top_k, top_p, min_p):
    """Chi-square with at most six degrees of freedom exceeds 28 with probability 1e-4; the key is fixed."""
    n = 7000
    p = softmax(LOGITS / temperature)
    top_k_ids = list(find_top_k(LOGITS, top_k))
    p = np.where(np.isin(np.arange(W), top_k_ids), p, 0) / p[top_k_ids].sum()
    p = np.where(np.isin(np.arange(W), list(find_nucleus(p, top_p - 1e-12))) & (p >= min_p * p.max()), p, 0)
    expected, logits_BW = n * p / p.sum(), np.tile(np.float32(LOGITS), (n, 1))
    draw = functools.partial(sampling.draw, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    w_B = jax.jit(draw)(jax.random.key(0), logits_BW)
    count = np.bincount(w_B, minlength=W)
    assert (count[expected == 0] == 0).all()
    assert ((count - expected)[expected > 0] ** 2 / expected[expected > 0]).sum() < 28


def test_temperature_zero_selects_the_first_of_the_most_likely_tokens():
    logits_BW = np.random.default_rng(0).integers(0, 3, (17, W)).astype(np.float32)
    w_B = sampling.draw(jax.random.key(0), logits_BW, temperature=0, top_p=0.5)
    np.testing.assert_array_equal(w_B, logits_BW.argmax(axis=-1))


def test_draws_from_bfloat16_logits_use_float32():
    logits_BW = cases.normal(0, 211, W).astype(jnp.bfloat16)
    draw = jax.jit(functools.partial(sampling.draw, top_p=0.9))
    narrow, wide = (draw(jax.random.key(0), logits_BW.astype(t)) for t in (jnp.bfloat16, float))
    np.testing.assert_array_equal(narrow, wide)


def test_the_draw_of_a_sequence_depends_only_on_its_key():
    key, logits_BW = jax.random.key(3), jnp.zeros((53, W))
    w_B = sampling.draw(key, logits_BW)
    np.testing.assert_array_equal(sampling.draw(key, logits_BW[:11]), w_B[:11])
    key_B = sampling.split_key(key, 53)
    np.testing.assert_array_equal(sampling.draw(key_B[::-1], logits_BW)[::-1], w_B)
    assert len(set(w_B.tolist())) == W and (sampling.draw(jax.random.key(4), logits_BW) != w_B).any()


@pytest.mark.parametrize(
    ("setting", "values"),
    [
        ("temperature", (-1, float("nan"), float("inf"))),
        ("top_k", (-1, 2.0)),
        ("top_p", (1.1, -0.1, float("nan"))),
        ("min_p", (1.1,)),
        ("repetition_penalty", (0, 1.2)),  # 1.2 is valid, but needs the text
    ],
)
def test_settings_out_of_range_are_refused(setting, values):
    for value in values:
        with raises(ValueError, setting, value, "text" if value == 1.2 else ""):
            sampling.draw(jax.random.key(0), jnp.zeros((2, W)), **{setting: value})

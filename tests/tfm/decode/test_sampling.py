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
    p = np.exp(np.float64(logits) - np.max(logits, axis=-1, keepdims=True))
    return p / p.sum(axis=-1, keepdims=True)


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


def test_filters_keep_the_logits_of_their_definitions_and_no_others():
    filters = [(function, number) for function, number, *_ in FILTERS]
    arrays = [logits_BW for _, _, logits_BW, _ in FILTERS]
    apply_all = jax.jit(lambda arrays: [f(x, number) for (f, number), x in zip(filters, arrays, strict=True)])
    for (_, number, logits_BW, define), result_BW in zip(FILTERS, jax.device_get(apply_all(arrays)), strict=True):
        assert find_finite(result_BW) == [define(logits_W, number) for logits_W in logits_BW]
        np.testing.assert_array_equal(result_BW, np.where(np.isfinite(result_BW), logits_BW, -np.inf))


UNEQUAL, FIVE, FOUR = [0.125, 0.25, 0.125, 0.25, 0.25], [0.2] * 5, [1.0] * 4
NUCLEI = [  # probabilities up to a factor, p, and the tokens of the nucleus
    *((UNEQUAL, p, tokens) for p, tokens in ((0.7, {1, 3, 4}), (0.76, {0, 1, 3, 4}), (0.1, {1}))),
    *((FIVE, p, tokens) for p, tokens in ((0.7, {0, 1, 2, 3}), (0.1, {0}))),
    # four equal logits: 1/4 and its multiples are exact
    *((FOUR, p, tokens) for p, tokens in ((0.25, {0}), (0.5, {0, 1}), (0.5 + 2**-20, {0, 1, 2}))),
    ([1.0, 1e-18, 1e-36], 1.0, {0, 1, 2}),
]


def test_the_nucleus_is_exact_and_prefers_the_lower_of_equally_likely_ids():
    with np.errstate(divide="ignore"):
        logits_BW = np.log(np.float32([(p_W + [0.0] * W)[:W] for p_W, *_ in NUCLEI]))
    numbers = [p for _, p, _ in NUCLEI]
    keep_all = jax.jit(lambda l_BW: [sampling.keep_top_p(l_BW[b : b + 1], p) for b, p in enumerate(numbers)])
    assert [find_finite(result_1W)[0] for result_1W in keep_all(logits_BW)] == [tokens for *_, tokens in NUCLEI]


@pytest.mark.parametrize("penalty", [1.7, 0.5])
def test_tokens_of_the_text_are_less_likely_and_its_padding_does_not_count(penalty):
    logits_BW, w_BN = np.asarray(cases.normal(0, 3, W)), np.array([[1, 4, 1, 6], [5, 6, 2, 0], [0, 3, 3, 2]])
    expected = np.array(logits_BW)
    for b, length in enumerate((4, 2, 1)):
        for w in set(w_BN[b, :length].tolist()):
            expected[b, w] = expected[b, w] / penalty if expected[b, w] > 0 else expected[b, w] * penalty
    penalize = jax.jit(functools.partial(sampling.filter_logits, repetition_penalty=penalty))
    cases.assert_close(softmax(penalize(logits_BW, w_BN, np.array([4, 2, 1]))), softmax(expected), 1e-6)


def test_logits_are_divided_by_any_positive_temperature():
    logits_BW, apply = np.asarray(cases.normal(0, 3, W)), jax.jit(sampling.apply_temperature)
    cases.assert_close(softmax(apply(logits_BW, 0.7)), softmax(logits_BW / 0.7), 1e-6)
    for temperature in (1e-30, 1e-38, 1e-45):
        one_hot_BW = np.eye(W)[logits_BW.argmax(axis=-1)]
        np.testing.assert_array_equal(softmax(apply(100 * logits_BW, temperature)), one_hot_BW)


SETTINGS = [(0.5, 0, 1.0, 0.0), (2.0, 5, 0.8, 0.0), (2.0, 5, 0.9, 0.5)]


def test_frequencies_equal_the_softmax_after_the_filters_in_their_order():
    """Chi-square with at most six degrees of freedom exceeds 28 with probability 1e-4; the key is fixed."""
    n, names = 7000, ("temperature", "top_k", "top_p", "min_p")
    logits_BW, options = np.tile(np.float32(LOGITS), (n, 1)), [dict(zip(names, row, strict=True)) for row in SETTINGS]
    draw_all = jax.jit(lambda *arrays: [sampling.draw(*arrays, **one) for one in options])
    for (temperature, top_k, top_p, min_p), w_B in zip(SETTINGS, draw_all(jax.random.key(0), logits_BW), strict=True):
        p = softmax(LOGITS / temperature)
        top_k_ids = list(find_top_k(LOGITS, top_k))
        p = np.where(np.isin(np.arange(W), top_k_ids), p, 0) / p[top_k_ids].sum()
        p = np.where(np.isin(np.arange(W), list(find_nucleus(p, top_p - 1e-12))) & (p >= min_p * p.max()), p, 0)
        count, expected = np.bincount(w_B, minlength=W), n * p / p.sum()
        assert (count[expected == 0] == 0).all()
        assert ((count - expected)[expected > 0] ** 2 / expected[expected > 0]).sum() < 28


def test_temperature_zero_selects_the_first_of_the_most_likely_tokens():
    greedy = jax.jit(functools.partial(sampling.draw, temperature=0, top_p=0.5))
    np.testing.assert_array_equal(greedy(jax.random.key(0), TIES_BW), TIES_BW.argmax(axis=-1))


def test_draws_from_bfloat16_logits_use_float32():
    logits_BW = np.asarray(cases.normal(0, 211, W), jnp.bfloat16)
    types, draw = (jnp.bfloat16, np.float32), functools.partial(sampling.draw, top_p=0.9)
    both = jax.jit(lambda key, logits_BW: [draw(key, logits_BW.astype(dtype)) for dtype in types])
    np.testing.assert_array_equal(*both(jax.random.key(0), logits_BW))


def test_the_draw_of_a_sequence_depends_only_on_its_key():
    draw = sampling.draw

    @jax.jit
    def draw_all(key, other):
        logits_BW, key_B = jnp.zeros((53, W)), sampling.split_key(key, 53)
        draws = draw(key, logits_BW), draw(key, logits_BW[:11])
        return *draws, draw(key_B[::-1], logits_BW), draw(other, logits_BW)

    w_B, first_B, reversed_B, other_B = jax.device_get(draw_all(jax.random.key(3), jax.random.key(4)))
    np.testing.assert_array_equal(first_B, w_B[:11])
    np.testing.assert_array_equal(reversed_B[::-1], w_B)
    assert len(set(w_B.tolist())) == W and (other_B != w_B).any()


SETTINGS_OUT_OF_RANGE = {
    "temperature": (-1, float("nan"), float("inf")),
    "top_k": (-1, 2.0),
    "top_p": (1.1, -0.1, float("nan")),
    "min_p": (1.1,),
    "repetition_penalty": (0, 1.2),  # 1.2 is valid, but needs the text
}


@pytest.mark.parametrize(("setting", "values"), SETTINGS_OUT_OF_RANGE.items())
def test_settings_out_of_range_are_refused(setting, values):
    for value in values:
        with raises(ValueError, setting, value, "text" if value == 1.2 else ""):
            sampling.draw(jax.random.key(0), np.zeros((2, W)), **{setting: value})

"""From logits to a word (E24): the filters against their definitions, and the frequencies of what is drawn."""

import functools
import itertools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tfm.decode import sampling

LOGITS = np.array([1.0, 0.0, -0.5, 2.0, -3.0, 1.5, 0.5])
W = len(LOGITS)


def softmax(logits) -> np.ndarray:
    p = np.exp(np.float64(logits) - np.max(logits))
    return p / p.sum()


def kept(logits_BW) -> list[set[int]]:
    """The words that are left, for each sequence."""
    return [set(np.flatnonzero(np.isfinite(row)).tolist()) for row in np.asarray(logits_BW)]


def unchanged_or_gone(fast_BW, logits_BW) -> None:
    fast_BW = np.asarray(fast_BW)
    np.testing.assert_array_equal(fast_BW, np.where(np.isfinite(fast_BW), np.float32(logits_BW), -np.inf))


def smallest(probability, p: float) -> set[int]:
    """Of all sets of words whose probability reaches p, the smallest, and of those the most likely."""
    words = range(len(probability))
    for size in range(1, len(probability) + 1):
        sets = [set(found) for found in itertools.combinations(words, size)]
        best = max(sets, key=lambda found: sum(probability[w] for w in found))
        if sum(probability[w] for w in best) >= p:
            return best
    raise AssertionError("all words together have probability 1")


@pytest.mark.parametrize("p", [0.0, 0.5, 0.95])
def test_the_nucleus_is_the_smallest_set_that_reaches_p(p):
    logits_BW = 2 * np.random.default_rng(0).standard_normal((11, W))
    found = sampling.keep_top_p(jnp.asarray(logits_BW), p)
    unchanged_or_gone(found, logits_BW)
    assert kept(found) == [smallest(softmax(row), p) for row in logits_BW]


@pytest.mark.parametrize(
    ("p_BW", "p", "words"),
    [
        ([[0.125, 0.25, 0.125, 0.25, 0.25], [0.2] * 5], 0.7, [{1, 3, 4}, {0, 1, 2, 3}]),
        ([[0.125, 0.25, 0.125, 0.25, 0.25], [0.2] * 5], 0.76, [{0, 1, 3, 4}, {0, 1, 2, 3}]),
        ([[0.125, 0.25, 0.125, 0.25, 0.25], [0.2] * 5], 0.1, [{1}, {0}]),
        ([[1.0] * 4], 0.25, [{0}]),  # four equal logits: their probabilities, 1/4, and all sums of these are exact
        ([[1.0] * 4], 0.5, [{0, 1}]),
        ([[1.0] * 4], 0.5 + 2**-20, [{0, 1, 2}]),
        ([[1.0, 1e-18, 1e-36]], 1.0, [{0, 1, 2}]),
    ],
)
def test_the_nucleus_among_equals_has_the_lower_ids_and_is_exact(p_BW, p, words):
    with np.errstate(divide="ignore"):  # filled up to the other tests' shape, whose programs serve here too
        logits_BW = np.log(np.float32([(row + [0.0] * W)[:W] for row in p_BW]))
    found = sampling.keep_top_p(jnp.asarray(np.resize(logits_BW, (11, W))), p)
    assert kept(found)[: len(words)] == words


@pytest.mark.parametrize("k", [1, W - 1, 0, W + 2])
def test_the_k_most_likely_stay_and_among_equals_the_lower_ids(k):
    """No k and a k above the vocabulary keep all."""
    logits_BW = np.random.default_rng(0).integers(0, 4, (11, W)).astype(np.float32)
    found = sampling.keep_top_k(jnp.asarray(logits_BW), k)
    unchanged_or_gone(found, logits_BW)
    assert kept(found) == [set(sorted(range(W), key=lambda w: (-row[w], w))[: k or W]) for row in logits_BW]


@pytest.mark.parametrize("p", [0.07, 1.0])
def test_min_p_keeps_what_is_nearly_as_likely_as_the_likeliest(p):
    logits_BW = 2 * np.random.default_rng(0).standard_normal((11, W))
    found = sampling.keep_min_p(jnp.asarray(logits_BW), p)
    unchanged_or_gone(found, logits_BW)
    assert kept(found) == [{w for w in range(W) if softmax(row)[w] >= p * softmax(row).max()} for row in logits_BW]


@pytest.mark.parametrize("penalty", [1.7, 0.5])
def test_words_that_the_text_has_are_less_likely_and_what_is_behind_it_is_no_word(penalty):
    logits_BW, w_BN = cases.normal(0, 3, W), np.array([[1, 4, 1, 6], [5, 6, 2, 0], [0, 3, 3, 2]])
    expected = np.array(logits_BW)
    for b, length in enumerate((4, 2, 1)):
        for w in set(w_BN[b, :length].tolist()):
            expected[b, w] = expected[b, w] / penalty if expected[b, w] > 0 else expected[b, w] * penalty
    found = sampling.filter_logits(logits_BW, w_BN, np.array([4, 2, 1]), repetition_penalty=penalty)
    cases.close(jax.nn.softmax(found), jax.nn.softmax(expected), 1e-6)


def test_a_temperature_divides_and_none_is_too_low():
    logits_BW = cases.normal(0, 3, W)
    cases.close(jax.nn.softmax(sampling.apply_temperature(logits_BW, 0.7)), jax.nn.softmax(logits_BW / 0.7), 1e-6)
    for temperature in (1e-30, 1e-38, 1e-45):
        found = jax.nn.softmax(sampling.apply_temperature(100 * logits_BW, temperature))
        np.testing.assert_array_equal(found, jax.nn.one_hot(logits_BW.argmax(axis=-1), W))


SETTINGS = [(0.5, 0, 1.0, 0.0), (2.0, 5, 0.8, 0.0), (2.0, 5, 0.9, 0.5)]


@pytest.mark.parametrize(("temperature", "top_k", "top_p", "min_p"), SETTINGS)
def test_frequencies_are_the_softmax_over_what_the_filters_keep_in_their_order(temperature, top_k, top_p, min_p):
    """Chi-square with at most six degrees of freedom exceeds 28 with probability 1e-4; the key is fixed."""
    many = 7000
    p = softmax(LOGITS / temperature)
    most_likely = np.argsort(-p)[: top_k or W]
    p = np.where(np.isin(np.arange(W), most_likely), p, 0) / p[most_likely].sum()
    p = np.where(np.isin(np.arange(W), list(smallest(p, top_p - 1e-12))) & (p >= min_p * p.max()), p, 0)
    expected, logits_BW = many * p / p.sum(), np.tile(np.float32(LOGITS), (many, 1))
    draw = functools.partial(sampling.draw, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    words = jax.jit(draw)(jax.random.key(0), logits_BW)
    count = np.bincount(words, minlength=W)
    assert (count[expected == 0] == 0).all()
    assert ((count - expected)[expected > 0] ** 2 / expected[expected > 0]).sum() < 28


def test_temperature_zero_takes_the_most_likely_word_and_of_equals_the_first():
    logits_BW = np.random.default_rng(0).integers(0, 3, (17, W)).astype(np.float32)
    words = sampling.draw(jax.random.key(0), logits_BW, temperature=0, top_p=0.5)
    np.testing.assert_array_equal(words, logits_BW.argmax(axis=-1))


def test_narrow_logits_are_drawn_from_in_32_bits():
    logits_BW = cases.normal(0, 211, W).astype(jnp.bfloat16)
    draw = jax.jit(functools.partial(sampling.draw, top_p=0.9))
    narrow, wide = (draw(jax.random.key(0), logits_BW.astype(t)) for t in (jnp.bfloat16, float))
    np.testing.assert_array_equal(narrow, wide)


def test_every_sequence_has_its_own_key():
    key, logits_BW = jax.random.key(3), jnp.zeros((53, W))
    words = sampling.draw(key, logits_BW)
    np.testing.assert_array_equal(sampling.draw(key, logits_BW[:11]), words[:11])
    key_B = sampling.split_key(key, 53)
    np.testing.assert_array_equal(sampling.draw(key_B[::-1], logits_BW)[::-1], words)
    assert len(set(words.tolist())) == W and (sampling.draw(jax.random.key(4), logits_BW) != words).any()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -1}, "temperature must be 0 or a positive number, not -1"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_k": -1}, "top_k must be .* not -1"),
        ({"top_k": 2.0}, "top_k"),
        ({"top_p": 1.1}, "top_p must be a probability between 0 and 1, not 1.1"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_p": float("nan")}, "top_p"),
        ({"min_p": 1.1}, "min_p must be a probability between 0 and 1, not 1.1"),
        ({"repetition_penalty": 0}, "repetition penalty must be a positive number, 1 for none, not 0"),
        ({"repetition_penalty": 1.2}, "needs the text so far"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        sampling.draw(jax.random.key(0), jnp.zeros((2, W)), **settings)

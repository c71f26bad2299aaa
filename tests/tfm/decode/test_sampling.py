"""From logits to a token (E24): the filters against their definitions, and the frequencies of drawn tokens."""

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


def remaining(logits_BW) -> list[set[int]]:
    """Return the tokens with finite logits, for each sequence."""
    return [set(np.flatnonzero(np.isfinite(row)).tolist()) for row in np.asarray(logits_BW)]


def nucleus(probability, p: float) -> set[int]:
    """Return the smallest set of tokens whose probability reaches p, and the most likely of several such sets."""
    for size in range(1, len(probability) + 1):
        sets = itertools.combinations(range(len(probability)), size)
        best = max(sets, key=lambda tokens: sum(probability[w] for w in tokens))
        if sum(probability[w] for w in best) >= p:
            return set(best)
    raise AssertionError("all tokens together have probability 1")


def most_likely(logits, k: int) -> set[int]:
    """Return the k most likely tokens; lower ids win ties, and no k or a large k gives all."""
    return set(sorted(range(W), key=lambda w: (-logits[w], w))[: k or W])


def nearly_as_likely(logits, p: float) -> set[int]:
    return {w for w in range(W) if softmax(logits)[w] >= p * softmax(logits).max()}


TIES_BW = np.random.default_rng(0).integers(0, 4, (11, W)).astype(np.float32)
LOGITS_BW = np.float32(2 * np.random.default_rng(0).standard_normal((11, W)))
FILTERS = [(sampling.keep_top_p, p, LOGITS_BW, lambda logits, p: nucleus(softmax(logits), p)) for p in (0.0, 0.5, 0.95)]
FILTERS += [(sampling.keep_top_k, k, TIES_BW, most_likely) for k in (1, W - 1, 0, W + 2)]
FILTERS += [(sampling.keep_min_p, p, LOGITS_BW, nearly_as_likely) for p in (0.07, 1.0)]


@pytest.mark.parametrize(("keep", "number", "logits_BW", "define"), FILTERS)
def test_a_filter_keeps_the_logits_of_its_definition_and_no_others(keep, number, logits_BW, define):
    result_BW = np.asarray(keep(jnp.asarray(logits_BW), number))
    assert remaining(result_BW) == [define(logits_W, number) for logits_W in logits_BW]
    np.testing.assert_array_equal(result_BW, np.where(np.isfinite(result_BW), logits_BW, -np.inf))


@pytest.mark.parametrize(
    ("p_BW", "p", "tokens"),
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
def test_the_nucleus_among_equals_has_the_lower_ids_and_is_exact(p_BW, p, tokens):
    with np.errstate(divide="ignore"):  # padded to the other tests' shape, whose programs serve here too
        logits_BW = np.log(np.float32([(row + [0.0] * W)[:W] for row in p_BW]))
    result_BW = sampling.keep_top_p(jnp.asarray(np.resize(logits_BW, (11, W))), p)
    assert remaining(result_BW)[: len(tokens)] == tokens


@pytest.mark.parametrize("penalty", [1.7, 0.5])
def test_tokens_of_the_text_are_less_likely_and_its_padding_does_not_count(penalty):
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
    first = list(most_likely(LOGITS, top_k))
    p = np.where(np.isin(np.arange(W), first), p, 0) / p[first].sum()
    p = np.where(np.isin(np.arange(W), list(nucleus(p, top_p - 1e-12))) & (p >= min_p * p.max()), p, 0)
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
    ("setting", "values"),
    [
        ("temperature", (-1, float("nan"), float("inf"))),
        ("top_k", (-1, 2.0)),
        ("top_p", (1.1, -0.1, float("nan"))),
        ("min_p", (1.1,)),
        ("repetition_penalty", (0, 1.2)),  # the second needs the text
    ],
)
def test_settings_out_of_range_are_refused(setting, values):
    for value in values:
        with raises(ValueError, setting.replace("_penalty", " penalty"), value if value != 1.2 else "text"):
            sampling.draw(jax.random.key(0), jnp.zeros((2, W)), **{setting: value})

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


@pytest.mark.parametrize("p", [0.0, 0.2, 0.5, 0.77, 0.95, 0.999])
def test_the_nucleus_is_the_smallest_set_that_reaches_p(p):
    logits_BW = 2 * np.random.default_rng(0).standard_normal((11, W))
    found = sampling.keep_top_p(jnp.asarray(logits_BW), p)
    unchanged_or_gone(found, logits_BW)
    assert kept(found) == [smallest(softmax(row), p) for row in logits_BW]


def test_the_nucleus_among_equals_has_the_lower_ids():
    logits_BW = jnp.log(jnp.array([[0.125, 0.25, 0.125, 0.25, 0.25], [0.2, 0.2, 0.2, 0.2, 0.2]]))
    assert kept(sampling.keep_top_p(logits_BW, 0.7)) == [{1, 3, 4}, {0, 1, 2, 3}]
    assert kept(sampling.keep_top_p(logits_BW, 0.76)) == [{0, 1, 3, 4}, {0, 1, 2, 3}]
    assert kept(sampling.keep_top_p(logits_BW, 0.1)) == [{1}, {0}]


@pytest.mark.parametrize(("p", "words"), [(0.25, {0}), (0.5, {0, 1}), (0.75, {0, 1, 2}), (0.5 + 2**-20, {0, 1, 2})])
def test_a_nucleus_that_reaches_p_exactly_is_large_enough(p, words):
    """Four equal logits: their probabilities, 1/4, and all sums of these are exact."""
    assert kept(sampling.keep_top_p(jnp.zeros((1, 4)), p)) == [words]


def test_a_nucleus_of_one_keeps_what_has_almost_no_probability():
    logits_BW = jnp.array([[0.0, -40.0, -80.0]])
    np.testing.assert_array_equal(sampling.keep_top_p(logits_BW, 1.0), logits_BW)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("k", [1, 3, W - 1])
def test_the_k_most_likely_stay_and_among_equals_the_lower_ids(k, known):
    logits_BW = np.random.default_rng(0).integers(0, 4, (13, W)).astype(np.float32)
    found = sampling.keep_top_k(jnp.asarray(logits_BW), k if known else jnp.asarray(k))
    unchanged_or_gone(found, logits_BW)
    assert kept(found) == [set(sorted(range(W), key=lambda w: (-row[w], w))[:k]) for row in logits_BW]


@pytest.mark.parametrize("k", [0, W, W + 2])
def test_no_k_and_a_k_above_the_vocabulary_keep_all(k):
    logits_BW = jnp.asarray(LOGITS)[None]
    np.testing.assert_array_equal(sampling.keep_top_k(logits_BW, k), logits_BW)
    np.testing.assert_array_equal(sampling.keep_top_k(logits_BW, jnp.asarray(k)), logits_BW)


def test_heat_divides_and_survives_every_temperature():
    logits_BW = cases.normal(0, 3, W)
    cases.close(jax.nn.softmax(sampling.apply_temperature(logits_BW, 0.7)), jax.nn.softmax(logits_BW / 0.7), 1e-6)
    for temperature in (0.0, 1e-30, 1e-38):
        found = jax.nn.softmax(sampling.apply_temperature(100 * logits_BW, temperature))
        np.testing.assert_array_equal(found, jax.nn.one_hot(logits_BW.argmax(axis=-1), W))
    assert kept(sampling.apply_temperature(jnp.array([[1.0, 3.0, 3.0]]), 0.0)) == [{1}]


@functools.cache
def compiled():
    """`draw` with all settings as data; how often it was traced."""
    traces = []

    @jax.jit
    def draw(key, logits_BW, chance):
        traces.append(1)
        return sampling.draw(key, logits_BW, **chance)

    def run(key, logits_BW, **chance):
        return draw(key, logits_BW, {name: jnp.asarray(value) for name, value in chance.items()})

    return run, traces


SETTINGS = [
    (1.0, 0, 1.0),
    (0.5, 0, 1.0),
    (2.0, 0, 1.0),
    (1.0, 4, 1.0),
    (1.0, 0, 0.6),
    (2.0, 5, 0.8),
]


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), SETTINGS)
def test_frequencies_are_the_softmax_over_what_the_filters_keep_in_their_order(temperature, top_k, top_p):
    """Chi-square with at most six degrees of freedom exceeds 28 with probability 1e-4; the key is fixed."""
    many = 7000
    draw, _ = compiled()
    p = softmax(LOGITS / temperature)
    most_likely = np.argsort(-p)[: top_k or W]
    p = np.where(np.isin(np.arange(W), most_likely), p, 0) / p[most_likely].sum()
    p = np.where(np.isin(np.arange(W), list(smallest(p, top_p - 1e-12))), p, 0)
    expected = many * p / p.sum()
    chance = dict(temperature=temperature, top_k=top_k, top_p=top_p)
    count = np.bincount(draw(jax.random.key(0), jnp.tile(jnp.asarray(LOGITS), (many, 1)), **chance), minlength=W)
    assert (count[expected == 0] == 0).all()
    assert ((count - expected)[expected > 0] ** 2 / expected[expected > 0]).sum() < 28


def test_settings_as_data_draw_the_same_words_and_compile_once():
    draw, traces = compiled()
    logits_BW = cases.normal(0, 53, W)
    settings = [
        dict(zip(("temperature", "top_k", "top_p"), setting, strict=True)) for setting in [(0.0, 0, 1.0), *SETTINGS]
    ]
    draw(jax.random.key(1), logits_BW, **settings[0])
    before = len(traces)
    found = [draw(jax.random.key(1), logits_BW, **setting) for setting in settings]
    assert len(traces) == before
    assert len({tuple(words.tolist()) for words in found}) == len(found)
    np.testing.assert_array_equal(found[-1], sampling.draw(jax.random.key(1), logits_BW, **settings[-1]))


@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.5}])
def test_temperature_zero_takes_the_most_likely_word_and_of_equals_the_first(filters):
    logits_BW = np.random.default_rng(0).integers(0, 3, (17, W)).astype(np.float32)
    words = sampling.draw(jax.random.key(0), logits_BW, temperature=0, **filters)
    np.testing.assert_array_equal(words, logits_BW.argmax(axis=-1))


def test_narrow_logits_are_drawn_from_in_32_bits():
    logits_BW = cases.normal(0, 211, W).astype(jnp.bfloat16)
    settings = dict(temperature=0.9, top_p=0.9)
    words = sampling.draw(jax.random.key(0), logits_BW, **settings)
    np.testing.assert_array_equal(words, sampling.draw(jax.random.key(0), logits_BW.astype(jnp.float32), **settings))


def test_every_sequence_has_its_own_key():
    key, logits_BW = jax.random.key(3), jnp.zeros((53, W))
    draw = functools.partial(compiled()[0], temperature=1.0, top_k=0, top_p=1.0)
    words = draw(key, logits_BW)
    np.testing.assert_array_equal(draw(key, logits_BW[:11]), words[:11])
    key_B = sampling.one_per_sequence(key, 53)
    np.testing.assert_array_equal(draw(key_B[::-1], logits_BW)[::-1], words)
    assert len(set(words.tolist())) == W and (draw(jax.random.key(4), logits_BW) != words).any()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -1}, "temperature must be 0 or a positive number, not -1"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_k": -1}, "top_k must be a number of words, or 0 for all, not -1"),
        ({"top_k": 2.0}, "top_k"),
        ({"top_p": 1.1}, "top_p must be a probability between 0 and 1, not 1.1"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_p": float("nan")}, "top_p"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        sampling.draw(jax.random.key(0), jnp.zeros((2, W)), **settings)

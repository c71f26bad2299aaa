"""Beam search against its definition in plain Python, against all continuations there are, and against greedy text."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import recurrent

from tfm.decode import beam
from tfm.decode import generate as decode

PROMPTS_BN, LENGTH_B = recurrent.prompts(3, 1, 4, columns=4)
PADDED_BN = np.where(np.arange(4) < LENGTH_B[:, None], PROMPTS_BN, 0)


def log_p(words) -> np.ndarray:
    """log softmax of what comes after the words."""
    logits = np.float64(recurrent.logits(words))
    return logits - np.log(np.exp(logits).sum())


def scored(total: float, length: int, alpha: float) -> float:
    return total / ((5 + length) / 6) ** alpha


def all_continuations(prompt, log_p, *, steps: int, stop, alpha: float) -> list[tuple[float, list[int]]]:
    """(score, words) of every text of `steps` words and every shorter one that ends in a stop word, best first."""
    found, live = [], [(0.0, list(prompt))]
    for length in range(1, steps + 1):
        longer = [(total + p, words + [w]) for total, words in live for w, p in enumerate(log_p(words)) if p > -np.inf]
        ends = [length == steps or words[-1] in stop for _, words in longer]
        found += [(scored(total, length, alpha), words) for total, words in itertools.compress(longer, ends)]
        live = [hypothesis for hypothesis, end in zip(longer, ends, strict=True) if not end]
    return sorted(found, reverse=True)


def searched(prompt, *, size: int, steps: int, stop, alpha: float) -> list[tuple[float, list[int]]]:
    """Beam search by its definition, to the last step: (score, words), best first."""
    ended, live = [], [(0.0, list(prompt))]
    for length in range(1, steps + 1):
        longer = [(total + p, words + [w]) for total, words in live for w, p in enumerate(log_p(words))]
        longer.sort(reverse=True)
        ended += [(scored(total, length, alpha), words) for total, words in longer[:size] if words[-1] in stop]
        live = [hypothesis for hypothesis in longer if hypothesis[1][-1] not in stop][:size]
    ended += [(scored(total, steps, alpha), words) for total, words in live]
    return sorted(ended, reverse=True)[:size]


def equal(words_QN, score_Q, expected: list[tuple[float, list[int]]]) -> None:
    np.testing.assert_allclose(score_Q, [score for score, _ in expected], rtol=1e-5, atol=1e-5)
    padded = [words + [0] * (words_QN.shape[1] - len(words)) for _, words in expected]
    np.testing.assert_array_equal(words_QN, padded)


@functools.cache
def compiled(size: int, steps: int):
    """One compiled search with stop words and penalty as data, and the names of what was traced for it."""
    model = recurrent.incremental()
    search = jax.jit(functools.partial(beam.search, model.start, model.step, beam=size, steps=steps))

    def run(prompt_BN=PROMPTS_BN, length_B=LENGTH_B, *, stop, alpha: float):
        return search(prompt_BN, length_B, stop=jnp.array([*stop, -1, -1][:2]), length_penalty=jnp.asarray(alpha))

    return run, model.traces


CASES = [(stop, alpha) for stop in [(), (3,), (2, 6)] for alpha in (0.0, 0.6, 2.0, -0.5)]


@pytest.mark.parametrize("size", [2, 5])
def test_it_is_the_search_of_the_definition(size):
    """Unequal prompts at once; the definition goes on to the last step, so ending early changes nothing."""
    run, _ = compiled(size, 6)
    shorter = 0
    for stop, alpha in CASES:
        words, score = run(stop=stop, alpha=alpha)
        assert words.shape == (3, size, 4 + 6) and score.shape == (3, size)
        for b, length in enumerate(LENGTH_B):
            expected = searched(PROMPTS_BN[b, :length].tolist(), size=size, steps=6, stop=stop, alpha=alpha)
            equal(words[b], score[b], expected)
            shorter += len({len(text) for _, text in expected}) > 1
    assert shorter > 5  # hypotheses of several lengths did compete


def test_a_beam_of_one_without_penalty_is_greedy():
    run, _ = compiled(1, 6)
    model, key = recurrent.incremental(), jax.random.key(0)
    generate = functools.partial(decode.generate, model.start, model.step, steps=6, temperature=0)
    greedy = jax.jit(lambda stop: generate(PROMPTS_BN, LENGTH_B, key, stop=stop)[0])
    lengths = set()
    for stop in itertools.combinations(range(recurrent.W), 2):
        words, _ = run(stop=stop, alpha=0.0)
        expected = greedy(jnp.array(stop))
        np.testing.assert_array_equal(words[:, 0], expected)
        lengths |= set(np.isin(expected, stop).argmax(axis=1).tolist())
    assert len(lengths) > 2


def few(words) -> np.ndarray:
    """Of 29 words three are possible: log p after a history of any length, by a made-up rule."""
    p = np.exp(np.sin(1.0 + np.arange(3) * (1 + sum((i + 2) * w for i, w in enumerate(words)))))
    return np.concatenate([np.full(13, -np.inf), np.log(p / p.sum()), np.full(13, -np.inf)])


def by_few():
    """`few` as an incremental model; its cache is the sum over the history."""

    def logits(total_B: jax.Array) -> jax.Array:
        three_B3 = jnp.sin(1.0 + jnp.arange(3) * (1.0 + total_B[:, None]))
        return jnp.full((len(total_B), 29), -jnp.inf).at[:, 13:16].set(three_B3 + 7)

    def start(w_BN, length_B):
        n_N = jnp.arange(w_BN.shape[1])
        total_B = jnp.where(n_N < length_B[:, None], w_BN * (n_N + 2), 0).sum(axis=1)
        return logits(total_B), total_B

    def step(total_B, w_B, n_B):
        total_B = total_B + w_B * (n_B + 2)
        return logits(total_B), total_B

    return start, step


def test_a_beam_as_wide_as_all_continuations_finds_them_in_order():
    """27 = 3^3 hypotheses hold everything that three words can make in three steps; the rest of the beam is empty."""
    search = jax.jit(functools.partial(beam.search, *by_few(), beam=27, steps=3))
    for stop, alpha in itertools.product([(-1, -1), (14, -1), (13, 15)], (0.0, 0.6, 2.0, -0.5)):
        words, score = search(PROMPTS_BN, LENGTH_B, stop=jnp.array(stop), length_penalty=alpha)
        for b, length in enumerate(LENGTH_B):
            prompt = PROMPTS_BN[b, :length].tolist()
            expected = all_continuations(prompt, few, steps=3, stop=stop, alpha=alpha)
            assert len(expected) == {(-1, -1): 27, (14, -1): 1 + 2 + 12, (13, 15): 2 + 2 + 3}[stop]
            equal(words[b, : len(expected)], score[b, : len(expected)], expected)
            assert (score[b, len(expected) :] == -jnp.inf).all()
            np.testing.assert_array_equal(words[b, len(expected) :, :4], np.tile(PADDED_BN[b], (27 - len(expected), 1)))
            assert (words[b, len(expected) :, 4:] == 0).all()


def test_the_penalty_prefers_long_texts():
    run, _ = compiled(5, 6)
    lengths = [(run(stop=(1, 5), alpha=alpha)[0][:, 0] > 0).sum() for alpha in (-0.5, 2.0)]
    assert lengths[0] < lengths[1]
    np.testing.assert_allclose(beam.penalty(jnp.array([1, 7]), 0.6), [1, 2**0.6], rtol=1e-6)


def test_one_compilation_serves_all_prompts_stops_and_penalties():
    run, traces = compiled(2, 6)
    run(stop=(), alpha=0.0)
    before = list(traces)
    for seed, lengths in enumerate([(1, 2, 3), (4, 4, 4)]):
        run(*recurrent.prompts(*lengths, columns=4, seed=seed), stop=(seed,), alpha=0.5)
    assert traces == before and set(traces) == {"start", "step"}


def test_the_search_is_over_when_nothing_can_win():
    """A certain stop word ends it after the one step that reads the word before: any further one would give NaN."""

    def step(cache, w_B, n_B):
        one_B3 = jnp.log(jnp.tile(jnp.array([0.0, 1.0, 0.0]), (len(w_B), 1)))
        return jnp.where(n_B[:, None] > 1, jnp.nan, one_B3), cache

    def start(w_BN, length_B):
        return jnp.log(jnp.tile(jnp.array([0.6, 0.0, 0.4]), (len(w_BN), 1))), {}

    search = jax.jit(functools.partial(beam.search, start, step, beam=2, steps=9, stop=[1]))
    words, score = search(jnp.array([[2]]), jnp.array([1]))
    np.testing.assert_array_equal(words[0, :, :4], [[2, 0, 1, 0], [2, 2, 1, 0]])
    np.testing.assert_allclose(score, jnp.log(jnp.array([[0.6, 0.4]])), rtol=1e-6)


def test_no_steps_return_the_prompt():
    words, score = compiled(2, 0)[0](stop=(), alpha=0.6)
    np.testing.assert_array_equal(words, np.repeat(PADDED_BN[:, None], 2, axis=1))
    np.testing.assert_array_equal(score, [[0, -np.inf]] * 3)


def test_words_keep_the_dtype_of_the_prompt():
    words, _ = compiled(2, 6)[0](PROMPTS_BN.astype(jnp.int16), stop=(2,), alpha=0.0)
    assert words.dtype == jnp.int16


@pytest.mark.parametrize("size", [0, -3, recurrent.W + 1])
def test_a_beam_of_another_size_than_the_vocabulary_allows_is_refused(size):
    model = recurrent.incremental()
    with pytest.raises(ValueError, match=f"between 1 and 7 hypotheses, the size of the vocabulary, not {size}$"):
        beam.search(model.start, model.step, PROMPTS_BN, LENGTH_B, beam=size, steps=3)


def test_prompts_that_cannot_go_on_are_refused():
    model = recurrent.incremental()
    with pytest.raises(ValueError, match="at least one word"):
        beam.search(model.start, model.step, PROMPTS_BN, LENGTH_B * 0, beam=2, steps=3)

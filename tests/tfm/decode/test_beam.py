"""Beam search against its definition in plain Python, and against all continuations there are."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import recurrent

from tfm.decode import beam

PROMPTS_BN, LENGTH_B = recurrent.prompts(3, 1, 4, columns=4)
PADDED_BN = np.where(np.arange(4) < LENGTH_B[:, None], PROMPTS_BN, 0)


def log_p(words) -> np.ndarray:
    """log softmax of what comes after the words."""
    logits = np.float64(recurrent.logits(words))
    return logits - np.log(np.exp(logits).sum())


def searched(prompt, log_p, *, size: int, steps: int, stop, alpha: float) -> list[tuple[float, list[int]]]:
    """Beam search by its definition, to the last step: (score, words), best first."""
    ended, live = [], [(0.0, list(prompt))]
    for length in range(1, steps + 1):
        longer = [(total + p, words + [w]) for total, words in live for w, p in enumerate(log_p(words)) if p > -np.inf]
        longer.sort(reverse=True)
        live = [hypothesis for hypothesis in longer if hypothesis[1][-1] not in stop][:size]
        ends = live if length == steps else []
        ends = ends + [hypothesis for hypothesis in longer[:size] if hypothesis[1][-1] in stop]
        ended += [(total / ((5 + length) / 6) ** alpha, words) for total, words in ends]
    return sorted(ended, reverse=True)[:size]


def equal(words_QN, score_Q, expected: list[tuple[float, list[int]]]) -> None:
    np.testing.assert_allclose(score_Q, [score for score, _ in expected], rtol=1e-5, atol=1e-5)
    padded = [words + [0] * (words_QN.shape[1] - len(words)) for _, words in expected]
    np.testing.assert_array_equal(words_QN, padded)


@functools.cache
def compiled(size: int):
    """One compiled search with stop words and penalty as data, and the names of what was traced for it."""
    model = recurrent.incremental()
    search = jax.jit(functools.partial(beam.search, model.start, model.step, beam=size, steps=6))

    def run(prompt_BN=PROMPTS_BN, length_B=LENGTH_B, *, stop, alpha: float):
        data = dict(stop=np.array([*stop, -1, -1][:2]), length_penalty=np.float32(alpha))
        return jax.device_get(search(prompt_BN, length_B, **data))

    return run, model.traces


CASES = [(stop, alpha) for stop in [(), (3,), (2, 6)] for alpha in (0.0, 0.6, 2.0, -0.5)]


@pytest.mark.parametrize("size", [1, 5])
def test_it_is_the_search_of_the_definition(size):
    """Unequal prompts at once; the definition goes on to the last step, so ending early changes nothing.

    One compilation serves all prompts, stops and penalties.
    """
    run, traces = compiled(size)
    first, shorter, before = True, 0, []
    for stop, alpha in CASES:
        words, score = run(stop=stop, alpha=alpha)
        before, first = list(traces) if first else before, False
        assert words.shape == (3, size, 4 + 6) and score.shape == (3, size)
        for b, length in enumerate(LENGTH_B):
            expected = searched(PROMPTS_BN[b, :length].tolist(), log_p, size=size, steps=6, stop=stop, alpha=alpha)
            equal(words[b], score[b], expected)
            shorter += len({len(text) for _, text in expected}) > 1
    assert shorter > 5 or size == 1  # hypotheses of several lengths did compete
    run(*recurrent.prompts(4, 4, 4, columns=4, seed=1), stop=(1,), alpha=0.5)
    assert traces == before and set(traces) == {"start", "step"}


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
    for stop, alpha in itertools.product([(-1, -1), (14, -1), (13, 15)], (0.0, 2.0, -0.5)):
        words, score = jax.device_get(search(PROMPTS_BN, LENGTH_B, stop=np.array(stop), length_penalty=alpha))
        for b, length in enumerate(LENGTH_B):
            expected = searched(PROMPTS_BN[b, :length].tolist(), few, size=29**3, steps=3, stop=stop, alpha=alpha)
            assert len(expected) == {(-1, -1): 27, (14, -1): 1 + 2 + 12, (13, 15): 2 + 2 + 3}[stop]
            equal(words[b, : len(expected)], score[b, : len(expected)], expected)
            assert (score[b, len(expected) :] == -jnp.inf).all()
            np.testing.assert_array_equal(words[b, len(expected) :, :4], np.tile(PADDED_BN[b], (27 - len(expected), 1)))
            assert (words[b, len(expected) :, 4:] == 0).all()


def test_the_search_is_over_when_nothing_can_win():
    """A certain stop word ends it after the one step that reads the word before: any further one would give NaN."""

    def step(cache, w_B, n_B):
        one_B3 = jnp.log(jnp.tile(jnp.array([0.0, 1.0, 0.0]), (len(w_B), 1)))
        return jnp.where(n_B[:, None] > 1, jnp.nan, one_B3), cache

    def start(w_BN, length_B):
        return jnp.log(jnp.tile(jnp.array([0.6, 0.0, 0.4]), (len(w_BN), 1))), {}

    search = jax.jit(functools.partial(beam.search, start, step, beam=2, steps=9, stop=[1]))
    words, score = search(jnp.array([[2]], jnp.int16), jnp.array([1]))
    assert words.dtype == jnp.int16  # that of the prompt
    np.testing.assert_array_equal(words[0, :, :4], [[2, 0, 1, 0], [2, 2, 1, 0]])
    np.testing.assert_allclose(score, jnp.log(jnp.array([[0.6, 0.4]])), rtol=1e-6)


def test_a_negative_penalty_does_not_end_it_early():
    """0 0 1, of probability 0.72, comes after two that ended; only if it had forty words it would be worse."""

    def step(cache, w_B, n_B):
        return jnp.log(jnp.where(n_B[:, None] > 1, jnp.array([0.0, 1.0, 0.0]), jnp.array([0.8, 0.2, 0.0]))), cache

    def start(w_BN, length_B):
        return jnp.log(jnp.array([[0.9, 0.1, 0.0]])), {}

    call = dict(beam=2, steps=40, stop=[1], length_penalty=-1.0)
    words, score = jax.jit(functools.partial(beam.search, start, step, **call))(np.array([[2]]), np.array([1]))
    np.testing.assert_array_equal(words[0, :, :4], [[2, 0, 0, 1], [2, 0, 1, 0]])
    np.testing.assert_allclose(score[0], np.log([0.72, 0.18]) * [8 / 6, 7 / 6], rtol=1e-5)


def test_no_steps_return_the_prompt():
    model = recurrent.incremental()
    search = jax.jit(functools.partial(beam.search, model.start, model.step, beam=2, steps=0, length_penalty=0.6))
    words, score = search(PROMPTS_BN, LENGTH_B)
    np.testing.assert_array_equal(words, np.repeat(PADDED_BN[:, None], 2, axis=1))
    np.testing.assert_array_equal(score, [[0, -np.inf]] * 3)


@pytest.mark.parametrize(
    ("size", "length", "says"),
    [(n, 1, f"between 1 and 7 hypotheses, the size of the vocabulary, not {n}$") for n in (0, recurrent.W + 1)]
    + [(2, 0, "at least one token")],
)
def test_what_cannot_be_searched_is_refused(size, length, says):
    model = recurrent.incremental()
    with pytest.raises(ValueError, match=says):
        beam.search(model.start, model.step, PROMPTS_BN, LENGTH_B * length, beam=size, steps=3)

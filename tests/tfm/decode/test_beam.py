"""Beam search against its definition in plain Python, and against the list of all continuations."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import recurrent
from errors import raises

from tfm.decode import beam

PROMPTS_BN, LENGTH_B = recurrent.prompts(3, 1, 4, columns=4)
PADDED_BN = np.where(np.arange(4) < LENGTH_B[:, None], PROMPTS_BN, 0)


def log_p(text) -> np.ndarray:
    """Return log p of each token after the text."""
    logits = np.float64(recurrent.logits(text))
    return logits - np.log(np.exp(logits).sum())


def search_by_definition(prompt, log_p, *, size: int, steps: int, stop, alpha: float) -> list[tuple[float, list[int]]]:
    """Return [(score, text)] of a beam search by its definition, the best first. It always takes all steps."""
    finished, live = [], [(0.0, list(prompt))]
    for length in range(1, steps + 1):
        extended = [(total + p, text + [w]) for total, text in live for w, p in enumerate(log_p(text)) if p > -np.inf]
        extended.sort(reverse=True)
        live = [hypothesis for hypothesis in extended if hypothesis[1][-1] not in stop][:size]
        ends = live if length == steps else []
        ends = ends + [hypothesis for hypothesis in extended[:size] if hypothesis[1][-1] in stop]
        finished += [(total / ((5 + length) / 6) ** alpha, text) for total, text in ends]
    return sorted(finished, reverse=True)[:size]


def check_hypotheses(w_QN, score_Q, expected: list[tuple[float, list[int]]]) -> None:
    np.testing.assert_allclose(score_Q, [score for score, _ in expected], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(w_QN, [text + [0] * (w_QN.shape[1] - len(text)) for _, text in expected])


CASES = [(stop, alpha) for stop in [(-1, -1), (3, -1), (2, 6)] for alpha in (0.0, 0.6, 2.0, -0.5)]


@pytest.mark.parametrize("size", [1, 5])
def test_beam_search_equals_its_definition(size):
    """Prompts have unequal lengths, and stopping before the last step changes nothing.

    One compilation serves all prompts, stop tokens and penalties.
    """
    model, unequal_lengths = recurrent.incremental(), 0
    search = jax.jit(functools.partial(beam.search, model.start, model.step, beam=size, steps=6))
    search(*recurrent.prompts(4, 4, 4, columns=4, seed=1), stop=np.array([1, -1]), length_penalty=np.float32(0.5))
    traces = list(model.traces)
    for stop, alpha in CASES:
        options = dict(stop=np.array(stop), length_penalty=np.float32(alpha))
        w_BQN, score_BQ = jax.device_get(search(PROMPTS_BN, LENGTH_B, **options))
        assert w_BQN.shape == (3, size, 4 + 6) and score_BQ.shape == (3, size)
        for b, length in enumerate(LENGTH_B):
            call = dict(size=size, steps=6, stop=stop, alpha=alpha)
            expected = search_by_definition(PROMPTS_BN[b, :length].tolist(), log_p, **call)
            check_hypotheses(w_BQN[b], score_BQ[b], expected)
            unequal_lengths += len({len(text) for _, text in expected}) > 1
    assert unequal_lengths > 5 or size == 1  # results contain hypotheses of several lengths
    assert model.traces == traces and set(traces) == {"start", "step"}


def log_p_of_three(text) -> np.ndarray:
    """Return log p after a text of any length, by an arbitrary rule: three of 29 tokens are possible."""
    p = np.exp(np.sin(1.0 + np.arange(3) * (1 + sum((i + 2) * w for i, w in enumerate(text)))))
    return np.concatenate([np.full(13, -np.inf), np.log(p / p.sum()), np.full(13, -np.inf)])


def model_of_three():
    """Return `log_p_of_three` as an incremental model; its cache is the sum over the text."""

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


def test_a_beam_of_all_continuations_returns_them_in_order():
    """27 = 3^3 hypotheses are all texts of three possible tokens. With stop tokens, the rest of the beam is empty."""
    search = jax.jit(functools.partial(beam.search, *model_of_three(), beam=27, steps=3))
    for stop, alpha in itertools.product([(-1, -1), (14, -1), (13, 15)], (0.0, 2.0, -0.5)):
        w_BQN, score_BQ = jax.device_get(search(PROMPTS_BN, LENGTH_B, stop=np.array(stop), length_penalty=alpha))
        for b, length in enumerate(LENGTH_B):
            call = dict(size=29**3, steps=3, stop=stop, alpha=alpha)
            expected = search_by_definition(PROMPTS_BN[b, :length].tolist(), log_p_of_three, **call)
            count = {(-1, -1): 27, (14, -1): 1 + 2 + 12, (13, 15): 2 + 2 + 3}[stop]
            assert len(expected) == count and (score_BQ[b, count:] == -jnp.inf).all()
            check_hypotheses(w_BQN[b, :count], score_BQ[b, :count], expected)
            np.testing.assert_array_equal(w_BQN[b, count:], np.tile([*PADDED_BN[b], 0, 0, 0], (27 - count, 1)))


def test_the_search_stops_when_no_live_hypothesis_can_win():
    """A stop token of probability 1 ends the search. Any later step would give NaN."""

    def step(cache, w_B, n_B):
        one_B3 = jnp.log(jnp.tile(jnp.array([0.0, 1.0, 0.0]), (len(w_B), 1)))
        return jnp.where(n_B[:, None] > 1, jnp.nan, one_B3), cache

    def start(w_BN, length_B):
        return jnp.log(jnp.tile(jnp.array([0.6, 0.0, 0.4]), (len(w_BN), 1))), {}

    search = jax.jit(functools.partial(beam.search, start, step, beam=2, steps=9, stop=[1]))
    w_BQN, score = jax.device_get(search(np.array([[2]], np.int16), np.array([1])))
    assert w_BQN.dtype == np.int16  # the dtype of the prompt
    np.testing.assert_array_equal(w_BQN[0, :, :4], [[2, 0, 1, 0], [2, 2, 1, 0]])
    np.testing.assert_allclose(score, np.log([[0.6, 0.4]]), rtol=1e-6)


def test_a_negative_penalty_does_not_end_the_search_too_early():
    """The text 0 0 1 of probability 0.72 ends after two others. Its score is the second best with the penalty -1."""

    def step(cache, w_B, n_B):
        return jnp.log(jnp.where(n_B[:, None] > 1, jnp.array([0.0, 1.0, 0.0]), jnp.array([0.8, 0.2, 0.0]))), cache

    def start(w_BN, length_B):
        return jnp.log(jnp.array([[0.9, 0.1, 0.0]])), {}

    call = dict(beam=2, steps=40, stop=[1], length_penalty=-1.0)
    search = jax.jit(functools.partial(beam.search, start, step, **call))
    w_BQN, score = jax.device_get(search(np.array([[2]]), np.array([1])))
    np.testing.assert_array_equal(w_BQN[0, :, :4], [[2, 0, 0, 1], [2, 0, 1, 0]])
    np.testing.assert_allclose(score[0], np.log([0.72, 0.18]) * [8 / 6, 7 / 6], rtol=1e-5)


def test_zero_steps_return_the_prompt():
    model = recurrent.incremental()
    search = jax.jit(functools.partial(beam.search, model.start, model.step, beam=2, steps=0, length_penalty=0.6))
    w_BQN, score = search(PROMPTS_BN, LENGTH_B)
    np.testing.assert_array_equal(w_BQN, np.repeat(PADDED_BN[:, None], 2, axis=1))
    np.testing.assert_array_equal(score, [[0, -np.inf]] * 3)


@pytest.mark.parametrize("size", [0, recurrent.W + 1])
def test_a_beam_without_hypotheses_or_wider_than_the_vocabulary_is_refused(size):
    model = recurrent.incremental()
    with raises(ValueError, recurrent.W, size):
        search = functools.partial(beam.search, model.start, model.step, beam=size, steps=3)
        jax.eval_shape(search, PROMPTS_BN, LENGTH_B)

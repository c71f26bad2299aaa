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


def log_p(text, tokens=range(recurrent.W)) -> dict[int, float]:
    """Return {w: log p(w) after the text} for these tokens, as if no other token were possible."""
    logits = {w: float(logit) for w, logit in enumerate(recurrent.logits(text)) if w in tokens}
    return {w: logit - np.log(sum(map(np.exp, logits.values()))) for w, logit in logits.items()}


def search_by_definition(prompt, log_p, *, size: int, steps: int, stop, alpha: float) -> list[tuple[float, list[int]]]:
    """Return [(score, text)] of a beam search by its definition, the best first. It always takes all steps."""
    finished, live = [], [(0.0, list(prompt))]
    for length in range(1, steps + 1):
        extended = [(total + p, text + [w]) for total, text in live for w, p in log_p(text).items()]
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


ALLOWED = np.where(np.isin(np.arange(29), (1, 2, 3)), 0, -np.inf).astype(np.float32)  # three of 29 tokens are possible


def widen(logits):
    """Add impossible tokens to the logits (7,) or (B, 7), to allow wide beams."""
    return jnp.concatenate([logits, jnp.zeros((*logits.shape[:-1], 22))], axis=-1) + ALLOWED


def test_a_beam_of_all_continuations_returns_them_in_order():
    """27 = 3^3 hypotheses are all texts of three possible tokens. With stop tokens, the rest of the beam is empty."""
    model = recurrent.incremental()
    functions = (lambda *args, f=f: (widen((result := f(*args))[0]), result[1]) for f in (model.start, model.step))
    search = jax.jit(functools.partial(beam.search, *functions, beam=27, steps=3))
    for (stop, count), alpha in itertools.product([((-1, -1), 27), ((2, -1), 15), ((1, 3), 7)], (0.0, 2.0, -0.5)):
        w_BQN, score_BQ = jax.device_get(search(PROMPTS_BN, LENGTH_B, stop=np.array(stop), length_penalty=alpha))
        for b, length in enumerate(LENGTH_B):
            call = dict(size=29**3, steps=3, stop=stop, alpha=alpha)
            of_three = functools.partial(log_p, tokens=(1, 2, 3))
            expected = search_by_definition(PROMPTS_BN[b, :length].tolist(), of_three, **call)
            assert len(expected) == count and (score_BQ[b, count:] == -np.inf).all()
            check_hypotheses(w_BQN[b, :count], score_BQ[b, :count], expected)
            np.testing.assert_array_equal(w_BQN[b, count:], np.tile([*PADDED_BN[b], 0, 0, 0], (27 - count, 1)))


def search_small(first_p, step_p, **call):
    """Return texts and scores of a search after the prompt 2. step_p(n_B): probabilities after the token at n."""

    def step(cache, w_B, n_B):
        return jnp.log(jnp.broadcast_to(step_p(n_B[:, None]), (len(w_B), 3))), cache

    def start(w_BN, length_B):
        return jnp.log(jnp.array([first_p])), {}

    search = jax.jit(functools.partial(beam.search, start, step, beam=2, stop=[1], **call))
    return jax.device_get(search(np.array([[2]], np.int16), np.array([1])))


def test_the_search_stops_when_no_live_hypothesis_can_win():
    """A stop token of probability 1 ends the search. Any later step would give NaN."""
    end = np.array([0.0, 1.0, 0.0])
    w_BQN, score_BQ = search_small([0.6, 0.0, 0.4], lambda n_B1: jnp.where(n_B1 > 1, jnp.nan, end), steps=9)
    assert w_BQN.dtype == np.int16  # the dtype of the prompt
    np.testing.assert_array_equal(w_BQN[0, :, :4], [[2, 0, 1, 0], [2, 2, 1, 0]])
    np.testing.assert_allclose(score_BQ, np.log([[0.6, 0.4]]), rtol=1e-6)


def test_a_negative_penalty_does_not_end_the_search_too_early():
    """The text 0 0 1 of probability 0.72 ends after two others. Its score is the second best with the penalty -1."""
    p_W, end_W = np.array([0.8, 0.2, 0.0]), np.array([0.0, 1.0, 0.0])
    call = dict(steps=40, length_penalty=-1.0)
    w_BQN, score_BQ = search_small([0.9, 0.1, 0.0], lambda n_B1: jnp.where(n_B1 > 1, end_W, p_W), **call)
    np.testing.assert_array_equal(w_BQN[0, :, :4], [[2, 0, 0, 1], [2, 0, 1, 0]])
    np.testing.assert_allclose(score_BQ[0], np.log([0.72, 0.18]) * [8 / 6, 7 / 6], rtol=1e-5)


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

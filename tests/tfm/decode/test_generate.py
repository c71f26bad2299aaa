"""Text from a next-token model (E24): the moving window and the increments equal a loop over the tokens."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import recurrent
from errors import raises

from tfm.decode import generate as decode, sampling

STEPS = 9
LENGTHS = (4, 1, 5, 2)
PROMPTS_BN, LENGTH_B = recurrent.prompts(*LENGTHS, columns=5)
KEY = jax.random.key(5)
CHANCES = {"greedy": dict(temperature=0.0), "all": dict(temperature=1.5)}
CHANCES |= {"window": dict(temperature=2.0, top_k=5, top_p=0.9, min_p=0.03, repetition_penalty=2.5)}
CONTEXT = {"window": 3}  # there are prompts that are shorter, as long, longer


@functools.cache
def compiled(chance: str):
    """Return a compiled `generate` whose stop tokens are data, and the names of the functions traced for it."""
    model = recurrent.incremental()
    both = model.start, model.step
    if chance in CONTEXT:
        both = decode.window(model.start, context=CONTEXT[chance], capacity=PROMPTS_BN.shape[1] + STEPS)
    generate = jax.jit(functools.partial(decode.generate, *both, steps=STEPS, **CHANCES[chance]))

    def run(key, *, prompt_BN=PROMPTS_BN, length_B=LENGTH_B, stop=()):
        stops = np.array([*stop, -1, -1][:2])  # no token is -1
        return jax.device_get(generate(prompt_BN, length_B, key, stop=stops))

    return run, model.traces


@functools.cache
def slow(chance: str) -> list[list[int]]:
    """Return texts by the definition: a token from the logits after the last tokens, with the key of (b, n); repeat."""
    draw = jax.jit(functools.partial(sampling.draw, **CHANCES[chance]))
    texts = [PROMPTS_BN[b, :length].tolist() for b, length in enumerate(LENGTHS)]
    for b, text in enumerate(texts):
        for n in range(len(text), len(text) + STEPS):
            key_b = jax.random.fold_in(jax.random.fold_in(KEY, b), n)
            w_1N, length = np.array([text + [0] * (STEPS + 5 - n)]), np.array([n])
            context = text[-CONTEXT.get(chance, n) :]
            text.append(int(draw(key_b[None], recurrent.logits(context)[None], w_1N, length)[0]))
    return texts


@pytest.mark.parametrize("stop", [(), (2, 6)])
@pytest.mark.parametrize("chance", CHANCES)
def test_unequal_prompts_go_on_as_each_would_alone(chance, stop):
    """Each prompt goes on to its first stop token."""
    w_BN, length_B = compiled(chance)[0](KEY, stop=stop)
    assert w_BN.shape == (len(LENGTHS), PROMPTS_BN.shape[1] + STEPS)
    for b, (prompt, text) in enumerate(zip(LENGTHS, slow(chance), strict=True)):
        end = next((n + 1 for n in range(prompt, len(text)) if text[n] in stop), len(text))
        assert length_B[b] == end
        np.testing.assert_array_equal(w_BN[b], text[:end] + [0] * (w_BN.shape[1] - end))
    assert not stop or len({int(n) for n in length_B - LENGTH_B}) > 1  # they end at different times


@pytest.mark.parametrize("stop", [(), (2, 6)])
def test_a_text_made_in_pieces_is_the_text_made_at_once(stop):
    """After the first token, which `start` gives, each token costs one step, and the last costs none."""
    w_BN, length_B = compiled("all")[0](KEY, stop=stop)
    appended, stops, model = int((length_B - LENGTH_B).max()), np.array([*stop, -1, -1][:2]), recurrent.incremental()
    begin = jax.jit(functools.partial(decode.begin, model.start, steps=STEPS, **CHANCES["all"]))
    extend = jax.jit(functools.partial(decode.extend, model.step, **CHANCES["all"]))
    for size in (1, 4, STEPS):
        state, count = begin(PROMPTS_BN, LENGTH_B, KEY, stop=stops), 0
        np.testing.assert_array_equal(state.length_B, LENGTH_B + 1)
        while not state.done_B.all() and count < STEPS:
            state, count = extend(state, steps=size, stop=stops), count + 1
        np.testing.assert_array_equal(state.length_B, length_B)
        assert count == -(-(appended - 1) // size)
        for after in (state, extend(state, steps=STEPS, stop=stops)):
            np.testing.assert_array_equal(after.w_BN, w_BN)
            np.testing.assert_array_equal(after.cache["read_B"], appended - 1)
    assert model.traces.count("start") == 1 and len(model.traces) <= 3  # one compilation may trace a loop's body twice


def test_neither_the_other_sequences_nor_the_bucket_have_a_part_in_a_text():
    """One compilation serves all prompts, keys and stop tokens."""
    run, traces = compiled("all")
    w_BN, _ = run(KEY)
    before, other = list(traces), dict(prompt_BN=np.tile(PROMPTS_BN[:1], (4, 1)), length_B=np.full(4, 4, np.int32))
    same_BN, _ = run(jax.random.key(0), **other)
    assert len({tuple(row) for row in same_BN.tolist()}) == 4  # equal prompts of one batch go on differently
    run(KEY, **other, stop=(1,))
    assert traces == before and set(traces) == {"start", "step"}
    wide_BN = np.pad(PROMPTS_BN, ((0, 0), (0, 3)), constant_values=4)
    last = slice(None, 0, -1)  # three of four, in the other order, each with its own key
    of_last = dict(prompt_BN=wide_BN[last], length_B=LENGTH_B[last])
    wider_BN, _ = run(sampling.split_key(KEY, len(LENGTHS))[last], **of_last)
    np.testing.assert_array_equal(wider_BN, np.pad(w_BN[last], ((0, 0), (0, 3))))


def test_zero_steps_append_nothing():
    model = recurrent.incremental()
    generate = jax.jit(functools.partial(decode.generate, model.start, model.step, steps=0))
    w_BN, length_B = generate(PROMPTS_BN, LENGTH_B, KEY)
    np.testing.assert_array_equal(w_BN, np.where(np.arange(5) < LENGTH_B[:, None], PROMPTS_BN, 0))
    np.testing.assert_array_equal(length_B, LENGTH_B)


def test_buckets_are_powers_of_two_up_to_the_context():
    assert [decode.bucket(n) for n in (1, 2, 3, 4, 5, 8, 9)] == [1, 2, 4, 4, 8, 8, 16]
    assert [decode.bucket(n, 11) for n in (1, 8, 9, 11)] == [1, 8, 11, 11]
    with raises(ValueError, 12, 11):
        decode.bucket(12, 11)
    with raises(ValueError, "prompt"):
        decode.bucket(0)


@pytest.mark.parametrize(
    ("prompt", "lengths", "settings", "parts"),
    [
        ((2, 0), [1, 1], {}, ["prompt"]),
        ((2, 3), [1, 0], {}, ["prompt"]),
        ((2, 3), [1, 4], {}, ["prompt", 4, 3]),
        ((2, 3), [1], {}, ["2 prompts", "(1,)"]),
        ((2, 3), [1, 1], {"steps": -1}, [-1]),
        ((2, 3), [1, 1], {"temperature": -0.1}, ["temperature", -0.1]),
    ],
)
def test_invalid_prompts_and_settings_are_refused(prompt, lengths, settings, parts):
    model = recurrent.incremental()
    with raises(ValueError, *parts):
        prompt_BN, length_B = jnp.ones(prompt, int), jnp.array(lengths)
        decode.generate(model.start, model.step, prompt_BN, length_B, jax.random.key(0), **(dict(steps=1) | settings))

"""Text from a next-token model (E24): generation with a cache or a moving window equals a loop over the tokens."""

import functools

import jax
import numpy as np
import pytest
import recurrent
from errors import raises

from tfm.decode import generate, sampling

STEPS = 9
LENGTHS = (4, 1, 5, 2)
PROMPTS_BN, LENGTH_B = recurrent.prompts(*LENGTHS, columns=5)
KEY = jax.random.key(5)
SAMPLING = {"greedy": dict(temperature=0.0), "all": dict(temperature=1.5)}
SAMPLING |= {"window": dict(temperature=2.0, top_k=5, top_p=0.9, min_p=0.03, repetition_penalty=2.5)}
CONTEXT = {"window": 3}  # some prompts are shorter than 3 tokens, some longer


@functools.cache
def compile_generate(name: str):
    """Return (compiled `generate.generate` that takes stop tokens, names of traced functions)."""
    model = recurrent.incremental()
    functions = model.start, model.step
    if name in CONTEXT:
        functions = generate.window(model.start, context=CONTEXT[name], capacity=PROMPTS_BN.shape[1] + STEPS)
    jitted = jax.jit(functools.partial(generate.generate, *functions, steps=STEPS, **SAMPLING[name]))

    def generate_texts(key, *, prompt_BN=PROMPTS_BN, length_B=LENGTH_B, stop=()):
        stops = np.array([*stop, -1, -1][:2])  # no token is -1
        return jax.device_get(jitted(prompt_BN, length_B, key, stop=stops))

    return generate_texts, model.traces


@functools.cache
def generate_slowly(name: str) -> list[list[int]]:
    """Return texts by the definition: draw tokens from the logits after the text, with the key of (b, n)."""
    draw = jax.jit(lambda key_b, *arrays: sampling.draw(key_b[None], *arrays, **SAMPLING[name])[0])
    texts = [PROMPTS_BN[b, :length].tolist() for b, length in enumerate(LENGTHS)]
    for b, text in enumerate(texts):
        for n in range(len(text), len(text) + STEPS):
            key_b = jax.random.fold_in(jax.random.fold_in(KEY, b), n)
            w_1N, length = np.array([text + [0] * (STEPS + 5 - n)]), np.array([n])
            context = text[-CONTEXT.get(name, n) :]
            text.append(int(draw(key_b, recurrent.logits(context)[None], w_1N, length)))
    return texts


@pytest.mark.parametrize("stop", [(), (2, 6)])
@pytest.mark.parametrize("name", SAMPLING)
def test_unequal_prompts_are_continued_as_each_alone(name, stop):
    """Each prompt is continued up to its first stop token."""
    w_BN, length_B = compile_generate(name)[0](KEY, stop=stop)
    assert w_BN.shape == (len(LENGTHS), PROMPTS_BN.shape[1] + STEPS)
    for b, (prompt, text) in enumerate(zip(LENGTHS, generate_slowly(name), strict=True)):
        end = next((n + 1 for n in range(prompt, len(text)) if text[n] in stop), len(text))
        assert length_B[b] == end
        np.testing.assert_array_equal(w_BN[b], text[:end] + [0] * (w_BN.shape[1] - end))
    assert not stop or len({int(n) for n in length_B - LENGTH_B}) > 1  # they end after different numbers of tokens


@pytest.mark.parametrize("stop", [(), (2, 6)])
def test_a_text_generated_in_pieces_equals_the_text_generated_at_once(stop):
    """`start` gives the first token, and each other token needs one step. The last token is not read."""
    w_BN, length_B = compile_generate("all")[0](KEY, stop=stop)
    appended, stops, model = int((length_B - LENGTH_B).max()), np.array([*stop, -1, -1][:2]), recurrent.incremental()
    begin = jax.jit(functools.partial(generate.begin, model.start, steps=STEPS, **SAMPLING["all"]))
    extend = jax.jit(functools.partial(generate.extend, model.step, **SAMPLING["all"]))
    for size in (1, 4, STEPS):
        state, count = begin(PROMPTS_BN, LENGTH_B, KEY, stop=stops), 0
        np.testing.assert_array_equal(state.length_B, LENGTH_B + 1)
        while not np.all(state.done_B) and count < STEPS:
            state, count = extend(state, steps=size, stop=stops), count + 1
        np.testing.assert_array_equal(state.length_B, length_B)
        assert count == -(-(appended - 1) // size)
        for final_state in (state, extend(state, steps=STEPS, stop=stops)):
            np.testing.assert_array_equal(final_state.w_BN, w_BN)
            np.testing.assert_array_equal(final_state.cache["read_B"], appended - 1)
    assert model.traces.count("start") == 1 and len(model.traces) <= 3  # one compilation may trace a loop's body twice


def test_a_text_does_not_depend_on_other_sequences_or_on_the_padding():
    """One compilation serves all prompts, keys and stop tokens."""
    run, traces = compile_generate("all")
    (w_BN, _), first_traces = run(KEY), list(traces)
    equal_prompts = dict(prompt_BN=np.tile(PROMPTS_BN[:1], (4, 1)), length_B=np.full(4, 4, np.int32))
    equal_BN, _ = run(jax.random.key(0), **equal_prompts)
    # Equal prompts in one batch have different continuations.
    assert len({tuple(row) for row in equal_BN.tolist()}) == 4
    run(KEY, **equal_prompts, stop=(1,))
    assert traces == first_traces and set(traces) == {"start", "step"}
    wide_BN = np.pad(PROMPTS_BN, ((0, 0), (0, 3)), constant_values=4)
    reversed_rows = slice(None, 0, -1)  # the last three in reverse order, each with its key
    arguments = dict(prompt_BN=wide_BN[reversed_rows], length_B=LENGTH_B[reversed_rows])
    wider_BN, _ = run(sampling.split_key(KEY, len(LENGTHS))[reversed_rows], **arguments)
    np.testing.assert_array_equal(wider_BN, np.pad(w_BN[reversed_rows], ((0, 0), (0, 3))))


def test_zero_steps_append_nothing():
    model = recurrent.incremental()
    jitted = jax.jit(functools.partial(generate.generate, model.start, model.step, steps=0))
    w_BN, length_B = jitted(PROMPTS_BN, LENGTH_B, KEY)
    np.testing.assert_array_equal(w_BN, np.where(np.arange(5) < LENGTH_B[:, None], PROMPTS_BN, 0))
    np.testing.assert_array_equal(length_B, LENGTH_B)


def test_buckets_are_powers_of_two_up_to_the_context():
    assert [generate.bucket(n) for n in (1, 2, 3, 4, 5, 8, 9)] == [1, 2, 4, 4, 8, 8, 16]
    assert [generate.bucket(n, 11) for n in (1, 8, 9, 11)] == [1, 8, 11, 11]
    with raises(ValueError, 12, 11):
        generate.bucket(12, 11)
    with raises(ValueError, "prompt"):
        generate.bucket(0)


INVALID = [  # columns of the prompts, lengths, other arguments, parts of the message
    (0, [1, 1], {}, ["prompt"]),
    (3, [1, 0], {}, ["prompt"]),
    (3, [1, 4], {}, ["prompt", 4, 3]),
    (3, [1], {}, ["2 prompts", "(1,)"]),
    (3, [1, 1], {"steps": -1}, [-1]),
    (3, [1, 1], {"temperature": -0.1}, ["temperature", -0.1]),
]


@pytest.mark.parametrize(("columns", "lengths", "settings", "parts"), INVALID)
def test_invalid_prompts_and_settings_are_refused(columns, lengths, settings, parts):
    model, options = recurrent.incremental(), dict(steps=1) | settings
    generate_texts = functools.partial(generate.generate, model.start, model.step, **options)
    with raises(ValueError, *parts):
        jax.eval_shape(lambda w_BN: generate_texts(w_BN, lengths, KEY), np.ones((2, columns), int))

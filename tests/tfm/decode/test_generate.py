"""Text from a next-word model (E24): the window that moves and the increments equal a loop over the words."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import recurrent

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
    """One compiled `generate` for all tests of it, stop words being data, and the names of what was traced for it."""
    model = recurrent.incremental()
    both = model.start, model.step
    if chance in CONTEXT:
        both = decode.window(model.start, context=CONTEXT[chance], capacity=PROMPTS_BN.shape[1] + STEPS)
    generate = jax.jit(functools.partial(decode.generate, *both, steps=STEPS, **CHANCES[chance]))

    def run(key, *, prompt_BN=PROMPTS_BN, length_B=LENGTH_B, stop=()):
        stops = np.array([*stop, -1, -1][:2])  # no word is -1
        return jax.device_get(generate(prompt_BN, length_B, key, stop=stops))

    return run, model.traces


@functools.cache
def slow(chance: str) -> list[list[int]]:
    """The definition: the logits after the last words so far, a word drawn with the key of (b, n), and so on."""
    draw = jax.jit(functools.partial(sampling.draw, **CHANCES[chance]))
    texts = [PROMPTS_BN[b, :length].tolist() for b, length in enumerate(LENGTHS)]
    for b, words in enumerate(texts):
        for n in range(len(words), len(words) + STEPS):
            key_b = jax.random.fold_in(jax.random.fold_in(KEY, b), n)
            whole, length = np.array([words + [0] * (STEPS + 5 - n)]), np.array([n])
            seen = words[-CONTEXT.get(chance, n) :]
            words.append(int(draw(key_b[None], recurrent.logits(seen)[None], whole, length)[0]))
    return texts


@pytest.mark.parametrize("stop", [(), (2, 6)])
@pytest.mark.parametrize("chance", CHANCES)
def test_unequal_prompts_go_on_as_each_would_alone(chance, stop):
    """Each to its first stop word."""
    words, length_B = compiled(chance)[0](KEY, stop=stop)
    assert words.shape == (len(LENGTHS), PROMPTS_BN.shape[1] + STEPS)
    for b, (prompt, text) in enumerate(zip(LENGTHS, slow(chance), strict=True)):
        end = next((n + 1 for n in range(prompt, len(text)) if text[n] in stop), len(text))
        assert length_B[b] == end
        np.testing.assert_array_equal(words[b], text[:end] + [0] * (words.shape[1] - end))
    assert not stop or len({int(n) for n in length_B - LENGTH_B}) > 1  # they end at different times


def test_one_compilation_serves_all_lengths_keys_and_stops():
    run, traces = compiled("all")
    run(KEY)
    before = list(traces)
    prompt_BN, length_B = recurrent.prompts(2, 1, 1, 5, columns=5, seed=1)
    run(jax.random.key(0), prompt_BN=prompt_BN, length_B=length_B, stop=(1,))
    assert traces == before and set(traces) == {"start", "step"}


@functools.cache
def pieces():
    """Compiled `begin` and `more`, the size of a piece being data."""
    model = recurrent.incremental()
    begin = jax.jit(functools.partial(decode.begin, model.start, steps=STEPS, **CHANCES["all"]))
    return begin, jax.jit(functools.partial(decode.extend, model.step, **CHANCES["all"])), model.traces


@pytest.mark.parametrize("size", [1, 4, STEPS])
@pytest.mark.parametrize("stop", [(), (2, 6)])
def test_a_text_made_in_pieces_is_the_text_made_at_once(size, stop):
    """A word more is a word read: after the first, which `start` gives, each costs one step and the last costs none."""
    begin, more, traces = pieces()
    data = np.array([*stop, -1, -1][:2])
    state, count = begin(PROMPTS_BN, LENGTH_B, KEY, stop=data), 0
    np.testing.assert_array_equal(state.length_B, LENGTH_B + 1)
    while not state.done_B.all() and count < STEPS:
        state, count = more(state, steps=size, stop=data), count + 1
    words, length_B = compiled("all")[0](KEY, stop=stop)
    np.testing.assert_array_equal(state.w_BN, words)
    np.testing.assert_array_equal(state.length_B, length_B)
    appended = int((length_B - LENGTH_B).max())
    assert count == -(-(appended - 1) // size)
    for after in (state, more(state, steps=STEPS, stop=data)):
        np.testing.assert_array_equal(after.w_BN, words)
        np.testing.assert_array_equal(after.cache["read_B"], appended - 1)
    assert traces.count("start") == 1 and len(traces) <= 3  # the loop's body may be traced twice for one compilation


def test_neither_the_other_sequences_nor_the_bucket_have_a_part_in_a_text():
    run, _ = compiled("all")
    words, _ = run(KEY)
    wide_BN = np.pad(PROMPTS_BN, ((0, 0), (0, 3)), constant_values=4)
    key_B = sampling.split_key(KEY, len(LENGTHS))
    last = slice(None, 0, -1)  # three of four, in the other order, each with its own key
    found, _ = run(key_B[last], prompt_BN=wide_BN[last], length_B=LENGTH_B[last])
    np.testing.assert_array_equal(found[:, : words.shape[1]], words[last])
    assert (found[:, words.shape[1] :] == 0).all()
    same, _ = run(jax.random.key(0), prompt_BN=np.tile(PROMPTS_BN[:1], (4, 1)), length_B=np.full(4, 4, np.int32))
    assert len({tuple(row) for row in same.tolist()}) == 4  # equal prompts of one batch go on differently


def test_no_words_are_appended_where_none_are_asked_for():
    model = recurrent.incremental()
    nothing = jax.jit(functools.partial(decode.generate, model.start, model.step, steps=0))
    words, length_B = nothing(PROMPTS_BN, LENGTH_B, KEY)
    np.testing.assert_array_equal(words, np.where(np.arange(5) < LENGTH_B[:, None], PROMPTS_BN, 0))
    np.testing.assert_array_equal(length_B, LENGTH_B)


def test_buckets_are_powers_of_two_up_to_the_context():
    assert [decode.bucket(n) for n in (1, 2, 3, 4, 5, 8, 9)] == [1, 2, 4, 4, 8, 8, 16]
    assert [decode.bucket(n, 11) for n in (1, 8, 9, 11)] == [1, 8, 11, 11]
    with pytest.raises(ValueError, match="12 tokens, .* holds 11"):
        decode.bucket(12, 11)
    with pytest.raises(ValueError, match="at least one token"):
        decode.bucket(0)


@pytest.mark.parametrize(
    ("prompt", "lengths", "settings", "message"),
    [
        ((2, 0), [1, 1], {}, "at least one token"),
        ((2, 3), [1, 0], {}, "at least one token"),
        ((2, 3), [1, 4], {}, "a prompt of 4 tokens does not fit into 3 columns"),
        ((2, 3), [1], {}, "2 prompts have 2 lengths"),
        ((2, 3), [1, 1], {"steps": -1}, "0 or more, not -1"),
        ((2, 3), [1, 1], {"temperature": -0.1}, "temperature"),
    ],
)
def test_what_cannot_go_on_is_refused(prompt, lengths, settings, message):
    model = recurrent.incremental()
    with pytest.raises(ValueError, match=message):
        prompt_BN, length_B = jnp.ones(prompt, int), jnp.array(lengths)
        decode.generate(model.start, model.step, prompt_BN, length_B, jax.random.key(0), **(dict(steps=1) | settings))

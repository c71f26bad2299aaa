"""Text from a next-word model (E24): the sliding window, and incremental generation equal to a loop over the words."""

import functools
import itertools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import recurrent

from tfm.attention import mask
from tfm.decode import generate as decode
from tfm.decode import sampling

B, W = 3, 11


def rule(window) -> int:
    """A made-up next word that depends on all words of the window, where in it they stand, and how many there are."""
    return (sum((i + 1) * int(w) for i, w in enumerate(window)) + 3 * len(window)) % W


def by_rule(window_BC: jax.Array) -> jax.Array:
    """The rule as a causal model: logits of 50 for the next word, 0 for all others."""
    position_C = jnp.arange(window_BC.shape[1]) + 1
    next_BC = (jnp.cumsum(window_BC * position_C, axis=1) + 3 * position_C) % W
    return 50.0 * jax.nn.one_hot(next_BC, W)


def loop(next_word, prompt: list[int], *, steps: int, context: int) -> list[int]:
    """The definition: ask for the word after the last `context` words, append it, ask again."""
    words = list(prompt)
    for _ in range(steps):
        window = words[-context:]
        words.append(next_word(window))
    return words


PROMPTS = {"short": 2, "one": 1, "as long as the context": 5, "longer than the context": 8}


@pytest.mark.parametrize(("prompt", "steps"), [*itertools.product(PROMPTS, [1, 9])])
@pytest.mark.parametrize("temperature", [0, 0.5])
def test_samples_follow_the_model(prompt, steps, temperature):
    prompt_BN = np.random.default_rng(0).integers(0, W, (B, PROMPTS[prompt]))
    settings = dict(steps=steps, context=5, temperature=temperature)
    words = decode.sample(by_rule, jnp.asarray(prompt_BN), jax.random.key(0), **settings)
    assert words.shape == (B, PROMPTS[prompt] + steps)
    for b in range(B):
        slow = loop(rule, prompt_BN[b], steps=steps, context=5)
        np.testing.assert_array_equal(words[b], slow)


def test_no_steps_return_the_prompt():
    prompt_BN = jnp.array([[1, 2, 3]])
    words = decode.sample(by_rule, prompt_BN, jax.random.key(0), steps=0, context=5, temperature=1.0)
    np.testing.assert_array_equal(words, prompt_BN)


def test_samples_keep_the_dtype_of_the_prompt():
    prompt_BN = jnp.array([[1, 2, 3]], jnp.int16)
    assert decode.sample(by_rule, prompt_BN, jax.random.key(0), steps=2, context=5, temperature=0).dtype == jnp.int16


def test_a_causal_transformer_decodes_as_a_python_loop_over_the_growing_window():
    model = cases.model(sizes=dict(M=2, N=5))
    params = cases.drawn(model.init)
    prompt_BN = cases.words(b=2, n=2)

    @jax.jit
    def sample(params):
        def next_word(w_BC):
            return model.apply(params, w_BC, mask=mask.causal)

        return decode.sample(next_word, prompt_BN, jax.random.key(0), steps=6, context=5, temperature=0)

    def most_likely(window: list[int]) -> int:
        return int(jnp.argmax(model.apply(params, jnp.array([window]), mask=mask.causal)[0, -1]))

    words = sample(params)
    for b in range(2):
        slow = loop(most_likely, prompt_BN[b].tolist(), steps=6, context=5)
        assert len(set(slow)) > 2
        np.testing.assert_array_equal(words[b], slow)


LOGITS = np.array([1.0, 0.0, -0.5, 2.0, -3.0])


def frequencies(words) -> np.ndarray:
    return np.bincount(np.asarray(words).ravel(), minlength=len(LOGITS))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_are_the_softmax_of_the_logits_over_the_temperature(temperature):
    """Chi-square with four degrees of freedom exceeds 23.5 with probability 1e-4; the key is fixed."""
    many = 4000
    prompt_BN = jnp.zeros((many, 1), jnp.int32)
    settings = dict(steps=3, context=2, temperature=temperature)
    words = decode.sample(lambda w_BC: jnp.tile(LOGITS, (*w_BC.shape, 1)), prompt_BN, jax.random.key(0), **settings)
    p = np.exp(LOGITS / temperature) / np.exp(LOGITS / temperature).sum()
    for n in range(1, 4):
        expected = many * p
        assert ((frequencies(words[:, n]) - expected) ** 2 / expected).sum() < 23.5
    pairs = np.corrcoef(np.asarray(words[:, 1:]).T)[~np.eye(3, dtype=bool)]
    assert np.abs(pairs).max() < 4 / many**0.5  # the draws of different steps are independent


def test_the_key_decides():
    prompt_BN = jnp.zeros((50, 1), jnp.int32)

    @functools.partial(jax.jit, static_argnames="temperature")
    def sample(key: jax.Array, temperature: float) -> jax.Array:
        settings = dict(steps=2, context=2, temperature=temperature)
        return decode.sample(lambda w_BC: jnp.tile(LOGITS, (*w_BC.shape, 1)), prompt_BN, key, **settings)

    one, other = jax.random.key(0), jax.random.key(1)
    np.testing.assert_array_equal(sample(one, 1.0), sample(one, 1.0))
    assert (sample(one, 1.0) != sample(other, 1.0)).any()
    np.testing.assert_array_equal(sample(one, 0.0), sample(other, 0.0))


def test_an_empty_prompt_is_refused():
    with pytest.raises(ValueError, match="at least one word"):
        decode.sample(by_rule, jnp.zeros((B, 0), int), jax.random.key(0), steps=1, context=3, temperature=0)


STEPS = 9
LENGTHS = (4, 1, 5, 2)
PROMPTS_BN, LENGTH_B = recurrent.prompts(*LENGTHS, columns=5)
CHANCES = {
    "greedy": dict(temperature=0.0, top_k=0, top_p=1.0),
    "all": dict(temperature=1.5, top_k=0, top_p=1.0),
    "filtered": dict(temperature=2.0, top_k=5, top_p=0.9),
}


@functools.cache
def compiled():
    """One compiled `generate` for all tests of it, and the names of what was traced for it."""
    model = recurrent.incremental()
    generate = jax.jit(functools.partial(decode.generate, model.start, model.step), static_argnames="steps")

    def run(key, *, prompt_BN=PROMPTS_BN, length_B=LENGTH_B, stop=(), steps=STEPS, **chance):
        stop = jnp.array([*stop, -1, -1][:2])  # no word is -1
        chance = {name: jnp.asarray(value) for name, value in chance.items()}
        return generate(prompt_BN, length_B, key, stop=stop, steps=steps, **chance)

    return run, model.traces


@jax.jit
def draw(key_B, logits_BW, chance):
    return sampling.draw(key_B, logits_BW, **chance)


def slow(prompt, b: int, key, *, steps: int, stop=(), **chance) -> list[int]:
    """The definition: the logits after all words so far, a word drawn with the key of (b, n), until a stop word."""
    words = [int(w) for w in prompt]
    for n in range(len(words), len(words) + steps):
        key_b = jax.random.fold_in(jax.random.fold_in(key, b), n)
        words.append(int(draw(key_b[None], recurrent.logits(words)[None], chance)[0]))
        if words[-1] in stop:
            break
    return words


@pytest.mark.parametrize("stop", [(), (3,), (2, 6)])
@pytest.mark.parametrize("chance", CHANCES)
def test_unequal_prompts_go_on_as_each_would_alone(chance, stop):
    key = jax.random.key(5)
    words, length_B = compiled()[0](key, stop=stop, **CHANCES[chance])
    assert words.shape == (len(LENGTHS), PROMPTS_BN.shape[1] + STEPS)
    for b, length in enumerate(LENGTHS):
        expected = slow(PROMPTS_BN[b, :length], b, key, steps=STEPS, stop=stop, **CHANCES[chance])
        assert length_B[b] == len(expected)
        np.testing.assert_array_equal(words[b], expected + [0] * (words.shape[1] - len(expected)))
    assert not stop or len({int(n) for n in length_B - LENGTH_B}) > 1  # they end at different times


def test_one_compilation_serves_all_lengths_keys_stops_and_settings():
    run, traces = compiled()
    run(jax.random.key(0), **CHANCES["all"])
    before = list(traces)
    for seed, lengths in enumerate([(1, 2, 3, 4), (5, 5, 5, 5), (2, 1, 1, 1)]):
        prompt_BN, length_B = recurrent.prompts(*lengths, columns=5, seed=seed)
        for chance in CHANCES.values():
            run(jax.random.key(seed), prompt_BN=prompt_BN, length_B=length_B, stop=(seed,), **chance)
    assert traces == before and set(traces) == {"start", "step"}


@functools.cache
def pieces():
    """Compiled `begin` and `more`, the size of a piece being data."""
    model = recurrent.incremental()
    begin = jax.jit(functools.partial(decode.begin, model.start), static_argnames="steps")
    return begin, jax.jit(functools.partial(decode.more, model.step)), model.traces


@pytest.mark.parametrize("size", [1, 4, STEPS])
@pytest.mark.parametrize("stop", [(), (2, 6)])
def test_a_text_made_in_pieces_is_the_text_made_at_once(size, stop):
    begin, more, traces = pieces()
    key, settings = jax.random.key(5), dict(CHANCES["all"], stop=jnp.array([*stop, -1, -1][:2]))
    state = begin(PROMPTS_BN, LENGTH_B, key, steps=STEPS, **settings)
    np.testing.assert_array_equal(state.length_B, LENGTH_B + 1)
    count = 0
    while not state.done_B.all() and count < STEPS:
        state, count = more(state, steps=size, **settings), count + 1
    words, length_B = compiled()[0](key, stop=stop, **CHANCES["all"])
    np.testing.assert_array_equal(state.w_BN, words)
    np.testing.assert_array_equal(state.length_B, length_B)
    appended = int((length_B - LENGTH_B).max())
    assert count == -(-(appended - 1) // size)
    assert traces.count("start") == 1 and len(traces) <= 3  # the loop's body may be traced twice for one compilation


def test_the_loop_ends_with_the_last_text():
    """A word more is a word read: after the first, which `start` gives, each costs one step and the last costs none."""
    begin, more, _ = pieces()
    settings = dict(CHANCES["all"], stop=jnp.array([2, 6]))
    state = begin(PROMPTS_BN, LENGTH_B, jax.random.key(19), steps=STEPS, **settings)
    state = more(state, steps=STEPS, **settings)
    appended = int((state.length_B - LENGTH_B).max())
    assert 1 < appended < STEPS
    np.testing.assert_array_equal(state.cache["read_B"], appended - 1)
    again = more(state, steps=STEPS, **settings)
    np.testing.assert_array_equal(again.w_BN, state.w_BN)
    np.testing.assert_array_equal(again.cache["read_B"], appended - 1)


def test_neither_the_other_sequences_nor_the_bucket_have_a_part_in_a_text():
    run, _ = compiled()
    key, chance = jax.random.key(5), CHANCES["all"]
    words, _ = run(key, **chance)
    wide_BN = jnp.pad(PROMPTS_BN, ((0, 0), (0, 3)), constant_values=4)
    key_B = sampling.one_per_sequence(key, len(LENGTHS))
    last = slice(None, 0, -1)  # three of four, in the other order, each with its own key
    found, _ = run(key_B[last], prompt_BN=wide_BN[last], length_B=LENGTH_B[last], **chance)
    np.testing.assert_array_equal(found[:, : words.shape[1]], words[last])
    assert (found[:, words.shape[1] :] == 0).all()


def test_equal_prompts_of_one_batch_go_on_differently():
    prompt_BN, length_B = jnp.tile(PROMPTS_BN[:1], (4, 1)), jnp.full(4, 4)
    words, _ = compiled()[0](jax.random.key(0), prompt_BN=prompt_BN, length_B=length_B, **CHANCES["all"])
    assert len({tuple(row) for row in words.tolist()}) == 4


@pytest.mark.parametrize("chance", ["greedy", "filtered"])
def test_the_window_and_the_increments_give_the_same_text(chance):
    prompt_BN, length_B = recurrent.prompts(5, 5, 5, 5, columns=5)
    words, _ = compiled()[0](jax.random.key(1), prompt_BN=prompt_BN, length_B=length_B, **CHANCES[chance])
    settings = dict(steps=STEPS, context=5 + STEPS, **CHANCES[chance])
    np.testing.assert_array_equal(decode.sample(recurrent.full, prompt_BN, jax.random.key(1), **settings), words)


def test_no_words_are_appended_where_none_are_asked_for():
    words, length_B = compiled()[0](jax.random.key(0), steps=0, **CHANCES["all"])
    np.testing.assert_array_equal(words, jnp.where(jnp.arange(5) < LENGTH_B[:, None], PROMPTS_BN, 0))
    np.testing.assert_array_equal(length_B, LENGTH_B)


def test_buckets_are_powers_of_two_up_to_the_context():
    assert [decode.bucket(n) for n in (1, 2, 3, 4, 5, 8, 9)] == [1, 2, 4, 4, 8, 8, 16]
    assert [decode.bucket(n, 11) for n in (1, 8, 9, 11)] == [1, 8, 11, 11]
    with pytest.raises(ValueError, match="the prompt has 12 words, and the context of the model holds 11"):
        decode.bucket(12, 11)
    with pytest.raises(ValueError, match="at least one word"):
        decode.bucket(0)


@pytest.mark.parametrize(
    ("prompt", "lengths", "settings", "message"),
    [
        ((2, 0), [1, 1], {}, "at least one word"),
        ((2, 3), [1, 0], {}, "at least one word"),
        ((2, 3), [1, 4], {}, "a prompt of 4 words does not fit into 3 columns"),
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

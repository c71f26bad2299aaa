"""Text from a next-word model (E24): the sliding window, the most likely word, and the right frequencies."""

import functools
import itertools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tfm import decode, mask

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


def test_temperature_zero_takes_the_most_likely_word():
    logits_BW = cases.normal(0, 7, W)
    np.testing.assert_array_equal(
        decode.draw(jax.random.key(0), logits_BW, temperature=0), np.argmax(np.asarray(logits_BW), axis=-1)
    )


def test_an_empty_prompt_is_refused():
    with pytest.raises(ValueError, match="at least one word"):
        decode.sample(by_rule, jnp.zeros((B, 0), int), jax.random.key(0), steps=1, context=3, temperature=0)

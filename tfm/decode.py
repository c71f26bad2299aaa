"""Text from a next-word model: draw a word, append it, ask again (E24)."""

from collections.abc import Callable

import jax
import jax.numpy as jnp


def draw(key: jax.Array, logits_BW: jax.Array, *, temperature: float) -> jax.Array:
    """Words w_B from softmax(l / temperature); temperature 0 takes the most likely one."""
    if temperature == 0:
        return jnp.argmax(logits_BW, axis=-1)
    return jax.random.categorical(key, logits_BW / temperature)


def sample(
    next_word: Callable[[jax.Array], jax.Array],
    prompt_BN: jax.Array,
    key: jax.Array,
    *,
    steps: int,
    context: int,
    temperature: float,
) -> jax.Array:
    """The prompts with `steps` words appended: w_B(N+steps).

    `next_word` maps w_BC, C = context, to logits_BCW and must be causal. Each word sees at most the last `context`
    words before it; while there are fewer, the rest of the window lies in the future, which a causal model ignores.
    ValueError for prompts without a word: there is nothing to predict from.
    """
    B, N = prompt_BN.shape
    if N == 0:
        raise ValueError("a prompt must hold at least one word")
    room = max(N + steps, context)
    words = jnp.zeros((B, room), prompt_BN.dtype).at[:, :N].set(prompt_BN)

    def step(n: jax.Array, words: jax.Array) -> jax.Array:
        start = jnp.maximum(n - context, 0)
        window_BC = jax.lax.dynamic_slice_in_dim(words, start, context, axis=1)
        logits_BW = jax.lax.dynamic_index_in_dim(next_word(window_BC), n - 1 - start, axis=1, keepdims=False)
        word_B = draw(jax.random.fold_in(key, n), logits_BW, temperature=temperature)
        return words.at[:, n].set(word_B.astype(words.dtype))

    return jax.lax.fori_loop(N, N + steps, step, words)[:, : N + steps]

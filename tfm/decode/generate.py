"""Text from a next-word model (E24): draw a word, append it, ask again.

`generate` (and `begin` and `more`, the same in pieces) asks an incremental model, E23, which is two functions:

    start(prompt_BN, length_B) -> logits_BW, cache      reads right-padded prompts; logits after their last real word
    step(cache, w_B, n_B) -> logits_BW, cache           reads word w at position n; logits of the next word

`window` makes two others of these for texts beyond the context of the model. Every leaf of the cache has the leading
axis B. Position n of sequence b is drawn with a key made of (key, b, n) alone: neither the other sequences nor the
padding nor where the text was cut into pieces has a part in it.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tfm.decode import sampling

Start = Callable[[jax.Array, jax.Array], tuple[jax.Array, Any]]
Step = Callable[[Any, jax.Array, jax.Array], tuple[jax.Array, Any]]
Stop = Sequence[int] | jax.Array | None


def window(start: Start, *, context: int, capacity: int) -> tuple[Start, Step]:
    """`start` and `step` beyond the context of a causal model: each word is asked of the last `context` words, which
    are read anew for it by the model's own `start`. The cache is the text, w_BT with T = capacity >= context places."""

    def ask(w_BT: jax.Array, n_B: jax.Array) -> tuple[jax.Array, jax.Array]:
        first_B = jnp.maximum(n_B + 1 - context, 0)
        part = jax.vmap(lambda w_T, first: jax.lax.dynamic_slice_in_dim(w_T, first, context))
        return start(part(w_BT, first_B), n_B + 1 - first_B)[0], w_BT

    def begin(w_BN: jax.Array, length_B: jax.Array) -> tuple[jax.Array, jax.Array]:
        return ask(jnp.pad(w_BN, ((0, 0), (0, capacity - w_BN.shape[1]))), length_B - 1)

    def step(w_BT: jax.Array, w_B: jax.Array, n_B: jax.Array) -> tuple[jax.Array, jax.Array]:
        return ask(jnp.where(jnp.arange(capacity) == n_B[:, None], w_B[:, None], w_BT), n_B)

    return begin, step


def bucket(n: int, most: int | None = None) -> int:
    """The next power of two, but no more than `most`: pad prompts of n words to it, and few lengths get compiled.
    ValueError for a prompt of no words or of more than `most`, the context of the model."""
    if n < 1:
        raise ValueError("a prompt must hold at least one word")
    if most is not None and n > most:
        raise ValueError(f"the prompt has {n} words, and the context of the model holds {most}")
    size = 1 << (n - 1).bit_length()
    return size if most is None else min(size, most)


class State(NamedTuple):
    """Texts in the making: w_BN with id 0 after length_B words, of which there may be limit_B; done_B; keys; cache."""

    w_BN: jax.Array
    length_B: jax.Array
    limit_B: jax.Array
    done_B: jax.Array
    key_B: jax.Array
    cache: Any


def begin(start: Start, *prompts: jax.Array, steps: int, stop: Stop = None, **chance: float) -> State:
    """The prompts and the first of at most `steps` words after each; go on with `more` until state.done_B.all().
    prompts: prompt_BN, right-padded; length_B, the words of each; a key, or key_B. ValueError for prompts without a
    word and negative steps."""
    prompt_BN, length_B, key = prompts
    w_BN, length_B, logits_BW, cache = read(start, prompt_BN, length_B, steps=steps)
    key_B, done_B = sampling.one_per_sequence(key, len(length_B)), jnp.full(len(length_B), steps == 0)
    state = State(w_BN, length_B, length_B + steps, done_B, key_B, cache)
    return _appended(state, logits_BW, stop=stop, **chance)


def read(
    start: Start, prompt_BN: jax.Array, length_B: jax.Array, *, steps: int
) -> tuple[jax.Array, jax.Array, jax.Array, Any]:
    """Words w_B(N+steps) with id 0 after each prompt, length_B, and what `start` says to them: logits_BW, cache.
    ValueError for lengths outside 1 to N, as far as they are known before the program runs, and for negative steps."""
    B, N = prompt_BN.shape
    if steps < 0:
        raise ValueError(f"the number of words to append must be 0 or more, not {steps}")
    if np.shape(length_B) != (B,):
        raise ValueError(f"{B} prompts have {B} lengths, not an array of shape {np.shape(length_B)}")
    known_B = [N] if isinstance(length_B, jax.core.Tracer) else np.asarray(jax.device_get(length_B))
    if N == 0 or min(known_B, default=1) < 1:
        raise ValueError("a prompt must hold at least one word")
    if max(known_B, default=1) > N:
        raise ValueError(f"a prompt of {max(known_B)} words does not fit into {N} columns")
    length_B = jnp.asarray(length_B)
    w_BN = jnp.where(jnp.arange(N) < length_B[:, None], prompt_BN, 0)
    return jnp.pad(w_BN, ((0, 0), (0, steps))), length_B, *start(w_BN, length_B)


def more(step: Step, state: State, *, steps: int | jax.Array, stop: Stop = None, **chance: float) -> State:
    """Up to `steps` more words for every text that is not done; texts cut into pieces are those made at once."""

    def unfinished(loop: tuple[jax.Array, State]) -> jax.Array:
        return (loop[0] < steps) & ~loop[1].done_B.all()

    def advance(loop: tuple[jax.Array, State]) -> tuple[jax.Array, State]:
        count, state = loop
        n_B = state.length_B - 1  # a text that is done has its last word read again: no other place in a cache changes
        w_B = jnp.take_along_axis(state.w_BN, n_B[:, None], axis=1)[:, 0]
        logits_BW, cache = step(state.cache, w_B, n_B)
        return count + 1, _appended(state._replace(cache=cache), logits_BW, stop=stop, **chance)

    return jax.lax.while_loop(unfinished, advance, (jnp.int32(0), state))[1]


def _appended(state: State, logits_BW: jax.Array, *, stop: Stop, **chance: float) -> State:
    """Every text that is not done with one word more."""
    key_B = jax.vmap(jax.random.fold_in)(state.key_B, state.length_B)
    drawn_B = sampling.draw(key_B, logits_BW, state.w_BN, state.length_B, **chance).astype(state.w_BN.dtype)
    here_BN = (jnp.arange(state.w_BN.shape[1]) == state.length_B[:, None]) & ~state.done_B[:, None]
    length_B = state.length_B + ~state.done_B
    return state._replace(
        w_BN=jnp.where(here_BN, drawn_B[:, None], state.w_BN),
        length_B=length_B,
        done_B=state.done_B | is_stop(drawn_B, stop) | (length_B >= state.limit_B),
    )


def is_stop(w: jax.Array, stop: Stop) -> jax.Array:
    """Which of the words end a text."""
    return jnp.isin(w, jnp.asarray(() if stop is None else stop, w.dtype))


def generate(
    start: Start, step: Step, *prompts: jax.Array, steps: int, stop: Stop = None, **chance: float
) -> tuple[jax.Array, jax.Array]:
    """Each prompt and, directly after its own length, up to `steps` words: w_B(N+steps), length_B.

    prompts: prompt_BN, right-padded (to a `bucket`); length_B, the words of each; a key, or key_B. `chance`:
    the numbers of `sampling.filtered`, such as temperature. A word among `stop` is a text's last one; after the last
    word stands id 0. One compiled loop that ends when every text has. ValueError for prompts without a word and
    negative steps.
    """
    state = more(step, begin(start, *prompts, steps=steps, stop=stop, **chance), steps=steps, stop=stop, **chance)
    return state.w_BN, state.length_B

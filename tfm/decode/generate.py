"""Generation with a next-token model (E24): draw a token, append it, and repeat.

The functions take an incremental model (E23), which is two functions:

    start(prompt_BN, length_B) -> logits_BW, cache      reads right-padded prompts; logits after their last token
    step(cache, w_B, n_B) -> logits_BW, cache           reads token w at position n; logits of the next token

`window` wraps `start` into two such functions for texts longer than the model's context. Every leaf of the cache has
the leading axis B. Position n of sequence b is drawn with a key that depends only on (key, b, n): not on the other
sequences, the padding, or the pieces in which a text is generated.
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
    """Return `start` and `step` for texts longer than the context of a causal model.

    Each token is predicted from the last `context` tokens, which the model's own `start` reads again. The cache is the
    text, w_BT with T = capacity >= context.
    """

    def predict(w_BT: jax.Array, n_B: jax.Array) -> tuple[jax.Array, jax.Array]:
        first_B = jnp.maximum(n_B + 1 - context, 0)
        recent = jax.vmap(lambda w_T, first: jax.lax.dynamic_slice_in_dim(w_T, first, context))
        return start(recent(w_BT, first_B), n_B + 1 - first_B)[0], w_BT

    def begin(w_BN: jax.Array, length_B: jax.Array) -> tuple[jax.Array, jax.Array]:
        return predict(jnp.pad(w_BN, ((0, 0), (0, capacity - w_BN.shape[1]))), length_B - 1)

    def step(w_BT: jax.Array, w_B: jax.Array, n_B: jax.Array) -> tuple[jax.Array, jax.Array]:
        return predict(jnp.where(jnp.arange(capacity) == n_B[:, None], w_B[:, None], w_BT), n_B)

    return begin, step


def bucket(n: int, most: int | None = None) -> int:
    """Return the next power of two, but at most `most`: pad prompts of n tokens to it, so that few lengths are
    compiled.

    Raises ValueError if n < 1 or n > most, the context of the model.
    """
    if n < 1:
        raise ValueError("a prompt must hold at least one token")
    if most is not None and n > most:
        raise ValueError(f"the prompt has {n} tokens, but the context of the model holds {most}")
    size = 1 << (n - 1).bit_length()
    return size if most is None else min(size, most)


class State(NamedTuple):
    """Texts during generation.

    w_BN has length_B tokens, then id 0; a text may have at most limit_B. done_B: finished texts.
    """

    w_BN: jax.Array
    length_B: jax.Array
    limit_B: jax.Array
    done_B: jax.Array
    key_B: jax.Array
    cache: Any


def begin(start: Start, *prompts: jax.Array, steps: int, stop: Stop = None, **options: float) -> State:
    """Return the state after the prompts and one of at most `steps` tokens; continue with `extend` until done_B.all().

    prompts: prompt_BN, right-padded; length_B, tokens of each; a key, or key_B. sampling: arguments of
    sampling.filter_logits. Raises ValueError for prompts without a token, and negative steps.
    """
    prompt_BN, length_B, key = prompts
    w_BN, length_B, logits_BW, cache = read(start, prompt_BN, length_B, steps=steps)
    key_B, done_B = sampling.split_key(key, len(length_B)), jnp.full(len(length_B), steps == 0)
    state = State(w_BN, length_B, length_B + steps, done_B, key_B, cache)
    return _append(state, logits_BW, stop=stop, **options)


def read(
    start: Start, prompt_BN: jax.Array, length_B: jax.Array, *, steps: int
) -> tuple[jax.Array, jax.Array, jax.Array, Any]:
    """Return w_B(N+steps), with id 0 after each prompt; length_B; and the logits_BW and cache of `start`.

    Raises ValueError for negative steps, and for lengths outside 1 to N if they are known during tracing.
    """
    B, N = prompt_BN.shape
    if steps < 0:
        raise ValueError(f"the number of tokens to append must be 0 or more, not {steps}")
    if np.shape(length_B) != (B,):
        raise ValueError(f"{B} prompts have {B} lengths, not an array of shape {np.shape(length_B)}")
    known_B = [N] if isinstance(length_B, jax.core.Tracer) else np.asarray(jax.device_get(length_B))
    if N == 0 or min(known_B, default=1) < 1:
        raise ValueError("a prompt must hold at least one token")
    if max(known_B, default=1) > N:
        raise ValueError(f"a prompt of {max(known_B)} tokens does not fit into {N} columns")
    length_B = jnp.asarray(length_B)
    w_BN = jnp.where(jnp.arange(N) < length_B[:, None], prompt_BN, 0)
    return jnp.pad(w_BN, ((0, 0), (0, steps))), length_B, *start(w_BN, length_B)


def extend(step: Step, state: State, *, steps: int | jax.Array, stop: Stop = None, **options: float) -> State:
    """Append up to `steps` tokens to every unfinished text, within the limit_B of the state.

    Generation in pieces gives the same text as at once.
    """

    def unfinished(loop: tuple[jax.Array, State]) -> jax.Array:
        return (loop[0] < steps) & ~loop[1].done_B.all()

    def advance(loop: tuple[jax.Array, State]) -> tuple[jax.Array, State]:
        count, state = loop
        n_B = state.length_B - 1  # a finished text reads its last token again, so its cache does not change
        w_B = jnp.take_along_axis(state.w_BN, n_B[:, None], axis=1)[:, 0]
        logits_BW, cache = step(state.cache, w_B, n_B)
        return count + 1, _append(state._replace(cache=cache), logits_BW, stop=stop, **options)

    return jax.lax.while_loop(unfinished, advance, (jnp.int32(0), state))[1]


def _append(state: State, logits_BW: jax.Array, *, stop: Stop, **options: float) -> State:
    """Append one token to every unfinished text."""
    key_B = jax.vmap(jax.random.fold_in)(state.key_B, state.length_B)
    drawn_B = sampling.draw(key_B, logits_BW, state.w_BN, state.length_B, **options).astype(state.w_BN.dtype)
    here_BN = (jnp.arange(state.w_BN.shape[1]) == state.length_B[:, None]) & ~state.done_B[:, None]
    length_B = state.length_B + ~state.done_B
    return state._replace(
        w_BN=jnp.where(here_BN, drawn_B[:, None], state.w_BN),
        length_B=length_B,
        done_B=state.done_B | is_stop(drawn_B, stop) | (length_B >= state.limit_B),
    )


def is_stop(w: jax.Array, stop: Stop) -> jax.Array:
    """Return which tokens end a text."""
    return jnp.isin(w, jnp.asarray(() if stop is None else stop, w.dtype))


def generate(
    start: Start, step: Step, *prompts: jax.Array, steps: int, stop: Stop = None, **options: float
) -> tuple[jax.Array, jax.Array]:
    """Return w_B(N+steps) and length_B: each prompt, directly followed by up to `steps` tokens.

    prompts: prompt_BN, right-padded (to a `bucket`); length_B, tokens of each; a key, or key_B. options: arguments of
    `sampling.filter_logits`, such as temperature. A token in `stop` is the last of a text; id 0 follows the last token.
    One compiled loop ends when every text has ended. Raises ValueError for prompts without a token, and negative steps.
    """
    state = extend(step, begin(start, *prompts, steps=steps, stop=stop, **options), steps=steps, stop=stop, **options)
    return state.w_BN, state.length_B

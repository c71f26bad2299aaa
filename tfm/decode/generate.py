"""Generation with a next-token model (E24): draw a token, append it, and repeat.

Equations are numbered as in docs/mathematics.md. The model is two functions (E23), which return the logits of the next
token of each sequence:

    start(prompt_BN, length_B) -> logits_BW, cache      reads right-padded prompts of length_B tokens
    step(cache, w_B, n_B) -> logits_BW, cache           reads token w_B at position n_B

`window` makes two such functions for texts longer than the model's context: at each step they read the last tokens
again. Every leaf of the cache has the leading axis B. The token at position n of sequence b is drawn with a random key
that depends only on (key, b, n). It does not depend on other sequences, on padding, or on how many calls of `extend`
generate a text.
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

    For each token, the argument `start` reads the last `context` tokens again. The cache of the returned functions is
    the text, w_BT with T = capacity >= context.
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


def bucket(n: int, context: int | None = None) -> int:
    """Return the length to which to pad prompts of n tokens, so that few lengths are compiled.

    This is the next power of two, but at most the context of the model. Raises ValueError if n < 1 or n > context.
    """
    if n < 1:
        raise ValueError(f"the prompt has {n} tokens. Use at least one.")
    if context is not None and n > context:
        raise ValueError(f"the prompt has {n} tokens, but the model's context is {context}. Shorten the prompt.")
    size = 1 << (n - 1).bit_length()
    return size if context is None else min(size, context)


class State(NamedTuple):
    """Texts during generation, and the model's cache.

    w_BN has length_B tokens per text, at most limit_B, followed by id 0. done_B: whether a text is complete. key_B: a
    random key per text.
    """

    w_BN: jax.Array
    length_B: jax.Array
    limit_B: jax.Array
    done_B: jax.Array
    key_B: jax.Array
    cache: Any


def begin(start: Start, *prompts: jax.Array, steps: int, stop: Stop = None, **options: float) -> State:
    """Read prompts, and draw the first of at most `steps` tokens. Call `extend` on the result until done_B.all().

    prompts: prompt_BN, right-padded; length_B, its numbers of tokens; a random key, or key_B. stop: ids that end a
    text. options: arguments of sampling.filter_logits. Raises ValueError if a prompt has no token or steps is negative.
    """
    prompt_BN, length_B, key = prompts
    w_BN, length_B, logits_BW, cache = read_prompts(start, prompt_BN, length_B, steps=steps)
    key_B, done_B = sampling.split_key(key, len(length_B)), jnp.full(len(length_B), steps == 0)
    state = State(w_BN, length_B, length_B + steps, done_B, key_B, cache)
    return _append(state, logits_BW, stop=stop, **options)


def read_prompts(
    start: Start, prompt_BN: jax.Array, length_B: jax.Array, *, steps: int
) -> tuple[jax.Array, jax.Array, jax.Array, Any]:
    """Return w_B(N+steps), the prompts followed by id 0; length_B; and the logits_BW and cache that `start` returns.

    Raises ValueError if steps is negative, length_B is not (B,), or a length is not in 1 ... N. Lengths that JAX traces
    are not checked.
    """
    B, N = prompt_BN.shape
    if steps < 0:
        raise ValueError(f"steps = {steps} must be at least 0. Choose how many tokens to append.")
    if np.shape(length_B) != (B,):
        raise ValueError(
            f"length_B has shape {np.shape(length_B)}, but {B} prompts need {B} lengths. Pass one per prompt."
        )
    lengths = [N] if isinstance(length_B, jax.core.Tracer) else np.asarray(jax.device_get(length_B))
    if N == 0 or min(lengths, default=1) < 1:
        raise ValueError("a prompt has 0 tokens. Use prompts of at least one token.")
    if max(lengths, default=1) > N:
        raise ValueError(f"a prompt has length {max(lengths)}, but prompt_BN has {N} columns. Choose at most {N}.")
    length_B = jnp.asarray(length_B)
    w_BN = jnp.where(jnp.arange(N) < length_B[:, None], prompt_BN, 0)
    return jnp.pad(w_BN, ((0, 0), (0, steps))), length_B, *start(w_BN, length_B)


def extend(step: Step, state: State, *, steps: int | jax.Array, stop: Stop = None, **options: float) -> State:
    """Return the state after appending up to `steps` tokens to each unfinished text, none beyond state.limit_B.

    Several calls give the same texts as one call with the sum of their steps. step: (cache, w_B, n_B) -> (logits_BW,
    cache). stop: ids that complete a text. options: arguments of sampling.filter_logits.
    """

    def unfinished(loop: tuple[jax.Array, State]) -> jax.Array:
        return (loop[0] < steps) & ~loop[1].done_B.all()

    def advance(loop: tuple[jax.Array, State]) -> tuple[jax.Array, State]:
        count, state = loop
        n_B = state.length_B - 1  # a complete text reads its last token again, which does not change its cache
        w_B = jnp.take_along_axis(state.w_BN, n_B[:, None], axis=1)[:, 0]
        logits_BW, cache = step(state.cache, w_B, n_B)
        return count + 1, _append(state._replace(cache=cache), logits_BW, stop=stop, **options)

    return jax.lax.while_loop(unfinished, advance, (jnp.int32(0), state))[1]


def _append(state: State, logits_BW: jax.Array, *, stop: Stop, **options: float) -> State:
    """Return the state after drawing one token for every unfinished text and appending it."""
    key_B = jax.vmap(jax.random.fold_in)(state.key_B, state.length_B)
    new_B = sampling.draw(key_B, logits_BW, state.w_BN, state.length_B, **options).astype(state.w_BN.dtype)
    is_new_BN = (jnp.arange(state.w_BN.shape[1]) == state.length_B[:, None]) & ~state.done_B[:, None]
    length_B = state.length_B + ~state.done_B
    return state._replace(
        w_BN=jnp.where(is_new_BN, new_B[:, None], state.w_BN),
        length_B=length_B,
        done_B=state.done_B | is_stop(new_B, stop) | (length_B >= state.limit_B),
    )


def is_stop(w: jax.Array, stop: Stop) -> jax.Array:
    """Return whether each token is one of `stop`, which end a text; False for all if `stop` is None."""
    return jnp.isin(w, jnp.asarray(() if stop is None else stop, w.dtype))


def generate(
    start: Start, step: Step, *prompts: jax.Array, steps: int, stop: Stop = None, **options: float
) -> tuple[jax.Array, jax.Array]:
    """Return w_B(N+steps), each prompt directly followed by up to `steps` tokens, and the lengths of these texts.

    prompts: prompt_BN, right-padded (to a `bucket`); length_B, its numbers of tokens; a random key, or key_B. options:
    arguments of sampling.filter_logits, such as temperature. A text ends with the first token in `stop`; id 0 follows
    the last token. The loop ends when every text has ended. Raises ValueError if steps is negative, length_B is not
    (B,), or a length known during tracing is not in 1 ... N.
    """
    state = extend(step, begin(start, *prompts, steps=steps, stop=stop, **options), steps=steps, stop=stop, **options)
    return state.w_BN, state.length_B

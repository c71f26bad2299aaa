"""Beam search (E26): the most likely texts, as far as extending the best few hypotheses finds them.

Q counts the hypotheses of a beam. R = B * Q counts the rows that a model reads, those of a sequence next to each other.
`start` and `step` are as in generate.py.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tfm import linear
from tfm.decode import generate

Number = float | jax.Array


class State(NamedTuple):
    """The hypotheses after `count` tokens: live ones with their log p, ended ones with their score, both best first."""

    count: jax.Array
    live_BQN: jax.Array
    log_p_BQ: jax.Array
    ended_BQN: jax.Array
    score_BQ: jax.Array
    cache: Any


def penalty(length: Number, alpha: Number) -> jax.Array:
    """Return ((5 + L) / 6)^alpha for L tokens, which divides log p (Wu et al. 2016, eq. 14); alpha = 0 prefers short
    texts.
    """
    return ((5 + jnp.asarray(length, jnp.float32)) / 6) ** alpha


def search(
    start: generate.Start,
    step: generate.Step,
    prompt_BN: jax.Array,
    length_B: jax.Array,
    *,
    beam: int,
    steps: int,
    stop: generate.Stop = None,
    length_penalty: Number = 0.0,
) -> tuple[jax.Array, jax.Array]:
    """Return the `beam` best continuations of each prompt, best first: token ids w_BQ(N+steps) and score_BQ.

    The score is log p(continuation) / penalty(L, length_penalty) in nats for L appended tokens, a stop token included.
    At every token the `beam` best hypotheses that end in a stop token are kept, and the best `beam` others are
    followed. A hypothesis that is live after `steps` tokens counts as ended. The loop ends when no live hypothesis can
    enter the result. If fewer than `beam` continuations are possible, the rest have score -inf and the bare prompt. A
    beam of 1 without penalty is greedy. prompt_BN is right-padded, of length_B tokens each; id 0 follows the last
    token. Raises ValueError for a beam below 1 or above W, prompts without a token, and negative steps.
    """
    w_BN, length_B, logits_BW, cache = generate.read(start, prompt_BN, length_B, steps=steps)
    W = logits_BW.shape[-1]
    if not 1 <= beam <= W:
        raise ValueError(f"a beam holds between 1 and {W} hypotheses, the size of the vocabulary, not {beam}")

    def extend(state: State, logits_RW: jax.Array) -> State:
        return _extend(state, logits_RW, n_B=length_B + state.count, stop=stop, alpha=length_penalty)

    def unfinished(state: State) -> jax.Array:
        largest = jnp.maximum(penalty(state.count, length_penalty), penalty(steps, length_penalty))
        may_win_B = state.log_p_BQ[:, 0] / largest > state.score_BQ[:, -1]  # log p only falls
        return (state.count < steps) & may_win_B.any()

    def advance(state: State) -> State:
        n_B = length_B + state.count - 1
        w_BQ = jnp.take_along_axis(state.live_BQN, n_B[:, None, None], axis=2)[..., 0]
        logits_RW, cache = step(state.cache, w_BQ.reshape(-1), jnp.repeat(n_B, beam))
        return extend(state._replace(cache=cache), logits_RW)

    state = _first_state(w_BN, logits_BW, cache, beam)
    if steps:
        state = jax.lax.while_loop(unfinished, advance, extend(state, jnp.repeat(logits_BW, beam, axis=0)))
    cut_BQ = state.log_p_BQ / penalty(state.count, length_penalty)
    w_BQN, score_BQ = _best(state.ended_BQN, state.score_BQ, state.live_BQN, cut_BQ)
    return jnp.where(score_BQ[..., None] > -jnp.inf, w_BQN, w_BN[:, None]), score_BQ


def _first_state(w_BN: jax.Array, logits_BW: jax.Array, cache: Any, beam: int) -> State:
    """Return the state before the first token: the prompt is the only hypothesis, and the other places of the beam have
    probability 0."""
    w_BQN = jnp.repeat(w_BN[:, None], beam, axis=1)
    impossible_BQ = jnp.full(w_BQN.shape[:2], -jnp.inf, linear.to_float32(logits_BW).dtype)
    cache = jax.tree.map(lambda x: jnp.repeat(x, beam, axis=0), cache)
    return State(jnp.int32(0), w_BQN, impossible_BQ.at[:, 0].set(0), w_BQN, impossible_BQ, cache)


def _extend(state: State, logits_RW: jax.Array, *, n_B: jax.Array, stop: Any, alpha: Number) -> State:
    """Extend every live hypothesis by every token at n_B: keep the best of those that end, follow the best others."""
    B, Q, N = state.live_BQN.shape
    W = logits_RW.shape[-1]
    log_p_BQW = state.log_p_BQ[..., None] + jax.nn.log_softmax(linear.to_float32(logits_RW), axis=-1).reshape(B, Q, W)
    ends_W = generate.is_stop(jnp.arange(W), stop)

    def top(log_p_BQW: jax.Array) -> tuple[jax.Array, ...]:
        """Return the Q most likely extensions, best first: log p, hypothesis and last token of each, and all its
        tokens.
        """
        log_p_BQ, choice_BQ = jax.lax.top_k(log_p_BQW.reshape(B, Q * W), Q)
        parent_BQ, w_BQ = choice_BQ // W, choice_BQ % W
        parent_BQN = jnp.take_along_axis(state.live_BQN, parent_BQ[..., None], axis=1)
        here_BQN = jnp.arange(N) == n_B[:, None, None]
        return log_p_BQ, parent_BQ, w_BQ, jnp.where(here_BQN, w_BQ[..., None].astype(parent_BQN.dtype), parent_BQN)

    log_p_BQ, _, w_BQ, extended_BQN = top(log_p_BQW)
    score_BQ = jnp.where(ends_W[w_BQ], log_p_BQ / penalty(state.count + 1, alpha), -jnp.inf)
    ended_BQN, score_BQ = _best(state.ended_BQN, state.score_BQ, extended_BQN, score_BQ)
    log_p_BQ, parent_BQ, _, live_BQN = top(jnp.where(ends_W, -jnp.inf, log_p_BQW))
    parent_R = (parent_BQ + Q * jnp.arange(B)[:, None]).reshape(-1)
    cache = jax.tree.map(lambda x: x[parent_R], state.cache)
    return State(state.count + 1, live_BQN, log_p_BQ, ended_BQN, score_BQ, cache)


def _best(*pools: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the best Q of the hypotheses (tokens, score, tokens, score), best first; earlier ones win ties."""
    w_BQN, score_BQ = jnp.concatenate(pools[::2], axis=1), jnp.concatenate(pools[1::2], axis=1)
    score_BQ, choice_BQ = jax.lax.top_k(score_BQ, pools[0].shape[1])
    return jnp.take_along_axis(w_BQN, choice_BQ[..., None], axis=1), score_BQ

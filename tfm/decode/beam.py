"""Beam search (E26): an approximate search for the most likely texts, which extends only the best few hypotheses.

Q is the number of hypotheses in a beam. The model reads R = B * Q rows; the Q rows of a sequence are adjacent. `start`
and `step` are explained in generate.py.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tfm import linear
from tfm.decode import generate

Number = float | jax.Array


class State(NamedTuple):
    """Q live and Q ended hypotheses after `count` tokens, best first: live ones with log p, ended with score."""

    count: jax.Array
    live_BQN: jax.Array
    log_p_BQ: jax.Array
    ended_BQN: jax.Array
    score_BQ: jax.Array
    cache: Any


def penalty(length: Number, alpha: Number) -> jax.Array:
    """Return ((5 + length) / 6)^alpha, by which log p is divided (Wu et al. 2016, eq. 14).

    length: the number of tokens. alpha = 0 gives 1, which prefers short texts.
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

    prompt_BN is right-padded, with length_B tokens each. In the result, id 0 follows the last token of a text. The
    score is log p(continuation) / penalty(L, length_penalty) in nats for L appended tokens, including a stop token.

    Each step extends the live hypotheses by one token. An extension by a token of `stop` ends if it is among the `beam`
    best extensions; the `beam` best ended hypotheses are stored. The `beam` best other extensions stay live. After
    `steps` tokens, live ones count as ended. The search stops earlier if no live one can enter the result. If there are
    fewer hypotheses than `beam`, the others have the score -inf. Raises ValueError unless 1 <= beam <= W, the size of
    the vocabulary, length_B holds a number from 1 to N for each prompt, and steps >= 0.
    """
    w_BN, length_B, logits_BW, cache = generate.read_prompts(start, prompt_BN, length_B, steps=steps)
    if beam not in range(1, (W := logits_BW.shape[-1]) + 1):
        raise ValueError(f"beam = {beam} must be between 1 and the vocabulary size {W}. Choose another beam.")

    def extend(state: State, logits_RW: jax.Array) -> State:
        return _extend(state, logits_RW, n_B=length_B + state.count, stop=stop, alpha=length_penalty)

    def unfinished(state: State) -> jax.Array:
        largest = jnp.maximum(penalty(state.count, length_penalty), penalty(steps, length_penalty))
        may_win_B = state.log_p_BQ[:, 0] / largest > state.score_BQ[:, -1]  # log p never rises
        return (state.count < steps) & may_win_B.any()

    def advance(state: State) -> State:
        n_B = length_B + state.count - 1
        w_BQ = jnp.take_along_axis(state.live_BQN, n_B[:, None, None], axis=2)[..., 0]
        logits_RW, cache = step(state.cache, w_BQ.reshape(-1), jnp.repeat(n_B, beam))
        return extend(state._replace(cache=cache), logits_RW)

    state = _first_state(w_BN, logits_BW, cache, beam)
    if steps:
        state = jax.lax.while_loop(unfinished, advance, extend(state, jnp.repeat(logits_BW, beam, axis=0)))
    live_score_BQ = state.log_p_BQ / penalty(state.count, length_penalty)
    w_BQN, score_BQ = _select_best(state.ended_BQN, state.score_BQ, state.live_BQN, live_score_BQ)
    return jnp.where(score_BQ[..., None] > -jnp.inf, w_BQN, w_BN[:, None]), score_BQ


def _first_state(w_BN: jax.Array, logits_BW: jax.Array, cache: Any, beam: int) -> State:
    """Return the state before the first token: one hypothesis is the prompt, and the others have probability 0."""
    w_BQN = jnp.repeat(w_BN[:, None], beam, axis=1)
    impossible_BQ = jnp.full(w_BQN.shape[:2], -jnp.inf, linear.to_float32(logits_BW).dtype)
    cache = jax.tree.map(lambda x: jnp.repeat(x, beam, axis=0), cache)
    return State(jnp.int32(0), w_BQN, impossible_BQ.at[:, 0].set(0), w_BQN, impossible_BQ, cache)


def _extend(state: State, logits_RW: jax.Array, *, n_B: jax.Array, stop: Any, alpha: Number) -> State:
    """Extend every live hypothesis by every token, at position n_B. Return the state with the best extensions.

    alpha: the length penalty.
    """
    B, Q, N = state.live_BQN.shape
    W = logits_RW.shape[-1]
    log_p_BQW = state.log_p_BQ[..., None] + jax.nn.log_softmax(linear.to_float32(logits_RW), axis=-1).reshape(B, Q, W)
    ends_W = generate.is_stop(jnp.arange(W), stop)

    def top(log_p_BQW: jax.Array) -> tuple[jax.Array, ...]:
        """Return the Q likeliest extensions, best first: log p, index of the hypothesis, new token, extended w_BQN."""
        log_p_BQ, choice_BQ = jax.lax.top_k(log_p_BQW.reshape(B, Q * W), Q)
        parent_BQ, w_BQ = choice_BQ // W, choice_BQ % W
        parent_BQN = jnp.take_along_axis(state.live_BQN, parent_BQ[..., None], axis=1)
        is_new_BQN = jnp.arange(N) == n_B[:, None, None]
        return log_p_BQ, parent_BQ, w_BQ, jnp.where(is_new_BQN, w_BQ[..., None].astype(parent_BQN.dtype), parent_BQN)

    log_p_BQ, _, w_BQ, extended_BQN = top(log_p_BQW)
    score_BQ = jnp.where(ends_W[w_BQ], log_p_BQ / penalty(state.count + 1, alpha), -jnp.inf)
    ended_BQN, score_BQ = _select_best(state.ended_BQN, state.score_BQ, extended_BQN, score_BQ)
    log_p_BQ, parent_BQ, _, live_BQN = top(jnp.where(ends_W, -jnp.inf, log_p_BQW))
    parent_R = (parent_BQ + Q * jnp.arange(B)[:, None]).reshape(-1)
    cache = jax.tree.map(lambda x: x[parent_R], state.cache)
    return State(state.count + 1, live_BQN, log_p_BQ, ended_BQN, score_BQ, cache)


def _select_best(*pools: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the Q best hypotheses of two pools, best first, as w_BQN and score_BQ. Earlier hypotheses win ties.

    pools: w_BQN and score_BQ of the first pool, then of the second.
    """
    w_BQN, score_BQ = jnp.concatenate(pools[::2], axis=1), jnp.concatenate(pools[1::2], axis=1)
    score_BQ, choice_BQ = jax.lax.top_k(score_BQ, pools[0].shape[1])
    return jnp.take_along_axis(w_BQN, choice_BQ[..., None], axis=1), score_BQ

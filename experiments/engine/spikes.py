"""Spikes: steps with a loss or gradient norm far above that of earlier steps (skipped by train.nan = skip_spikes)."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

SIGMAS = 6.0  # a loss or norm that is more standard deviations above the mean of the history is a spike
PAST = 128  # number of accepted steps in the history
ENOUGH = 32  # number of steps in the history before a step can be a spike: fewer have no reliable deviation
ROUNDING = 1e-6  # tolerance relative to the mean: if all values are equal, float32 sums may differ by this


class History(NamedTuple):
    """Loss and gradient norm of the last accepted steps, in ring buffers of T = PAST values."""

    loss_T: jax.Array
    norm_T: jax.Array
    count: jax.Array  # number of all accepted steps


class HistoryState(NamedTuple):
    """An optimiser's state and the history, so that a skipped step, a save and a resume treat both alike."""

    inner: Any
    history: History


def record_history(optimiser: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Wrap an optimiser so that `update` records the loss (argument `value`) and the gradient norm (`norm`)."""
    inner = optax.with_extra_args_support(optimiser)

    def init(params: Any) -> HistoryState:
        return HistoryState(inner.init(params), History(jnp.zeros(PAST), jnp.zeros(PAST), jnp.int32(0)))

    def update(grads: Any, state: HistoryState, params: Any = None, *, value, norm, **args) -> tuple[Any, HistoryState]:
        updates, new = inner.update(grads, state.inner, params, value=value, norm=norm, **args)
        losses_T, norms_T, count = state.history
        oldest = count % PAST
        return updates, HistoryState(
            new, History(losses_T.at[oldest].set(value), norms_T.at[oldest].set(norm), count + 1)
        )

    return optax.GradientTransformationExtraArgs(init, update)


def is_spike(history: History, loss: jax.Array, norm: jax.Array) -> jax.Array:
    """Return True if the loss or the norm is more than SIGMAS standard deviations above its mean in the history.

    Return False while the history has fewer than ENOUGH steps.
    """
    n = jnp.minimum(history.count, PAST)
    filled_T = jnp.arange(PAST) < n

    def jumps(new: jax.Array, past_T: jax.Array) -> jax.Array:
        mean = jnp.sum(past_T, where=filled_T) / n
        spread = jnp.sqrt(jnp.sum(jnp.square(past_T - mean), where=filled_T) / n)
        return new - mean > SIGMAS * spread + ROUNDING * jnp.abs(mean)

    return (n >= ENOUGH) & (jumps(loss, history.loss_T) | jumps(norm, history.norm_T))

"""Spikes: steps whose loss or gradient norm jumps (train.nan = skip_spikes), compared with the steps before them."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

SIGMAS = 6.0  # standard deviations above the mean of the past from which on a loss or gradient norm is a spike
PAST = 128  # accepted steps that a new one is compared with
ENOUGH = 32  # of them before any step is a spike: the spread of fewer says little
ROUNDING = 1e-6  # of the mean: float32 sums may differ by this if all of the past is the same number


class History(NamedTuple):
    """Loss and gradient norm of the last accepted steps, in a ring of T = PAST places."""

    loss_T: jax.Array
    norm_T: jax.Array
    count: jax.Array  # of all accepted steps


class Remembered(NamedTuple):
    """An optimiser's state with the history, so that both are saved, resumed and kept together."""

    inner: Any
    history: History


def remember(optimiser: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Wrap an optimiser: `update` also records its arguments `value`, the loss, and `norm`, the gradient norm."""
    inner = optax.with_extra_args_support(optimiser)

    def init(params: Any) -> Remembered:
        return Remembered(inner.init(params), History(jnp.zeros(PAST), jnp.zeros(PAST), jnp.int32(0)))

    def update(grads: Any, state: Remembered, params: Any = None, *, value, norm, **more) -> tuple[Any, Remembered]:
        updates, new = inner.update(grads, state.inner, params, value=value, norm=norm, **more)
        losses_T, norms_T, count = state.history
        oldest = count % PAST
        return updates, Remembered(
            new, History(losses_T.at[oldest].set(value), norms_T.at[oldest].set(norm), count + 1)
        )

    return optax.GradientTransformationExtraArgs(init, update)


def is_spike(history: History, loss: jax.Array, norm: jax.Array) -> jax.Array:
    """Return whether loss or norm is more than SIGMAS standard deviations above the mean of a history of ENOUGH."""
    n = jnp.minimum(history.count, PAST)
    known_T = jnp.arange(PAST) < n

    def jumps(new: jax.Array, past_T: jax.Array) -> jax.Array:
        mean = jnp.sum(past_T, where=known_T) / n
        spread = jnp.sqrt(jnp.sum(jnp.square(past_T - mean), where=known_T) / n)
        return new - mean > SIGMAS * spread + ROUNDING * jnp.abs(mean)

    return (n >= ENOUGH) & (jumps(loss, history.loss_T) | jumps(norm, history.norm_T))

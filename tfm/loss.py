"""Losses and measures as (sum, count): what several devices can add up before they divide.

Each takes logits (..., C), targets (...) and weights (...), where weight 0 is padding or a word not asked for.
"""

import jax
import jax.numpy as jnp

from tfm import linear

Ratio = tuple[jax.Array, jax.Array]


def cross_entropy(logits: jax.Array, target: jax.Array, weight: jax.Array) -> Ratio:
    """sum of -log softmax(l)_target over what is asked for, in nats, and how many were asked."""
    logits = linear.wide(logits)
    chosen = jnp.take_along_axis(logits, target[..., None], axis=-1)[..., 0]
    surprise = jax.nn.logsumexp(logits, axis=-1) - chosen
    return jnp.sum(jnp.where(weight > 0, surprise * weight, 0)), jnp.sum(weight)


def accuracy(logits: jax.Array, target: jax.Array, weight: jax.Array) -> Ratio:
    """How many of those asked for have their target as the largest logit, and how many were asked."""
    return jnp.sum((jnp.argmax(logits, axis=-1) == target) * weight), jnp.sum(weight)

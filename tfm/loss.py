"""Losses and measures as (sum, count): what several devices can add up before they divide.

Those of words and classes take logits (..., C), targets (...) and weights (...); that of pixels takes patches. Weight 0
is padding or what is not asked for.
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


def squared_error(prediction_BNP: jax.Array, target_BNP: jax.Array, weight_BN: jax.Array) -> Ratio:
    """sum of (v - v')^2 over every pixel of the patches asked for, and how many pixels those are (E26).

    What is predicted or stands in the other patches may be anything, also NaN: it reaches neither sum nor gradient.
    """
    weight_BN1 = linear.wide(weight_BN)[..., None]
    difference_BNP = linear.wide(prediction_BNP) - linear.wide(target_BNP)
    asked_BNP = jnp.where(weight_BN1 > 0, difference_BNP, 0)
    return jnp.sum(weight_BN1 * asked_BNP**2), jnp.sum(weight_BN) * target_BNP.shape[-1]

"""Losses and measures as (sum, count): what several devices can add up before they divide.

Those of words and classes take logits (..., C), targets (...) and weights (...); that of pixels takes patches. Weight 0
is padding or what is not asked for. vocab: the mesh axis whose devices each have the logits of some words, in order.
"""

import jax
import jax.numpy as jnp

from tfm import linear

Ratio = tuple[jax.Array, jax.Array]


def cross_entropy(logits: jax.Array, target: jax.Array, weight: jax.Array, *, vocab: str | None = None) -> Ratio:
    """sum of -log softmax(l)_target over what is asked for, in nats, and how many were asked."""
    logits, W = linear.wide(logits), logits.shape[-1]
    if vocab is None:
        chosen = jnp.take_along_axis(logits, target[..., None], axis=-1)[..., 0]
        surprise = jax.nn.logsumexp(logits, axis=-1) - chosen
    else:  # log sum_w exp(l_w) - l_target with sums over the devices, the largest logit taken off first, as always
        highest = jax.lax.pmax(jax.lax.stop_gradient(logits).max(-1), vocab)
        highest = jnp.where(jnp.isfinite(highest), highest, 0)[..., None]  # -inf - -inf would be NaN
        sums = jax.lax.psum(jnp.exp(logits - highest).sum(-1), vocab)
        here = target - jax.lax.axis_index(vocab) * W
        mine = (here >= 0) & (here < W)
        chosen = jnp.take_along_axis(logits - highest, jnp.where(mine, here, 0)[..., None], axis=-1)[..., 0]
        surprise = jnp.log(sums) - jax.lax.psum(jnp.where(mine, chosen, 0), vocab)
    return jnp.sum(jnp.where(weight > 0, surprise * weight, 0)), jnp.sum(weight)


def accuracy(logits: jax.Array, target: jax.Array, weight: jax.Array, *, vocab: str | None = None) -> Ratio:
    """How many of those asked for have their target as the largest logit, and how many were asked."""
    logits = jax.lax.stop_gradient(logits)
    best = jnp.argmax(logits, axis=-1)
    if vocab is not None:  # of equal logits the first counts, as in argmax
        W, highest = logits.shape[-1], logits.max(-1)
        mine, none = best + jax.lax.axis_index(vocab) * W, jnp.iinfo(best.dtype).max
        best = jax.lax.pmin(jnp.where(highest == jax.lax.pmax(highest, vocab), mine, none), vocab)
    return jnp.sum((best == target) * weight), jnp.sum(weight)


def squared_error(prediction_BNP: jax.Array, target_BNP: jax.Array, weight_BN: jax.Array) -> Ratio:
    """sum of (v - v')^2 over every pixel of the patches asked for, and how many pixels those are (E26). What is
    predicted or stands in the other patches may be anything, also NaN: it reaches neither sum nor gradient."""
    weight_BN1 = linear.wide(weight_BN)[..., None]
    difference_BNP = linear.wide(prediction_BNP) - linear.wide(target_BNP)
    asked_BNP = jnp.where(weight_BN1 > 0, difference_BNP, 0)
    return jnp.sum(weight_BN1 * asked_BNP**2), jnp.sum(weight_BN) * target_BNP.shape[-1]

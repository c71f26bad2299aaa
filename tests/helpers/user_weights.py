"""A user's functions for model.weights, and a block of the wrong form."""

import jax
import jax.numpy as jnp


def sigmoid(logits, allowed):
    """Return A = sigmoid(l - log S) for S allowed keys (Ramapuram et al. 2024), also for forbidden ones."""
    return jax.nn.sigmoid(logits - jnp.log(allowed.sum(-1, keepdims=True)))


def shares(logits, allowed):
    """Return exp(l) / (1 + sum of exp(l)) over the allowed keys: the row may sum to less than one."""
    e = jnp.where(allowed, jnp.exp(logits), 0)
    return e / (1 + e.sum(-1, keepdims=True))


def one_row(logits, allowed):
    """Return weights of the wrong shape."""
    return logits[:, :, :1]


pair = one_row, shares  # not Order(apply, residual)

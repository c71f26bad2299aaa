"""Stochastic depth (Huang et al. 2016): in training, a sequence skips a whole block with probability SKIP.

As model.block = "configs.arms.stochastic_depth:order".
"""

import jax
import jax.numpy as jnp

from tfm import block

SKIP = 0.1


def skip_block(params, x_BND, spec, call):
    """Return x + (block(x) - x) / (1 - SKIP), or x with probability SKIP; without random keys (evaluation) block(x)."""
    y_BND, aux = block.pre_norm(params, x_BND, spec, call)
    if call.key_B is None:
        return y_BND, aux
    draw = jax.vmap(lambda key: jax.random.bernoulli(key, 1 - SKIP))
    keep_B = draw(block.fold_name(call.key_B, "stochastic_depth"))
    return jnp.where(keep_B[:, None, None], x_BND + (y_BND - x_BND) / (1 - SKIP), x_BND), aux


order = block.Order(skip_block)

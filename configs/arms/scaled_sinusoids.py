"""Sinusoids as large as the embeddings: sqrt(2/D) p_n in place of p_n (E21).

As model.position = "configs.arms.scaled_sinusoids:scaled". Embeddings have variance 1/D at first, and sinusoids 1/2, so
the factor makes both equal. Vaswani et al. 2017 multiply the embeddings by sqrt(D) instead.
"""

import jax.numpy as jnp

from tfm import position


def add(params, x_BND, n=None):
    """Return x_n + sqrt(2/D) p_n."""
    _, N, D = x_BND.shape
    p_ND = position.sinusoids(jnp.arange(N) if n is None else n, D)
    return x_BND + ((2 / D) ** 0.5 * p_ND).astype(x_BND.dtype)


scaled = position.sinusoidal._replace(apply=add)

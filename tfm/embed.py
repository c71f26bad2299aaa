"""From words and images to tokens (E1, E2)."""

import jax
import jax.numpy as jnp

from tfm import initial, linear
from tfm.variant import Variant


def _words_init(key: jax.Array, *, W: int, D: int) -> dict:
    return initial.normal(key, "E_WD", D**-0.5, W=W, D=D)


def _words(params: dict, w_BN: jax.Array) -> jax.Array:
    """X_i = x_i E with x_i the one-hot vector of word i: row w_i of the embedding (E1, seed 004)."""
    return params["E_WD"][w_BN]


def cut(image_BYXZ: jax.Array, *, size: int) -> jax.Array:
    """vec(patch_n): the image as patches of size x size pixels in reading order, v_BNP with P = size * size * Z.

    ValueError where the image is not a whole number of patches high and wide.
    """
    B, Y, X, Z = image_BYXZ.shape
    if Y % size or X % size:
        raise ValueError(f"images of {Y} x {X} pixels do not divide into patches of {size} x {size}")
    rows = image_BYXZ.reshape(B, Y // size, size, X // size, size, Z)
    return rows.swapaxes(2, 3).reshape(B, (Y // size) * (X // size), size * size * Z)


def _patches_init(key: jax.Array, *, P: int, D: int) -> dict:
    return initial.normal(key, "W_DP", (P * D) ** -0.5, D=D, P=P) | initial.zeros("b_D", D=D)


def _patches(params: dict, v_BNP: jax.Array) -> jax.Array:
    """x_n = W vec(patch_n) + b (E2, seed 003)."""
    return linear.rows(v_BNP, params["W_DP"], params["b_D"])


def class_token_init(key: jax.Array, *, D: int) -> dict:
    """One learned token that belongs to no patch."""
    return initial.normal(key, "c_D", D**-0.5, D=D)


def class_token(params: dict, x_BND: jax.Array) -> jax.Array:
    """The learned class token before the others: N + 1 tokens (E25)."""
    c_B1D = jnp.broadcast_to(params["c_D"], (x_BND.shape[0], 1, x_BND.shape[2]))
    return jnp.concatenate([c_B1D.astype(x_BND.dtype), x_BND], axis=1)


words = Variant(_words_init, _words)
patches = Variant(_patches_init, _patches)

"""Embeddings: map token ids, or the patches of images, to tokens x_BND (E1, E2). Patches may be masked (E26)."""

import functools

import jax
import jax.numpy as jnp

from tfm import initial, layout as layouts, linear
from tfm.variant import Variant


def _words_init(key: jax.Array, *, W: int, D: int, J: int = 0) -> dict:
    """Draw the embedding E_WD, and S_JD for J kinds of segments (first and second sentence); J = 0: no segments."""
    params = initial.normal(key, "E_WD", D**-0.5, W=W, D=D)
    return params | (initial.normal(key, "S_JD", D**-0.5, J=J, D=D) if J else {})


def _words(
    params: dict, inputs: jax.Array | dict[str, jax.Array], *, layout: layouts.Layout = layouts.ONE
) -> jax.Array:
    """Return row w_i of the embedding for each token id: X_i = x_i E with the one-hot vector x_i (E1).

    inputs: w_BN or {"w_BN", "segment_BN"}. If the tree has S, row j of S is added to tokens of segment j (Devlin et al.
    2019, figure 2); without segment_BN, j = 0. With layout.vocab each device holds some rows of E.
    """
    inputs = inputs if isinstance(inputs, dict) else {"w_BN": inputs}
    E_WD, w_BN = jnp.asarray(params["E_WD"]), inputs["w_BN"]
    if layout.vocab is None:
        x_BND = E_WD[w_BN]
    else:  # one device holds the row, and the others add 0
        local_BN = w_BN - jax.lax.axis_index(layout.vocab) * len(E_WD)
        is_local_BN = (local_BN >= 0) & (local_BN < len(E_WD))
        row_BND = E_WD[jnp.where(is_local_BN, local_BN, 0)]
        x_BND = jax.lax.psum(jnp.where(is_local_BN[..., None], row_BND, 0), layout.vocab)
    return x_BND + jnp.asarray(params["S_JD"])[inputs.get("segment_BN", 0)] if "S_JD" in params else x_BND


def cut(image_BYXZ: jax.Array, *, size: int) -> jax.Array:
    """Return v_BNP, v_n = vec(patch_n): patches of size x size pixels in reading order, P = size * size * Z.

    Raises ValueError if `size` does not divide Y and X.
    """
    B, Y, X, Z = image_BYXZ.shape
    if Y % size or X % size:
        raise ValueError(
            f"images of {Y} x {X} pixels do not divide into patches of {size} x {size}. "
            "Choose a patch size that divides both sides"
        )
    rows = image_BYXZ.reshape(B, Y // size, size, X // size, size, Z)
    return rows.swapaxes(2, 3).reshape(B, (Y // size) * (X // size), size * size * Z)


def join(v_BNP: jax.Array, *, Y: int, X: int, size: int) -> jax.Array:
    """Return image_BYXZ from patches v_BNP of size x size pixels in reading order: the inverse of `cut`.

    Raises ValueError if N patches of P values do not make an image of Y x X pixels.
    """
    B, N, P = v_BNP.shape
    if Y % size or X % size or N != (Y // size) * (X // size) or P % size**2:
        raise ValueError(
            f"{N} patches of {P} values do not make an image of {Y} x {X} pixels from patches of {size} x {size}. "
            "Pass the Y, X and size of the images that were cut"
        )
    rows = v_BNP.reshape(B, Y // size, X // size, size, size, P // size**2)
    return rows.swapaxes(2, 3).reshape(B, Y, X, P // size**2)


def _patches_init(key: jax.Array, *, P: int, D: int, hidden: bool = False) -> dict:
    """Draw W_DP and b_D. hidden: also draw the token h_D of masked patches."""
    params = initial.normal(key, "W_DP", (P * D) ** -0.5, D=D, P=P) | initial.zeros("b_D", D=D)
    return params | (initial.normal(key, "h_D", D**-0.5, D=D) if hidden else {})


def _patches(params: dict, v_BNP: jax.Array, *, layout: layouts.Layout = layouts.ONE) -> jax.Array:
    """Return x_n = W vec(patch_n) + b (E2)."""
    return linear.matmul(v_BNP.astype(params["W_DP"].dtype), params["W_DP"], params["b_D"])


def _mixed_init(key: jax.Array, *, P: int, W: int, D: int) -> dict:
    """Draw the parameters of `patches` and those of `words`."""
    return _patches_init(key, P=P, D=D) | _words_init(key, W=W, D=D)


def _mixed(params: dict, inputs: dict[str, jax.Array], *, layout: layouts.Layout = layouts.ONE) -> jax.Array:
    """Return one sequence: W vec(patch_n) + b of the patches `v_BNP`, then x_i E of the token ids `w_BN` (E1, E2)."""
    x_BND = _words(params, inputs["w_BN"], layout=layout)
    return jnp.concatenate([_patches(params, inputs["v_BNP"]), x_BND], axis=1)


def _masked_patches(params: dict, inputs: dict[str, jax.Array], *, layout: layouts.Layout = layouts.ONE) -> jax.Array:
    """Return the learned token h for masked patches, and W vec(patch_n) + b for the others (E26).

    inputs: patches `v_BNP`, and `hidden_BN`, True if a patch is masked. Masked pixels, even NaN, affect neither the
    tokens nor the gradient of W.
    """
    hidden_BN1 = inputs["hidden_BN"][..., None]
    visible_BNP = jnp.where(hidden_BN1, 0, inputs["v_BNP"]).astype(params["W_DP"].dtype)
    return jnp.where(hidden_BN1, params["h_D"], _patches(params, visible_BNP))


def class_token_init(key: jax.Array, *, D: int) -> dict:
    """Return {"c_D": class token}, drawn from N(0, 1/D)."""
    return initial.normal(key, "c_D", D**-0.5, D=D)


def class_token(params: dict, x_BND: jax.Array) -> jax.Array:
    """Prepend the class token, c_D of `params` (E25), to the tokens of every sequence."""
    c_B1D = jnp.broadcast_to(params["c_D"], (x_BND.shape[0], 1, x_BND.shape[2]))
    return jnp.concatenate([c_B1D.astype(x_BND.dtype), x_BND], axis=1)


words = Variant(_words_init, _words, takes_layout=True)
patches = Variant(_patches_init, _patches)
mixed = Variant(_mixed_init, _mixed, takes_layout=True)
masked_patches = Variant(functools.partial(_patches_init, hidden=True), _masked_patches)

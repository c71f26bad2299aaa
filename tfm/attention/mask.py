"""Masks: a function `mask(n, s_S) -> bool` of query and key positions, True if the query may attend to the key.

n is (N,), or (B, N) if every sequence has its own positions. The result is (N, S), or (B, N, S) if n is (B, N) or the
mask depends on the sequence. Arrays are arguments of a jax.tree_util.Partial, so that gradients and compiled loops see
them. An implementation of attention may evaluate any block of a mask and need not hold all of it.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial

from tfm.attention import block_mask

Mask = Callable[[jax.Array, jax.Array], jax.Array]
Bias = Callable[[jax.Array, jax.Array], jax.Array]  # like a mask, with numbers: (H, N, S) or (B, H, N, S)


def causal(n: jax.Array, s_S: jax.Array) -> jax.Array:
    """Return s <= n: a token attends to itself and to earlier ones.

    In E22, A_{n,n'} = 0 for n > n' with columns attending (upper-triangular); with rows it is lower-triangular.
    """
    return s_S <= n[..., None]


def window(w: int) -> Mask:
    """Return the mask |n - s| < w: a token attends to itself and w - 1 tokens to each side; with `causal`, the last w.

    Raises ValueError if w < 1.
    """
    if w < 1:
        raise ValueError(f"a window must hold at least 1 token, the query itself, not {w}")
    return functools.partial(_window, w)


def _window(w: int, n: jax.Array, s_S: jax.Array) -> jax.Array:
    return jnp.abs(s_S - n[..., None]) < w


def prefix(length: int | jax.Array) -> Mask:
    """Return the mask s < length: all tokens attend to the first `length` ones. length_B: one for each sequence.

    `either(causal, prefix(length))` reads a prefix in both directions and generates the rest token by token.
    """
    return Partial(_prefix, jnp.asarray(length))


def _prefix(length: jax.Array, n: jax.Array, s_S: jax.Array) -> jax.Array:
    inside = s_S < length[..., None, None]  # (1, S) or (B, 1, S)
    return jnp.broadcast_to(inside, jnp.broadcast_shapes(inside.shape, (*n.shape, s_S.size)))


def padding(valid_BS: jax.Array) -> Mask:
    """Return the mask of valid keys: valid_BS is False at padding."""
    return Partial(_padding, jnp.asarray(valid_BS))


def _padding(valid_BS: jax.Array, n: jax.Array, s_S: jax.Array) -> jax.Array:
    return jnp.broadcast_to(valid_BS[:, s_S][:, None, :], (valid_BS.shape[0], n.shape[-1], s_S.size))


def both(first: Mask, second: Mask) -> Mask:
    """Return the product of two masks: True if both are."""
    return Partial(_both, block_mask.as_partial(first), block_mask.as_partial(second))


def _both(first: Mask, second: Mask, n: jax.Array, s_S: jax.Array) -> jax.Array:
    return first(n, s_S) & second(n, s_S)


def either(first: Mask, second: Mask) -> Mask:
    """Return the union of two masks: True if one of them is."""
    return Partial(_either, block_mask.as_partial(first), block_mask.as_partial(second))


def _either(first: Mask, second: Mask, n: jax.Array, s_S: jax.Array) -> jax.Array:
    return first(n, s_S) | second(n, s_S)


def evaluate(mask: Mask | None, n: np.ndarray, s_S: np.ndarray) -> tuple[np.ndarray | None, jax.Array | None]:
    """Return the mask of these positions as a NumPy array (N, S), computed during tracing, and valid_BS of its padding,
    or None.

    Return (None, None) if the mask is not the product of a known mask and padding.
    """
    (terms, valid_BS), shown_NS = split(mask), np.ones((n.size, s_S.size), bool)
    for term in terms:
        arrays = jax.tree.leaves(block_mask.as_partial(term))
        if any(isinstance(array, jax.core.Tracer) for array in arrays):
            return None, None
        with jax.ensure_compile_time_eval():
            allowed = term(n, s_S)
        if isinstance(allowed, jax.core.Tracer) or allowed.ndim > 2:
            return None, None
        shown_NS &= np.asarray(allowed)
    return shown_NS, valid_BS


def split(mask: Mask | None) -> tuple[list[Mask], jax.Array | None]:
    """Return the factors of a product of masks, except padding, and valid_BS of its padding masks together, or None."""
    terms, valid_BS = [], None
    for term in _terms(mask):
        if isinstance(term, Partial) and term.func is _padding:
            valid_BS = term.args[0] if valid_BS is None else valid_BS & term.args[0]
        else:
            terms.append(term)
    return terms, valid_BS


def _terms(mask: Mask | None) -> list[Mask]:
    """Return the factors of a product of masks (`both`)."""
    if mask is None:
        return []
    if isinstance(mask, Partial) and mask.func is _both:
        return [term for factor in mask.args for term in _terms(factor)]
    return [mask]

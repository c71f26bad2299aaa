"""Who may attend to whom. A mask is a function `mask(n, s_S) -> bool` of query and key positions, True = may attend.

`n` is (N,), or (B, N) where every sequence of a batch stands at its own positions. The result is (N, S), or (B, N, S)
where n is (B, N) or the mask depends on the sequence. A mask that depends on arrays has them as arguments of a
jax.tree_util.Partial, so that gradients and compiled loops find them. Because a mask is a function of positions, a way
of computing attention may ask for any block of it and need never hold all of it.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial

from tfm.attention import block_mask

Bias = Callable[[jax.Array, jax.Array], jax.Array]  # the same of numbers, (H, N, S) or (B, H, N, S)
Mask = Callable[[jax.Array, jax.Array], jax.Array]


def causal(n: jax.Array, s_S: jax.Array) -> jax.Array:
    """A token attends to itself and to what came before: s <= n.

    E22 has A_{n,n'} = 0 for n > n' with columns attending (upper-triangular); with rows it is lower-triangular.
    """
    return s_S <= n[..., None]


def window(w: int) -> Mask:
    """Only near tokens, |n - s| < w: itself and w - 1 to each side; with causal, the last w. ValueError for w < 1."""
    if w < 1:
        raise ValueError(f"a window holds at least 1 token, the query's own, and {w} was asked for")
    return functools.partial(_window, w)


def _window(w: int, n: jax.Array, s_S: jax.Array) -> jax.Array:
    return jnp.abs(s_S - n[..., None]) < w


def prefix(length: int | jax.Array) -> Mask:
    """All may attend to the first `length` tokens, s < length; length_B where each sequence has its own.

    With `either(causal, prefix(length))` a prefix is read in both directions and the rest written word by word.
    """
    return Partial(_prefix, jnp.asarray(length))


def _prefix(length: jax.Array, n: jax.Array, s_S: jax.Array) -> jax.Array:
    inside = s_S < length[..., None, None]  # (1, S) or (B, 1, S)
    return jnp.broadcast_to(inside, jnp.broadcast_shapes(inside.shape, (*n.shape, s_S.size)))


def padding(valid_BS: jax.Array) -> Mask:
    """Only real tokens may be attended to: valid_BS is False at padding."""
    return Partial(_padding, jnp.asarray(valid_BS))


def _padding(valid_BS: jax.Array, n: jax.Array, s_S: jax.Array) -> jax.Array:
    return jnp.broadcast_to(valid_BS[:, s_S][:, None, :], (valid_BS.shape[0], n.shape[-1], s_S.size))


def both(first: Mask, second: Mask) -> Mask:
    """The product of two masks: what both allow."""
    return Partial(_both, block_mask.as_partial(first), block_mask.as_partial(second))


def _both(first: Mask, second: Mask, n: jax.Array, s_S: jax.Array) -> jax.Array:
    return first(n, s_S) & second(n, s_S)


def either(first: Mask, second: Mask) -> Mask:
    """The sum of two masks: what one of them allows."""
    return Partial(_either, block_mask.as_partial(first), block_mask.as_partial(second))


def _either(first: Mask, second: Mask, n: jax.Array, s_S: jax.Array) -> jax.Array:
    return first(n, s_S) | second(n, s_S)


def evaluate(mask: Mask | None, n: np.ndarray, s_S: np.ndarray) -> tuple[np.ndarray | None, jax.Array | None]:
    """Return (N, S), what the mask says of these positions while a program is traced, and valid_BS of the padding in
    it, or None if there is none. (None, None) for a mask that is not the product of these two."""
    (terms, valid_BS), shown_NS = split(mask), np.ones((n.size, s_S.size), bool)
    for term in terms:
        arrays = jax.tree.leaves(block_mask.as_partial(term))
        if any(isinstance(array, jax.core.Tracer) for array in arrays):
            return None, None
        with jax.ensure_compile_time_eval():
            shown = term(n, s_S)
        if isinstance(shown, jax.core.Tracer) or shown.ndim > 2:
            return None, None
        shown_NS &= np.asarray(shown)
    return shown_NS, valid_BS


def split(mask: Mask | None) -> tuple[list[Mask], jax.Array | None]:
    """Return the masks that must all allow a key, except padding, and what the padding masks say together: valid_BS, or
    None."""
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
        return [term for one in mask.args for term in _terms(one)]
    return [mask]

"""Masks: functions `mask(n, s_S) -> bool` of query and key positions, True if the query may attend to the key.

n is (N,), or (B, N) if every sequence has its own positions. The result is (N, S), or (B, N, S) if n is (B, N) or the
mask depends on the sequence. A mask with arrays is a jax.tree_util.Partial of them: a pytree, so that gradients and
compiled loops can trace its arrays. Attention can evaluate a mask block by block, without storing all N x S values.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial

from tfm.attention import block_mask

Mask = Callable[[jax.Array, jax.Array], jax.Array]
Bias = Callable[[jax.Array, jax.Array], jax.Array]  # returns numbers, (H, N, S) or (B, H, N, S)


def causal(n: jax.Array, s_S: jax.Array) -> jax.Array:
    """Return s <= n: a token attends to itself and to earlier tokens.

    In E22 queries are the columns of A: A_{n,n'} = 0 for n > n', upper triangular. Here queries are rows, so the mask
    is lower triangular.
    """
    return s_S <= n[..., None]


def window(w: int) -> Mask:
    """Return the mask |n - s| < w: a token attends to itself and w - 1 tokens on each side.

    With both(causal, window(w)) a token attends to the last w tokens, which include itself.

    Raises ValueError if w < 1.
    """
    if w < 1:
        raise ValueError(f"window: w = {w} must be at least 1, for the token itself. Increase w.")
    return Window(w)


@dataclasses.dataclass(frozen=True)
class Window:
    """The mask |n - s| < w of `window`."""

    w: int

    def __call__(self, n: jax.Array, s_S: jax.Array) -> jax.Array:
        return jnp.abs(s_S - n[..., None]) < self.w


def prefix(length: int | jax.Array) -> Mask:
    """Return the mask s < length: all tokens attend to the first `length` tokens. length: one number, or length_B.

    With either(causal, prefix(length)), tokens of the prefix attend in both directions, and later ones causally.
    """
    return Partial(_prefix, jnp.asarray(length))


def _prefix(length: jax.Array, n: jax.Array, s_S: jax.Array) -> jax.Array:
    inside = s_S < length[..., None, None]  # (1, S) or (B, 1, S)
    return jnp.broadcast_to(inside, jnp.broadcast_shapes(inside.shape, (*n.shape, s_S.size)))


def padding(valid_BS: jax.Array, *, at_end: bool = False) -> Mask:
    """Return the mask of the valid keys, (B, N, S): valid_BS is False at padding.

    at_end: the caller guarantees that no valid key comes after padding. A kernel then needs only the number of valid
    keys of each sequence. No code checks it, because valid_BS is traced.
    """
    return Partial(_padding_at_end if at_end else _padding, jnp.asarray(valid_BS))


def _padding(valid_BS: jax.Array, n: jax.Array, s_S: jax.Array) -> jax.Array:
    return jnp.broadcast_to(valid_BS[:, s_S][:, None, :], (valid_BS.shape[0], n.shape[-1], s_S.size))


def _padding_at_end(valid_BS: jax.Array, n: jax.Array, s_S: jax.Array) -> jax.Array:
    return _padding(valid_BS, n, s_S)


def documents(document_BS: jax.Array) -> Mask:
    """Return the mask of the keys in the query's own document, (B, N, S), for self-attention.

    document_BS: the number of each token's document, at least 0.
    """
    return Partial(_documents, jnp.asarray(document_BS))


def _documents(document_BS: jax.Array, n: jax.Array, s_S: jax.Array) -> jax.Array:
    document_BN = document_BS[:, n] if n.ndim == 1 else jnp.take_along_axis(document_BS, n, axis=1)
    return document_BN[:, :, None] == document_BS[:, s_S][:, None, :]


def both(first: Mask, second: Mask) -> Mask:
    """Return the logical and of two masks."""
    return Partial(_both, block_mask.as_partial(first), block_mask.as_partial(second))


def _both(first: Mask, second: Mask, n: jax.Array, s_S: jax.Array) -> jax.Array:
    return first(n, s_S) & second(n, s_S)


def either(first: Mask, second: Mask) -> Mask:
    """Return the logical or of two masks."""
    return Partial(_either, block_mask.as_partial(first), block_mask.as_partial(second))


def _either(first: Mask, second: Mask, n: jax.Array, s_S: jax.Array) -> jax.Array:
    return first(n, s_S) | second(n, s_S)


def evaluate(mask: Mask | None, n: np.ndarray, s_S: np.ndarray) -> tuple[np.ndarray | None, jax.Array | None]:
    """Return the mask at these positions as a NumPy array (N, S), except padding, and valid_BS of its padding or None.

    The array is computed during tracing. Return (None, None) if the mask depends on traced arrays or on the
    sequence, except by padding masks that `both` joins.
    """
    (terms, valid_BS), allowed_NS = split(mask), np.ones((n.size, s_S.size), bool)
    for term in terms:
        arrays = jax.tree.leaves(block_mask.as_partial(term))
        if any(isinstance(array, jax.core.Tracer) for array in arrays):
            return None, None
        with jax.ensure_compile_time_eval():
            allowed = term(n, s_S)
        if isinstance(allowed, jax.core.Tracer) or allowed.ndim > 2:
            return None, None
        allowed_NS &= np.asarray(allowed)
    return allowed_NS, valid_BS


def split(mask: Mask | None) -> tuple[list[Mask], jax.Array | None]:
    """Return the masks that `both` joins, except padding, and valid_BS of all its padding masks together, or None."""
    terms, valid_BS = [], None
    for term in _terms(mask):
        if isinstance(term, Partial) and term.func in (_padding, _padding_at_end):
            valid_BS = term.args[0] if valid_BS is None else valid_BS & term.args[0]
        else:
            terms.append(term)
    return terms, valid_BS


def split_documents(mask: Mask | None) -> tuple[Mask | None, jax.Array | None]:
    """Return the other masks that `both` joins with a mask of documents, and its document_BS, or (mask, None)."""
    terms = _terms(mask)
    for i, term in enumerate(terms):
        if isinstance(term, Partial) and term.func is _documents:
            others = terms[:i] + terms[i + 1 :]
            return functools.reduce(both, others) if others else None, term.args[0]
    return mask, None


def _terms(mask: Mask | None) -> list[Mask]:
    """Return the list of the masks that `both` joins in `mask`."""
    if mask is None:
        return []
    if isinstance(mask, Partial) and mask.func is _both:
        return [term for joined in mask.args for term in _terms(joined)]
    has_arguments = not isinstance(mask, Partial) or mask.args or mask.keywords
    return [mask if has_arguments else mask.func]


class Band(NamedTuple):
    """A mask that `both` joins from these parts: a band of keys around each query, and padding at the end."""

    is_causal: bool
    w: int | None  # of the narrowest window; None: no window
    valid_BS: jax.Array | None  # None: no padding


def read_band(mask: Mask | None) -> Band | None:
    """Return the parts of a mask of `causal`, `window` and `padding(..., at_end=True)`; None for any other mask."""
    is_causal, widths, valid_BS = False, [], None
    for term in _terms(mask):
        function = term.func if isinstance(term, Partial) else term
        if function is causal:
            is_causal = True
        elif isinstance(function, Window):
            widths.append(function.w)
        elif function is _padding_at_end:
            valid_BS = term.args[0] if valid_BS is None else valid_BS & term.args[0]
        else:
            return None
    return Band(is_causal, min(widths, default=None), valid_BS)

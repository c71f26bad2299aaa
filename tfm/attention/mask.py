"""Masks: which keys each query may attend to. A `Mask` is data: a kernel reads the parts that it computes itself.

A mask is also a function `mask(n, s_S) -> bool` of query and key positions, True if the query may attend to the key.
n is (N,), or (B, N) if every sequence has its own positions. The result is (N, S), or (B, N, S) if n is (B, N) or the
mask depends on the sequence. So attention can evaluate a mask block by block, without storing all N x S values. A
function of the user's with these arguments and this result is a mask too.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial

Bias = Callable[[jax.Array, jax.Array], jax.Array]  # returns numbers, (H, N, S) or (B, H, N, S)
STATIC = {"static": True}  # not an array: a part of the pytree's structure


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Mask:
    """The keys that all parts together allow; a part that is not set allows all keys.

    causal: earlier keys and the query's own, s <= n. In E22 queries are the columns of A: A_{n,n'} = 0 for n > n',
    upper triangular. Here queries are rows, so the mask is lower triangular.
    prefix_B: with `causal`, allows the keys s < prefix_B too; one number, or one for each sequence.
    window: the keys |n - s| < window. valid_BS: True at valid keys, False at padding.
    at_end: the caller guarantees that no valid key comes after padding. A kernel then needs only the number of valid
    keys of each sequence. No code checks it, because valid_BS is traced. True without padding.
    document_BS: the number of each token's document, at least 0; allows the keys in the query's own document.
    other: a function like a mask, (n, s) -> allowed, as a pytree (`as_partial`).
    """

    causal: bool = dataclasses.field(default=False, metadata=STATIC)
    window: int | None = dataclasses.field(default=None, metadata=STATIC)
    at_end: bool = dataclasses.field(default=True, metadata=STATIC)
    prefix_B: jax.Array | None = None
    valid_BS: jax.Array | None = None
    document_BS: jax.Array | None = None
    other: Callable[[jax.Array, jax.Array], jax.Array] | None = None

    def __call__(self, n: jax.Array, s_S: jax.Array) -> jax.Array:
        """Return whether each query may attend to each key (see the top of this file)."""
        parts, n_N1 = [], n[..., None]
        if self.causal:
            earlier, prefix_B = s_S <= n_N1, self.prefix_B
            parts.append(earlier if prefix_B is None else earlier | (s_S < prefix_B[..., None, None]))
        if self.window:
            parts.append(jnp.abs(s_S - n_N1) < self.window)
        if self.valid_BS is not None:
            parts.append(self.valid_BS[:, s_S][:, None])
        if self.document_BS is not None:
            queries_BN = self.document_BS[:, n] if n.ndim == 1 else jnp.take_along_axis(self.document_BS, n, axis=1)
            parts.append(queries_BN[..., None] == self.document_BS[:, s_S][:, None])
        if self.other is not None:
            parts.append(self.other(n, s_S))
        allowed = functools.reduce(operator.and_, parts or [np.ones((1, 1), bool)])
        on_host = isinstance(allowed, np.ndarray) and isinstance(n, np.ndarray)  # a JAX function would be compiled
        broadcast = np.broadcast_to if on_host else jnp.broadcast_to
        return broadcast(allowed, np.broadcast_shapes(allowed.shape, (*n.shape, s_S.size)))


causal = Mask(causal=True)


def window(w: int) -> Mask:
    """Return the mask |n - s| < w: a token attends to itself and w - 1 tokens on each side.

    With both(causal, window(w)) a token attends to the last w tokens, which include itself.

    Raises ValueError if w < 1.
    """
    if w < 1:
        raise ValueError(f"window: w = {w} must be at least 1, for the token itself. Increase w.")
    return Mask(window=w)


def prefix(length: int | jax.Array) -> Mask:
    """Return the mask s <= n or s < length: the first `length` tokens attend in both directions, later ones causally.

    length: one number, or length_B.
    """
    return Mask(causal=True, prefix_B=jnp.asarray(length))


def padding(valid_BS: jax.Array, *, at_end: bool = False) -> Mask:
    """Return the mask of the valid keys, (B, N, S): valid_BS is False at padding.

    at_end: the caller guarantees that no valid key comes after padding.
    """
    return Mask(valid_BS=jnp.asarray(valid_BS), at_end=at_end)


def documents(document_BS: jax.Array) -> Mask:
    """Return the mask of the keys in the query's own document, (B, N, S), for self-attention. document_BS: see Mask."""
    return Mask(document_BS=jnp.asarray(document_BS))


def both(first: Callable, second: Callable) -> Mask:
    """Return the logical and of two masks. Raises ValueError if both have document_BS."""
    pair = as_mask(first), as_mask(second)

    def join(name: str, function: Callable) -> Any:
        values = [getattr(mask, name) for mask in pair if getattr(mask, name) is not None]
        return functools.reduce(function, values) if values else None

    def refuse(*_: jax.Array) -> None:
        raise ValueError("both: each mask has documents. Number the documents so that one such mask is enough.")

    plain = any(mask.causal and mask.prefix_B is None for mask in pair)  # such a mask forbids what a prefix allows
    return Mask(
        causal=any(mask.causal for mask in pair),
        window=join("window", min),
        at_end=all(mask.at_end for mask in pair),
        prefix_B=None if plain else join("prefix_B", jnp.minimum),
        valid_BS=join("valid_BS", operator.and_),
        document_BS=join("document_BS", refuse),
        other=join("other", lambda *functions: Partial(_both, *functions)),
    )


def _both(first: Callable, second: Callable, n: jax.Array, s_S: jax.Array) -> jax.Array:
    return first(n, s_S) & second(n, s_S)


def evaluate(mask: Mask, n: np.ndarray, s_S: np.ndarray) -> np.ndarray | None:
    """Return mask(n, s_S) as a NumPy array, computed during tracing; None if it depends on traced arrays."""
    if any(isinstance(array, jax.core.Tracer) for array in jax.tree.leaves(mask)):
        return None
    with jax.ensure_compile_time_eval():
        allowed = mask(n, s_S)
    return None if isinstance(allowed, jax.core.Tracer) else np.asarray(allowed)


def as_mask(mask: Callable | None) -> Mask:
    """Return a mask as a Mask: itself, a function of the user's as its part `other`, and all keys allowed for None."""
    return mask if isinstance(mask, Mask) else Mask(other=as_partial(mask))


def as_partial(function: Callable | None) -> Callable | None:
    """Return a function of positions as a pytree: a Mask, a Partial or None unchanged, else Partial(function)."""
    return function if function is None or isinstance(function, (Partial, Mask)) else Partial(function)

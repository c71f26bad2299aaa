"""Tokens in blocks, and what holds between two of them: who may attend to whom, and the bias. A block of queries is a
dict with the positions `n`, one of keys with `s` and, where blocks were filled up, `real`; N and S are its tokens."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import Partial

Tree = Any
EMPTY, PARTIAL, FULL = range(3)  # how much of a block of weights the mask allows


def size(length: int, most: int) -> int:
    """The size of equal blocks of at most `most` tokens, a multiple of eight where there are several and that fits."""
    count = -(-length // most)
    even = -(-length // count)
    rounded = -(-even // 8) * 8
    return rounded if count > 1 and rounded <= most else even


def cut(x: jax.Array, axis: int, size: int, *, mode: str = "constant") -> jax.Array:
    """x in blocks of `size` along the axis, counted by a new first axis; the last is filled up (jnp.pad's mode)."""
    axis %= x.ndim
    padding = [(0, -x.shape[axis] % size if i == axis else 0) for i in range(x.ndim)]
    x = jnp.pad(x, padding, mode=mode)
    return jnp.moveaxis(x.reshape(*x.shape[:axis], -1, size, *x.shape[axis + 1 :]), axis, 0)


def zero(tree: Tree) -> jax.Array:
    """0, varying over the axes of a device mesh over which any leaf of the tree varies.

    Added, it makes types equal for loops and branches inside `shard_map`; elsewhere it does nothing.
    """
    return sum(jnp.zeros_like(leaf, jnp.int32, ()) for leaf in jax.tree.leaves(tree))


def arrays_of(function: Callable | None) -> Callable | None:
    """A mask or a bias as a tree: what depends on arrays is a jax.tree_util.Partial(function, *arrays) already."""
    return function if function is None or isinstance(function, Partial) else Partial(function)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rules:
    """Mask and bias, each a function of positions and the arrays it depends on (`arrays_of`), or None; and the soft cap
    of the logits before both (explicit.capped)."""

    mask: Partial | None
    bias: Partial | None
    cap: float = dataclasses.field(metadata={"static": True})

    def allowed(self, query: dict, key: dict) -> jax.Array | None:
        """Which queries may attend to which keys: (N, S) or (B, N, S), or None for all."""
        allowed = None if self.mask is None else self.mask(query["n"], key["s"])
        if "real" not in key:
            return allowed
        real_NS = jnp.broadcast_to(key["real"], (query["n"].shape[-1], key["real"].size))
        return real_NS if allowed is None else allowed & real_NS

    def needs(self, query: dict, key: dict) -> jax.Array:
        """How much each block of queries needs of each of keys: EMPTY, PARTIAL or FULL; (I, J)."""

        def need(query: dict, key: dict) -> jax.Array:
            allowed = self.allowed(query, key)
            if allowed is None:
                return FULL + zero((query, key, self))
            count = allowed.sum(-1, dtype=jnp.float32)  # to ask for `any` takes twice as long on a CPU
            return jnp.where((count == allowed.shape[-1]).all(), FULL, jnp.where((count > 0).any(), PARTIAL, EMPTY))

        return jax.lax.map(lambda query: jax.lax.map(lambda key: need(query, key), key), query)

    def as_needed(self, need: jax.Array, function: Callable, query: dict, key: dict, *sums: Tree) -> Tree:
        """The sums after function(rules, query, key, allowed, *sums); they stay if EMPTY, no mask is formed if FULL."""

        def partial(*sums: Tree) -> Tree:
            return function(self, query, key, self.allowed(query, key), *sums)

        full = functools.partial(function, self, query, key, None)
        if self.mask is None and "real" not in key:
            return full(*sums)
        return jax.lax.switch(need, [lambda *unchanged: unchanged, partial, full], *sums)

    def added(self, query: dict, key: dict) -> jax.Array | None:
        """The bias of the logits, (H, N, S) or (B, H, N, S), or None."""
        return None if self.bias is None else self.bias(query["n"], key["s"])

    def learned(self) -> list:
        """The arrays of the bias that can have a gradient; None for the others."""
        return [leaf if jnp.issubdtype(leaf.dtype, jnp.inexact) else None for leaf in jax.tree.leaves(self.bias)]

    def into_learned(self, query: dict, key: dict, dbias: jax.Array | None) -> list:
        """The gradient of those arrays from that of one block of the bias."""
        learned, (leaves, tree) = self.learned(), jax.tree.flatten(self.bias)
        if dbias is None:
            return learned

        def block_of(learned: list) -> jax.Array:
            merged = [leaf if one is None else one for one, leaf in zip(learned, leaves, strict=True)]
            own = dataclasses.replace(self, bias=jax.tree.unflatten(tree, merged))
            return own.added(query, key) + jnp.zeros_like(dbias)

        return jax.vjp(block_of, learned)[1](dbias)[0]

    def gradient(self, dlearned: list) -> "Rules":
        """The same as custom_vjp wants them: None for a mask's."""
        return Rules(None, jax.tree.unflatten(jax.tree.structure(self.bias), dlearned), self.cap)


def each(need_J: jax.Array, step: Callable[[jax.Array, Tree], Tree], carry: Tree, *, every: bool = False) -> Tree:
    """carry = step(j, carry) for the blocks j of which something is needed, or for every one of them.

    Not a `scan`: inside a loop over layers JAX would compute the masks of all blocks, N x S numbers, ahead of it.
    """
    if every:
        return jax.lax.fori_loop(0, need_J.size, step, carry)
    order_J = jnp.argsort(need_J == EMPTY, stable=True)
    return jax.lax.fori_loop(0, (need_J != EMPTY).sum(), lambda i, carry: step(order_J[i], carry), carry)

"""Tokens in blocks, and mask and bias of a pair of blocks.

A block of queries is a dict with the positions `n`; a block of keys has `s` and, if the last block is padded, `real`.
I and J count the blocks of queries and of keys; N and S are the tokens of one block.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import Partial

Tree = Any
EMPTY, PARTIAL, FULL = range(3)  # how much of a block of weights the mask allows: nothing, some, all


def size(length: int, most: int) -> int:
    """Return the size of equal blocks of at most `most` tokens; of several blocks a multiple of eight, if that fits."""
    count = -(-length // most)
    even = -(-length // count)
    rounded = -(-even // 8) * 8
    return rounded if count > 1 and rounded <= most else even


def cut(x: jax.Array, axis: int, size: int, *, mode: str = "constant") -> jax.Array:
    """Return x in blocks of `size` along the axis, with a new first axis; the last is padded by `mode` of jnp.pad."""
    axis %= x.ndim
    padding = [(0, -x.shape[axis] % size if i == axis else 0) for i in range(x.ndim)]
    x = jnp.pad(x, padding, mode=mode)
    return jnp.moveaxis(x.reshape(*x.shape[:axis], -1, size, *x.shape[axis + 1 :]), axis, 0)


def zero(tree: Tree) -> jax.Array:
    """Return 0, varying over the mesh axes over which any leaf of the tree varies.

    Adding it makes types equal for loops and branches inside `shard_map`; elsewhere it does nothing.
    """
    return sum(jnp.zeros_like(leaf, jnp.int32, ()) for leaf in jax.tree.leaves(tree))


def as_partial(function: Callable | None) -> Callable | None:
    """Return a mask or a bias as a tree: jax.tree_util.Partial(function, *arrays). None stays None."""
    return function if function is None or isinstance(function, Partial) else Partial(function)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rules:
    """Mask and bias as trees (`as_partial`), or None, and the soft cap of the logits (explicit.soft_cap)."""

    mask: Partial | None
    bias: Partial | None
    cap: float = dataclasses.field(metadata={"static": True})

    def allowed(self, query: dict, key: dict) -> jax.Array | None:
        """Return which queries may attend to which keys, (N, S) or (B, N, S), True where they may; None if all may.

        query["n"], key["s"]: the positions. key["real"]: False for padding of the last block; missing without padding.
        """
        allowed = None if self.mask is None else self.mask(query["n"], key["s"])
        if "real" not in key:
            return allowed
        real_NS = jnp.broadcast_to(key["real"], (query["n"].shape[-1], key["real"].size))
        return real_NS if allowed is None else allowed & real_NS

    def needs(self, query: dict, key: dict) -> jax.Array:
        """Return need_IJ: how much the blocks of queries see of the blocks of keys (EMPTY, PARTIAL or FULL)."""

        def need(query: dict, key: dict) -> jax.Array:
            allowed = self.allowed(query, key)
            if allowed is None:
                return FULL + zero((query, key, self))
            count = allowed.sum(-1, dtype=jnp.float32)  # `any` takes twice as long on a CPU
            return jnp.where((count == allowed.shape[-1]).all(), FULL, jnp.where((count > 0).any(), PARTIAL, EMPTY))

        return jax.lax.map(lambda query: jax.lax.map(lambda key: need(query, key), key), query)

    def apply_if_needed(self, need: jax.Array, function: Callable, query: dict, key: dict, *sums: Tree) -> Tree:
        """Return function(rules, query, key, allowed, *sums): the sums themselves if EMPTY, without a mask if FULL."""

        def partial(*sums: Tree) -> Tree:
            return function(self, query, key, self.allowed(query, key), *sums)

        full = functools.partial(function, self, query, key, None)
        if self.mask is None and "real" not in key:
            return full(*sums)
        return jax.lax.switch(need, [lambda *unchanged: unchanged, partial, full], *sums)

    def logit_bias(self, query: dict, key: dict) -> jax.Array | None:
        """Return the bias of the logits, (H, N, S) or (B, H, N, S), or None."""
        return None if self.bias is None else self.bias(query["n"], key["s"])

    def learned(self) -> list:
        """Return the arrays of the bias, with None for those of integers, which have no gradient."""
        return [leaf if jnp.issubdtype(leaf.dtype, jnp.inexact) else None for leaf in jax.tree.leaves(self.bias)]

    def learned_gradient(self, query: dict, key: dict, dbias: jax.Array | None) -> list:
        """Return the gradient of `learned` from the gradient of one block of the bias."""
        learned, (leaves, tree) = self.learned(), jax.tree.flatten(self.bias)
        if dbias is None:
            return learned

        def block_of(learned: list) -> jax.Array:
            merged = [leaf if array is None else array for array, leaf in zip(learned, leaves, strict=True)]
            rules = dataclasses.replace(self, bias=jax.tree.unflatten(tree, merged))
            return rules.logit_bias(query, key) + jnp.zeros_like(dbias)

        return jax.vjp(block_of, learned)[1](dbias)[0]

    def gradient(self, dlearned: list) -> "Rules":
        """Return the gradient in the form that custom_vjp requires: a Rules, with None for the mask."""
        return Rules(None, jax.tree.unflatten(jax.tree.structure(self.bias), dlearned), self.cap)


def loop(need_J: jax.Array, step: Callable[[jax.Array, Tree], Tree], carry: Tree, *, every: bool = False) -> Tree:
    """Compute carry = step(j, carry) for the blocks j that are not EMPTY, or for every block.

    Not a `scan`: inside a loop over layers JAX would compute the masks of all blocks, N x S numbers, before it.
    """
    if every:
        return jax.lax.fori_loop(0, need_J.size, step, carry)
    order_J = jnp.argsort(need_J == EMPTY, stable=True)
    return jax.lax.fori_loop(0, (need_J != EMPTY).sum(), lambda i, carry: step(order_J[i], carry), carry)

"""Blocks of tokens, and the mask and the bias for one block of queries and one block of keys.

A block of queries is a dict with the positions `n`. A block of keys has the positions `s` and, if the last block is
padded, `real`, which is False at padding. I and J are the numbers of blocks of queries and of keys; N and S are the
numbers of tokens in one block.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import Partial

from tfm import layout as layouts
from tfm.attention import mask as masks

Tree = Any
EMPTY, PARTIAL, FULL = range(3)  # the mask allows none, some or all weights of a block


def size(length: int, limit: int) -> int:
    """Return the tokens per block if `length` tokens are cut into the fewest blocks of at most `limit` tokens.

    The blocks are equal, except for the padding of the last. The size of several blocks is rounded up to a multiple of
    eight, unless that exceeds `limit`.
    """
    count = -(-length // limit)
    even = -(-length // count)
    rounded = -(-even // 8) * 8
    return rounded if count > 1 and rounded <= limit else even


def cut(x: jax.Array, axis: int, size: int, *, mode: str = "constant") -> jax.Array:
    """Return x cut along `axis` into blocks of `size`, a new first axis. jnp.pad with `mode` fills the last block."""
    axis %= x.ndim
    padding = [(0, -x.shape[axis] % size if i == axis else 0) for i in range(x.ndim)]
    x = jnp.pad(x, padding, mode=mode)
    return jnp.moveaxis(x.reshape(*x.shape[:axis], -1, size, *x.shape[axis + 1 :]), axis, 0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rules:
    """The mask or None, the bias as `masks.as_partial` returns it, and the cap of the logits (explicit.soft_cap)."""

    mask: masks.Mask | None
    bias: Partial | None
    cap: float = dataclasses.field(metadata={"static": True})

    def allowed(self, query: dict, key: dict) -> jax.Array | None:
        """Return whether each query may attend to each key, (N, S) or (B, N, S); None if every query may attend to all.

        query, key: positions "n" and "s" in the text. A key that pads the last block (key["real"]: False) is never
        allowed.
        """
        allowed = None if self.mask is None else self.mask(query["n"], key["s"])
        if "real" not in key:
            return allowed
        real_NS = jnp.broadcast_to(key["real"], (query["n"].shape[-1], key["real"].size))
        return real_NS if allowed is None else allowed & real_NS

    def needs(self, query: dict, key: dict) -> jax.Array:
        """Return need_IJ: EMPTY, PARTIAL or FULL for every block of queries and every block of keys.

        query, key: all blocks, with the first axes I and J. FULL: the mask allows all weights of the pair of blocks.
        """

        def need(query: dict, key: dict) -> jax.Array:
            allowed = self.allowed(query, key)
            if allowed is None:
                return layouts.vary_alike(jnp.int32(FULL), query, key, self)
            count = allowed.sum(-1, dtype=jnp.float32)  # `any` takes twice as long on a CPU
            return jnp.where((count == allowed.shape[-1]).all(), FULL, jnp.where((count > 0).any(), PARTIAL, EMPTY))

        return jax.lax.map(lambda query: jax.lax.map(lambda key: need(query, key), key), query)

    def apply_if_needed(self, need: jax.Array, function: Callable, query: dict, key: dict, *sums: Tree) -> Tree:
        """Return function(self, query, key, allowed, *sums) for one block of queries and keys.

        allowed: the mask of the block, None if need is FULL. If need is EMPTY, return `sums` without a call.
        """

        def apply_partial(*sums: Tree) -> Tree:
            return function(self, query, key, self.allowed(query, key), *sums)

        apply_full = functools.partial(function, self, query, key, None)
        if self.mask is None and "real" not in key:
            return apply_full(*sums)
        return jax.lax.switch(need, [lambda *sums: sums, apply_partial, apply_full], *sums)

    def logit_bias(self, query: dict, key: dict) -> jax.Array | None:
        """Return the bias of the logits at positions query["n"] and key["s"]; None if there is none.

        The shape is (H, N, S) or (B, H, N, S).
        """
        return None if self.bias is None else self.bias(query["n"], key["s"])

    def bias_arrays(self) -> list:
        """Return the arrays of the bias. None replaces an array of integers, which has no gradient."""
        return [leaf if jnp.issubdtype(leaf.dtype, jnp.inexact) else None for leaf in jax.tree.leaves(self.bias)]

    def bias_gradient(self, query: dict, key: dict, dbias: jax.Array | None) -> list:
        """Return the gradient of each array of `bias_arrays` from dbias, the gradient of one block of the bias.

        query["n"], key["s"]: the positions in the block. If no array of the bias has a gradient, dbias is None, and all
        results are None.
        """
        arrays, (leaves, tree) = self.bias_arrays(), jax.tree.flatten(self.bias)
        if dbias is None:
            return arrays

        def compute_block(arrays: list) -> jax.Array:
            merged = [leaf if array is None else array for array, leaf in zip(arrays, leaves, strict=True)]
            rules = dataclasses.replace(self, bias=jax.tree.unflatten(tree, merged))
            return layouts.vary_alike(rules.logit_bias(query, key), dbias)

        return jax.vjp(compute_block, arrays)[1](dbias)[0]

    def pack_gradient(self, darrays: list) -> "Rules":
        """Return the gradient of `bias_arrays` as the Rules that jax.custom_vjp requires, with None for the mask."""
        return Rules(None, jax.tree.unflatten(jax.tree.structure(self.bias), darrays), self.cap)


def loop(need_J: jax.Array, step: Callable[[jax.Array, Tree], Tree], carry: Tree, *, run_all: bool = False) -> Tree:
    """Return carry after carry = step(j, carry) for the blocks j that are not EMPTY, or for all if `run_all`.

    This is not a `lax.scan`: inside a loop over layers JAX would compute all masks, N x S numbers, in advance.
    """
    if run_all:
        return jax.lax.fori_loop(0, need_J.size, step, carry)
    order_J = jnp.argsort(need_J == EMPTY, stable=True)
    return jax.lax.fori_loop(0, (need_J != EMPTY).sum(), lambda i, carry: step(order_J[i], carry), carry)

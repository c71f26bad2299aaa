"""One model on many devices: who holds which heads, hidden units, words, features and tokens, and the explicit sums and
gatherings that put the parts together. All of it happens inside `jax.shard_map`; on one device nothing is done.

| axis     | what each device holds                        | what passes between devices                              |
|----------|-----------------------------------------------|----------------------------------------------------------|
| batch    | some of the sequences                         | sums of losses and counts (gradients follow)             |
| fsdp     | a part of each weight's features D            | a block's weights, gathered when the block needs them    |
| tensor   | some heads and hidden units (E8: sum_h V_h)   | the sum over heads, the sum over hidden units            |
| vocab    | some words of embedding and output            | sums over words (softmax), the rows that were looked up  |
| sequence | some tokens of each sequence                  | keys and values, around a ring (flash.py)                |
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tfm import shapes


class Layout(NamedTuple):
    """The names of the mesh axes; None (or none) where nothing is shared."""

    batch: tuple[str, ...] = ()
    fsdp: str | None = None
    tensor: str | None = None
    vocab: str | None = None
    sequence: str | None = None
    platform: str = ""  # of the devices: cpu, gpu, tpu; '' where the program is for any

    @property
    def rules(self) -> dict[str, tuple[str, ...]]:
        """The mesh axes that may share a letter of a weight (shapes.specs)."""
        rules = {"F": (self.tensor, self.fsdp), "W": (self.vocab,), "D": (self.fsdp,)}
        rules |= dict.fromkeys("HG", (self.tensor,))
        return {letter: tuple(filter(None, axes)) for letter, axes in rules.items() if any(axes)}

    @property
    def tokens(self) -> tuple[str, ...]:
        """The axes over which the tokens of a batch are spread."""
        return self.batch + ((self.sequence,) if self.sequence else ())

    @property
    def whole(self) -> "Layout":
        """The same for sequences that are not shared: every device has all tokens of its sequences."""
        return self._replace(sequence=None)


ONE = Layout()  # one device has it all


def on(layout: Layout, variant: Any, function: str = "apply") -> Callable:
    """The function of a variant (variant.py), with the layout where it takes one."""
    apply = getattr(variant, function)
    return functools.partial(apply, layout=layout) if getattr(variant, "shared", False) else apply


def gathered(params: Any, layout: Layout) -> Any:
    """The weights with all their features D, from the parts of the devices of `fsdp`. The transpose of gathering is to
    sum gradients and scatter them: each device gets the gradient of its part, and only that is then summed over the
    other devices with other tokens."""
    if not layout.fsdp:
        return params
    zero = sum(jax.lax.axis_index(axis) for axis in layout.tokens) * 0  # differs, as far as types say, on all of those

    def gather(leaf: jax.Array, spec: Any) -> jax.Array:
        if layout.fsdp not in spec:
            return leaf
        leaf, i = leaf + zero.astype(leaf.dtype), tuple(spec).index(layout.fsdp)
        if layout.platform == "tpu" and leaf.ndim > 1:  # gradients of vectors are sent together
            return _around(leaf, layout.fsdp, i)
        return jax.lax.all_gather(leaf, layout.fsdp, axis=i, tiled=True)

    with jax.named_scope("gather"):
        return jax.tree.map(gather, params, shapes.specs(params, layout.rules))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _around(part: jax.Array, axis: str, i: int) -> jax.Array:
    """The whole of the parts along axis i of an array. Its gradient is summed and scattered in steps around a ring, one
    half of each part in each direction, since libtpu (0.0.50) computes nothing beside a reduce-scatter of its own."""
    return jax.lax.all_gather(part, axis, axis=i, tiled=True)


def _scattered(axis: str, i: int, _: None, x: jax.Array) -> tuple[jax.Array]:
    """This device's part of the sum. What comes from a neighbour is the sum of what all behind it have of a part, whose
    device is as many steps ahead as are left. Of a line of chips every second one is met on the way there, the others
    on the way back: nothing is computed beside what goes all along the line either."""
    n, size = jax.lax.axis_size(axis), x.shape[i] // jax.lax.axis_size(axis)
    ring, halves = [*range(0, n, 2), *reversed(range(1, n, 2))], []
    here = jnp.array([ring.index(device) for device in range(n)])[jax.lax.axis_index(axis)]
    for turn, first, last in ((1, 0, size // 2), (-1, size // 2, size)):
        ahead = [jnp.array(ring)[(here - turn * step) % n] for step in range(1, n + 1)]
        own = [jax.lax.dynamic_slice_in_dim(x, device * size + first, last - first, i) for device in ahead]
        neighbours = [(device, ring[(place + turn) % n]) for place, device in enumerate(ring)]
        halves.append(functools.reduce(lambda so_far, own: jax.lax.ppermute(so_far, axis, neighbours) + own, own))
    return (jnp.concatenate(halves, i),)


_around.defvjp(lambda part, axis, i: (_around(part, axis, i), None), _scattered)


def positions(layout: Layout, N: int) -> jax.Array | None:
    """Where this device's N tokens stand, where sequences are shared; else None, which means 0 ... N-1. Tokens are
    dealt out like cards: of P devices, device i holds the tokens i, P + i, 2 P + i, ... With a causal mask all then
    have the same work (Brandon et al. 2023, striped attention)."""
    if layout.sequence is None:
        return None
    return jax.lax.axis_index(layout.sequence) + jax.lax.axis_size(layout.sequence) * jnp.arange(N)


def own(x_BN: jax.Array, layout: Layout) -> jax.Array:
    """This device's tokens of whole sequences, (B, N, ...)."""
    if layout.sequence is None:
        return x_BN
    return jnp.take(x_BN, positions(layout, x_BN.shape[1] // jax.lax.axis_size(layout.sequence)), axis=1)

"""Layouts: how the devices of a mesh share one model, and the collectives that depend on it.

All functions run inside `jax.shard_map`. On one device they do nothing.

| field    | what each device holds                        | what passes between devices                              |
|----------|-----------------------------------------------|----------------------------------------------------------|
| batch    | some of the sequences                         | sums of losses and counts, and of gradients              |
| fsdp     | a slice of axis D or F of each weight         | a block's weights, gathered when the block needs them    |
| tensor   | some heads and hidden units (E8: sum_h V_h)   | the sum over heads, the sum over hidden units            |
| vocab    | some rows of embedding and output matrix      | sums over the vocabulary (softmax), embedding rows       |
| sequence | some tokens of each sequence                  | keys and values, around a ring (flash.py)                |
"""

import functools
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tfm import shapes


class Layout(NamedTuple):
    """The mesh axis for each kind of sharing (the table at the top of layout.py); None or (): no such sharing."""

    batch: tuple[str, ...] = ()
    fsdp: str | None = None
    tensor: str | None = None
    vocab: str | None = None
    sequence: str | None = None
    platform: str = ""  # of the devices: cpu, gpu, tpu; '' if the program must run on any
    letters: str = "DF"  # the axes of weights that fsdp shards
    sequences: int = 0  # number of sequences that a device gets in the whole training; 0: unknown

    @property
    def rules(self) -> dict[str, tuple[str, ...]]:
        """Return {letter: the mesh axes that may shard this axis of a weight}, for shapes.specs."""
        rules = {"W": (self.vocab,)} | dict.fromkeys("FHG", (self.tensor,))
        rules |= {letter: (*rules.get(letter, ()), self.fsdp) for letter in self.letters}
        return {letter: tuple(filter(None, axes)) for letter, axes in rules.items() if any(axes)}

    @property
    def tokens(self) -> tuple[str, ...]:
        """The mesh axes over which the tokens of a batch are sharded."""
        return self.batch + ((self.sequence,) if self.sequence else ())

    @property
    def whole(self) -> "Layout":
        """This layout without sequence sharding: every device has all tokens of its sequences."""
        return self._replace(sequence=None)


ONE = Layout()  # one device
PCAST = functools.partial(jax.lax.pcast, to="varying") if hasattr(jax.lax, "pcast") else jax.lax.pvary  # since JAX 0.8
# The mesh axes over which a type varies, inside `jax.shard_map`. JAX 0.11 renamed the attribute.
AXES = operator.attrgetter("vma" if hasattr(jax.typeof(0), "vma") else "manual_axis_type.varying")


def vary_alike(tree: Any, *others: Any, axes: tuple[str, ...] = ()) -> Any:
    """Return the tree with types that vary over every mesh axis over which a leaf of it or of the other trees varies.

    axes: further mesh axes over which the types then vary. The values are unchanged. Loops and branches inside
    `jax.shard_map` need equal types. JAX sums the gradient of a leaf once over the axes that this function added to it.
    """
    all_axes = {*axes}.union(*map(AXES, map(jax.typeof, jax.tree.leaves((tree, others)))))

    def cast(x: jax.Array) -> jax.Array:
        missing = tuple(sorted(all_axes - AXES(jax.typeof(x))))
        return PCAST(x, missing) if missing else x

    return jax.tree.map(cast, tree)


def gather_features(params: Any, layout: Layout) -> Any:
    """Return the weights with all slices of axis D or F, gathered over the mesh axis `fsdp`.

    In the backward pass the gather becomes a reduce-scatter: each device receives the gradient of its slice. JAX then
    sums this gradient over the devices that hold other tokens.
    """
    if not layout.fsdp:
        return params

    def gather(leaf: jax.Array, spec: Any) -> jax.Array:
        if layout.fsdp not in spec:
            return leaf
        leaf = vary_alike(leaf, axes=layout.tokens)
        return jax.lax.all_gather(leaf, layout.fsdp, axis=tuple(spec).index(layout.fsdp), tiled=True)

    with jax.named_scope("gather"):
        return jax.tree.map(gather, params, shapes.specs(params, layout.rules))


def positions(layout: Layout, N: int) -> jax.Array:
    """Return the positions of this device's N tokens of each sequence. layout.sequence must be set.

    Device i of P holds the positions i, P + i, 2 P + i, ..., so that all devices have equal work under a causal mask
    (Brandon et al. 2023, striped attention).
    """
    return jax.lax.axis_index(layout.sequence) + jax.lax.axis_size(layout.sequence) * jnp.arange(N)


def take_own_tokens(x_BN: jax.Array, layout: Layout) -> jax.Array:
    """Return this device's tokens of x, (B, N, ...), which has all tokens. Without layout.sequence these are all."""
    if layout.sequence is None:
        return x_BN
    return jnp.take(x_BN, positions(layout, x_BN.shape[1] // jax.lax.axis_size(layout.sequence)), axis=1)

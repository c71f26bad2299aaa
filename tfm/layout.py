"""Layouts: how the devices of a mesh share one model, and the collectives that combine their parts.

All functions run inside `jax.shard_map`; on one device they do nothing.

| axis     | what each device holds                        | what passes between devices                              |
|----------|-----------------------------------------------|----------------------------------------------------------|
| batch    | some of the sequences                         | sums of losses and counts (gradients follow)             |
| fsdp     | a part of each weight's features D            | a block's weights, gathered when the block needs them    |
| tensor   | some heads and hidden units (E8: sum_h V_h)   | the sum over heads, the sum over hidden units            |
| vocab    | some tokens of embedding and output           | sums over the vocabulary (softmax), embedding rows       |
| sequence | some tokens of each sequence                  | keys and values, around a ring (flash.py)                |
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tfm import shapes


class Layout(NamedTuple):
    """The names of the mesh axes; None (or an empty tuple) if nothing is shared that way."""

    batch: tuple[str, ...] = ()
    fsdp: str | None = None
    tensor: str | None = None
    vocab: str | None = None
    sequence: str | None = None
    platform: str = ""  # of the devices: cpu, gpu, tpu; '' if the program is for any

    @property
    def rules(self) -> dict[str, tuple[str, ...]]:
        """The mesh axes that may shard each letter of a weight (shapes.specs)."""
        rules = {"F": (self.tensor, self.fsdp), "W": (self.vocab,), "D": (self.fsdp,)}
        rules |= dict.fromkeys("HG", (self.tensor,))
        return {letter: tuple(filter(None, axes)) for letter, axes in rules.items() if any(axes)}

    @property
    def tokens(self) -> tuple[str, ...]:
        """The axes over which the tokens of a batch are sharded."""
        return self.batch + ((self.sequence,) if self.sequence else ())

    @property
    def whole(self) -> "Layout":
        """This layout without sequence sharding: every device has all tokens of its sequences."""
        return self._replace(sequence=None)


ONE = Layout()  # one device


def gather_features(params: Any, layout: Layout) -> Any:
    """Return the weights with all their features D, gathered from the devices of `fsdp`.

    The transpose of gathering sums and scatters the gradients: each device receives the gradient of its part, which is
    then summed over the devices with other tokens.
    """
    if not layout.fsdp:
        return params
    zero = sum(jax.lax.axis_index(axis) for axis in layout.tokens) * 0  # its type varies over these axes

    def gather(leaf: jax.Array, spec: Any) -> jax.Array:
        if layout.fsdp not in spec:
            return leaf
        return jax.lax.all_gather(
            leaf + zero.astype(leaf.dtype), layout.fsdp, axis=tuple(spec).index(layout.fsdp), tiled=True
        )

    with jax.named_scope("gather"):
        return jax.tree.map(gather, params, shapes.specs(params, layout.rules))


def positions(layout: Layout, N: int) -> jax.Array | None:
    """Return the positions of this device's N tokens if devices share sequences; else None, which means 0 ... N-1.

    Device i of P holds the tokens i, P + i, 2 P + i, ... With a causal mask all devices then have the same work
    (Brandon et al. 2023, striped attention).
    """
    if layout.sequence is None:
        return None
    return jax.lax.axis_index(layout.sequence) + jax.lax.axis_size(layout.sequence) * jnp.arange(N)


def take_own_tokens(x_BN: jax.Array, layout: Layout) -> jax.Array:
    """Return this device's tokens of whole sequences, (B, N, ...)."""
    if layout.sequence is None:
        return x_BN
    return jnp.take(x_BN, positions(layout, x_BN.shape[1] // jax.lax.axis_size(layout.sequence)), axis=1)

"""A pair (init, apply) of pure functions as a Flax module, nnx or linen. The only file here that imports flax.

`init(key) -> params` returns a tree of named arrays, and `apply(params, *inputs)` is the function: a variant, a block
or a whole model, with its sizes bound by functools.partial. Both modules hold that tree unchanged, so parameters pass
between them, a run's checkpoint and a published model.

Every leaf is a parameter for Flax. The running averages of norm.batch are leaves too: they receive no gradient, and
weight decay must exclude them.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx


def _is_param(node: Any) -> bool:
    """Return whether a node is an nnx.Param."""
    return isinstance(node, nnx.Param)


class NNX(nnx.Module):
    """`NNX(init, apply, rngs=nnx.Rngs(0))`: every leaf of the tree is an nnx.Param, drawn with the stream `params`."""

    def __init__(self, init: Callable[..., Mapping], apply: Callable, *, rngs: nnx.Rngs):
        self.apply = apply
        self.tree = nnx.data(jax.tree.map(nnx.Param, init(rngs.params())))

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        return self.apply(self.params(), *inputs, **options)

    def params(self) -> dict:
        """Return the tree that `apply` takes."""
        return jax.tree.map(lambda param: param[...], self.tree, is_leaf=_is_param)

    def load(self, params: Mapping) -> None:
        """Set these parameters. Raises ValueError, and changes nothing, if names or shapes are not the module's."""
        shapes, new_shapes = jax.tree.map(jnp.shape, self.params()), jax.tree.map(jnp.shape, params)
        if shapes != new_shapes:
            raise ValueError(f"the module has parameters of shapes {shapes}, not {new_shapes}")
        jax.tree.map(lambda param, leaf: param.__setitem__(..., leaf), self.tree, params, is_leaf=_is_param)


class Linen(linen.Module):
    """`Linen(init, apply)`: `module.init(key, *inputs)["params"]` is the tree; `module.apply({"params": tree},
    *inputs)` accepts any tree.
    """

    make: Callable[..., Mapping]  # linen's own methods are called init and apply
    function: Callable

    @linen.compact
    def __call__(self, *inputs: Any, **options: Any) -> Any:
        if self.is_initializing():
            for name, leaves in self.make(self.make_rng("params")).items():
                self.param(name, lambda _, leaves=leaves: leaves)
        return self.function(self.variables.get("params", {}), *inputs, **options)

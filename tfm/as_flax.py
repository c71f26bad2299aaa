"""A pair (init, apply) of pure functions as a module of Flax: nnx's or linen's. The one file here that imports flax.

`init(key) -> params` makes a tree of arrays with names, and `apply(params, *inputs)` is the function: of a variant, a
block or a whole model, its sizes filled in by functools.partial. Both modules hold that very tree, so that parameters
pass between them, a run's checkpoint and a published model unchanged.

Every leaf is a parameter for Flax. The running averages of norm.batch are leaves too: no gradient reaches them, and an
optimiser with weight decay must leave them out.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx


def _is_param(node: Any) -> bool:
    return isinstance(node, nnx.Param)


class NNX(nnx.Module):
    """`NNX(init, apply, rngs=nnx.Rngs(0))`: every leaf of the tree is an nnx.Param, drawn with the stream `params`."""

    def __init__(self, init: Callable[..., Mapping], apply: Callable, *, rngs: nnx.Rngs):
        self.apply = apply
        self.tree = nnx.data(jax.tree.map(nnx.Param, init(rngs.params())))

    def __call__(self, *inputs: Any, **how: Any) -> Any:
        return self.apply(self.params(), *inputs, **how)

    def params(self) -> dict:
        """The tree, as `apply` takes it."""
        return jax.tree.map(lambda param: param[...], self.tree, is_leaf=_is_param)

    def load(self, params: Mapping) -> None:
        """Take these parameters. ValueError where names or shapes are not those of the module, which keeps its own."""
        own, given = (jax.tree.map(jnp.shape, tree) for tree in (self.params(), params))
        if own != given:
            raise ValueError(f"the module has parameters of shapes {own}, which {given} are not")
        jax.tree.map(lambda param, leaf: param.__setitem__(..., leaf), self.tree, params, is_leaf=_is_param)


class Linen(linen.Module):
    """`Linen(init, apply)`: `module.init(key, *inputs)["params"]` is the tree, and `module.apply({"params": tree},
    *inputs)` takes one from anywhere."""

    make: Callable[..., Mapping]  # linen's own methods are called init and apply
    function: Callable

    @linen.compact
    def __call__(self, *inputs: Any, **how: Any) -> Any:
        if self.is_initializing():
            for name, part in self.make(self.make_rng("params")).items():
                self.param(name, lambda _, part=part: part)
        return self.function(self.variables.get("params", {}), *inputs, **how)

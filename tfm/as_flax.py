"""Flax modules, nnx and linen, from a pair (init, apply) of pure functions. The only file of tfm that imports flax.

`init(key) -> params` returns a tree of named arrays, and `apply(params, *inputs)` computes a variant, a block or a
whole model. Bind the sizes of both with functools.partial. Both modules hold that tree unchanged, so it can be copied
between an nnx module, a linen module, a run's checkpoint and a published model.

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
    """nnx module `NNX(init, apply, rngs=nnx.Rngs(0))`: every array that `init` returns becomes an nnx.Param.

    A call of the module returns apply(params, *inputs, **options). `init` receives a key of the random stream `params`.
    """

    def __init__(self, init: Callable[..., Mapping], apply: Callable, *, rngs: nnx.Rngs):
        self.apply = apply
        self.tree = nnx.data(jax.tree.map(nnx.Param, init(rngs.params())))

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        return self.apply(self.params(), *inputs, **options)

    def params(self) -> dict:
        """Return the parameters as a tree of arrays, the first argument of `apply`."""
        return jax.tree.map(lambda param: param[...], self.tree, is_leaf=_is_param)

    def load(self, params: Mapping) -> None:
        """Replace all parameters. Raises ValueError, and replaces none, if names or shapes differ from the module's."""
        shapes, new_shapes = jax.tree.map(jnp.shape, self.params()), jax.tree.map(jnp.shape, params)
        if shapes != new_shapes:
            raise ValueError(
                f"params have the shapes {new_shapes}, but the module has {shapes}. "
                "Pass a tree with the names and shapes of the module"
            )
        jax.tree.map(lambda param, leaf: param.__setitem__(..., leaf), self.tree, params, is_leaf=_is_param)


class Linen(linen.Module):
    """linen module `Linen(init, apply)`.

    `module.init(key, *inputs)["params"]` is the tree of `init`, and `module.apply({"params": tree}, *inputs)` computes
    `apply`.
    """

    make: Callable[..., Mapping]  # `init` under another name: linen.Module has methods called init and apply
    function: Callable

    @linen.compact
    def __call__(self, *inputs: Any, **options: Any) -> Any:
        if self.is_initializing():
            for name, leaves in self.make(self.make_rng("params")).items():
                self.param(name, lambda _, leaves=leaves: leaves)
        return self.function(self.variables.get("params", {}), *inputs, **options)

"""Watches: numbers of a training step that are logged next to its loss (train.watch)."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from experiments.config import by_name, errors
from tfm import shapes

RESERVED = ("gradient_norm", "learning_rate", "alive", "skipped", "step")  # other numbers of a training step
PREFIXES = ("probe/", "train/", "eval/")  # of other numbers in the log


class Watch(NamedTuple):
    """`init(params) -> state` and `update(state, *, gradient, updates, params) -> (state, {name: number})`.

    gradient, updates and params are trees of the same structure: the gradient of the loss, what the optimiser adds to
    the parameters, and the parameters before this step. The state is part of the checkpoints; a skipped step does not
    change it. The numbers are logged as train/NAME.
    """

    init: Callable[[Any], Any]
    update: Callable[..., tuple[Any, dict[str, jax.Array]]]


def sum_squares(tree: Any) -> dict[str, jax.Array]:
    """Return {name: sum of squares of the leaves} for each layer ("block_1", ...) and each other stage ("embed")."""
    total: dict[str, jax.Array] = {}
    for path, leaf in shapes.flat(tree).items():
        nodes, squares = path.split("/"), jnp.square(leaf.astype(jnp.float32))
        if shapes.STACKED in nodes:
            prefix = "/".join([*nodes[: nodes.index(shapes.STACKED)], "block_"])
            sums = {f"{prefix}{m + 1}": x for m, x in enumerate(squares.reshape(len(leaf), -1).sum(-1))}
        else:
            sums = {nodes[0]: squares.sum()}
        total |= {name: total.get(name, 0.0) + x for name, x in sums.items()}
    return total


def _measure_gradients(state: Any, *, gradient: Any, updates: Any, params: Any) -> tuple[Any, dict[str, jax.Array]]:
    """Return the norm of each layer's gradient."""
    return state, {f"gradient_norm/{name}": jnp.sqrt(x) for name, x in sum_squares(gradient).items()}


def _measure_updates(state: Any, *, gradient: Any, updates: Any, params: Any) -> tuple[Any, dict[str, jax.Array]]:
    """Return |update| / |parameters| of each layer; 0 if the parameters are 0."""
    change, size = sum_squares(updates), sum_squares(params)
    ratios = {name: jnp.sqrt(change[name] / jnp.where(size[name] > 0, size[name], jnp.inf)) for name in size}
    return state, {f"update_ratio/{name}": x for name, x in ratios.items()}


def _start(params: Any) -> tuple:
    return ()


WATCHES = {"gradient_norms": Watch(_start, _measure_gradients), "update_ratios": Watch(_start, _measure_updates)}


def choose(names: Sequence[str], params: Any, *, taken: Sequence[str]) -> dict[str, Watch]:
    """Return the watches that train.watch names. params: the shapes of the parameters. taken: other names in the log.

    Raises UserError if no watch has such a name. The same error refuses a watch of the user's that fails, returns
    anything but (state like that of `init`, {name: single number}), or takes a name of another number in the log.
    """
    chosen, used = {name: by_name.choose("watch", name, WATCHES) for name in names}, {*taken, *RESERVED}
    for name, watch in chosen.items():
        label = f"train.watch has {name}"
        with by_name.user_errors(label):
            state = jax.eval_shape(watch.init, params)
            trees = {"gradient": params, "updates": params, "params": params}
            result = jax.eval_shape(lambda state, trees, update=watch.update: update(state, **trees), state, trees)
        new, numbers = result if isinstance(result, tuple) and len(result) == 2 else (None, None)
        named = isinstance(numbers, dict) and all(isinstance(key, str) for key in numbers)
        if not named or any(x.shape for x in jax.tree.leaves(numbers)) or _describe(new) != _describe(state):
            raise errors.UserError(
                f"{label}: {shapes.describe_function(watch.update)} must return (state, {{name: number}}). The state "
                "must have the shapes and types that `init` returns, and each name must be a text"
            )
        if wrong := [key for key in numbers if key in used or key.startswith(PREFIXES)]:
            raise errors.UserError(f"{label}: {wrong[0]} is reserved for another number of the log. Rename yours")
        used |= numbers.keys()
    return chosen


def _describe(tree: Any) -> tuple[Any, list[tuple]]:
    """Return the structure of a tree of abstract arrays, and their shapes and types."""
    return jax.tree.structure(tree), [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree)]

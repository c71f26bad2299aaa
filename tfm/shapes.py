"""Names carry shapes: a parameter's name ends in its dimension letters (`Uq_HKD`), which code can read.

Parameters under a `blocks` node are stacked over layers and have a leading `M`. The letters determine the check of all
shapes (`check`), the sharding (`specs`) and which leaves are matrices for weight decay (`is_matrix`). The same
functions read an optimiser's state, because optax mirrors the parameter tree.
"""

import re
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import PartitionSpec

_SUFFIX = re.compile(r"_([A-Z]+)$")
STACKED = "blocks"  # the node whose leaves are stacked over layers
COPIES = "MHG"  # layers, heads and groups of heads count copies of a matrix; they are not one of its two sides


class ShapeError(ValueError):
    """A parameter whose shape contradicts its name, or two parameters that disagree about a letter."""


def names(path: Any) -> tuple[str, ...]:
    """Return a tree path as a tuple of strings, from a JAX key path or a string such as 'blocks/score/Uq_HKD'."""
    if isinstance(path, str):
        return tuple(path.split("/"))
    return tuple(jax.tree_util.keystr((entry,), simple=True) for entry in path)


def flat(tree: Any) -> dict[str, Any]:
    """Return the leaves of a tree by their paths: {'blocks/score/Uq_HKD': ...}."""
    return {"/".join(names(path)): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def letters(path: Any) -> str:
    """Return the dimension letters of a leaf: letters('blocks/score/Uq_HKD') == 'MHKD'; '' if the name has none."""
    *nodes, name = names(path) or ("",)
    suffix = _SUFFIX.search(name)
    return ("M" if STACKED in nodes else "") + suffix.group(1) if suffix else ""


def size(name: str, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Return the shape of a name: size('Uq_HKD', {'H': 2, 'K': 3, 'D': 5}) == (2, 3, 5)."""
    return tuple(sizes[letter] for letter in letters(name))


def find(params: Mapping[str, Any], stem: str) -> Any:
    """Return the leaf with this name before its letters: find(params, 'gain') is gain_D or gain_E; None if missing."""
    for name, leaf in params.items():
        if _SUFFIX.sub("", name) == stem:
            return leaf
    return None


def check(params: Any) -> dict[str, int]:
    """Return the size of every letter in the tree. Raises ShapeError if a leaf's shape contradicts its name."""
    sizes: dict[str, tuple[int, str]] = {}
    for path, leaf in flat(params).items():
        if len(letters(path)) != len(leaf.shape):
            axes = f"states the axes '{letters(path)}'" if letters(path) else "states no axes, as Uq_HKD does"
            raise ShapeError(f"{path} has shape {leaf.shape}, but its name {axes}")
        for letter, n in zip(letters(path), leaf.shape, strict=True):
            size, source = sizes.setdefault(letter, (n, path))
            if size != n:
                raise ShapeError(f"{letter} is {n} in {path} but {size} in {source}")
    return {letter: n for letter, (n, _) in sizes.items()}


def specs(params: Any, rules: Mapping[str, str | tuple[str, ...]]) -> Any:
    """Return a PartitionSpec for each leaf, from rules such as {'D': 'fsdp', 'H': 'tensor'}.

    A rule may list several mesh axes, ('tensor', 'fsdp'): a dimension gets the first one that the leaf does not use
    yet. A leaf without letters, such as an optimiser's step count, is replicated.
    """

    def spec(path: Any, _: Any) -> PartitionSpec:
        axes: list[str | None] = []
        for letter in letters(path):
            choice = rules.get(letter, ())
            choice = (choice,) if isinstance(choice, str) else choice
            axes.append(next((axis for axis in choice if axis not in axes), None))
        while axes and axes[-1] is None:
            axes.pop()
        return PartitionSpec(*axes)

    return jax.tree_util.tree_map_with_path(spec, params)


def is_matrix(path: Any) -> bool:
    """Return whether a leaf maps between two spaces (weights, embeddings), unlike biases, gains and shifts."""
    return sum(letter not in COPIES for letter in letters(path)) >= 2


def sides(path: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the axes of a matrix that are its outputs, and those that are its inputs; the others count copies.

    The features of all heads are one side, so H or G belongs to it: Uq_HKD maps D to (H, K), Uo_HDK maps (H, K) to D,
    and so does V_HDD. A map of K to K belongs to one head: P_HKK is a matrix in every head.
    """
    axes = letters(path)
    outputs, inputs = (len(axes) - 2,), (len(axes) - 1,)
    heads = tuple(i for i, letter in enumerate(axes) if letter in "HG")
    if heads and not axes[-2] == axes[-1] != "D":
        outputs, inputs = (outputs, heads + inputs) if axes[-2] == "D" else (heads + outputs, inputs)
    return outputs, inputs


def total(params: Any) -> int:
    """Return the number of parameters."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))

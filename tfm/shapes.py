"""Names carry shapes: a parameter's key ends in its dimension letters (`Uq_HKD`), and the letters can be computed with.

Everything under a `blocks` node is stacked over layers and has a leading `M`. From the letters alone follow a check of
all shapes (`check`), the layout over devices (`specs`) and what weight decay calls a matrix (`is_matrix`). The same
functions read an optimiser's state, since optax mirrors the parameter tree.
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
    """A tree path as a tuple of strings, from a JAX key path or a string such as 'blocks/score/Uq_HKD'."""
    if isinstance(path, str):
        return tuple(path.split("/"))
    return tuple(jax.tree_util.keystr((entry,), simple=True) for entry in path)


def flat(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by their paths: {'blocks/score/Uq_HKD': ...}."""
    return {"/".join(names(path)): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def letters(path: Any) -> str:
    """The dimension letters of a leaf: letters('blocks/score/Uq_HKD') == 'MHKD'; '' where the name carries none."""
    *rooms, name = names(path) or ("",)
    suffix = _SUFFIX.search(name)
    return ("M" if STACKED in rooms else "") + suffix.group(1) if suffix else ""


def size(name: str, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape a name asks for: size('Uq_HKD', {'H': 2, 'K': 3, 'D': 5}) == (2, 3, 5)."""
    return tuple(sizes[letter] for letter in letters(name))


def find(params: Mapping[str, Any], stem: str) -> Any:
    """Return the leaf with this name before its letters: find(params, 'gain') is gain_D, or gain_E; None if missing."""
    return next((leaf for name, leaf in params.items() if _SUFFIX.sub("", name) == stem), None)


def check(params: Any) -> dict[str, int]:
    """The size of every letter in the tree. Raises ShapeError naming the leaves where name and shape disagree."""
    sizes: dict[str, tuple[int, str]] = {}
    for where, leaf in flat(params).items():
        if len(letters(where)) != len(leaf.shape):
            asks = f"asks for the axes '{letters(where)}'" if letters(where) else "has no axes, as Uq_HKD has"
            raise ShapeError(f"{where} has shape {leaf.shape}, but its name {asks}")
        for letter, n in zip(letters(where), leaf.shape, strict=True):
            known, source = sizes.setdefault(letter, (n, where))
            if known != n:
                raise ShapeError(f"{letter} is {n} in {where} but {known} in {source}")
    return {letter: n for letter, (n, _) in sizes.items()}


def specs(params: Any, rules: Mapping[str, str | tuple[str, ...]]) -> Any:
    """A PartitionSpec per leaf from rules such as {'D': 'fsdp', 'H': 'tensor'}, or ('tensor', 'fsdp') for a choice. A
    mesh axis shards one dimension of a leaf at most: a dimension gets the first axis of its letter that is still free.
    A leaf without letters, such as an optimiser's step count, is replicated."""

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
    """Whether a leaf maps between two spaces (weights, embeddings), unlike biases, gains and shifts."""
    return sum(letter not in COPIES for letter in letters(path)) >= 2


def sides(path: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Which axes of a matrix are its outputs and which its inputs; the others count copies of it.

    The heads' features side by side are one side, so H or G goes along: Uq_HKD maps D to all (H, K), Uo_HDK adds up
    what it maps from all (H, K) to D, V_HDD likewise: one matrix each in every layer. A map of K to K belongs to one
    head: P_HKK is a matrix in every head.
    """
    of = letters(path)
    outputs, inputs = (len(of) - 2,), (len(of) - 1,)
    heads = tuple(i for i, letter in enumerate(of) if letter in "HG")
    if heads and not of[-2] == of[-1] != "D":
        outputs, inputs = (outputs, heads + inputs) if of[-2] == "D" else (heads + outputs, inputs)
    return outputs, inputs


def total(params: Any) -> int:
    """How many numbers the tree holds."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))

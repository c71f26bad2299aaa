"""Names carry shapes: a parameter's name ends in one letter for each axis (`Uq_HKD`), and these functions read them.

Parameters under a `blocks` node are stacked over layers: they have a leading axis M, which their names omit. From the
letters follow the check of all shapes (`check`), the sharding (`specs`) and which leaves are matrices and have weight
decay (`is_matrix`). The same functions read an optimiser's state, because optax mirrors the parameter tree.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import PartitionSpec

_SUFFIX = re.compile(r"_([A-ZΓ-ΩБ-Я][A-ZΓ-ΩБ-Я1-9]*)$")  # Greek, Cyrillic: axes of a module that is not ours
STACKED = "blocks"  # the node whose leaves are stacked over layers
COPIES = "MHGXΦΨΩ"  # layers, heads, groups of heads, experts; ΦΨΩ: any, of a module that is not ours (`is_matrix`)


class ShapeError(ValueError):
    """A parameter's shape contradicts its name, or two parameters have different sizes for a letter."""


def names(path: Any) -> tuple[str, ...]:
    """Return a path as a tuple of names. path: a JAX key path, or a string such as 'blocks/score/Uq_HKD'."""
    if isinstance(path, str):
        return tuple(path.split("/"))
    return tuple(jax.tree_util.keystr((entry,), simple=True) for entry in path)


def flat(tree: Any) -> dict[str, Any]:
    """Return the leaves of a tree by their paths: {'blocks/score/Uq_HKD': ...}."""
    return {"/".join(names(path)): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def letters(path: Any) -> str:
    """Return the letters of a leaf's axes: letters('blocks/score/Uq_HKD') == 'MHKD'. A digit is an axis of that size.

    A name without letters is a number, in a block one number for each layer: letters('blocks/norm1/alpha') == 'M'.
    """
    *nodes, name = names(path) or ("",)
    suffix = _SUFFIX.search(name)
    return ("M" if STACKED in nodes else "") + (suffix.group(1) if suffix else "")


def shape(name: str, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Return the shape that a name states: shape('Uq_HKD', {'H': 2, 'K': 3, 'D': 5}) == (2, 3, 5)."""
    return tuple(sizes[letter] for letter in letters(name))


def check(params: Any) -> dict[str, int]:
    """Return {letter: size} for all letters in the names of the tree.

    Raises ShapeError if a leaf's shape contradicts its name, or if two leaves have different sizes for a letter.
    """
    sizes: dict[str, tuple[int, str]] = {}
    for path, leaf in flat(params).items():
        if len(letters(path)) != len(leaf.shape):
            has_letters = letters(path).strip("M")
            axes = f"the axes '{letters(path)}'" if has_letters else "no axes"
            message = f"{path} has shape {leaf.shape}, but its name states {axes}."
            raise ShapeError(f"{message} End the name in one letter for each axis, as in Uq_HKD")
        for letter, n in zip(letters(path), leaf.shape, strict=True):
            size, source = sizes.setdefault(letter, (n, path))
            if letter.isdigit() and n != int(letter):
                raise ShapeError(f"{path} has shape {leaf.shape}, but its name states an axis of size {letter}")
            if size != n:
                message = f"{letter} is {n} in {path} but {size} in {source}."
                raise ShapeError(f"{message} Make them equal, or use another letter")
    return {letter: n for letter, (n, _) in sizes.items() if not letter.isdigit()}


def specs(params: Any, rules: Mapping[str, str | tuple[str, ...]]) -> Any:
    """Return the tree with a PartitionSpec in place of each leaf, from rules such as {'D': 'fsdp', 'H': 'tensor'}.

    A rule may list several mesh axes, ('tensor', 'fsdp'): the letter's axis gets the first one that the leaf does not
    use yet. A number, such as an optimiser's step count, is replicated.
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
    """Return whether a leaf's path names a matrix (a weight or an embedding), not a bias, a gain or a shift."""
    return sum(letter not in COPIES and not letter.isdigit() for letter in letters(path)) >= 2


def sides(path: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return (outputs, inputs), the indices of these axes of a matrix; its other axes count copies of the matrix.

    H or G belongs to the side with the features of the heads. Uq_HKD maps D to (H, K), Uo_HDK maps (H, K) to D, and
    V_HDD maps (H, D) to D. In P_HKK, which maps K to K in each head, H counts copies. path: the JAX key path of the
    matrix, or a string such as 'blocks/score/Uq_HKD'.
    """
    axes = letters(path)
    outputs, inputs = (len(axes) - 2,), (len(axes) - 1,)
    heads = tuple(i for i, letter in enumerate(axes) if letter in "HG")
    if heads and not axes[-2] == axes[-1] != "D":
        outputs, inputs = (outputs, heads + inputs) if axes[-2] == "D" else (heads + outputs, inputs)
    return outputs, inputs


def total(params: Any) -> int:
    """Return the total number of elements of all leaves."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def describe_function(function: Callable) -> str:
    """Return the name of a function, its file and its line, also of one inside functools.partial or a wrapper."""
    while inner := getattr(function, "func", getattr(function, "__wrapped__", None)):
        function = inner
    name, code = getattr(function, "__name__", type(function).__name__), getattr(function, "__code__", None)
    return f"{name} ({code.co_filename}, line {code.co_firstlineno})" if code else name

"""Rules that translate the tensors of a published model ("theirs") to our parameters ("ours"), and back.

A `Line` is a rule: it has the name and the axes of their tensor, and our paths. The letters in our names give the rest.
For example "D 3HK" with three paths that end in HKD is a matrix of D rows and 3HK columns. It is reshaped to D, 3, H,
K, transposed to 3, H, K, D, and divided among the three paths. {m} in their name is the number of a layer; our arrays
are stacked over layers.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments.config import errors
from tfm import shapes

Arrays = Mapping[str, np.ndarray]
Sizes = Mapping[str, int]
PARTS = {"P": "YXZ"}  # the pixels of a patch: rows, columns, channels
MOST_FAULTS = 24  # in an error message
QUANTISED = "Quantised models are not read. Use the original model, with weights in float32, float16 or bfloat16."


class Line(NamedTuple):
    """A rule. `axes` has a group of letters for each axis of their tensor: factors of its size, or 1."""

    theirs: str
    axes: str
    ours: tuple[str, ...]


def pair(theirs: str, axes: str, ours: str, bias: str, *, biased: bool = True) -> list[Line]:
    """Return the rules of a weight and of its bias. bias: its name next to our weight. axes: "weight's; bias's"."""
    weight_axes, bias_axes = axes.split("; ")
    weight = Line(f"{theirs}.weight", weight_axes, (ours,))
    return [weight, Line(f"{theirs}.bias", bias_axes, (f"{ours.rpartition('/')[0]}/{bias}",))][: 1 + biased]


def names(theirs: str, layers: int) -> list[str]:
    """Return the names of a rule's tensors: one for each layer if the name has {m}."""
    return [theirs.format(m=m) for m in range(layers)] if "{m}" in theirs else [theirs]


def read(lines: Sequence[Line], tensors: Arrays, sizes: Sizes, label: str) -> dict[str, np.ndarray]:
    """Return our float32 arrays by path.

    label: the beginning of error messages. Raises UserError for tensors that are missing, left over, or of another
    shape.
    """
    expected = {}
    for line in lines:
        leaf = jax.ShapeDtypeStruct(_shape(line, sizes), np.float32)
        expected |= dict.fromkeys(names(line.theirs, sizes["M"]), leaf)
    # float16, bfloat16 (a type that NumPy has from ml_dtypes), float32 and float64 have two bytes or more.
    types = {name: tensors[name].dtype for name in expected if name in tensors}
    small = [f"{name} has the type {x}" for name, x in types.items() if x.kind in "biu" or x.itemsize < 2]
    errors.refuse((small, f"{label}: {join_faults(small, 3)}. {QUANTISED}"))
    complain(label, differences(tensors, expected))
    flat = {}
    for line in lines:
        layers = [_take(line, tensors[name], sizes) for name in names(line.theirs, sizes["M"])]
        for path, arrays in zip(line.ours, zip(*layers, strict=True), strict=True):
            flat[path] = np.stack(arrays) if "{m}" in line.theirs else arrays[0]
    return flat


def write(lines: Iterable[Line], flat: Arrays, sizes: Sizes) -> dict[str, np.ndarray]:
    """Return their tensors by name: the inverse of `read`."""
    arrays = {}
    for line in lines:
        ours = [np.asarray(flat[path], np.float32) for path in line.ours]
        for m, name in enumerate(names(line.theirs, sizes["M"])):
            arrays[name] = _give(line, [array[m] for array in ours] if "{m}" in line.theirs else ours, sizes)
    return arrays


def table(lines: Iterable[Line], unread: Mapping[str, str]) -> str:
    """Return a table of our paths for each of their tensors. unread: tensors that are not read -> reason."""
    rows = {line.theirs.replace("{m}", "*"): ", ".join(line.ours) for line in lines} | dict(unread)
    width = max(map(len, rows))
    return "\n".join(f"{name:<{width}}  {place}" for name, place in rows.items())


def _shape(line: Line, sizes: Sizes) -> tuple[int, ...]:
    return tuple(math.prod(_sizes(axis, sizes)) for axis in line.axes.split())


def _sizes(letters: str, sizes: Sizes) -> list[int]:
    return [int(letter) if letter.isdigit() else sizes[letter] for letter in letters]


def _layout(line: Line, sizes: Sizes) -> tuple[list[int], list[int]]:
    """Return the sizes of the single axes of their tensor, and the order of these axes in ours.

    Axes "D 3HK" and a path that ends in HKD give ([D, 3, H, K], [1, 2, 3, 0]). Axes of size one are left out. A letter
    may occur twice if the order is the same.
    """
    theirs = line.axes.replace(" ", "").replace("1", "")
    letters = shapes.letters(line.ours[0].split("/")[-1])
    ours = "3" * ("3" in theirs) + "".join(x if x in theirs else PARTS.get(x, x) for x in letters)
    order = [*range(len(theirs))] if theirs == ours else [theirs.index(letter) for letter in ours]
    return _sizes(theirs, sizes), order


def _take(line: Line, array: np.ndarray, sizes: Sizes) -> list[np.ndarray]:
    """Return our arrays (float32) for one of their tensors."""
    split, order = _layout(line, sizes)
    array = np.array(array, np.float32).reshape(split).transpose(order)
    parts, ends = array if "3" in line.axes else [array], [shapes.shape(x.split("/")[-1], sizes) for x in line.ours]
    return [np.ascontiguousarray(part).reshape(end) for part, end in zip(parts, ends, strict=True)]


def _give(line: Line, arrays: Sequence[np.ndarray], sizes: Sizes) -> np.ndarray:
    """Return their tensor for our arrays: the inverse of `_take`."""
    split, order = _layout(line, sizes)
    array = np.stack(arrays).reshape([split[i] for i in order]).transpose(np.argsort(order))
    return np.ascontiguousarray(array).reshape(_shape(line, sizes))


def differences(arrays: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    """List how arrays, by name, differ from the expected ones: missing, left over, or of another shape."""
    faults = [f"{name} {leaf.shape} is missing" for name, leaf in expected.items() if name not in arrays]
    faults += [f"{name} {leaf.shape} is left over" for name, leaf in arrays.items() if name not in expected]
    common = sorted(arrays.keys() & expected.keys())
    pairs = [(name, arrays[name].shape, expected[name].shape) for name in common]
    return faults + [f"{name} has shape {a} and not {b}" for name, a, b in pairs if a != b]


def join_faults(faults: Sequence[str], most: int = MOST_FAULTS) -> str:
    """Join the first `most` faults, and the number of further faults."""
    return "; ".join([*faults[:most], *([f"and {len(faults) - most} more"] if len(faults) > most else [])])


def complain(label: str, faults: Sequence[str]) -> None:
    """Raise UserError that lists the faults after the label, if there are any."""
    errors.refuse((faults, f"{label}: {join_faults(faults)}"))

"""One tensor of a published model beside the parameters of ours that hold the same numbers, in both directions.

A `Line` gives their name and axes and our paths; the rest follows from the letters in our names. "D 3HK" beside three
paths ending in HKD is a matrix of D rows and 3HK columns: cut into D, 3, H and K, brought into the order 3, H, K, D,
and dealt out to the three. "+K" are the heads of queries, of keys and of values, H + G + G, one after the other; where
each head has its own keys those three stand side by side in it, "H3K". A layer index stands in their names as {m}; ours
are stacked over layers.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments.engine import errors
from tfm import shapes

Arrays = Mapping[str, np.ndarray]
PARTS = {"P": "YXZ"}  # the pixels of a patch: rows, columns, channels


class Line(NamedTuple):
    """A correspondence. In `axes`, a word is an axis and its letters what it is made of; 1 is an axis of size one."""

    theirs: str
    axes: str
    ours: tuple[str, ...]
    group: str = ""  # lines of one group are all there or none is, of "a/b" only beside "a"; those of "" always are
    unread: str = ""  # the size, by its name in the facts, of what is first in theirs and no part of the model


def pair(
    theirs: str, axes: str, ours: str, bias: str, group: str = "", bias_group: str | None = None
) -> tuple[Line, Line]:
    """The lines of a weight and of the bias beside it, `bias` in our node. axes: those of one; and of the other."""
    weight_axes, bias_axes = axes.split("; ")
    beside = (f"{ours.rpartition('/')[0]}/{bias}",)
    weight = Line(f"{theirs}.weight", weight_axes, (ours,), group)
    return weight, Line(f"{theirs}.bias", bias_axes, beside, group if bias_group is None else bias_group)


class Known(NamedTuple):
    """A tensor of theirs that is no parameter: `holds(array, tensors, facts)` says whether it is what it must be.
    facts: sizes by letter, and fields of `model` by name."""

    theirs: str
    what: str
    holds: Callable[[np.ndarray, Arrays, Mapping[str, Any]], bool]
    unless: str = ""  # in a model with this group of lines it is a parameter


def copy(theirs: str, original: str, unless: str) -> Known:
    """Tied tensors: this one must equal the original."""

    def holds(array: np.ndarray, tensors: Arrays, facts: Mapping[str, Any]) -> bool:
        return np.array_equal(array, tensors[original])

    return Known(theirs, f"a copy of {original}", holds, unless)


def constant(theirs: str, what: str, expected: Callable[[Mapping[str, Any]], np.ndarray]) -> Known:
    """A buffer that must be expected(facts), up to the rounding of 16-bit numbers."""

    def holds(array: np.ndarray, tensors: Arrays, facts: Mapping[str, Any]) -> bool:
        right = expected(facts)
        return array.size == right.size and np.allclose(np.asarray(array, float).reshape(right.shape), right, rtol=1e-2)

    return Known(theirs, what, holds)


def own_keys(line: Line, sizes: Mapping[str, int]) -> Line:
    """The line where every query head has keys and values of its own: H stands there for the G of shared ones."""
    if sizes["G"] < sizes["H"]:
        return line
    return line._replace(
        axes=line.axes.replace("G", "H").replace("+", "H3"), ours=tuple(path.replace("_G", "_H") for path in line.ours)
    )


def _names(theirs: str, layers: int) -> list[str]:
    return [theirs.format(m=m) for m in range(layers)] if "{m}" in theirs else [theirs]


def _axes(line: Line) -> tuple[str, str, list[int]]:
    """Their letters, ours in the same alphabet, and the order that turns the first into the second."""
    theirs = line.axes.replace(" ", "").replace("1", "")
    ours = "".join(
        letter if letter in theirs else PARTS.get(letter, letter)
        for letter in shapes.letters(line.ours[0].split("/")[-1])
    )
    ours = "3" + ours if "3" in theirs else "+" + ours[1:] if "+" in theirs else ours
    return theirs, ours, list(range(len(ours))) if theirs == ours else [theirs.index(letter) for letter in ours]


def _sizes(letters: str, sizes: Mapping[str, int]) -> list[int]:
    sizes = {**sizes, "+": sizes["H"] + 2 * sizes["G"]}
    return [int(letter) if letter.isdigit() else sizes[letter] for letter in letters]


def _shape(line: Line, sizes: Mapping[str, int]) -> tuple[int, ...]:
    first, *others = (math.prod(_sizes(axis, sizes)) for axis in line.axes.split())
    return first + sizes.get(line.unread, 0), *others


def _take(line: Line, array: np.ndarray, sizes: Mapping[str, int]) -> list[np.ndarray]:
    """Our arrays from their one, in float32."""
    theirs, _, order = _axes(line)
    read = np.array(array, np.float32)[sizes.get(line.unread, 0) :]
    array = read.reshape(_sizes(theirs, sizes)).transpose(order)
    parts = array if "3" in theirs else array[None]
    if "+" in theirs:
        parts = np.split(array, [sizes["H"], sizes["H"] + sizes["G"]])
    ends = [shapes.size(path.split("/")[-1], sizes) for path in line.ours]
    return [np.ascontiguousarray(part).reshape(end) for part, end in zip(parts, ends, strict=True)]


def _give(line: Line, arrays: Iterable[np.ndarray], sizes: Mapping[str, int]) -> np.ndarray:
    """Their array from our ones, the inverse of `_take`; zeros for what nobody reads."""
    _, ours, order = _axes(line)
    unread, (first, *others) = sizes.get(line.unread, 0), _shape(line, sizes)
    arrays = [np.asarray(array, np.float32) for array in arrays]
    stacked = (np.concatenate(arrays) if "+" in ours else np.stack(arrays)).reshape(_sizes(ours, sizes))
    read = np.ascontiguousarray(stacked.transpose(np.argsort(order))).reshape(first - unread, *others)
    return np.concatenate([np.zeros((unread, *others), np.float32), read]) if unread else read


def _how(line: Line, sizes: Mapping[str, int]) -> str:
    """In words, what was done to their tensor."""
    _, _, order = _axes(line)
    steps = [f"split in {len(line.ours)}"] if len(line.ours) > 1 else []
    if order != sorted(order):
        steps.append("transposed")
    same = _shape(line, sizes) == shapes.size(line.ours[0].split("/")[-1], sizes)
    return ", ".join(steps) or ("matched" if same else "reshaped")


def read(
    lines: Collection[Line], known: Iterable[Known], tensors: Arrays, facts: Mapping[str, Any], what: str
) -> tuple[dict[str, np.ndarray], str]:
    """Our arrays by path, and for a person the table of what became of each tensor (of every layer's, as *). facts: as
    of Known. UserError, after `what`, for tensors that are missing, of another shape, left over, or not what they must
    be."""
    layers = facts["M"]
    if layers * sum("{m}" in line.theirs for line in lines) > 2 * len(tensors):  # before lists as long as that are made
        complain(what, [f"{layers} layers are asked for, and there are {len(tensors)} tensors"])
    wanted = {}
    for line in lines:
        wanted |= dict.fromkeys(_names(line.theirs, layers), jax.ShapeDtypeStruct(_shape(line, facts), np.float32))
    buffers = {name: one for one in known for name in _names(one.theirs, layers) if name in tensors}
    faults = differences({name: tensors[name] for name in tensors if name in wanted or name not in buffers}, wanted)
    whole = [name for name in wanted if name in tensors and tensors[name].dtype.kind in "iubc"]
    complain(what, faults + [f"{name} holds no real numbers" for name in whole])
    held = {name: one.holds(tensors[name], tensors, facts) for name, one in buffers.items()}
    complain(what, [f"{name} is not {one.what}" for name, one in buffers.items() if not held[name]])
    flat, rows = {}, [("theirs", "ours", "how")]
    for line in lines:
        parts = zip(*(_take(line, tensors[name], facts) for name in _names(line.theirs, layers)), strict=True)
        for path, arrays in zip(line.ours, parts, strict=True):
            flat[path] = np.stack(arrays) if "{m}" in line.theirs else arrays[0]
        rows.append((line.theirs.replace("{m}", "*"), ", ".join(line.ours), _how(line, facts)))
    rows += dict.fromkeys((one.theirs.replace("{m}", "*"), "", one.what) for one in buffers.values())
    width, next_width = (max(len(row[i]) for row in rows) for i in range(2))
    return flat, "\n".join(f"{a:<{width}}  {b:<{next_width}}  {c}".rstrip() for a, b, c in rows)


def write(lines: Iterable[Line], flat: Arrays, *, sizes: Mapping[str, int]) -> dict[str, np.ndarray]:
    """Their tensors by name, from our arrays by path."""
    arrays = {}
    for line in lines:
        ours = [np.asarray(flat[path]) for path in line.ours]
        for m, name in enumerate(_names(line.theirs, sizes["M"])):
            arrays[name] = _give(line, [array[m] for array in ours] if "{m}" in line.theirs else ours, sizes)
    return arrays


def differences(arrays: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    """What keeps arrays, by their names, from being those expected: missing, left over, of another shape."""
    faults = [f"{name} {leaf.shape} is missing" for name, leaf in expected.items() if name not in arrays]
    faults += [f"{name} {leaf.shape} is left over" for name, leaf in arrays.items() if name not in expected]
    both = {name: (arrays[name].shape, expected[name].shape) for name in arrays.keys() & expected.keys()}
    return faults + [f"{name} has shape {a} and not {b}" for name, (a, b) in sorted(both.items()) if a != b]


def listed(faults: list[str], most: int = 24) -> str:
    """The first `most` in one sentence, and how many more there are."""
    return "; ".join(faults[:most] + ([f"and {len(faults) - most} more"] if len(faults) > most else []))


def complain(what: str, faults: list[str]) -> None:
    """UserError with all faults in one sentence, if there are any."""
    if faults:
        raise errors.UserError(f"{what}: {listed(faults)}")

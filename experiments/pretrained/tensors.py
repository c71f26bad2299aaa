"""Translate the tensors of a published model ("theirs") to our parameters ("ours") and back, by a table of names.

A table maps their names to our paths without the letters of axes. {m} is a layer; our arrays are stacked over layers.

    "wte.weight": "embed/E"                       one tensor
    "h.{m}.ln_1.*": "blocks/norm1/gain shift"     two tensors, h.0.ln_1.weight and h.0.ln_1.bias, next to each other
    "h.{m}.c_attn.bias": "blocks/score/bq + blocks/score/bk"     one tensor with the rows of both

The letters of our names give the shape: their matrix has a row for each output and a column for each input
(shapes.sides). For example, score/Uq_HKD is a matrix of HK rows and D columns.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments.config import errors
from tfm import shapes

Arrays = Mapping[str, np.ndarray]
MOST_FAULTS = 24  # in an error message
QUANTISED = "Quantised models are not read. Use the original model, with weights in float32, float16 or bfloat16."


class Line(NamedTuple):
    """A line of a table: the name of a published tensor ({m}: the layer), and the paths of our parameters in it."""

    theirs: str
    ours: tuple[str, ...]
    transposed: bool = False  # their matrix has a row for each input


def select(table: Mapping[str, str], params: Any, *, transposed: bool = False) -> list[Line]:
    """Return the lines of the table whose parameters are all in `params`.

    table: names of published tensors -> our paths. transposed: the published file's matrices of layers have a row for
    each input.
    """
    paths, entries = {path.rpartition("_")[0]: path for path in shapes.flat(params)}, {}
    for theirs, ours in table.items():
        if theirs.endswith("*"):
            weight, bias = ours.split()
            bias = f"{weight.rpartition('/')[0]}/{bias}"
            entries |= {f"{theirs[:-1]}weight": [weight], f"{theirs[:-1]}bias": [bias]}
        else:
            entries[theirs] = ours.split(" + ")
    return [
        Line(theirs, tuple(paths[stem] for stem in ours), transposed and "{m}" in theirs)
        for theirs, ours in entries.items()
        if paths.keys() >= {*ours}
    ]


def names(line: Line, flat: Mapping[str, Any]) -> list[str]:
    """Return the names of the published tensors that `line` describes. flat: our parameters by path.

    This is one name, or one for each layer if line.theirs has {m}.
    """
    layers = flat[line.ours[0]].shape[0] if "{m}" in line.theirs else 1
    return [line.theirs.format(m=m) for m in range(layers)]


def read(lines: Sequence[Line], tensors: Arrays, params: Any, label: str) -> dict[str, np.ndarray]:
    """Return our float32 parameters by path. tensors: a published model's, by name. params: our tree, with the shapes.

    lines: the result of `select`. Raises UserError, which begins with the label, for tensors that are missing, left
    over, quantised, or of another shape.
    """
    ours, expected = shapes.flat(params), {}
    for line in lines:
        rows, *columns = _fold(line.ours[0], ours)[1]
        shape = (len(line.ours) * rows, *columns)
        leaf = jax.ShapeDtypeStruct(shape[::-1] if line.transposed else shape, np.float32)
        expected |= dict.fromkeys(names(line, ours), leaf)
    # float16, bfloat16 (a type that NumPy has from ml_dtypes), float32 and float64 have two bytes or more.
    types = {name: tensors[name].dtype for name in expected if name in tensors}
    small = [f"{name} has the type {x}" for name, x in types.items() if x.kind in "biu" or x.itemsize < 2]
    errors.refuse((small, f"{label}: {join_faults(small, 3)}. {QUANTISED}"))
    complain(label, differences(tensors, expected))
    flat = {}
    for line in lines:
        array = np.stack([np.asarray(tensors[name], np.float32) for name in names(line, ours)])
        array = array.swapaxes(1, -1) if line.transposed else array
        for path, part in zip(line.ours, np.split(array, len(line.ours), axis=1), strict=True):
            order, _ = _fold(path, ours)
            part = part.reshape([ours[path].shape[i] for i in order]).transpose(np.argsort(order))
            flat[path] = np.ascontiguousarray(part)
    return flat


def write(lines: Iterable[Line], params: Any) -> dict[str, np.ndarray]:
    """Return the published model's tensors by name, from our parameters: the inverse of `read`."""
    flat, tensors = shapes.flat(params), {}
    for line in lines:
        parts = []
        for path in line.ours:
            order, sides = _fold(path, flat)
            parts.append(np.asarray(flat[path], np.float32).transpose(order).reshape(-1, *sides))
        array = np.concatenate(parts, axis=1)
        tensors |= zip(names(line, flat), array.swapaxes(1, -1) if line.transposed else array, strict=True)
    return tensors


def _fold(path: str, flat: Mapping[str, Any]) -> tuple[list[int], list[int]]:
    """Return the order of our axes in their tensor (layer, then those of rows, of columns), and its shape.

    The shape is that in one layer: [rows, columns], of a vector [rows]. flat: our parameters by path.
    """
    letters, shape = shapes.letters(path), flat[path].shape
    sides = shapes.sides(path) if shapes.is_matrix(path) else [range(letters[0] == "M", len(letters))]
    axes = [i for side in sides for i in side]
    return [*({0} - {*axes}), *axes], [math.prod(shape[i] for i in side) for side in sides]


def table(lines: Iterable[Line], unread: Mapping[str, str]) -> str:
    """Return a text with a row for each published tensor: its name, and our paths or the reason why it is not read.

    Tensors that differ only in the layer share a row, with * for its number. unread: name -> reason.
    """
    rows = {line.theirs.replace("{m}", "*"): ", ".join(line.ours) for line in lines} | dict(unread)
    width = max(map(len, rows))
    return "\n".join(f"{name:<{width}}  {place}" for name, place in rows.items())


def differences(arrays: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    """Return a phrase for each difference from the expected arrays: missing, left over, or of another shape."""
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

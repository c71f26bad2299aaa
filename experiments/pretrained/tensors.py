"""One tensor of a published model beside the parameters of ours that hold the same numbers, in both directions.

A `Line` gives their name and axes and our paths; the rest follows from the letters in our names. "D 3HK" beside three
paths ending in HKD is a matrix of D rows and 3HK columns: cut into D, 3, H and K, brought into the order 3, H, K, D,
and dealt out to the three. A layer index stands in their names as {m}; ours are stacked over layers.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

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


def pair(theirs: str, axes: str, ours: str, bias: str, group: str = "") -> tuple[Line, Line]:
    """The lines of a weight and of the bias beside it, `bias` in our node. axes: those of one; and of the other."""
    weight_axes, bias_axes = axes.split("; ")
    node = ours.rpartition("/")[0]
    return (
        Line(f"{theirs}.weight", weight_axes, (ours,), group),
        Line(f"{theirs}.bias", bias_axes, (f"{node}/{bias}",), group),
    )


class Known(NamedTuple):
    """A tensor of theirs that is no parameter: `holds(array, tensors, facts)` says whether it is what it must be.

    facts: sizes by letter, and fields of `model` by name.
    """

    theirs: str
    what: str
    holds: Callable[[np.ndarray, Arrays, Mapping[str, Any]], bool]
    unless: str = ""  # in a model with this group of lines it is a parameter


class Row(NamedTuple):
    """What became of one tensor of theirs (of every layer's, where its name has {m})."""

    theirs: str
    ours: str
    how: str


def copy_of(original: str) -> Callable[..., bool]:
    """For tied tensors: `holds` of a Known that must equal the tensor `original`."""
    return lambda array, tensors, facts: original in tensors and np.array_equal(array, tensors[original])


def constant(expected: Callable[[Mapping[str, Any]], np.ndarray]) -> Callable[..., bool]:
    """For buffers: `holds` of a Known that must be expected(facts), up to the rounding of 16-bit numbers."""

    def holds(array: np.ndarray, tensors: Arrays, facts: Mapping[str, Any]) -> bool:
        right = expected(facts)
        return array.size == right.size and np.allclose(np.asarray(array, float).reshape(right.shape), right, rtol=1e-2)

    return holds


def names(theirs: str, layers: int) -> list[str]:
    """Their name, once per layer where it has {m}."""
    return [theirs.format(m=m) for m in range(layers)] if "{m}" in theirs else [theirs]


def _axes(line: Line, path: str) -> tuple[str, str, list[int]]:
    """Their letters, ours in the same alphabet, and the order that turns the first into the second."""
    theirs = line.axes.replace(" ", "").replace("1", "")
    ours = shapes.letters(path).removeprefix("M" if shapes.STACKED in shapes.names(path)[:-1] else "")
    ours = "".join(PARTS.get(letter, letter) for letter in ours)
    ours = "3" + ours if "3" in theirs else ours
    alike = theirs.replace("G", "H")
    return theirs, ours, list(range(len(ours))) if alike == ours else [alike.index(letter) for letter in ours]


def _sizes(letters: str, sizes: Mapping[str, int]) -> list[int]:
    return [int(letter) if letter.isdigit() else sizes[letter] for letter in letters]


def shape(line: Line, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape that their tensor must have."""
    return tuple(math.prod(_sizes(axis, sizes)) for axis in line.axes.split())


def take(line: Line, array: np.ndarray, sizes: Mapping[str, int]) -> list[np.ndarray]:
    """Our arrays from their one, in float32. G heads of keys or values become H: each is repeated H / G times."""
    theirs, ours, order = _axes(line, line.ours[0])
    array = np.array(array, np.float32).reshape(_sizes(theirs, sizes)).transpose(order)
    if "G" in theirs:
        array = np.repeat(array, sizes["H"] // sizes["G"], axis=ours.index("H"))
    parts = array if "3" in theirs else array[None]
    ends = [shapes.size(path.split("/")[-1], sizes) for path in line.ours]
    return [np.ascontiguousarray(part).reshape(end) for part, end in zip(parts, ends, strict=True)]


def give(line: Line, arrays: Iterable[np.ndarray], sizes: Mapping[str, int]) -> np.ndarray:
    """Their array from our ones, the inverse of `take` for G = H."""
    theirs, ours, order = _axes(line, line.ours[0])
    stacked = np.stack([np.asarray(array, np.float32) for array in arrays]).reshape(_sizes(ours, sizes))
    return np.ascontiguousarray(stacked.transpose(np.argsort(order))).reshape(shape(line, sizes))


def how(line: Line, sizes: Mapping[str, int], layers: int) -> str:
    """In words, what was done to their tensor."""
    theirs, ours, order = _axes(line, line.ours[0])
    steps = [f"split in {len(line.ours)}"] if len(line.ours) > 1 else []
    if "G" in theirs and sizes["G"] < sizes["H"]:
        steps.append(f"each of {sizes['G']} heads repeated {sizes['H'] // sizes['G']} times")
    if order != sorted(order):
        steps.append("transposed")
    if "{m}" in line.theirs and layers < sizes["M"]:
        steps.append(f"each of {layers} layers repeated {sizes['M'] // layers} times")
    same = shape(line, sizes) == shapes.size(line.ours[0].split("/")[-1], sizes)
    return ", ".join(steps) or ("matched" if same else "reshaped")


def check(
    lines: Collection[Line], known: Collection[Known], tensors: Arrays, *, sizes: Mapping[str, int], layers: int
) -> list[str]:
    """What is wrong: tensors that are missing, of another shape, or left over."""
    stacked = sum("{m}" in line.theirs for line in lines)
    if layers * stacked > 2 * len(tensors):  # so that no list here is much longer than the file's own
        return [f"{layers} layers are asked for, and there are {len(tensors)} tensors"]
    faults = [_fault(name, tensors, shape(line, sizes)) for line in lines for name in names(line.theirs, layers)]
    wanted = {name for one in (*lines, *known) for name in names(one.theirs, layers)}
    more = [f"{name} {tensors[name].shape} is left over" for name in tensors if name not in wanted]
    return [fault for fault in faults if fault] + more


def _fault(name: str, tensors: Arrays, expected: tuple[int, ...]) -> str:
    if name not in tensors:
        return f"{name} {expected} is missing"
    if tensors[name].shape != expected:
        return f"{name} has shape {tensors[name].shape} and not {expected}"
    return f"{name} holds no real numbers" if tensors[name].dtype.kind in "iubc" else ""


def read(
    lines: Iterable[Line], tensors: Arrays, *, sizes: Mapping[str, int], layers: int
) -> tuple[dict[str, np.ndarray], list[Row]]:
    """Our arrays by path, and the table, from tensors in which `check` finds no fault.

    Where fewer `layers` than M are stored, each is used M / layers times in a row.
    """
    flat, rows = {}, []
    for line in lines:
        parts = [take(line, tensors[name], sizes) for name in names(line.theirs, layers)]
        if "{m}" in line.theirs:
            parts = [part for part in parts for _ in range(sizes["M"] // layers)]
            flat |= {path: np.stack(arrays) for path, arrays in zip(line.ours, zip(*parts, strict=True), strict=True)}
        else:
            flat |= dict(zip(line.ours, parts[0], strict=True))
        rows.append(Row(line.theirs, ", ".join(line.ours), how(line, sizes, layers)))
    return flat, rows


def recognise(
    known: Iterable[Known], tensors: Arrays, *, facts: Mapping[str, Any], layers: int
) -> tuple[list[Row], list[str]]:
    """Of the tensors that are no parameters, those that are there: the table, and which are not what they must be."""
    rows, faults = [], []
    for one in known:
        here = [name for name in names(one.theirs, layers) if name in tensors]
        faults += [f"{name} is not {one.what}" for name in here if not one.holds(tensors[name], tensors, facts)]
        rows += [Row(one.theirs, "", one.what)] if here else []
    return rows, faults


def match(lines: Iterable[Line], flat: Arrays, what: str) -> None:
    """UserError that lists every parameter of ours that the lines ask for and is missing, or that they leave over."""
    wanted = [path for line in lines for path in line.ours]
    faults = [f"{path} is missing" for path in wanted if path not in flat]
    complain(faults + [f"{path} is left over" for path in flat if path not in wanted], what)


def write(lines: Iterable[Line], flat: Arrays, *, sizes: Mapping[str, int]) -> dict[str, np.ndarray]:
    """Their tensors by name, from our arrays by path."""
    arrays = {}
    for line in lines:
        ours = [np.asarray(flat[path]) for path in line.ours]
        for m, name in enumerate(names(line.theirs, sizes["M"])):
            arrays[name] = give(line, [array[m] for array in ours] if "{m}" in line.theirs else ours, sizes)
    return arrays


def complain(faults: Collection[str], what: str, most: int = 24) -> None:
    """UserError with all faults in one sentence (the first `most`, and how many more)."""
    if faults:
        shown = list(faults)[:most] + ([f"and {len(faults) - most} more"] if len(faults) > most else [])
        raise errors.UserError(f"{what}: " + "; ".join(shown))


def text(rows: Iterable[Row]) -> str:
    """The table for a person."""
    cells = [("theirs", "ours", "how"), *((row.theirs.replace("{m}", "*"), row.ours, row.how) for row in rows)]
    widths = [max(len(cell[i]) for cell in cells) for i in range(2)]
    return "\n".join(f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c}".rstrip() for a, b, c in cells)

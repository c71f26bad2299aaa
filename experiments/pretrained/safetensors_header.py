"""The header of a safetensors file, and what must be true of it before a single value is read.

A file (https://github.com/huggingface/safetensors, Format) is a little-endian uint64, the length of the header; the
header, a JSON object: name -> dtype, shape and data_offsets, which count from its own end; then the values of all
arrays, little-endian, in rows, without holes.
"""

import json
import math
import os
import pathlib
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from experiments.engine import errors

DTYPES = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype("u1"),
    "I8": np.dtype("i1"),
    "U16": np.dtype("<u2"),
    "I16": np.dtype("<i2"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "U32": np.dtype("<u4"),
    "I32": np.dtype("<i4"),
    "F32": np.dtype("<f4"),
    "U64": np.dtype("<u8"),
    "I64": np.dtype("<i8"),
    "F64": np.dtype("<f8"),
}
METADATA = "__metadata__"  # the one name that is no tensor's
LARGEST = 2**24  # bytes of a header or an index: some hundreds for each of the most tensors
MOST = 2**16  # tensors of a model; the largest published ones of the families here have some thousands
MOST_AXES = 32  # of an array in NumPy before 2.0
LARGEST_SIZE = 2**63  # of an axis, or of the bytes of an array


class Entry(NamedTuple):
    """One array: its values are the bytes begin .. end-1 of the file."""

    dtype: np.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


class Header(NamedTuple):
    """What a file announces: its arrays by name, and whatever strings its writer added."""

    entries: dict[str, Entry]
    metadata: dict[str, str]


def read(path: pathlib.Path) -> Header:
    """The header, checked by itself and against the size of the file. Raises UserError, and OSError of the system."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        start = 8 + int.from_bytes(file.read(8), "little")
        if start > size:
            raise errors.UserError(
                f"{path} is cut off or no safetensors file: it has {size} bytes, and its header would end at {start}"
            )
        if start > 8 + LARGEST:
            raise errors.UserError(f"{path} announces a header of {start - 8} bytes, and {LARGEST} are allowed")
        saved = json_object(path, file.read(start - 8))
    metadata = saved.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise errors.UserError(f"{path}: the {METADATA} must map names to strings")
    refuse_more(path, len(saved))
    entries = {name: _entry(f"{path}, tensor {shown(name)}", entry, start=start) for name, entry in saved.items()}
    _check_layout(path, entries, start=start, size=size)
    return Header(entries, metadata)


def json_object(path: pathlib.Path, text: bytes) -> dict[str, Any]:
    """The JSON object in a header or an index. UserError where it is none, or where a name stands twice in it."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for name, value in pairs:
            if name in values:
                raise errors.UserError(f"{path}: the name {shown(name)} stands twice in one JSON object")
            values[name] = value
        return values

    try:
        saved = json.loads(text.decode(), object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise errors.UserError(f"{path} is damaged or no safetensors file: where JSON is due, there is none") from error
    if not isinstance(saved, dict):
        raise errors.UserError(f"{path} is damaged or no safetensors file: its JSON is not an object")
    return saved


def refuse_more(path: pathlib.Path, tensors: int) -> None:
    """UserError for more tensors than a model has: each takes its time, also if it is empty."""
    if tensors > MOST:
        raise errors.UserError(f"{path} announces {tensors:,} tensors, and {MOST:,} are allowed")


def shown(value: Any) -> str:
    """For messages: what stands in a damaged file may be long, and need not be printable."""
    text = repr(value)
    return text[:97] + "..." if len(text) > 100 else text


def _entry(where: str, entry: Any, *, start: int) -> Entry:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise errors.UserError(f"{where}: the header must give its dtype, shape and data_offsets, and nothing else")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise errors.UserError(f"{where}: the dtype {shown(dtype)} is unknown: the right ones are {', '.join(DTYPES)}")
    if not _counts(shape) or len(shape) > MOST_AXES:
        raise errors.UserError(f"{where}: the shape must be at most {MOST_AXES} whole numbers, not {shown(shape)}")
    if not _counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise errors.UserError(f"{where}: the data_offsets must be where it begins and ends, not {shown(offsets)}")
    # An axis of size 0 would hide the others, and NumPy multiplies those.
    if math.prod(max(axis, 1) for axis in shape) * DTYPES[dtype].itemsize >= LARGEST_SIZE:
        raise errors.UserError(f"{where}: no array can have the shape {shown(shape)}")
    size, span = math.prod(shape) * DTYPES[dtype].itemsize, offsets[1] - offsets[0]
    if span != size:
        raise errors.UserError(
            f"{where}: {dtype} of shape {shown(shape)} takes {size} bytes, and its data_offsets span {span}"
        )
    return Entry(DTYPES[dtype], tuple(shape), start + offsets[0], start + offsets[1])


def _counts(numbers: Any) -> bool:
    """A list of whole numbers from 0 on? (True and False are none.)"""
    return isinstance(numbers, list) and all(type(n) is int and 0 <= n < LARGEST_SIZE for n in numbers)


def _check_layout(path: pathlib.Path, entries: dict[str, Entry], *, start: int, size: int) -> None:
    """Every byte after the header must belong to exactly one array."""
    reached, before = start, "the header"
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        where = f"{path}, tensor {shown(name)}"
        if entry.end > size:
            raise errors.UserError(
                f"{where}: its values end at byte {entry.end} of {size}: the file is cut off, or its header lies"
            )
        if entry.begin < reached:
            raise errors.UserError(f"{where}: its values overlap those of {before}")
        if entry.begin > reached:
            raise errors.UserError(f"{where}: the {entry.begin - reached} bytes before its values belong to no tensor")
        reached, before = entry.end, shown(name)
    if reached < size:
        raise errors.UserError(f"{path}: the last {size - reached} bytes, after {before}, belong to no tensor")

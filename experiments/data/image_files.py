"""Which files and arrays are the images to train on and those to evaluate, as their names say.

Evaluated is a validation part, where there is one, else the test part, which is else left alone. The files are .npz, or
IDX files as those of the MNIST sets (http://yann.lecun.com/exdb/mnist), gzipped or not: two zero bytes, a type code,
the number of axes, the size of each as a big-endian uint32, then the values, big-endian.
"""

import math
import os
import pathlib
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from experiments.data import parts, plain
from experiments.engine import disk, errors

FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
HELD_OUT = ("valid", "val", "validation", "dev", "test")  # the first that is there is evaluated
ARRAYS = (*(("x_train", "y_train", f"x_{part}", f"y_{part}") for part in HELD_OUT), ("x", "y"))
DTYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}  # of IDX, by type code

Labelled = tuple[np.ndarray, ...]  # images and labels, as they are in the files


class Parts(NamedTuple):
    """What is trained on and what is evaluated, None where it does not come apart; which file or array became what."""

    train: Labelled
    evaluation: Labelled | None
    said: str = ""


def _named(files: Mapping[str, pathlib.Path]) -> Parts:
    """The parts, each an .npz file with x and y. UserError where none is to train on."""
    if parts.TRAIN not in files:
        raise errors.UserError(
            f"there is nothing to train on beside {parts.listed([*files.values()])}: call it train.npz"
        )
    train, evaluation = files[parts.TRAIN], files.get(parts.evaluated(files))
    arrays = [tuple(disk.read_npz(file, [("x", "y")]).values()) for file in (train, evaluation) if file]
    return Parts(*arrays, _said(train, evaluation)) if evaluation else Parts(*arrays, None)


def folder(path: pathlib.Path) -> Parts:
    """The parts in a folder of MNIST's four IDX files, or of .npz files that are called as parts usually are.

    Raises:
      UserError: one of the files is missing or damaged, or two are called as the same part.
    """
    if any(map(_idx_path, [path] * len(FILES), FILES)):
        return idx_folder(path)
    groups: dict[str, list[pathlib.Path]] = {}
    for word, part in parts.WORDS.items():
        if os.path.isfile(file := path / f"{word}.npz"):
            groups.setdefault(part, []).append(file)
    for files in groups.values():
        if len(files) > 1:
            both = " and ".join(file.name for file in files)
            raise errors.UserError(f"{path} has {both}: let one of them have another name")
    return _named({part: files[0] for part, files in groups.items()}) if groups else idx_folder(path)


def idx_folder(path: pathlib.Path) -> Parts:
    """The parts in MNIST's four IDX files, gzipped or not. UserError where one is missing or damaged."""
    paths = [_idx_path(path, file) for file in FILES]
    missing = [file for file, place in zip(FILES, paths, strict=True) if place is None]
    if missing:
        raise errors.UserError(f"the folder {path} lacks {', '.join(missing)} (gzipped or not)")
    arrays = [read_idx(place, axes=axes) for place, axes in zip(paths, (3, 1, 3, 1), strict=True)]
    return Parts(tuple(arrays[:2]), tuple(arrays[2:]), _said(FILES[0], FILES[2]))


def archived(path: pathlib.Path) -> Parts:
    """The parts in an .npz file, whose arrays are called x and y, or x_train, y_train, x_valid, and so on (ARRAYS).

    UserError where they are not.
    """
    content = disk.read_npz(path, ARRAYS)
    arrays = tuple(content.values())
    if len(arrays) == 2:
        return Parts(arrays, None)
    return Parts(arrays[:2], arrays[2:], _said(*list(content)[::2]))


def _idx_path(path: pathlib.Path, file: str) -> pathlib.Path | None:
    return next((one for one in (path / file, path / f"{file}.gz") if os.path.isfile(one)), None)


def _said(train: str | pathlib.Path, evaluation: str | pathlib.Path) -> str:
    return f"by their names, {train} to train on; {evaluation} to evaluate; all else left alone"


def read_idx(path: pathlib.Path, *, axes: int) -> np.ndarray:
    """The array in an IDX file, of the file's type in native byte order.

    Raises:
      UserError: cannot be read, no IDX file, another number of axes, too few or too many bytes, damaged gzip.
    """
    begin = 4 + 4 * axes
    header = plain.read(path, copies=1, text=False, most=begin)[:begin]
    if len(header) < 4 or header[:2] != b"\0\0" or header[2] not in DTYPES:
        raise errors.UserError(f"{path} is not an IDX file: it begins with the bytes {header[:4].hex(' ') or '(none)'}")
    if header[3] != axes:
        raise errors.UserError(f"{path} holds an array of {header[3]} axes where {axes} are expected")
    shape, dtype = tuple(np.frombuffer(header.ljust(begin, b"\0"), ">u4")[1:].tolist()), np.dtype(DTYPES[header[2]])
    expected = math.prod(shape) * dtype.itemsize
    disk.check_memory(f"what {path} announces", 2 * expected)
    # Packing makes nothing longer by more than this; zeros behind the end would be read through to the last.
    longer = path.stat().st_size > expected + expected // 64 + plain.CHUNK
    content = b"" if longer else plain.read(path, copies=2, text=False, most=begin + expected)
    if len(content) != begin + expected or not expected:
        wrong = "too long" if longer or len(content) > begin + expected else "cut off"
        wrong = wrong if expected else "empty"
        raise errors.UserError(f"{path} is {wrong}: it announces values of shape {shape}, and has others")
    return np.frombuffer(content, dtype, offset=begin).reshape(shape).astype(dtype.newbyteorder("="), copy=False)

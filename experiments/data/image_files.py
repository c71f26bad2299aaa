"""Which files and arrays are the images to train on and those to evaluate, as their names say.

Evaluated is a validation part, where there is one, else the test part, which is else left alone.
"""

import os
import pathlib
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from experiments.data import idx, parts
from experiments.engine import disk, errors

FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
HELD_OUT = ("valid", "val", "validation", "dev", "test")  # the first that is there is evaluated
ARRAYS = (*(("x_train", "y_train", f"x_{part}", f"y_{part}") for part in HELD_OUT), ("x", "y"))

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
    found: dict[str, list[pathlib.Path]] = {}
    for word, part in parts.WORDS.items():
        if os.path.isfile(file := path / f"{word}.npz"):
            found.setdefault(part, []).append(file)
    for files in found.values():
        if len(files) > 1:
            both = " and ".join(file.name for file in files)
            raise errors.UserError(f"{path} has {both}: let one of them have another name")
    return _named({part: files[0] for part, files in found.items()}) if found else idx_folder(path)


def idx_folder(path: pathlib.Path) -> Parts:
    """The parts in MNIST's four IDX files, gzipped or not. UserError where one is missing or damaged."""
    paths = [_idx_path(path, file) for file in FILES]
    missing = [file for file, found in zip(FILES, paths, strict=True) if found is None]
    if missing:
        raise errors.UserError(f"the folder {path} lacks {', '.join(missing)} (gzipped or not)")
    arrays = [idx.read(found, axes=axes) for found, axes in zip(paths, (3, 1, 3, 1), strict=True)]
    return Parts(tuple(arrays[:2]), tuple(arrays[2:]), _said(FILES[0], FILES[2]))


def archived(path: pathlib.Path) -> Parts:
    """The parts in an .npz file, whose arrays are called x and y, or x_train, y_train, x_valid, and so on (ARRAYS).

    UserError where they are not.
    """
    found = disk.read_npz(path, ARRAYS)
    arrays = tuple(found.values())
    if len(arrays) == 2:
        return Parts(arrays, None)
    return Parts(arrays[:2], arrays[2:], _said(*list(found)[::2]))


def _idx_path(path: pathlib.Path, file: str) -> pathlib.Path | None:
    return next((one for one in (path / file, path / f"{file}.gz") if os.path.isfile(one)), None)


def _said(train: str | pathlib.Path, evaluation: str | pathlib.Path) -> str:
    return f"by their names, {train} to train on; {evaluation} to evaluate; all else left alone"

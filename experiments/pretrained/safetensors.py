"""Read and write arrays in safetensors files. They hold only numbers, unlike pickles, which can execute code."""

import os
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from experiments.config import disk, errors
from experiments.folder import records
from experiments.pretrained import tensors

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"  # the names of the files in the folder of a model
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")  # endings of PyTorch's files of pickles
CONVERT = (
    "is not read, since opening such a file can run any program that it hides. If you trust it, convert it with "
    "transformers, by the class with the head (AutoModelForCausalLM, ...).from_pretrained(...).save_pretrained(DIR) "
    "and AutoTokenizer.from_pretrained(...).save_pretrained(DIR), and give DIR."
)
NOT_READ = (safetensors.SafetensorError, TypeError, OverflowError)  # errors of the library for a damaged file


def read(path: str | os.PathLike) -> dict[str, np.ndarray]:
    """Return all arrays by name, of a safetensors file, or of all files that an index (.index.json) names.

    path: the file, the index, or a folder with model.safetensors or with an index (see `file_of`).
    Raises UserError if a file is missing, damaged or outside the folder of the index, or lacks a tensor of the index.
    """
    path = file_of(path)
    if not path.name.endswith(".index.json"):
        return _read_file(path)
    files = records.read_object(path, {"!weight_map": records.TEXTS})["weight_map"]  # tensor -> file
    names = sorted({*files.values()})
    outside = [name for name in names if pathlib.PurePath(name).name != name]
    errors.refuse((outside, f"{path} names files that are not in the folder of {path.name}: {outside[:3]}"))
    arrays: dict[str, np.ndarray] = {}
    for name in names:
        arrays |= _read_file(file_of(path.parent / name))
    missing = sorted(files.keys() - arrays.keys())
    errors.refuse((missing, f"{path}: tensors are not in the files that it names for them: {missing[:3]}"))
    return arrays


def _read_file(path: pathlib.Path) -> dict[str, np.ndarray]:
    with disk.reading(path, *NOT_READ):
        try:
            return safetensors.numpy.load_file(path)
        except AttributeError as error:  # a type that NumPy lacks, such as F8_E4M3
            raise ValueError(f"a tensor has the type {error.name}. {tensors.QUANTISED}") from error


def write(path: str | os.PathLike, arrays: Mapping[str, Any]) -> None:
    """Write the arrays into a safetensors file, atomically. An array may be anything that `np.asarray` accepts.

    Raises UserError if the file cannot be written.
    """
    rows = {name: np.ascontiguousarray(array).reshape(np.shape(array)) for name, array in arrays.items()}
    content = safetensors.numpy.save(rows, {"format": "pt"})  # transformers requires this metadata
    with disk.writing(path := pathlib.Path(path)):
        disk.write(path, content)


def file_of(path: str | os.PathLike) -> pathlib.Path:
    """Return the file that a path means: this file, or in a folder model.safetensors or the index of several files.

    Raises UserError if there is none, or only pickles.
    """
    path = pathlib.Path(path)
    candidates = [path / FILE, path / INDEX] if path.is_dir() else [path]
    file = next((file for file in candidates if file.is_file()), None)
    # Pickles next to model.safetensors (the state of an optimiser, ...) do not matter.
    siblings = sorted(path.glob("pytorch_model*")) or [*path.iterdir()] if path.is_dir() else [path]
    pickles = [file for file in siblings if file.suffix in PICKLES]
    if pickles and file in (None, path):
        raise errors.UserError(f"{pickles[0]} {CONVERT}")
    empty = f"{path} holds neither a run nor a published model (config.json with {FILE})"
    errors.refuse((file is None, empty if path.is_dir() else f"{path} is missing or not a file"))
    return file

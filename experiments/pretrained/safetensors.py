"""Arrays in safetensors files: plain numbers, of which nothing can be executed. Files of pickles are refused."""

import os
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from experiments.engine import disk, errors

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"  # the names in a folder of one model
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")  # what PyTorch's files of pickles are called
# What a damaged file makes the library raise; AttributeError for a dtype that NumPy does not have, such as F8_E4M3.
NOT_WHOLE = (safetensors.SafetensorError, AttributeError, KeyError, MemoryError, OverflowError, TypeError, ValueError)


def read(path: str | os.PathLike) -> dict[str, np.ndarray]:
    """All arrays by name, of the file that `file_of` finds, or of all files that an index names. UserError: as there; a
    file that does not hold together; an index that leads out of its folder, or is not true."""
    path = file_of(path)
    return _read_indexed(path) if path.name.endswith(".index.json") else _read_file(path)


def write(path: str | os.PathLike, arrays: Mapping[str, Any]) -> None:
    """Write the arrays, whatever `np.asarray` takes; the file is whole, or it stays what it was. UserError: an array of
    a dtype that the format does not know; the file cannot be written."""
    path = pathlib.Path(path)
    rows = {name: np.ascontiguousarray(array).reshape(np.shape(array)) for name, array in arrays.items()}
    try:
        content = safetensors.numpy.save(rows, {"format": "pt"})  # transformers opens no others
    except safetensors.SafetensorError as error:
        raise errors.UserError(f"{path} cannot be written as a safetensors file: {error}") from error
    with disk.writing(path), disk.draft(path) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())  # or the new name could reach the disk before the values


def refusal(path: str | os.PathLike) -> errors.UserError:
    """The error for a file of pickles: opening one can run any program, so it has to be converted."""
    return errors.UserError(
        f"{path} is not read, since opening such a file can run any program that it hides: if you trust it, convert it "
        "with transformers by the class with the head (AutoModelForCausalLM, AutoModelForMaskedLM or "
        "AutoModelForImageClassification).from_pretrained(...).save_pretrained(DIR), its words by "
        "AutoTokenizer.from_pretrained(...).save_pretrained(DIR), and give DIR"
    )


def file_of(path: str | os.PathLike) -> pathlib.Path:
    """The file that a path means: this file; of a folder model.safetensors, or the index of several files. UserError:
    there is none; a file of pickles, with the way out, also where there are only such files in a folder."""
    path = pathlib.Path(path)
    try:
        folder = path.is_dir()
        files = [file for file in ([path / FILE, path / INDEX] if folder else [path]) if file.is_file()]
        # what else is pickled in a folder (the state of an optimiser, ...) is not what is meant
        others = [path] if not folder else [] if files else path.iterdir()
        pickles = [file for file in others if file.suffix in PICKLES]
    except OSError as error:
        raise errors.UserError(f"{path} cannot be read: {error.strerror or error}") from error
    if pickles:
        raise refusal(min(pickles, key=lambda file: (not file.name.startswith("pytorch_model"), file.name)))
    if not files:
        neither = f"holds neither a run nor a published model (config.json with {FILE}, or a llama2c .bin)"
        raise errors.UserError(f"{path} {neither if folder else 'is not there, or not a file'}")
    return files[0]


def _read_file(path: pathlib.Path) -> dict[str, np.ndarray]:
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  it is no dict
    except OSError as error:
        raise errors.UserError(f"{path} cannot be read: {error.strerror or error}") from error
    except NOT_WHOLE as error:
        raise errors.UserError(f"{path} is damaged or no safetensors file: {_shown(error)}") from error


def _read_indexed(path: pathlib.Path) -> dict[str, np.ndarray]:
    """The arrays of all files that an index names, also those it does not mention itself."""
    files = disk.read_json(path, says="which file holds which tensor").get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise errors.UserError(f"{path} needs a weight_map, from the names of tensors to those of files")
    arrays: dict[str, np.ndarray] = {}
    for file in sorted(set(files.values())):
        names = {pathlib.PurePosixPath(file).name, pathlib.PureWindowsPath(file).name}
        if names != {file} or file in ("", ".."):
            wrong = "and an index may only name files of its own folder"
            raise errors.UserError(f"{path} names the file {_shown(file)}, {wrong}")
        more = _read_file(file_of(path.parent / file))  # a link is followed: caches of downloads consist of links
        if twice := sorted(more.keys() & arrays.keys()):
            where = f"{path.parent / file}, tensor {_shown(twice[0])}"
            raise errors.UserError(f"{where}: another file of the same index has it too")
        arrays |= more
        if missing := sorted(name for name in files if files[name] == file and name not in more):
            raise errors.UserError(f"{path}, tensor {_shown(missing[0])}: it should be in {file}, and is not")
    return arrays


def _shown(value: Any) -> str:
    """For messages: what stands in a damaged file may be long, and need not be printable."""
    text = str(value) if isinstance(value, Exception) else repr(value)
    return text[:197] + "..." if len(text) > 200 else text

"""Arrays in safetensors files: plain numbers, of which nothing can be executed. Files of pickles are refused."""

import contextlib
import json
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from experiments.engine import disk, errors
from experiments.pretrained import safetensors_header

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"  # the names in a folder of one model
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")  # what PyTorch's files of pickles are called


def read(path: str | os.PathLike) -> dict[str, np.ndarray]:
    """All arrays by name, memory-mapped: read-only, and taken from the disk when they are used.

    `path` is a file; or a folder with model.safetensors, or with model.safetensors.index.json and the files it names;
    or this index itself.

    Raises:
      UserError: no such file; a file of pickles; a file whose header does not hold together; an index that leads out of
        its folder, or is not true.
    """
    path = _file(pathlib.Path(path))
    return _read_indexed(path) if path.name.endswith(".index.json") else _read_file(path)


def read_header(path: str | os.PathLike) -> safetensors_header.Header:
    """What one file announces: dtypes and shapes of its arrays, without their values. Raises UserError as `read`."""
    path = _file(pathlib.Path(path))
    with _doing(path, "read"):
        return safetensors_header.read(path)


def write(path: str | os.PathLike, arrays: Mapping[str, Any], metadata: Mapping[str, str] | None = None) -> None:
    """Write the arrays, whatever `np.asarray` takes; the file is whole, or it stays what it was.

    The transformers library opens a file only if its metadata are {"format": "pt"}.

    Raises:
      UserError: an array of a dtype that the format does not know; the file cannot be written.
    """
    path = pathlib.Path(path)
    arrays = {name: np.asarray(array) for name, array in arrays.items()}
    if safetensors_header.METADATA in arrays:
        raise ValueError(f"{safetensors_header.METADATA} is no name for a tensor")
    names = sorted(arrays, key=lambda name: (-arrays[name].dtype.itemsize, name))  # so that all values are aligned
    header: dict[str, Any] = {safetensors_header.METADATA: dict(metadata)} if metadata else {}
    end = 0
    for name in names:
        begin, end = end, end + arrays[name].nbytes
        dtype = _dtype_name(path, name, arrays[name].dtype)
        header[name] = {"dtype": dtype, "shape": list(arrays[name].shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with _doing(path, "written"), disk.draft(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            file.write(arrays[name].astype(arrays[name].dtype.newbyteorder("<"), copy=False).tobytes())
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


def refuse_pickles(path: str | os.PathLike) -> None:
    """UserError, with the way out, for a file of pickles, and for a folder that has such files and no safetensors."""
    path = pathlib.Path(path)
    with _doing(path, "read"):
        if not path.is_dir():
            found = [path] if path.suffix in PICKLES else []
        elif any((path / name).is_file() for name in (FILE, INDEX)):
            found = []
        else:  # what else is pickled there (the state of an optimiser, ...) is not what is meant
            files = (file for file in path.iterdir() if file.suffix in PICKLES)
            found = sorted(files, key=lambda file: (not file.name.startswith("pytorch_model"), file.name))
    if found:
        raise refusal(found[0])


@contextlib.contextmanager
def _doing(path: pathlib.Path, what: str) -> Iterator[None]:
    """What the system refuses meanwhile is the user's to mend."""
    try:
        yield
    except OSError as error:
        raise errors.UserError(f"{path} cannot be {what}: {error.strerror or error}") from error


def _file(path: pathlib.Path) -> pathlib.Path:
    """The file that a path given by the user means."""
    with _doing(path, "read"):
        refuse_pickles(path)
        if path.is_dir():
            return _in_folder(path)
        if not path.is_file():
            raise errors.UserError(f"{path} is not there, or not a file")
        return path


def _in_folder(folder: pathlib.Path) -> pathlib.Path:
    found = next((folder / name for name in (FILE, INDEX) if (folder / name).is_file()), None)
    if found:
        return found
    raise errors.UserError(f"the folder {folder} has neither {FILE} nor {INDEX}")


def _read_file(path: pathlib.Path) -> dict[str, np.ndarray]:
    with _doing(path, "read"):
        entries = safetensors_header.read(path).entries
        content = np.memmap(path, np.uint8, mode="r")
    return {name: _array(path, name, entry, content) for name, entry in entries.items()}


def _array(path: pathlib.Path, name: str, entry: safetensors_header.Entry, content: np.ndarray) -> np.ndarray:
    values = np.asarray(content[entry.begin : entry.end])
    if entry.dtype == np.bool_ and values.size and values.max() > 1:
        where = f"{path}, tensor {safetensors_header.shown(name)}"
        raise errors.UserError(f"{where}: a BOOL must be 0 or 1, and one is {values.max()}")
    array = values.view(entry.dtype).reshape(entry.shape)
    return array if array.flags.aligned else array.copy()  # the format asks no writer to align


def _read_indexed(path: pathlib.Path) -> dict[str, np.ndarray]:
    """The arrays of all files that an index names, also those it does not mention itself."""
    with _doing(path, "read"):
        if path.stat().st_size > safetensors_header.LARGEST:
            raise errors.UserError(f"{path} is too large: {safetensors_header.LARGEST} bytes are allowed for an index")
        files = safetensors_header.json_object(path, path.read_bytes()).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise errors.UserError(f"{path} needs a weight_map, from the names of tensors to those of files")
    safetensors_header.refuse_more(path, len(files))
    arrays: dict[str, np.ndarray] = {}
    for file, names in sorted(_grouped(files).items()):
        found = _read_file(_beside(path, file))
        twice = sorted(found.keys() & arrays.keys())
        if twice:
            where = f"{path.parent / file}, tensor {safetensors_header.shown(twice[0])}"
            raise errors.UserError(f"{where}: another file of the same index has it too")
        missing = sorted(name for name in names if name not in found)
        if missing:
            where = f"{path}, tensor {safetensors_header.shown(missing[0])}"
            raise errors.UserError(f"{where}: it should be in {file}, and is not")
        arrays |= found
        safetensors_header.refuse_more(path, len(arrays))
    return arrays


def _grouped(files: Mapping[str, str]) -> dict[str, list[str]]:
    """The names of files, and the names that lead to each."""
    found: dict[str, list[str]] = {}
    for name, file in files.items():
        found.setdefault(file, []).append(name)
    return found


def _beside(path: pathlib.Path, file: str) -> pathlib.Path:
    """The file of that name in the folder of the index. (A link is followed: caches of downloads consist of links.)"""
    names = {pathlib.PurePosixPath(file).name, pathlib.PureWindowsPath(file).name}
    if names != {file} or file in ("", ".."):
        shown = safetensors_header.shown(file)
        raise errors.UserError(f"{path} names the file {shown}, and an index may only name files of its own folder")
    return _file(path.parent / file)


def _dtype_name(path: pathlib.Path, name: str, dtype: np.dtype) -> str:
    for known, candidate in safetensors_header.DTYPES.items():
        if dtype.newbyteorder("<") == candidate:
            return known
    where = f"{path}, tensor {safetensors_header.shown(name)}"
    known = ", ".join(safetensors_header.DTYPES)
    raise errors.UserError(f"{where}: a safetensors file cannot hold {dtype}: it knows {known}")

"""Arrays from .npz files, without pickle, and never more of them than fits."""

import contextlib
import math
import pathlib
import tokenize
import zipfile
import zlib
from collections.abc import Iterator, Sequence

import numpy as np

from experiments.engine import disk, errors, memory

LARGEST = 2**34  # bytes unpacked; a small file can claim to unpack into far more than any memory holds
_DAMAGED = (zipfile.BadZipFile, zlib.error, ValueError, EOFError, RuntimeError, MemoryError)
_DAMAGED += (TypeError, OverflowError, SyntaxError, tokenize.TokenError)  # of a header, which numpy reads as Python


def read(path: pathlib.Path, choices: Sequence[tuple[str, ...]]) -> dict[str, np.ndarray]:
    """The arrays, by name, of the first choice of names that the file has completely.

    Raises:
      UserError: no such choice; not an .npz file, or a damaged one; arrays of objects; too large when unpacked.
    """
    with _opened(path, LARGEST) as file:
        names = next((names for names in choices if set(names) <= set(file.files)), None)
        if names is None:
            wanted = " or ".join("(" + ", ".join(names) + ")" for names in choices)
            raise errors.UserError(f"{path} needs the arrays {wanted}, and has {', '.join(file.files) or 'none'}")
        return _arrays(path, names, file)


def read_all(path: pathlib.Path) -> dict[str, np.ndarray]:
    """All arrays of the file, by name, as far as the memory has room. UserError as `read`."""
    with _opened(path, None) as file:
        return _arrays(path, file.files, file)


@contextlib.contextmanager
def _opened(path: pathlib.Path, largest: int | None) -> Iterator[np.lib.npyio.NpzFile]:
    """The file, of no more bytes than that when unpacked; within this, what is wrong with it is a UserError."""
    try:
        with disk.opened(path) as content, zipfile.ZipFile(content) as members:
            size = sum(member.file_size for member in members.infolist())
        if largest is not None and size > largest:
            raise errors.UserError(f"{path} would unpack into {size} bytes, and {largest} are allowed")
        memory.check(f"what {path} holds unpacked", size)
        with disk.opened(path) as content, np.load(content, allow_pickle=False) as file:
            yield file
    except _DAMAGED as error:
        raise errors.UserError(f"{path} is damaged or not an .npz file of numbers: {error}") from error
    except OSError as error:
        raise errors.UserError(f"{path} cannot be read: {error.strerror or error}") from error


def _arrays(path: pathlib.Path, names: Sequence[str], file: np.lib.npyio.NpzFile) -> dict[str, np.ndarray]:
    for name in names:
        _check_header(path, name, file.zip)
    return {name: np.asarray(file[name]) for name in names}


def _check_header(path: pathlib.Path, name: str, members: zipfile.ZipFile) -> None:
    """UserError for an array whose header announces more or less than there is: numpy makes room for all of it first,
    and compares the checksum only where it has read to the end."""
    if f"{name}.npy" not in members.namelist():  # one that numpy does not take for an array: it gives its bytes
        return
    with members.open(f"{name}.npy") as file:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(file)
        size = members.getinfo(f"{name}.npy").file_size - file.tell()
    if not dtype.hasobject and math.prod(shape) * dtype.itemsize != size:
        raise errors.UserError(f"{path} is damaged: {name} announces an array of shape {shape}, and has {size} bytes")

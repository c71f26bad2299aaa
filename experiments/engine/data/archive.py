"""Arrays from .npz files, without pickle, and never more of them than fits."""

import math
import pathlib
import zipfile
import zlib
from collections.abc import Sequence

import numpy as np

from experiments.engine import errors, room

LARGEST = 2**34  # bytes unpacked; a small file can claim to unpack into far more than any memory holds


def read(path: pathlib.Path, choices: Sequence[tuple[str, ...]]) -> list[np.ndarray]:
    """The arrays of the first choice of names that the file has completely.

    Raises:
      UserError: no such choice; not an .npz file, or a damaged one; arrays of objects; too large when unpacked.
    """
    try:
        with zipfile.ZipFile(path) as members:
            size = sum(member.file_size for member in members.infolist())
        if size > LARGEST:
            raise errors.UserError(f"{path} would unpack into {size} bytes, and {LARGEST} are allowed")
        room.check(f"what {path} holds unpacked", size)
        with np.load(path, allow_pickle=False) as file:
            names = next((names for names in choices if set(names) <= set(file.files)), None)
            if names is None:
                wanted = " or ".join("(" + ", ".join(names) + ")" for names in choices)
                raise errors.UserError(f"{path} needs the arrays {wanted}, and has {', '.join(file.files) or 'none'}")
            for name in names:
                _check_header(path, name, file.zip)
            return [np.asarray(file[name]) for name in names]
    except (zipfile.BadZipFile, zlib.error, ValueError, EOFError, RuntimeError, MemoryError) as error:
        raise errors.UserError(f"{path} is damaged or not an .npz file of numbers: {error}") from error
    except OSError as error:
        raise errors.UserError(f"{path} cannot be read: {error.strerror or error}") from error


def _check_header(path: pathlib.Path, name: str, members: zipfile.ZipFile) -> None:
    """UserError for an array whose header announces more than there is: numpy makes room for all of it first."""
    if f"{name}.npy" not in members.namelist():  # one that numpy does not take for an array: it gives its bytes
        return
    with members.open(f"{name}.npy") as file:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(file)
        size = members.getinfo(f"{name}.npy").file_size
    if not dtype.hasobject and math.prod(shape) * dtype.itemsize > size:
        raise errors.UserError(f"{path} is damaged: {name} announces an array of shape {shape}, and has {size} bytes")

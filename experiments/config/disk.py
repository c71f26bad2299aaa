"""File I/O with one-sentence errors and atomic writes, and checks that data fit into memory."""

import contextlib
import csv
import errno
import io
import json
import os
import pathlib
import re
import secrets
import shutil
import stat
import struct
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, BinaryIO

import numpy as np
import psutil

from experiments.config import errors

DRAFT = ".tfm-draft"  # suffix of a file that is being written; a killed process leaves such a file
LONGEST_NAME = 255 - len(f".{secrets.token_hex(4)}{DRAFT}")  # bytes of the name of a file that has a draft
GROUP = pathlib.Path("/sys/fs/cgroup/memory.max")  # the memory limit of a container or batch job (cgroup v2)
MOST_BYTES = 2**28  # of a file that is read whole; a tokenizer.json has up to 2**25
OTHER_CACHE = ". Free disk space, or set $XDG_CACHE_HOME to another folder"
_NO_FLUSH = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)  # errors of fsync on a mounted drive without flush
# What the standard library and numpy raise for a file that is missing, damaged, or of another format.
UNREADABLE = (OSError, ValueError, LookupError, EOFError, MemoryError, RecursionError)
UNREADABLE += (csv.Error, struct.error, zipfile.BadZipFile, zlib.error)


@contextlib.contextmanager
def reading(path: str | os.PathLike, *kinds: type[Exception]) -> Iterator[None]:
    """Context manager: raise UserError "path: reason" if the block cannot read the file.

    kinds: exception types of the library that reads the file, in addition to UNREADABLE.
    """
    try:
        yield
    except (*UNREADABLE, *kinds) as error:
        missing = "missing " if isinstance(error, KeyError) else ""
        raise errors.UserError(f"{path}: {missing}{reason(error)}") from error


@contextlib.contextmanager
def writing(path: pathlib.Path, remedy: str = "") -> Iterator[None]:
    """Context manager: raise UserError if the block cannot write the file or folder. remedy: the end of the message."""
    try:
        yield
    except OSError as error:
        raise errors.UserError(f"{path} cannot be written: {reason(error)}{remedy}") from error


def reason(error: BaseException) -> str:
    """Return the operating system's reason for an error, or the first line of its message.

    tensorstore reports the system's error number only inside its message.
    """
    if code := re.search(r"os_error_code='(\d+)'", str(error)):
        return os.strerror(int(code[1]))
    first = str(error).strip().partition("\n")[0][:200]
    return getattr(error, "strerror", None) or first or type(error).__name__


def cache_folder() -> pathlib.Path:
    """Return the folder for downloads and compiled programs: $XDG_CACHE_HOME/tfm, or ~/.cache/tfm."""
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "tfm"


def open_handle(path: str | os.PathLike, flags: int) -> int:
    """Open a file and return its handle. Raises OSError for a pipe or a device, which may never end."""
    handle = os.open(path, flags | os.O_NONBLOCK, 0o644)
    mode = os.fstat(handle).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        os.close(handle)
        raise OSError(errno.ENXIO, "it is a pipe or a device, not a file", str(path))
    return handle


def open_regular(path: str | os.PathLike) -> BinaryIO:
    """Open a file of the user's to read bytes: all are opened by this function. Raises OSError, also for a pipe."""
    return open(path, "rb", opener=open_handle)


def read_bytes(path: str | os.PathLike) -> bytes:
    """Return the content of a file. Raises OSError, and ValueError for more than MOST_BYTES bytes."""
    with open_regular(path) as file:
        if (n := os.fstat(file.fileno()).st_size) > MOST_BYTES:
            raise ValueError(f"it has {size(n)}, more than the {size(MOST_BYTES)} that such a file may have")
        return file.read(n)


def read_npz(path: pathlib.Path, choices: Sequence[tuple[str, ...]] = ()) -> dict[str, np.ndarray]:
    """Return the arrays of an .npz file by name.

    choices: groups of names; the first group that the file has completely is read. Without choices, all arrays are
    read. Raises UserError if no group is complete, if the file is missing or damaged, or if its arrays do not fit into
    memory.
    """
    with reading(path), open_regular(path) as content:
        with zipfile.ZipFile(content) as members:
            check_memory(f"{path}, unpacked,", sum(member.file_size for member in members.infolist()))
        content.seek(0)
        with np.load(content, allow_pickle=False) as file:
            names = next((names for names in choices or [file.files] if set(names) <= set(file.files)), None)
            needed = " or ".join("(" + ", ".join(names) + ")" for names in choices)
            complaint = f"{path} has the arrays {', '.join(file.files) or '()'}. It needs {needed}"
            errors.refuse((names is None, complaint))
            return {name: np.asarray(file[name]) for name in names}


@contextlib.contextmanager
def draft(file: pathlib.Path) -> Iterator[BinaryIO]:
    """Context manager: yield a temporary file, which replaces `file` if the block succeeds. Raises OSError."""
    path = file.with_name(f"{file.name}.{secrets.token_hex(4)}{DRAFT}")
    try:
        with path.open("xb") as new:
            yield new
        os.replace(path, file)
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


def write(file: pathlib.Path, content: bytes) -> None:
    """Write the file atomically. Raises OSError."""
    with draft(file) as new:
        new.write(content)


def finite(value: Any) -> Any:
    """Return the value after a round trip through JSON, with None for NaN and infinity, which JSON does not have."""
    return json.loads(json.dumps(value), parse_constant=lambda _: None)


def as_json(value: Any) -> bytes:
    """Return the value as indented JSON, with null for numbers that are not finite."""
    return (json.dumps(finite(value), indent=2, allow_nan=False) + "\n").encode()


def write_json(file: pathlib.Path, value: Any) -> None:
    """Write the value as JSON, atomically. Raises OSError."""
    write(file, as_json(value))


def check_new(path: pathlib.Path, remedy: str, *, is_file: bool = False) -> pathlib.Path:
    """Return the path of a new file or folder. Raises UserError if it exists, has too long a name, or is in a file.

    A folder may exist if it is empty. Permissions are not checked. remedy: the flag to change, for the message.
    """
    above = next(parent for parent in path.absolute().parents if os.path.lexists(parent))
    if os.path.lexists(path) and (is_file or not path.is_dir() or any(path.iterdir())):
        raise errors.UserError(f"{path} exists already. Choose another {remedy}")
    with writing(path, f". Choose another {remedy}"):
        if any(len(os.fsencode(name)) > LONGEST_NAME for name in path.parts):
            raise OSError(errno.ENAMETOOLONG, f"a name in it has more than {LONGEST_NAME} bytes")
        if not above.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, f"{above} is not a folder")
    return path


def escape_cell(cell: Any) -> Any:
    """Return a cell for a CSV file. A text that a spreadsheet would execute as a formula begins with an apostrophe."""
    if isinstance(cell, str) and cell.startswith(("=", "+", "-", "@", "\t", "\r")):
        try:
            float(cell)
        except ValueError:
            return f"'{cell}"
    return cell


def as_csv(rows: Iterable[Sequence[Any]]) -> bytes:
    """Return the rows as CSV. A text that a spreadsheet would execute as a formula gets an apostrophe before it."""
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows([*map(escape_cell, row)] for row in rows)
    return text.getvalue().encode(errors="backslashreplace")


def write_new(file: pathlib.Path, content: bytes) -> None:
    """Write or replace the file atomically, and create its folder if it is missing. Raises UserError if this fails."""
    with writing(file):
        write(folder(file.parent) / file.name, content)


def folder(parent: pathlib.Path, *names: str) -> pathlib.Path:
    """Return the folder parent/names[0]/names[1]/..., and create it if it is missing. Raises OSError."""
    path = parent.joinpath(*names)
    path.mkdir(parents=True, exist_ok=True)
    return path


def flush(path: pathlib.Path) -> None:
    """Wait until this file, or this folder's list of names, is on the disk (fsync). Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in _NO_FLUSH:
            raise
    finally:
        os.close(handle)


def tidy(folder: pathlib.Path) -> None:
    """Delete the drafts that killed processes left in this folder. No other process may write into the folder."""
    for path in folder.glob("*" + DRAFT):
        if path.is_file():
            path.unlink()


def remove(path: pathlib.Path) -> None:
    """Delete a file, or a folder with all that is in it, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def host_memory() -> int:
    """Return the available bytes of the host's memory, at most the cgroup's limit."""
    limits = [psutil.virtual_memory().available]
    with contextlib.suppress(OSError, ValueError):  # no such file, or no limit ("max")
        limits.append(int(GROUP.read_text()))
    return min(limits)


def check_memory(label: str, needed: float, available: float | None = None, remedy: str = "") -> None:
    """Raise UserError if `needed` bytes are more than the `available` ones (None: `host_memory`).

    label, remedy: the beginning and the end of the message.
    """
    available = host_memory() if available is None else available
    amounts = f"{size(needed)} of memory, but only {size(available)} are available"
    errors.refuse((needed > available, f"{label} needs {amounts}{remedy}"))


def size(n: float) -> str:
    """Return 12345678 as '11.8 MiB'."""
    units = ["bytes", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while n >= 1024 and len(units) > 1:
        n /= 1024
        units.pop(0)
    return f"{n:.3g} {units[0]}" if round(n) < 1000 else f"{n:,.0f} {units[0]}"

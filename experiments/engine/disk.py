"""Files that somebody else may have written, on disks that may fail: read as far as memory goes, written whole or not;
nothing is waited for, and nothing is written through a link."""

import asyncio
import contextlib
import csv
import errno
import json
import logging
import math
import os
import pathlib
import re
import secrets
import shutil
import stat
import struct
import sys
import tokenize
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

import numpy as np

from experiments.engine import errors

DRAFT = ".tfm-draft"  # ends the name of a file that is being written, which a killed process leaves behind
LINK = "it is a link, and a run writes into its own folder only"
LARGEST_TEXT = 2**23  # bytes of a JSON file; names of 20,000 classes are 2**21
MEMINFO = pathlib.Path("/proc/meminfo")  # Linux
GROUP = pathlib.Path("/sys/fs/cgroup/memory.max")  # what a container or a batch system allows
NOT_WRITTEN = (OSError, ValueError, RuntimeError)  # what Orbax, tensorstore and the system raise for a disk
# What a mounted drive (Colab's, NFS) says while it, or the way to it, is gone; it may be there again in a moment.
GONE = (errno.ENOTCONN, errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ECONNABORTED, errno.ENODEV, errno.EHOSTDOWN)
REMEDY = "mount that drive again (on Colab: drive.mount('/content/drive', force_remount=True))"
OTHER_CACHE = "; make room, or let $XDG_CACHE_HOME name another folder"
_NO_FLUSH = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)  # what a mounted drive that cannot do it says
_DAMAGED = (zipfile.BadZipFile, zlib.error, ValueError, EOFError, RuntimeError, MemoryError)
_DAMAGED += (TypeError, OverflowError, SyntaxError, tokenize.TokenError)  # of a header, which numpy reads as Python


# What the standard library and numpy raise for a file that is missing, damaged, or of another format.
UNREADABLE = (OSError, ValueError, LookupError, EOFError, MemoryError, RecursionError)
UNREADABLE += (csv.Error, struct.error, zipfile.BadZipFile, zlib.error)


@contextlib.contextmanager
def reading(path: str | os.PathLike, *kinds: type[Exception]) -> Iterator[None]:
    """Raise UserError "path: reason" if the block cannot read the file.

    kinds: exceptions of the library that reads it, in addition to UNREADABLE.
    """
    try:
        yield
    except (*UNREADABLE, *kinds) as error:
        name = type(error).__name__
        reason = getattr(error, "strerror", None) or str(error).strip().partition("\n")[0] or name
        missing = "missing " if isinstance(error, KeyError) else ""
        raise errors.UserError(f"{path}: {missing}{reason}") from error


def cache_folder() -> pathlib.Path:
    """Where downloads and compiled programs are kept: $XDG_CACHE_HOME/tfm, or ~/.cache/tfm."""
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "tfm"


def opened(file: str | os.PathLike) -> BinaryIO:
    """The file, open for reading. OSError where it is none: a pipe would be waited for, without end."""

    def opener(file: str, flags: int) -> int:
        handle = os.open(file, flags | os.O_NONBLOCK)
        mode = os.fstat(handle).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # `open` refuses a folder itself
            os.close(handle)
            raise OSError(errno.ENXIO, "it is neither a file nor a folder", file)
        return handle

    return open(file, "rb", opener=opener)


def read(file: str | os.PathLike, largest: int) -> bytes:
    """The content of a file that is small if it is what it seems to be. OSError as `opened`; ValueError if not."""
    with opened(file) as content:
        n = os.fstat(content.fileno()).st_size
        if n > largest:
            raise ValueError(f"it has {n:,} bytes, and {largest:,} are allowed")
        return content.read()


def read_text(file: pathlib.Path) -> str:
    """The content of a small file. OSError of the system; ValueError where it is too large, or not UTF-8."""
    return read(file, LARGEST_TEXT).decode()


def read_json(file: pathlib.Path, *, says: str) -> dict[str, Any]:
    """The object in the file. UserError where it is not there (`says`: what it would tell), not JSON, or no object."""
    try:
        content = json.loads(read_text(file))
    except FileNotFoundError:
        raise errors.UserError(f"there is no {file}, which says {says}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise errors.UserError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise errors.UserError(f"{file} must hold an object")
    return content


@contextlib.contextmanager
def draft(file: pathlib.Path) -> Iterator[BinaryIO]:
    """Within this, a new file beside this one, which takes its place, be that a link, if all goes well. Else OSError,
    which names `file`: of a disk that takes no more, or of what is in the way."""
    path = file.with_name(f"{file.name}.{secrets.token_hex(4)}{DRAFT}")
    try:
        with path.open("xb") as new:
            yield new
        os.replace(path, file)
    except OSError as error:
        if error.errno is None or error.filename not in (None, str(path)):  # of something else than this file
            raise
        raise OSError(error.errno, error.strerror, str(file)) from error
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


def write(file: pathlib.Path, content: bytes) -> None:
    """The file with this content, never half-written. Raises OSError as `draft`."""
    with draft(file) as new:
        new.write(content)


def finite(value: Any) -> Any:
    """Return the value as JSON gives it back, with None for numbers that JSON does not have (NaN, infinity)."""
    return json.loads(json.dumps(value), parse_constant=lambda _: None)


def as_json(value: Any) -> bytes:
    return (json.dumps(finite(value), indent=2, allow_nan=False) + "\n").encode()


def write_json(file: pathlib.Path, value: Any) -> None:
    """The value as JSON, never half-written."""
    write(file, as_json(value))


def new_file(folder: pathlib.Path, name: str) -> pathlib.Path:
    """The path of a file that `write_new` is to write into the folder; nothing is made yet. UserError where there is
    such a file already, or the folder cannot be written."""
    file = folder / name
    above = next(one for one in (folder, *folder.absolute().parents) if one.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        fault = "may not be written" if above.is_dir() else "is a file"
        raise errors.UserError(f"the workdir {folder} cannot be written: {above} {fault}")
    if file.exists():
        raise errors.UserError(f"{file} is there already: choose another --workdir")
    return file


@contextlib.contextmanager
def writing(place: pathlib.Path, remedy: str = "") -> Iterator[None]:
    """Within this, what keeps the file or folder from being written is a UserError."""
    try:
        yield
    except OSError as error:
        raise errors.UserError(f"{place} cannot be written: {reason(error)}{remedy}") from error


def check_new(folder: pathlib.Path, remedy: str) -> None:
    """UserError for anything but an empty folder, or none."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise errors.UserError(f"{folder} is there already: choose another {remedy}")


def write_new(file: pathlib.Path, content: bytes) -> None:
    """The file with this content, in a folder that is made where it is not there. UserError where it cannot be."""
    with writing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        write(file, content)


def flush(path: pathlib.Path) -> None:
    """Return when the disk has this file, or this folder's list of names."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in _NO_FLUSH:
            raise
    finally:
        os.close(handle)


def tidy(folder: pathlib.Path) -> None:
    """Remove what processes that were killed have left of the files that they were writing in this folder."""
    for left in folder.glob("*" + DRAFT):
        if left.is_file():
            left.unlink()


def remove(entry: pathlib.Path) -> None:
    """Delete what has this path, be that nothing: a folder with all in it; of a link not what it leads to."""
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry)
    else:  # a pipe, which `rmtree` would wait for
        entry.unlink(missing_ok=True)


def folder(above: pathlib.Path, *names: str) -> pathlib.Path:
    """The folder of the last name, in that of the one before it, and so on; each is made where it is not there. OSError
    where one is something else, or a link: what is written there would not be the run's own."""
    for name in names:
        above = above / name
        with contextlib.suppress(FileExistsError):
            above.mkdir()
        if above.is_symlink():
            raise OSError(errno.ELOOP, LINK, str(above))
        if not above.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(above))
    return above


def number(error: BaseException) -> int | None:
    """The system's number of the error, also where tensorstore tells it."""
    code = re.search(r"os_error_code='(\d+)'", str(error))
    return int(code[1]) if code else getattr(error, "errno", None)


def reason(error: BaseException) -> str:
    """Why, in the words of the system where it has any, with a remedy where a mounted drive is gone."""
    code = number(error)
    words = getattr(error, "strerror", None) or (os.strerror(code) if code else str(error))
    words = (words.splitlines() or [type(error).__name__])[0][:200]
    return f"{words}: {REMEDY}" if code == errno.ENOTCONN else words


def gone(error: BaseException | None) -> bool:
    """Return True if this error, or its cause, says that a mounted drive is gone."""
    return error is not None and (number(error) in GONE or gone(error.__cause__ or error.__context__))


def quiet() -> None:
    """Leave Orbax's and tensorstore's tracebacks out: what went wrong is raised, and told in a sentence.

    Of what could not be raised these are: that the loop is closed which awaited many writes until the first failed, and
    that a file of a drive which is gone cannot be closed.
    """
    logging.getLogger("absl").addFilter(_not_orbax)
    usual = sys.unraisablehook

    def unless_late(event: Any) -> None:
        caller = event.exc_traceback and event.exc_traceback.tb_frame.f_code
        if caller is not asyncio.BaseEventLoop.call_soon_threadsafe.__code__ and not gone(event.exc_value):
            usual(event)

    if getattr(usual, "__name__", "") != unless_late.__name__:  # not there yet
        sys.unraisablehook = unless_late


def _not_orbax(record: logging.LogRecord) -> bool:
    return not (record.exc_info and "orbax" in pathlib.Path(record.pathname).parts)


def read_npz(path: pathlib.Path, choices: Sequence[tuple[str, ...]] = ()) -> dict[str, np.ndarray]:
    """The arrays, by name, of the first choice of names that the .npz file has completely; without one: all of them.

    UserError: no such choice; not an .npz file, or a damaged one; arrays of objects; too large when unpacked.
    """
    try:
        with opened(path) as content, zipfile.ZipFile(content) as members:
            n = sum(member.file_size for member in members.infolist())
        check_memory(f"what {path} holds unpacked", n)
        with opened(path) as content, np.load(content, allow_pickle=False) as file:
            names = next((names for names in choices or [file.files] if set(names) <= set(file.files)), None)
            if names is None:
                right = " or ".join("(" + ", ".join(names) + ")" for names in choices)
                raise errors.UserError(f"{path} needs the arrays {right}, and has {', '.join(file.files) or 'none'}")
            for name in names:
                _check_header(path, name, file.zip)
            return {name: np.asarray(file[name]) for name in names}
    except _DAMAGED as error:
        raise errors.UserError(f"{path} is damaged or not an .npz file of numbers: {error}") from error
    except OSError as error:
        raise errors.UserError(f"{path} cannot be read: {error.strerror or error}") from error


def _check_header(path: pathlib.Path, name: str, members: zipfile.ZipFile) -> None:
    """UserError for an array whose header announces more or less than there is: numpy makes room for all of it first,
    and compares the checksum only where it has read to the end."""
    if f"{name}.npy" not in members.namelist():  # one that numpy does not take for an array: it gives its bytes
        return
    with members.open(f"{name}.npy") as file:
        version = np.lib.format.read_magic(file)
        header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = header(file)
        n = members.getinfo(f"{name}.npy").file_size - file.tell()
    if not dtype.hasobject and math.prod(shape) * dtype.itemsize != n:
        raise errors.UserError(f"{path} is damaged: {name} announces an array of shape {shape}, and has {n} bytes")


def host_memory() -> int:
    """Bytes of the host's memory that can still be taken; more than any machine has where nothing tells it."""
    left = [sys.maxsize]
    with contextlib.suppress(OSError, ValueError):  # no such file, or no limit ("max")
        left.append(int(GROUP.read_text()))
    try:
        fields = dict(line.split(":", 1) for line in MEMINFO.read_text().splitlines() if ":" in line)
        left.append(int(fields["MemAvailable"].split()[0]) * 1024)
    except (OSError, ValueError, LookupError):
        with contextlib.suppress(AttributeError, OSError, ValueError):
            left.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return min(left)


def check_memory(what: str, needed: float, there: float | None = None, remedy: str = "") -> None:
    """UserError where `what` needs more bytes than there are; without `there`: than the host has left."""
    there = host_memory() if there is None else there
    if needed > there:
        raise errors.UserError(f"{what} needs {size(needed)} of memory, and there are {size(there)}{remedy}")


def size(n: float) -> str:
    """12345678 as '11.8 MiB'."""
    units = ["bytes", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while n >= 1024 and len(units) > 1:
        n /= 1024
        units.pop(0)
    return f"{n:.3g} {units[0]}" if round(n) < 1000 else f"{n:,.0f} {units[0]}"

"""Files in folders that somebody else may have filled: nothing is waited for, and nothing is written through a link."""

import contextlib
import errno
import os
import pathlib
import secrets
import shutil
import stat
from collections.abc import Iterator
from typing import BinaryIO

DRAFT = ".tfm-draft"  # ends the name of a file that is being written, which a killed process leaves behind
LINK = "it is a link, and a run writes into its own folder only"


def opened(file: str | os.PathLike) -> BinaryIO:
    """The file, open for reading. OSError where it is none: a pipe would be waited for, without end."""
    return open(file, "rb", opener=_regular)


def _regular(file: str, flags: int) -> int:
    found = os.open(file, flags | os.O_NONBLOCK)
    mode = os.fstat(found).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # `open` refuses a folder itself
        os.close(found)
        raise OSError(errno.ENXIO, "it is neither a file nor a folder", file)
    return found


def read(file: str | os.PathLike, largest: int) -> bytes:
    """The content of a file that is small if it is what it seems to be. OSError as `opened`; ValueError if not."""
    with opened(file) as content:
        size = os.fstat(content.fileno()).st_size
        if size > largest:
            raise ValueError(f"it has {size:,} bytes, and {largest:,} are allowed")
        return content.read()


@contextlib.contextmanager
def draft(file: pathlib.Path) -> Iterator[BinaryIO]:
    """Within this, a new file beside this one, which takes its place, be that a link, if all goes well.

    Raises the OSError of a disk that takes no more, and of what is no file and is in the way; it names `file`.
    """
    path = file.with_name(f"{file.name}.{secrets.token_hex(4)}{DRAFT}")
    try:
        with path.open("xb") as written:
            yield written
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
    with draft(file) as written:
        written.write(content)


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
    """The folder of the last name, in that of the one before it, and so on; each is made where it is not there.

    OSError where one is something else, or a link: what is written there would not be the run's own.
    """
    for name in names:
        above = above / name
        with contextlib.suppress(FileExistsError):
            above.mkdir()
        if above.is_symlink():
            raise OSError(errno.ELOOP, LINK, str(above))
        if not above.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(above))
    return above

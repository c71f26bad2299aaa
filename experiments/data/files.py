"""Files of text, in folders and zips, gzipped or not. What is no text is refused: its bytes would be learned from."""

import contextlib
import functools
import gzip
import io
import math
import os
import pathlib
import stat
import zipfile
import zlib
from collections.abc import Callable, Iterator
from typing import BinaryIO, NamedTuple

from experiments.engine import disk, errors

CHUNK = 2**20  # bytes read at a time: a file of nothing but zeros is never read to its end
GZIP = b"\x1f\x8b"
TAR_AT, TAR = 257, b"ustar"
# What a file is that begins with these bytes, and what to do. Most others that are no text hold a NUL.
KINDS = {
    b"\x89PNG": ("a PNG image", ""),
    b"\xff\xd8\xff": ("a JPEG image", ""),
    b"GIF87a": ("a GIF image", ""),
    b"GIF89a": ("a GIF image", ""),
    b"PAR1\x15": ("a Parquet table", ": write its text into .txt files"),
    b"ARROW1": ("an Arrow table", ": write its text into .txt files"),
    b"%PDF-": ("a PDF document", ": write its text into .txt files"),
    b"\x93NUMPY": ("a NumPy array", ""),
    b"\x89HDF": ("an HDF5 file", ""),
    **{bytes([0x80, protocol]): ("a pickle", "") for protocol in range(2, 6)},
    b"PK\3\4": ("a zip archive (.npz, .docx, .xlsx are such, too)", ": unpack it"),
    b"BZh91AY&SY": ("packed with bzip2", ": unpack it"),
    b"\xfd7zXZ": ("packed with xz", ": unpack it"),
    b"\x28\xb5\x2f\xfd": ("packed with zstd", ": unpack it"),
    GZIP: ("packed with gzip twice", ": unpack it"),
    b"\xff\xfe\0\0": ("text in UTF-32", ": convert it to UTF-8"),
    b"\0\0\xfe\xff": ("text in UTF-32", ": convert it to UTF-8"),
    b"\xff\xfe": ("text in UTF-16", ": convert it to UTF-8"),
    b"\xfe\xff": ("text in UTF-16", ": convert it to UTF-8"),
}


class File(NamedTuple):
    """A file on the disk or in a zip; shown by its path inside the folder or zip, which one alone has not."""

    inside: pathlib.PurePath
    name: str  # in messages
    size: int  # bytes, unpacked from a zip; 0 for what is no regular file
    open: Callable[[], BinaryIO]
    beside: "File | None" = None  # the file whose lines are the translations of this one's

    def __str__(self) -> str:
        return (str(self.inside) if self.inside.parts else self.name) + (f" -> {self.beside}" if self.beside else "")


def on_disk(path: pathlib.Path, inside: str | pathlib.PurePath = "") -> File:
    """The file at the path. UserError where it cannot be looked at."""
    with _refusing(path):
        status = path.stat()
    size = status.st_size if stat.S_ISREG(status.st_mode) else 0
    return File(pathlib.PurePath(inside), str(path), size, functools.partial(disk.opened, path))


def folder(path: pathlib.Path, hidden: tuple[str, ...]) -> list[File]:
    """The files in a folder and in those in it, sorted; no links to folders, no names that begin with one of `hidden`.

    UserError for what cannot be read.
    """

    def refuse(error: OSError) -> None:
        raise errors.UserError(f"the folder {error.filename} cannot be read: {error.strerror}") from error

    paths = []
    for parent, folders, names in os.walk(path, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(hidden)]
        paths += [pathlib.Path(parent, name) for name in names if not name.startswith(hidden)]
    return [on_disk(file, file.relative_to(path)) for file in sorted(paths)]


def members(path: pathlib.Path, zips: contextlib.ExitStack, hidden: tuple[str, ...]) -> list[File]:
    """The members of a zip, as `folder`; nothing is unpacked to the disk. zips: where it stays open.

    UserError for a damaged zip, and for a member whose path leads out of it.
    """
    with _refusing(path):
        file = zips.enter_context(zipfile.ZipFile(path))
    found = []
    for member in file.infolist():
        steps = member.filename.replace("\\", "/").split("/")  # ZipFile has cut it at a NUL
        if not steps[0] or ".." in steps or ":" in steps[0]:
            wrong = f"{path} has a member that leads out of it, {member.filename!r}"
            raise errors.UserError(f"{wrong}: make a zip without such a path")
        if not member.is_dir() and not any(step.startswith(hidden) for step in steps):
            inside, name = pathlib.PurePosixPath(member.filename), f"{path}:{member.filename}"
            found.append(File(inside, name, member.file_size, functools.partial(file.open, member)))
    return found


def fault(chunk: bytes, at: int = 0) -> str:
    """What shows that these bytes, from `at` on in their file, are no text in UTF-8 or a relative; '' for nothing."""
    kind, remedy = next((KINDS[start] for start in KINDS if at == 0 and chunk.startswith(start)), ("", ""))
    if at == 0 and not kind and chunk.startswith(TAR, TAR_AT):
        kind, remedy = "a tar archive", ": unpack it"
    if kind:
        return f"is {kind}, not text in UTF-8{remedy}"
    null = chunk.find(b"\0")
    return f"holds a NUL at byte {at + null}, and no text in UTF-8 does (in UTF-16 it may)" if null >= 0 else ""


def glance(file: File) -> str:
    """The `fault` of the beginning of a file; '' also where it cannot be read: who reads it will say so."""
    with contextlib.suppress(errors.UserError):
        return fault(read(file, copies=1, text=False, most=TAR_AT + len(TAR)))
    return ""


def read(file: File, *, copies: int, text: bool = True, most: float = math.inf, hint: str = "") -> bytes:
    """The text in the file, unpacked if it begins as gzip does, whatever its name. text = False: whatever it holds.

    copies: bytes of memory that each byte of the text will take. most: bytes after which it is enough (one more shows
    that there are more). hint: the end of the sentence about what is no text.

    Raises:
      UserError: no text, damaged gzip or zip, more than the memory has room for, or a file that cannot be read.
    """
    content, room = io.BytesIO(), disk.host_memory()
    with _refusing(file.name), file.open() as packed:
        source = gzip.GzipFile(fileobj=packed) if packed.peek(2)[:2] == GZIP else packed
        while content.tell() <= most and (chunk := source.read(int(min(CHUNK, most + 1 - content.tell())))):
            if text and (wrong := fault(chunk, content.tell())):
                raise errors.UserError(f"{file.name} {wrong}{hint}")
            content.write(chunk)
            if copies * content.tell() > room:  # packed, it was small
                disk.check_memory(f"the text in {file.name}", copies * content.tell(), room)
    return content.getvalue()


@contextlib.contextmanager
def _refusing(name: str | pathlib.Path) -> Iterator[None]:
    try:
        yield
    except (gzip.BadGzipFile, zipfile.BadZipFile, zlib.error, EOFError, ValueError, RuntimeError) as error:
        raise errors.UserError(f"{name} is a damaged gzip file or zip: {error}") from error
    except OSError as error:
        raise errors.UserError(f"{name} cannot be read: {error.strerror or error}") from error

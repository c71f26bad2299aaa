"""Files of text, gzipped or not. What is no text is refused, or its bytes would be learned from without a word."""

import gzip
import io
import math
import pathlib
import zlib

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
    GZIP: ("packed with gzip twice, or inside another archive", ": unpack it"),
    b"\xff\xfe\0\0": ("text in UTF-32", ": convert it to UTF-8"),
    b"\0\0\xfe\xff": ("text in UTF-32", ": convert it to UTF-8"),
    b"\xff\xfe": ("text in UTF-16", ": convert it to UTF-8"),
    b"\xfe\xff": ("text in UTF-16", ": convert it to UTF-8"),
}


def fault(chunk: bytes, at: int = 0) -> str:
    """What shows that these bytes, from `at` on in their file, are no text in UTF-8 or a relative; '' for nothing."""
    if at == 0:
        for beginning, (kind, remedy) in KINDS.items():
            if chunk.startswith(beginning):
                return f"is {kind}, not text in UTF-8{remedy}"
        if chunk.startswith(TAR, TAR_AT):
            return "is a tar archive, not text in UTF-8: unpack it"
    null = chunk.find(b"\0")
    return f"holds a NUL at byte {at + null}, and no text in UTF-8 does (in UTF-16 it may)" if null >= 0 else ""


def read(path: pathlib.Path, *, copies: int, text: bool = True, most: float = math.inf, hint: str = "") -> bytes:
    """The text in the file, unpacked if it begins as gzip does. text = False: whatever it holds.

    copies: bytes of memory that each byte of the text will take. most: bytes after which it is enough (one more shows
    that there are more). hint: the end of the sentence about what is no text.

    Raises:
      UserError: no text, damaged gzip, more than the memory has room for, or a file that cannot be read.
    """
    content, room = io.BytesIO(), disk.host_memory()
    try:
        with path.open("rb") as file:
            source = unpacked(file)
            while content.tell() <= most and (chunk := source.read(int(min(CHUNK, most + 1 - content.tell())))):
                if text and (wrong := fault(chunk, content.tell())):
                    raise errors.UserError(f"{path} {wrong}{hint}")
                content.write(chunk)
                if copies * content.tell() > room:  # packed, it was small
                    disk.check_memory(f"the text in {path}", copies * content.tell(), room)
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise errors.UserError(f"{path} is a damaged gzip file: {error}") from error
    except OSError as error:
        raise errors.UserError(f"{path} cannot be read: {error.strerror or error}") from error
    return content.getvalue()


def glance(path: pathlib.Path) -> str:
    """The `fault` of the beginning of a file; '' also where it cannot be read: who reads it will say so."""
    try:
        with path.open("rb") as file:
            return fault(unpacked(file).read(TAR_AT + len(TAR)))
    except (EOFError, zlib.error, OSError):
        return ""


def unpacked(file: io.BufferedReader) -> io.BufferedReader | gzip.GzipFile:
    """The content, unpacked on the fly if it begins as gzip does, whatever its name."""
    return gzip.GzipFile(fileobj=file) if file.peek(2)[:2] == GZIP else file

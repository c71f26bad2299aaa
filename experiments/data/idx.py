"""The IDX files of the MNIST sets (http://yann.lecun.com/exdb/mnist), gzipped or not.

Two zero bytes, a type code, the number of axes, the size of each as a big-endian uint32, then the values, big-endian.
"""

import contextlib
import gzip
import math
import pathlib
import zlib
from typing import BinaryIO

import numpy as np

from experiments.data import plain
from experiments.engine import disk, errors

DTYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
CHUNK = 2**20  # bytes read at a time: what a header announces is never allocated before it is there
LARGEST = 2**34  # bytes of values; a small gzip file can unpack into far more than any memory holds


def read(path: pathlib.Path, *, axes: int) -> np.ndarray:
    """The array in the file, of the file's type in native byte order.

    Raises:
      UserError: cannot be read, no IDX file, another number of axes, too few or too many bytes, damaged gzip.
    """
    try:
        with path.open("rb") as packed:
            file = plain.unpacked(packed)
            dtype, shape = _header(path, file, axes=axes)
            expected = math.prod(shape) * dtype.itemsize
            # Packing makes nothing longer by more than this; zeros behind the end would be read through to the last.
            if path.stat().st_size > expected + expected // 64 + CHUNK:
                raise errors.UserError(f"{path} is too long: it announces {expected} bytes of values")
            content = _content(path, file, expected=expected)
    except (gzip.BadGzipFile, zlib.error) as error:
        raise errors.UserError(f"{path} is a damaged gzip file: {error}") from error
    except OSError as error:
        raise errors.UserError(f"{path} cannot be read: {error.strerror or error}") from error
    return np.frombuffer(content, dtype).reshape(shape).astype(dtype.newbyteorder("="), copy=False)


def _header(path: pathlib.Path, file: BinaryIO, *, axes: int) -> tuple[np.dtype, tuple[int, ...]]:
    magic = _read_up_to(file, 4)
    if len(magic) < 4 or magic[:2] != b"\0\0" or magic[2] not in DTYPES:
        raise errors.UserError(f"{path} is not an IDX file: it begins with the bytes {magic.hex(' ') or '(none)'}")
    if magic[3] != axes:
        raise errors.UserError(f"{path} holds an array of {magic[3]} axes where {axes} are expected")
    sizes = _read_up_to(file, 4 * axes)
    if len(sizes) < 4 * axes:
        raise errors.UserError(f"{path} is cut off: expected {4 + 4 * axes} bytes of header, found {4 + len(sizes)}")
    shape = tuple(int.from_bytes(sizes[at : at + 4], "big") for at in range(0, 4 * axes, 4))
    if 0 in shape:
        raise errors.UserError(f"{path} is empty: its header announces an array of shape {shape}")
    return np.dtype(DTYPES[magic[2]]), shape


def _content(path: pathlib.Path, file: BinaryIO, *, expected: int) -> bytes:
    if expected > LARGEST:
        raise errors.UserError(f"{path} announces {expected} bytes of values, and {LARGEST} are allowed")
    disk.check_memory(f"what {path} announces", 2 * expected)  # the pieces that are read, and then the whole
    content = _read_up_to(file, expected)
    if len(content) < expected:
        raise errors.UserError(f"{path} is cut off: expected {expected} bytes of values, found {len(content)}")
    try:
        more = file.read(1)  # at its end gzip compares its checksum, which is behind the last value
    except EOFError as error:
        raise errors.UserError(f"{path} is cut off: the end of the gzip file, with its checksum, is missing") from error
    if more:
        raise errors.UserError(f"{path} is too long: expected {expected} bytes of values, found more")
    return content


def _read_up_to(file: BinaryIO, size: int) -> bytes:
    """The next `size` bytes, or as many as there are: `read1` also gives all that stands before a break in gzip."""
    chunks, left = [], size
    with contextlib.suppress(EOFError):
        while left and (chunk := file.read1(min(left, CHUNK))):
            chunks.append(chunk)
            left -= len(chunk)
    return b"".join(chunks)

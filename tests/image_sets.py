"""A small image set, as arrays, in IDX files and in an .npz."""

import gzip
import struct

import numpy as np
import pytest

from experiments.data import image_files

CODES = {"u1": 0x08, "i1": 0x09, "i2": 0x0B, "i4": 0x0C, "f4": 0x0D, "f8": 0x0E}
TRAIN, EVALUATION, Y, X, C = 11, 7, 5, 3, 4


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """No data of the machine's own is found."""
    monkeypatch.delenv("TFM_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def idx_bytes(array: np.ndarray) -> bytes:
    code = CODES[array.dtype.str[1:]]
    return (
        struct.pack(f">BBBB{array.ndim}I", 0, 0, code, array.ndim, *array.shape)
        + array.astype(array.dtype.newbyteorder(">")).tobytes()
    )


def arrays(seed: int = 0) -> dict[str, np.ndarray]:
    """A small set: x_train, y_train, x_test, y_test."""
    draw = np.random.default_rng(seed)
    return {
        "x_train": draw.integers(0, 256, (TRAIN, Y, X), np.uint8),
        "y_train": (np.arange(TRAIN) % C).astype(np.uint8),
        "x_test": draw.integers(0, 256, (EVALUATION, Y, X), np.uint8),
        "y_test": (np.arange(EVALUATION) % C).astype(np.uint8),
    }


def idx_folder(folder, *, pack: bool = False, **changed):
    folder.mkdir(parents=True, exist_ok=True)
    for file, array in zip(image_files.FILES, (arrays() | changed).values(), strict=True):
        content = idx_bytes(array)
        (folder / (file + ".gz" if pack else file)).write_bytes(gzip.compress(content) if pack else content)
    return str(folder)


def npz(path, **changed):
    np.savez(path, **(arrays() | changed))
    return str(path)

"""Small data files: text, sentence pairs, images."""

import io
import pathlib
import struct
import zipfile

import numpy as np
import pytest
import tiny
from PIL import Image

from experiments.data import image_file, images

KING = b"A king who reads is worth two kings who fight. " * 20
CODES = {"u1": 0x08, "i1": 0x09, "i2": 0x0B, "i4": 0x0C, "f4": 0x0D, "f8": 0x0E}  # IDX type codes by dtype
TRAIN, EVALUATION, Y, X, C = 11, 7, 5, 3, 4


@pytest.fixture(autouse=True)
def hide_local_data(tmp_path, monkeypatch):
    """Hide data sets that lie on this machine."""
    monkeypatch.delenv("TFM_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def write(folder: pathlib.Path, **contents: bytes) -> pathlib.Path:
    """Write files with these contents; names may have folders. Return the folder."""
    for name, content in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def sources(folder: pathlib.Path, sections: list[str], word: str = "word", side: int = 8) -> dict[str, str]:
    """Write small data sets that contain this word, and return the settings with their paths.

    sections: text (without classes), texts (with classes), pairs, image.
    """
    rows = "text,label\n" + "".join(f"{word} {i},{i % 3}\n" for i in range(99))
    pairs = "".join(f"{word} {i}\tpalabra {i * i}\n" for i in range(2000))
    images = np.random.default_rng(len(word)).random((300, side, side))
    files = {
        "text": (f"{word}.txt", (f"{word}\n".encode() + tiny.TEXT) * 30),
        "texts": (f"{word}.csv", rows.encode()),
        "pairs": (f"{word}.tsv", pairs.encode()),
        "image": (f"{word}.npz", npz(x=images, y=np.arange(300) % 10)),
    }
    write(folder, **dict(files[section] for section in sections))
    return {f"{name.replace('texts', 'text')}.source": str(folder / files[name][0]) for name in sections}


def documents(part) -> list[bytes]:
    """Return the documents of a split of a text."""
    return b"".join(part).split(b"\0")


def npz(**arrays) -> bytes:
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def make_zip(members, **options) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", **options) as out:
        for name, content in members:
            out.writestr(name, content)
    return file.getvalue()


def idx(array: np.ndarray) -> bytes:
    big = array.astype(array.dtype.newbyteorder(">"))
    return (
        struct.pack(f">BBBB{array.ndim}I", 0, 0, CODES[array.dtype.str[1:]], array.ndim, *array.shape) + big.tobytes()
    )


def arrays(**changes) -> dict[str, np.ndarray]:
    """Return a small set of images: x_train, y_train, x_test, y_test."""
    draw = np.random.default_rng(0)
    return {
        "x_train": draw.integers(0, 256, (TRAIN, Y, X), np.uint8),
        "y_train": (np.arange(TRAIN) % C).astype(np.uint8),
        "x_test": draw.integers(0, 256, (EVALUATION, Y, X), np.uint8),
        "y_test": (np.arange(EVALUATION) % C).astype(np.uint8),
    } | changes


def idx_folder(folder, *, pack=bytes, end: str = "", **changes) -> str:
    contents = map(pack, map(idx, arrays(**changes).values()))
    return str(write(folder, **{f"{name}{end}": one for name, one in zip(images.FILES, contents, strict=True)}))


def archive(path, **changes) -> str:
    """Write an .npz of a training and a test part, and return its path."""
    path.write_bytes(npz(**arrays(**changes)))
    return str(path)


def pixels(b: int, shape: tuple[int, ...] = (Y, X, 3)) -> np.ndarray:
    """Return a random image, number b."""
    return np.random.default_rng(b).integers(0, 256, shape, np.uint8)


def encode_image(array: np.ndarray, form: str = "PNG", orientation: int = 1) -> bytes:
    """Return the bytes of an image file with this EXIF orientation (6: rotate by 90° clockwise to view)."""
    file, exif = io.BytesIO(), Image.Exif()
    exif[image_file.ORIENTATION] = orientation
    Image.fromarray(array).save(file, form, **({"exif": exif} if orientation > 1 else {}))
    return file.getvalue()


def image_folder(path: pathlib.Path, *names: str) -> str:
    """Write images with these names: the b-th name gets pixels(b). Return the path."""
    return str(write(path, **{name: encode_image(pixels(b)) for b, name in enumerate(names)}))

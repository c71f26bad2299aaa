"""Many or large images are decoded in chunks, cached on the disk, and read from the cache."""

import contextlib
import errno
import mmap
import os
import types

import numpy as np
from errors import raises
from small_files import X, Y, encode_image, hide_local_data, image_folder as folder, pixels  # noqa: F401  a fixture

from experiments.config import disk, errors
from experiments.data import image_file, image_folder, images

CLASSES = ("cat", "dog")
NAMES = ("cat/a.png", "cat/b.PNG", "dog house/a.png", "dog house/more/b.png")


def test_many_images_are_cached_and_decoded_again_only_if_a_file_changes(tmp_path, monkeypatch):
    monkeypatch.setattr(image_folder, "CACHED", 1)
    source = folder(tmp_path / "set", *(f"{part}/{name}" for part in ("train", "test") for name in NAMES))
    paths = []
    open_image = image_file.open_image
    monkeypatch.setattr(image_file, "open_image", lambda file: paths.append(file) or open_image(file))

    def load(size=0):
        paths.clear()
        data = images.load(source, size)
        return len(paths) // 2, data.train_image_BYXZ, data.evaluation_image_BYXZ

    monkeypatch.setattr(image_folder, "CHUNK", 3)
    first, second = load(), load()
    assert first[0] == 8 and second[0] == 0 and load(4)[0] == 8
    for a, b in zip(first[1:], second[1:], strict=True):
        np.testing.assert_array_equal(a, b)
    (tmp_path / "set" / "train" / NAMES[0]).write_bytes(encode_image(pixels(9)))
    n, train, _ = load()
    assert n == 8 and np.array_equal(train[0], pixels(9))
    for file in (tmp_path / "cache" / "tfm" / "images").iterdir():
        file.write_bytes(file.read_bytes()[:-1])
    assert load()[0] == 8 and load()[0] == 0

    def raise_full(content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(disk, "draft", raise_full)
    with raises(errors.UserError, "cache/tfm/images", "No space left"):
        load(3)


def test_large_images_are_decoded_a_few_at_a_time_and_stay_on_the_disk(tmp_path, monkeypatch):
    """At most CHUNK_BYTES of images are in memory, and the two splits of a set are views of the cache."""
    monkeypatch.setattr(image_folder, "CACHED", 1)
    monkeypatch.setattr(image_folder, "CHUNK_BYTES", 3 * Y * X * 3)
    source = folder(tmp_path / "set", *(f"{c}/{n}.png" for c in CLASSES for n in range(20)))
    writes, decodings, in_memory = [], [], []
    original_draft, original_pixels = disk.draft, image_file.pixels

    @contextlib.contextmanager
    def draft(file):
        with original_draft(file) as new:
            yield types.SimpleNamespace(write=lambda content: writes.append(content) or new.write(content))

    def count_and_decode(*arguments):
        decodings.append(1)
        in_memory.append(len(decodings) - len(writes))
        return original_pixels(*arguments)

    monkeypatch.setattr(disk, "draft", draft)
    monkeypatch.setattr(image_file, "pixels", count_and_decode)
    data = images.load(source)
    assert len(decodings) == 40 and max(in_memory) <= 4
    for array in (data.train_image_BYXZ, data.evaluation_image_BYXZ):
        while not isinstance(array, mmap.mmap):
            array = array.base

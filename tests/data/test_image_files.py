"""IDX files and .npz archives are read, and refused if their arrays contradict each other (test_fuzz_data: damage)."""

import gzip

import numpy as np
import pytest
import small_files
from errors import raises
from small_files import CODES, EVALUATION, TRAIN, X, Y, archive, hide_local_data, idx, idx_folder  # noqa: F401  a fixture

from experiments.config import errors
from experiments.data import images


@pytest.mark.parametrize("dtype", sorted(CODES))
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_idx_files_are_read_back(tmp_path, dtype, pack):
    array = (np.random.default_rng(0).normal(size=(7, 5, 3)) * 50).astype(dtype)
    # Gzip is recognised without .gz in the name.
    content = images.read_idx(small_files.write(tmp_path, a=pack(idx(array))) / "a")
    assert np.array_equal(content, array) and content.dtype == array.dtype and content.dtype.isnative


@pytest.mark.parametrize("content", [b"", b"\x89PNG", idx(np.zeros((7, 5, 3))) + b"\0", b"\0\0\x0a\x03" + bytes(50)])
def test_other_content_is_not_read_as_an_idx_file(tmp_path, content):
    with raises(errors.UserError, tmp_path / "a"):
        images.read_idx(small_files.write(tmp_path, a=content) / "a")


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"y_train": np.zeros(TRAIN + 1, np.uint8)}, ["training part", TRAIN, TRAIN + 1]),
        ({"y_test": np.zeros(EVALUATION - 1, np.uint8)}, ["evaluation part", 7]),
        ({"y_test": np.arange(EVALUATION, dtype=np.uint8)}, [EVALUATION - 1, "0 .. 3"]),
        ({"y_train": np.r_[0, 1, -1, np.zeros(TRAIN - 3)].astype(np.int32)}, [-1]),
        ({"y_train": np.full(TRAIN, 0.5, np.float32)}, ["float32"]),
        ({"y_train": np.r_[np.zeros(TRAIN - 1), 2**31 - 1].astype(np.int32)}, [2**31 - 1]),
        ({"y_train": np.zeros((TRAIN, 2), int)}, [(TRAIN, 2)]),
        ({"x_test": np.zeros((EVALUATION, X, Y), np.uint8)}, [(Y, X, 1), (X, Y, 1)]),
        ({"x_train": np.full((TRAIN, Y, X), np.nan, np.float32)}, ["training part", "finite"]),
        ({"x_train": np.full((TRAIN, Y, X), 1e300)}, ["finite"]),
        ({"x_train": np.array([{}] * TRAIN, object)}, []),
        ({"x_train": np.array(["word"] * TRAIN)}, ["<U4"]),
        ({"x_train": np.ones((TRAIN, Y, X), complex)}, ["complex"]),
        ({"x_train": np.ones((TRAIN, Y))}, [(TRAIN, Y)]),
        ({"x_train": np.ones((0, Y, X)), "y_train": np.ones(0, int)}, [(0, Y, X)]),
        ({"x_train": np.ones((TRAIN, 1, 28, 28))}, ["training part", (TRAIN, 1, 28, 28), "moveaxis(x, 1, -1)"]),
        ({"x_test": np.ones((EVALUATION, 4, 5, 5))}, ["evaluation part", (EVALUATION, 4, 5, 5), "moveaxis"]),
    ],
)
def test_arrays_that_are_not_images_with_labels_are_refused(tmp_path, arrays, words):
    with raises(errors.UserError, tmp_path / "a.npz", *words):
        images.load(archive(tmp_path / "a.npz", **arrays))


def test_idx_files_with_too_many_labels_and_an_archive_without_labels_are_refused(tmp_path):
    source = idx_folder(tmp_path, y_train=np.zeros(TRAIN + 1, np.uint8))
    with raises(errors.UserError, source, "training part", TRAIN, TRAIN + 1):
        images.load(source)
    small_files.write(tmp_path, **{"a.npz": small_files.npz(x=np.zeros(3), label=np.zeros(3))})
    with raises(errors.UserError, tmp_path / "a.npz", "(x, y)", "x, label"):
        images.load(str(tmp_path / "a.npz"))

"""IDX files and .npz archives are read whole, and refused where they are damaged or lie."""

import gzip

import numpy as np
import pytest
import small_files
from small_files import CODES, EVALUATION, TRAIN, C, X, Y, archive, elsewhere, idx, idx_folder  # noqa: F401  a fixture

from experiments.data import files, images
from experiments.engine import disk, errors

WHOLE = idx(np.arange(7 * 5 * 3, dtype=np.int16).reshape(7, 5, 3))
PACKED, ROWS = gzip.compress(WHOLE), WHOLE[16:]


def read(folder, content):
    return images.read_idx(small_files.write(folder, a=content) / "a", axes=3)


@pytest.mark.parametrize("dtype", sorted(CODES))
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_idx_files_are_read_back(tmp_path, dtype, pack):
    array = (np.random.default_rng(0).normal(size=(7, 5, 3)) * 50).astype(dtype)
    found = read(tmp_path, pack(idx(array)))  # the name says nothing about gzip
    assert np.array_equal(found, array) and found.dtype == array.dtype and found.dtype.isnative


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "not an IDX file.*none"),
        (b"\x89PNG", "not an IDX file.*89 50 4e 47"),
        (b"\0\0\x0a\x03" + WHOLE[4:], "not an IDX file"),
        (idx(np.arange(7, dtype=np.int16)), "1 axes where 3"),
        (WHOLE[:13], "is empty: "),
        (WHOLE[:-1], r"is cut off: it announces values of shape \(7, 5, 3\)"),
        (WHOLE[:16], "is cut off: "),
        (WHOLE + b"\0", "is too long: "),
        (idx(np.zeros((16, files.CHUNK // 16 - 1, 1), np.uint8)) + b"\0", "is too long: "),
        (WHOLE[:4] + b"\0\0\0\0" + WHOLE[8:], r"is empty: .*shape \(0, 5, 3\)"),
        (WHOLE[:4] + b"\xff" * 12 + ROWS, "announces needs .* of memory"),
        (WHOLE[:4] + b"\x04\0\0\0" + WHOLE[8:], "is cut off: |announces needs"),
    ],
)
def test_idx_files_with_other_bytes_than_announced_are_refused(tmp_path, pack, content, complaint):
    with pytest.raises(errors.UserError, match=f"{tmp_path}/a .*{complaint}"):
        read(tmp_path, pack(content))


def test_a_gzip_file_that_is_damaged_cut_or_goes_on_is_refused(tmp_path):
    two = gzip.compress(WHOLE[:50]) + gzip.compress(WHOLE[50:])
    wrong = [PACKED + b"garbage", PACKED[: len(PACKED) // 2], PACKED[:-8] + bytes([PACKED[-8] ^ 1]) + PACKED[-7:]]
    for packed in (PACKED, two, PACKED + gzip.compress(b"")):  # two members, of which one may be empty
        assert read(tmp_path, packed).size == len(ROWS) // 2
        wrong += [packed[:-missing] for missing in (1, 8)]  # all values are there
    for content in wrong:
        with pytest.raises(errors.UserError, match="damaged gzip"):
            read(tmp_path, content)
    for more in (gzip.compress(b"\0"), PACKED[:-8]):
        with pytest.raises(errors.UserError, match="is too long"):
            read(tmp_path, PACKED + more)
    for missing in (tmp_path / "nothing", tmp_path):
        with pytest.raises(errors.UserError, match="cannot be read"):
            images.read_idx(missing, axes=3)


WRONG = {
    "too many labels": ({"y_train": np.zeros(TRAIN + 1, np.uint8)}, f"{TRAIN} images need labels"),
    "too few labels": ({"y_test": np.zeros(EVALUATION - 1, np.uint8)}, "evaluation part.*7 images need labels"),
    "a label beyond": ({"y_test": np.arange(EVALUATION, dtype=np.uint8)}, r"label 4 is out of range: .* 0 \.\. 3"),
    "negative": ({"y_train": np.full(TRAIN, -1, np.int32)}, "label -1 is out of range: classes are counted from 0$"),
    "one negative": ({"y_train": np.r_[0, 1, -1, np.zeros(TRAIN - 3)].astype(np.int32)}, "label -1 is out of range"),
    "fractions": ({"y_train": np.full(TRAIN, 0.5, np.float32)}, "integers.*float32"),
    "absurd label": ({"y_train": np.r_[np.zeros(TRAIN - 1), 2**31 - 1].astype(np.int32)}, "2147483647 is out of range"),
    "as many classes as images": ({"y_train": np.arange(TRAIN, dtype=np.uint8) + 1}, "smallest label|11 images show"),
    "other size": ({"x_test": np.zeros((EVALUATION, X, Y), np.uint8)}, "differ in shape"),
    "not finite": ({"x_train": np.full((TRAIN, Y, X), np.nan, np.float32)}, "not a finite number"),
}


@pytest.mark.parametrize("case", sorted(WRONG))
def test_contradictory_sets_are_refused(tmp_path, case):
    changed, complaint = WRONG[case]
    for source in (idx_folder(tmp_path / "idx", **changed), archive(tmp_path / "a.npz", **changed)):
        with pytest.raises(errors.UserError, match=complaint):
            images.load(source)


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"x_train": np.array([{}] * TRAIN, object)}, "a.npz.*Object arrays"),
        ({"x_train": np.array(["word"] * TRAIN)}, "real numbers.*<U4"),
        ({"x_train": np.ones((TRAIN, Y, X), complex)}, "real numbers.*complex"),
        ({"x_train": np.ones((TRAIN, Y))}, r"\(11, 5\)"),
        ({"x_train": np.ones((0, Y, X)), "y_train": np.ones(0, int)}, r"\(0, 5, 3\)"),
        ({"x_train": np.full((TRAIN, Y, X), 1e300)}, "not a finite number"),
        ({"y_train": np.zeros((TRAIN, 2), int)}, r"shape \(11,\).*\(11, 2\)"),
        ({"y_train": np.zeros((1, TRAIN), int)}, r"shape \(11,\).*\(1, 11\)"),
        ({"x_train": np.ones((TRAIN, 1, 28, 28))}, r"training part.*Z first, \(11, 1, 28, 28\).*moveaxis\(x, 1, -1\)"),
        ({"x_train": np.ones((TRAIN, 3, 32, 5))}, r"channels Z first"),
        ({"x_test": np.ones((EVALUATION, 4, 5, 5))}, r"evaluation part.*channels Z first"),
    ],
)
def test_archives_hold_numbers_of_the_right_shape(tmp_path, changed, complaint):
    with pytest.raises(errors.UserError, match=complaint):
        images.load(archive(tmp_path / "a.npz", **changed))


def test_archives_are_refused_when_damaged_incomplete_or_too_large(tmp_path, monkeypatch):
    """Also one that announces fewer values: only these would be read, and the checksum of all never compared."""
    path = tmp_path / "a.npz"
    content = small_files.npz(x=np.zeros((600, 5, 5), np.uint8), y=np.arange(600) % C)
    wrong = [content[:-30], b"", content[:300] + bytes([content[300] ^ 1]) + content[301:]]
    for right, damaged in ((b"(600, 5, 5)", b"(200, 5, 5)"), (b"\1\0v", b"\1\0t")):
        assert right in content
        wrong.append(content.replace(right, damaged, 1))
    for content in wrong:
        path.write_bytes(content)
        with pytest.raises(errors.UserError, match=f"{path} is damaged"):
            images.load(str(path))
    path.write_bytes(small_files.npz(x=np.zeros(3), label=np.zeros(3)))
    with pytest.raises(errors.UserError, match=r"\(x, y\), and has x, label"):
        images.load(str(path))
    monkeypatch.setattr(disk, "host_memory", lambda: 100)
    with pytest.raises(errors.UserError, match="holds unpacked needs .* there are 100 bytes"):
        images.load(str(path))

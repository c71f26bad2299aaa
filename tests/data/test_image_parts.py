"""Which files and arrays are the images of which part, by their names."""

import io
import math
import zipfile

import numpy as np
import pytest
from image_sets import EVALUATION, TRAIN, C, X, Y, arrays, elsewhere, idx_folder, npz  # noqa: F401  a fixture too

from experiments.data import images
from experiments.engine import disk, errors


def whole(path, **changed):
    """One part, or a set that is to be split."""
    given = arrays()
    np.savez(path, **({"x": given["x_train"], "y": given["y_train"]} | changed))
    return str(path)


# Parts by name.


def numbered(folder, **numbers):
    """A folder of .npz files of one part each, by their names; all pixels of one are its number."""
    folder.mkdir(exist_ok=True)
    for name, number in numbers.items():
        whole(folder / f"{name}.npz", x=np.full((TRAIN, Y, X), number))
    return folder


def parts(data):
    return int(data.train_image_BYXZ.max()), int(data.evaluation_image_BYXZ.max())


@pytest.mark.parametrize("valid", ["valid", "val", "dev", "validation"])
def test_the_files_of_a_folder_are_used_by_their_names(tmp_path, valid):
    """Not split by content; evaluated is the validation part, where there is one; the test part is never used."""
    folder = numbered(tmp_path / "set", train=1, test=3)
    (folder / "more.npz").write_bytes(b"left alone")
    assert parts(images.load(str(folder))) == (1, 3)
    data = images.load(str(numbered(folder, **{valid: 2})))
    assert parts(data) == (1, 2) and len(data.train_label_B) == len(data.evaluation_label_B) == TRAIN
    assert data.name == str(folder) and data.said == (
        f"by their names, {folder}/train.npz to train on; {folder}/{valid}.npz to evaluate; all else left alone"
    )
    (folder / "train.npz").unlink()
    with pytest.raises(errors.UserError, match=rf"nothing to train on beside .*{valid}.npz, .*test.npz: call it train"):
        images.load(str(folder))


def test_two_files_of_one_part_are_refused(tmp_path):
    with pytest.raises(errors.UserError, match="has val.npz and dev.npz: let one of them have another name"):
        images.load(str(numbered(tmp_path / "set", train=0, val=1, dev=2)))


def test_a_folder_of_idx_files_stays_what_it_was(tmp_path):
    source = idx_folder(tmp_path / "set")
    before = images.load(source)
    numbered(tmp_path / "set", train=1, valid=2)
    for found, expected in zip(images.load(source)[1:5], before[1:5], strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("valid", ["valid", "val", "validation", "dev"])
def test_the_arrays_of_an_archive_are_used_by_their_names(tmp_path, valid):
    x = {name: np.full((TRAIN, Y, X), number) for number, name in enumerate(["train", "test", valid])}
    three = {f"x_{name}": image for name, image in x.items()} | {f"y_{name}": np.arange(TRAIN) % C for name in x}
    data = images.load(npz(tmp_path / "a.npz", **three))
    assert parts(data) == (0, 2) and f"x_train to train on; x_{valid} to evaluate" in data.said


def test_one_part_alone_is_split_by_content(tmp_path):
    source = whole(tmp_path / "train.npz")
    expected = images.load(source)
    found = images.load(str(tmp_path))
    assert found.said == "split by content" and len(found.train_label_B) < TRAIN
    for array, right in zip(found[1:5], expected[1:5], strict=True):
        np.testing.assert_array_equal(array, right)


def test_one_set_is_split_by_content(tmp_path):
    x = np.random.default_rng(0).integers(0, 256, (1009, Y, X), np.uint8)
    x[500:600] = x[:100]  # copies
    y = np.arange(1009) % 7
    np.savez(tmp_path / "a.npz", x=x, y=y)
    found = images.load(str(tmp_path / "a.npz"))
    label_of = {(image.tobytes(), label) for image, label in zip(x, y, strict=True)}
    train = [image.tobytes() for image in found.train_image_BYXZ]
    held = [image.tobytes() for image in found.evaluation_image_BYXZ]
    assert sorted(train + held) == sorted(image.tobytes() for image in x) and not set(train) & set(held)
    assert set(zip(train + held, [*found.train_label_B, *found.evaluation_label_B], strict=True)) == label_of
    assert abs(len(set(held)) / 909 - 0.2) < 5 * math.sqrt(0.16 / 909)
    back = np.arange(1009)[::-1]
    np.savez(tmp_path / "b.npz", x=x[back], y=y[back])
    assert np.array_equal(images.load(str(tmp_path / "b.npz")).evaluation_label_B, found.evaluation_label_B[::-1])


def test_the_digits_are_split_in_two():
    found = images.load("digits")
    sizes = len(found.train_label_B), len(found.evaluation_label_B)
    assert sum(sizes) == 1797 and 0.16 < sizes[1] / 1797 < 0.24
    assert found.train_image_BYXZ.shape[1:] == (8, 8, 1) and found.train_image_BYXZ.max() == 16
    assert found.classes == tuple("0123456789") and set(found.evaluation_label_B) == set(range(10))
    train, held = (
        {image.tobytes() for image in part} for part in (found.train_image_BYXZ, found.evaluation_image_BYXZ)
    )
    assert not train & held


WRONG = {
    "too many labels": ({"y_train": np.zeros(TRAIN + 1, np.uint8)}, f"{TRAIN} images need labels"),
    "too few labels": ({"y_test": np.zeros(EVALUATION - 1, np.uint8)}, "evaluation part.*7 images need labels"),
    "a label beyond": ({"y_test": np.arange(EVALUATION, dtype=np.uint8)}, r"label 6 is out of range: .* 0 \.\. 3"),
    "negative label": ({"y_train": np.full(TRAIN, -1, np.int32)}, "label -1 is out of range"),
    "one negative": ({"y_train": np.r_[0, 1, -1, np.zeros(TRAIN - 3)].astype(np.int32)}, "label -1 is out of range"),
    "fractions": ({"y_train": np.full(TRAIN, 0.5, np.float32)}, "integers.*float32"),
    "absurd label": ({"y_train": np.r_[np.zeros(TRAIN - 1), 2**31 - 1].astype(np.int32)}, "2147483647 is out of range"),
    "other size": ({"x_test": np.zeros((EVALUATION, X, Y), np.uint8)}, "differ in shape"),
    "not finite": ({"x_train": np.full((TRAIN, Y, X), np.nan, np.float32)}, "not a finite number"),
}


@pytest.mark.parametrize("case", sorted(WRONG))
def test_contradictory_sets_are_refused(tmp_path, case):
    changed, complaint = WRONG[case]
    for source in (idx_folder(tmp_path / "idx", **changed), npz(tmp_path / "a.npz", **changed)):
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
        (
            {"x_train": np.ones((TRAIN, 1, 28, 28))},
            r"training part.*channels Z first, \(11, 1, 28, 28\).*moveaxis\(x, 1, -1\)",
        ),
        ({"x_train": np.ones((TRAIN, 3, 32, 5))}, r"channels Z first"),
        ({"x_test": np.ones((EVALUATION, 4, 5, 5))}, r"evaluation part.*channels Z first"),
    ],
)
def test_archives_hold_numbers_of_the_right_shape(tmp_path, changed, complaint):
    with pytest.raises(errors.UserError, match=complaint):
        images.load(npz(tmp_path / "a.npz", **changed))


def test_archives_are_refused_when_damaged_incomplete_or_too_large(tmp_path, monkeypatch):
    path = tmp_path / "a.npz"
    npz(path)
    content = path.read_bytes()
    for wrong, complaint in (
        (content[:-30], "damaged"),
        (b"", "damaged"),
        (content.replace(b"NUMPY", b"NUMPX"), "damaged"),
        (content[:300] + bytes([content[300] ^ 1]) + content[301:], "damaged"),
    ):
        path.write_bytes(wrong)
        with pytest.raises(errors.UserError, match=f"{path} is {complaint}"):
            images.load(str(path))
    np.savez(path, x=np.zeros(3), label=np.zeros(3))
    with pytest.raises(errors.UserError, match=r"\(x, y\), and has x, label"):
        images.load(str(path))
    monkeypatch.setattr(disk, "LARGEST_NPZ", 100)
    with pytest.raises(errors.UserError, match="100 are allowed"):
        images.load(str(path))


def test_an_archive_that_announces_more_than_it_has_is_refused(tmp_path):
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": (2**40, Y, X)})
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as members:
        members.writestr("x.npy", header.getvalue() + b"\0" * 100)
        members.writestr("y.npy", header.getvalue())
    with pytest.raises(errors.UserError, match="damaged"):
        images.load(str(tmp_path / "a.npz"))


@pytest.mark.parametrize(
    ("whole", "damaged"),
    [(b"(600, 5, 5)", b"(200, 5, 5)"), (b"(600, 5, 5)", b"(60 , 5, 5)"), (b"NUMPY\1\0v", b"NUMPY\1\0t")],
)
def test_an_archive_whose_header_lost_a_bit_is_refused(tmp_path, whole, damaged):
    """It announces fewer values than there are: only these would be read, and the checksum of all never compared."""
    np.savez(tmp_path / "a.npz", x=np.zeros((600, 5, 5), np.uint8), y=np.arange(600) % C)
    content = (tmp_path / "a.npz").read_bytes()
    assert whole in content
    (tmp_path / "a.npz").write_bytes(content.replace(whole, damaged, 1))
    with pytest.raises(errors.UserError, match="a.npz is damaged"):
        images.load(str(tmp_path / "a.npz"))


@pytest.mark.parametrize("source", ["", "nothing/here", "digit", "a\0b"])
def test_an_unknown_source_lists_the_named_ones(source):
    with pytest.raises(errors.UserError, match="digits, fashion_mnist, mnist"):
        images.load(source)


def test_another_file_is_refused(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"text")
    with pytest.raises(errors.UserError, match="a.txt is neither"):
        images.load(str(tmp_path / "a.txt"))
    with pytest.raises(errors.UserError, match="lacks train-images"):
        images.load(str(tmp_path))

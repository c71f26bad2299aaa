"""Images are read whole and in range or refused, split by content, normalised, and moved a little."""

import gzip
import io
import math
import os
import struct
import zipfile

import hypothesis
import numpy as np
import pytest
import tiny
from hypothesis import strategies as st
from scipy import ndimage

from experiments.data import download, image_files, images
from experiments.engine import batches, disk, errors

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


# IDX files.


@pytest.mark.parametrize("dtype", sorted(CODES))
@pytest.mark.parametrize("pack", [False, True])
def test_idx_files_are_read_back(tmp_path, dtype, pack):
    array = (np.random.default_rng(0).normal(size=(7, 5, 3)) * 50).astype(dtype)
    content = idx_bytes(array)
    (tmp_path / "a").write_bytes(gzip.compress(content) if pack else content)  # the name says nothing about gzip
    found = image_files.read_idx(tmp_path / "a", axes=3)
    assert np.array_equal(found, array) and found.dtype == array.dtype and found.dtype.isnative


WHOLE = idx_bytes(np.arange(7 * 5 * 3, dtype=np.int16).reshape(7, 5, 3))
BODY = 7 * 5 * 3 * 2


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "not an IDX file.*none"),
        (b"\x89PNG", "not an IDX file.*89 50 4e 47"),
        (b"\0\0\x0a\x03" + WHOLE[4:], "not an IDX file"),
        (idx_bytes(np.arange(7, dtype=np.int16)), "1 axes where 3"),
        (WHOLE[:13], "is empty: "),
        (WHOLE[:-1], r"is cut off: it announces values of shape \(7, 5, 3\)"),
        (WHOLE[:16], "is cut off: "),
        (WHOLE + b"\0", "is too long: "),
        (WHOLE[:4] + b"\0\0\0\0" + WHOLE[8:], r"is empty: .*shape \(0, 5, 3\)"),
        (WHOLE[:4] + b"\xff" * 12 + WHOLE[16:], "announces needs .* of memory"),
        (WHOLE[:4] + b"\x04\0\0\0" + WHOLE[8:], "is cut off: |announces needs"),
    ],
)
def test_idx_files_with_other_bytes_than_announced_are_refused(tmp_path, pack, content, complaint):
    (tmp_path / "a").write_bytes(gzip.compress(content) if pack else content)
    with pytest.raises(errors.UserError, match=f"{tmp_path}/a .*{complaint}"):
        image_files.read_idx(tmp_path / "a", axes=3)


def test_damaged_gzip_is_refused(tmp_path):
    noise = np.random.default_rng(0).integers(0, 256, (307, 31, 37), np.uint8)  # nothing that gzip can shorten
    packed = gzip.compress(idx_bytes(noise))
    half = len(packed) // 2
    for content, complaint in (
        (packed[:half] + bytes([packed[half] ^ 0xFF]) + packed[half + 1 :], "damaged gzip"),
        (packed[:-8] + bytes(4) + packed[-4:], "damaged gzip"),  # the checksum
        (b"\x1f\x8b" + packed[2:][::-1], "damaged gzip"),
        (packed[:half], "damaged gzip"),
    ):
        (tmp_path / "a.gz").write_bytes(content)
        with pytest.raises(errors.UserError, match=complaint):
            image_files.read_idx(tmp_path / "a.gz", axes=3)
    for missing in (tmp_path / "nothing", tmp_path):
        with pytest.raises(errors.UserError, match="cannot be read"):
            image_files.read_idx(missing, axes=3)


@pytest.mark.parametrize("missing", range(1, 9))
def test_a_gzip_file_cut_inside_its_checksum_is_refused(tmp_path, missing):
    """All values are there. Also where the cut is in the second of two members, of which one may be empty."""
    for packed in (
        gzip.compress(WHOLE),
        gzip.compress(WHOLE[:50]) + gzip.compress(WHOLE[50:]),
        gzip.compress(WHOLE) + gzip.compress(b""),
    ):
        (tmp_path / "a.gz").write_bytes(packed)
        assert image_files.read_idx(tmp_path / "a.gz", axes=3).size == BODY // 2
        (tmp_path / "a.gz").write_bytes(packed[:-missing])
        with pytest.raises(errors.UserError, match="a.gz is a damaged gzip file"):
            image_files.read_idx(tmp_path / "a.gz", axes=3)


def test_what_follows_a_gzip_file_is_refused(tmp_path):
    packed = gzip.compress(WHOLE)
    for more, complaint in (
        (b"garbage", "damaged gzip"),
        (gzip.compress(b"\0"), "is too long"),
        (packed[:-8], "is too long"),
    ):
        (tmp_path / "a.gz").write_bytes(packed + more)
        with pytest.raises(errors.UserError, match=complaint):
            image_files.read_idx(tmp_path / "a.gz", axes=3)
    for at in (-8, -4):  # the checksum, and the length
        (tmp_path / "a.gz").write_bytes(packed[:at] + bytes([packed[at] ^ 1]) + packed[at + 1 :])
        with pytest.raises(errors.UserError, match="damaged gzip"):
            image_files.read_idx(tmp_path / "a.gz", axes=3)


@hypothesis.given(st.booleans(), st.data())
@hypothesis.settings(deadline=None, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
def test_no_damage_to_a_file_gets_past_as_anything_else(tmp_path, pack, data):
    """Whatever one byte becomes, an IDX file is read or refused with a sentence."""
    content = bytearray(gzip.compress(WHOLE) if pack else WHOLE)
    content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    (tmp_path / "a").write_bytes(content)
    try:
        assert image_files.read_idx(tmp_path / "a", axes=3).size == BODY // 2
    except errors.UserError as error:
        assert str(tmp_path) in str(error)


# Sets.


@pytest.mark.parametrize("pack", [False, True])
def test_a_folder_and_an_archive_give_the_same_images(tmp_path, pack):
    given = arrays()
    for source in (idx_folder(tmp_path / "idx", pack=pack), npz(tmp_path / "a.npz")):
        found = images.load(source)
        assert found.name == source and found.classes == ("0", "1", "2", "3")
        for array, expected in zip(found[1:5], given.values(), strict=True):
            assert np.array_equal(array, expected if expected.ndim == 1 else expected[..., None])
        assert [array.dtype for array in found[1:5]] == [np.uint8, np.int32] * 2


@pytest.mark.parametrize(("name", "folder"), [("mnist", "mnist"), ("fashion_mnist", "fashion-mnist")])
def test_named_folders_are_looked_for_in_order(tmp_path, monkeypatch, name, folder):
    monkeypatch.setenv("TFM_DATA", str(tmp_path / "env"))
    with pytest.raises(
        errors.UserError, match=f"t10k-labels-idx1-ubyte .*{tmp_path}/env/{folder} or .*data/{folder} or"
    ):
        images.load(name, data_dir=str(tmp_path / "data"))
    for number, place in enumerate(("cache/tfm", "data", "env")):
        x_train = np.full((TRAIN, Y, X), number, np.uint8)
        idx_folder(tmp_path / place / folder, x_train=x_train)
        found = images.load(name, data_dir=str(tmp_path / "data"))
        assert (found.train_image_BYXZ == number).all() and len(found.classes) == 10
    assert (images.load("fashion_mnist").classes[9] == "Ankle boot") if name == "fashion_mnist" else True
    (tmp_path / "env" / folder / image_files.FILES[1]).unlink()
    with pytest.raises(errors.UserError, match="lacks train-labels-idx1-ubyte"):
        images.load(name)


def test_colours_and_other_numbers(tmp_path):
    colour = np.random.default_rng(0).normal(size=(TRAIN, Y, X, 3))
    found = images.load(npz(tmp_path / "a.npz", x_train=colour, x_test=colour[:EVALUATION].astype(">f4")))
    assert found.train_image_BYXZ.shape == (TRAIN, Y, X, 3)
    assert np.array_equal(found.train_image_BYXZ, colour.astype(np.float32))
    assert found.evaluation_image_BYXZ.dtype == found.train_image_BYXZ.dtype == np.float32
    grey = arrays()["x_train"].astype(np.int64)
    assert images.load(npz(tmp_path / "b.npz", x_train=grey)).train_image_BYXZ.dtype == np.uint8
    assert images.load(npz(tmp_path / "b.npz", x_train=grey - 1)).train_image_BYXZ.min() == grey.min() - 1


@pytest.mark.parametrize("shape", [(5, 3, 5), (1, 6, 3), (3, 3, 4), (28, 28, 1), (5, 5, 7)])
def test_channels_that_come_last_are_read(tmp_path, shape):
    x = np.zeros((2, *shape), np.uint8)
    assert images._pixels("x", x).shape == x.shape


def test_labels_may_be_a_column(tmp_path):
    given = arrays()
    found = images.load(npz(tmp_path / "a.npz", y_train=given["y_train"][:, None], y_test=given["y_test"][:, None]))
    assert np.array_equal(found.train_label_B, given["y_train"])
    assert np.array_equal(found.evaluation_label_B, given["y_test"])


def whole(path, **changed):
    """One part, or a set that is to be split."""
    given = arrays()
    np.savez(path, **({"x": given["x_train"], "y": given["y_train"]} | changed))
    return str(path)


def test_labels_from_1_on_are_refused(tmp_path):
    """Not taken for one class more. But one of the parts may lack the class 0."""
    given = arrays()
    one = {name: given[name] + 1 for name in ("y_train", "y_test")}
    for source in (npz(tmp_path / "a.npz", **one), whole(tmp_path / "b.npz", y=one["y_train"])):
        with pytest.raises(errors.UserError, match="the smallest label is 1, .* subtract 1 from all labels"):
            images.load(source)
    found = images.load(npz(tmp_path / "a.npz", y_train=np.maximum(given["y_train"], 1)))
    assert len(found.classes) == C and 0 not in found.train_label_B and 0 in found.evaluation_label_B


def test_labels_below_0_only_are_refused(tmp_path):
    with pytest.raises(errors.UserError, match=r"the label -1 is out of range: classes are counted from 0$"):
        images.load(whole(tmp_path / "a.npz", y=-1 - np.arange(TRAIN)))


def image_section(**values):
    return tiny.settings("vision", **{f"image__{key}": str(value) for key, value in values.items()}).image


def test_classes_without_a_training_image_are_told(tmp_path):
    y = arrays()["y_train"]
    source = npz(tmp_path / "a.npz", y_train=np.where(y == 1, 0, y), y_test=np.ones(EVALUATION, int))
    data = images.configured(image_section(source=source), data_dir="")
    assert data.classes == ("0", "1", "2", "3")
    assert data.said.splitlines() == [
        f"{source}: by their names, x_train to train on; x_test to evaluate; all else left alone",
        f"{source}: 11 images to train on, 7 to evaluate, 4 classes; no image to train on is of 1 of them: 1",
    ]
    source = whole(tmp_path / "b.npz", x=np.arange(60).reshape(20, 3, 1), y=np.arange(20) // 10 * 19)
    lines = images.configured(image_section(source=source), data_dir="").said.splitlines()
    assert lines[0] == f"{source}: split by content"
    assert lines[1].endswith(" of 18 of them: 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, ...")
    said = images.configured(image_section(), data_dir="").said
    assert said == "digits: 1,463 images to train on, 334 to evaluate, 10 classes"


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


# Examples.


def test_statistics_are_those_of_each_channel(monkeypatch):
    monkeypatch.setattr(images, "CHUNK", 4)  # 11 images in three parts
    image = np.random.default_rng(0).integers(0, 256, (TRAIN, Y, X, 2), np.uint8)
    image[..., 1] = 7
    mean, std = images.statistics(image)
    assert mean.dtype == std.dtype == np.float32
    np.testing.assert_allclose(mean, image.mean((0, 1, 2)), rtol=1e-6)
    np.testing.assert_allclose(std, [image[..., 0].std(), 1], rtol=1e-6)


def plain(image, **settings):
    label = np.arange(len(image), dtype=np.int32)
    return images.examples(image, label, mean_Z=np.float32([0]), std_Z=np.float32([1]), **settings)


def test_examples_are_normalised():
    image = np.random.default_rng(0).integers(0, 256, (TRAIN, Y, X, 2), np.uint8)
    label = (np.arange(TRAIN) % C).astype(np.int32)
    mean, std = images.statistics(image)
    fetch, n = images.examples(image, label, mean_Z=mean, std_Z=std)
    batch = fetch(np.array([10, 2, 2]), np.random.default_rng(0))
    assert n == TRAIN and batch["label_B"].tolist() == [2, 2, 2] and batch["weight_B"].tolist() == [1, 1, 1]
    assert [batch[name].dtype for name in ("image_BYXZ", "label_B", "weight_B")] == [np.float32, np.int32, np.float32]
    np.testing.assert_allclose(batch["image_BYXZ"] * std + mean, image[[10, 2, 2]], atol=1e-3)


@hypothesis.given(st.floats(0, 2.9), st.integers(0, 2**32))
@hypothesis.settings(deadline=None)
def test_a_moved_image_is_the_image_moved(shift, seed):
    image = np.random.default_rng(0).integers(1, 256, (TRAIN, Y, X, 2), np.uint8)
    fetch, _ = plain(image, shift=shift)
    moved = fetch(np.arange(TRAIN), np.random.default_rng(seed))["image_BYXZ"]
    offset_2B = np.random.default_rng(seed).uniform(-shift, shift, (2, TRAIN)) if shift else np.zeros((2, TRAIN))
    assert moved.shape == image.shape and moved.dtype == np.float32
    for b in range(TRAIN):
        offset = (*offset_2B[:, b], 0)
        expected = ndimage.shift(image[b].astype(np.float64), offset, order=1, mode="grid-constant")
        np.testing.assert_allclose(moved[b], expected, atol=1e-3)


def test_offsets_are_uniform_and_none_is_shared():
    n, shift = 5003, 1.5
    image = np.zeros((n, 5, 5, 1), np.uint8)
    image[:, 2, 2] = 1
    fetch, _ = plain(image, shift=shift)
    moved = fetch(np.arange(n), np.random.default_rng(0))["image_BYXZ"][..., 0]
    down, right = moved.sum(2) @ np.arange(-2, 3), moved.sum(1) @ np.arange(-2, 3)  # centres of mass: the offsets
    for offset in (down, right):
        assert abs(offset).max() <= shift and abs(offset.mean()) < 5 * shift / math.sqrt(3 * n)
        assert abs(offset.std() - shift / math.sqrt(3)) < 0.03 and len(np.unique(offset.round(6))) > n / 2
    assert abs(np.corrcoef(down, right)[0, 1]) < 5 / math.sqrt(n)


def test_images_stay_in_place_without_a_generator_and_the_border_is_background():
    image = np.full((TRAIN, Y, X, 1), 9, np.uint8)
    fetch, n = plain(image, shift=2)
    assert (batches.evaluation(fetch, n=n, batch=4)[0]["image_BYXZ"] == 9).all()
    label = np.zeros(TRAIN, np.int32)
    fetch, _ = images.examples(image, label, mean_Z=np.float32([4]), std_Z=np.float32([2]), shift=2)
    moved = fetch(np.arange(TRAIN), np.random.default_rng(0))["image_BYXZ"]
    assert moved.min() >= -2.0 and moved.min() < -1.0 and np.isclose(moved.max(), 2.5)  # (0 - 4) / 2, (9 - 4) / 2


def test_a_shift_leaves_something_to_see():
    image = np.ones((TRAIN, Y, X, 1), np.uint8)
    for shift in (-1, X):
        with pytest.raises(errors.UserError, match=f"5 x 3 pixels.*{shift}"):
            plain(image, shift=shift)
    assert plain(image, shift=X - 1)[1] == TRAIN


DATA = os.environ.get("TFM_DATA", "")  # read before a test hides it


@pytest.mark.skipif(not os.path.isdir(os.path.join(DATA, "fashion-mnist")), reason="$TFM_DATA has no fashion-mnist")
def test_fashion_mnist_has_its_known_numbers():
    found = images.load("fashion_mnist", data_dir=DATA)
    assert found.train_image_BYXZ.shape == (60_000, 28, 28, 1)
    assert found.evaluation_image_BYXZ.shape == (10_000, 28, 28, 1)
    mean, std = images.statistics(found.train_image_BYXZ)
    assert (round(float(mean[0]) / 255, 4), round(float(std[0]) / 255, 4)) == (0.2860, 0.3530)
    assert np.bincount(found.evaluation_label_B).tolist() == [1000] * 10


def test_the_cache_is_the_last_place(tmp_path, monkeypatch):
    assert download.places("~") == [download.pathlib.Path.home(), tmp_path / "cache" / "tfm"]
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert download.places() == [download.pathlib.Path.home() / ".cache" / "tfm"]

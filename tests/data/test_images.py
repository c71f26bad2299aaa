"""Labelled images of named sets and of files: split by their names or contents, and normalised."""

import gzip
import math
import os
import pathlib

import numpy as np
import pytest
import small_files
from errors import raises
from small_files import EVALUATION, TRAIN, C, X, Y, archive, arrays, hide_local_data, idx, idx_folder, npz  # noqa: F401

from experiments.config import errors
from experiments.data import download, images

# Data sets


@pytest.mark.parametrize(("pack", "end"), [(bytes, ""), (gzip.compress, ".gz")])
def test_a_folder_and_an_archive_give_the_same_images(tmp_path, pack, end):
    for source in (idx_folder(tmp_path / "idx", pack=pack, end=end), archive(tmp_path / "a.npz")):
        data = images.load(source)
        assert data.name == source and data.classes == ("0", "1", "2", "3")
        for array, expected in zip(data[1:5], arrays().values(), strict=True):
            assert np.array_equal(array, expected if expected.ndim == 1 else expected[..., None])
        assert [array.dtype for array in data[1:5]] == [np.uint8, np.int32] * 2


@pytest.mark.parametrize(("name", "folder"), [("mnist", "mnist"), ("fashion_mnist", "fashion-mnist")])
def test_folders_of_named_sets_are_searched_in_order(tmp_path, monkeypatch, name, folder):
    monkeypatch.setenv("TFM_DATA", str(tmp_path / "env"))
    with raises(errors.UserError, "t10k-labels-idx1-ubyte", tmp_path / "env" / folder):
        images.load(name)
    for number, place in enumerate(("cache/tfm", "env")):
        idx_folder(tmp_path / place / folder, x_train=np.full((TRAIN, Y, X), number, np.uint8))
        data = images.load(name)
        assert (data.train_image_BYXZ == number).all() and len(data.classes) == 10 and data.lines == []
    assert data.classes[9] == {"mnist": "9", "fashion_mnist": "Ankle boot"}[name]
    (tmp_path / "env" / folder / images.FILES[1]).unlink()
    with raises(errors.UserError, "train-labels-idx1-ubyte"):
        images.load(name)


def test_home_and_cache_folders_are_places_of_data(tmp_path, monkeypatch):
    monkeypatch.setenv("TFM_DATA", "~")
    assert download.places() == [pathlib.Path.home(), tmp_path / "cache" / "tfm"]
    monkeypatch.delenv("TFM_DATA")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert download.places() == [pathlib.Path.home() / ".cache" / "tfm"]


def test_colours_and_numbers_beyond_bytes_are_read(tmp_path):
    colour = np.random.default_rng(0).normal(size=(TRAIN, Y, X, 3))
    data = images.load(archive(tmp_path / "a.npz", x_train=colour, x_test=colour[:EVALUATION].astype(">f4")))
    assert data.train_image_BYXZ.shape == (TRAIN, Y, X, 3)
    assert np.array_equal(data.train_image_BYXZ, colour.astype(np.float32))
    assert data.evaluation_image_BYXZ.dtype == data.train_image_BYXZ.dtype == np.float32
    grey = arrays()["x_train"].astype(np.int64)
    assert images.load(archive(tmp_path / "b.npz", x_train=grey)).train_image_BYXZ.dtype == np.uint8
    for shifted_BYX in (grey - grey.min() - 1, grey - grey.max() + 256):  # numbers that do not fit into a byte
        data = images.load(archive(tmp_path / "b.npz", x_train=shifted_BYX))
        assert data.train_image_BYXZ.dtype == np.float32 and np.array_equal(data.train_image_BYXZ[..., 0], shifted_BYX)


@pytest.mark.parametrize("shape", [(5, 3, 5), (1, 6, 3), (3, 3, 4), (28, 28, 1), (5, 5, 7)])
def test_channels_that_come_last_are_read(tmp_path, shape):
    x = np.arange(2 * math.prod(shape), dtype=np.uint16).reshape(2, *shape)
    data = images.load(write_single_part(tmp_path / "a.npz", x=x, y=np.array([[0], [0]])))  # labels may be a column
    assert data.train_image_BYXZ.shape == data.evaluation_image_BYXZ.shape == (1, *shape)
    assert data.train_label_B.tolist() == data.evaluation_label_B.tolist() == [0]


def write_single_part(path, **changes):
    """Write an .npz file with one split, or with a set that the project must split."""
    small = arrays()
    path.write_bytes(npz(**({"x": small["x_train"], "y": small["y_train"]} | changes)))
    return str(path)


def test_labels_that_start_at_1_are_refused(tmp_path):
    """They do not mean one more class. But the evaluation part may lack the class 0."""
    small = arrays()
    from_one = {name: small[name] + 1 for name in ("y_train", "y_test")}
    single = write_single_part(tmp_path / "b.npz", y=from_one["y_train"])
    for source in (archive(tmp_path / "a.npz", **from_one), single):
        with raises(errors.UserError, source, "from 1 to 4", "Subtract 1"):
            images.load(source)
    data = images.load(archive(tmp_path / "a.npz", y_test=np.maximum(small["y_test"], 1)))
    assert len(data.classes) == C and 0 in data.train_label_B and 0 not in data.evaluation_label_B
    with raises(errors.UserError, "a.npz", '"0"'):
        images.load(archive(tmp_path / "a.npz", y_train=np.maximum(small["y_train"], 1)))


def test_lines_describe_the_parts_and_the_classes_without_a_training_image(tmp_path):
    y = arrays()["y_train"]
    source = archive(tmp_path / "a.npz", y_train=np.where(y == 1, 0, y), y_test=np.zeros(EVALUATION, int))
    assert images.load_described(source).lines == [
        f"{source}: by their names, x_train with y_train to train on; x_test with y_test to evaluate; "
        "all else is not used",
        f"{source}: 11 images to train on, 7 to evaluate, 4 classes (1 without an image to train on: 1)",
        f"{source}: classes: 0, 1, 2, 3",
    ]
    source = write_single_part(tmp_path / "b.npz", x=np.arange(60).reshape(20, 3, 1), y=np.arange(20) // 10 * 19)
    split, counts, _ = images.load_described(source).lines
    unused = " (18 without an image to train on: 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, ...)"
    assert "split by content" in split and counts.endswith(unused)
    digits = images.load_described("digits")
    assert digits.lines[0] == "digits: 1,463 images to train on, 334 to evaluate, 10 classes"
    assert digits.train_image_BYXZ.shape[1:] == (8, 8, 1) and digits.train_image_BYXZ.max() == 16
    assert digits.classes == tuple("0123456789") and set(digits.evaluation_label_B) == set(range(10))


# Splits


@pytest.mark.parametrize("valid", ["valid", "val", "dev", "validation"])
def test_files_and_arrays_are_used_by_their_names(tmp_path, valid):
    """The validation part is evaluated if there is one; then the test part is unused."""
    pixels = {name: np.full((TRAIN, Y, X), number) for number, name in enumerate(["train", "test", valid])}
    pixels["train"][:, 0, 0] = -np.arange(TRAIN)
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "more.npz").write_bytes(b"left alone")
    for number, name in enumerate(pixels):
        write_single_part(folder / f"{name}.npz", x=pixels[name])
        data = images.load(str(folder))
        assert data.train_image_BYXZ.max() == 0 and (number or data.lines == ["split by content"])
        assert not number or (data.evaluation_image_BYXZ == number).all() and len(data.evaluation_label_B) == TRAIN
    line = "by their names, {0}train{1} to train on; {0}" + valid + "{1} to evaluate; all else is not used"
    assert data.name == str(folder) and data.lines == [line.format(f"{folder}/", ".npz")]
    three = {f"x_{name}": image for name, image in pixels.items()}
    three |= {f"y_{name}": arrays()["y_train"] for name in pixels}
    data = images.load(archive(tmp_path / "a.npz", **three))
    assert (data.evaluation_image_BYXZ == 2).all() and data.lines == [
        f"by their names, x_train with y_train to train on; x_{valid} with y_{valid} to evaluate; all else is not used"
    ]
    source = idx_folder(tmp_path / "idx")
    before = images.load(source)
    write_single_part(tmp_path / "idx" / f"{valid}.npz")  # other files next to IDX files are not read
    for array, expected in zip(images.load(source)[1:5], before[1:5], strict=True):
        np.testing.assert_array_equal(array, expected)
    (folder / "train.npz").unlink()
    with raises(errors.UserError, folder, "train.npz"):
        images.load(str(folder))


def test_a_single_part_is_split_by_content(tmp_path):
    x = np.random.default_rng(0).integers(0, 256, (1009, Y, X), np.uint8)
    x[500:600] = x[:100]  # repeated images
    y = np.arange(1009) % 7
    data = images.load(write_single_part(tmp_path / "a.npz", x=x, y=y))
    train, held_out = ([image.tobytes() for image in data[i]] for i in (1, 3))
    rows = zip(train + held_out, [*data.train_label_B, *data.evaluation_label_B], strict=True)
    assert sorted(rows) == sorted((image.tobytes(), label) for image, label in zip(x, y, strict=True))
    assert not {*train} & {*held_out} and abs(len({*held_out}) / 909 - 0.2) < 5 * math.sqrt(0.16 / 909)
    reverse = images.load(write_single_part(tmp_path / "b.npz", x=x[::-1], y=y[::-1]))
    assert np.array_equal(reverse.evaluation_label_B, data.evaluation_label_B[::-1])


RANDOM = np.random.default_rng(0)
COLOUR = RANDOM.integers(0, 250, (60, Y, X, 3)).astype(np.uint8) // np.uint8([1, 2, 4])
GREY = RANDOM.integers(0, 256, (60, Y, X)).astype(np.uint8)


MIXED = np.concatenate([GREY[:3], GREY[3:6] // 2, GREY[33:57], GREY[:3]])[:30]
REPEATED = np.concatenate([GREY[:7], GREY[30:53]]).astype(np.int64)
PARTS = [  # (training images, held-out images, a word of each warning; None: refused with their largest numbers)
    (GREY[:30], GREY[30:] / 255, None),
    (GREY[:30] / 255, GREY[30:], None),
    (GREY[:30].astype(np.float32), GREY[30:] // 128, None),
    (GREY[:30] / 127.5 - 1, GREY[30:] / 255, None),
    ((GREY[:30] - 128.0) / 70, GREY[30:] / 255, None),
    (GREY[:30], GREY[30:].astype(np.float64), ["types uint8 and float64"]),
    (GREY[:30].astype(np.uint16) * 257, GREY[30:], ["types uint16 and uint8", "different scales"]),
    (GREY[:30] // 4, 255 - GREY[30:] // 4, ["different scales"]),
    (COLOUR[:30], COLOUR[30:, ..., ::-1], ["opposite order"]),
    (GREY[:30], MIXED, ["3 of 30"]),
    (GREY[:30], REPEATED, ["types uint8 and int64", "7 of 30"]),
    (GREY[:30], GREY[30:], []),
    (GREY[:30] / 255, GREY[30:] / 255, []),
    (COLOUR[:30], COLOUR[30:], []),
]


@pytest.mark.parametrize(("train", "held_out", "words"), PARTS)
def test_parts_that_differ_or_share_images_are_refused_or_named(tmp_path, train, held_out, words):
    y = np.arange(30) % C
    source = archive(tmp_path / "a.npz", x_train=train, y_train=y, x_test=held_out, y_test=y)
    if words is None:
        with raises(errors.UserError, source, f"{train.max():g}", f"{held_out.max():g}"):
            images.load(source)
        return
    data = images.load_described(source)
    warnings = [line for line in data.lines if "warning: " in line]
    assert len(warnings) == len(words) and all(word in line for word, line in zip(words, warnings, strict=True))
    assert data.train_image_BYXZ.dtype == data.evaluation_image_BYXZ.dtype
    np.testing.assert_allclose(data.evaluation_image_BYXZ.reshape(held_out.shape), held_out)


# Examples


def test_examples_are_normalised_by_the_statistics_of_each_channel():
    image = np.random.default_rng(0).integers(0, 256, (images.CHUNK + 5, 2, 2, 2), np.uint8)  # more than one chunk
    image[..., 1] = 7
    mean, std = images.statistics(image)
    assert mean.dtype == std.dtype == np.float32
    np.testing.assert_allclose(mean, image.mean((0, 1, 2)), rtol=1e-6)
    np.testing.assert_allclose(std, [image[..., 0].std(), 1], rtol=1e-6)
    label = (np.arange(len(image)) % C).astype(np.int32)
    fetch, n = images.examples(image, label, mean_Z=mean, std_Z=std)
    batch = fetch(np.array([10, 2, 2]), np.random.default_rng(0))
    assert n == len(image) and batch["label_B"].tolist() == [2, 2, 2] and batch["weight_B"].tolist() == [1, 1, 1]
    assert [batch[name].dtype for name in ("image_BYXZ", "label_B", "weight_B")] == [np.float32, np.int32, np.float32]
    np.testing.assert_allclose(batch["image_BYXZ"] * std + mean, image[[10, 2, 2]], atol=1e-3)


# Files


@pytest.mark.parametrize("dtype", sorted(small_files.CODES))
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


def test_other_files_and_parts_that_do_not_fit_are_refused(tmp_path):
    source = idx_folder(tmp_path / "idx", y_train=np.zeros(TRAIN + 1, np.uint8))
    small_files.write(tmp_path, **{"a.npz": npz(x=np.zeros(3), label=np.zeros(3)), "b/a.txt": b"text"})
    for path, words in (
        (source, ["training part", TRAIN, TRAIN + 1]),
        (tmp_path / "a.npz", ["(x, y)", "x, label"]),
        (tmp_path / "b", ["1 .txt"]),
        (tmp_path / "b" / "a.txt", []),
    ):
        with raises(errors.UserError, path, *words):
            images.load(str(path))


DATA = os.environ.get("TFM_DATA", "")  # read before a fixture hides it


@pytest.mark.skipif(not os.path.isdir(os.path.join(DATA, "fashion-mnist")), reason="$TFM_DATA has no fashion-mnist")
def test_fashion_mnist_has_its_published_statistics(monkeypatch):
    monkeypatch.setenv("TFM_DATA", DATA)
    data = images.load("fashion_mnist")
    assert data.train_image_BYXZ.shape == (60_000, 28, 28, 1)
    assert data.evaluation_image_BYXZ.shape == (10_000, 28, 28, 1)
    mean, std = images.statistics(data.train_image_BYXZ)
    assert (round(float(mean[0]) / 255, 4), round(float(std[0]) / 255, 4)) == (0.2860, 0.3530)
    assert np.bincount(data.evaluation_label_B).tolist() == [1000] * 10

"""Labelled images of named sets and of files: in two parts, normalised and moved."""

import math
import os

import hypothesis
import numpy as np
import pytest
import tiny
from hypothesis import strategies as st
from image_sets import EVALUATION, TRAIN, C, X, Y, arrays, elsewhere, idx_folder, npz  # noqa: F401  a fixture too
from scipy import ndimage

from experiments.data import download, image_files, images
from experiments.engine import batches, errors

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
    data = images.configured(image_section(source=source))
    assert data.classes == ("0", "1", "2", "3")
    assert data.said.splitlines() == [
        f"{source}: by their names, x_train to train on; x_test to evaluate; all else left alone",
        f"{source}: 11 images to train on, 7 to evaluate, 4 classes; no image to train on is of 1 of them: 1",
    ]
    source = whole(tmp_path / "b.npz", x=np.arange(60).reshape(20, 3, 1), y=np.arange(20) // 10 * 19)
    lines = images.configured(image_section(source=source)).said.splitlines()
    assert lines[0] == f"{source}: split by content"
    assert lines[1].endswith(" of 18 of them: 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, ...")
    said = images.configured(image_section()).said
    assert said == "digits: 1,463 images to train on, 334 to evaluate, 10 classes"


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

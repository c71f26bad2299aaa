"""Image files in folders of their classes: what part and class each is of; made alike, kept, refused by their names."""

import errno
import io
import os

import numpy as np
import pytest
from PIL import Image
from small_files import elsewhere, write  # noqa: F401  a fixture

from experiments.data import image_file, image_folder, images
from experiments.engine import disk, errors

Y, X = 5, 3


def pixels(b, shape=(Y, X, 3)):
    return np.random.default_rng(b).integers(0, 256, shape, np.uint8)


def packed(array, form="PNG", turned=1):
    """The file of an image that a camera says to be turned (orientation 6: by a quarter, to the right)."""
    file, exif = io.BytesIO(), Image.Exif()
    exif[image_file.ORIENTATION] = turned
    Image.fromarray(array).save(file, form, exif=exif)
    return file.getvalue()


def folder(path, *names):
    """Image b has the b-th of these names."""
    return str(write(path, **{name: packed(pixels(b)) for b, name in enumerate(names)}))


NAMES = ("cat/a.png", "cat/b.PNG", "dog house/a.png", "dog house/more/b.png")


@pytest.mark.parametrize(
    ("parts", "evaluated"), [(("train",), ""), (("Train", "test"), "test"), (("training", "val", "test"), "val")]
)
def test_names_of_folders_tell_parts_and_classes(tmp_path, parts, evaluated):
    left = ["more/cat/a.png", "readme.txt", "train/.cat/a.png", "train/cat/Thumbs.db"]
    every = [f"{part}/{name}" for part in parts for name in NAMES]
    source = folder(tmp_path / "set", *every, *left)
    data = images.load(source)
    assert data.classes == ("cat", "dog house") and data.values == (0.0, 255.0)
    label_of = {pixels(b).tobytes(): name.split("/")[1] for b, name in enumerate(every)}
    train, held = data.train_image_BYXZ, data.evaluation_image_BYXZ
    for image_BYXZ, label_B in ((train, data.train_label_B), (held, data.evaluation_label_B)):
        assert [data.classes[c] for c in label_B] == [label_of[image.tobytes()] for image in image_BYXZ]
    if evaluated:
        at = every.index(f"{evaluated}/{NAMES[0]}")
        np.testing.assert_array_equal(train, [pixels(b) for b in range(4)])
        np.testing.assert_array_equal(held, [pixels(b) for b in range(at, at + 4)])
        places = [os.path.join(source, part) for part in (parts[0], evaluated)]
        assert data.said == f"by their names, {places[0]} to train on; {places[1]} to evaluate; all else left alone"
    else:
        assert len(train) + len(held) == 4 and len(held) > 0 and data.said == "split by content"


def test_grey_images_have_one_channel_and_one_coloured_makes_all_have_three(tmp_path):
    grey = pixels(0, (Y, X))
    write(tmp_path, **{"a/1.png": packed(grey), "a/2.bmp": packed(grey[::-1], "BMP")})
    assert image_folder.load(str(tmp_path), 0)[0][0][0].shape == (2, Y, X, 1)
    write(tmp_path, **{"b/3.webp": packed(pixels(1), "WEBP")})
    ((image_BYXZ, label_B),) = image_folder.load(str(tmp_path), 0)[0]
    np.testing.assert_array_equal(image_BYXZ[0], np.broadcast_to(grey[..., None], (Y, X, 3)))
    assert image_BYXZ.shape == (3, Y, X, 3) and label_B.tolist() == [0, 0, 1]


def test_a_photograph_is_made_as_classify_makes_it(tmp_path):
    """Squashed, turned as its camera says, a large JPEG unpacked at a part of its size: the very same numbers."""
    smooth = np.add.outer(np.arange(300), np.arange(200))[..., None].astype(np.uint8) // np.uint8([1, 2, 3])
    turned = packed(np.rot90(smooth), "JPEG", turned=6)
    write(tmp_path / "set", **{"a/1.jpg": packed(smooth, "JPEG"), "a/2.jpeg": turned, "b/3.png": packed(pixels(0))})
    ((image_BYXZ, _),) = image_folder.load(str(tmp_path / "set"), 7)[0]
    assert image_BYXZ.shape == (3, 7, 7, 3)
    np.testing.assert_allclose(image_BYXZ[0].astype(int), image_BYXZ[1], atol=9)  # JPEG loses a little
    boxes = np.asarray(Image.fromarray(smooth).resize((7, 7), Image.Resampling.BOX), int)
    assert abs(image_BYXZ[0].astype(int) - boxes).mean() < 9
    data = images.load(str(tmp_path / "set"), 7)
    disk.write_json(tmp_path / "data.json", images.describe(data))
    like = image_file.expected(tmp_path, {}, Z=3, C=2)
    assert like["classes"] == ["a", "b"]
    found = [image_file.read(file, like)[0][0] for file in sorted((tmp_path / "set").glob("*/*"))]
    normal = dict(zip(("mean_Z", "std_Z"), images.statistics(data.train_image_BYXZ), strict=True))
    fetch, _ = images.examples(image_BYXZ, np.zeros(3, np.int32), **normal)
    np.testing.assert_allclose(found, fetch(np.arange(3), None)["image_BYXZ"], atol=1e-5)


def test_many_images_are_kept_and_read_again_only_when_a_file_changes(tmp_path, monkeypatch):
    monkeypatch.setattr(image_folder, "KEPT", 1)
    source = folder(tmp_path / "set", *(f"{part}/{name}" for part in ("train", "test") for name in NAMES))
    looked = []
    opened = image_file.opened
    monkeypatch.setattr(image_file, "opened", lambda file: looked.append(file) or opened(file))

    def load(size=0):
        looked.clear()
        data = images.load(source, size)
        return len(looked) // 2, data.train_image_BYXZ, data.evaluation_image_BYXZ

    monkeypatch.setattr(image_folder, "CHUNK", 3)
    first, again = load(), load()
    assert first[0] == 8 and again[0] == 0 and load(4)[0] == 8
    for a, b in zip(first[1:], again[1:], strict=True):
        np.testing.assert_array_equal(a, b)
    (tmp_path / "set" / "train" / NAMES[0]).write_bytes(packed(pixels(9)))
    n, train, _ = load()
    assert n == 8 and np.array_equal(train[0], pixels(9))
    for file in (tmp_path / "cache" / "tfm" / "images").iterdir():
        file.write_bytes(file.read_bytes()[:-1])
    assert load()[0] == 8 and load()[0] == 0

    def full(content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(disk, "draft", full)
    with pytest.raises(errors.UserError, match=r"images/\w+.npy cannot be written: No space left"):
        load(3)


def test_what_cannot_be_made_alike_is_refused_by_name(tmp_path):
    source = folder(tmp_path / "set", *NAMES, "test/a.png")
    assert images.load(source).classes == ("cat", "dog house", "test")  # where none is called train

    def refused(sentence, size=0):
        with pytest.raises(errors.UserError, match=sentence):
            images.load(source, size)

    (tmp_path / "set" / "cat" / "c.png").write_bytes(packed(pixels(0, (4, 3))))
    refused(r"cat/c.png has 4 x 3 pixels, and \S*cat/a.png 5 x 3: --config.image.size=64, say, makes")
    assert images.load(source, 4).train_image_BYXZ.shape[1:] == (4, 4, 3)
    (tmp_path / "set" / "cat" / "c.png").write_bytes(packed(pixels(0))[:-40])
    refused("cat/c.png is no image that can be read", 4)
    (tmp_path / "set" / "e.png").write_bytes(packed(pixels(0)))
    refused("set/e.png lies in no folder of a class: let .*/set have one for each class")
    with pytest.raises(errors.UserError, match="image.size = 7 is for image files.* digits are 8 x 8, and stay so"):
        images.load("digits", 7)


def test_a_data_set_gives_the_images_that_a_folder_of_them_gives(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    datasets.disable_progress_bars()
    names = [f"{part}/{name}" for part in ("train", "test") for name in NAMES[:3]]
    right = images.load(folder(tmp_path / "set", *names))
    kinds = datasets.Features(pixels=datasets.Image(), kind=datasets.ClassLabel(names=["cat", "dog house"]))
    made = {}
    for part, first in (("train", 0), ("test", 3)):
        rows = {"pixels": [Image.fromarray(pixels(b)) for b in range(first, first + 4)], "kind": [0, 0, 1, -1]}
        made[part] = datasets.Dataset.from_dict(rows, features=kinds)  # the last one has no class
    datasets.DatasetDict(made).save_to_disk(tmp_path / "saved")
    for source in ("saved", "set"):
        data = images.load(f"hub:{tmp_path / source}")
        for found, expected in zip(data[1:6], right[1:6], strict=True):
            np.testing.assert_array_equal(found, expected)
    datasets.DatasetDict(full=made["train"]).save_to_disk(tmp_path / "one")
    assert images.load(f"hub:{tmp_path / 'one'}").classes == ("cat", "dog house")
    made["train"].remove_columns("kind").save_to_disk(tmp_path / "none")
    with pytest.raises(
        errors.UserError, match=r"none \(train\) needs a column Image and one ClassLabel, and has pixels"
    ):
        images.load(f"hub:{tmp_path / 'none'}")

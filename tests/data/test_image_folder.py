"""Image files in folders of their classes: what part and class each is of; made alike, kept, refused by their names."""

import os

import numpy as np
import pytest
from errors import raises
from PIL import Image
from small_files import X, Y, elsewhere, image_folder as folder, packed, pixels, write  # noqa: F401  a fixture

from experiments.data import classes, files, image_file, image_folder, images
from experiments.engine import disk, errors

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
        how = f"by their names, {places[0]} to train on; {places[1]} to evaluate; all else left alone"
    else:
        assert len(train) + len(held) == 4 and len(held) > 0
        how = "split by content"
    assert data.lines[0] == how and "1 .db" in data.lines[1] and "1 .txt" in data.lines[1]
    assert f"left out, in other folders or splits: {5 if len(parts) == 3 else 1}" in data.lines[2]


CLASSES = ("cat", "dog")


@pytest.mark.parametrize(
    ("train", "held_out"),
    [
        ("training_set", "test_set"),
        ("seg_train", "seg_test"),
        ("seg_train/seg_train", "seg_test/seg_test"),
        ("train2017", "val2017"),
        ("train_images", "val_images"),
        ("Training Images", "Test Images"),
        ("TrainingSet", "ValidationSet"),
        ("set/train", "set/test"),
    ],
)
def test_folders_of_parts_have_many_names_and_one_level_more(tmp_path, train, held_out):
    names = [f"{part}/{name}/{n}.png" for part in (train, held_out) for name in CLASSES for n in range(2)]
    data = images.load(folder(tmp_path, *names, *(["seg_pred/seg_pred/a.png"] if "seg" in train else [])))
    assert data.classes == CLASSES and data.train_label_B.tolist() == data.evaluation_label_B.tolist() == [0, 0, 1, 1]
    np.testing.assert_array_equal(data.train_image_BYXZ, [pixels(b) for b in range(4)])
    np.testing.assert_array_equal(data.evaluation_image_BYXZ, [pixels(b) for b in range(4, 8)])
    assert str(tmp_path / train) in data.lines[0] and str(tmp_path / held_out) in data.lines[0]


@pytest.mark.parametrize(
    ("folders", "found"),
    [
        (["bus", "car", "train"], ("bus", "car", "train")),
        (["airport", "test_tube", "train_station"], ("airport", "test_tube", "train_station")),
        (["bus", "car", "train/steam"], None),
        (["train/cat", "train/train", "test/cat", "test/train"], ("cat", "train")),
        (["PetImages/Cat", "PetImages/Dog"], ("Cat", "Dog")),
        (["train/cat", "train/dog"], ("cat", "dog")),
        (["train", "test"], None),
        (["human/a", "human/b", "validation-human/a", "validation-human/b"], None),
        (["cat/train", "cat/test", "dog/train", "dog/test"], None),
        (["train/a", "train/b", "test"], None),
        (["2", "10", "1"], ("1", "2", "10")),
        (["2.0", "10.0", "-1"], ("-1", "2.0", "10.0")),
        (["2", "10", "b"], ("10", "2", "b")),
    ],
)
def test_what_may_be_a_part_or_a_class_is_told_by_the_folders_or_refused(tmp_path, folders, found):
    source = folder(tmp_path, *(f"{name}/{n}.png" for name in folders for n in range(2)))
    if found is None:
        with raises(errors.UserError, tmp_path):
            images.load(source)
    else:
        assert images.load(source).classes == found


def test_files_and_links_that_are_left_out_are_counted_and_no_class_is_lost(tmp_path):
    source = folder(tmp_path / "set", *(f"{name}/{n}.png" for name in CLASSES for n in range(3)))
    write(tmp_path / "set", **{"cat/a.txt": b"a", "dog/b.txt": b"b", "dog/c.heic": b"c", "labels/d.txt": b"d"})
    os.symlink(tmp_path / "set" / "cat", tmp_path / "set" / "dog" / "link")
    lines = images.load_described(source).lines
    assert any("3 .txt" in line and "1 .heic" in line for line in lines)
    assert any("links" in line and " 1, " in line and "dog/link" in line for line in lines)
    write(tmp_path / "set", **{"bird/e.heic": b"e"})
    with raises(errors.UserError, "bird/e.heic"):
        images.load(source)
    write(tmp_path / "set", **{"bird/f.png": packed(pixels(99))})
    assert images.load(source).classes == ("bird", *CLASSES)


def test_classes_that_differ_by_spaces_or_case_are_warned_of_and_many_are_cut(tmp_path):
    source = folder(tmp_path, *(f"{name}/{n}.png" for name in ("Cat", "cat", "cat ", "dog\x1b[31m") for n in range(2)))
    said = "\n".join(images.load_described(source).lines)
    assert "'Cat', 'cat', 'cat ' differ" in said and "\x1b" not in said and "dog\\x1b" in said
    (line,) = classes.describe([str(c) for c in range(100_000)])
    assert line.startswith("classes: 0, 1, 2, ") and "11" in line and "12" not in line and "100,000" in line


@pytest.mark.parametrize("form", ["GIF", "TIFF", "WEBP", "JPEG", "PPM", "BMP"])
def test_what_classify_reads_is_read_in_training(tmp_path, form):
    end = form.lower().replace("jpeg", "jfif")
    write(tmp_path, **{f"{'ab'[b % 2]}/{b}.{end}": packed(pixels(b), form) for b in range(4)})
    data = images.load(str(tmp_path))
    assert len(data.train_label_B) + len(data.evaluation_label_B) == 4 and data.train_image_BYXZ.shape[1:] == (Y, X, 3)


def test_the_same_files_are_held_out_at_every_size_and_equal_ones_stay_together(tmp_path):
    names = [f"{'ab'[b % 2]}/{b}.png" for b in range(60)]
    folder(tmp_path, *names)
    for b in range(60):
        (tmp_path / names[b]).with_name(f"copy{b}.png").write_bytes((tmp_path / names[b]).read_bytes())
    data_of_files = images.load(str(tmp_path))
    held = {image.tobytes() for image in data_of_files.evaluation_image_BYXZ}
    assert 0 < len(held) < 30 and not held & {image.tobytes() for image in data_of_files.train_image_BYXZ}
    assert len(data_of_files.evaluation_label_B) == 2 * len(held)
    for size in (2, 4, 9):
        data = images.load(str(tmp_path), size)
        assert data.evaluation_label_B.tolist() == data_of_files.evaluation_label_B.tolist()
        expected = [b for b in range(60) if pixels(b).tobytes() in held]
        found = image_folder.read(
            [file for file in files.folder(tmp_path, ()) if file.inside.name in {f"{b}.png" for b in expected}], size
        )
        assert {image.tobytes() for image in found} == {image.tobytes() for image in data.evaluation_image_BYXZ}


@pytest.mark.parametrize("size", [-1, 8193])
def test_a_size_that_no_image_has_is_refused_by_its_setting(tmp_path, size):
    for source in (folder(tmp_path, *NAMES), "digits"):
        with raises(errors.UserError, "image.size", f"{size:,}"):
            images.load(source, size)


def test_grey_images_have_one_channel_and_one_coloured_makes_all_have_three(tmp_path):
    grey = pixels(0, (Y, X))
    write(tmp_path, **{"a/1.png": packed(grey), "a/2.bmp": packed(grey[::-1], "BMP")})
    assert [image_BYXZ.shape for image_BYXZ, _ in image_folder.load(str(tmp_path), 0).arrays] == [(1, Y, X, 1)] * 2
    write(tmp_path, **{"b/3.webp": packed(pixels(1), "WEBP")})
    first, second = image_folder.load(str(tmp_path), 0).arrays
    image_BYXZ, label_B = (np.concatenate(pair) for pair in zip(first, second, strict=True))
    colour = np.broadcast_to(grey[..., None], (Y, X, 3))
    assert [c for image, c in zip(image_BYXZ, label_B, strict=True) if np.array_equal(image, colour)] == [0]
    assert image_BYXZ.shape == (3, Y, X, 3) and sorted(label_B) == [0, 0, 1]


def test_a_photograph_is_made_as_classify_makes_it(tmp_path):
    """Squashed, turned as its camera says, a large JPEG unpacked at a part of its size: the very same numbers."""
    smooth = np.add.outer(np.arange(300), np.arange(200))[..., None].astype(np.uint8) // np.uint8([1, 2, 3])
    turned = packed(np.rot90(smooth), "JPEG", turned=6)
    write(tmp_path / "set", **{"a/1.jpg": packed(smooth, "JPEG"), "a/2.jpeg": turned, "b/3.png": packed(pixels(0))})
    image_BYXZ = image_folder.read(files.folder(tmp_path / "set", ()), 7)
    assert image_BYXZ.shape == (3, 7, 7, 3)
    np.testing.assert_allclose(image_BYXZ[0].astype(int), image_BYXZ[1], atol=9)  # JPEG loses a little
    boxes = np.asarray(Image.fromarray(smooth).resize((7, 7), Image.Resampling.BOX), int)
    assert abs(image_BYXZ[0].astype(int) - boxes).mean() < 9
    data = images.load(str(tmp_path / "set"), 7)
    disk.write_json(tmp_path / "data.json", images.describe(data))
    like = image_file.load_format(tmp_path, {}, Z=3, C=2)
    assert like["classes"] == ["a", "b"]
    found = [image_file.read(file, like)[0][0] for file in sorted((tmp_path / "set").glob("*/*"))]
    normal = dict(zip(("mean_Z", "std_Z"), images.statistics(data.train_image_BYXZ), strict=True))
    fetch, _ = images.examples(image_BYXZ, np.zeros(3, np.int32), **normal)
    np.testing.assert_allclose(found, fetch(np.arange(3), None)["image_BYXZ"], atol=1e-5)


def test_what_cannot_be_made_alike_is_refused_by_name(tmp_path):
    source = folder(tmp_path / "set", *NAMES, "test/a.png")
    assert images.load(source).classes == ("cat", "dog house", "test")  # where none is called train

    def check_refusal(*words, size=0):
        with raises(errors.UserError, *words):
            images.load(source, size)

    (tmp_path / "set" / "cat" / "c.png").write_bytes(packed(pixels(0, (4, 3))))
    check_refusal("cat/c.png", "4 x 3", "5 x 3", "image.size")
    assert images.load(source, 4).train_image_BYXZ.shape[1:] == (4, 4, 3)
    (tmp_path / "set" / "cat" / "c.png").write_bytes(packed(pixels(0))[:-40])
    check_refusal("cat/c.png", size=4)
    (tmp_path / "set" / "e.png").write_bytes(packed(pixels(0)))
    check_refusal("set/e.png")
    with raises(errors.UserError, "image.size = 7", "8 x 8"):
        images.load("digits", 7)


def test_a_data_set_gives_the_images_that_a_folder_of_them_gives(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    datasets.disable_progress_bars()
    names = [f"{part}/{name}" for part in ("train", "test") for name in NAMES[:3]]
    expected = images.load(folder(tmp_path / "set", *names))
    kinds = datasets.Features(pixels=datasets.Image(), kind=datasets.ClassLabel(names=["cat", "dog house"]))
    splits = {}
    for part, first in (("train", 0), ("test", 3)):
        rows = {"pixels": [Image.fromarray(pixels(b)) for b in range(first, first + 4)], "kind": [0, 0, 1, -1]}
        splits[part] = datasets.Dataset.from_dict(rows, features=kinds)  # the last one has no class
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "saved")
    for source in ("saved", "set"):
        data = images.load(f"hub:{tmp_path / source}")
        for array, right in zip(data[1:6], expected[1:6], strict=True):
            np.testing.assert_array_equal(array, right)
    datasets.DatasetDict(full=splits["train"]).save_to_disk(tmp_path / "one")
    assert images.load(f"hub:{tmp_path / 'one'}").classes == ("cat", "dog house")
    names = datasets.Features(pixels=datasets.Image(), kind=datasets.ClassLabel(names=["zebra", "10", "ant", "2"]))
    rows = {"pixels": [Image.fromarray(pixels(b)) for b in range(8)], "kind": [0, 1, 2, 3, 0, 1, 2, -1]}
    data_of_files = datasets.Dataset.from_dict(rows, features=names)
    datasets.DatasetDict(train=data_of_files, test=data_of_files.select(range(4))).save_to_disk(tmp_path / "order")
    data = images.load_described(f"hub:{tmp_path / 'order'}")
    assert data.classes == ("zebra", "10", "ant", "2") and data.evaluation_label_B.tolist() == [0, 1, 2, 3]
    assert any("split train: 1" in line for line in data.lines) and any("4 of 4" in line for line in data.lines)
    datasets.DatasetDict({"full": data_of_files, "more": data_of_files}).save_to_disk(tmp_path / "other")
    with raises(errors.UserError, "other", "train"):
        images.load(f"hub:{tmp_path / 'other'}")
    with monkeypatch.context() as patch:  # older versions of `datasets` cannot save an empty split of images
        patch.setattr(
            datasets, "load_from_disk", lambda folder: {"train": data_of_files.select([]), "test": data_of_files}
        )
        with raises(errors.UserError, "other"):
            images.load(f"hub:{tmp_path / 'other'}")
    splits["train"].remove_columns("kind").save_to_disk(tmp_path / "none")
    with raises(errors.UserError, "none (train)", "ClassLabel", "pixels"):
        images.load(f"hub:{tmp_path / 'none'}")

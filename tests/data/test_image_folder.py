"""Image files in folders of classes: the split, class and pixels of each image, and refused files."""

import contextlib
import errno
import mmap
import os
import types

import numpy as np
import pytest
from errors import raises
from PIL import Image
from small_files import X, Y, encode_image, hide_local_data, image_folder as folder, pixels, write  # noqa: F401  a fixture

from experiments.config import disk, errors
from experiments.data import classes as class_names, files as data_files, image_file, image_folder, images

NAMES = ("cat/a.png", "cat/b.PNG", "dog house/a.png", "dog house/more/b.png")


@pytest.mark.parametrize(
    ("parts", "evaluation"), [(("train",), ""), (("Train", "test"), "test"), (("training", "val", "test"), "val")]
)
def test_names_of_folders_define_parts_and_classes(tmp_path, parts, evaluation):
    unused_names = ["more/cat/a.png", "readme.txt", "train/.cat/a.png", "train/cat/Thumbs.db", "train/@eaDir/a.png"]
    names = [f"{part}/{name}" for part in parts for name in NAMES]
    source = folder(tmp_path / "set", *names, *unused_names)
    data = images.load(source)
    assert data.classes == ("cat", "dog house") and data.values == (0.0, 255.0)
    label_of = {pixels(b).tobytes(): name.split("/")[1] for b, name in enumerate(names)}
    for image_BYXZ, label_B in (data[1:3], data[3:5]):
        assert [data.classes[c] for c in label_B] == [label_of[image.tobytes()] for image in image_BYXZ]
    line = "split by content"
    if evaluation:
        start = names.index(f"{evaluation}/{NAMES[0]}")
        np.testing.assert_array_equal(data.train_image_BYXZ, [pixels(b) for b in range(4)])
        np.testing.assert_array_equal(data.evaluation_image_BYXZ, [pixels(b) for b in range(start, start + 4)])
        paths = [os.path.join(source, part) for part in (parts[0], evaluation)]
        line = f"by their names, {paths[0]} to train on; {paths[1]} to evaluate; all else is not used"
    assert len(data.train_label_B) + len(data.evaluation_label_B) == (8 if evaluation else 4)
    assert data.lines[0] == line and data.lines[1].endswith("1 .txt")
    assert f"left out, because they are in other folders or splits: {5 if len(parts) == 3 else 1}" in data.lines[2]


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
def test_folders_of_splits_have_many_names_and_may_be_one_level_deeper(tmp_path, train, held_out):
    names = [f"{part}/{name}/{n}.png" for part in (train, held_out) for name in CLASSES for n in range(2)]
    data = images.load(folder(tmp_path, *names, *(["seg_pred/seg_pred/a.png"] if "seg" in train else [])))
    assert data.classes == CLASSES and data.train_label_B.tolist() == data.evaluation_label_B.tolist() == [0, 0, 1, 1]
    np.testing.assert_array_equal(data.train_image_BYXZ, [pixels(b) for b in range(4)])
    np.testing.assert_array_equal(data.evaluation_image_BYXZ, [pixels(b) for b in range(4, 8)])
    assert str(tmp_path / train) in data.lines[0] and str(tmp_path / held_out) in data.lines[0]


@pytest.mark.parametrize(
    ("folders", "expected"),
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
def test_folders_are_classes_or_are_refused_if_they_may_be_splits(tmp_path, folders, expected):
    source = folder(tmp_path, *(f"{name}/{n}.png" for name in folders for n in range(2)))
    if expected:
        assert images.load(source).classes == expected
    else:
        with raises(errors.UserError, tmp_path):
            images.load(source)


def test_unused_files_and_links_are_counted_and_no_class_is_lost(tmp_path):
    source = folder(tmp_path / "set", *(f"{name}/{n}.png" for name in CLASSES for n in range(3)))
    write(tmp_path / "set", **{"cat/a.txt": b"a", "dog/b.txt": b"b", "dog/c.heic": b"c", "labels/d.txt": b"d"})
    os.symlink(tmp_path / "set" / "cat", tmp_path / "set" / "dog" / "link")
    lines = images.load_described(source).lines
    assert any("3 .txt" in line and "1 .heic" in line for line in lines)
    assert any("links" in line and " 1, " in line and "dog/link" in line for line in lines)
    write(tmp_path / "set", **{"bird/e.heic": b"e"})
    with raises(errors.UserError, "bird/e.heic"):
        images.load(source)
    write(tmp_path / "set", **{"bird/f.png": encode_image(pixels(99))})
    assert images.load(source).classes == ("bird", *CLASSES)


def test_a_warning_names_classes_that_differ_by_spaces_or_case_and_many_are_truncated(tmp_path):
    source = folder(tmp_path, *(f"{name}/{n}.png" for name in ("Cat", "cat", "cat ", "dog\x1b[31m") for n in range(2)))
    lines = "\n".join(images.load_described(source).lines)
    assert "'Cat', 'cat', 'cat ' differ" in lines and "\x1b" not in lines and "dog\\x1b" in lines
    (line,) = class_names.describe([str(c) for c in range(100_000)])
    assert line.startswith("classes: 0, 1, 2, ") and "11" in line and "12" not in line and "100,000" in line


@pytest.mark.parametrize("form", ["GIF", "TIFF", "WEBP", "JPEG", "PPM", "BMP"])
def test_training_reads_every_format(tmp_path, form):
    end = form.lower().replace("jpeg", "jfif")
    write(tmp_path, **{f"{'ab'[b % 2]}/{b}.{end}": encode_image(pixels(b), form) for b in range(4)})
    data = images.load(str(tmp_path))
    assert len(data.train_label_B) + len(data.evaluation_label_B) == 4 and data.train_image_BYXZ.shape[1:] == (Y, X, 3)


def test_the_same_files_are_held_out_at_every_size_and_equal_ones_stay_together(tmp_path):
    names = [f"{'ab'[b % 2]}/{b}.png" for b in range(60)]
    folder(tmp_path, *names)
    for b in range(60):
        (tmp_path / names[b]).with_name(f"copy{b}.png").write_bytes((tmp_path / names[b]).read_bytes())
    original = images.load(str(tmp_path))
    held_out = {image.tobytes() for image in original.evaluation_image_BYXZ}
    assert 0 < len(held_out) < 30 and not held_out & {image.tobytes() for image in original.train_image_BYXZ}
    assert len(original.evaluation_label_B) == 2 * len(held_out)
    expected_names = {f"{b}.png" for b in range(60) if pixels(b).tobytes() in held_out}
    expected_files = [file for file in data_files.folder(tmp_path) if file.inside.name in expected_names]
    for size in (2, 4, 9):
        data = images.load(str(tmp_path), size)
        assert data.evaluation_label_B.tolist() == original.evaluation_label_B.tolist()
        expected = {image.tobytes() for image in image_folder.read(expected_files, size)}
        assert expected == {image.tobytes() for image in data.evaluation_image_BYXZ}


@pytest.mark.parametrize("size", [-1, 8193])
def test_an_impossible_size_is_refused_by_its_setting(tmp_path, size):
    for source in (folder(tmp_path, *NAMES), "digits"):
        with raises(errors.UserError, f"image.size = {size}"):
            images.load(source, size)


def test_grey_images_have_one_channel_unless_another_image_is_in_colour(tmp_path):
    grey = pixels(0, (Y, X))
    write(tmp_path, **{"a/1.png": encode_image(grey), "a/2.bmp": encode_image(grey[::-1], "BMP")})
    assert [image_BYXZ.shape for image_BYXZ, _ in image_folder.load(str(tmp_path), 0).arrays] == [(1, Y, X, 1)] * 2
    write(tmp_path, **{"b/3.webp": encode_image(pixels(1), "WEBP")})
    first, second = image_folder.load(str(tmp_path), 0).arrays
    image_BYXZ, label_B = (np.concatenate(pair) for pair in zip(first, second, strict=True))
    colour = np.broadcast_to(grey[..., None], (Y, X, 3))
    assert [c for image, c in zip(image_BYXZ, label_B, strict=True) if np.array_equal(image, colour)] == [0]
    assert image_BYXZ.shape == (3, Y, X, 3) and sorted(label_B) == [0, 0, 1]


def test_training_and_classify_process_a_photograph_in_the_same_way(tmp_path):
    """The photograph is resized and rotated by its metadata. A large JPEG is decoded at a reduced size."""
    smooth = np.add.outer(np.arange(300), np.arange(200))[..., None].astype(np.uint8) // np.uint8([1, 2, 3])
    contents = {"a/1.jpg": encode_image(smooth, "JPEG"), "b/3.png": encode_image(pixels(0))}
    contents["a/2.jpeg"] = encode_image(np.rot90(smooth), "JPEG", orientation=6)
    write(tmp_path / "set", **contents)
    image_BYXZ = image_folder.read(data_files.folder(tmp_path / "set"), 7)
    assert image_BYXZ.shape == (3, 7, 7, 3)
    np.testing.assert_allclose(image_BYXZ[0].astype(int), image_BYXZ[1], atol=9)  # JPEG is lossy
    boxes = np.asarray(Image.fromarray(smooth).resize((7, 7), Image.Resampling.BOX), int)
    assert abs(image_BYXZ[0].astype(int) - boxes).mean() < 9
    data = images.load(str(tmp_path / "set"), 7)
    disk.write_json(tmp_path / "data.json", images.describe(data))
    image_format = image_file.load_format(tmp_path, {}, Z=3, C=2)
    assert image_format["classes"] == ["a", "b"]
    images_YXZ = [image_file.read(file, image_format)[0][0] for file in sorted((tmp_path / "set").glob("*/*"))]
    normal = dict(zip(("mean_Z", "std_Z"), images.statistics(data.train_image_BYXZ), strict=True))
    fetch, _ = images.examples(image_BYXZ, np.zeros(3, np.int32), **normal)
    np.testing.assert_allclose(images_YXZ, fetch(np.arange(3), None)["image_BYXZ"], atol=1e-5)


def test_damaged_images_and_images_of_another_size_are_refused_by_name(tmp_path):
    source = folder(tmp_path / "set", *NAMES, "test/a.png")
    assert images.load(source).classes == ("cat", "dog house", "test")  # no folder has the name train

    def check_refusal(*words, size=0):
        with raises(errors.UserError, *words):
            images.load(source, size)

    write(tmp_path / "set", **{"cat/c.png": encode_image(pixels(0, (4, 3)))})
    check_refusal("cat/c.png", "4 x 3", "5 x 3", "image.size")
    assert images.load(source, 4).train_image_BYXZ.shape[1:] == (4, 4, 3)
    write(tmp_path / "set", **{"cat/c.png": encode_image(pixels(0))[:-40]})
    check_refusal("cat/c.png", size=4)
    write(tmp_path / "set", **{"e.png": encode_image(pixels(0))})
    check_refusal("set/e.png")
    with raises(errors.UserError, "image.size = 7", "8 x 8"):
        images.load("digits", 7)


def test_all_damaged_images_are_listed_and_so_are_classes_that_are_only_evaluated(tmp_path):
    source = folder(tmp_path, *NAMES, "bird/a.png")
    contents = {"a.jpg": b"", "b.jpg": b"<html>", "c.jpg": encode_image(pixels(0, (64, 64, 3)), "JPEG")[:-400]}
    write(tmp_path / "bird", **contents)
    with raises(errors.UserError, "3 of 8", "a.jpg: the file is empty", "b.jpg", "<html>", "c.jpg"):
        images.load(source)
    source = folder(tmp_path / "set", "train/n1/images/a.png", "train/n2/images/b.png", "val/images/c.png")
    with raises(errors.UserError, source, '"images"'):
        images.load(source)


@pytest.fixture
def save(tmp_path, monkeypatch):
    """`save(name, names, part=(numbers, labels))` saves a data set of images with these numbers, and returns it."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    datasets.disable_progress_bars()

    def save_set(name, names, **parts):
        kinds = datasets.Features(pixels=datasets.Image(), kind=datasets.ClassLabel(names=names))
        splits = {}
        for part, (numbers, labels) in parts.items():
            rows = {"pixels": [Image.fromarray(pixels(b)) for b in numbers], "kind": labels}
            splits[part] = datasets.Dataset.from_dict(rows, features=kinds)
        datasets.DatasetDict(splits).save_to_disk(tmp_path / name)
        return datasets, splits

    return save_set


def test_a_data_set_gives_the_same_images_as_a_folder(tmp_path, save):
    names = [f"{part}/{name}" for part in ("train", "test") for name in NAMES[:3]]
    expected = images.load(folder(tmp_path / "set", *names))
    labels = [0, 0, 1, -1]  # the last image has no class
    save("saved", ["cat", "dog house"], train=(range(4), labels), test=(range(3, 7), labels))
    for source in ("saved", "set"):
        data = images.load(f"hub:{tmp_path / source}")
        for array, expected_array in zip(data[1:6], expected[1:6], strict=True):
            np.testing.assert_array_equal(array, expected_array)
    save("one", ["cat", "dog house"], full=(range(4), labels))
    assert images.load(f"hub:{tmp_path / 'one'}").classes == ("cat", "dog house")


def test_a_data_set_keeps_the_order_of_its_classes_and_needs_a_training_split(tmp_path, save, monkeypatch):
    names, labels = ["zebra", "10", "ant", "2"], [0, 1, 2, 3, 0, 1, 2, -1]
    datasets, splits = save("order", names, train=(range(8), labels), test=(range(4), range(4)))
    data = images.load_described(f"hub:{tmp_path / 'order'}")
    assert data.classes == ("zebra", "10", "ant", "2") and data.evaluation_label_B.tolist() == [0, 1, 2, 3]
    assert any("split train: 1" in line for line in data.lines) and any("4 of 4" in line for line in data.lines)
    save("other", names, full=(range(8), labels), more=(range(8), labels))
    with raises(errors.UserError, "other", "train"):
        images.load(f"hub:{tmp_path / 'other'}")
    splits["train"].remove_columns("kind").save_to_disk(tmp_path / "none")
    with raises(errors.UserError, "none (train)", "ClassLabel", "pixels"):
        images.load(f"hub:{tmp_path / 'none'}")
    # Older versions of `datasets` cannot save an empty split of images.
    monkeypatch.setattr(datasets, "load_from_disk", lambda folder: splits | {"train": splits["train"].select([])})
    with raises(errors.UserError, "other"):
        images.load(f"hub:{tmp_path / 'other'}")


# The cache


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

"""The tool features: images and texts of every kind of source give the features that the model returns for them."""

import contextlib
import io

import numpy as np
import published
import pytest
import tiny
from errors import raises
from open_once import open_once  # noqa: F401  a fixture
from PIL import Image

from experiments.config import disk, errors
from experiments.data import images, labelled
from experiments.pretrained import open_model, trained
from experiments.tools import features

RNG = np.random.default_rng(0)


def compute(checkpoint, file, **options) -> dict[str, np.ndarray]:
    """Return the arrays of the file that the tool writes."""
    output = checkpoint.parent / f"{len(list(checkpoint.parent.iterdir()))}.npz"
    with contextlib.redirect_stdout(io.StringIO()):
        assert features.run(checkpoint, file=file, output=output, **options) == output
    return disk.read_npz(output)


@pytest.fixture(scope="module")
def vision(tmp_path_factory):
    changes = {"image.patch": 4, "image.head": "class_token"}
    return published.write_run(tmp_path_factory.mktemp("runs") / "image", "vision", **changes)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Return the folder of a run that classifies the texts of texts.csv, which is next to it."""
    folder = tmp_path_factory.mktemp("texts")
    rows = "".join(f"word {i} {'long ' * (i % 4)},{i % 3}\n" for i in range(99))
    (folder / "texts.csv").write_text(f"text,label\n{rows}")
    changes = {"text.source": str(folder / "texts.csv"), "text.N": 19, "text.head": "pooled", "model.M": 1}
    return published.write_run(folder / "run", "text_classification", **changes)


def test_arrays_of_images(vision, tmp_path):
    """The last of three batches is not full. The labels and the held-out part are those of a run with this source."""
    image_BYX, label_B = RNG.integers(0, 17, (2 * trained.BATCH + 5, 8, 8), np.uint8), np.arange(69) % 3
    np.savez(tmp_path / "images.npz", x=image_BYX, y=label_B)
    arrays, data = compute(vision, tmp_path / "images.npz", names="hidden,A"), images.load(str(tmp_path / "images.npz"))
    raw_BYXZ = np.concatenate([data.train_image_BYXZ, data.evaluation_image_BYXZ])
    expected = open_model.open(vision).look(raw_BYXZ, ("hidden", "A"))
    assert arrays.keys() == {"features", "hidden", "A", "names", "labels", "classes", "held_out"}
    for name, array in expected.items():
        assert arrays[name].dtype == np.float32
        np.testing.assert_allclose(arrays[name], array, atol=1e-5)
    assert arrays["classes"].tolist() == ["0", "1", "2"]
    assert arrays["held_out"].sum() == len(data.evaluation_label_B) and not arrays["held_out"][0]
    np.testing.assert_array_equal(arrays["labels"][arrays["held_out"]], data.evaluation_label_B)


def test_folders_of_image_files_with_and_without_classes_and_one_file(vision, tmp_path):
    model, pictures = open_model.open(vision), {}
    for i in range(7):
        name, pixels = f"{'cat' if i % 2 else 'dog'}/{i}.png", RNG.integers(0, 256, (9, 12, 3), np.uint8)
        for file in (tmp_path / "labelled" / name, tmp_path / "flat" / f"{i}.png"):
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(file)
        pictures[name] = model.look(Image.fromarray(pixels))["features"][0]
    arrays = compute(vision, tmp_path / "labelled")
    assert sorted(arrays["names"]) == sorted(pictures) and arrays["held_out"].any() and not arrays["held_out"].all()
    for name, label, vector in zip(arrays["names"], arrays["labels"], arrays["features"], strict=True):
        assert arrays["classes"][label] == name.partition("/")[0]
        np.testing.assert_allclose(vector, pictures[name], atol=1e-5)
    flat, single = compute(vision, tmp_path / "flat"), compute(vision, tmp_path / "flat/3.png")
    assert flat.keys() == single.keys() == {"features", "names"}
    np.testing.assert_allclose(flat["features"], list(pictures.values()), atol=1e-5)
    np.testing.assert_allclose(single["features"], flat["features"][3:4], atol=1e-5)


def test_texts_with_classes(texts):
    """The features of a text do not depend on the padding to the longest text."""
    file = texts.parent / "texts.csv"
    arrays, data = compute(texts, file, field="text,label", names="q"), labelled.load(str(file))
    model, rows = open_model.open(texts), [*data.train, *data.evaluation]
    tokenizer = open_model.load_tokenizer(model)
    assert arrays["names"].tolist() == [" ".join(content.split()) for content, _ in rows]
    assert arrays["classes"][arrays["labels"]].tolist() == [name for _, name in rows]
    assert arrays["held_out"].sum() == len(data.evaluation)
    assert arrays["q"].shape == (1, 99, 2, 19, 4)
    for b in (0, 5, 98):
        id_1N, valid_1N, _ = labelled.encode(tokenizer, [rows[b][0]], N=19)
        alone = model.look(id_1N[:, valid_1N[0]], ())["features"][0]
        np.testing.assert_allclose(arrays["features"][b], alone, atol=1e-5)


def test_lines_of_a_text_and_a_column_without_classes(texts, tmp_path):
    run = published.write_run(tmp_path / "run", "language", **{"text.N": 17, "model.M": 1})
    (tmp_path / "lines.txt").write_text("a king\n\nwho reads\n")
    arrays, column = compute(run, tmp_path / "lines.txt"), compute(run, texts.parent / "texts.csv", field="text")
    assert arrays.keys() == column.keys() == {"features", "names"} and column["features"].shape == (99, 8)
    assert arrays["names"].tolist() == ["a king", "who reads"]
    model = open_model.open(run)
    for vector, line in zip(arrays["features"], arrays["names"], strict=True):
        ids = open_model.load_tokenizer(model).encode(str(line))
        np.testing.assert_allclose(vector, model.look(ids[None], ())["features"][0], atol=1e-5)


def test_wrong_flags_are_refused_and_write_nothing(vision, tmp_path, monkeypatch):
    (tmp_path / "old.npz").write_bytes(b"")
    flags = {"checkpoint": vision, "file": "digits", "output": tmp_path / "new.npz"}
    for changes, parts in (
        ({"output": tmp_path / "old.npz"}, ("--output", "old.npz")),
        ({"output": tmp_path / "new.txt"}, ("--output", "new.txt")),
        ({"names": "hidden,queries"}, ("queries", "hidden")),
        ({"file": tmp_path / "missing"}, ("missing",)),
        ({"field": "text"}, ("--field=text",)),
    ):
        error = tiny.refusal(features, **flags | changes)
        assert all(part in error for part in parts), error
    monkeypatch.setattr(disk, "host_memory", lambda: 10**6)
    with raises(errors.UserError, "--names"), contextlib.redirect_stdout(io.StringIO()):
        features.run(vision, file="digits", names="A", output=tmp_path / "new.npz")
    assert [file.name for file in tmp_path.iterdir()] == ["old.npz"]

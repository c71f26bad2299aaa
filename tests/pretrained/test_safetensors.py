"""Safetensors files: read back as written, and believed only where they hold together."""

import json
import os
import pathlib

import jax
import ml_dtypes
import numpy as np
import pytest

from experiments.engine import errors
from experiments.pretrained import safetensors

SHAPES = ((), (2,), (3, 5), (0, 7), (1, 1, 11))
DTYPES = [np.dtype(name) for name in "bool u1 i1 u2 i2 f2 u4 i4 f4 u8 i8 f8".split()] + [np.dtype(ml_dtypes.bfloat16)]


def some(seed: int = 0) -> dict[str, np.ndarray]:
    """An array of every dtype, each of another shape, random bytes as far as the dtype allows."""
    rng, arrays = np.random.default_rng(seed), {}
    for number, dtype in enumerate(DTYPES):
        shape = SHAPES[number % len(SHAPES)]
        content = rng.integers(0, 2 if dtype.kind == "b" else 256, int(np.prod(shape)) * dtype.itemsize, np.uint8)
        arrays[f"model.{dtype} π"] = content.view(dtype).reshape(shape)
    return arrays


def same(found, wanted) -> None:
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape), name
        assert found[name].tobytes() == array.tobytes(), name  # the bytes: some are NaN


def header(entries) -> bytes:
    """The beginning of a file."""
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text


def fault(path) -> str:
    """The one sentence of what is wrong with a file."""
    with pytest.raises(errors.UserError) as caught:
        safetensors.read(path)
    sentence = str(caught.value)
    assert str(path) in sentence and "\n" not in sentence and len(sentence) < 500 + len(str(path))
    sentence.encode()  # can be printed
    return sentence


def test_what_is_written_is_read_again(tmp_path):
    file = tmp_path / "a.safetensors"
    safetensors.write(file, some())
    same(safetensors.read(str(file)), some())
    content = file.read_bytes()
    assert b'"__metadata__":{"format":"pt"}' in content  # transformers opens no others
    safetensors.write(file, {})
    assert safetensors.read(file) == {}
    a_35 = np.arange(15, dtype=np.float32).reshape(3, 5)
    arrays = {"columns": a_35.T, "strided": a_35[:, ::2]}
    arrays |= {"big-endian": a_35.astype(">f4"), "jax": jax.numpy.asarray(a_35)}
    safetensors.write(file, arrays)
    for name, array in safetensors.read(file).items():
        assert array.dtype == np.float32 and array.flags.aligned
        np.testing.assert_array_equal(array, arrays[name])
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        bytes(7),
        (2**63).to_bytes(8, "little") + b"{}",
        header({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}) + bytes(7),
        header({"a": {"dtype": "F8_E4M3", "shape": [8], "data_offsets": [0, 8]}}) + bytes(8),  # numpy has none
        header({"a": {"dtype": "F32", "shape": [0, 2**63], "data_offsets": [0, 0]}}),
        header({"a" * 10_000 + "\ud800\n": []}),
    ],
)
def test_what_the_library_does_not_read_is_refused_in_one_sentence(tmp_path, content):
    (tmp_path / "a.safetensors").write_bytes(content)
    assert "is damaged or no safetensors file: " in fault(tmp_path / "a.safetensors")


def test_a_file_is_whole_or_stays_what_it_was(tmp_path, monkeypatch):
    file = tmp_path / "a.safetensors"
    safetensors.write(file, some(0))
    before = safetensors.read(file)

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(errors.UserError, match="a.safetensors cannot be written: No space left on device"):
            safetensors.write(file, some(1))
    same(safetensors.read(file), some(0))
    assert list(tmp_path.iterdir()) == [file]
    safetensors.write(file, some(1))
    same(before, some(0))  # its arrays may be in use
    same(safetensors.read(file), some(1))


def test_what_cannot_be_written_is_said(tmp_path):
    for array in (np.array([None]), np.array(["text"])):
        with pytest.raises(errors.UserError, match="a.safetensors cannot be written as a safetensors file: "):
            safetensors.write(tmp_path / "a.safetensors", {"a": array})
    with pytest.raises(errors.UserError, match="cannot be written: No such file"):
        safetensors.write(tmp_path / "no folder" / "a", {})
    assert list(tmp_path.iterdir()) == []


def shards(folder: pathlib.Path, weight_map, **files) -> pathlib.Path:
    """A folder with an index and the files it should name; no weight_map: the true one."""
    for file, arrays in files.items():
        safetensors.write(folder / f"{file}.safetensors", arrays)
    if weight_map is None:
        weight_map = {name: f"{file}.safetensors" for file, arrays in files.items() for name in arrays}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return index


def test_a_folder_is_read_from_its_one_file_or_its_index(tmp_path):
    names = list(some())
    first, second = ({name: some()[name] for name in part} for part in (names[::2], names[1::2]))
    index = shards(tmp_path, None, first=first, second=second)
    same(safetensors.read(tmp_path), some())
    same(safetensors.read(index), some())
    (tmp_path / "first.safetensors").rename(tmp_path / "1")
    (tmp_path / "first.safetensors").symlink_to("1")  # as caches of downloads have them
    same(safetensors.read(tmp_path), some())
    shards(tmp_path, {names[0]: "first.safetensors"}, first=first)  # what it does not mention is there all the same
    same(safetensors.read(tmp_path), first)
    safetensors.write(tmp_path / "model.safetensors", second)
    same(safetensors.read(str(tmp_path)), second)


ONE = {"a": np.zeros(2, np.float32)}


@pytest.mark.parametrize(
    ("weight_map", "sentence"),
    [
        ([], "needs a weight_map"),
        ({"a": 1}, "needs a weight_map"),
        ({"a": "no.safetensors"}, "no.safetensors is not there"),
        ({"a": "one.safetensors", "b": "one.safetensors"}, "tensor 'b': it should be in one.safetensors, and is not"),
        ({"a": "one.safetensors", "b": "two.safetensors"}, "two.safetensors, tensor 'a': another file .* has it too"),
        ({"a": "one.bin"}, "one.bin is not read"),
        ({"a": "model.safetensors.index.json"}, "index.json is damaged or no safetensors file"),
        *(
            ({"a": file}, "may only name files of its own folder")
            for file in ("../up.safetensors", "..", "", ".", "/etc/passwd", "sub/a.safetensors", "..\\up", "C:up", "a/")
        ),
    ],
)
def test_an_index_that_lies_or_leads_out_is_refused(tmp_path, weight_map, sentence):
    folder = tmp_path / "model"
    folder.mkdir()
    safetensors.write(tmp_path / "up.safetensors", ONE)
    safetensors.write(tmp_path / "model.safetensors", ONE)
    shards(folder, weight_map, one=ONE, two=ONE)
    with pytest.raises(errors.UserError, match=sentence):
        safetensors.read(folder)


def test_pickles_are_refused_with_the_way_out(tmp_path):
    for suffix in (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt"):
        file = tmp_path / f"pytorch_model{suffix}"
        file.write_bytes(b"\x80\x04.")
        for path in (file, tmp_path, tmp_path / f"absent{suffix}"):
            with pytest.raises(errors.UserError, match=r"ForImageClassification\).from_pretrained\(...\).save"):
                safetensors.read(path)
        file.unlink()
    for name in ("optimizer.pt", "pytorch_model.bin"):
        (tmp_path / name).write_bytes(b"\x80\x04.")
    with pytest.raises(errors.UserError, match="pytorch_model.bin is not read"):  # which is the model
        safetensors.read(tmp_path)
    safetensors.write(tmp_path / "model.safetensors", ONE)
    same(safetensors.read(tmp_path), ONE)


def test_what_is_not_there_is_said(tmp_path):
    assert "neither a run nor a published model" in fault(tmp_path)
    assert "is not there" in fault(tmp_path / "model.safetensors")
    assert "is not there" in fault(tmp_path / "a\0b")
    os.mkfifo(tmp_path / "pipe")
    assert "not a file" in fault(tmp_path / "pipe")

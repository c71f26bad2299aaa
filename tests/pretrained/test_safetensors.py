"""Safetensors files: read back as written, also by the format's own package, and believed only where they are true."""

import importlib
import json
import os
import pathlib

import hypothesis
import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import strategies as st

from experiments.engine import errors
from experiments.pretrained import safetensors, safetensors_header

SHAPES = ((), (2,), (3, 5), (0, 7), (1, 1, 11))


def some(seed: int = 0) -> dict[str, np.ndarray]:
    """An array of every dtype, each of another shape, random bytes as far as the dtype allows."""
    rng, arrays = np.random.default_rng(seed), {}
    for number, (name, dtype) in enumerate(safetensors_header.DTYPES.items()):
        shape = SHAPES[number % len(SHAPES)]
        content = rng.integers(0, 2 if name == "BOOL" else 256, int(np.prod(shape)) * dtype.itemsize, np.uint8)
        arrays[f"model.{name} π"] = content.view(dtype).reshape(shape)
    return arrays


def same(found, wanted) -> None:
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape), name
        assert found[name].tobytes() == array.tobytes(), name  # the bytes: some are NaN


def raw(path: pathlib.Path, header, values: bytes = b"", length: int | None = None) -> pathlib.Path:
    """A file as anyone may have written it."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + values)
    return path


def fault(path) -> str:
    """The one sentence of what is wrong with a file."""
    with pytest.raises(errors.UserError) as caught:
        safetensors.read(path)
    sentence = str(caught.value)
    assert str(path) in sentence and "\n" not in sentence and len(sentence) < 500 + len(str(path))
    return sentence


def test_what_is_written_is_read_again(tmp_path):
    file = tmp_path / "a.safetensors"
    safetensors.write(file, some(), {"format": "pt", "by": "é"})
    same(safetensors.read(file), some())
    header = safetensors.read_header(str(file))
    assert header.metadata == {"format": "pt", "by": "é"}
    assert {name: entry[:2] for name, entry in header.entries.items()} == {
        name: (array.dtype, array.shape) for name, array in some().items()
    }
    assert all(array.flags.aligned and not array.flags.writeable for array in safetensors.read(file).values())
    safetensors.write(file, {})
    assert safetensors.read(file) == {}
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


def test_arrays_of_every_layout_are_written_in_rows(tmp_path):
    a_35 = np.arange(15, dtype=np.float32).reshape(3, 5)
    laid_out = {
        "columns": a_35.T,
        "strided": a_35[:, ::2],
        "big-endian": a_35.astype(">f4"),
        "jax": jax.numpy.asarray(a_35),
    }
    safetensors.write(tmp_path / "a", laid_out)
    found = safetensors.read(tmp_path / "a")
    for name, array in laid_out.items():
        assert found[name].dtype == np.float32
        np.testing.assert_array_equal(found[name], array)


def test_values_need_not_be_aligned(tmp_path):
    a_7 = np.arange(7, dtype=np.float64)
    header = {"a": {"dtype": "F64", "shape": [7], "data_offsets": [0, 56]}}
    text = json.dumps(header).encode()
    for spaces in range(8):
        found = safetensors.read(raw(tmp_path / "a", text + b" " * spaces, a_7.tobytes()))["a"]
        np.testing.assert_array_equal(found, a_7)
        assert found.flags.aligned


def theirs(framework: str):
    """The format's own package, as far as it serves arrays of one library."""
    pytest.importorskip("safetensors", reason="safetensors is not installed: install the extra [hub]")
    return importlib.import_module(f"safetensors.{framework}")


def test_the_package_reads_what_we_write_and_we_what_it_writes(tmp_path):
    package = theirs("numpy")
    arrays = {name: array for name, array in some().items() if array.dtype != ml_dtypes.bfloat16}
    safetensors.write(tmp_path / "ours", arrays, {"format": "np"})
    same(package.load_file(tmp_path / "ours"), arrays)
    package.save_file(arrays, tmp_path / "theirs", {"format": "np"})
    same(safetensors.read(tmp_path / "theirs"), arrays)
    assert safetensors.read_header(tmp_path / "theirs").metadata == {"format": "np"}
    singles = {name: array.astype(np.float32) for name, array in arrays.items() if array.dtype.kind != "f"}
    safetensors.write(tmp_path / "ours", singles, {"format": "np"})
    package.save_file(singles, tmp_path / "theirs", {"format": "np"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_bfloat16_means_to_torch_what_it_means_to_us(tmp_path):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: install the extra [parity]")
    package = theirs("torch")
    a_35 = np.random.default_rng(0).standard_normal((3, 5)).astype(ml_dtypes.bfloat16)
    safetensors.write(tmp_path / "ours", {"a": a_35})
    found = package.load_file(tmp_path / "ours")["a"]
    assert found.dtype == torch.bfloat16
    np.testing.assert_array_equal(found.float().numpy(), a_35.astype(np.float32))
    package.save_file({"a": found}, tmp_path / "theirs")
    same(safetensors.read(tmp_path / "theirs"), {"a": a_35})


F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "values", "sentence"),
    [
        (b"", b"", "there is none"),
        (b"{", b"", "there is none"),
        (b"\xff{}", b"", "there is none"),
        (b"[" * 100_000, b"", "there is none"),
        (b'{"a": ' + b"9" * 5000 + b"}", b"", "there is none"),
        ([], b"", "not an object"),
        (b'{"a": 1, "a": 2}', b"", "the name 'a' stands twice"),
        (b'{"a": {"dtype": "F32", "dtype": "F64"}}', b"", "the name 'dtype' stands twice"),
        ({"__metadata__": []}, b"", "__metadata__ must"),
        ({"__metadata__": {"a": 1}}, b"", "__metadata__ must"),
        ({"a": []}, b"", "tensor 'a': the header must give"),
        ({"a": {"dtype": "F32", "shape": [2]}}, b"", "tensor 'a': the header must give"),
        ({"a": F32 | {"more": 1}}, b"", "tensor 'a': the header must give"),
        (
            {"a": F32 | {"dtype": "F31"}},
            bytes(8),
            "tensor 'a': the dtype 'F31' is unknown: the right ones are BOOL, U8",
        ),
        ({"a": F32 | {"dtype": ["F32"]}}, bytes(8), r"tensor 'a': the dtype \['F32'\] is unknown"),
        ({"a": F32 | {"shape": 2}}, bytes(8), "tensor 'a': the shape must be .* not 2"),
        ({"a": F32 | {"shape": [-2]}}, bytes(8), r"tensor 'a': the shape must be .* not \[-2\]"),
        ({"a": F32 | {"shape": [2.0]}}, bytes(8), "tensor 'a': the shape must be"),
        ({"a": F32 | {"shape": [2, True]}}, bytes(8), "tensor 'a': the shape must be"),
        ({"a": F32 | {"shape": [2] + [1] * 32}}, bytes(8), "tensor 'a': the shape must be at most 32"),
        ({"a": F32 | {"shape": [0, 2**63], "data_offsets": [0, 0]}}, b"", "tensor 'a': the shape must be"),
        ({"a": F32 | {"shape": [0, 2**32, 2**32], "data_offsets": [0, 0]}}, b"", "tensor 'a': no array can have"),
        ({"a": F32 | {"shape": [0, 2**61], "data_offsets": [0, 0]}}, b"", "tensor 'a': no array can have"),
        ({"a": F32 | {"data_offsets": [0, 8, 8]}}, bytes(8), "tensor 'a': the data_offsets must be"),
        ({"a": F32 | {"data_offsets": [8, 0]}}, bytes(8), "tensor 'a': the data_offsets must be"),
        ({"a": F32 | {"data_offsets": [-8, 0]}}, bytes(8), "tensor 'a': the data_offsets must be"),
        ({"a": F32 | {"data_offsets": ["0", "8"]}}, bytes(8), "tensor 'a': the data_offsets must be"),
        ({"a": F32 | {"shape": [3]}}, bytes(8), r"tensor 'a': F32 of shape \[3\] takes 12 bytes, and .* span 8"),
        ({"a": F32 | {"data_offsets": [0, 2**62]}}, bytes(8), "tensor 'a': F32 of shape"),
        ({"a": F32}, bytes(7), "tensor 'a': its values end at byte .* the file is cut off"),
        ({"a": F32 | {"shape": [2**40], "data_offsets": [0, 2**42]}}, bytes(8), "tensor 'a': its values end at byte"),
        ({"a": F32, "b": F32}, bytes(8), "tensor 'b': its values overlap those of 'a'"),
        ({"a": F32, "b": F32 | {"data_offsets": [4, 12]}}, bytes(12), "tensor 'b': its values overlap those of 'a'"),
        ({"a": F32 | {"data_offsets": [4, 12]}}, bytes(12), "tensor 'a': the 4 bytes before its values belong to no"),
        ({"a": F32}, bytes(9), "the last 1 bytes, after 'a', belong to no tensor"),
        ({}, bytes(3), "the last 3 bytes, after the header, belong to no tensor"),
        (
            {"a": {"dtype": "BOOL", "shape": [3], "data_offsets": [0, 3]}},
            b"\0\1\2",
            "tensor 'a': a BOOL must be 0 or 1",
        ),
        ({"a" * 10_000 + "\ud800\n": []}, b"", "tensor 'aaaa"),
    ],
)
def test_a_header_that_lies_is_refused(tmp_path, header, values, sentence):
    with pytest.raises(errors.UserError, match=sentence):
        safetensors.read(raw(tmp_path / "a.safetensors", header, values))
    fault(tmp_path / "a.safetensors").encode()  # can be printed


@pytest.mark.parametrize("length", [3, 2**63, 2**64 - 1])
def test_a_header_is_not_longer_than_its_file(tmp_path, length):
    assert "would end at" in fault(raw(tmp_path / "a", b"{}", length=length))


def test_a_file_without_the_eight_bytes_is_cut_off(tmp_path):
    for size in (0, 7):
        (tmp_path / "a").write_bytes(bytes(size))
        assert f"it has {size} bytes" in fault(tmp_path / "a")


def test_a_header_of_more_than_16_megabytes_is_not_read(tmp_path):
    file = raw(tmp_path / "a", b"{}", length=2**24 + 1)
    with file.open("ab") as more:
        more.truncate(2**28)  # takes no room: a file with a hole
    assert "announces a header of 16777217 bytes, and 16777216 are allowed" in fault(file)


def test_no_more_tensors_are_read_than_a_model_has(tmp_path, monkeypatch):
    nothing = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    file = raw(tmp_path / "a", {f"x{i}": nothing for i in range(2**16 + 1)})
    assert "announces 65,537 tensors, and 65,536 are allowed" in fault(file)
    monkeypatch.setattr(safetensors_header, "MOST", 2)
    first, second = ({f"x{i}": np.zeros(0)} for i in range(2))
    assert len(safetensors.read(shards(tmp_path, None, first=first, second=second))) == 2
    index = shards(tmp_path, None, first=first, second=second | {"x2": np.zeros(0)})
    assert "announces 3 tensors, and 2 are allowed" in fault(index)
    shards(tmp_path, {"x0": "first.safetensors", "x1": "second.safetensors"})  # does not mention the third
    assert "announces 3 tensors, and 2 are allowed" in fault(index)


@hypothesis.given(st.data())
@hypothesis.settings(max_examples=300, deadline=None, database=None)
def test_a_damaged_file_is_refused_or_still_whole(tmp_path_factory, data):
    folder = tmp_path_factory.getbasetemp()
    safetensors.write(folder / "whole", some(), {"format": "pt"})
    content = bytearray((folder / "whole").read_bytes())
    header = 8 + int.from_bytes(content[:8], "little")
    # Most of a header is decisive, and most of the values are not.
    place = st.one_of(st.integers(0, 7), st.integers(8, header - 1), st.integers(header, len(content) - 1))
    for at in data.draw(st.lists(place, max_size=3)):
        content[at] ^= data.draw(st.integers(1, 255))
    cut = data.draw(st.one_of(st.just(len(content)), st.integers(0, len(content))))
    (folder / "damaged").write_bytes(content[:cut])
    try:
        found = safetensors.read(folder / "damaged")
    except errors.UserError as error:
        assert str(folder / "damaged") in str(error)
        return
    assert cut == len(content) and len(found) == len(some())
    for array in found.values():
        assert array.dtype in safetensors_header.DTYPES.values()
        assert len(array.tobytes()) == array.size * array.dtype.itemsize


def test_a_file_is_whole_or_stays_what_it_was(tmp_path, monkeypatch):
    file = tmp_path / "a.safetensors"
    safetensors.write(file, some(0))

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(errors.UserError, match="a.safetensors cannot be written: No space left on device"):
        safetensors.write(file, some(1))
    same(safetensors.read(file), some(0))
    assert list(tmp_path.iterdir()) == [file]


def test_a_file_can_be_replaced_while_its_arrays_are_in_use(tmp_path):
    safetensors.write(tmp_path / "a", some(0))
    before = safetensors.read(tmp_path / "a")
    safetensors.write(tmp_path / "a", some(1))
    same(before, some(0))
    same(safetensors.read(tmp_path / "a"), some(1))


def test_what_cannot_be_written_is_said(tmp_path):
    with pytest.raises(errors.UserError, match="tensor 'a': a safetensors file cannot hold complex64: it knows BOOL"):
        safetensors.write(tmp_path / "a", {"a": np.zeros(2, np.complex64)})
    with pytest.raises(errors.UserError, match="cannot be written: No such file"):
        safetensors.write(tmp_path / "no folder" / "a", {})
    with pytest.raises(ValueError, match="__metadata__"):
        safetensors.write(tmp_path / "a", {"__metadata__": np.zeros(2)})


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
    shards(
        tmp_path, {names[0]: "first.safetensors"}, first=first
    )  # what the index does not mention is there all the same
    same(safetensors.read(tmp_path), first)
    safetensors.write(tmp_path / "model.safetensors", second)
    same(safetensors.read(str(tmp_path)), second)


def test_an_index_of_links_is_read(tmp_path):
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    shards(tmp_path / "snapshot", None, a=some())
    (tmp_path / "snapshot" / "a.safetensors").rename(tmp_path / "blobs" / "1")
    (tmp_path / "snapshot" / "a.safetensors").symlink_to("../blobs/1")
    same(safetensors.read(tmp_path / "snapshot"), some())


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
        ({"a": "model.safetensors.index.json"}, "index.json is cut off or no safetensors file"),
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


@pytest.mark.parametrize("suffix", [".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt"])
def test_pickles_are_refused_with_the_way_out(tmp_path, suffix):
    file = tmp_path / f"pytorch_model{suffix}"
    file.write_bytes(b"\x80\x04.")
    for path in (file, tmp_path, tmp_path / f"absent{suffix}"):
        with pytest.raises(
            errors.UserError, match=r"AutoModelForMaskedLM or .*\).save_pretrained\(DIR\), its words by"
        ):
            safetensors.read(path)


def test_of_several_pickles_that_of_the_model_is_named_and_none_beside_safetensors(tmp_path):
    for name in ("optimizer.pt", "pytorch_model.bin"):
        (tmp_path / name).write_bytes(b"\x80\x04.")
    assert "pytorch_model.bin is not read" in fault(tmp_path)
    safetensors.write(tmp_path / "model.safetensors", ONE)
    safetensors.refuse_pickles(tmp_path)
    same(safetensors.read(tmp_path), ONE)


def test_what_is_not_there_is_said(tmp_path):
    assert "neither model.safetensors nor" in fault(tmp_path)
    assert "is not there" in fault(tmp_path / "model.safetensors")
    assert "is not there" in fault(tmp_path / "a\0b")
    os.mkfifo(tmp_path / "pipe")
    assert "not a file" in fault(tmp_path / "pipe")

"""Safetensors files are read as they were written; pickle files are refused."""

import json

import jax
import ml_dtypes
import numpy as np
from errors import raises

from experiments.config import errors
from experiments.pretrained import safetensors

A_35 = np.arange(15, dtype=np.float32).reshape(3, 5)
ARRAYS = {
    "bfloat16 π": A_35.astype(ml_dtypes.bfloat16),
    "scalar": np.float32(np.nan),
    "empty": np.zeros((0, 7), np.int8),
}
ARRAYS |= {"columns": A_35.T, "strided": A_35[:, ::2], "big-endian": A_35.astype(">f4"), "jax": jax.numpy.asarray(A_35)}
ONE = {"a": np.zeros(2, np.float32)}
F8 = {"a": {"dtype": "F8_E4M3", "shape": [8], "data_offsets": [0, 8]}}  # numpy has none


def check_equal(actual, expected) -> None:
    assert actual.keys() == expected.keys()
    for name, array in expected.items():
        assert actual[name].dtype == np.dtype(array.dtype).newbyteorder("="), name
        np.testing.assert_array_equal(actual[name], array, err_msg=name)


def test_arrays_are_read_as_they_are_written(tmp_path):
    file = tmp_path / "a.safetensors"
    safetensors.write(file, ONE)
    before = safetensors.read(str(file))
    safetensors.write(file, ARRAYS)
    check_equal(before, ONE)  # arrays of the replaced file stay valid
    check_equal(safetensors.read(file), ARRAYS)
    assert b'"__metadata__":{"format":"pt"}' in file.read_bytes()  # transformers opens no files without it
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


def shards(folder, weight_map, **files):
    """Write files and their index. weight_map: None for the true one."""
    for file, arrays in files.items():
        safetensors.write(folder / f"{file}.safetensors", arrays)
    if weight_map is None:
        weight_map = {name: f"{file}.safetensors" for file, arrays in files.items() for name in arrays}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_a_folder_is_read_from_its_one_file_or_its_index(tmp_path):
    first, second = ({name: ARRAYS[name] for name in part} for part in ([*ARRAYS][::2], [*ARRAYS][1::2]))
    shards(tmp_path, None, first=first, second=second)
    (tmp_path / "first.safetensors").rename(tmp_path / "1")
    (tmp_path / "first.safetensors").symlink_to("1")  # as caches of downloads have them
    for path in (tmp_path, tmp_path / "model.safetensors.index.json"):
        check_equal(safetensors.read(path), ARRAYS)
    safetensors.write(tmp_path / "model.safetensors", second)
    check_equal(safetensors.read(str(tmp_path)), second)


def test_damaged_files_and_indices_are_refused(tmp_path):
    for entry, size in (({}, -8), ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, 7), (F8, 8)):
        header = json.dumps(entry).encode()
        content = len(header).to_bytes(8, "little") + header + bytes(max(size, 0))
        (tmp_path / "a.safetensors").write_bytes(content if size > 0 else b"")
        with raises(errors.UserError, f"{tmp_path / 'a.safetensors'}: "):
            safetensors.read(tmp_path / "a.safetensors")
    (tmp_path / "model").mkdir()
    safetensors.write(tmp_path / "up.safetensors", ONE)
    for weight_map, part in (
        ([], "index.json"),
        ({"a": "no.safetensors"}, "no.safetensors is missing"),
        ({"a": "one.safetensors", "b": "one.safetensors"}, "'b'"),
        ({"a": "one.bin"}, "one.bin"),
        ({"a": "../up.safetensors"}, "'../up.safetensors'"),
        ({"a": "/etc/passwd"}, "'/etc/passwd'"),
    ):
        shards(tmp_path / "model", weight_map, one=ONE)
        with raises(errors.UserError, part):
            safetensors.read(tmp_path / "model")


def test_pickles_are_refused_with_the_remedy(tmp_path):
    with raises(errors.UserError, tmp_path, "model.safetensors"):
        safetensors.read(tmp_path)
    for name in ("optimizer.pt", "pytorch_model.bin"):  # the second is the model
        (tmp_path / name).write_bytes(b"\x80\x04.")
    for path in (tmp_path, tmp_path / "pytorch_model.bin"):
        with raises(errors.UserError, "pytorch_model.bin", "save_pretrained(DIR)"):
            safetensors.read(path)
    safetensors.write(tmp_path / "model.safetensors", ONE)
    check_equal(safetensors.read(tmp_path), ONE)

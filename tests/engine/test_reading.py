"""disk.reading: a file that cannot be read is one sentence, the path and the library's reason."""

import json
import zipfile

import numpy as np
import pytest
from errors import raises

from experiments.engine import disk, errors

READERS = {
    "missing": (None, lambda file: file.read_bytes(), "No such file"),
    "a folder": ("folder", lambda file: file.read_bytes(), "Is a directory"),
    "another encoding": (b"caf\xe9", lambda file: file.read_text("utf-8"), "utf-8"),
    "an unknown encoding": (b"", lambda file: file.read_text("utf-99"), "utf-99"),
    "JSON that is cut off": (b'{"steps": 9', lambda file: json.loads(file.read_bytes()), "column"),
    "JSON without a key": (b"{}", lambda file: json.loads(file.read_bytes())["steps"], "missing 'steps'"),
    "no zip archive": (b"PK", lambda file: zipfile.ZipFile(file), "zip"),
    "no array": (b"\x93NUMPY", lambda file: np.load(file), "magic"),
}


@pytest.mark.parametrize(("content", "read", "reason"), READERS.values(), ids=READERS)
def test_what_cannot_be_read_is_the_path_and_the_reason(tmp_path, content, read, reason):
    file = tmp_path / "file"
    if content == "folder":
        file.mkdir()
    elif content is not None:
        file.write_bytes(content)
    with raises(errors.UserError, f"{file}: ", reason), disk.reading(file):
        read(file)


def test_a_library_s_own_exception_can_be_named_and_others_pass(tmp_path):
    class Refused(Exception):
        pass

    with raises(errors.UserError, "header too large"), disk.reading(tmp_path, Refused):
        raise Refused("header too large")
    with pytest.raises(Refused), disk.reading(tmp_path):
        raise Refused
    with raises(errors.UserError, "train.csv, labels"), disk.reading(tmp_path):  # a mistake that has its own sentence
        raise errors.UserError("train.csv, labels")

"""Files: unreadable files are refused with a reason, writes are atomic, a full disk keeps the last checkpoint."""

import errno
import json
import os
import pathlib
import stat
import subprocess
import sys
import zipfile

import numpy as np
import pytest
from errors import raises

from experiments.config import disk, errors
from experiments.data import files as data_files, pretrained_tokenizer
from experiments.folder import records


def make_private_mount(commands: str, name: str) -> list[str]:
    """Return a prefix that runs a command in a new mount namespace, after these commands of `sh`.

    Skip the test if this machine does not allow it.
    """
    inside = ["unshare", "-rm", "sh", "-c"]
    try:
        subprocess.run([*inside, commands], check=True, capture_output=True, timeout=10)
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"{name} cannot be made here: {error}")
    return [*inside, f'{commands} && exec "$@"', "sh"]


READERS = {
    "missing": (None, lambda file: file.read_bytes(), "No such file"),
    "a folder": ("folder", lambda file: file.read_bytes(), "Is a directory"),
    "another encoding": (b"caf\xe9", lambda file: file.read_text("utf-8"), "utf-8"),
    "an unknown encoding": (b"", lambda file: file.read_text("utf-99"), "utf-99"),
    "JSON that is cut off": (b'{"steps": 9', lambda file: json.loads(file.read_bytes()), "column"),
    "JSON of many brackets": (b"[" * 100_000, lambda file: json.loads(file.read_bytes()), "recursion"),
    "JSON without a key": (b"{}", lambda file: json.loads(file.read_bytes())["steps"], "missing 'steps'"),
    "no zip archive": (b"PK", lambda file: zipfile.ZipFile(file), "zip"),
    "no array": (b"\x93NUMPY", lambda file: np.load(file), "magic"),
}


@pytest.mark.parametrize(("content", "read", "reason"), READERS.values(), ids=READERS)
def test_an_unreadable_file_is_reported_with_its_path_and_the_reason(tmp_path, content, read, reason):
    file = tmp_path / "file"
    if content == "folder":
        file.mkdir()
    elif content is not None:
        file.write_bytes(content)
    with raises(errors.UserError, f"{file}: ", reason), disk.reading(file):
        read(file)


def test_an_exception_of_a_library_is_converted_only_if_it_is_listed(tmp_path):
    class LibraryError(Exception):
        pass

    with raises(errors.UserError, "header too large"), disk.reading(tmp_path, LibraryError):
        raise LibraryError("header too large")
    with pytest.raises(LibraryError), disk.reading(tmp_path):
        raise LibraryError
    with raises(errors.UserError, "train.csv, labels"), disk.reading(tmp_path):  # a UserError keeps its own message
        raise errors.UserError("train.csv, labels")


@pytest.mark.parametrize("kind", ["pipe", "/dev/zero"])
def test_a_pipe_and_an_endless_file_are_refused_by_all_readers(tmp_path, kind):
    for name in ("summary.json", "a.npz", "a.txt", "tokenizer.json"):
        os.mkfifo(tmp_path / name) if kind == "pipe" else (tmp_path / name).symlink_to(kind)
    for name, read in (
        ("summary.json", lambda file: records.read_object(file, {})),
        ("a.npz", disk.read_npz),
        ("a.txt", lambda file: list(data_files.pieces(data_files.on_disk(file)))),
        ("tokenizer.json", pretrained_tokenizer.read),
    ):
        with raises(errors.UserError, tmp_path / name, "pipe or a device"):
            read(tmp_path / name)
    with raises(errors.UserError, "summary.json", "256 MiB"):
        (tmp_path / "summary.json").unlink()
        with (tmp_path / "summary.json").open("wb") as file:
            file.truncate(disk.MOST_BYTES + 1)
        records.read_object(tmp_path / "summary.json", {})


def test_arrays_of_an_npz_file_are_read_by_name(tmp_path, monkeypatch):
    file = tmp_path / "arrays.npz"
    np.savez(file, x=np.arange(3), y=np.ones(2))
    assert {name: x.tolist() for name, x in disk.read_npz(file).items()} == {"x": [0, 1, 2], "y": [1, 1]}
    assert disk.read_npz(file, [("x", "z"), ("y",)]).keys() == {"y"}
    with raises(errors.UserError, file, "(x, z) or (w)", "x, y"):
        disk.read_npz(file, [("x", "z"), ("w",)])
    with monkeypatch.context() as patch:
        patch.setattr(disk, "host_memory", lambda: 100)
        with raises(errors.UserError, file, "100 bytes"):
            disk.read_npz(file)
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    with raises(errors.UserError, file):
        disk.read_npz(file)
    np.savez(file, x=np.array([{}]))
    with raises(errors.UserError, file, "allow_pickle"):
        disk.read_npz(file)


def test_a_file_is_replaced_completely_or_not_at_all(tmp_path, monkeypatch):
    file = tmp_path / "a.json"
    disk.write_json(file, {"a": 1})
    with raises(OSError, errno.ENOSPC), disk.draft(file) as new:
        new.write(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"] and json.loads(file.read_text()) == {"a": 1}

    def raise_interrupt(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "replace", raise_interrupt)
        patch.setattr(pathlib.Path, "unlink", raise_interrupt)  # the draft stays, as after SIGKILL
        disk.write_json(file, {"a": 2})
    assert json.loads(file.read_text()) == {"a": 1}
    (tmp_path / "notes.draft").touch()
    disk.tidy(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"a.json", "notes.draft"}


def test_written_files_have_the_permissions_of_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        disk.write_json(tmp_path / "summary.json", {})
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "summary.json").stat().st_mode) == 0o640


def test_removing_a_link_leaves_its_target(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    for name in ("link", "nothing"):
        disk.remove(tmp_path / name)
    assert [path.name for path in tmp_path.rglob("*")] == ["folder", "file"]
    disk.remove(tmp_path / "folder")
    assert not list(tmp_path.iterdir())


def test_json_has_null_for_numbers_that_are_not_finite():
    tree = {"a": [1.5, float("nan"), {"b": (float("inf"), -float("inf"))}], "c": None, "d": "NaN"}
    assert json.loads(disk.as_json(tree)) == {"a": [1.5, None, {"b": [None, None]}], "c": None, "d": "NaN"}


FULL_DISK_PROGRAM = """
import contextlib, pathlib, resource, signal, subprocess, sys
import jax, numpy as np
from experiments.config import disk, errors
from experiments.engine import run as runs
from experiments.folder import checkpoint, log, workdir as workdirs

folder, size = pathlib.Path(sys.argv[1]), int(sys.argv[2])
state = {"params": {"x_D": np.random.default_rng(0).standard_normal(1 << 16, np.float32)}}
saves = checkpoint.Checkpoints(folder / "checkpoints", keep=1)
saves.save(1, state)
saves.wait()
writer = log.Log(folder, start=0)
if size:  # limit the size of files
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
else:  # fill the small disk
    with (folder / "fill").open("wb", buffering=0) as fill, contextlib.suppress(OSError):
        for _ in range(1000):
            fill.write(bytes(4096))

def print_error(function, *args, **options):
    try:
        function(*args, **options)
    except (errors.UserError, errors.RunError) as error:
        print(error)

def save():
    saves.save(2, state)
    saves.close()

def write():  # until the disk is full
    with runs.file_errors(folder), contextlib.closing(writer):
        for step in range(10_000):
            writer.write(step, {f"train/{i}": 1.0 for i in range(9)})

print_error(save)
saves.close()
print_error(write)
saves = checkpoint.Checkpoints(folder / "checkpoints", keep=1)
step, _ = saves.resume(jax.tree.map(jax.numpy.asarray, state))
saves.close()
print(step, *(path.name for path in (folder / "checkpoints").iterdir()))
if not size:
    subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
    print_error(workdirs.lock(folder).__enter__)
    print_error(workdirs.lock(folder / "new").__enter__)
    print_error(checkpoint.Checkpoints, folder / "more", keep=1)
    print_error(disk.write_new, folder / "sample.txt", b"")
"""


def test_a_full_disk_and_a_read_only_drive_are_one_line_errors(tmp_path):
    """The earlier checkpoint stays valid. The timeout catches a log that waits forever for its thread.

    If this machine allows no private mount, a limit on the size of files replaces the full disk.
    """
    try:
        prefix = make_private_mount(f"mount -t tmpfs -o size=1400k tmpfs {tmp_path}", "a small disk")
    except pytest.skip.Exception:
        prefix = []
    size, reason = (0, "No space left on device") if prefix else (20_000, "File too large")
    environment = os.environ | {"PYTHONPATH": str(pathlib.Path(__file__).parents[2]), "XLA_FLAGS": ""}
    command = [*prefix, sys.executable, "-B", "-c", FULL_DISK_PROGRAM, str(tmp_path), str(size)]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert process.returncode == 0, process.stderr
    lines = process.stdout.splitlines()
    expected = [("step 2", tmp_path / "checkpoints", reason), (tmp_path, reason), ("1 1",)]
    paths = [tmp_path, tmp_path / "new", tmp_path / "more", tmp_path / "sample.txt"]
    expected += [] if size else [(path, "Read-only file system") for path in paths]
    assert len(lines) == len(expected), lines
    for line, parts in zip(lines, expected, strict=True):
        assert all(str(part) in line for part in parts), line

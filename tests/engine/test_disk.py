"""Files: unreadable ones are refused with a reason, writes are atomic, and a full disk keeps the last checkpoint."""

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

from experiments.engine import disk, errors


def own_disk(commands: str, what: str) -> list[str]:
    """Return a prefix for a command, with which `sh` runs these commands (mounts) for it alone; skip if it cannot."""
    inside = ["unshare", "-rm", "sh", "-c"]
    try:
        subprocess.run([*inside, commands], check=True, capture_output=True, timeout=10)
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"{what} cannot be made here: {error}")
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


@pytest.mark.parametrize(("content", "reason"), [(None, "its result"), ("[]", "object"), ("{", "line 1")])
def test_what_is_not_a_json_object_is_named(tmp_path, content, reason):
    file = tmp_path / "summary.json"
    if content:
        file.write_text(content)
    with raises(errors.UserError, file, reason):
        disk.read_json(file, says="its result")


def test_arrays_of_an_npz_file_by_name(tmp_path, monkeypatch):
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


def test_a_file_is_replaced_as_a_whole_or_stays(tmp_path, monkeypatch):
    file = tmp_path / "a.json"
    disk.write_json(file, {"a": 1})
    with raises(OSError, errno.ENOSPC), disk.draft(file) as new:
        new.write(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert [found.name for found in tmp_path.iterdir()] == ["a.json"] and json.loads(file.read_text()) == {"a": 1}

    def killed(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "replace", killed)
        patch.setattr(pathlib.Path, "unlink", killed)  # as SIGKILL leaves it
        disk.write_json(file, {"a": 2})
    assert json.loads(file.read_text()) == {"a": 1}
    (tmp_path / "notes.draft").touch()
    disk.tidy(tmp_path)
    assert {found.name for found in tmp_path.iterdir()} == {"a.json", "notes.draft"}


def test_others_may_read_what_is_written_as_the_umask_says(tmp_path):
    before = os.umask(0o027)
    try:
        disk.write_json(tmp_path / "summary.json", {})
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "summary.json").stat().st_mode) == 0o640


def test_of_a_link_only_the_link_is_removed(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    for name in ("link", "nothing"):
        disk.remove(tmp_path / name)
    assert [found.name for found in tmp_path.rglob("*")] == ["folder", "file"]
    disk.remove(tmp_path / "folder")
    assert not list(tmp_path.iterdir())


def test_json_has_null_for_what_is_not_finite():
    whole = {"a": [1.5, float("nan"), {"b": (float("inf"), -float("inf"))}], "c": None, "d": "NaN"}
    assert json.loads(disk.as_json(whole)) == {"a": [1.5, None, {"b": [None, None]}], "c": None, "d": "NaN"}


FULL = """
import contextlib, pathlib, resource, signal, subprocess, sys
import jax, numpy as np
from experiments.engine import checkpoint, disk, errors, log, run, workdir

folder, room = pathlib.Path(sys.argv[1]), int(sys.argv[2])
state = {"params": {"x_D": np.random.default_rng(0).standard_normal(1 << 16, np.float32)}}
saves = checkpoint.Checkpoints(folder / "checkpoints", keep=1)
saves.save(1, state)
saves.wait()
writer = log.Log(folder, start=0)
if room:  # no file may be larger
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
else:  # no room on this disk, which is small
    with (folder / "fill").open("wb", buffering=0) as fill, contextlib.suppress(OSError):
        for _ in range(1000):
            fill.write(bytes(4096))

def told(use, *args, **options):
    try:
        use(*args, **options)
    except (errors.UserError, errors.RunError) as error:
        print(error)

def save():
    saves.save(2, state)
    saves.close()

def write():  # until the disk takes no more
    with run.file_errors(folder), contextlib.closing(writer):
        for step in range(10_000):
            writer.write(step, {f"train/{i}": 1.0 for i in range(9)})

told(save)
saves.close()
told(write)
saves = checkpoint.Checkpoints(folder / "checkpoints", keep=1)
step, _ = saves.resume(jax.tree.map(jax.numpy.asarray, state))
saves.close()
print(step, *(found.name for found in (folder / "checkpoints").iterdir()))
if not room:
    subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
    told(workdir.lock(folder).__enter__)
    told(workdir.lock(folder / "new").__enter__)
    told(checkpoint.Checkpoints, folder / "more", keep=1)
    told(disk.write_new, folder / "sample.txt", b"")
"""


def test_a_full_disk_and_a_read_only_drive_are_sentences(tmp_path):
    """The earlier checkpoint is still good; a limit of time is for a log that waits for its thread without end.

    If a test can make no disk here, files cannot grow, and no drive is read-only.
    """
    try:
        disk = own_disk(f"mount -t tmpfs -o size=1400k tmpfs {tmp_path}", "a small disk")
    except pytest.skip.Exception:
        disk = []
    room, reason = (0, "No space left on device") if disk else (20_000, "File too large")
    environment = os.environ | {"PYTHONPATH": str(pathlib.Path(__file__).parents[2]), "XLA_FLAGS": ""}
    command = [*disk, sys.executable, "-B", "-c", FULL, str(tmp_path), str(room)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    expected = [("step 2", tmp_path / "checkpoints", reason), (tmp_path, reason), ("1 1",)]
    places = [tmp_path, tmp_path / "new", tmp_path / "more", tmp_path / "sample.txt"]
    expected += [] if room else [(place, "Read-only file system") for place in places]
    assert len(lines) == len(expected), lines
    for line, parts in zip(lines, expected, strict=True):
        assert all(str(part) in line for part in parts), line

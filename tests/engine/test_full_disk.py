"""A real disk that takes no more, and a read-only one: sentences, and the earlier checkpoint is still good."""

import os
import pathlib
import subprocess
import sys

import pytest
import tiny

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
        disk = tiny.own_disk(f"mount -t tmpfs -o size=1400k tmpfs {tmp_path}", "a small disk")
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

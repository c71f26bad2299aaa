"""The log of a run where something is wrong with the disk: a full one is told, a damaged line costs no other."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
import tiny

from experiments.engine import log

# Writes until the disk takes no more: first both files of a log, then events alone.
FULL = """
import contextlib, pathlib, resource, signal, sys, threading
from experiments.engine import errors, run, log

folder, room = pathlib.Path(sys.argv[1]), int(sys.argv[2])
begun = [log.Log(folder, start=0)]
if room:  # no file may be larger
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
else:  # no room on this disk, which is small
    with (folder / "fill").open("wb", buffering=0) as fill, contextlib.suppress(OSError):
        for _ in range(1000):
            fill.write(bytes(4096))
for writer in begun:
    try:
        with run.file_errors(folder), contextlib.closing(writer):
            for step in range(10_000):
                writer.write(step, {f"train/{i}": 1.0 for i in range(9)})
    except errors.RunError as error:
        print(error)
print(threading.active_count())
"""


def check_full(folder, room, reason, *before):
    """It ends, without a traceback or a thread, and each writer has raised; its limit is for one that blocks."""
    environment = os.environ | {"PYTHONPATH": str(pathlib.Path(__file__).parents[2]), "XLA_FLAGS": ""}
    command = [*before, sys.executable, "-c", FULL, str(folder), str(room)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    sentence = f"{folder}: {reason}; once that is mended, the same command goes on from the last checkpoint"
    assert done.stdout.splitlines() == [sentence, "1"]


def test_a_file_that_cannot_grow_is_one_sentence(tmp_path):
    check_full(tmp_path, 20_000, "File too large")


def test_a_full_disk_is_one_sentence(tmp_path):
    disk = tiny.own_disk(f"mount -t tmpfs -o size=500k tmpfs {tmp_path}", "a small disk")
    check_full(tmp_path, 0, "No space left on device", *disk)


def rows(*steps):
    return [{"step": step, "train/loss": step / 2} for step in steps]


@pytest.mark.parametrize(("bad", "said"), [((3,), "line 3 of"), ((3, 5), "line 3 (and 1 more) of")])
def test_a_damaged_line_is_left_out_and_said_once(tmp_path, capsys, bad, said):
    lines = [json.dumps(row) for row in rows(*range(1, 10))]
    for line in bad:
        lines[line - 1] = lines[line - 1][:-1] + "\0"
    file = tmp_path / "metrics.jsonl"
    file.write_text("\n".join(lines) + '\n{"step": 10, "tra')  # where a crash has cut it off, which is no damage
    kept = [step for step in range(1, 10) if step not in bad]
    assert log.read(tmp_path) == rows(*kept) and capsys.readouterr().out == ""
    for told in (f"{said} {file} is damaged, and left out\n", ""):
        log.Log(tmp_path, start=8).close()
        assert capsys.readouterr().out == told
        assert log.read(tmp_path) == rows(*kept[:-1])

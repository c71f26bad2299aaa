"""Logging: metrics.jsonl (also with damaged lines), TensorBoard, W&B, and the progress bar."""

import contextlib
import math
import struct

import pytest
from errors import raises
from tensorboardX.proto import event_pb2

from experiments.config import errors
from experiments.folder import log, records


def read_scalars(folder):
    """Return {(tag, step): value} of the TensorBoard events, and the steps at which sessions start."""
    result, starts = {}, []
    for file in sorted((folder / "events").iterdir()):
        content, offset = file.read_bytes(), 0
        while offset < len(content):
            (size,) = struct.unpack_from("<Q", content, offset)
            event = event_pb2.Event.FromString(content[offset + 12 : offset + 12 + size])
            offset += 16 + size  # the size, its checksum, the event, its checksum
            result |= {(value.tag, event.step): value.simple_value for value in event.summary.value}
            starts += [event.step] if event.HasField("session_log") else []
    return result, starts


def write_session(folder, rows, *, start=0, **options):
    """Write these rows, {step: values}, as one session of a run."""
    with contextlib.closing(log.Log(folder, start=start, **options)) as writer:
        for step, values in rows.items():
            writer.write(step, values)


def test_rows_after_the_start_are_deleted(tmp_path):
    """The last line may be cut off: a killed run wrote it."""
    write_session(tmp_path, {step: {"train/loss": step / 2} for step in (1, 2, 3, 4)})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "tra')
    write_session(tmp_path, {3: {"train/loss": math.nan, "train/accuracy": math.inf}}, start=2)
    assert (tmp_path / "metrics.jsonl").read_text() == (
        '{"step": 1, "train/loss": 0.5}\n{"step": 2, "train/loss": 1.0}\n'
        '{"step": 3, "train/loss": null, "train/accuracy": null}\n'
    )
    _, second, third = records.read_metrics(tmp_path)
    assert second == {"step": 2, "train/loss": 1.0}
    assert third == {"step": 3, "train/loss": None, "train/accuracy": None}
    assert {file.name for file in tmp_path.iterdir()} == {"metrics.jsonl", "events"}


def test_tensorboard_gets_the_same_numbers(tmp_path):
    for start, steps in ((0, (1, 2)), (2, (3,))):
        write_session(tmp_path, {step: {"train/loss": step / 2, "eval/accuracy": 0.25} for step in steps}, start=start)
    numbers, starts = read_scalars(tmp_path)
    assert numbers == {("train/loss", n): n / 2 for n in (1, 2, 3)} | {("eval/accuracy", n): 0.25 for n in (1, 2, 3)}
    assert starts == [3]  # TensorBoard ignores what an earlier session wrote from this step on


def test_weights_and_biases_gets_the_same_numbers_offline_and_a_resume_is_the_same_run(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    (tmp_path / "config.json").write_text('{"config": {"seed": 3}}')
    for start in (0, 2):
        write_session(
            tmp_path, {start + 1: {"train/loss": 0.5, "eval/accuracy": math.nan}}, start=start, writers=["wandb"]
        )
        wandb.teardown()  # imitates two processes
    first, second = sorted(tmp_path.glob("wandb/offline-run-*-*"))
    assert first.name.split("-")[3] == second.name.split("-")[3]
    files = [next(one.glob("*.wandb")).read_bytes() for one in (first, second)]
    assert [b"train/loss" in one and b"accuracy" not in one for one in files] == [True, True]
    assert b"seed" in files[0]
    assert [row["step"] for row in records.read_metrics(tmp_path)] == [1, 3] and not (tmp_path / "events").exists()


def test_an_unknown_log_is_refused(monkeypatch):
    # Pretend that wandb, an extra, is installed.
    monkeypatch.setattr(log.importlib.util, "find_spec", lambda name: name)
    log.check(["jsonl", "tensorboard", "wandb", "symmetry"])
    monkeypatch.setattr(log.importlib.util, "find_spec", lambda name: None)
    for names, part in ((["wandb"], ".[wandb]"), ([3], '"3"')):
        with raises(errors.UserError, "log", part):
            log.check(names)

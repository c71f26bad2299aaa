"""The folder of a run: one run at a time in it, and what may change when it goes on."""

import contextlib
import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys

import pytest
import tiny

from experiments.engine import disk, errors, mesh, run as runs, workdir
from experiments.pretrained import open_model

HOLDS = """
import fcntl, sys, time
with open(sys.argv[1] + "/lock", "w") as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    lock.write("process 61 on there")
    lock.flush()
    print("held", flush=True)
    time.sleep(60)
"""


def config(**changes):
    made = tiny.base.get_config("language")
    made.update_from_flattened_dict({key.replace("__", "."): value for key, value in changes.items()})
    return made.to_dict()


def entered(folder, **changes):
    """What `enter` says, in the lock, as a run does it."""
    with workdir.hold(folder):
        return workdir.enter(folder, config(**changes))


# One run at a time


def test_a_second_run_is_refused_with_the_first_one_s_name_until_that_one_is_killed(tmp_path):
    with workdir.hold(tmp_path):
        name = rf"process {os.getpid()} on {socket.gethostname()}"
        with pytest.raises(errors.UserError, match=rf"a run that is under way \({name}\)"):
            entered(tmp_path)
    command = [sys.executable, "-c", HOLDS, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout.readline() == "held\n"
        with pytest.raises(errors.UserError, match="process 61 on there") as caught:
            entered(tmp_path)
        assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)
        assert [found.name for found in tmp_path.iterdir()] == ["lock"]
        first.send_signal(signal.SIGKILL)
    assert (tmp_path / "lock").exists()  # but nobody has it
    assert not entered(tmp_path)
    assert {found.name for found in tmp_path.iterdir()} == {"config.json"}


def test_nothing_is_left_where_the_folder_is_another_s(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(errors.UserError, match="holds files, but no run"):
        entered(tmp_path)
    with workdir.hold(tmp_path / "new" / "run"):
        pass
    assert [found.name for found in tmp_path.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("again", [False, True])
def test_a_lock_removed_by_the_one_who_had_it_is_not_taken_for_one(tmp_path, monkeypatch, again):
    """Between opening the file and locking it, the other run ends and removes it; a third one may make a new one."""
    whole, third = fcntl.flock, []

    def flock(opened, how):
        if not third:
            os.unlink(tmp_path / "lock")
            third.append(os.open(tmp_path / ("lock" if again else "other"), os.O_RDWR | os.O_CREAT))
            whole(third[0], how)
        whole(opened, how)

    monkeypatch.setattr(workdir.fcntl, "flock", flock)
    refused = pytest.raises(errors.UserError, match="is in use by a run") if again else contextlib.nullcontext()
    with refused, workdir.hold(tmp_path):
        assert (tmp_path / "lock").exists()
    os.close(third[0])


def test_a_folder_that_was_moved_takes_no_lock_of_another_run_with_it(tmp_path):
    """The first run's folder is renamed, and a second run has the path now, and still when the first one ends."""
    folder, moved = tmp_path / "run", tmp_path / "moved"
    with workdir.hold(folder):
        os.rename(folder, moved)
        second = workdir.hold(folder)
        second.__enter__()
    with pytest.raises(errors.UserError, match="is in use by a run"), workdir.hold(folder):
        pass
    second.__exit__(None, None, None)
    assert not folder.exists() and [found.name for found in moved.iterdir()] == ["lock"]


def test_a_drive_without_locks_is_used_with_a_word(tmp_path, monkeypatch, capsys):
    def flock(opened, how):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(workdir.fcntl, "flock", flock)
    (tmp_path / "lock").write_text("of another run, for all one knows")
    assert not entered(tmp_path)
    assert f"{tmp_path} cannot be locked" in capsys.readouterr().out
    assert (tmp_path / "lock").exists()
    monkeypatch.undo()
    whole = os.close  # of a drive that is gone meanwhile it is let go in silence

    def close(opened):
        whole(opened)
        raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))

    with workdir.hold(tmp_path):
        monkeypatch.setattr(workdir.os, "close", close)
    monkeypatch.undo()
    assert not entered(tmp_path)


@pytest.mark.parametrize("where", ["file", "file/below"])
def test_a_folder_that_cannot_be_is_a_sentence(tmp_path, where):
    (tmp_path / "file").write_text("")
    with pytest.raises(errors.UserError, match="cannot be written"):
        entered(tmp_path / where)


# What may change


def test_a_run_goes_on_with_what_may_change(tmp_path):
    assert not entered(tmp_path)
    changes = {"mesh__data": 2, "train__steps": 2000, "train__keep_best": "eval/loss"}
    assert not entered(tmp_path, **changes)
    assert json.loads((tmp_path / "config.json").read_text())["config"] == config(**changes)


def test_all_else_is_refused_by_name_with_what_may_change(tmp_path):
    entered(tmp_path)
    before = (tmp_path / "config.json").read_text()
    with pytest.raises(errors.UserError) as caught:
        entered(tmp_path, train__batch_size=32, seed=1, mesh__data=2)
    assert (tmp_path / "config.json").read_text() == before
    refused, _, right = str(caught.value).partition("; what may: ")
    assert refused.endswith("resuming may not change seed (0 -> 1), train.batch_size (64 -> 32)")
    assert "mesh.*" in right and "train.steps" in right and "\n" not in str(caught.value)


def test_a_finished_run_goes_on_when_more_steps_are_wanted(tmp_path):
    entered(tmp_path)
    (tmp_path / "summary.json").write_text('{"steps": 1000}')
    assert entered(tmp_path, log=[])
    assert not entered(tmp_path, train__steps=1001)
    with pytest.raises(errors.UserError, match="has taken 1,000 steps: train.steps = 999 must not be less"):
        entered(tmp_path, train__steps=999)


def test_fewer_steps_than_a_checkpoint_are_refused(tmp_path):
    entered(tmp_path)
    for name in ("300", "2000.writing"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert not entered(tmp_path, train__steps=300)
    with pytest.raises(errors.UserError, match="has taken 300 steps"):
        entered(tmp_path, train__steps=299)


NESTED = "[" * 100_000
HUGE = 10_000  # bytes, in place of what is too large for a JSON file


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "{}", '{"config": 3}', '{"config": {"seed": ', NESTED, '{"config": {"seed": ' + NESTED, "padded"],
)
def test_a_damaged_a_nested_or_a_huge_config_is_a_sentence_and_stays(tmp_path, monkeypatch, content):
    monkeypatch.setattr(disk, "LARGEST_TEXT", HUGE if content == "padded" else disk.LARGEST_TEXT)
    entered(tmp_path)
    whole = (tmp_path / "config.json").read_text()
    content = whole + " " * HUGE if content == "padded" else content
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(errors.UserError, match="config.json is damaged, so this run cannot be resumed: choose another"):
        entered(tmp_path)
    assert (tmp_path / "config.json").read_text() == content


PADDED = '{"steps": 1000' + " " * HUGE + "}"


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"steps": "many"}', "3", '{"steps": null}', NESTED, PADDED])
def test_a_damaged_summary_is_made_again(tmp_path, monkeypatch, content):
    monkeypatch.setattr(disk, "LARGEST_TEXT", HUGE if content == PADDED else disk.LARGEST_TEXT)
    entered(tmp_path)
    (tmp_path / "summary.json").write_text(content)
    assert not entered(tmp_path)


# What a run that goes on is told about what has changed since

BITS, NOW = "numbers may differ in the last bits from here on", mesh.versions()


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ({}, None),
        ({"steps": 2000, "schedule": "constant"}, None),
        ({"steps": 2000}, "train.steps was 1000 and is 2000: the rest of the learning rate's schedule is another one"),
        ({"versions": {"flax": "0.0.1"}}, None),
        ({"versions": {"jax": None}}, None),
        (
            {"versions": {"jax": "0.0.1", "jaxlib": "0.0.2"}},
            f"it was trained with jax 0.0.1, now {NOW['jax']}; with jaxlib 0.0.2, now {NOW['jaxlib']}: {BITS}",
        ),
        ({"devices": "2 x cpu"}, None),
        ({"devices": "8 x TPU v5 lite"}, f"it was trained on 8 x TPU v5 lite, now 2 x cpu: {BITS}"),
    ],
)
def test_what_has_changed_since_is_told(tmp_path, capsys, what, told):
    """Of a run with 1000 steps, some of which are taken, on two devices."""
    steps, schedule = what.pop("steps", 1000), what.pop("schedule", "cosine")
    entered(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    saved |= {"devices": what.get("devices"), "versions": NOW | what.get("versions", {})}
    saved["config"]["optim"]["schedule"] = schedule
    if not what.get("devices"):  # which an older version did not tell
        del saved["devices"]
    now = config(train__steps=steps, optim__schedule=schedule)
    for trained in (True, False):
        (tmp_path / "config.json").write_text(json.dumps(saved))
        (tmp_path / "checkpoints" / "3").mkdir(parents=True) if trained else (tmp_path / "checkpoints" / "3").rmdir()
        assert not workdir.enter(tmp_path, now, devices="2 x cpu")
        assert capsys.readouterr().out.splitlines() == [told] * bool(told and trained)


def test_where_a_folder_holds_runs_the_newest_is_offered(tmp_path):
    for when, name in enumerate(("b", "c", "a b")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        os.utime(tmp_path / name / "config.json", (when, when))
    with pytest.raises(errors.UserError, match=f"to resume: the newest run in it is --workdir='{tmp_path}/a b'$"):
        workdir.enter(tmp_path, {"train": {"steps": 1}})
    with pytest.raises(errors.UserError, match=f"is no run: the newest run in it is --checkpoint='{tmp_path}/a b'$"):
        open_model.open(tmp_path)


def test_it_is_said_that_bfloat16_is_slow_on_a_cpu(capsys):
    for dtype in ("float32", "bfloat16"):
        runs.devices(tiny.settings("vision", model__compute_dtype=dtype), "cpu")
        assert ("bfloat16 is slower than float32 on a CPU" in capsys.readouterr().out) == (dtype == "bfloat16")

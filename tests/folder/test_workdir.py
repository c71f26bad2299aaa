"""The run directory: one run at a time, and the settings that may change when a run is resumed."""

import errno
import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys

import pytest
import tiny
from errors import raises

from experiments.config import disk, errors
from experiments.devices import mesh as meshes
from experiments.folder import workdir as workdirs
from experiments.pretrained import open_model

LOCKING_PROGRAM = """
import fcntl, sys, time
with open(sys.argv[1] + "/lock", "w") as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    lock.write("process 61 on there")
    lock.flush()
    print("held", flush=True)
    time.sleep(60)
"""


def config(**changes):
    config = tiny.base.get_config("language")
    config.update_from_flattened_dict({key.replace("__", "."): value for key, value in changes.items()})
    return config.to_dict()


def open_run(folder, resume=None, data=None, **changes):
    """Lock the folder and call `workdirs.open_run`, as a run does. Return True if the run is finished."""
    with workdirs.lock(folder):
        return workdirs.open_run(folder, config(**changes), resume=resume, data=data)


# One run at a time


def test_a_second_run_is_refused_with_the_name_of_the_first_until_that_is_killed(tmp_path):
    with workdirs.lock(tmp_path):
        with raises(workdirs.InUse, tmp_path, f"process {os.getpid()} on {socket.gethostname()}"):
            open_run(tmp_path)
    command = [sys.executable, "-c", LOCKING_PROGRAM, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout.readline() == "held\n"
        with raises(workdirs.InUse, tmp_path, "process 61 on there"):
            open_run(tmp_path)
        first.send_signal(signal.SIGKILL)
    assert (tmp_path / "lock").exists()  # but no process holds the lock
    assert not open_run(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"config.json"}


def test_a_run_in_use_is_refused_before_its_files_and_its_data_are_read(tmp_path):
    file = tiny.config_file(tmp_path, "vision", image__source=str(tmp_path / "nothing.npz"), init_from="nothing")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("damaged")
    with workdirs.lock(tmp_path / "run"):
        assert "in use by another run" in tiny.run("--config", file, "--workdir", str(tmp_path / "run")).err
    assert "config.json" in tiny.run("--config", file, "--workdir", str(tmp_path / "run")).err
    assert [entry.name for entry in (tmp_path / "run").iterdir()] == ["config.json"]


@pytest.mark.parametrize("is_new", [False, True])
def test_a_lock_file_that_its_owner_has_deleted_does_not_count(tmp_path, monkeypatch, is_new):
    """After this run opens the file and before it locks it, the other run ends and deletes the file.

    is_new: a third run then makes and locks a new file.
    """
    original, descriptors = fcntl.flock, []

    def flock(descriptor, operation):
        if not descriptors:
            os.unlink(tmp_path / "lock")
            descriptors.append(os.open(tmp_path / ("lock" if is_new else "other"), os.O_RDWR | os.O_CREAT))
            original(descriptors[0], operation)
        original(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    if is_new:
        with raises(workdirs.InUse, tmp_path), workdirs.lock(tmp_path):
            pass
    else:
        with workdirs.lock(tmp_path):
            assert (tmp_path / "lock").exists()
    os.close(descriptors[0])


def test_a_lock_that_is_the_users_file_is_not_overwritten(tmp_path):
    for number, make in enumerate((os.symlink, os.link, shutil.copy)):
        folder = tmp_path / str(number)
        folder.mkdir()
        (tmp_path / "thesis.txt").write_text("years of work" if make is shutil.copy else "process 7")
        make(tmp_path / "thesis.txt", folder / "lock")
        before = (folder / "lock").read_text()
        with raises(errors.UserError, folder / "lock"):
            open_run(folder)
        assert (folder / "lock").read_text() == before
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe" / "lock")
    with raises(errors.UserError, tmp_path / "pipe", "pipe or a device"):
        open_run(tmp_path / "pipe")


def test_a_drive_without_locks_is_used_with_a_warning(tmp_path, monkeypatch, capsys):
    def flock(descriptor, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    assert not open_run(tmp_path)
    assert f"{tmp_path}: this drive has no locks" in capsys.readouterr().out


def test_a_path_below_a_file_and_a_folder_of_other_files_are_refused(tmp_path):
    file = tmp_path / "thesis.txt"
    file.write_text("years of work")
    for folder in (file, file / "below", tmp_path):
        with raises(errors.UserError, folder):
            open_run(folder)
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.txt"]


# Settings that may change


def test_settings_that_may_change_on_resume_exist():
    keys = tiny.fields()
    for name in workdirs.MAY_CHANGE:
        assert name in keys or (name.endswith(".") and any(key.startswith(name) for key in keys)), name


def test_a_resume_may_change_some_settings_and_all_others_are_refused_by_name(tmp_path):
    assert not open_run(tmp_path)
    changes = {"mesh__data": 2, "train__steps": 2000, "train__keep_best": "eval/loss"}
    assert not open_run(tmp_path, **changes)
    before = (tmp_path / "config.json").read_text()
    assert json.loads(before)["config"] == config(**changes)
    changes |= {"mesh__data": 4, "train__batch_size": 32, "seed": 1}
    with raises(errors.UserError, "seed (0 -> 1), train.batch_size (64 -> 32)", "mesh.*", "train.steps") as caught:
        open_run(tmp_path, **changes)
    assert (tmp_path / "config.json").read_text() == before and "mesh.data" not in str(caught.value)


def test_a_finished_run_is_resumed_if_more_steps_or_an_earlier_checkpoint_are_requested(tmp_path):
    open_run(tmp_path)
    (tmp_path / "summary.json").write_text('{"steps": 1000}')
    assert open_run(tmp_path, log=[])
    assert not open_run(tmp_path, train__steps=1001)
    with raises(errors.UserError, "1,000", "train.steps = 999"):
        open_run(tmp_path, train__steps=999)
    (tmp_path / "checkpoints" / "600").mkdir(parents=True)
    with raises(errors.UserError, "--resume=500", "600"):
        open_run(tmp_path, 500)
    assert (tmp_path / "summary.json").exists() and not open_run(tmp_path, 600)
    assert not (tmp_path / "summary.json").exists()


def test_fewer_steps_than_a_checkpoint_are_refused(tmp_path):
    open_run(tmp_path)
    for name in ("300", "2000.writing"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert not open_run(tmp_path, train__steps=300)
    with raises(errors.UserError, "300", "train.steps = 299"):
        open_run(tmp_path, train__steps=299)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"steps": "many"}', '{"steps": null}'])
def test_a_damaged_summary_or_config_is_refused(tmp_path, content):
    open_run(tmp_path)
    for name in ("summary.json", "config.json"):
        (tmp_path / name).write_text(content)
        with raises(errors.UserError, tmp_path / name):
            open_run(tmp_path)
        assert (tmp_path / name).read_text() == content


def test_other_classes_are_refused_and_other_data_make_a_warning_unless_nothing_was_trained(tmp_path, capsys):
    classes = ["cat", "dog", "eel"]
    assert not open_run(tmp_path, data={"sha256": "x", "classes": ["x"]})
    assert not open_run(tmp_path, data={"sha256": "a", "classes": classes})
    assert capsys.readouterr().out == ""
    (tmp_path / "checkpoints" / "600").mkdir(parents=True)
    for steps in (600, 1000):  # an unfinished and a finished run
        (tmp_path / "summary.json").write_text(json.dumps({"steps": steps}))
        before = (tmp_path / "config.json").read_text()
        for other in (["dog", "cat", "eel"], ["cat", "dog"], [*classes, "fly"]):
            with raises(errors.UserError, tmp_path, f"3 classes before, {len(other)} now"):
                open_run(tmp_path, data={"sha256": "a", "classes": other})
        assert (tmp_path / "config.json").read_text() == before
    for sha256, steps, warnings in (("a", 1000, 0), ("b", 1000, 1), ("b", 1001, 1), ("b", 1001, 0), (None, 1001, 0)):
        open_run(tmp_path, data={"sha256": sha256, "classes": classes}, train__steps=steps)
        out = capsys.readouterr().out
        assert out.count(f"warning: the data differ from those that {tmp_path}") == warnings, (sha256, steps)


# Changes since the last start

VERSIONS = meshes.versions()
OLD = VERSIONS | {"jax": "0.0.1", "jaxlib": "0.0.2"}


def make_record(steps=1000, schedule="cosine", warmup=2, versions=VERSIONS, devices="2 x cpu"):
    """Return the parts of config.json that `list_changes` reads."""
    optim = {"schedule": schedule, "warmup_steps": warmup}
    return {"config": {"train": {"steps": steps}, "optim": optim}, "versions": versions, "devices": devices}


@pytest.mark.parametrize(
    ("previous", "current", "parts"),
    [
        ({}, {}, None),
        ({"schedule": "constant"}, {"schedule": "constant", "steps": 2000}, None),
        ({"schedule": "constant", "steps": 60, "warmup": 100}, {"schedule": "constant", "warmup": 100}, ["60", "1000"]),
        ({}, {"steps": 2000}, ["train.steps", "1000", "2000"]),
        ({"versions": VERSIONS | {"flax": "0.0.1"}}, {}, None),
        ({"versions": OLD}, {}, ["jax 0.0.1", VERSIONS["jax"], "jaxlib 0.0.2"]),
        ({"devices": "8 x TPU v5 lite"}, {}, ["8 x TPU v5 lite", "2 x cpu"]),
    ],
)
def test_changes_since_the_last_start_are_printed(previous, current, parts):
    lines = workdirs.list_changes(make_record(**previous), make_record(**current))
    assert len(lines) == bool(parts) and all(part in lines[0] for part in parts or ())


def test_if_a_folder_holds_runs_the_newest_is_suggested(tmp_path):
    for seconds, name in enumerate(("b", "c", "a b")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        os.utime(tmp_path / name / "config.json", (seconds, seconds))
    with raises(errors.UserError, f"--workdir='{tmp_path}/a b'"):
        workdirs.open_run(tmp_path, {"train": {"steps": 1}})
    with raises(errors.UserError, f"--checkpoint='{tmp_path}/a b'"):
        open_model.open(tmp_path)


def test_a_draft_that_a_killed_process_left_among_the_sources_is_deleted(tmp_path):
    code, sources = tmp_path / "my_score.py", tmp_path / "run" / workdirs.SOURCES
    code.write_text("x = 1\n")
    sources.mkdir(parents=True)
    draft = sources / f"my_score.py.abc{disk.DRAFT}"
    draft.write_text("x =")
    workdirs.keep_sources(tmp_path / "run", {code: "my_score.py"})
    assert [file.name for file in sources.iterdir()] == ["my_score.py"]

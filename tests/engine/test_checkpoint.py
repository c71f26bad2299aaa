"""Checkpoints: complete or absent, on any mesh, verified, the newest and the best kept, and a disk that fails."""

import errno
import json
import os
import pathlib
import shutil
import stat
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import flip, numbers, resumed, saved, state, there
from errors import raises

from experiments.engine import checkpoint, disk, distributed, errors, manifest


class Killed(GeneratorExit):
    """The process ends here."""


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A folder with the checkpoints of steps 3 and 6, saved by 8 devices."""
    return saved(tmp_path_factory.mktemp("run") / "checkpoints", (3, 6), layout="2x2x2")


@pytest.fixture
def folder(good, tmp_path):
    """A copy of the folder `good`."""
    return shutil.copytree(good, tmp_path / "checkpoints")


@pytest.mark.parametrize(("before", "after"), [("1", "8"), ("8", "2x2x2"), ("2x2x2", "1"), ("8", "8 whole")])
def test_a_state_comes_back_on_any_mesh(tmp_path, before, after):
    assert resumed(tmp_path) is None
    saved(tmp_path, layout=before)
    wanted = state(after)
    step, found = resumed(tmp_path, wanted)
    assert step == 3 and numbers(found) == numbers(state(seed=3)) != numbers(wanted)
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for new, old in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert new.sharding.is_equivalent_to(old.sharding, new.ndim)
    params = checkpoint.parameters(tmp_path, 3)
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(params))
    assert checkpoint.digest(params) == checkpoint.digest(state(seed=3).params)


@pytest.mark.parametrize(
    ("name", "leaf", "parts"),
    [
        ("b_D", jnp.zeros(15, jnp.bfloat16), ["bfloat16 (16,)", "bfloat16 (15,)"]),
        ("b_D", jnp.zeros(16), ["bfloat16 (16,)", "float32 (16,)"]),
        ("more_D", jnp.zeros(16), ["missing", "float32 (16,)"]),
    ],
)
def test_a_checkpoint_of_other_arrays_is_refused(folder, name, leaf, parts):
    like = state()
    like = like.replace(params={"embed": like.params["embed"] | {name: leaf}})
    with raises(errors.UserError, folder / "6", f"params/embed/{name}", *parts):
        resumed(folder, like)
    assert there(folder) == {"3", "6"}


# Damage


DAMAGE = {
    "flipped": flip,
    "truncated": lambda file: file.write_bytes(file.read_bytes()[:-1]),
    "extended": lambda file: file.write_bytes(file.read_bytes() + b"x"),
    "missing": pathlib.Path.unlink,
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
@pytest.mark.parametrize("name", ["state/_METADATA", "state/d", "manifest.json"])
def test_a_damaged_file_is_named_with_the_step_to_resume_from(folder, name, damage):
    file = folder / "6" / name
    file = file if file.is_file() else max(file.iterdir())
    damage(file)
    if name != "manifest.json" or damage in (flip, DAMAGE["missing"]):
        with raises(errors.UserError, file):
            checkpoint.parameters(folder, 6)
        with raises(errors.UserError, file, "--resume=3"):
            resumed(folder)
    assert there(folder) == {"3", "6"}
    step, earlier = resumed(folder, step=3)
    assert step == 3 and numbers(earlier) == numbers(state(seed=3)) and there(folder) == {"3"}
    file = folder / "3" / "manifest.json"
    file.write_bytes(b"{}")
    with raises(errors.UserError, file, folder):
        resumed(folder)


def test_processes_that_see_different_checkpoints_are_refused(folder, monkeypatch):
    monkeypatch.setattr(distributed, "is_same", lambda value: value != 6)
    with raises(errors.UserError, folder):
        resumed(folder)


# Complete or absent


@pytest.mark.parametrize("at", ["begins", "arrays", "manifest", "renamed", "deleted"])
def test_killed_at_any_point_of_a_save_the_run_has_a_complete_checkpoint(folder, monkeypatch, at):
    def killed(*args, **options):
        raise Killed

    where, name = {
        "begins": (checkpoint.ocp.AsyncCheckpointer, "save"),
        "arrays": (checkpoint.ocp.AsyncCheckpointer, "wait_until_finished"),
        "manifest": (disk, "flush"),
        "renamed": (pathlib.Path, "rename"),
        "deleted": (disk.shutil, "rmtree"),
    }[at]
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(where, name, killed)
        saves = checkpoint.Checkpoints(folder, keep=2)
        saves.save(9, state(seed=9))
        saves.wait()
    saves.close()
    newest = 9 if at == "deleted" else 6
    assert "9.writing" in there(folder) or newest == 9
    step, found = resumed(folder)
    assert step == newest and numbers(found) == numbers(state("2x2x2", seed=newest) if newest == 6 else state(seed=9))
    assert there(folder) == ({"6", "9"} if newest == 9 else {"3", "6"})


def test_a_checkpoint_is_the_state_of_its_step(tmp_path):
    """The next steps reuse the memory of the state while it is written."""
    go_on = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    params = {"x_D": jnp.arange(1 << 20, dtype=jnp.float32)}
    saves = checkpoint.Checkpoints(tmp_path, keep=9)
    for step in (1, 2):
        saves.save(step, {"params": params})
        for _ in range(5):
            params = go_on(params)
    saves.close()
    assert [checkpoint.parameters(tmp_path, step)["x_D"][0] for step in (1, 2)] == [0, 5]


def test_a_save_returns_before_it_is_on_the_disk(tmp_path, monkeypatch):
    returned, write = threading.Event(), manifest.write

    def written(*args, **options):
        assert returned.wait(5), "the save waits for it"
        write(*args, **options)

    monkeypatch.setattr(manifest, "write", written)
    saves = checkpoint.Checkpoints(tmp_path, keep=9)
    saves.save(3, state())
    assert checkpoint.newest(tmp_path) is None and there(tmp_path) == {"3.writing"}
    returned.set()
    saves.close()
    assert checkpoint.newest(tmp_path) == 3


def test_an_error_in_the_background_is_raised_by_the_next_call_once(folder, monkeypatch):
    saves = checkpoint.Checkpoints(folder, keep=9)

    def broken(*args, **options):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def check():  # after every step
        for _ in range(1000):
            saves.check()
            time.sleep(0.01)

    with monkeypatch.context() as patch:
        patch.setattr(manifest, "write", broken)
        for noticed in (lambda: saves.save(12, state()), check, lambda: saves.note(9, {"eval/loss": 1.0})):
            saves.save(9, state())
            with raises(errors.RunError, "9", folder, os.strerror(errno.EIO)):
                noticed()
    assert there(folder) == {"3", "6"}
    saves.save(9, state(seed=9))
    saves.close()
    assert numbers(resumed(folder)[1]) == numbers(state(seed=9))


def test_a_drive_that_cannot_flush_a_folder_is_good_enough(tmp_path, monkeypatch):
    whole = os.fsync

    def fsync(opened):
        if stat.S_ISDIR(os.fstat(opened).st_mode):
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        whole(opened)

    monkeypatch.setattr(os, "fsync", fsync)
    assert resumed(saved(tmp_path))[0] == 3


# What is kept


def test_the_newest_and_the_best_are_kept_also_after_a_resume(tmp_path):
    metrics = {3: {"eval/loss": 2.0}, 6: {"eval/loss": 1.0}, 9: {"eval/loss": float("nan")}, 12: {}, 15: None}
    saved(tmp_path, (3, 6, 9), keep=1, best="eval/loss", metrics=metrics)
    assert there(tmp_path) == {"6", "9"}
    saved(tmp_path, (12, 15), keep=1, best="eval/loss", metrics=metrics)
    assert there(tmp_path) == {"6", "15"}
    content = json.loads((tmp_path / "6" / "manifest.json").read_text())
    assert content["metrics"] == {"eval/loss": 1.0} and content["versions"]["jax"] == jax.__version__
    assert checkpoint.best(tmp_path, "eval/loss") == {"step": 6, "eval/loss": 1.0}
    assert checkpoint.best(tmp_path, "eval/accuracy") is checkpoint.best(tmp_path, "") is None
    saved(tmp_path, (18,), keep=1)  # without `best`
    assert there(tmp_path) == {"18"}


def test_a_metric_measured_after_a_save_is_stored_and_decides_what_is_kept(folder):
    saves = checkpoint.Checkpoints(folder, keep=1, best="eval/loss")
    saves.note(3, {"eval/loss": 1.0, "eval/accuracy": float("nan")})
    saves.save(9, state(seed=9))
    saves.note(9, {"eval/loss": 2.0})
    saves.note(12, {"eval/loss": 0.0})  # which is not saved
    saves.close()
    assert there(folder) == {"3", "9"}
    saves = checkpoint.Checkpoints(folder, keep=1, best="eval/loss")
    assert saves.measured == {3: {"eval/loss": 1.0}, 9: {"eval/loss": 2.0}} and saves.resume(state())[0] == 9
    saves.close()


def test_checkpoints_that_a_killed_run_did_not_delete_are_deleted(folder):
    """After the last step, no further save deletes them."""
    saves = checkpoint.Checkpoints(folder, keep=1)
    assert saves.resume(state())[0] == 6
    saves.close()
    assert there(folder) == {"6"}


@pytest.mark.parametrize(
    ("values", "keep", "best", "gone"),
    [
        ({1: 0.5, 2: 0.7, 3: 0.6}, 1, "eval/loss", [2]),
        ({1: 0.5, 2: 0.7, 3: 0.6}, 1, "eval/accuracy", [1]),
        ({1: 0.5, 2: 0.7, 3: 0.6}, 1, "eval/explained", [1]),
        ({1: 0.5, 2: 0.7, 3: 0.6}, 1, "", [1, 2]),
        ({1: 0.5, 2: 0.5, 3: 0.6}, 1, "eval/loss", [1]),
        ({1: 0.5, 2: float("nan"), 3: float("-inf"), 4: 0.6}, 1, "eval/loss", [2, 3]),
        ({1: 0.5, 2: 0.7, 3: 0.4}, 2, "eval/loss", [1]),
        ({1: 0.5, 2: 0.7}, 2, "eval/loss", []),
    ],
)
def test_checkpoints_to_delete(values, keep, best, gone):
    measured = {step: {f"eval/{name}": value for name in checkpoint.BETTER} for step, value in values.items()}
    assert checkpoint.superfluous(measured, keep=keep, best=best) == gone


def test_a_saved_step_is_not_saved_again(folder):
    saves = checkpoint.Checkpoints(folder, keep=9)
    saves.save(6, state(seed=7))
    saves.close()
    assert checkpoint.digest(checkpoint.parameters(folder, 6)) == checkpoint.digest(state("2x2x2", seed=6).params)

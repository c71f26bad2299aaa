"""Checkpoints: complete or absent, restored on any mesh, verified, deleted except the newest and the best."""

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
from checkpoints import flip, list_names, make_state, resume, save_steps, to_bytes
from errors import raises

from experiments.config import disk, errors
from experiments.devices import distributed
from experiments.folder import checkpoint, manifest

LEAST_LOSS = checkpoint.choose_best("eval/loss", {})


class Killed(GeneratorExit):
    """Raised to imitate a process that is killed."""


@pytest.fixture(scope="module")
def complete_folder(tmp_path_factory):
    """Return a folder with the checkpoints of steps 3 and 6, saved by 8 devices."""
    return save_steps(tmp_path_factory.mktemp("run") / "checkpoints", (3, 6), layout="2x2x2")


@pytest.fixture
def folder(complete_folder, tmp_path):
    """Return a copy of `complete_folder`, which the test may change."""
    return shutil.copytree(complete_folder, tmp_path / "checkpoints")


@pytest.mark.parametrize(("before", "after"), [("1", "8"), ("8", "2x2x2"), ("2x2x2", "1"), ("8", "8 whole")])
def test_a_state_is_restored_on_any_mesh(tmp_path, before, after):
    assert resume(tmp_path) is None
    save_steps(tmp_path, layout=before)
    expected = make_state(after)
    step, result = resume(tmp_path, expected)
    assert step == 3 and to_bytes(result) == to_bytes(make_state(seed=3)) != to_bytes(expected)
    assert jax.tree.structure(result) == jax.tree.structure(expected)
    for new, old in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
        assert new.sharding.is_equivalent_to(old.sharding, new.ndim)
    params = checkpoint.parameters(tmp_path, 3)
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(params))
    assert checkpoint.digest(params) == checkpoint.digest(make_state(seed=3).params)


@pytest.mark.parametrize(
    ("name", "leaf", "parts"),
    [
        ("b_D", jnp.zeros(15, jnp.bfloat16), ["bfloat16 (16,)", "bfloat16 (15,)"]),
        ("b_D", jnp.zeros(16), ["bfloat16 (16,)", "float32 (16,)"]),
        ("more_D", jnp.zeros(16), ["missing", "float32 (16,)"]),
    ],
)
def test_a_checkpoint_of_other_arrays_is_refused(folder, name, leaf, parts):
    target = make_state()
    target = target.replace(params={"embed": target.params["embed"] | {name: leaf}})
    with raises(errors.UserError, folder / "6", f"params/embed/{name}", *parts):
        resume(folder, target)
    assert list_names(folder) == {"3", "6"}


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
            resume(folder)
    assert list_names(folder) == {"3", "6"}
    step, earlier = resume(folder, step=3)
    assert step == 3 and to_bytes(earlier) == to_bytes(make_state(seed=3)) and list_names(folder) == {"3"}
    file = folder / "3" / "manifest.json"
    file.write_bytes(b"{}")
    with raises(errors.UserError, file, folder):
        resume(folder)


def test_processes_that_see_different_checkpoints_are_refused(folder, monkeypatch):
    monkeypatch.setattr(distributed, "is_same", lambda value: value != 6)
    with raises(errors.UserError, folder):
        resume(folder)


# Complete or absent


@pytest.mark.parametrize("at", ["begins", "arrays", "manifest", "renamed", "deleted"])
def test_a_run_that_is_killed_at_any_point_of_a_save_has_a_complete_checkpoint(folder, monkeypatch, at):
    def raise_killed(*args, **options):
        raise Killed

    owner, name = {
        "begins": (checkpoint.ocp.AsyncCheckpointer, "save"),
        "arrays": (checkpoint.ocp.AsyncCheckpointer, "wait_until_finished"),
        "manifest": (disk, "flush"),
        "renamed": (pathlib.Path, "rename"),
        "deleted": (disk.shutil, "rmtree"),
    }[at]
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(owner, name, raise_killed)
        saves = checkpoint.Checkpoints(folder, keep=2)
        saves.save(9, make_state(seed=9))
        saves.wait()
    saves.close()
    newest = 9 if at == "deleted" else 6
    assert "9.writing" in list_names(folder) or newest == 9
    step, result = resume(folder)
    assert step == newest and to_bytes(result) == to_bytes(
        make_state("2x2x2", seed=newest) if newest == 6 else make_state(seed=9)
    )
    assert list_names(folder) == ({"6", "9"} if newest == 9 else {"3", "6"})


def test_later_steps_do_not_change_a_checkpoint_that_is_being_written(tmp_path):
    """The next steps donate the state and reuse its memory while it is written."""
    step_forward = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    params = {"x_D": jnp.arange(1 << 20, dtype=jnp.float32)}
    saves = checkpoint.Checkpoints(tmp_path, keep=9)
    for step in (1, 2):
        saves.save(step, {"params": params})
        for _ in range(5):
            params = step_forward(params)
    saves.close()
    assert [checkpoint.parameters(tmp_path, step)["x_D"][0] for step in (1, 2)] == [0, 5]


def test_a_save_returns_before_it_is_on_the_disk(tmp_path, monkeypatch):
    has_returned, write = threading.Event(), manifest.write

    def write_after_return(*args, **options):
        assert has_returned.wait(5), "the save waits for it"
        write(*args, **options)

    monkeypatch.setattr(manifest, "write", write_after_return)
    saves = checkpoint.Checkpoints(tmp_path, keep=9)
    saves.save(3, make_state())
    assert checkpoint.newest(tmp_path) is None and list_names(tmp_path) == {"3.writing"}
    has_returned.set()
    saves.close()
    assert checkpoint.newest(tmp_path) == 3


def test_an_error_in_the_background_is_raised_by_the_next_call_once(folder, monkeypatch):
    saves = checkpoint.Checkpoints(folder, keep=9)

    def raise_error(*args, **options):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def check():  # the loop calls it after every step
        for _ in range(1000):
            saves.check()
            time.sleep(0.01)

    with monkeypatch.context() as patch:
        patch.setattr(manifest, "write", raise_error)
        for next_call in (
            lambda: saves.save(12, make_state()),
            check,
            lambda: saves.add_metrics(9, {"eval/loss": 1.0}),
        ):
            saves.save(9, make_state())
            with raises(errors.RunError, "9", folder, os.strerror(errno.EIO)):
                next_call()
    assert list_names(folder) == {"3", "6"}
    saves.save(9, make_state(seed=9))
    saves.close()
    assert to_bytes(resume(folder)[1]) == to_bytes(make_state(seed=9))


def test_a_drive_that_cannot_flush_folders_is_accepted(tmp_path, monkeypatch):
    original = os.fsync

    def fsync(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        original(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    assert resume(save_steps(tmp_path))[0] == 3


# Which checkpoints are deleted


def test_the_newest_and_the_best_are_kept_also_after_a_resume(tmp_path):
    metrics = {3: {"eval/loss": 2.0}, 6: {"eval/loss": 1.0}, 9: {"eval/loss": float("nan")}, 12: {}, 15: None}
    save_steps(tmp_path, (3, 6, 9), keep=1, best="eval/loss", metrics=metrics)
    assert list_names(tmp_path) == {"6", "9"}
    save_steps(tmp_path, (12, 15), keep=1, best="eval/loss", metrics=metrics)
    assert list_names(tmp_path) == {"6", "15"}
    content = json.loads((tmp_path / "6" / "manifest.json").read_text())
    assert content["metrics"] == {"eval/loss": 1.0} and content["versions"]["jax"] == jax.__version__
    assert checkpoint.find_best(tmp_path, LEAST_LOSS) == {"step": 6, "eval/loss": 1.0}
    assert checkpoint.find_best(tmp_path, checkpoint.choose_best("eval/accuracy", {})) is None
    assert checkpoint.find_best(tmp_path, checkpoint.NONE) is None
    save_steps(tmp_path, (18,), keep=1)  # without `best`, only the newest stays
    assert list_names(tmp_path) == {"18"}


def test_a_metric_measured_after_a_save_is_stored_and_decides_what_is_kept(folder):
    saves = checkpoint.Checkpoints(folder, keep=1, best=LEAST_LOSS)
    saves.add_metrics(3, {"eval/loss": 1.0, "eval/accuracy": float("nan")})
    saves.save(9, make_state(seed=9))
    saves.add_metrics(9, {"eval/loss": 2.0})
    saves.add_metrics(12, {"eval/loss": 0.0})  # step 12 has no checkpoint
    saves.close()
    assert list_names(folder) == {"3", "9"}
    saves = checkpoint.Checkpoints(folder, keep=1, best=LEAST_LOSS)
    assert saves.measured == {3: {"eval/loss": 1.0}, 9: {"eval/loss": 2.0}} and saves.resume(make_state())[0] == 9
    saves.close()


def test_checkpoints_and_drafts_that_a_killed_run_did_not_delete_are_deleted(folder):
    """Resuming deletes checkpoints, because after the last step no save does. The draft is that of a manifest."""
    (folder / "6" / f"{manifest.FILE}.abc{disk.DRAFT}").write_text("{")
    saves = checkpoint.Checkpoints(folder, keep=1)
    assert saves.resume(make_state())[0] == 6
    saves.close()
    assert list_names(folder) == {"6"} and list_names(folder / "6") == {manifest.FILE, manifest.STATE}


@pytest.mark.parametrize(
    ("values", "keep", "best", "deleted_steps"),
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
def test_the_newest_and_the_best_checkpoints_are_not_deleted(values, keep, best, deleted_steps):
    metrics = {step: {f"eval/{name}": value for name in checkpoint.BETTER} for step, value in values.items()}
    assert checkpoint.superfluous(metrics, keep=keep, best=checkpoint.choose_best(best, {})) == deleted_steps


def test_a_saved_step_is_not_saved_again(folder):
    saves = checkpoint.Checkpoints(folder, keep=9)
    saves.save(6, make_state(seed=7))
    saves.close()
    assert checkpoint.digest(checkpoint.parameters(folder, 6)) == checkpoint.digest(make_state("2x2x2", seed=6).params)

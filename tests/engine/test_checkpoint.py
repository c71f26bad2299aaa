"""Checkpoints: whole or not there, on any mesh, the newest and the best kept, and a disk that fails."""

import asyncio
import errno
import json
import os
import pathlib
import stat
import sys
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import numbers, resumed, saved, state, there

from experiments.engine import checkpoint, disk, errors, manifest


class Killed(GeneratorExit):
    """The process ends here."""


# On any mesh


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
    ("name", "leaf", "told"),
    [
        ("b_D", jnp.zeros(15, jnp.bfloat16), "b_D is bfloat16 (16,) there and bfloat16 (15,) here"),
        ("b_D", jnp.zeros(16), "b_D is bfloat16 (16,) there and float32 (16,) here"),
        ("more_D", jnp.zeros(16), "more_D is absent there and float32 (16,) here"),
    ],
)
def test_other_arrays_are_a_sentence_even_with_a_fall_back(tmp_path, name, leaf, told, capfd):
    like = saved(tmp_path, (3, 6)) and state()
    like = like.replace(params={"embed": like.params["embed"] | {name: leaf}})
    for fall_back in (False, True):
        with pytest.raises(errors.UserError) as caught:
            resumed(tmp_path, like, fall_back=fall_back)
        assert f"{tmp_path / '6'} is of another model or optimiser: params/embed/{told}" in str(caught.value)
    assert there(tmp_path) == {"3", "6"} and "Traceback" not in capfd.readouterr().err


# Whole or not there


@pytest.mark.parametrize("at", ["begins", "arrays", "manifest", "renamed", "deleted"])
def test_killed_at_any_point_of_a_save_the_run_has_a_whole_checkpoint(tmp_path, monkeypatch, capsys, at):
    saved(tmp_path, (3, 6), keep=2)

    def killed(*args, **options):
        raise Killed

    where, name = {
        "begins": (checkpoint.ocp.AsyncCheckpointer, "save"),
        "arrays": (checkpoint.ocp.AsyncCheckpointer, "wait_until_finished"),
        "manifest": (disk, "flush"),
        "renamed": (pathlib.Path, "rename"),
        "deleted": (manifest.shutil, "rmtree"),
    }[at]
    saves = checkpoint.Checkpoints(tmp_path, keep=2)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(where, name, killed)
        saves.save(9, state(seed=9))
        saves.wait()
    saves.close()
    newest = 9 if at == "deleted" else 6
    assert f"{9}.writing" in there(tmp_path) or newest == 9
    step, found = resumed(tmp_path)
    assert step == newest and numbers(found) == numbers(state(seed=newest))
    assert there(tmp_path) == ({"6", "9"} if newest == 9 else {"3", "6"})
    said = capsys.readouterr().out
    assert said == ("" if newest == 9 else "step 9 was not saved completely and is left out\n")


def test_only_our_own_leftovers_are_removed(tmp_path):
    saved(tmp_path)
    names = {"7.orbax-checkpoint-tmp", "x.writing", "07.writing", "7.writing.old", "7.damaged", "-1.deleting", "notes"}
    for name in (*names, "8.writing", "8.deleting"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("")
    (tmp_path / "9.writing").write_text("a file")
    (tmp_path / "10.deleting").symlink_to(tmp_path / "notes")
    assert resumed(tmp_path)[0] == 3
    assert there(tmp_path) == names | {"3", "9.writing", "10.deleting"} and (tmp_path / "notes" / "file").exists()


def test_what_is_saved_is_the_state_of_that_moment(tmp_path):
    """The step goes on, in the very memory of the old state, while it is written."""
    go_on = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    params = {"x_D": jnp.arange(1 << 20, dtype=jnp.float32)}
    saves = checkpoint.Checkpoints(tmp_path, keep=9)
    for step in (1, 2):
        saves.save(step, {"params": params})
        for _ in range(5):
            params = go_on(params)
    saves.close()
    assert [checkpoint.parameters(tmp_path, step)["x_D"][0] for step in (1, 2)] == [0, 5]


@pytest.mark.parametrize("held", ["arrays", "manifest"])
def test_a_save_returns_before_it_is_on_the_disk(tmp_path, monkeypatch, held):
    """Neither Orbax's writing nor hashing and syncing hold anything up; the one that is held ends behind the return."""
    handler, returned = checkpoint.ocp.StandardCheckpointHandler, threading.Event()
    begun, listed = handler.async_save, manifest.write

    class Held:
        """A part of what Orbax writes in the background, that takes until `save` has returned."""

        def result(self, timeout=None):
            assert returned.wait(5), "it was waited for"

    async def arrays(*args, **options):
        return [*(await begun(*args, **options)), Held()]

    def listing(*args, **options):
        Held().result()
        listed(*args, **options)

    where, name, slow = {"arrays": (handler, "async_save", arrays), "manifest": (manifest, "write", listing)}[held]
    monkeypatch.setattr(where, name, slow)
    saves = checkpoint.Checkpoints(tmp_path, keep=9)
    saves.save(3, state())
    assert checkpoint.newest(tmp_path) is None and there(tmp_path) == {"3.writing"}
    returned.set()
    saves.wait()
    assert checkpoint.newest(tmp_path) == 3
    saves.close()


# What is kept


def test_the_newest_and_the_best_are_kept_also_after_a_resume(tmp_path):
    metrics = {3: {"eval/loss": 2.0}, 6: {"eval/loss": 1.0}, 9: {"eval/loss": float("nan")}, 12: {}, 15: None}
    saved(tmp_path, (3, 6, 9), keep=1, best="eval/loss", metrics=metrics)
    assert there(tmp_path) == {"6", "9"}
    assert json.loads((tmp_path / "9" / "manifest.json").read_text())["metrics"] == {}  # JSON has no NaN
    saved(tmp_path, (12, 15), keep=1, best="eval/loss", metrics=metrics)
    assert there(tmp_path) == {"6", "15"}
    told = json.loads((tmp_path / "6" / "manifest.json").read_text())
    assert (told["format"], told["step"], told["metrics"]) == (1, 6, {"eval/loss": 1.0})
    assert told["versions"]["jax"] == jax.__version__
    saved(tmp_path, (18,), keep=1)  # no longer asked for
    assert there(tmp_path) == {"18"}


def test_what_was_measured_behind_a_save_is_kept_whole_or_not_at_all(tmp_path):
    saves = checkpoint.Checkpoints(saved(tmp_path, (3,)), keep=1, best="eval/loss")
    left = tmp_path / "3" / f"{manifest.FILE}.0123abcd{disk.DRAFT}"
    left.write_text("half of it")  # of a process that was killed
    assert resumed(tmp_path)[0] == 3
    saves.note(3, {"eval/loss": 1.0, "eval/accuracy": float("nan")})
    saves.save(6, state(seed=6))
    saves.note(6, {"eval/loss": 2.0})
    saves.note(9, {"eval/loss": 0.0})  # of which there is none
    saves.close()
    assert there(tmp_path) == {"3", "6"} and not left.exists()
    assert [manifest.read(tmp_path / str(n), step=n)["metrics"] for n in (3, 6)] == [{"eval/loss": x} for x in (1, 2)]
    saves = checkpoint.Checkpoints(tmp_path, keep=1, best="eval/loss")
    assert saves.measured == {3: {"eval/loss": 1.0}, 6: {"eval/loss": 2.0}}
    assert saves.resume(state(), fall_back=False)[0] == 6
    saves.close()


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
def test_what_is_superfluous(values, keep, best, gone):
    measured = {step: {f"eval/{name}": value for name in checkpoint.BETTER} for step, value in values.items()}
    assert checkpoint.superfluous(measured, keep=keep, best=best) == gone


def test_a_best_of_which_nobody_knows_what_is_better_is_refused():
    with pytest.raises(errors.UserError, match='train.keep_best = "eval/speed" must be a metric that ends in loss, a'):
        checkpoint.check_best("eval/speed")
    with pytest.raises(errors.UserError, match='^study.metric = "eval/speed" must be'):
        checkpoint.check_best("eval/speed", key="study.metric")


def test_a_step_on_disk_is_left_as_it_is(tmp_path):
    saves = checkpoint.Checkpoints(saved(tmp_path), keep=9)
    for step, seed in ((3, 4), (6, 6), (6, 7), (3, 5)):
        saves.save(step, state(seed=seed))
    saves.close()
    for step in (3, 6):
        assert checkpoint.digest(checkpoint.parameters(tmp_path, step)) == checkpoint.digest(state(seed=step).params)


# A disk that fails


def open_file_of_a_drive_that_is_gone():
    raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))


class Thing:
    """What a weak reference can be to."""


def test_a_loop_that_is_closed_while_tensorstore_still_writes_is_not_told(monkeypatch):
    """Of many writes to a full disk Orbax awaits the first that fails; the others come to a loop that is no more."""
    told = []
    monkeypatch.setattr(sys, "unraisablehook", lambda found: told.append(str(found.exc_value)))
    for _ in range(2):
        disk.quiet()
    loop = asyncio.new_event_loop()
    loop.close()
    for late in (loop.call_soon_threadsafe, {}.pop):  # called from C, as by tensorstore, where nobody can catch it
        thing = Thing()
        reference = weakref.ref(thing, late)
        del thing
    late = weakref.ref(thing := Thing(), lambda _: open_file_of_a_drive_that_is_gone())
    del thing
    assert told == [str(KeyError(reference))] and late() is None


@pytest.mark.parametrize("when", ["before", "replaced", "during"])
def test_a_folder_that_vanished_is_said_and_not_made_again(tmp_path, monkeypatch, when):
    folder, away = tmp_path / "run" / "checkpoints", tmp_path / "away"
    saves = checkpoint.Checkpoints(saved(folder), keep=9)
    wait = saves._orbax.wait_until_finished

    def taken_away():
        wait()
        if threading.current_thread() is not threading.main_thread():  # Orbax is done
            os.rename(tmp_path / "run", away)
            (folder / "6.writing" / "state").mkdir(parents=True)  # as tensorstore does for a file that it writes

    if when == "during":
        monkeypatch.setattr(saves._orbax, "wait_until_finished", taken_away)
    else:
        os.rename(tmp_path / "run", away)
    if when == "replaced":
        folder.mkdir(parents=True)
    with pytest.raises(errors.RunError, match=f"step 6 could not be saved in {folder}: the folder was taken away"):
        saves.save(6, state())
        assert when == "during"
        saves.wait()
    saves.close()
    assert there(tmp_path) == {"away"} and resumed(away / "checkpoints")[0] == 3


def test_an_error_in_the_background_is_raised_by_the_next_save_or_check_once(tmp_path, monkeypatch):
    saves = checkpoint.Checkpoints(saved(tmp_path), keep=9)

    def broken(*args, **options):
        raise OSError(5, "Input/output error")

    def noted():  # behind a save that has failed: there is no checkpoint with which it could be kept
        saves.note(6, {"eval/loss": 1.0})
        saves.wait()

    saves.check()
    with monkeypatch.context() as patch:
        patch.setattr(manifest, "write", broken)
        for noticed in (lambda: saves.save(9, state()), saves.check, noted):
            saves.save(6, state())
            saves._under_way[1].exception()  # it is done by then
            with pytest.raises(errors.RunError, match=f"step 6 could not be saved in {tmp_path}: Input/output error"):
                noticed()
    assert there(tmp_path) == {"3"}
    saves.save(6, state(seed=6))
    saves.close()
    assert numbers(resumed(tmp_path)[1]) == numbers(state(seed=6))


def test_a_drive_that_cannot_flush_a_folder_is_good_enough(tmp_path, monkeypatch):
    whole = os.fsync

    def fsync(opened):
        if stat.S_ISDIR(os.fstat(opened).st_mode):
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        whole(opened)

    monkeypatch.setattr(manifest.os, "fsync", fsync)
    assert numbers(resumed(saved(tmp_path))[1]) == numbers(state(seed=3))

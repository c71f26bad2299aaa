"""100 random corruptions of a real checkpoint: each is found and named, and the one before is still good.

The files are real in all of them, and so are verifying, falling back and putting aside. In 6 of them Orbax reads the
checkpoint before, and a new one is saved; in the others the state is not read once the files are verified.
"""

import errno
import hashlib
import json
import os
import pathlib
import re
import shutil
from typing import Any

import jax
import numpy as np
import pytest
from checkpoints import numbers, saved, state

from experiments.engine import checkpoint, distributed, errors, manifest

CASES = range(100)
WHOLE = CASES[::17]  # with Orbax's reading, which takes its time
LESS = ("truncate", "delete", "empty")  # of the kinds, what a drive does that was taken away too early
KINDS = ("flip", "truncate", "delete", "extend", "swap", "surplus", "empty")


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A run with checkpoints of step 3 and 6, saved by 8 devices."""
    return saved(tmp_path_factory.mktemp("run") / "checkpoints", (3, 6), layout="2x2x2")


class ARRAYS:  # noqa: N801  (what Orbax says of a state that has none)
    tree = {}


def corrupt(folder: pathlib.Path, rng: np.random.Generator) -> tuple[str, set[str]]:
    """Damage one checkpoint: how, and the names of the files of which one is to be told."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    file, other = (files[i] for i in rng.choice(len(files), 2, replace=False))
    if rng.random() < 0.2:  # as likely as three of the others together
        file = folder / manifest.FILE
    kind, content = KINDS[rng.integers(len(KINDS))], file.read_bytes()
    touched = {file}
    if kind == "swap" and content == other.read_bytes():  # no corruption
        kind = "truncate"
    at = rng.integers(len(content)) if content else None
    if kind == "delete":
        file.unlink()
    elif kind == "surplus":
        touched = {file.parent / f"new{rng.integers(100)}"}
        for new in touched:
            new.write_bytes(content)
    elif kind == "swap":
        file.write_bytes(other.read_bytes())
        other.write_bytes(content)
        touched |= {other}
    elif kind == "extend" or not content:
        file.write_bytes(content + rng.bytes(rng.integers(1, 9)))
    elif kind == "flip":
        file.write_bytes(content[:at] + bytes([content[at] ^ 1 << rng.integers(8)]) + content[at + 1 :])
    else:
        file.write_bytes(content[:at] if kind == "truncate" else b"")
    return kind, {touch.relative_to(folder).as_posix() for touch in touched}


def check(sentence: str, folder: pathlib.Path, names: set[str]) -> None:
    assert "\n" not in sentence
    assert any(f"the checkpoint {folder} is damaged: {name} " in sentence for name in names), (sentence, names)


def refused(saves: checkpoint.Checkpoints, like: Any, folder: pathlib.Path) -> tuple[str, bool]:
    """What is said of the newest checkpoint; and whether it only lacks something, with which a run may go on."""
    damage = manifest.damage(folder / "6", step=6)
    assert isinstance(damage, manifest.Damaged)
    if isinstance(damage, manifest.Incomplete):
        return str(damage), True
    with pytest.raises(errors.UserError, match="; --resume=latest_valid goes on from") as caught:
        saves.resume(like, fall_back=False)
    return str(caught.value), False


def damaged(good: pathlib.Path, folder: pathlib.Path, case: int) -> tuple[str, set[str]]:
    """In `folder` the same run, with this corruption of its newest checkpoint."""
    for step in ("3", "6"):
        if not (folder / step).is_dir():  # the former case has put its 6 aside, and left 3 as it was
            shutil.copytree(good / step, folder / step)
    return corrupt(folder / "6", np.random.default_rng(case))


def test_no_corruption_is_accepted_and_each_falls_back(good, tmp_path, monkeypatch, capsys):
    """Without Orbax: what is verified is not read, and nothing is given back in its place."""
    monkeypatch.setattr(checkpoint.ocp.PyTreeCheckpointHandler, "metadata", lambda *_: ARRAYS)
    monkeypatch.setattr(checkpoint.ocp.Checkpointer, "restore", lambda *_, **__: "read")
    folder, seen = tmp_path / "checkpoints", set()
    for case in sorted(set(CASES) - set(WHOLE)):
        kind, names = damaged(good, folder, case)
        seen |= {(kind, manifest.FILE in names)}
        saves = checkpoint.Checkpoints(folder, keep=2)
        sentence, incomplete = refused(saves, {}, folder)
        assert incomplete == (kind in LESS) or kind == "swap" or manifest.FILE in names
        check(sentence, folder / "6", names)
        if kind in ("truncate", "extend", "empty") and manifest.FILE not in names:
            assert re.search(r" has [\d,]+ bytes, and [\d,]+ were saved(; |$)", sentence)
        capsys.readouterr()
        assert saves.resume({}, fall_back=not incomplete) == (3, "read")
        saves.close()
        said = capsys.readouterr().out
        check(said.removesuffix("\n"), folder / "6", names)
        assert said.endswith("; it is put aside, and step 3 is taken instead\n")
        assert {found.name for found in folder.iterdir()} == {"3", "6.damaged"}
    assert seen >= {(kind, on_manifest) for kind in KINDS for on_manifest in (False, True)} - {("surplus", True)}


@pytest.mark.parametrize("case", WHOLE)
def test_no_corruption_comes_through_the_whole_of_resume(good, tmp_path, capfd, case):
    """Nothing is left out: the parameters alone, the newest state, the one before it, and a new save in its place."""
    folder = tmp_path / "checkpoints"
    _, names = damaged(good, folder, case)
    with pytest.raises(errors.UserError) as caught:
        checkpoint.parameters(folder, 6)
    check(str(caught.value), folder / "6", names)
    saves = checkpoint.Checkpoints(folder, keep=2)
    sentence, incomplete = refused(saves, state(), folder)
    check(sentence, folder / "6", names)
    step, found = saves.resume(state(), fall_back=not incomplete)
    assert step == 3 and numbers(found) == numbers(state(seed=3))
    saves.save(6, state(seed=6))  # made anew, where the damaged one was
    saves.close()
    assert checkpoint.digest(checkpoint.parameters(folder, 6)) == checkpoint.digest(state(seed=6).params)
    assert "Traceback" not in capfd.readouterr().err


def test_without_a_valid_one_there_is_a_sentence(good, tmp_path):
    folder = shutil.copytree(good, tmp_path / "checkpoints")
    for step in (3, 6):
        file = folder / str(step) / "state" / "_METADATA"
        file.write_bytes(b"[" + file.read_bytes()[1:])
    saves = checkpoint.Checkpoints(folder, keep=2)
    with pytest.raises(errors.UserError, match=r"no checkpoint is valid.*6 is damaged: state/_METADATA is not what"):
        saves.resume(state(), fall_back=True)
    shutil.rmtree(folder / "6")
    saves = checkpoint.Checkpoints(folder, keep=2)
    with pytest.raises(errors.UserError, match="there is no other one: choose another --workdir"):
        saves.resume(state(), fall_back=False)
    assert {found.name for found in folder.iterdir()} == {"3"}


@pytest.mark.parametrize("several", [False, True])
def test_a_run_of_which_a_drive_has_no_checkpoint_whole_begins_anew(good, tmp_path, capsys, several):
    """As where the machine was taken away before its first save had all come to the drive; with several saves, which
    are more than a beginning, only where it is asked for."""
    folder = shutil.copytree(good, tmp_path / "checkpoints")
    (folder / "3" / "state" / "_METADATA").write_bytes(b"")
    shutil.copytree(folder / "3", folder / "3.damaged")  # of before: it makes room
    (folder / "6" / manifest.FILE).unlink() if several else shutil.rmtree(folder / "6")
    saves = checkpoint.Checkpoints(folder, keep=2)
    if several:
        with pytest.raises(errors.UserError, match=r"no checkpoint is complete; .*6 is damaged.*=latest_valid begins"):
            saves.resume(state(), fall_back=False)
        assert {found.name for found in folder.iterdir()} == {"3", "3.damaged", "6"} and not capsys.readouterr().out
    assert saves.resume(state(), fall_back=several) is None
    saves.save(3, state(seed=3))
    saves.close()
    said = capsys.readouterr().out.splitlines()
    names = [line.partition(": ")[2].partition(" ")[0] for line in said]
    assert names == [*[manifest.FILE] * several, "state/_METADATA"]
    assert all(line.endswith("; it is put aside, and without another one the run begins anew") for line in said)
    assert {found.name for found in folder.iterdir()} == {"3", "3.damaged", *["6.damaged"] * several}


@pytest.mark.parametrize("first", [3, 6, -1])
def test_which_checkpoint_is_taken_is_said_by_process_0(good, tmp_path, monkeypatch, first):
    """What another process sees of them decides nothing; where it lacks the one that is taken, it says so."""
    folder, asked = shutil.copytree(good, tmp_path / "checkpoints"), []
    if first == 6:
        (folder / "6" / manifest.FILE).unlink()  # not there yet

    def agree(value):
        asked.append(value)
        return max(value, first)

    monkeypatch.setattr(distributed, "main", lambda: False)
    monkeypatch.setattr(distributed, "same", lambda value: value == 6)
    saves = checkpoint.Checkpoints(folder, keep=2)
    monkeypatch.setattr(distributed, "agree", agree)
    if first == 6:
        with pytest.raises(errors.UserError, match=r"not every process sees .* one disk \(.*6 is damaged: manifest"):
            saves.resume(state(), fall_back=False)
    elif first == 3:
        step, found = saves.resume(state(), fall_back=False)
        assert step == 3 and numbers(found) == numbers(state(seed=3))
    else:
        assert saves.resume(state(), fall_back=False) is None
    monkeypatch.setattr(distributed, "same", lambda value: False)
    with pytest.raises(errors.UserError, match="it must be one disk$"):
        saves.resume(state(), fall_back=False)
    assert asked == [-1]
    assert {found.name for found in folder.iterdir()} == {"3", "6"}
    saves.close()


@pytest.mark.parametrize("name", ["state/_METADATA", manifest.FILE, "state/more"])
@pytest.mark.parametrize("target", ["nowhere", "/"])
def test_a_link_in_the_place_of_a_file_or_that_was_not_saved_is_damage(good, tmp_path, name, target):
    folder = shutil.copytree(good / "6", tmp_path / "6")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(target)
    how = "was not saved with it" if "more" in name else "(is missing|cannot be read|has [0-9,]+ bytes)"
    assert re.search(f"6 is damaged: {name} {how}", str(manifest.damage(folder, step=6)))


def failing(method, errno_, *paths):
    """The method of a path, that fails for these."""

    def called(path, *args, **options):
        if pathlib.Path(path) in paths:
            raise OSError(errno_, os.strerror(errno_), str(path))
        return method(path, *args, **options)

    return called


@pytest.mark.parametrize("name", [manifest.FILE, "state/_METADATA", "state"])
@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES])
def test_what_the_system_does_not_let_be_read_is_not_damage(good, tmp_path, monkeypatch, name, number):
    """A disk that fails for a moment, or rights that were changed: the good checkpoint stays where it is."""
    folder = shutil.copytree(good, tmp_path / "checkpoints")
    with monkeypatch.context() as patch:
        for where, method in ((os, "open"), (os, "scandir")):
            patch.setattr(where, method, failing(getattr(where, method), number, folder / "6" / name))
        for fall_back in (False, True):
            with pytest.raises(errors.RunError, match=rf"6/{name} cannot be read \({os.strerror(number)}\)"):
                checkpoint.Checkpoints(folder, keep=2).resume(state(), fall_back=fall_back)
        with pytest.raises(errors.RunError, match="cannot be read"):
            checkpoint.parameters(folder, 6)
    assert {found.name for found in folder.iterdir()} == {"3", "6"}
    assert manifest.damage(folder / "6", step=6) is None


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory"), "RESOURCE_EXHAUSTED: Out of memory"),
        (MemoryError(), "MemoryError"),
        (ValueError("UNKNOWN: [os_error_code='5'] while reading"), "Input/output error"),
    ],
)
def test_no_memory_or_no_disk_while_it_is_read_is_not_damage(good, tmp_path, monkeypatch, error, reason):
    folder = shutil.copytree(good, tmp_path / "checkpoints")
    saves, told = checkpoint.Checkpoints(folder, keep=2), f"6 is not damaged, but could not be read: {reason}"

    def fails(*args, **options):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.ocp.PyTreeCheckpointHandler, "restore", fails)
        patch.setattr(checkpoint.ocp.StandardCheckpointHandler, "restore", fails)
        for fall_back in (False, True):
            with pytest.raises(errors.RunError, match=told):
                saves.resume(state(), fall_back=fall_back)
        with pytest.raises(errors.RunError, match=told):
            checkpoint.parameters(folder, 6)
    assert saves.resume(state(), fall_back=True)[0] == 6
    saves.close()
    assert {found.name for found in folder.iterdir()} == {"3", "6"}


def test_a_checkpoint_under_the_name_of_another_step_or_of_a_later_version_is_not_taken(good, tmp_path):
    folder = shutil.copytree(good, tmp_path / "checkpoints")
    os.rename(folder / "6", folder / "9")
    assert "9 is damaged: manifest.json is that of step 6" in str(manifest.damage(folder / "9", step=9))
    content = manifest.read(folder / "9", step=6) | {"format": 2}
    content["sha256"] = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    (folder / "9" / manifest.FILE).write_text(json.dumps(content, indent=1) + "\n")
    with pytest.raises(errors.UserError, match="has format 2, and this version knows only 1"):
        manifest.damage(folder / "9", step=6)

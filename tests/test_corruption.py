"""200 random corruptions of a real checkpoint: each is found and named, and the one before is still good."""

import os
import pathlib
import re
import shutil

import jax
import numpy as np
import pytest
from test_checkpoint import numbers, saved, state

from experiments.engine import checkpoint, errors, manifest, saved_arrays, step_folders

CASES, WHOLE = 200, 10  # of which so many with Orbax's reading
KINDS = ("flip", "truncate", "delete", "extend", "swap", "surplus", "empty")


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A run with checkpoints of step 3 and 6, saved by 8 devices."""
    return saved(tmp_path_factory.mktemp("run") / "checkpoints", (3, 6), layout="2x2x2")


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


def damaged(good: pathlib.Path, folder: pathlib.Path, case: int) -> tuple[str, set[str]]:
    """In `folder` the same run, with this corruption of its newest checkpoint."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(good, folder, copy_function=os.link)  # the bytes are copied only where they are changed
    for file in (folder / "6").rglob("*"):
        if file.is_file():
            file.unlink()
            shutil.copyfile(good / file.relative_to(folder), file)
    return corrupt(folder / "6", np.random.default_rng(case))


def test_no_corruption_is_accepted_and_each_falls_back(good, tmp_path, monkeypatch, capsys):
    """All of them by the manifest, which is asked before Orbax (which is left out here, since it takes its time)."""

    def restored(where, step, like):
        manifest.verify(where, step=step)
        return like

    monkeypatch.setattr(saved_arrays, "restored", restored)
    folder, seen = tmp_path / "checkpoints", set()
    for case in range(CASES):
        kind, names = damaged(good, folder, case)
        seen |= {(kind, manifest.FILE in names)}
        saves = checkpoint.Checkpoints(folder, keep=2)
        with pytest.raises(errors.UserError) as caught:
            saves.resume(case, fall_back=False)
        check(str(caught.value), folder / "6", names)
        assert "--config.resume=latest_valid" in str(caught.value)
        if kind in ("truncate", "extend", "empty") and manifest.FILE not in names:
            assert re.search(r" has [\d,]+ bytes, and [\d,]+ were saved; ", str(caught.value))
        capsys.readouterr()
        assert saves.resume(case, fall_back=True) == (3, case)
        saves.close()
        said = capsys.readouterr().out
        check(said.removesuffix("\n"), folder / "6", names)
        assert said.endswith("; it is put aside, and step 3 is taken instead\n")
        assert {found.name for found in folder.iterdir()} == {"3", "6.damaged"}
    assert seen >= {(kind, on_manifest) for kind in KINDS for on_manifest in (False, True)} - {("surplus", True)}


@pytest.mark.parametrize("case", range(CASES, CASES + WHOLE))
def test_no_corruption_comes_through_the_whole_of_resume(good, tmp_path, capfd, case):
    folder = tmp_path / "checkpoints"
    _, names = damaged(good, folder, case)
    with pytest.raises(errors.UserError) as caught:
        checkpoint.parameters(folder, 6)
    check(str(caught.value), folder / "6", names)
    saves = checkpoint.Checkpoints(folder, keep=2)
    with pytest.raises(errors.UserError) as caught:
        saves.resume(state(), fall_back=False)
    check(str(caught.value), folder / "6", names)
    step, found = saves.resume(state(), fall_back=True)
    assert step == 3 and numbers(found) == numbers(state(seed=3))
    saves.save(6, state(seed=6))  # made anew, where the damaged one was
    saves.close()
    assert checkpoint.digest(checkpoint.parameters(folder, 6)) == checkpoint.digest(state(seed=6).params)
    assert "Traceback" not in capfd.readouterr().err


def test_without_a_valid_one_there_is_a_sentence(good, tmp_path):
    folder = shutil.copytree(good, tmp_path / "checkpoints")
    for step in (3, 6):
        (folder / str(step) / "state" / "_METADATA").unlink()
    saves = checkpoint.Checkpoints(folder, keep=2)
    with pytest.raises(errors.UserError, match=r"no checkpoint is valid.*6 is damaged: state/_METADATA is missing"):
        saves.resume(state(), fall_back=True)
    shutil.rmtree(folder / "6")
    saves = checkpoint.Checkpoints(folder, keep=2)
    with pytest.raises(errors.UserError, match="there is no other one: choose another --workdir"):
        saves.resume(state(), fall_back=False)
    assert {found.name for found in folder.iterdir()} == {"3"}


@pytest.mark.parametrize("name", ["state/_METADATA", manifest.FILE])
@pytest.mark.parametrize("target", ["nowhere", "/"])
def test_a_link_in_the_place_of_a_file_is_damage(good, tmp_path, name, target):
    folder = shutil.copytree(good / "6", tmp_path / "6")
    (folder / name).unlink()
    (folder / name).symlink_to(target)
    with pytest.raises(manifest.Damaged, match=f"6 is damaged: {name} (is missing|cannot be read|has [0-9,]+ bytes)"):
        manifest.verify(folder, step=6)


def test_what_was_put_aside_before_makes_room(tmp_path):
    for step in ("6", "6.damaged"):
        (tmp_path / step).mkdir()
        (tmp_path / step / step).write_text("")
    step_folders.put_aside(tmp_path / "6")
    assert [str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*")] == ["6.damaged", "6.damaged/6"]


def test_a_checkpoint_under_the_name_of_another_step_or_of_a_later_version_is_not_taken(good, tmp_path):
    folder = shutil.copytree(good, tmp_path / "checkpoints")
    os.rename(folder / "6", folder / "9")
    with pytest.raises(manifest.Damaged, match="9 is damaged: manifest.json is that of step 6"):
        manifest.verify(folder / "9", step=9)
    content = manifest.read(folder / "9", step=6) | {"format": 2}
    (folder / "9" / manifest.FILE).write_bytes(manifest._signed({k: v for k, v in content.items() if k != "sha256"}))
    with pytest.raises(errors.UserError, match="has format 2, and this version knows only 1"):
        manifest.verify(folder / "9", step=6)


def test_the_checkpoint_was_good(good):
    manifest.verify(good / "6", step=6)
    assert checkpoint.digest(checkpoint.parameters(good, 6)) == checkpoint.digest(state(seed=6).params)
    assert sum(file.is_file() for file in (good / "6").rglob("*")) > 8 and jax.device_count() == 8

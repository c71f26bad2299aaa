"""What a run leaves on disk, and that the same folder again goes on to the same last bit."""

import hashlib
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from errors import raises
from resuming import SAVE, SETTINGS, STEPS, alike, break_off, linear_task, run, summary

from experiments.engine import checkpoint, errors, log, mesh as meshes, run_plan, train_step as steps

SUMMARY = "experiment steps params params_sha256 eval/loss eval/accuracy wall_seconds compile_seconds"
SUMMARY += " tokens_per_second devices backend versions"  # the contract of a run


def test_the_digest_is_over_names_and_bytes_in_sorted_order():
    a, b = np.arange(6, dtype=np.float32).reshape(2, 3), np.ones(2, np.float32)
    expected = hashlib.sha256(b"head/G_CD" + a.tobytes() + b"head/b_C" + b.tobytes()).hexdigest()
    tree = {"head": {"b_C": jnp.asarray(b), "G_CD": jnp.asarray(a)}}
    assert checkpoint.digest(tree) == expected
    assert checkpoint.digest({"head": {"G_CD": a.T.copy().T, "b_C": b}}) == expected  # whatever the memory's order
    replicated = jax.device_put(tree, meshes.replicated(meshes.make(data=8)))
    assert checkpoint.digest(replicated) == expected
    both = hashlib.sha256(b"head 2/b_C" + b.tobytes() + b"head/G_CD" + a.tobytes()).hexdigest()
    assert checkpoint.digest({"head": {"G_CD": a}, "head 2": {"b_C": b}}) == both  # whole names, not level by level
    others = [{"head": {"G_CD": a, "c_C": b}}, {"head": {"G_CD": a, "b_C": np.nextafter(b, 2)}}, {"head": {"G_CD": a}}]
    assert len({checkpoint.digest(other) for other in others} | {expected}) == 4


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The folder of a run that nothing disturbed."""
    return run(tmp_path_factory.mktemp("runs") / "straight").folder


def test_what_a_run_writes(straight):
    names = {file.name for file in straight.iterdir()} - {"source"}  # where this checkout has edits
    assert names == {"config.json", "metrics.jsonl", "summary.json", "checkpoints", "events", "figures"}
    assert {file.name for file in (straight / "checkpoints").iterdir()} == {"6", "9"}  # keep = 2
    rows = log.read(straight)
    assert [row["step"] for row in rows if "train/loss" in row] == list(range(1, STEPS + 1))
    assert [row["step"] for row in rows if "eval/loss" in row] == [4, 8, 9]
    assert {"train/loss", "train/accuracy", "train/gradient_norm", "train/learning_rate"} <= rows[0].keys()
    saved = json.loads((straight / "config.json").read_text())
    assert saved.keys() == {"config", "versions", "devices", "commit", "data"} and saved["devices"] == "1 x cpu"
    assert saved["config"]["train"]["steps"] == STEPS and saved["config"]["model"]["K"] == 32  # derived: 128 // 4
    assert saved["versions"] == meshes.versions() and saved["versions"]["jax"] == jax.__version__
    result = summary(straight)
    assert result.keys() >= set(SUMMARY.split())
    assert (result["experiment"], result["steps"], result["params"], result["devices"]) == ("vision", STEPS, 18, 1)
    assert result["backend"] == jax.default_backend() and result["versions"] == meshes.versions()
    assert result["baseline/accuracy"] == 1 / 3
    assert 0 < result["compile_seconds"] < result["wall_seconds"] and result["tokens_per_second"] > 0
    assert rows[-1] == {"step": STEPS, "eval/loss": result["eval/loss"], "eval/accuracy": result["eval/accuracy"]}


def test_the_summary_is_about_the_last_parameters(straight):
    task = linear_task()
    settings = tiny.settings("vision", model=False, **SETTINGS)
    plan = run_plan.make_plan(settings, task, meshes.make(data=1))
    fresh = steps.initial_state(task, plan.optimiser, seed=0, mesh=plan.mesh)
    saves = checkpoint.Checkpoints(straight / "checkpoints", keep=2)
    step, last = saves.resume(fresh)
    saves.close()
    assert step == int(last.step) == STEPS
    assert summary(straight)["params_sha256"] == checkpoint.digest(last.params) != checkpoint.digest(fresh.params)
    assert summary(straight)["eval/loss"] == steps.evaluator(task, plan.mesh)(last.params)["loss"]


def test_stopped_and_resumed_is_straight_to_the_last_bit(tmp_path, straight, capsys):
    """Behind a save and an evaluation, amid an epoch, before the last step; epochs end behind steps 2.5, 5 and 7.5."""
    folder = tmp_path / "run"
    break_off(folder, STEPS)
    assert not (folder / "summary.json").exists()
    run(folder)
    assert alike(folder, straight)
    assert f"resuming {folder} at step 6" in capsys.readouterr().out


def test_resumed_on_another_number_of_devices(tmp_path, straight, capsys):
    folder = tmp_path / "run"
    break_off(folder, 5, mesh__data=2)
    run(folder, train__log_every=2)
    assert "it was trained on 2 x cpu, now 1 x cpu: numbers may differ in the last bits" in capsys.readouterr().out
    assert summary(folder)["devices"] == 1
    assert json.loads((folder / "config.json").read_text())["config"]["mesh"]["data"] == 1
    rows = [row for row in log.read(folder) if row["step"] > SAVE and "train/loss" in row]
    assert [row["step"] for row in rows] == [4, 6, 8, 9]
    expected = {row["step"]: row["train/loss"] for row in log.read(straight) if "train/loss" in row}
    assert [row["train/loss"] for row in rows] == pytest.approx([expected[row["step"]] for row in rows], rel=1e-5)


def contents(folder):
    return {str(file): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


def test_a_finished_run_says_so_and_does_nothing(straight, capsys):
    before = contents(straight)
    for changes in ({}, {"mesh__data": 2}):
        run(straight, figures=None, **changes)
        said = capsys.readouterr().out
        assert f"{straight} holds a finished run: nothing to do" in said and "summary.json" in said
        assert "FLOP" not in said
    assert contents(straight) == before


def damage(checkpoint_folder):
    """Change a byte of the largest file of its state."""
    files = [file for file in (checkpoint_folder / "state").rglob("*") if file.is_file()]
    file = max(files, key=lambda file: file.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_a_finished_run_with_a_damaged_last_checkpoint_goes_on_from_an_earlier_one(tmp_path, straight, capsys):
    """Also if that is broken off: from then on the newest checkpoint is the right one."""
    folder = shutil.copytree(straight, tmp_path / "run")
    damage(folder / "checkpoints" / "9")
    before = contents(folder)
    with raises(errors.UserError, folder / "checkpoints" / "9" / "state"):
        run(folder)
    assert contents(folder) == before
    break_off(folder, 8, resume=6)
    assert f"resuming {folder} at step 6" in capsys.readouterr().out and not (folder / "summary.json").exists()
    run(folder)
    assert alike(folder, straight) and {file.name for file in (folder / "checkpoints").iterdir()} == {"6", "9"}
    shutil.rmtree(folder / "checkpoints")
    assert run(folder).params is None  # who deleted them does not need them

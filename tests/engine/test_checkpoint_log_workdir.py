"""What a run leaves on disk, and that the same folder again goes on to the same last bit."""

import hashlib
import json
import shutil

import dots
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from test_log import scalars

from experiments.engine import checkpoint, errors, log, mesh as meshes, run as runs, train_step as steps, workdir

STEPS, SAVE = 9, 3
SETTINGS = {"train__steps": STEPS, "train__save_every": SAVE, "train__log_every": 1, "train__evaluate_every": 4}
SETTINGS |= {"train__batch_size": 8, "mesh__data": 1}
SUMMARY = "experiment steps params params_sha256 eval/loss eval/accuracy wall_seconds compile_seconds"
SUMMARY += " tokens_per_second devices backend versions"  # the contract of a run


class Stopped(Exception):
    """The machine goes away."""


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


def linear_task(growth=()):
    """Of 20 examples with noise, of which two and a half batches of 8 are an epoch."""
    return tiny.linear_task(n=20, n_evaluation=11, batch=8, growth=growth)


def run(folder, **changes):
    """A run of the task above with the settings above."""
    task = linear_task(changes.get("train__growth", ()))
    return tiny.trained(folder, task, **(SETTINGS | changes))


def break_off(folder, step, **changes):
    """The run dies when it asks for the batch of this step."""

    def stop():
        raise Stopped

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stopped):
        dots.at_batch(patch, step, stop)
        run(folder, **changes)


def alike(folder, straight):
    """Whether both have the same parameters, and the same log."""
    one, other = ((summary(run)["params_sha256"], log.read(run)) for run in (folder, straight))
    return one == other


def summary(folder):
    return json.loads((folder / "summary.json").read_text())


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The folder of a run that nothing disturbed."""
    return run(tmp_path_factory.mktemp("runs") / "straight").folder


def test_what_a_run_writes(straight):
    names = {file.name for file in straight.iterdir()} - {"source"}  # where this checkout has edits
    assert names == {"config.json", "metrics.jsonl", "summary.json", "checkpoints", "events", "figures"}
    assert {file.name for file in (straight / "checkpoints").iterdir()} == {"6", "9"}  # keep = 2
    rows, events = log.read(straight), scalars(straight)[0].keys()
    assert [row["step"] for row in rows if "train/loss" in row] == list(range(1, STEPS + 1))
    assert [row["step"] for row in rows if "eval/loss" in row] == [4, 8, 9]
    assert {(f"train/{name}", 9) for name in ("loss", "accuracy", "gradient_norm", "learning_rate")} <= events
    assert {("eval/loss", 9), ("eval/accuracy", 4)} <= events
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
    plan = runs.plan(settings, task, meshes.make(data=1))
    fresh = steps.initial_state(task, plan.optimiser, seed=0, mesh=plan.mesh)
    saves = checkpoint.Checkpoints(straight / "checkpoints", keep=2)
    step, last = saves.resume(fresh, fall_back=False)
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
    """Another byte in the largest file of its state."""
    files = [file for file in (checkpoint_folder / "state").rglob("*") if file.is_file()]
    file = max(files, key=lambda file: file.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (
            lambda saves: damage(saves / "9"),
            "9 is damaged: state/.*; .*latest_valid goes on from the newest valid one bef",
        ),
        (
            lambda saves: shutil.rmtree(saves / "9"),
            "lacks the checkpoint of step 9, .*latest_valid goes on from step 6$",
        ),
    ],
)
def test_a_finished_run_that_lost_its_newest_checkpoint_says_so_and_is_redone_when_asked(
    tmp_path, straight, capsys, broken, said
):
    """Also where that is broken off: the summary still tells of a result, and the same command goes on."""
    folder = shutil.copytree(straight, tmp_path / "run")
    broken(folder / "checkpoints")
    before, aside = contents(folder), ["9.damaged"] * (folder / "checkpoints" / "9").exists()
    with pytest.raises(errors.UserError, match=said):
        run(folder)
    assert contents(folder) == before and "nothing to do" not in capsys.readouterr().out
    break_off(folder, 8, fall_back=True)
    assert summary(folder) == summary(straight)
    run(folder, **({} if aside else {"fall_back": True}))
    assert f"resuming {folder} at step 6" in capsys.readouterr().out and alike(folder, straight)
    assert sorted(file.name for file in (folder / "checkpoints").iterdir()) == ["6", "9", *aside]
    run(folder)
    assert "nothing to do" in capsys.readouterr().out


def test_a_finished_run_of_which_a_drive_lacks_some_files_makes_them_again(tmp_path, straight, capsys):
    folder = shutil.copytree(straight, tmp_path / "run")
    (folder / "checkpoints" / "9" / "state" / "_METADATA").unlink()
    run(folder)
    assert "9 is damaged: state/_METADATA is missing; it is put aside, and step 6 is taken" in capsys.readouterr().out
    assert alike(folder, straight)
    (folder / "summary.json").unlink()
    run(folder)  # without a step, of which there is none to take
    assert alike(folder, straight) and summary(folder)["eval/loss"] == summary(straight)["eval/loss"]


def test_a_finished_run_without_a_valid_checkpoint_keeps_its_result(tmp_path, straight):
    folder = shutil.copytree(straight, tmp_path / "run")
    shutil.rmtree(folder / "checkpoints" / "6")
    damage(folder / "checkpoints" / "9")
    before = {name: content for name, content in contents(folder).items() if "config" not in name}
    with pytest.raises(errors.UserError, match="9 is damaged: .*; there is no other one: choose another --workdir"):
        run(folder)
    with pytest.raises(errors.UserError, match="no checkpoint is valid, choose another --workdir; the newest: "):
        run(folder, fall_back=True)
    (folder / "checkpoints" / "9" / "state" / "_METADATA").unlink()
    with pytest.raises(errors.UserError, match="there is no other one"):  # a result is not given up by itself
        run(folder)
    before.pop(str(folder / "checkpoints" / "9" / "state" / "_METADATA"))
    assert {name: content for name, content in contents(folder).items() if "config" not in name} == before
    shutil.rmtree(folder / "checkpoints")
    assert run(folder).params is None  # who took them away needs none


def test_what_may_change_on_resume_exists():
    keys = tiny.fields()
    for right in workdir.MAY_CHANGE:
        assert right in keys or (right.endswith(".") and any(key.startswith(right) for key in keys)), right

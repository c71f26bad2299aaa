"""A run that is resumed: to the same last bit after a break or a kill, with more steps, and with other data."""

import hashlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import dots
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from checkpoints import flip
from errors import raises
from resuming import SAVE, STEPS, alike, break_off, linear_task, run, summary

from configs import base
from experiments.engine import (
    checkpoint,
    compilation,
    config as configs,
    disk,
    errors,
    log,
    loop,
    mesh as meshes,
    optim,
    run as runs,
    train_step,
)
from experiments.studies import study

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


def test_the_files_of_a_run(straight):
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
    params = checkpoint.parameters(straight / "checkpoints", STEPS)
    assert summary(straight)["params_sha256"] == checkpoint.digest(params)
    evaluate = train_step.evaluator(linear_task(), meshes.make(data=1))
    assert summary(straight)["eval/loss"] == evaluate(jax.device_put(params))["loss"]


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
        out = capsys.readouterr().out
        assert f"{straight} holds a finished run: nothing to do" in out and "summary.json" in out
        assert "FLOP" not in out
    assert contents(straight) == before


def test_a_finished_run_with_a_damaged_last_checkpoint_goes_on_from_an_earlier_one(tmp_path, straight, capsys):
    """If that run breaks off, too, the next one resumes from the newest checkpoint."""
    folder = shutil.copytree(straight, tmp_path / "run")
    state_files = (file for file in (folder / "checkpoints/9/state").rglob("*") if file.is_file())
    flip(max(state_files, key=lambda file: file.stat().st_size))
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


GROWTH = [[3, 16], [6, 8]]
SIZES = [8] * 3 + [16] * 3 + [8] * 4
CHANGES = {"train__growth": GROWTH, "train__steps": 10, "train__save_every": 2, "train__evaluate_every": 0}
CHANGES |= {"optim__schedule": "constant", "optim__learning_rate": 0.01}
CHANGES |= {"optim__warmup_steps": 1}


def test_a_run_whose_batches_grow_and_that_is_resumed_across_a_change_of_size(tmp_path, monkeypatch, capsys):
    compiled, compile = [], jax.stages.Lowered.compile
    with monkeypatch.context() as patch:
        patch.setattr(jax.stages.Lowered, "compile", lambda self: compiled.append(compile(self)) or compiled[-1])
        run(tmp_path / "whole", **CHANGES)
    assert len(compiled) == 2  # sizes, of which one comes twice
    out = capsys.readouterr().out
    for words in ("8 examples, 8 tokens", "16 examples, 16 tokens, after step 3", "8 examples, 8 tokens, after"):
        assert words in out
    assert re.findall(r"([\d.]+ \w+) per step", out) == ["720 FLOP", "1.44 kFLOP", "720 FLOP"]  # of twice the examples
    rows = [row for row in log.read(tmp_path / "whole") if "train/loss" in row]
    assert [row["step"] for row in rows] == list(range(1, 11))
    assert [row["train/learning_rate"] for row in rows] == pytest.approx([0.01] * len(SIZES))
    break_off(tmp_path / "parts", 6, **CHANGES)
    run(tmp_path / "parts", **CHANGES)
    assert f"resuming {tmp_path / 'parts'} at step 4" in capsys.readouterr().out
    assert alike(tmp_path / "parts", tmp_path / "whole")


def test_the_step_of_a_batch_is_that_of_its_size_and_the_memory_is_that_of_the_largest():
    compiled = compilation.Compiled({n: lambda state, batch, n=n: (n, state, batch) for n in (3, 5, 4)})
    for n in (3, 5):
        batch = {"x_B": np.ones(n)}
        assert compiled("state", batch) == (n, "state", batch)
    assert compiled.largest() is compiled[5]


def test_pairs_may_be_tuples_in_a_config_file_and_are_lists_in_what_is_saved():
    config = base.get_config()
    config.train.growth = [(500, 128)]
    assert configs.flat(configs.values_of(config))["train.growth"] == [[500, 128]]


CLASSES = ["cat", "dog", "eel"]


@pytest.fixture
def goes_on(tmp_path):
    """goes_on(classes, sha256, **settings) trains in one folder, and returns the run's result."""

    def go_on(classes=CLASSES, sha256="a", task=None, **changes):
        settings = tiny.settings("vision", model=False, **dots.CHANGES | changes)
        files = {"data.json": disk.as_json({"classes": classes})}
        work = runs.Work(task or tiny.linear_task(), lambda *_: [], files=files, data_sha256=sha256)
        with tiny.without_figures():
            return runs.run(settings, tmp_path / "run", work, runs.make_mesh(settings))

    return go_on


def test_a_run_does_not_go_on_with_other_classes(goes_on, tmp_path):
    goes_on()
    before = {file: file.read_bytes() for file in tmp_path.rglob("*.json")}
    others = ["dog", "cat", "eel"], ["cat", "dog"], [*CLASSES, "fly"]
    for classes, steps in [*((one, 8) for one in others), (others[0], 6)]:  # to be trained for longer, and finished
        with raises(errors.UserError, tmp_path / "run", f"{len(CLASSES)} classes before, {len(classes)} now"):
            goes_on(classes, train__steps=steps)
        assert {file: file.read_bytes() for file in tmp_path.rglob("*.json")} == before
    goes_on(train__steps=8)


def test_a_run_that_goes_on_with_other_data_prints_a_warning(goes_on, tmp_path, capsys):
    goes_on()
    for sha256, steps, warned in (("a", 6, 0), ("b", 6, 1), ("b", 8, 1), ("b", 9, 0), (None, 9, 0)):
        capsys.readouterr()
        goes_on(sha256=sha256, train__steps=steps)
        out = capsys.readouterr().out
        assert out.count(f"warning: the data are not those that {tmp_path / 'run'}") == warned, (sha256, steps)


def test_a_config_that_has_trained_nothing_may_be_resumed_with_other_data(goes_on, tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as patch, pytest.raises(errors.RunError):
        patch.setattr(loop, "train", lambda *a, **k: (_ for _ in ()).throw(errors.RunError("stopped")))
        goes_on()
    goes_on(["x", "y", "z"], "b")
    assert "warning: the data" not in capsys.readouterr().out


def test_a_finished_run_is_resumed_with_more_steps(goes_on):
    """The default warm-up changes with the number of steps."""
    settings = [tiny.settings("vision", optim__warmup_steps=100, train__steps=n) for n in (5, 90, 100, 101)]
    assert [optim.warmup_steps(one) for one in settings] == [0, 9, 10, 100]
    for steps in (5, 101):
        assert goes_on(optim__warmup_steps=100, train__steps=steps).summary["steps"] == steps


@pytest.mark.parametrize(("own", "warmup"), [(50, 50), (100, 100), (None, 6)])
def test_an_arm_that_sets_the_warm_up_has_it(own, warmup):
    """An arm may set the default: 100 steps must stay 100."""
    arms = [["own", {} if own is None else {"optim.warmup_steps": own}], ["other", {"optim.warmup_steps": 5}]]
    changes = {"study.experiment": "language", "study.arms": arms, "study.seeds": [1], "optim.warmup_steps": 100}
    settings = tiny.settings("ablation", model=False, **changes | {"train.steps": 60})
    made = {one.arm: one.settings for one in study.runs(settings, study.read(settings))}
    assert [optim.warmup_steps(made[name]) for name in ("own", "other")] == [warmup, 5]


def test_a_warm_up_that_the_user_sets_may_not_change(goes_on):
    goes_on(optim__warmup_steps=3)
    with raises(errors.UserError, "optim.warmup_steps"):
        goes_on(optim__warmup_steps=2, train__steps=9)


def bad_task(*, steps=(), evaluation=False):
    """The linear task, whose loss is not finite in these steps (counted from 0), or in an evaluation."""
    task = tiny.linear_task()

    def spoiled(n, batch):
        return batch | {"x_BD": batch["x_BD"] * np.float32("nan" if n in steps else 1)}

    held_out = [one | {"x_BD": one["x_BD"] * np.float32("nan" if evaluation else 1)} for one in task.evaluation]
    return task._replace(train=task.train.map_with_index(spoiled), evaluation=held_out)


@pytest.mark.parametrize(
    ("bad", "part"),
    [
        ({"steps": range(4)}, "4 of 6 steps"),
        ({"evaluation": True}, "eval/loss"),
        ({"steps": range(5), "evaluation": True}, "5 of 6 steps"),
    ],
)
def test_a_run_that_learned_nothing_fails_each_time_and_its_summary_has_the_number(goes_on, tmp_path, bad, part):
    for _ in range(2):
        with raises(errors.RunError, part, tmp_path / "run"):
            goes_on(task=bad_task(**bad), train__nan="skip")

        def refuse(name):
            raise AssertionError(f"{name} in a JSON file")

        summary = json.loads((tmp_path / "run" / "summary.json").read_text(), parse_constant=refuse)
        assert summary["skipped"] == len(bad.get("steps", ()))
        assert (summary["eval/loss"] is None) == bad.get("evaluation", False)
        for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines():
            json.loads(line, parse_constant=refuse)


def test_skipped_steps_count_though_later_ones_may_not_be(goes_on):
    task = bad_task(steps=range(5))
    for steps, nan in ((6, "skip"), (8, "abort")):
        with raises(errors.RunError, f"5 of {steps} steps"):
            goes_on(task=task, train__nan=nan, train__steps=steps)


def test_a_few_skipped_steps_are_no_failure(goes_on):
    assert goes_on(task=bad_task(steps=range(3)), train__nan="skip").summary["skipped"] == 3


ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.parametrize("every", [108, pytest.param(1, marks=pytest.mark.slow)])
def test_a_kill_before_each_change_of_a_file(tmp_path, every):
    """The run is one of three steps, each of which is saved: some 100 changes. 108: within the second save."""
    flags = os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=1")
    environment = {name: value for name, value in os.environ.items() if name != "JAX_ENABLE_COMPILATION_CACHE"}
    command = [sys.executable, "tests/helpers/kill.py", str(tmp_path), f"--every={every}"]
    options = {"cwd": ROOT, "env": environment | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}}
    done = subprocess.run(command, capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    tried = re.search(r"killed before (\d+) of (\d+) changes of files: 0 failed", done.stdout)
    assert tried and int(tried[2]) > 50 and int(tried[1]) == len(range(every // 2, int(tried[2]), every)) > 0

"""Resumed runs: equal bit for bit after an interruption or a kill; with more steps; with other data."""

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
from resuming import SAVE, STEPS, break_off, have_equal_results, linear_task, run, summary

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
from experiments.studies import study as studies

SUMMARY = "experiment steps params params_sha256 eval/loss eval/accuracy wall_seconds compile_seconds"
SUMMARY += " tokens_per_second devices backend versions"  # summary.json has at least these keys


def test_the_digest_is_over_names_and_bytes_in_sorted_order():
    a, b = np.arange(6, dtype=np.float32).reshape(2, 3), np.ones(2, np.float32)
    expected = hashlib.sha256(b"head/G_CD" + a.tobytes() + b"head/b_C" + b.tobytes()).hexdigest()
    tree = {"head": {"b_C": jnp.asarray(b), "G_CD": jnp.asarray(a)}}
    assert checkpoint.digest(tree) == expected
    assert checkpoint.digest({"head": {"G_CD": a.T.copy().T, "b_C": b}}) == expected  # independent of the memory layout
    replicated = jax.device_put(tree, meshes.replicated(meshes.make(data=8)))
    assert checkpoint.digest(replicated) == expected
    nested_digest = hashlib.sha256(b"head 2/b_C" + b.tobytes() + b"head/G_CD" + a.tobytes()).hexdigest()
    # Sorted by full names, not level by level.
    assert checkpoint.digest({"head": {"G_CD": a}, "head 2": {"b_C": b}}) == nested_digest
    other_trees = [
        {"head": {"G_CD": a, "c_C": b}},
        {"head": {"G_CD": a, "b_C": np.nextafter(b, 2)}},
        {"head": {"G_CD": a}},
    ]
    assert len({checkpoint.digest(other_tree) for other_tree in other_trees} | {expected}) == 4


@pytest.fixture(scope="module")
def reference_run(tmp_path_factory):
    """Return the folder of an uninterrupted run."""
    return run(tmp_path_factory.mktemp("runs") / "straight").folder


def test_a_run_has_these_files_rows_and_summary(reference_run):
    names = {file.name for file in reference_run.iterdir()} - {"source"}  # exists only if this checkout has edits
    assert names == {"config.json", "metrics.jsonl", "summary.json", "checkpoints", "events", "figures"}
    assert {file.name for file in (reference_run / "checkpoints").iterdir()} == {"6", "9"}  # keep = 2
    rows = log.read(reference_run)
    assert [row["step"] for row in rows if "train/loss" in row] == list(range(1, STEPS + 1))
    assert [row["step"] for row in rows if "eval/loss" in row] == [4, 8, 9]
    assert {"train/loss", "train/accuracy", "train/gradient_norm", "train/learning_rate"} <= rows[0].keys()
    config = json.loads((reference_run / "config.json").read_text())
    assert config.keys() == {"config", "versions", "devices", "commit", "data"} and config["devices"] == "1 x cpu"
    # K is derived: 128 // 4.
    assert config["config"]["train"]["steps"] == STEPS and config["config"]["model"]["K"] == 32
    assert config["versions"] == meshes.versions() and config["versions"]["jax"] == jax.__version__
    result = summary(reference_run)
    assert result.keys() >= set(SUMMARY.split())
    assert (result["experiment"], result["steps"], result["params"], result["devices"]) == ("vision", STEPS, 18, 1)
    assert result["backend"] == jax.default_backend() and result["versions"] == meshes.versions()
    assert result["baseline/accuracy"] == 1 / 3
    assert 0 < result["compile_seconds"] < result["wall_seconds"] and result["tokens_per_second"] > 0
    assert rows[-1] == {"step": STEPS, "eval/loss": result["eval/loss"], "eval/accuracy": result["eval/accuracy"]}


def test_the_summary_is_about_the_last_parameters(reference_run):
    params = checkpoint.parameters(reference_run / "checkpoints", STEPS)
    assert summary(reference_run)["params_sha256"] == checkpoint.digest(params)
    evaluate = train_step.evaluator(linear_task(), meshes.make(data=1))
    assert summary(reference_run)["eval/loss"] == evaluate(jax.device_put(params))["loss"]


def test_a_run_can_be_resumed_on_another_number_of_devices(tmp_path, reference_run, capsys):
    folder = tmp_path / "run"
    break_off(folder, 5, mesh__data=2)
    run(folder, train__log_every=2)
    assert "was trained on 2 x cpu, now 1 x cpu: numbers may differ in the last bits" in capsys.readouterr().out
    assert summary(folder)["devices"] == 1
    assert json.loads((folder / "config.json").read_text())["config"]["mesh"]["data"] == 1
    rows = [row for row in log.read(folder) if row["step"] > SAVE and "train/loss" in row]
    assert [row["step"] for row in rows] == [4, 6, 8, 9]
    expected = {row["step"]: row["train/loss"] for row in log.read(reference_run) if "train/loss" in row}
    assert [row["train/loss"] for row in rows] == pytest.approx([expected[row["step"]] for row in rows], rel=1e-5)


def read_files(folder):
    return {str(file): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


def test_a_finished_run_prints_that_it_is_finished_and_changes_nothing(reference_run, capsys):
    before = read_files(reference_run)
    for changes in ({}, {"mesh__data": 2}):
        run(reference_run, figures=None, **changes)
        out = capsys.readouterr().out
        assert f"{reference_run} holds a finished run: nothing to do" in out and "summary.json" in out
        assert "FLOP" not in out
    assert read_files(reference_run) == before


def test_a_finished_run_with_a_damaged_last_checkpoint_resumes_from_an_earlier_one(tmp_path, reference_run, capsys):
    """If that run is also interrupted, the next one resumes from the newest checkpoint."""
    folder = shutil.copytree(reference_run, tmp_path / "run")
    state_files = (file for file in (folder / "checkpoints/9/state").rglob("*") if file.is_file())
    flip(max(state_files, key=lambda file: file.stat().st_size))
    before = read_files(folder)
    with raises(errors.UserError, folder / "checkpoints" / "9" / "state"):
        run(folder)
    assert read_files(folder) == before
    break_off(folder, 8, resume=6)
    assert f"resuming {folder} at step 6" in capsys.readouterr().out and not (folder / "summary.json").exists()
    run(folder)
    assert have_equal_results(folder, reference_run) and {file.name for file in (folder / "checkpoints").iterdir()} == {
        "6",
        "9",
    }
    shutil.rmtree(folder / "checkpoints")
    assert run(folder).params is None  # a finished run without checkpoints is not trained again


GROWTH = [[3, 16], [6, 8]]
SIZES = [8] * 3 + [16] * 3 + [8] * 4
GROWTH_CHANGES = {"train__growth": GROWTH, "train__steps": 10, "train__save_every": 2, "train__evaluate_every": 0}
GROWTH_CHANGES |= {"optim__schedule": "constant", "optim__learning_rate": 0.01}
GROWTH_CHANGES |= {"optim__warmup_steps": 1}


def test_a_run_with_growing_batches_can_be_resumed_across_a_change_of_size(tmp_path, monkeypatch, capsys):
    programs, compile_program = [], jax.stages.Lowered.compile
    with monkeypatch.context() as patch:
        patch.setattr(
            jax.stages.Lowered, "compile", lambda self: programs.append(compile_program(self)) or programs[-1]
        )
        run(tmp_path / "whole", **GROWTH_CHANGES)
    assert len(programs) == 2  # two sizes; one is used twice
    out = capsys.readouterr().out
    for words in ("8 examples, 8 tokens", "16 examples, 16 tokens, after step 3", "8 examples, 8 tokens, after"):
        assert words in out
    # Twice as many examples need twice the FLOP.
    assert re.findall(r"([\d.]+ \w+) per step", out) == [
        "720 FLOP",
        "1.44 kFLOP",
        "720 FLOP",
    ]
    rows = [row for row in log.read(tmp_path / "whole") if "train/loss" in row]
    assert [row["step"] for row in rows] == list(range(1, 11))
    assert [row["train/learning_rate"] for row in rows] == pytest.approx([0.01] * len(SIZES))
    break_off(tmp_path / "parts", 6, **GROWTH_CHANGES)
    run(tmp_path / "parts", **GROWTH_CHANGES)
    assert f"resuming {tmp_path / 'parts'} at step 4" in capsys.readouterr().out
    assert have_equal_results(tmp_path / "parts", tmp_path / "whole")


def test_a_batch_uses_the_step_compiled_for_its_size_and_memory_is_that_of_the_largest():
    compiled = compilation.Compiled({n: lambda state, batch, n=n: (n, state, batch) for n in (3, 5, 4)})
    for n in (3, 5):
        batch = {"x_B": np.ones(n)}
        assert compiled("state", batch) == (n, "state", batch)
    assert compiled.largest() is compiled[5]


def test_pairs_may_be_tuples_in_a_config_file_and_are_saved_as_lists():
    config = base.get_config()
    config.train.growth = [(500, 128)]
    assert configs.flat(configs.values_of(config))["train.growth"] == [[500, 128]]


CLASSES = ["cat", "dog", "eel"]


@pytest.fixture
def train_again(tmp_path):
    """Return a function (classes, sha256, task, **settings). It trains or resumes in one folder, returns the result."""

    def train(classes=CLASSES, sha256="a", task=None, **changes):
        settings = tiny.settings("vision", model=False, **dots.CHANGES | changes)
        files = {"data.json": disk.as_json({"classes": classes})}
        work = runs.Work(task or tiny.linear_task(), lambda *_: [], files=files, data_sha256=sha256)
        with tiny.without_figures():
            return runs.run(settings, tmp_path / "run", work, runs.make_mesh(settings))

    return train


def test_a_run_is_not_resumed_with_other_classes(train_again, tmp_path):
    train_again()
    before = {file: file.read_bytes() for file in tmp_path.rglob("*.json")}
    other_classes = ["dog", "cat", "eel"], ["cat", "dog"], [*CLASSES, "fly"]
    for classes, steps in [
        *((one, 8) for one in other_classes),
        (other_classes[0], 6),
    ]:  # an unfinished and a finished run
        with raises(errors.UserError, tmp_path / "run", f"{len(CLASSES)} classes before, {len(classes)} now"):
            train_again(classes, train__steps=steps)
        assert {file: file.read_bytes() for file in tmp_path.rglob("*.json")} == before
    train_again(train__steps=8)


def test_a_run_that_is_resumed_with_other_data_prints_a_warning(train_again, tmp_path, capsys):
    train_again()
    for sha256, steps, warnings in (("a", 6, 0), ("b", 6, 1), ("b", 8, 1), ("b", 9, 0), (None, 9, 0)):
        capsys.readouterr()
        train_again(sha256=sha256, train__steps=steps)
        out = capsys.readouterr().out
        assert out.count(f"warning: the data differ from those that {tmp_path / 'run'}") == warnings, (sha256, steps)


def test_a_config_that_has_trained_nothing_may_be_resumed_with_other_data(train_again, tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as patch, pytest.raises(errors.RunError):
        patch.setattr(loop, "train", lambda *a, **k: (_ for _ in ()).throw(errors.RunError("stopped")))
        train_again()
    train_again(["x", "y", "z"], "b")
    assert "warning: the data" not in capsys.readouterr().out


def test_a_finished_run_is_resumed_with_more_steps(train_again):
    """The default warm-up changes with the number of steps."""
    settings = [tiny.settings("vision", optim__warmup_steps=100, train__steps=n) for n in (5, 90, 100, 101)]
    assert [optim.warmup_steps(one) for one in settings] == [0, 9, 10, 100]
    for steps in (5, 101):
        assert train_again(optim__warmup_steps=100, train__steps=steps).summary["steps"] == steps


@pytest.mark.parametrize(("arm_warmup", "warmup"), [(50, 50), (100, 100), (None, 6)])
def test_a_warm_up_that_an_arm_sets_is_not_shortened(arm_warmup, warmup):
    """An arm may set the default value 100, which must not be shortened."""
    arms = [
        ["own", {} if arm_warmup is None else {"optim.warmup_steps": arm_warmup}],
        ["other", {"optim.warmup_steps": 5}],
    ]
    changes = {"study.experiment": "language", "study.arms": arms, "study.seeds": [1], "optim.warmup_steps": 100}
    settings = tiny.settings("ablation", model=False, **changes | {"train.steps": 60})
    arm_settings = {one.arm: one.settings for one in studies.runs(settings, studies.read(settings))}
    assert [optim.warmup_steps(arm_settings[name]) for name in ("own", "other")] == [warmup, 5]


def test_a_warm_up_that_the_user_sets_may_not_change(train_again):
    train_again(optim__warmup_steps=3)
    with raises(errors.UserError, "optim.warmup_steps"):
        train_again(optim__warmup_steps=2, train__steps=9)


def bad_task(*, steps=(), evaluation=False):
    """Return the linear task with a loss of NaN in these steps (counted from 0), or in the evaluation."""
    task = tiny.linear_task()

    def spoil(n, batch):
        return batch | {"x_BD": batch["x_BD"] * np.float32("nan" if n in steps else 1)}

    held_out = [one | {"x_BD": one["x_BD"] * np.float32("nan" if evaluation else 1)} for one in task.evaluation]
    return task._replace(train=task.train.map_with_index(spoil), evaluation=held_out)


@pytest.mark.parametrize(
    ("bad", "part"),
    [
        ({"steps": range(4)}, "4 of 6 steps"),
        ({"evaluation": True}, "eval/loss"),
        ({"steps": range(5), "evaluation": True}, "5 of 6 steps"),
    ],
)
def test_a_run_that_learned_nothing_fails_each_time_and_its_summary_counts_skipped_steps(
    train_again, tmp_path, bad, part
):
    for _ in range(2):
        with raises(errors.RunError, part, tmp_path / "run"):
            train_again(task=bad_task(**bad), train__nan="skip")

        def refuse(name):
            raise AssertionError(f"{name} in a JSON file")

        summary = json.loads((tmp_path / "run" / "summary.json").read_text(), parse_constant=refuse)
        assert summary["skipped"] == len(bad.get("steps", ()))
        assert (summary["eval/loss"] is None) == bad.get("evaluation", False)
        for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines():
            json.loads(line, parse_constant=refuse)


def test_skipped_steps_still_count_if_later_steps_may_not_be_skipped(train_again):
    task = bad_task(steps=range(5))
    for steps, nan in ((6, "skip"), (8, "abort")):
        with raises(errors.RunError, f"5 of {steps} steps"):
            train_again(task=task, train__nan=nan, train__steps=steps)


def test_a_few_skipped_steps_are_no_failure(train_again):
    assert train_again(task=bad_task(steps=range(3)), train__nan="skip").summary["skipped"] == 3


ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.parametrize("every", [108, pytest.param(1, marks=pytest.mark.slow)])
def test_a_run_killed_before_any_change_of_a_file_resumes_to_the_same_result(tmp_path, every):
    """The run has three steps and saves each, which makes about 100 changes of files.

    every = 108 kills it once, within the second save.
    """
    flags = os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=1")
    environment = {name: value for name, value in os.environ.items() if name != "JAX_ENABLE_COMPILATION_CACHE"}
    command = [sys.executable, "tests/helpers/kill.py", str(tmp_path), f"--every={every}"]
    options = {"cwd": ROOT, "env": environment | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}}
    process = subprocess.run(command, capture_output=True, text=True, **options)
    assert process.returncode == 0, process.stdout + process.stderr
    report = re.search(r"killed before (\d+) of (\d+) changes of files: 0 failed", process.stdout)
    assert report and int(report[2]) > 50 and int(report[1]) == len(range(every // 2, int(report[2]), every)) > 0

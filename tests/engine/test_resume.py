"""Resumed runs: equal bit for bit after an interruption or a kill; with more steps; with other data."""

import contextlib
import hashlib
import json
import math
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
from checkpoints import flip, list_names
from errors import raises
from resuming import SAVE, STEPS, break_off, have_equal_results, linear_task, run, summary

from configs import base
from experiments.config import disk, errors, settings as configs
from experiments.devices import compilation, mesh as meshes
from experiments.engine import run as runs, summary as summaries, train_step
from experiments.folder import checkpoint, records
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


@pytest.fixture(scope="session")
def reference_run(make_once):
    """Return the folder of an uninterrupted run, which the tests only read."""
    return make_once("reference", lambda folder: run(folder / "run")) / "run"


def test_a_run_has_these_files_rows_and_summary(reference_run):
    names = list_names(reference_run) - {"source"}  # exists only if this checkout has edits
    assert names == {"config.json", "metrics.jsonl", "summary.json", "checkpoints", "events", "figures"}
    assert list_names(reference_run / "checkpoints") == {"6", "9"}  # keep = 2
    rows = records.read_metrics(reference_run)
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
    rows = [row for row in records.read_metrics(folder) if row["step"] > SAVE and "train/loss" in row]
    assert [row["step"] for row in rows] == [4, 6, 8, 9]
    expected = {row["step"]: row["train/loss"] for row in records.read_metrics(reference_run) if "train/loss" in row}
    assert [row["train/loss"] for row in rows] == pytest.approx([expected[row["step"]] for row in rows], rel=1e-5)


def read_files(folder):
    return {str(file): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


def test_a_finished_run_prints_that_it_is_finished_and_changes_nothing(tmp_path, reference_run, capsys):
    folder = shutil.copytree(reference_run, tmp_path / "run")
    before = read_files(folder)
    for changes in ({}, {"mesh__data": 2}):
        run(folder, figures=None, **changes)
        out = capsys.readouterr().out
        assert f"{folder} holds a finished run: nothing to do" in out and "summary.json" in out and "FLOP" not in out
    assert read_files(folder) == before


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
    assert have_equal_results(folder, reference_run) and list_names(folder / "checkpoints") == {"6", "9"}
    shutil.rmtree(folder / "checkpoints")
    assert run(folder).params is None  # a finished run without checkpoints is not trained again


GROWTH = {"train__growth": [[3, 16], [7, 8]], "train__steps": 10, "train__save_every": 6, "train__evaluate_every": 0}
GROWTH |= {"optim__schedule": "constant", "optim__learning_rate": 0.01, "optim__warmup_steps": 1}


def test_a_run_with_growing_batches_can_be_resumed_across_a_change_of_size(tmp_path, monkeypatch, capsys):
    programs, compile_program = [], jax.stages.Lowered.compile
    with monkeypatch.context() as patch:
        patch.setattr(
            jax.stages.Lowered, "compile", lambda self: programs.append(compile_program(self)) or programs[-1]
        )
        run(tmp_path / "whole", **GROWTH)
    assert len(programs) == 2  # two sizes; one is used twice
    out = capsys.readouterr().out
    for words in ("8 examples, 8 tokens", "16 examples, 16 tokens, after step 3", "8 examples, 8 tokens, after"):
        assert words in out
    # Twice as many examples need twice the FLOP.
    assert re.findall(r"([\d.]+ \w+) per step", out) == ["720 FLOP", "1.44 kFLOP", "720 FLOP"]
    rows = [row for row in records.read_metrics(tmp_path / "whole") if "train/loss" in row]
    assert [row["step"] for row in rows] == list(range(1, 11))
    assert [row["train/learning_rate"] for row in rows] == pytest.approx([0.01] * 10)
    parts = shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    run(parts, resume=6, **GROWTH)  # the last four steps again, the first of them with 16 examples
    assert f"resuming {parts} at step 6" in capsys.readouterr().out
    assert have_equal_results(parts, tmp_path / "whole")


def test_a_batch_uses_the_step_compiled_for_its_size_and_memory_is_that_of_the_largest():
    compiled = compilation.Compiled({n: lambda state, batch, n=n: (n, state, batch) for n in (3, 5, 4)})
    for n in (3, 5):
        batch = {"x_B": np.ones(n)}
        assert compiled("state", batch) == (n, "state", batch)
    assert compiled.largest() is compiled[5]


def test_pairs_may_be_tuples_in_a_config_file_and_are_saved_as_lists():
    config = base.get_config()
    config.train.growth = [(500, 128)]
    assert configs.flat(config)["train.growth"] == [[500, 128]]


CLASSES = ["cat", "dog", "eel"]


def train(folder, classes=CLASSES, sha256="a", task=None, **changes):
    """Train or resume a run of six steps, and return the result."""
    settings = tiny.settings("vision", model=False, **dots.CHANGES | {"optim__warmup_steps": 100} | changes)
    files = {"data.json": disk.as_json({"classes": classes})}
    work = runs.Work(task or tiny.linear_task(), lambda *_: [], files=files, data_sha256=sha256)
    with tiny.without_figures():
        return runs.run(settings, folder, work, runs.make_mesh(settings))


def test_a_finished_run_is_resumed_with_more_steps_but_not_with_other_classes(tmp_path, capsys):
    """The default warm-up changes with the number of steps. test_workdir.py tests other changes of the data."""
    settings = [tiny.settings("vision", optim__warmup_steps=100, train__steps=n) for n in (5, 90, 100, 101)]
    assert [configs.warmup_steps(one) for one in settings] == [0, 9, 10, 100]
    folder = tmp_path / "run"
    train(folder)
    with raises(errors.UserError, folder, "3 classes before, 2 now"):
        train(folder, ["cat", "dog"])
    with raises(errors.UserError, "optim.warmup_steps"):  # one that the user sets may not change
        train(folder, optim__warmup_steps=2, train__steps=20)
    capsys.readouterr()
    assert train(folder, sha256="b", train__steps=20).summary["steps"] == 20
    assert f"warning: the data differ from those that {folder}" in capsys.readouterr().out


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
    assert [configs.warmup_steps(arm_settings[name]) for name in ("own", "other")] == [warmup, 5]


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ({"eval/loss": 1.0, "skipped": 3}, []),  # a few skipped steps are no failure
        ({"eval/loss": 1.0, "skipped": 4}, ["4 of 6 steps"]),
        ({"eval/loss": None}, ["eval/loss"]),
        ({"eval/loss": math.nan, "skipped": None}, ["eval/loss"]),
        ({"eval/loss": math.inf, "skipped": 5}, ["eval/loss", "5 of 6 steps"]),
    ],
)
def test_a_run_that_learned_nothing_fails(tmp_path, numbers, words):
    with raises(errors.RunError, tmp_path, *words) if words else contextlib.nullcontext():
        summaries.check_result(numbers, 6, tmp_path)


def test_a_run_that_learned_nothing_fails_each_time_and_its_summary_counts_skipped_steps(tmp_path):
    """The loss is NaN in five steps, which also count if later steps may not be skipped, and in the evaluation."""
    task, folder = tiny.linear_task(), tmp_path / "run"

    def spoil(n, batch):
        return batch | {"x_BD": batch["x_BD"] * np.float32("nan" if n < 5 else 1)}

    task = task._replace(train=task.train.map_with_index(spoil), evaluation=[spoil(0, one) for one in task.evaluation])

    def refuse(name):
        raise AssertionError(f"{name} in a JSON file")

    for steps, nan in ((6, "skip"), (6, "skip"), (8, "abort")):
        with raises(errors.RunError, "eval/loss", f"5 of {steps} steps", folder):
            train(folder, task=task, train__nan=nan, train__steps=steps)
        result = json.loads((folder / "summary.json").read_text(), parse_constant=refuse)
        assert (result["skipped"], result["eval/loss"], result["steps"]) == (5, None, steps)
        for line in (folder / "metrics.jsonl").read_text().splitlines():
            json.loads(line, parse_constant=refuse)


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

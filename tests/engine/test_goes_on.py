"""A run that goes on: with other data, with other classes, for longer; and results that do not count."""

import json

import dots
import numpy as np
import pytest
import tiny
from errors import raises

from experiments.engine import disk, errors, loop, optim, run as runs
from experiments.studies import study

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


def test_a_config_that_trained_nothing_binds_no_data(goes_on, tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as patch, pytest.raises(errors.RunError):
        patch.setattr(loop, "train", lambda *a, **k: (_ for _ in ()).throw(errors.RunError("stopped")))
        goes_on()
    goes_on(["x", "y", "z"], "b")
    assert "warning: the data" not in capsys.readouterr().out


def test_a_run_that_was_planned_too_short_goes_on(goes_on):
    """Its warm-up, which nobody set, changes with it."""
    settings = [tiny.settings("vision", optim__warmup_steps=100, train__steps=n) for n in (5, 90, 101)]
    assert [optim.warmup_steps(one) for one in settings] == [0, 9, 100]
    for steps in (5, 101):
        assert goes_on(optim__warmup_steps=100, train__steps=steps).summary["steps"] == steps


@pytest.mark.parametrize(("own", "warmup"), [(50, 50), (100, 100), (None, 6)])
def test_an_arm_that_sets_the_warm_up_has_it(own, warmup):
    """Also if it is the default: an arm of 100 steps must not be trained with another number."""
    arms = [["own", {} if own is None else {"optim.warmup_steps": own}], ["other", {"optim.warmup_steps": 5}]]
    changes = {"study.experiment": "language", "study.arms": arms, "study.seeds": [1], "optim.warmup_steps": 100}
    settings = tiny.settings("ablation", model=False, **changes | {"train.steps": 60})
    made = {one.arm: one.settings for one in study.runs(settings, study.read(settings))}
    assert [optim.warmup_steps(made[name]) for name in ("own", "other")] == [warmup, 5]


def test_a_warm_up_that_somebody_set_stays(goes_on):
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
    ("bad", "told"),
    [
        ({"steps": range(4)}, "4 of 6 steps"),
        ({"evaluation": True}, "eval/loss"),
        ({"steps": range(5), "evaluation": True}, "5 of 6 steps"),
    ],
)
def test_a_run_that_learned_nothing_fails_each_time_and_its_summary_has_the_number(goes_on, tmp_path, bad, told):
    for _ in range(2):
        with raises(errors.RunError, told, tmp_path / "run"):
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

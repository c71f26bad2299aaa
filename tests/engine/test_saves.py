"""When a run saves without being told to stop, and what is there where an evaluation, a save or the disk fails."""

import json
import re
import signal

import dots
import pytest
from errors import raises

from experiments.engine import batches, checkpoint, errors, log, loop, train_step as steps
from experiments.engine.checkpoint import Checkpoints
from experiments.pretrained import open_model

quick, unbroken = dots.quick, dots.unbroken


class Killed(GeneratorExit):
    """The process has ended."""


def test_the_clock_saves(tmp_path, monkeypatch):
    """A minute passes with each step. Looked at after each, 2.5 of them are over after steps 3 and 6."""
    now = 0.0

    def iterate(dataset, *, start, whole=batches.iterate):
        nonlocal now
        for batch in whole(dataset, start=start):
            now += 60
            yield batch

    monkeypatch.setattr(batches, "iterate", iterate)
    monkeypatch.setattr(loop.time, "monotonic", lambda: now)
    dots.planned(monkeypatch, save_minutes=2.5, keep=9)
    assert dots.launched(tmp_path, "--config.train.steps=8").code == 0
    assert dots.saved(tmp_path) == [3, 6, 8]


def test_the_clock_saves_within_a_long_evaluation(tmp_path, monkeypatch):
    """A minute passes with each question between two batches of the one behind step 2, which is killed later."""
    now, there = 0.0, []

    def evaluate(params, between):
        nonlocal now
        for _ in range(3):
            now += 60
            between()
            there.append([file.name.partition(".")[0] for file in (tmp_path / "run" / "checkpoints").iterdir()])
        raise Killed

    monkeypatch.setattr(steps, "evaluator", lambda task, mesh: evaluate)
    dots.planned(monkeypatch, save_minutes=2.5)
    monkeypatch.setattr(loop.time, "monotonic", lambda: now)
    with pytest.raises(Killed):
        dots.launched(tmp_path, "--config.train.evaluate_every=2")
    assert there == [[], [], ["2"]] and dots.saved(tmp_path) == [2]


def evaluations(monkeypatch, *values):
    """These losses are found, one after the other."""
    losses = iter(values)
    evaluate = lambda params, between: {"loss": next(losses), "accuracy": 0}  # noqa: E731
    monkeypatch.setattr(steps, "evaluator", lambda task, mesh: evaluate)


BEST = ("--config.train.keep_best=eval/loss", "--config.train.evaluate_every=1")


def test_the_best_evaluation_is_saved_and_kept(tmp_path, monkeypatch):
    evaluations(monkeypatch, 3.0, 1.0, 2.0, 1.5, 0.5, 4.0)
    dots.planned(monkeypatch, keep=1)
    with monkeypatch.context() as patch:
        dots.signal_with_batch(patch, 3, signal.SIGTERM)
        assert dots.launched(tmp_path, *BEST).code == 143
    assert dots.saved(tmp_path) == [2, 3]  # the best and the newest, which the signal asked for
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:  # what no checkpoint has measured
        file.write('{"step": 2, "eval/loss": -100.0}\n')
    asked = []
    save = Checkpoints.save

    def listed(self, step, state, metrics=None):
        asked.append((step, metrics and metrics["eval/loss"]))
        save(self, step, state, metrics)

    monkeypatch.setattr(Checkpoints, "save", listed)
    assert dots.launched(tmp_path, *BEST).code == 0
    # 1.5 after step 4 is not better than the 1.0 from before the signal, and the last is saved before it is evaluated
    assert asked == [(5, 0.5), (6, None)]
    assert dots.saved(tmp_path) == [5, 6]


def test_what_is_saved_before_its_evaluation_counts_for_the_best(tmp_path, monkeypatch):
    evaluations(monkeypatch, 3.0, 1.0, 2.0, 1.5, 0.5, 4.0)
    dots.planned(monkeypatch, keep=1)
    assert dots.launched(tmp_path, *BEST, "--config.train.save_every=1").code == 0
    assert dots.saved(tmp_path) == [5, 6]
    manifests = [json.loads((tmp_path / f"run/checkpoints/{n}/manifest.json").read_text()) for n in (5, 6)]
    assert [manifest["metrics"]["eval/loss"] for manifest in manifests] == [0.5, 4.0]


def test_the_best_checkpoint_is_opened_and_each_one_on_request_and_the_summary_names_both(
    tmp_path, monkeypatch, capsys
):
    evaluations(monkeypatch, 3.0, 1.0, 2.0, 1.5, 0.5, 4.0)
    outcome = dots.launched(tmp_path, *BEST, "--config.train.save_every=3")
    run = tmp_path / "run"
    both = {"best": {"step": 5, "eval/loss": 0.5, "eval/accuracy": 0}, "last": {"step": 6, "eval/loss": 4.0}}
    assert json.loads((run / "summary.json").read_text())["checkpoints"] == both
    assert re.search(r"best checkpoint +step 5, eval/loss 0.5000", outcome.out)
    assert re.search(r"last checkpoint +step 6, eval/loss 4.0000", outcome.out)
    digest = {step: checkpoint.digest(checkpoint.parameters(run / "checkpoints", step)) for step in (5, 6)}
    for path, step in {"": 5, "checkpoints/5": 5, "checkpoints/6": 6}.items():
        capsys.readouterr()
        model = open_model.open(run / path)
        assert checkpoint.digest(model.params) == digest[step] and model.path == run
        assert ("step 5 is opened, the best by eval/loss" in capsys.readouterr().out) == ("/" not in path)
    (run / "checkpoints" / "2").mkdir()
    with raises(errors.UserError, "checkpoints/2"):
        open_model.open(run / "checkpoints" / "2")


def test_what_is_better_than_the_one_before_it_alone_is_not_saved(tmp_path, monkeypatch):
    evaluations(monkeypatch, 1.0, 3.0, 2.0, 0.5, 4.0, 4.0)
    dots.planned(monkeypatch, keep=6)
    assert dots.launched(tmp_path, *BEST).code == 0
    assert dots.saved(tmp_path) == [1, 4, 6]


@pytest.mark.parametrize("lost", [None, "row"])
def test_an_evaluation_of_a_step_that_is_resumed_is_in_the_log_once(tmp_path, monkeypatch, unbroken, lost):
    """Killed after the evaluation of step 4, or between it and its row."""
    write, note = log.Log.write, Checkpoints.note

    def written(self, step, values):
        if step != 4 or "eval/loss" not in values or lost != "row":
            write(self, step, values)
        if step == 5:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(log.Log, "write", written)
        with pytest.raises(Killed):
            dots.launched(tmp_path, "--config.train.save_every=4")
    assert dots.saved(tmp_path) == [4]
    evaluated = []
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "note", lambda self, *of: evaluated.append(of[0]) or note(self, *of))
        assert dots.resumed(tmp_path) == unbroken
    assert evaluated == ([6] if lost is None else [4, 6])


@pytest.mark.parametrize(("metric", "part"), [("eval/perplexity", "loss, accuracy"), ("eval/explained", "eval/loss")])
def test_a_metric_that_there_is_not(tmp_path, metric, part):
    outcome = dots.launched(tmp_path, f"--config.train.keep_best={metric}")
    assert outcome.code == 2 and "train.keep_best" in outcome.err and metric in outcome.err and part in outcome.err
    assert not (tmp_path / "run").exists()


def test_a_save_that_fails_is_the_message_though_a_signal_came_too(tmp_path, monkeypatch):
    def wait(self):
        raise errors.RunError("step 2 could not be saved")

    with monkeypatch.context() as patch:
        dots.signal_with_batch(patch, 2, signal.SIGTERM)
        patch.setattr(Checkpoints, "wait", wait)
        outcome = dots.launched(tmp_path)
    assert (outcome.code, outcome.err) == (1, "error: step 2 could not be saved\n")
    assert dots.launched(tmp_path).code == 0

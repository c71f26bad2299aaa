"""When a run saves, and what it leaves if an evaluation or a save fails."""

import json
import re
import shutil
import signal

import dots
import jax
import numpy as np
import pytest
from errors import raises

from experiments.config import errors
from experiments.engine import batches, loop, run_plan, train_step
from experiments.folder import checkpoint, log
from experiments.folder.checkpoint import Checkpoints
from experiments.pretrained import open_model

quick, unbroken, unbroken_folder = dots.quick, dots.unbroken, dots.unbroken_folder


class Killed(GeneratorExit):
    """Raised to imitate a process that is killed."""


ADD_ONE = jax.jit(lambda state: state.replace(params=jax.tree.map(lambda x: x + 1, state.params)))


def without_training(monkeypatch):
    """Replace the training step by one that adds 1 to all parameters, which is compiled once for all runs."""
    metrics = {"loss": np.float32(1), "alive": np.True_}
    monkeypatch.setattr(run_plan, "compile_step", lambda *_: (lambda state, batch, alive: (ADD_ONE(state), metrics), 0))


def test_a_run_saves_after_save_minutes(tmp_path, monkeypatch):
    """Each step takes one minute. The clock is read after each step, so 2.5 minutes have passed after steps 3 and 6."""
    seconds = 0.0

    def iterate(dataset, *, start, original=batches.iterate):
        nonlocal seconds
        for batch in original(dataset, start=start):
            seconds += 60
            yield batch

    monkeypatch.setattr(batches, "iterate", iterate)
    monkeypatch.setattr(loop.time, "monotonic", lambda: seconds)
    without_training(monkeypatch)
    dots.change_plan(monkeypatch, save_minutes=2.5, keep=9)
    assert dots.launch_run(tmp_path, "--config.train.steps=8").code == 0
    assert dots.list_steps(tmp_path) == [3, 6, 8]


def test_a_run_saves_after_save_minutes_within_a_long_evaluation(tmp_path, monkeypatch):
    """Each batch of the evaluation after step 2 takes one minute. The process is killed after the third."""
    seconds, steps_on_disk = 0.0, []

    def evaluate(params, on_batch):
        nonlocal seconds
        for _ in range(3):
            seconds += 60
            on_batch()
            steps_on_disk.append([file.name.partition(".")[0] for file in (tmp_path / "run" / "checkpoints").iterdir()])
        raise Killed

    without_training(monkeypatch)
    monkeypatch.setattr(train_step, "evaluator", lambda task, mesh: evaluate)
    dots.change_plan(monkeypatch, save_minutes=2.5)
    monkeypatch.setattr(loop.time, "monotonic", lambda: seconds)
    with pytest.raises(Killed):
        dots.launch_run(tmp_path, "--config.train.evaluate_every=2")
    assert steps_on_disk == [[], [], ["2"]] and dots.list_steps(tmp_path) == [2]


def set_losses(monkeypatch, *values):
    """Replace the evaluation by one that returns these losses, one after the other, and skip the training."""
    without_training(monkeypatch)
    losses = iter(values)
    evaluate = lambda params, on_batch: {"loss": next(losses), "accuracy": 0}  # noqa: E731
    monkeypatch.setattr(train_step, "evaluator", lambda task, mesh: evaluate)


BEST = ("--config.train.keep_best=eval/loss", "--config.train.evaluate_every=1")


def test_the_best_evaluation_is_saved_and_kept(tmp_path, monkeypatch):
    """Step 5 is better than step 4, but not better than step 2, which was before the signal."""
    set_losses(monkeypatch, 3.0, 1.0, 2.0, 1.5, 1.2, 0.5, 4.0)
    dots.change_plan(monkeypatch, keep=1)
    flags = *BEST, "--config.train.steps=7"
    with monkeypatch.context() as patch:
        dots.signal_with_batch(patch, 3, signal.SIGTERM)
        assert dots.launch_run(tmp_path, *flags).code == 143
    assert dots.list_steps(tmp_path) == [2, 3]  # the best, and the newest, saved because of the signal
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:  # a row that belongs to no checkpoint's manifest
        file.write('{"step": 2, "eval/loss": -100.0}\n')
    saves = []
    save = Checkpoints.save

    def record_and_save(self, step, state, metrics=None):
        saves.append((step, metrics and metrics["eval/loss"]))
        save(self, step, state, metrics)

    monkeypatch.setattr(Checkpoints, "save", record_and_save)
    assert dots.launch_run(tmp_path, *flags).code == 0
    assert saves == [(6, 0.5), (7, None)]  # the last step is saved before its evaluation
    assert dots.list_steps(tmp_path) == [6, 7]


LOSSES = 3.0, 1.0, 2.0, 1.0, 1.5, 0.5  # at steps 1 to 6; three evaluations without a better one end after step 5


def test_patience_ends_a_run_after_the_same_step_also_if_it_is_resumed(tmp_path, monkeypatch):
    flags = (*BEST, "--config.train.patience=3")
    (tmp_path / "whole").mkdir()
    set_losses(monkeypatch, *LOSSES)
    whole = dots.launch_run(tmp_path / "whole", *flags)
    assert whole.code == 0 and "step 5: eval/loss did not improve in 3 evaluations" in whole.out
    summary = json.loads((tmp_path / "whole/run/summary.json").read_text())
    assert summary["steps"] == 5 and summary["checkpoints"]["best"]["step"] == 2 and summary["eval/loss"] == 1.5
    assert dots.list_steps(tmp_path / "whole") == [2, 5]
    shutil.copytree(tmp_path / "whole/run", tmp_path / "run")
    set_losses(monkeypatch, *LOSSES[2:])
    assert dots.launch_run(tmp_path, *flags, "--resume=2").code == 0
    assert dots.read_result(tmp_path) == dots.read_result(tmp_path / "whole")
    set_losses(monkeypatch, LOSSES[4])
    assert dots.launch_run(tmp_path, *flags).code == 0  # the same command takes no further step
    assert dots.read_result(tmp_path) == dots.read_result(tmp_path / "whole")
    set_losses(monkeypatch, *LOSSES[5:])
    assert dots.launch_run(tmp_path, *BEST).code == 0  # without patience the run goes on
    assert dots.list_steps(tmp_path) == [5, 6]


def test_the_best_checkpoint_is_opened_or_the_one_in_the_path_and_the_summary_names_best_and_last(
    tmp_path, monkeypatch, capsys
):
    """The best checkpoint, of step 5, is saved before its evaluation."""
    set_losses(monkeypatch, 3.0, 1.0, 2.0, 1.5, 0.5, 4.0)
    dots.change_plan(monkeypatch, keep=1)
    outcome = dots.launch_run(tmp_path, *BEST, "--config.train.save_every=1")
    folder = tmp_path / "run"
    assert dots.list_steps(tmp_path) == [5, 6]
    manifests = [json.loads((folder / f"checkpoints/{n}/manifest.json").read_text()) for n in (5, 6)]
    assert [manifest["metrics"]["eval/loss"] for manifest in manifests] == [0.5, 4.0]
    expected = {"best": {"step": 5, "eval/loss": 0.5, "eval/accuracy": 0}, "last": {"step": 6, "eval/loss": 4.0}}
    assert json.loads((folder / "summary.json").read_text())["checkpoints"] == expected
    assert re.search(r"best checkpoint +step 5, eval/loss 0.5000", outcome.out)
    assert re.search(r"last checkpoint +step 6, eval/loss 4.0000", outcome.out)
    digest = {step: checkpoint.digest(checkpoint.parameters(folder / "checkpoints", step)) for step in (5, 6)}
    for path, step in {"": 5, "checkpoints/5": 5, "checkpoints/6": 6}.items():
        capsys.readouterr()
        model = open_model.open(folder / path)
        assert checkpoint.digest(model.params) == digest[step] and model.path == folder
        assert ("opening step 5, the best by eval/loss" in capsys.readouterr().out) == ("/" not in path)
    (folder / "checkpoints" / "2").mkdir()
    with raises(errors.UserError, "checkpoints/2"):
        open_model.open(folder / "checkpoints" / "2")


def test_an_evaluation_of_a_step_that_is_resumed_is_in_the_log_once(tmp_path, monkeypatch, unbroken):
    """The process is killed at step 5. The row of the evaluation at step 4 is written, or missing."""
    write, add_metrics, steps = log.Log.write, Checkpoints.add_metrics, []

    def write_then_die(self, step, values):
        write(self, step, values)
        if step == 5:
            raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(log.Log, "write", write_then_die)
        dots.launch_run(tmp_path, "--config.train.save_every=4")
    assert dots.list_steps(tmp_path) == [4]
    rows = shutil.copytree(tmp_path, tmp_path / "missing") / "run/metrics.jsonl"
    rows.write_text("".join(line for line in rows.read_text().splitlines(True) if "eval/loss" not in line))
    monkeypatch.setattr(
        Checkpoints, "add_metrics", lambda self, *arguments: steps.append(arguments[0]) or add_metrics(self, *arguments)
    )
    for folder, evaluated_steps in ((tmp_path, [6]), (tmp_path / "missing", [4, 6])):
        steps.clear()
        assert dots.finish_run(folder) == unbroken and steps == evaluated_steps


def test_a_failed_save_is_reported_even_if_a_signal_came(tmp_path, monkeypatch):
    def wait(self):
        raise errors.RunError("step 2 could not be saved")

    without_training(monkeypatch)
    dots.signal_with_batch(monkeypatch, 2, signal.SIGTERM)
    monkeypatch.setattr(Checkpoints, "wait", wait)
    outcome = dots.launch_run(tmp_path)
    assert (outcome.code, outcome.err) == (1, "error: step 2 could not be saved\n")

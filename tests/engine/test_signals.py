"""Signals: a run that trains finishes its step, saves and says how to go on; what else a command does stops at once."""

import dataclasses
import errno
import json
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import threading
import time

import dots
import jax
import pytest
import tiny

from experiments.engine import batches, errors, log, loop, signals
from experiments.engine import run as runs
from experiments.engine import step as steps

# The 29 points that are held out are 6 batches.
CHANGES = {"train.batch_size": 16, "train.steps": 6, "train.log_every": 1, "train.evaluate_batch": 5, "mesh.data": 1}
CHANGES |= {"train.evaluate_every": 4, "optim.warmup_steps": 1}
STEPS = [(signal.SIGTERM, step) for step in (1, 4, 6)] + [(signal.SIGINT, 3)]  # 4: an evaluation too; 6: the last
SIGNALS = pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])


@pytest.fixture(scope="module", autouse=True)
def quick():
    with tiny.without_figures():
        yield


@pytest.fixture(autouse=True)
def handlers():
    """Whatever a command does, the handlers are those from before."""
    before = [signal.getsignal(number) for number in signals.SIGNALS]
    yield
    assert [signal.getsignal(number) for number in signals.SIGNALS] == before


def launched(folder, *more):
    return tiny.run("--config", tiny.config_file(folder, "dots", **CHANGES), "--workdir", str(folder / "run"), *more)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """(sha256 of the last parameters, rows of the log) of a run that nothing disturbed"""
    folder = tmp_path_factory.mktemp("unbroken")
    assert launched(folder).code == 0
    return summary(folder)["params_sha256"], log.read(folder / "run")


def summary(folder):
    return json.loads((folder / "run" / "summary.json").read_text())


def saved(folder):
    return sorted(int(file.name) for file in (folder / "run" / "checkpoints").iterdir())


def signal_with_batch(monkeypatch, step, number):
    """The signal comes while the batch of this step, counted from 1, is made."""
    whole = batches.iterate

    def iterate(dataset, *, start):
        for n, batch in enumerate(whole(dataset, start=start), start + 1):
            if n == step:
                os.kill(os.getpid(), number)
            yield batch

    monkeypatch.setattr(batches, "iterate", iterate)


def planned(monkeypatch, **changes):
    """The plan of a run has these."""
    plan = runs.plan
    monkeypatch.setattr(runs, "plan", lambda *arguments: dataclasses.replace(plan(*arguments), **changes))


class Left(BaseException):
    """The process has ended, with this code."""


@pytest.fixture
def leaves(monkeypatch):
    def leave(code):
        raise Left(code)

    monkeypatch.setattr(os, "_exit", leave)


def during_evaluation(monkeypatch, step, do):
    """This is done behind the second batch of the evaluation at this step of 4 and 6; the list of all such moments."""
    whole, moments = steps.evaluator, []

    def evaluator(task, mesh):
        evaluate = whole(task, mesh)

        def evaluate_and_do(params, between):
            at = 6 if moments else 4

            def behind_a_batch():
                moments.append(at)
                if at == step and moments.count(at) == 2:
                    do()
                between()

            return evaluate(params, behind_a_batch)

        return evaluate_and_do

    monkeypatch.setattr(steps, "evaluator", evaluator)
    return moments


@pytest.mark.parametrize(("number", "step"), STEPS)
def test_a_signal_finishes_the_step_saves_and_says_how_to_go_on(tmp_path, monkeypatch, unbroken, capfd, step, number):
    with monkeypatch.context() as patch:
        signal_with_batch(patch, step, number)
        told = launched(tmp_path, "--config.seed=0")
    assert told.code == 128 + number
    assert "stopping; what is done is saved first (Ctrl-C: at once" in capfd.readouterr().err
    assert saved(tmp_path) == [step] and not (tmp_path / "run" / "summary.json").exists()
    assert told.err.startswith(f"stopped after step {step}, which is saved in {tmp_path / 'run'}; go on with: python ")
    command = shlex.split(told.err.partition("go on with: ")[2])
    assert command[:2] == ["python", "launch.py"] and "--config.seed=0" in command
    assert tiny.run(*command[2:]).code == 0
    assert (summary(tmp_path)["params_sha256"], log.read(tmp_path / "run")) == unbroken


@pytest.mark.parametrize(("number", "step"), [(signal.SIGTERM, 4), (signal.SIGINT, 6)])
def test_a_signal_ends_an_evaluation_behind_a_save(tmp_path, monkeypatch, unbroken, number, step):
    """Where nothing else is saved at this step, as at 4, and where it is the last."""
    with monkeypatch.context() as patch:
        moments = during_evaluation(patch, step, lambda: os.kill(os.getpid(), number))
        told = launched(tmp_path)
    assert told.code == 128 + number and moments.count(step) == 2  # of 6
    assert told.err.startswith(f"stopped after step {step}, which is saved in {tmp_path / 'run'}; go on with: python ")
    assert saved(tmp_path) == [step] and not (tmp_path / "run" / "summary.json").exists()
    assert launched(tmp_path).code == 0
    assert (summary(tmp_path)["params_sha256"], log.read(tmp_path / "run")) == unbroken


def test_what_is_saved_is_saved_before_the_evaluation_that_may_not_come_to_its_end(tmp_path, monkeypatch):
    there = []

    def look():
        there.extend(file.name for file in (tmp_path / "run" / "checkpoints").iterdir())

    during_evaluation(monkeypatch, 6, look)
    assert launched(tmp_path).code == 0
    assert there and set(there) <= {"6", "6.writing"}


@SIGNALS
def test_before_training_a_signal_stops_at_once_and_nothing_is_written(tmp_path, monkeypatch, leaves, capfd, number):
    def load(*arguments, **options):
        os.kill(os.getpid(), number)
        raise AssertionError("it went on")

    monkeypatch.setattr(tiny, "linear_task", load)
    with pytest.raises(Left, match=f"^{128 + number}$"):
        launched(tmp_path)
    assert capfd.readouterr().err.startswith("stopped; go on with: python launch.py --config ")
    assert not (tmp_path / "run").exists()


@SIGNALS
def test_while_figures_are_drawn_a_signal_stops_at_once_and_only_the_result_is_missing(
    tmp_path, monkeypatch, unbroken, leaves, capfd, number
):
    with monkeypatch.context() as patch, pytest.raises(Left, match=f"^{128 + number}$"):
        patch.setattr(dots, "figures", lambda *arguments: os.kill(os.getpid(), number))
        launched(tmp_path)
    assert capfd.readouterr().err.startswith("stopped; go on with: python launch.py --config ")
    assert saved(tmp_path) == [6] and not (tmp_path / "run" / "summary.json").exists()
    assert launched(tmp_path).code == 0
    assert (summary(tmp_path)["params_sha256"], log.read(tmp_path / "run")) == unbroken


SECOND = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from experiments.engine import signals
requests = signals.Requests()
with signals.at_once(), requests.collect():
    for name in sys.argv[2:]:
        os.kill(os.getpid(), getattr(signal, name))
        print(name, requests.signal, flush=True)
"""


@pytest.mark.parametrize(
    ("sent", "code", "out"),
    [
        (["SIGTERM", "SIGTERM"], 0, ["SIGTERM 15", "SIGTERM 15"]),  # a scheduler that says it again
        (["SIGINT", "SIGTERM"], 0, ["SIGINT 2", "SIGTERM 2"]),
        (["SIGINT", "SIGINT"], 130, ["SIGINT 2"]),
        (["SIGTERM", "SIGINT"], 130, ["SIGTERM 15"]),
    ],
)
def test_a_sigint_after_another_signal_stops_at_once(sent, code, out):
    root = str(pathlib.Path(__file__).parents[2])
    ended = subprocess.run([sys.executable, "-c", SECOND, root, *sent], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout.split("\n")[:-1]) == (code, out)
    assert ended.stderr.count("stopping; what is done is saved first") == 1
    assert ("stopped at once" in ended.stderr) == (code == 130)


def test_the_first_signal_is_the_one_that_counts_and_none_is_kept_outside():
    requests = signals.Requests()
    with requests.collect():
        assert requests.signal == 0
        os.kill(os.getpid(), signal.SIGTERM)
    assert requests.signal == signal.SIGTERM
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(errors.Interrupted, match="^stopped here$") as caught:
        requests.heed("stopped here")
    assert caught.value.code == 143 and isinstance(caught.value, KeyboardInterrupt)
    assert signals.Requests().heed() is None


BUSY = """
import os, sys, time
sys.path.insert(0, sys.argv[1])
from experiments.engine import signals
signals.from_the_start()
import jax
@jax.jit
def long(x):  # minutes
    return jax.lax.fori_loop(0, 1 << 30, lambda i, x: x @ x / 300, x)
with signals.at_once("; go on"):
    print("computing", flush=True)
    long(jax.numpy.ones((300, 300))).block_until_ready()
"""


@SIGNALS
def test_a_signal_stops_a_process_that_is_in_a_compiled_program(number):
    root = str(pathlib.Path(__file__).parents[2])
    command, pipes = [sys.executable, "-c", BUSY, root], {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as busy:
        assert busy.stdout.readline() == "computing\n"
        time.sleep(0.5)
        busy.send_signal(number)
        began = time.monotonic()
        _, err = busy.communicate(timeout=60)
    assert (busy.returncode, err) == (128 + number, "stopped; go on\n")
    assert time.monotonic() - began < 10


def test_a_signal_that_the_shell_ignores_is_not_heeded():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        for within in (signals.at_once, signals.Requests().collect):
            with within():
                assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN != signal.getsignal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGINT, before)


def test_threads_other_than_the_main_one_leave_signals_alone():
    found = []

    def work():
        with signals.at_once(), signals.Requests().collect():
            found.extend(signal.getsignal(number) for number in signals.SIGNALS)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [signal.getsignal(number) for number in signals.SIGNALS]


def test_an_evaluation_that_fails_loses_nothing_and_does_not_come_before_the_save_of_a_signal(
    tmp_path, monkeypatch, unbroken
):
    def evaluator(task, mesh):
        def evaluate(params, between):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

        return evaluate

    with monkeypatch.context() as patch:
        patch.setattr(steps, "evaluator", evaluator)
        signal_with_batch(patch, 4, signal.SIGTERM)
        assert launched(tmp_path).code == 143 and saved(tmp_path) == [4]
        told = launched(tmp_path)  # where it is made up for
        assert told.code == 1 and "a smaller train.batch_size or train.evaluate_batch" in told.err
        assert saved(tmp_path) == [4]
        told = launched(tmp_path, "--config.train.evaluate_every=0")
        assert told.code == 1 and "a device ran out of memory" in told.err
        assert saved(tmp_path) == [4, 6]
    assert launched(tmp_path, "--config.train.evaluate_every=6").code == 0
    expected = [row for row in unbroken[1] if row["step"] != 4 or "train/loss" in row]
    assert (summary(tmp_path)["params_sha256"], log.read(tmp_path / "run")) == (unbroken[0], expected)


# When a run saves without being told to stop


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
    planned(monkeypatch, save_minutes=2.5, keep=9)
    assert launched(tmp_path, "--config.train.steps=8").code == 0
    assert saved(tmp_path) == [3, 6, 8]


def test_the_clock_saves_within_a_long_evaluation(tmp_path, monkeypatch):
    """A minute passes with each question between two batches of the one behind step 2, which is killed later."""
    now, there = 0.0, []

    def evaluate(params, between):
        nonlocal now
        for _ in range(3):
            now += 60
            between()
            there.append([file.name.partition(".")[0] for file in (tmp_path / "run" / "checkpoints").iterdir()])
        raise MemoryError

    monkeypatch.setattr(steps, "evaluator", lambda task, mesh: evaluate)
    planned(monkeypatch, save_minutes=2.5)
    monkeypatch.setattr(loop.time, "monotonic", lambda: now)
    with pytest.raises(MemoryError):
        launched(tmp_path, "--config.train.evaluate_every=2")
    assert there == [[], [], ["2"]] and saved(tmp_path) == [2]


def evaluations(monkeypatch, *values):
    """These losses are found, one after the other."""
    losses = iter(values)
    evaluate = lambda params, between: {"loss": next(losses), "accuracy": 0}  # noqa: E731
    monkeypatch.setattr(steps, "evaluator", lambda task, mesh: evaluate)


def test_the_best_evaluation_is_saved_and_kept(tmp_path, monkeypatch):
    evaluations(monkeypatch, 3.0, 1.0, 2.0, 1.5, 0.5, 4.0)
    planned(monkeypatch, keep=1)
    best = ("--config.train.keep_best=eval/loss", "--config.train.evaluate_every=1")
    with monkeypatch.context() as patch:
        signal_with_batch(patch, 3, signal.SIGTERM)
        assert launched(tmp_path, *best).code == 143
    assert saved(tmp_path) == [2, 3]  # the best and the newest, which the signal asked for
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:  # what no checkpoint has measured
        file.write('{"step": 2, "eval/loss": -100.0}\n')
    asked = []
    save = loop.checkpoint.Checkpoints.save

    def listed(self, step, state, metrics=None):
        asked.append((step, metrics and metrics["eval/loss"]))
        save(self, step, state, metrics)

    monkeypatch.setattr(loop.checkpoint.Checkpoints, "save", listed)
    assert launched(tmp_path, *best).code == 0
    # 1.5 after step 4 is not better than the 1.0 from before the signal, and the last is saved before it is evaluated
    assert asked == [(5, 0.5), (6, None)]
    assert saved(tmp_path) == [5, 6]


def test_what_is_saved_before_its_evaluation_counts_for_the_best(tmp_path, monkeypatch):
    evaluations(monkeypatch, 3.0, 1.0, 2.0, 1.5, 0.5, 4.0)
    planned(monkeypatch, keep=1)
    best = ("--config.train.keep_best=eval/loss", "--config.train.evaluate_every=1", "--config.train.save_every=1")
    assert launched(tmp_path, *best).code == 0
    assert saved(tmp_path) == [5, 6]
    told = [json.loads((tmp_path / f"run/checkpoints/{n}/manifest.json").read_text())["metrics"] for n in (5, 6)]
    assert [metrics["eval/loss"] for metrics in told] == [0.5, 4.0]


@pytest.mark.parametrize("lost", [None, "row", "metrics"])
def test_an_evaluation_of_a_step_that_is_resumed_is_in_the_log_once(tmp_path, monkeypatch, unbroken, lost):
    """Killed behind the evaluation of step 4, between it and its row, or before its checkpoint says what was found."""
    write, note = log.Log.write, loop.checkpoint.Checkpoints.note

    def written(self, step, values):
        if step != 4 or "eval/loss" not in values or lost != "row":
            write(self, step, values)
        if step == 5:
            raise Left

    with monkeypatch.context() as patch:
        patch.setattr(log.Log, "write", written)
        patch.setattr(loop.checkpoint.Checkpoints, "note", lambda *told: lost == "metrics" or note(*told))
        with pytest.raises(Left):
            launched(tmp_path, "--config.train.save_every=4")
    assert saved(tmp_path) == [4]
    evaluated = []
    with monkeypatch.context() as patch:
        patch.setattr(
            loop.checkpoint.Checkpoints, "note", lambda self, *told: evaluated.append(told[0]) or note(self, *told)
        )
        assert launched(tmp_path).code == 0
    assert evaluated == ([6] if lost is None else [4, 6])
    assert log.read(tmp_path / "run") == unbroken[1]


def test_a_metric_that_there_is_not(tmp_path):
    told = launched(tmp_path, "--config.train.keep_best=eval/perplexity")
    assert told.code == 2 and "train.keep_best" in told.err and not (tmp_path / "run").exists()
    for other in ("train/loss", "eval/explained"):
        told = launched(tmp_path, f"--config.train.keep_best={other}")
        assert told.code == 2 and "what is measured is eval/accuracy, eval/loss" in told.err
        assert not (tmp_path / "run").exists()  # it is said before the training


def test_a_disk_that_is_full_is_one_sentence_and_what_was_saved_is_whole(tmp_path, monkeypatch, unbroken):
    write, full = log.Log.write, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "metrics.jsonl")

    def writes_four(self, step, values):
        if step == 5:
            raise full
        write(self, step, values)

    with monkeypatch.context() as patch:
        patch.setattr(log.Log, "write", writes_four)
        told = launched(tmp_path, "--config.train.save_every=2")
    assert told.code == 1 and told.err.startswith("error: metrics.jsonl: No space left on device; once that is mended")
    assert saved(tmp_path) == [2, 4]
    assert launched(tmp_path).code == 0
    assert (summary(tmp_path)["params_sha256"], log.read(tmp_path / "run")) == unbroken


def test_what_is_open_is_closed_where_a_save_failed(tmp_path, monkeypatch):
    """And the sentence of the save is the one that is told, though a signal came too."""

    def wait(self):
        raise errors.RunError("step 2 could not be saved")

    with monkeypatch.context() as patch:
        signal_with_batch(patch, 2, signal.SIGTERM)
        patch.setattr(loop.checkpoint.Checkpoints, "wait", wait)
        told = launched(tmp_path)
    assert (told.code, told.err) == (1, "error: step 2 could not be saved\n")
    assert launched(tmp_path).code == 0

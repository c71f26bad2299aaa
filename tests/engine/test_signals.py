"""Signals: a run that trains finishes its step, saves and prints how to resume; all else stops at once."""

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
from errors import raises

from experiments.engine import errors, signals, train_step as steps

ROOT = pathlib.Path(__file__).parents[2]
quick, unbroken = dots.quick, dots.unbroken


@pytest.fixture(autouse=True)
def handlers():
    """Check that every command restores the handlers."""
    before = [signal.getsignal(number) for number in signals.SIGNALS]
    yield
    assert [signal.getsignal(number) for number in signals.SIGNALS] == before


def stopped(folder, number, step, *more):
    """Return the message of a run that a signal stops after this step, which alone is saved."""
    outcome = dots.launched(folder, *more)
    assert outcome.code == 128 + number
    assert dots.saved(folder) == [step] and not (folder / "run" / "summary.json").exists()
    assert outcome.err.startswith(f"stopped after step {step}, which is saved in {folder / 'run'}; go on with: python ")
    return outcome.err


def during_evaluation(monkeypatch, step, do):
    """Call `do` after the second batch of the evaluation at this step, 4 or 6. Return the list of all batches."""
    whole, moments = steps.evaluate, []

    def evaluate(task, mesh, sums, params, between):
        at = 6 if moments else 4

        def after_batch():
            moments.append(at)
            if at == step and moments.count(at) == 2:
                do()
            between()

        return whole(task, mesh, sums, params, after_batch)

    monkeypatch.setattr(steps, "evaluate", evaluate)
    return moments


def test_a_signal_finishes_the_step_saves_and_prints_how_to_resume_the_run(tmp_path, monkeypatch, unbroken, capfd):
    """The step has an evaluation, which is left out."""
    with monkeypatch.context() as patch:
        dots.signal_with_batch(patch, 4, signal.SIGINT)
        command = shlex.split(stopped(tmp_path, signal.SIGINT, 4, "--config.seed=0").partition("go on with: ")[2])
    assert "stopping; what is done is saved first (Ctrl-C: at once" in capfd.readouterr().err
    assert command[:2] == ["python", "launch.py"] and "--config.seed=0" in command
    assert tiny.run(*command[2:]).code == 0 and dots.result(tmp_path) == unbroken


@pytest.mark.parametrize(("number", "step"), [(signal.SIGTERM, 4), (signal.SIGINT, 6)])
def test_a_signal_ends_an_evaluation_after_a_save(tmp_path, monkeypatch, unbroken, number, step):
    """Nothing else is saved at step 4; the last step, 6, has been saved before its evaluation."""
    there = []

    def end():
        there.extend(file.name.partition(".")[0] for file in (tmp_path / "run" / "checkpoints").iterdir())
        os.kill(os.getpid(), number)

    with monkeypatch.context() as patch:
        moments = during_evaluation(patch, step, end)
        stopped(tmp_path, number, step)
    assert moments.count(step) == 2 and there == ["6"] * (step == 6)  # of 6 batches
    assert dots.resumed(tmp_path) == unbroken


COMMAND = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from experiments.engine import signals
signal.signal(signal.SIGINT, signal.SIG_DFL)  # as launch.py begins
requests = signals.Requests()
with requests.collect():
    for name in sys.argv[2:]:
        os.kill(os.getpid(), getattr(signal, name))
        print(name, requests.signal, flush=True)
"""


def test_a_ctrl_c_after_another_signal_ends_a_command_at_once():
    command = [sys.executable, "-c", COMMAND, str(ROOT), "SIGTERM", "SIGTERM", "SIGINT"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == -signal.SIGINT and ended.stdout == "SIGTERM 15\nSIGTERM 15\n"
    assert ended.stderr.count("stopping; what is done is saved first") == 1 and "Traceback" not in ended.stderr


def test_ctrl_c_ends_a_command_that_imports_or_compiles_at_once():
    command = [sys.executable, "launch.py", "--config=configs/smoke.py"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, text=True, **pipes) as stopped:
        maps = pathlib.Path(f"/proc/{stopped.pid}/maps")
        while b"numpy" not in maps.read_bytes():  # it takes seconds to import the rest
            time.sleep(0.01)
        stopped.send_signal(signal.SIGINT)
        assert stopped.communicate(timeout=60) == ("", "") and stopped.returncode == -signal.SIGINT


def test_a_second_ctrl_c_in_another_program_raises_keyboard_interrupt():
    requests = signals.Requests()
    with requests.collect():
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert requests.signal == requests.agree() == signal.SIGTERM
    with raises(errors.Interrupted, "stopped here") as caught:
        requests.raise_if_requested("stopped here")
    assert caught.value.code == 143 and signals.Requests().raise_if_requested() is None


def test_a_signal_that_the_shell_ignores_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with signals.Requests().collect():
            assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN != signal.getsignal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGINT, before)


def test_threads_other_than_the_main_one_leave_signals_alone():
    handlers = []

    def work():
        with signals.Requests().collect():
            handlers.extend(signal.getsignal(number) for number in signals.SIGNALS)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert handlers == [signal.getsignal(number) for number in signals.SIGNALS]


def test_an_evaluation_that_fails_loses_nothing(tmp_path, monkeypatch, unbroken):
    def evaluate(*arguments):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(steps, "evaluate", evaluate)
        outcome = dots.launched(tmp_path)
    assert outcome.code == 1 and "train.batch_size" in outcome.err
    assert dots.saved(tmp_path) == [4] and dots.resumed(tmp_path) == unbroken  # it is made up for

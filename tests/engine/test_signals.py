"""Signals: training finishes the step, saves and prints how to resume; other commands stop at once."""

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

from experiments.config import errors
from experiments.engine import signals, train_step

ROOT = pathlib.Path(__file__).parents[2]
quick, unbroken, unbroken_folder = dots.quick, dots.unbroken, dots.unbroken_folder


@pytest.fixture(autouse=True)
def check_handlers():
    """Check that every command restores the handlers."""
    before = [signal.getsignal(number) for number in signals.SIGNALS]
    yield
    assert [signal.getsignal(number) for number in signals.SIGNALS] == before


def check_stop(folder, number, step, *flags):
    """Run, and assert that a signal stops the run after this step, the only saved step. Return the message."""
    outcome = dots.launch_run(folder, *flags)
    assert outcome.code == 128 + number
    assert dots.list_steps(folder) == [step] and not (folder / "run" / "summary.json").exists()
    assert outcome.err.startswith(f"stopped after step {step}, which is saved in {folder / 'run'}; go on with: python ")
    return outcome.err


def during_evaluation(monkeypatch, step, do):
    """Call `do` after the second batch of the evaluation at this step, 4 or 6.

    Returns a list that gets the step of the evaluation for every evaluated batch.
    """
    original, batch_steps = train_step.evaluate, []

    def evaluate(task, mesh, sums, params, on_batch):
        evaluation_step = 6 if batch_steps else 4

        def after_batch():
            batch_steps.append(evaluation_step)
            if evaluation_step == step and batch_steps.count(evaluation_step) == 2:
                do()
            on_batch()

        return original(task, mesh, sums, params, after_batch)

    monkeypatch.setattr(train_step, "evaluate", evaluate)
    return batch_steps


def test_a_signal_finishes_the_step_saves_and_prints_how_to_resume_the_run(tmp_path, monkeypatch, unbroken, capfd):
    """The evaluation of this step is skipped."""
    with monkeypatch.context() as patch:
        dots.signal_with_batch(patch, 4, signal.SIGINT)
        command = shlex.split(check_stop(tmp_path, signal.SIGINT, 4, "--config.seed=0").partition("go on with: ")[2])
    assert "a training is saved (Ctrl-C: stop at once" in capfd.readouterr().err
    assert command[:2] == ["python", "launch.py"] and "--config.seed=0" in command
    assert tiny.run(*command[2:]).code == 0 and dots.read_result(tmp_path) == unbroken


@pytest.mark.parametrize(("number", "step"), [(signal.SIGTERM, 4), (signal.SIGINT, 6)])
def test_a_signal_ends_an_evaluation_after_a_save(tmp_path, monkeypatch, unbroken, number, step):
    """Step 4 is saved only because of the signal. Step 6, the last, is saved before its evaluation."""
    steps_on_disk = []

    def end():
        steps_on_disk.extend(file.name.partition(".")[0] for file in (tmp_path / "run" / "checkpoints").iterdir())
        os.kill(os.getpid(), number)

    with monkeypatch.context() as patch:
        batch_steps = during_evaluation(patch, step, end)
        check_stop(tmp_path, number, step)
    assert batch_steps.count(step) == 2 and steps_on_disk == ["6"] * (step == 6)  # two of six batches were evaluated
    if step == 6:  # the folder of a run stopped at step 4 equals that of the test above
        assert dots.finish_run(tmp_path) == unbroken


COMMAND = """
import os, signal, sys, time
sys.path.insert(0, sys.argv[1])
from experiments.engine import signals
signal.signal(signal.SIGINT, signal.SIG_DFL)  # as at the start of launch.py
requests = signals.Requests()
with requests.collect():
    for name in sys.argv[2:]:
        os.kill(os.getpid(), getattr(signal, name))
        print(name, requests.signal, flush=True)
    time.sleep(60)
"""


def test_a_ctrl_c_after_another_signal_ends_a_command_at_once():
    command = [sys.executable, "-c", COMMAND, str(ROOT), "SIGTERM", "SIGTERM", "SIGINT"]
    process = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert process.returncode == 130 and process.stdout.startswith("SIGTERM 15\nSIGTERM 15\n")
    assert process.stderr.count("stopping after") == 1 and "Traceback" not in process.stderr


BUSY = """
import hashlib, os, signal, sys, threading, time
sys.path.insert(0, sys.argv[1])
from experiments.engine import signals
signal.signal(signal.SIGINT, signal.SIG_DFL)
def interrupt_twice():
    for _ in range(2):
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGINT)
with signals.Requests().collect():
    threading.Thread(target=interrupt_twice).start()
    hashlib.pbkdf2_hmac("sha256", b"", b"", 10**8)  # like a compilation: minutes in which Python calls no handler
"""


def test_a_second_ctrl_c_ends_a_command_while_python_calls_no_handler():
    process = subprocess.run([sys.executable, "-c", BUSY, str(ROOT)], capture_output=True, timeout=60)
    assert process.returncode == 128 + signal.SIGINT


def test_ctrl_c_ends_a_command_that_imports_or_compiles_at_once():
    command = [sys.executable, "launch.py", "--config=configs/smoke.py"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, text=True, **pipes) as process:
        maps = pathlib.Path(f"/proc/{process.pid}/maps")
        while b"numpy" not in maps.read_bytes():  # importing the rest takes seconds
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=60) == ("", "") and process.returncode == -signal.SIGINT


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


def test_threads_other_than_the_main_thread_do_not_change_handlers():
    handlers = []

    def work():
        with signals.Requests().collect():
            handlers.extend(signal.getsignal(number) for number in signals.SIGNALS)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert handlers == [signal.getsignal(number) for number in signals.SIGNALS]


def test_the_step_of_an_evaluation_that_failed_is_saved(tmp_path, monkeypatch):
    """A signal during an evaluation leaves the same folder, from which a test above resumes."""

    def evaluate(*arguments):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr(train_step, "evaluate", evaluate)
    outcome = dots.launch_run(tmp_path)
    assert outcome.code == 1 and "train.batch_size" in outcome.err
    assert dots.list_steps(tmp_path) == [4]

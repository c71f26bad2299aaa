"""Signals: a run that trains finishes its step, saves and says how to go on; what else a command does stops at once."""

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

from experiments.engine import errors, signals, train_step as steps

quick, unbroken = dots.quick, dots.unbroken


@pytest.fixture(autouse=True)
def handlers():
    """Whatever a command does, the handlers are those from before."""
    before = [signal.getsignal(number) for number in signals.SIGNALS]
    yield
    assert [signal.getsignal(number) for number in signals.SIGNALS] == before


def stopped(folder, number, step, *more):
    """What is said by a run that a signal stops behind this step, which alone is saved."""
    outcome = dots.launched(folder, *more)
    assert outcome.code == 128 + number
    assert dots.saved(folder) == [step] and not (folder / "run" / "summary.json").exists()
    assert outcome.err.startswith(f"stopped after step {step}, which is saved in {folder / 'run'}; go on with: python ")
    return outcome.err


class Left(GeneratorExit):
    """The process has ended, with this code."""


@pytest.fixture
def leaves(monkeypatch):
    def leave(code):
        raise Left(code)

    monkeypatch.setattr(os, "_exit", leave)


def during_evaluation(monkeypatch, step, do):
    """This is done behind the second batch of the evaluation at this step of 4 and 6; the list of all such moments."""
    whole, moments = steps.evaluate, []

    def evaluate(task, mesh, sums, params, between):
        at = 6 if moments else 4

        def behind_a_batch():
            moments.append(at)
            if at == step and moments.count(at) == 2:
                do()
            between()

        return whole(task, mesh, sums, params, behind_a_batch)

    monkeypatch.setattr(steps, "evaluate", evaluate)
    return moments


def test_a_signal_finishes_the_step_saves_and_says_how_to_go_on(tmp_path, monkeypatch, unbroken, capfd):
    """At a step with an evaluation, which does not come."""
    with monkeypatch.context() as patch:
        dots.signal_with_batch(patch, 4, signal.SIGINT)
        command = shlex.split(stopped(tmp_path, signal.SIGINT, 4, "--config.seed=0").partition("go on with: ")[2])
    assert "stopping; what is done is saved first (Ctrl-C: at once" in capfd.readouterr().err
    assert command[:2] == ["python", "launch.py"] and "--config.seed=0" in command
    assert tiny.run(*command[2:]).code == 0 and dots.result(tmp_path) == unbroken


@pytest.mark.parametrize(("number", "step"), [(signal.SIGTERM, 4), (signal.SIGINT, 6)])
def test_a_signal_ends_an_evaluation_behind_a_save(tmp_path, monkeypatch, unbroken, number, step):
    """Where nothing else is saved at this step, as at 4, and where it is the last, which is saved by then."""
    there = []

    def end():
        there.extend(file.name.partition(".")[0] for file in (tmp_path / "run" / "checkpoints").iterdir())
        os.kill(os.getpid(), number)

    with monkeypatch.context() as patch:
        moments = during_evaluation(patch, step, end)
        stopped(tmp_path, number, step)
    assert moments.count(step) == 2 and there == ["6"] * (step == 6)  # of 6 batches
    assert dots.resumed(tmp_path) == unbroken


def test_while_figures_are_drawn_a_signal_stops_at_once(tmp_path, monkeypatch, unbroken, leaves, capfd):
    """Only the figures are missing then."""
    with monkeypatch.context() as patch, pytest.raises(Left, match=f"^{128 + signal.SIGTERM}$"):
        patch.setattr(dots, "figures", lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM))
        dots.launched(tmp_path)
    assert capfd.readouterr().err.startswith("stopped; go on with: python launch.py --config ")
    assert (tmp_path / "run" / "summary.json").exists()
    assert dots.saved(tmp_path) == [6] and dots.resumed(tmp_path) == unbroken


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
    [(["SIGINT", "SIGTERM"], 0, ["SIGINT 2", "SIGTERM 2"]), (["SIGTERM", "SIGINT"], 130, ["SIGTERM 15"])],
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
import ctypes, sys
sys.path.insert(0, sys.argv[1])
from experiments.engine import signals
signals.from_the_start()
with signals.at_once("; go on"):
    print("computing", flush=True)
    library, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    for _ in range(2):  # it waits for itself outside of Python, as a compiled program may, whatever signal comes
        library.pthread_mutex_lock(mutex)
"""


def test_a_signal_stops_a_process_that_is_in_a_compiled_program():
    root = str(pathlib.Path(__file__).parents[2])
    command, pipes = [sys.executable, "-c", BUSY, root], {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as busy:
        assert busy.stdout.readline() == "computing\n"
        time.sleep(0.5)
        busy.send_signal(signal.SIGINT)
        killer = threading.Timer(20, busy.kill)
        killer.start()
        _, err = busy.communicate()
        killer.cancel()
    assert (busy.returncode, err) == (130, "stopped; go on\n")


def test_a_signal_that_the_shell_ignores_is_not_heeded():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        for within in (signals.at_once, signals.Requests().collect):
            with within():
                assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN != signal.getsignal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGINT, before)


def test_threads_other_than_the_main_one_leave_signals_alone():
    handlers = []

    def work():
        with signals.at_once(), signals.Requests().collect():
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
    assert outcome.code == 1 and "a smaller train.batch_size, a larger" in outcome.err
    assert dots.saved(tmp_path) == [4] and dots.resumed(tmp_path) == unbroken  # it is made up for

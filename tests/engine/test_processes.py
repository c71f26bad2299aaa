"""Several processes on one machine: the same numbers as one, one set of files, and none that waits for the dead."""

import contextlib
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import pytest
import tiny

from experiments import language
from experiments.engine import checkpoint, compilation, distributed, errors, log, mesh, workdir

ROOT = pathlib.Path(__file__).parents[2]
SECONDS = 150  # in which everything here must end, also on a busy machine
STEPS = 4
ENDLESS = "--config.train.steps=1000000", "--config.train.evaluate_every=0", "--config.train.save_every=0"
VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")


@pytest.fixture(scope="module")
def arguments(tmp_path_factory):
    """The launcher's arguments for a small causal language model, without --workdir."""
    folder = tmp_path_factory.mktemp("config")
    (folder / "text.txt").write_bytes(tiny.TEXT)
    changes = tiny.MODEL | tiny.TRAIN | {"text.source": str(folder / "text.txt"), "text.N": 7, "device": "cpu"}
    changes |= {"train.steps": STEPS, "train.log_every": 1, "train.evaluate_batch": 8, "sample.max_new_tokens": 4}
    changes |= {"optim.schedule": "constant", "compilation_cache": str(folder / "cache")}
    changes |= {"train.evaluate_every": 2, "train.save_every": 2, "mesh.fsdp": 2}
    return "--config", tiny.config_file(folder, "language", **changes)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


@contextlib.contextmanager
def pair(*arguments: str):
    """Two processes of the launcher, with one device each; they do not outlive this."""
    flags = os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=1")
    environment = {k: v for k, v in os.environ.items() if k not in VARIABLES} | {"XLA_FLAGS": flags}
    environment["JAX_ENABLE_COMPILATION_CACHE"] = "true"
    where = f"--coordinator=127.0.0.1:{free_port()}"
    with contextlib.ExitStack() as stack:
        started = []
        for i in range(2):
            command = [sys.executable, "launch.py", *arguments, where, "--processes=2", f"--process={i}"]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            started.append(subprocess.Popen(command, cwd=ROOT, env=environment, **pipes))
            stack.callback(started[-1].communicate)
            stack.callback(started[-1].kill)
        yield started


def ended(process: subprocess.Popen) -> tiny.Outcome:
    """What it said in the end, without what libraries say at their import."""
    out, err = process.communicate(timeout=SECONDS)
    spoken = [line for line in err.splitlines(keepends=True) if not line.startswith("WARNING:absl:")]
    return tiny.Outcome(process.returncode, out, "".join(spoken))


def wait_for(what, started: list[subprocess.Popen]) -> None:
    """Until this is so; fails with what the processes said where one of them ends before, or nothing happens."""
    until = time.monotonic() + SECONDS
    while not what():
        if time.monotonic() > until or any(process.poll() is not None for process in started):
            for process in started:
                process.kill()
            pytest.fail(f"nothing happened: {[process.communicate() for process in started]}")
        time.sleep(0.05)


@pytest.fixture(scope="module")
def by_two(arguments, tmp_path_factory):
    """A finished run of two processes that share the parameters: its folder, and what each process said."""
    folder = tmp_path_factory.mktemp("two") / "run"
    own = f"--config.compilation_cache={folder.parent / 'cache'}"
    with pair(*arguments, "--workdir", str(folder), own) as started:
        return folder, [ended(process) for process in started]


def run(*arguments: str) -> tiny.Outcome:
    """The launcher in this process, without what these tests do not look at."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compilation, "measured_peak", lambda *, devices: 1e9)
        patch.setattr(language, "figures", lambda *arguments: [])
        return tiny.run(*arguments)


@pytest.fixture(scope="module")
def by_one(arguments, tmp_path_factory):
    """The same run, two steps longer, in one process with two devices."""
    folder = tmp_path_factory.mktemp("one") / "run"
    shape = "--config.mesh.data=1", f"--config.train.steps={STEPS + 2}"
    assert run(*arguments, "--workdir", str(folder), *shape).code == 0
    return folder


def checkpoint_steps(folder: pathlib.Path) -> list[int]:
    return sorted(int(saved.name) for saved in (folder / "checkpoints").iterdir())


def losses(folder: pathlib.Path) -> dict[int, float]:
    return {row["step"]: row["train/loss"] for row in log.read(folder) if "train/loss" in row}


def test_two_processes_train_as_one_and_write_once(by_two, by_one):
    folder, (first, second) = by_two
    assert (first.code, second.code) == (0, 0) and (first.err, second.err) == ("", "")
    assert "eval/loss" in first.out and "mesh" in first.out
    assert [line for line in second.out.splitlines() if "[Gloo]" not in line] == []
    expected = [row for row in log.read(by_one) if row["step"] <= STEPS]
    assert log.read(folder) == expected  # to the last bit
    assert [row["step"] for row in expected if "eval/loss" in row and "eval/accuracy" in row] == [2, STEPS]
    assert checkpoint_steps(folder) == [2, STEPS]
    assert len(list((folder / "events").iterdir())) == 1
    assert json.loads((folder / "summary.json").read_text())["devices"] == 2
    assert sorted(file.name for file in folder.iterdir() if file.suffix == ".tmp") == []
    assert list((folder.parent / "cache").iterdir()) == []  # on CPU, what comes from there would wait forever


def test_one_process_reads_and_goes_on_with_what_two_saved(by_two, by_one, arguments, tmp_path):
    folder = shutil.copytree(by_two[0], tmp_path / "run")
    before = json.loads((folder / "summary.json").read_text())
    params = checkpoint.parameters(folder / "checkpoints", STEPS)
    assert checkpoint.digest(params) == before["params_sha256"]
    more = "--config.mesh.data=1", "--config.mesh.fsdp=1", f"--config.train.steps={STEPS + 2}"
    told = run(*arguments, "--workdir", str(folder), *more)
    assert told.code == 0 and f"resuming {folder} at step {STEPS}" in told.out
    assert losses(folder) == pytest.approx(losses(by_one), rel=1e-6)
    evaluation = log.read(folder)[-1]
    assert evaluation == pytest.approx(log.read(by_one)[-1], rel=1e-6)


@pytest.mark.parametrize("victim", [0, 1])
def test_the_others_end_where_one_is_killed(victim, by_one, arguments, tmp_path):
    """They go on from what one process saved; then one of them is killed."""
    folder = shutil.copytree(by_one, tmp_path / "run")
    with pair(*arguments, "--workdir", str(folder), *ENDLESS) as started:
        wait_for(lambda: len(losses(folder)) > STEPS + 10, started)
        began = time.monotonic()
        started[victim].kill()
        code, out, err = ended(started[1 - victim])
    assert code == 1 and time.monotonic() - began < 50
    assert "another process of this run stopped" in err or "another task died" in err  # the latter from JAX itself
    assert "Traceback" not in err
    if victim == 1:
        assert f"resuming {folder} at step {STEPS + 2}" in out
    if victim == 1 or jax.__version_info__ >= distributed.ABORTS:  # before, there is JAX's own sentence, in three lines
        assert err.count("\n") == 1 and "trace" not in err
    assert {step: loss for step, loss in losses(folder).items() if step <= STEPS + 2} == losses(by_one)


def test_a_signal_to_one_process_stops_and_saves_all(arguments, tmp_path):
    folder = tmp_path / "run"
    with pair(*arguments, "--workdir", str(folder), *ENDLESS) as started:
        wait_for(lambda: len(losses(folder)) > 2, started)
        started[1].send_signal(signal.SIGTERM)
        first, second = [ended(process) for process in started]
    saved = checkpoint.newest(folder / "checkpoints")
    for told in (first, second):
        assert told.code == 143 and f"stopped after step {saved:,}" in told.err and "Traceback" not in told.err
    assert max(losses(folder)) == saved


def test_a_signal_before_the_first_step_stops_all_at_once(arguments, tmp_path):
    folder = tmp_path / "run"
    with pair(*arguments, "--workdir", str(folder)) as started:
        wait_for(lambda: (folder / "config.json").exists(), started)
        began = time.monotonic()
        for process in started:
            process.send_signal(signal.SIGTERM)
        told = [ended(process) for process in started]
    assert time.monotonic() - began < 30
    assert [one.code for one in told] == [143, 143]
    assert [one.err.startswith("stopped; go on with: python launch.py") for one in told] == [True, True]
    assert not (folder / "checkpoints").exists()


def test_what_one_process_refuses_ends_the_others(arguments, tmp_path):
    """Only process 0 asks for the lock; what the first one says is said by all, at once."""
    began = time.monotonic()
    with workdir.hold(tmp_path / "run"), pair(*arguments, "--workdir", str(tmp_path / "run")) as started:
        first, second = [ended(process) for process in started]
    assert time.monotonic() - began < 60
    assert (first.code, second.code) == (2, 2)
    assert "is in use by a run that is under way" in first.err and first.err.count("\n") == 1
    assert second.err == first.err.replace("error: ", "error: process 0 stopped: ")


def test_who_belongs_together_is_said_whole_or_not_at_all(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert distributed.given(None, None, None) is None
    assert distributed.given("[::1]:80", 3, 2) == distributed.Group("[::1]:80", 3, 2)
    for wrong, sentence in (
        (("a:1", 2, None), r"missing: --process \(JAX_PROCESS_ID\)"),
        ((None, None, 0), r"missing: --coordinator \(JAX_COORDINATOR_ADDRESS\), --processes"),
        (("a", 2, 0), "host:port"),
        (("a:0", 2, 0), "host:port"),
        (("a:65536", 2, 0), "host:port"),
        ((":1", 2, 0), "host:port"),
        (("a:1", 2, 2), "2 of 2 does not"),
        (("a:1", 2, -1), "-1 of 2 does not"),
        (("a:1", 0, 0), "0 of 0 does not"),
    ):
        with pytest.raises(errors.UserError, match=sentence):
            distributed.given(*wrong)
    for name, value in zip(VARIABLES, ("b:2", "5", "4"), strict=True):
        monkeypatch.setenv(name, value)
    assert distributed.given(None, None, None) == distributed.Group("b:2", 5, 4)
    assert distributed.given("c:3", 7, 0) == distributed.Group("c:3", 7, 0)
    monkeypatch.setenv("JAX_PROCESS_ID", "one")
    with pytest.raises(errors.UserError, match='JAX_PROCESS_ID must be a number, and "one" is not'):
        distributed.given(None, None, None)


def test_several_processes_do_what_makes_sense_only(arguments, tmp_path, monkeypatch):
    monkeypatch.setattr(distributed, "START_SECONDS", 0)  # nobody is there to be waited for
    several = "--coordinator=127.0.0.1:1", "--processes=2", "--process=1"
    assert tiny.run(*arguments, "--processes=2").err.startswith("error: several processes need --coordinator")
    for wrong in (("--dry_run", "--workdir", str(tmp_path / "a")), ()):
        told = tiny.run(*arguments, *several, *wrong)
        assert told.code == 2 and "all need the same --workdir" in told.err
    told = tiny.run("--config", str(ROOT / "configs" / "sample.py"), "--workdir", str(tmp_path / "a"), *several)
    assert told == (2, "", "error: several processes are for training: sample takes one\n")
    assert not (tmp_path / "a").exists()


def test_a_coordinator_that_is_not_there_is_not_waited_for_long(monkeypatch):
    monkeypatch.setattr(distributed, "START_SECONDS", 0.3)
    port = free_port()
    with pytest.raises(errors.RunError, match=rf"127.0.0.1:{port} could not be reached within 0.3 s: .*refused"):
        distributed._reach(distributed.Group(f"127.0.0.1:{port}", 2, 1))
    distributed._reach(distributed.Group(f"127.0.0.1:{port}", 2, 0))  # it is to be there itself
    monkeypatch.setattr(distributed, "START_SECONDS", 30)
    with socket.socket() as listens:
        later = threading.Timer(0.3, listens.listen)
        listens.bind(("127.0.0.1", port))
        later.start()
        distributed._reach(distributed.Group(f"127.0.0.1:{port}", 2, 1))
        later.join()


def test_only_the_first_process_writes_a_log(tmp_path, monkeypatch):
    for first, files in ((False, []), (True, ["events", "metrics.jsonl"])):
        monkeypatch.setattr(distributed, "main", lambda first=first: first)
        with contextlib.closing(log.Log(tmp_path, start=0)) as writer:
            writer.write(1, {"train/loss": 2.0})
        assert sorted(file.name for file in tmp_path.iterdir()) == files


def test_arrays_come_back_whole_and_agreement_is_the_largest():
    devices = mesh.make(data=2, fsdp=2, tensor=1, sequence=1)
    x_BD = np.arange(8 * 3, dtype=np.float32).reshape(8, 3)
    placed = distributed.put({"x_BD": x_BD}, {"x_BD": jax.sharding.NamedSharding(devices, jax.P(("data", "fsdp")))})
    assert placed["x_BD"].addressable_shards[1].data.shape == (2, 3)
    assert isinstance(distributed.fetch(placed)["x_BD"], np.ndarray)
    np.testing.assert_array_equal(distributed.fetch(placed)["x_BD"], x_BD)
    assert distributed.main() and distributed.agree(7) == 7 and distributed.same(7)

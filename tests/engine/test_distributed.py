"""Several processes on one machine: the numbers of one process, one set of files, and no waiting for the dead."""

import contextlib
import json
import multiprocessing
import os
import pathlib
import signal
import socket
import sys
import tempfile
import time
from typing import NamedTuple
from unittest import mock

import jax
import numpy as np
import pytest
import tiny
from errors import raises

import launch
from experiments.engine import checkpoint, distributed, errors, log, mesh, run as runs

SECONDS = 150  # in which everything here must end, also on a busy machine
STEPS = 6


@pytest.fixture(scope="module")
def arguments(tmp_path_factory):
    """The launcher's arguments for a run of halves.py, without --workdir."""
    changes = tiny.TRAIN | {"optim.schedule": "constant", "mesh.fsdp": 2}
    changes |= {"train.log_every": 1, "train.evaluate_every": 0, "train.save_every": 0}
    return "--device=cpu", "--config", tiny.config_file(tmp_path_factory.mktemp("config"), "halves", **changes)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def act(folder: pathlib.Path, variables: dict[str, str], action, *arguments) -> None:
    """Run the action in this new process, with its output in the folder."""
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT), number)
    os.environ.update(variables)
    with tiny.without_figures():
        action(*arguments)


def train(*arguments: str) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(launch.main(["launch.py", *arguments]))


def talk(ending: str) -> None:
    """Let the processes agree on numbers, then end one of them while the other waits for it."""
    with mock.patch.object(distributed, "HEARTBEAT_SECONDS", 5):
        with distributed.join(distributed.parse_group(None, None, None)):
            me = jax.process_index()
            print("first" if me == 0 else "nobody reads this", flush=True)
            numbers = [
                distributed.agree(3 + 5 * me),
                distributed.is_same(me),
                distributed.is_same(7),
                distributed.agree(-me),
            ]
            numbers += [distributed.call_in_main(lambda: 5 + me)]
            place = jax.sharding.NamedSharding(mesh.make(data=2), jax.P("data"))
            whole = distributed.fetch(distributed.put({"x": np.arange(6)}, {"x": place}))["x"]
            distributed.barrier()
            print(numbers, whole.tolist(), file=sys.stderr, flush=True)
            try:
                distributed.call_in_main(refuse if ending == "refuses" else lambda: 0)
            except errors.UserError as error:
                print(error, file=sys.stderr, flush=True)
            while ending == "dies":
                distributed.barrier()


def refuse():
    raise errors.UserError("no such thing")


AGREED = "[8, False, True, 0, 5] [0, 1, 2, 3, 4, 5]\n"


class Started(NamedTuple):
    """A process, and the folder of its output."""

    process: multiprocessing.Process
    folder: pathlib.Path

    def output(self, name: str = "err") -> str:
        """Return the output so far, without the warnings of libraries at their import."""
        file = self.folder / name
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        return "".join(line for line in lines if not line.startswith("WARNING:absl:") and "[Gloo]" not in line)

    def ended(self) -> tiny.Outcome:
        """Wait for the end, and return exit code and output."""
        self.process.join(SECONDS)
        return tiny.Outcome(self.process.exitcode, self.output("out"), self.output())


@contextlib.contextmanager
def pair(folder: pathlib.Path, action, *arguments: str):
    """Start two processes of an action with one device each, and kill them at the end.

    Both are forks of a process that has imported everything and started no device.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    address, number, which = distributed.VARIABLES
    variables = {address: f"127.0.0.1:{free_port()}", number: "2"}
    variables |= {"XLA_FLAGS": os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=1")}
    variables |= {"JAX_COMPILATION_CACHE_DIR": str(folder / "cache")}
    with contextlib.ExitStack() as stack:
        started = []
        for i in range(2):
            own = pathlib.Path(tempfile.mkdtemp(dir=folder))
            process = context.Process(target=act, args=(own, variables | {which: str(i)}, action, *arguments))
            with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):  # for what is imported once
                process.start()
            stack.callback(process.join)
            stack.callback(process.kill)
            started.append(Started(process, own))
        yield started


def wait_for(what, started: list[Started]) -> None:
    """Wait for a condition. Fail with the output if a process ends before, or nothing happens."""
    until = time.monotonic() + SECONDS
    while not what():
        if time.monotonic() > until or not all(one.process.is_alive() for one in started):
            pytest.fail(f"nothing happened: {[one.output() for one in started]}")
        time.sleep(0.05)


def losses(folder: pathlib.Path) -> dict[int, float]:
    return {row["step"]: row["train/loss"] for row in log.read(folder) if "train/loss" in row}


def test_two_processes_train_as_one_stop_together_and_write_once(arguments, tmp_path):
    """A signal to one stops and saves both; both go on to the end, as one process with two devices does in one go."""
    folder, alone = tmp_path / "run", tmp_path / "alone"
    words = *arguments, "--workdir", str(folder)
    with pair(tmp_path, train, *words, "--config.train.steps=1000000") as started:
        wait_for(lambda: len(losses(folder)) > 2, started)
        os.kill(started[1].process.pid, signal.SIGINT)
        stopped = [one.ended() for one in started]
    saved = checkpoint.newest(folder / "checkpoints")
    for one in stopped:
        assert one.code == 143 and f"stopped after step {saved:,}" in one.err and "Traceback" not in one.err, one.err
    assert max(losses(folder)) == saved
    with pair(tmp_path, train, *words, f"--config.train.steps={saved + STEPS}") as started:
        first, second = [one.ended() for one in started]
    assert (first.code, second.code) == (0, 0), (first.err, second.err)
    assert f"resuming {folder} at step {saved}" in first.out and "eval/loss" in first.out and "mesh" in first.out
    assert second.out == ""
    assert not list(tmp_path.glob("cache/*step*"))  # what comes from there would wait
    one = "--config.mesh.data=1", f"--config.train.steps={saved + STEPS}"
    with tiny.without_figures():
        assert tiny.run(*arguments, "--workdir", str(alone), *one).code == 0
    assert log.read(folder) == log.read(alone)  # to the last bit
    summaries = [json.loads((one / "summary.json").read_text()) for one in (folder, alone)]
    digest = checkpoint.digest(checkpoint.parameters(folder / "checkpoints", saved + STEPS))
    assert [(one["devices"], one["params_sha256"]) for one in summaries] == [(2, digest)] * 2
    assert "skipped" not in summaries[0]  # as no step may be


@pytest.mark.parametrize("ending", ["dies", "refuses"])
def test_two_processes_agree_and_if_one_dies_or_process_0_refuses_both_end(tmp_path, ending):
    with pair(tmp_path, talk, ending) as started:
        if ending == "dies":
            wait_for(lambda: all(AGREED in one.output() for one in started), started)
            os.kill(started[1].process.pid, signal.SIGKILL)
        first, second = [one.ended() for one in started]
    assert (first.out, second.out) == ("first\n", "")
    if ending == "dies":
        assert first.code not in (0, None) and second.code == -signal.SIGKILL
    else:
        assert (first.code, second.code) == (0, 0), (first.err, second.err)
        assert first.err == f"{AGREED}no such thing\n" and second.err.startswith(f"{AGREED}process 0")


def test_a_group_of_processes_comes_from_flags_or_variables_or_is_refused(monkeypatch):
    for name in distributed.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert distributed.parse_group(None, None, None) is None
    assert distributed.parse_group("[::1]:80", 3, 2) == distributed.Group("[::1]:80", 3, 2)
    for given, part in (
        (("a:1", 2, None), "JAX_PROCESS_ID = None"),
        (("a", 2, 0), "= a,"),
        (("a:65536", 2, 0), "a:65536"),
        ((":1", 2, 0), "= :1"),
        (("a:1", 2, 2), "JAX_PROCESS_ID = 2"),
        (("a:1", 0, 0), "JAX_NUM_PROCESSES = 0"),
    ):
        with raises(errors.UserError, part):
            distributed.parse_group(*given)
    for name, value in zip(distributed.VARIABLES, ("b:2", "5", "4"), strict=True):
        monkeypatch.setenv(name, value)
    assert distributed.parse_group(None, None, None) == distributed.Group("b:2", 5, 4)
    assert distributed.parse_group("c:3", 7, 0) == distributed.Group("c:3", 7, 0)
    monkeypatch.setenv("JAX_PROCESS_ID", "one")
    with raises(errors.UserError, "JAX_PROCESS_ID = one"):
        distributed.parse_group(None, None, None)


def test_only_the_first_process_writes_a_log(tmp_path, monkeypatch):
    for first, files in ((False, []), (True, ["events", "metrics.jsonl"])):
        monkeypatch.setattr(distributed, "is_main", lambda first=first: first)
        with contextlib.closing(log.Log(tmp_path, start=0)) as writer:
            writer.write(1, {"train/loss": 2.0})
        assert sorted(file.name for file in tmp_path.iterdir()) == files


@pytest.mark.parametrize("shared", [False, True])
def test_a_disk_that_is_not_shared_is_refused_after_a_minute(tmp_path, monkeypatch, shared):
    now, settings = [0.0], tiny.settings("vision")

    def sleep(seconds):
        now[0] += seconds
        (tmp_path / "config.json").write_text("") if shared else None

    monkeypatch.setattr(distributed, "is_main", lambda: False)
    monkeypatch.setattr(distributed, "call_in_main", lambda action: 0)
    monkeypatch.setattr(runs.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(runs.time, "sleep", sleep)
    with contextlib.nullcontext() if shared else raises(errors.UserError, tmp_path):
        assert not runs.open_run(settings, tmp_path, mesh.make(data=1))


def test_loaded_arrays_get_the_types_of_the_leaves_that_they_replace():
    tree = {"a_D": jax.numpy.ones(3, "bfloat16"), "b_D": jax.numpy.ones(2)}
    found = distributed.put_into(tree, {"a_D": np.arange(3.0)})
    assert found["a_D"].dtype == "bfloat16" and found["a_D"].tolist() == [0, 1, 2] and found["b_D"] is tree["b_D"]

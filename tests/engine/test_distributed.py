"""Several processes on one machine: the same numbers as one, one set of files, and none that waits for the dead."""

import contextlib
import json
import multiprocessing
import os
import pathlib
import signal
import socket
import sys
import tempfile
import threading
import time
from typing import NamedTuple
from unittest import mock

import jax
import numpy as np
import pytest
import tiny

import launch
from experiments.engine import checkpoint, distributed, errors, log, mesh, run as runs

SECONDS = 150  # in which everything here must end, also on a busy machine
STEPS = 6
VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")


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
    """In a process of its own, whose output goes into the folder."""
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT), number)
    os.environ.update(variables)
    with tiny.without_figures():
        action(*arguments)


def train(*arguments: str) -> None:
    distributed.leave(launch.main(["launch.py", *arguments]))


def talk(ending: str) -> None:
    """What the processes agree on, then something that ends one of them, while the others wait for it."""
    try:
        with distributed.joined(distributed.given(None, None, None), how_to_go_on="; go on"):
            me = jax.process_index()
            late = distributed.Late()
            print("first" if me == 0 else "nobody reads this")
            numbers = [distributed.agree(3 + 5 * me), distributed.same(me), distributed.same(7), distributed.agree(-me)]
            numbers += [late.agree(4 * me), late.agree(0), late.agree(0)]
            place = jax.sharding.NamedSharding(mesh.make(data=2), jax.P("data"))
            whole = distributed.fetch(distributed.put({"x": np.arange(6)}, {"x": place}))["x"]
            distributed.barrier()
            print(numbers, whole.tolist(), file=sys.stderr, flush=True)
            if ending == "refuses" and me == 0:
                raise errors.UserError("no such thing")
            while ending == "dies":
                distributed.barrier()
            time.sleep(100)
    except (errors.UserError, errors.RunError) as error:
        print(f"error: {error}", file=sys.stderr)
        distributed.leave(2 if isinstance(error, errors.UserError) else 1)


AGREED = "[8, False, True, 0, 0, 4, 0] [0, 1, 2, 3, 4, 5]\n"


class Started(NamedTuple):
    """A process, and the folder of what it says."""

    process: multiprocessing.Process
    folder: pathlib.Path

    def said(self, name: str = "err") -> str:
        """Until now, without what libraries say at their import."""
        file = self.folder / name
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        return "".join(line for line in lines if not line.startswith("WARNING:absl:") and "[Gloo]" not in line)

    def ended(self) -> tiny.Outcome:
        """What it said in the end."""
        self.process.join(SECONDS)
        return tiny.Outcome(self.process.exitcode, self.said("out"), self.said())


@contextlib.contextmanager
def pair(folder: pathlib.Path, action, *arguments: str):
    """Two processes of an action, with one device each; they do not outlive this. Both are forks of a process that has
    imported everything and started no device."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    variables = {VARIABLES[0]: f"127.0.0.1:{free_port()}", VARIABLES[1]: "2"}
    variables |= {"XLA_FLAGS": os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=1")}
    variables |= {"JAX_COMPILATION_CACHE_DIR": str(folder / "cache")}
    with contextlib.ExitStack() as stack:
        started = []
        for i in range(2):
            own = pathlib.Path(tempfile.mkdtemp(dir=folder))
            process = context.Process(target=act, args=(own, variables | {VARIABLES[2]: str(i)}, action, *arguments))
            with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):  # for what is imported once
                process.start()
            stack.callback(process.join)
            stack.callback(process.kill)
            started.append(Started(process, own))
        yield started


def wait_for(what, started: list[Started]) -> None:
    """Until this is so; fails with what the processes said where one of them ends before, or nothing happens."""
    until = time.monotonic() + SECONDS
    while not what():
        if time.monotonic() > until or not all(one.process.is_alive() for one in started):
            pytest.fail(f"nothing happened: {[one.said() for one in started]}")
        time.sleep(0.05)


def losses(folder: pathlib.Path) -> dict[int, float]:
    return {row["step"]: row["train/loss"] for row in log.read(folder) if "train/loss" in row}


def test_two_processes_train_as_one_stop_together_and_write_once(arguments, tmp_path):
    """A signal to one stops and saves both; both go on to the end, as one process with two devices does in one go."""
    folder, alone = tmp_path / "run", tmp_path / "alone"
    words = *arguments, "--workdir", str(folder)
    with pair(tmp_path, train, *words, "--config.train.steps=1000000") as started:
        wait_for(lambda: len(losses(folder)) > 2, started)
        os.kill(started[1].process.pid, signal.SIGTERM)
        stopped = [one.ended() for one in started]
    saved = checkpoint.newest(folder / "checkpoints")
    for one in stopped:
        assert one.code == 143 and f"stopped after step {saved:,}" in one.err and "Traceback" not in one.err
    assert max(losses(folder)) == saved
    with pair(tmp_path, train, *words, f"--config.train.steps={saved + STEPS}") as started:
        first, second = [one.ended() for one in started]
    assert (first.code, second.code) == (0, 0) and (first.err, second.err) == ("", "")
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
def test_two_processes_agree_and_where_one_is_killed_or_refuses_the_other_ends_too(tmp_path, ending):
    with pair(tmp_path, talk, ending) as started:
        if ending != "refuses":
            wait_for(lambda: all(one.said() == AGREED for one in started), started)
            os.kill(started[1].process.pid, signal.SIGKILL)
        began = time.monotonic()
        first, second = [one.ended() for one in started]
    assert time.monotonic() - began < 60
    if ending == "dies":
        assert (first.code, second.code) == (1, -signal.SIGKILL) and first.out == "first\n"
        assert first.err.startswith(AGREED) and distributed.LOST in first.err and first.err.count("\n") == 2
    else:
        assert (first.code, second.code) == (2, 2) and first.err == f"{AGREED}error: no such thing\n"
        assert second.err == f"{AGREED}error: process 0 stopped: no such thing\n"


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


def test_a_coordinator_that_is_not_there_is_not_waited_for_long(monkeypatch):
    monkeypatch.setattr(distributed, "START_SECONDS", 0.3)
    port = free_port()
    with pytest.raises(errors.RunError, match=rf"127.0.0.1:{port} could not be reached within 0.3 s: .*refused"):
        distributed.start(distributed.Group(f"127.0.0.1:{port}", 2, 1))
    monkeypatch.setattr(distributed, "START_SECONDS", 30)
    monkeypatch.setattr(jax.distributed, "initialize", lambda **options: None)
    with socket.socket() as listens:
        later = threading.Timer(0.3, listens.listen)
        listens.bind(("127.0.0.1", port))
        later.start()
        distributed.start(distributed.Group(f"127.0.0.1:{port}", 2, 1))
        later.join()


def test_the_brackets_of_an_address_are_not_part_of_it(monkeypatch):
    """A socket takes ::1, where the coordinator is written as [::1]:80."""
    asked = []
    monkeypatch.setattr(socket, "create_connection", lambda address, **_: asked.append(address) or socket.socket())
    monkeypatch.setattr(jax.distributed, "initialize", lambda **options: None)
    distributed.start(distributed.Group("[::1]:80", 2, 1))
    assert asked == [("::1", 80)]


def test_only_the_first_process_writes_a_log(tmp_path, monkeypatch):
    for first, files in ((False, []), (True, ["events", "metrics.jsonl"])):
        monkeypatch.setattr(distributed, "main", lambda first=first: first)
        with contextlib.closing(log.Log(tmp_path, start=0)) as writer:
            writer.write(1, {"train/loss": 2.0})
        assert sorted(file.name for file in tmp_path.iterdir()) == files


@pytest.mark.parametrize("shared", [False, True])
def test_a_disk_that_is_not_shared_is_said_a_minute_after_process_0_has_entered(tmp_path, monkeypatch, shared):
    """Which may take longer itself: it verifies the last checkpoint of a finished run."""
    now, settings = [0.0], tiny.settings("vision")

    def agree(value):
        now[0] += 1000
        return value

    def sleep(seconds):
        now[0] += seconds
        (tmp_path / "config.json").write_text("") if shared else None

    monkeypatch.setattr(distributed, "main", lambda: False)
    monkeypatch.setattr(distributed, "agree", agree)
    monkeypatch.setattr(runs.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(runs.time, "sleep", sleep)
    refused = pytest.raises(errors.UserError, match="its disk must be shared")
    with contextlib.nullcontext() if shared else refused:
        assert not runs.enter(settings, tmp_path, mesh.make(data=1))


def test_arrays_take_the_types_of_the_leaves_in_whose_places_they_come():
    tree = {"a_D": jax.numpy.ones(3, "bfloat16"), "b_D": jax.numpy.ones(2)}
    found = distributed.put_into(tree, {"a_D": np.arange(3.0)})
    assert found["a_D"].dtype == "bfloat16" and found["a_D"].tolist() == [0, 1, 2] and found["b_D"] is tree["b_D"]

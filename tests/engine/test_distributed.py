"""Several processes on one machine: the same numbers as one, one set of files, and none that waits for the dead."""

import contextlib
import json
import os
import pathlib
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

from experiments.engine import checkpoint, distributed, errors, log, mesh
from experiments.engine import run as runs

ROOT = pathlib.Path(__file__).parents[2]
SECONDS = 150  # in which everything here must end, also on a busy machine
STEPS = 6
VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
# What the processes agree on, then something that ends one of them, while the others wait for it.
SCRIPT = """
import sys, time
import jax, numpy as np
from experiments.engine import distributed, errors, mesh

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
        if sys.argv[1] == "refuses" and me == 0:
            raise errors.UserError("no such thing")
        while sys.argv[1] == "dies":
            distributed.barrier()
        time.sleep(100 if sys.argv[1] != "ends" else 0)
except (errors.UserError, errors.RunError) as error:
    print(f"error: {error}", file=sys.stderr)
    distributed.leave(2 if isinstance(error, errors.UserError) else 1)
distributed.leave(0)
"""
AGREED = "[8, False, True, 0, 0, 4, 0] [0, 1, 2, 3, 4, 5]\n"


@pytest.fixture(scope="module")
def arguments(tmp_path_factory):
    """The launcher's arguments for a run of halves.py, without --workdir."""
    changes = tiny.TRAIN | {"device": "cpu", "optim.schedule": "constant", "mesh.fsdp": 2, "train.evaluate_batch": 8}
    changes |= {"train.log_every": 1, "train.evaluate_every": 0, "train.save_every": 0}
    return "--config", tiny.config_file(tmp_path_factory.mktemp("config"), "halves", **changes)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


@contextlib.contextmanager
def pair(*command: str, cache: pathlib.Path | None = None):
    """Two processes of a command, with one device each; they do not outlive this."""
    environment = os.environ | {VARIABLES[0]: f"127.0.0.1:{free_port()}", VARIABLES[1]: "2"}
    environment |= {"XLA_FLAGS": os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=1")}
    environment |= {"JAX_ENABLE_COMPILATION_CACHE": "true", "JAX_COMPILATION_CACHE_DIR": str(cache or "")}
    environment |= {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests/engine")))}
    with contextlib.ExitStack() as stack:
        started = []
        for i in range(2):
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            own = environment | {VARIABLES[2]: str(i)}
            started.append(subprocess.Popen([sys.executable, *command], cwd=ROOT, env=own, **pipes))
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


def losses(folder: pathlib.Path) -> dict[int, float]:
    return {row["step"]: row["train/loss"] for row in log.read(folder) if "train/loss" in row}


def test_two_processes_train_as_one_stop_together_and_write_once(arguments, tmp_path):
    """A signal to one stops and saves both; both go on to the end, as one process with two devices does in one go."""
    folder, alone = tmp_path / "run", tmp_path / "alone"
    launcher = "launch.py", *arguments, "--workdir", str(folder)
    with pair(*launcher, "--config.train.steps=1000000", cache=tmp_path / "cache") as started:
        wait_for(lambda: len(losses(folder)) > 2, started)
        started[1].send_signal(signal.SIGTERM)
        stopped = [ended(process) for process in started]
    saved = checkpoint.newest(folder / "checkpoints")
    for one in stopped:
        assert one.code == 143 and f"stopped after step {saved:,}" in one.err and "Traceback" not in one.err
    assert max(losses(folder)) == saved
    with pair(*launcher, f"--config.train.steps={saved + STEPS}", cache=tmp_path / "cache") as started:
        first, second = [ended(process) for process in started]
    assert (first.code, second.code) == (0, 0) and (first.err, second.err) == ("", "")
    assert f"resuming {folder} at step {saved}" in first.out and "eval/loss" in first.out and "mesh" in first.out
    assert [line for line in second.out.splitlines() if "[Gloo]" not in line] == []
    assert not list(tmp_path.glob("cache/*step*"))  # what comes from there would wait
    one = "--config.mesh.data=1", f"--config.train.steps={saved + STEPS}"
    with tiny.without_figures():
        assert tiny.run(*arguments, "--workdir", str(alone), *one).code == 0
    assert log.read(folder) == log.read(alone)  # to the last bit
    assert json.loads((folder / "summary.json").read_text())["devices"] == 2
    digests = [json.loads((one / "summary.json").read_text())["params_sha256"] for one in (folder, alone)]
    params = checkpoint.parameters(folder / "checkpoints", saved + STEPS)
    assert digests == [checkpoint.digest(params)] * 2


@pytest.fixture
def started(tmp_path, request):
    """Two processes of SCRIPT, behind their agreements, with what each has said until then."""
    (tmp_path / "script.py").write_text(SCRIPT)
    with pair(str(tmp_path / "script.py"), request.param) as processes:
        yield processes


def said(process: subprocess.Popen) -> str:
    """The next line that is not a library's."""
    return next(line for line in process.stderr if line.startswith("["))


@pytest.mark.parametrize("started", ["dies"], indirect=True)
def test_the_others_end_where_one_is_killed(started):
    assert [said(process) for process in started] == [AGREED] * 2
    began = time.monotonic()
    started[1].kill()
    code, out, err = ended(started[0])
    assert code == 1 and time.monotonic() - began < 60
    assert distributed.LOST in err and err.count("\n") == 1, err
    assert out.startswith("first\n") or "\nfirst\n" in out


@pytest.mark.parametrize("started", ["waits"], indirect=True)
def test_a_signal_to_one_ends_all_at_once(started):
    assert [said(process) for process in started] == [AGREED] * 2
    began = time.monotonic()
    started[1].send_signal(signal.SIGTERM)
    first, second = [ended(process) for process in started]
    assert time.monotonic() - began < 30
    assert (first.code, second.code) == (143, 143) and first.err == second.err == "stopped; go on\n"
    assert "nobody" not in second.out


@pytest.mark.parametrize("started", ["refuses"], indirect=True)
def test_what_one_process_refuses_ends_the_others(started):
    began = time.monotonic()
    first, second = [ended(process) for process in started]
    assert time.monotonic() - began < 60 and (first.code, second.code) == (2, 2)
    assert first.err == f"{AGREED}error: no such thing\n"
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


def test_several_processes_do_what_makes_sense_only(arguments, tmp_path):
    several = "--coordinator=127.0.0.1:1", "--processes=2", "--process=1"
    assert tiny.run(*arguments, "--processes=2").err.startswith("error: several processes need --coordinator")
    for wrong in (("--dry_run", "--workdir", str(tmp_path / "a")), ()):
        outcome = tiny.run(*arguments, *several, *wrong)
        assert outcome.code == 2 and "all need the same --workdir" in outcome.err
    assert not (tmp_path / "a").exists()


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


def test_alone_everything_is_at_once():
    devices, late = mesh.make(data=2, fsdp=2, tensor=1, sequence=1), distributed.Late()
    x_BD = np.arange(8 * 3, dtype=np.float32).reshape(8, 3)
    placed = distributed.put({"x_BD": x_BD}, {"x_BD": jax.sharding.NamedSharding(devices, jax.P(("data", "fsdp")))})
    assert placed["x_BD"].addressable_shards[1].data.shape == (2, 3)
    assert isinstance(distributed.fetch(placed)["x_BD"], np.ndarray)
    np.testing.assert_array_equal(distributed.fetch(placed)["x_BD"], x_BD)
    assert distributed.main() and distributed.agree(7) == 7 and distributed.same(7)
    assert [late.agree(value) for value in (0, 7, 0)] == [0, 7, 0] and late.asked == 0

"""Several processes on one machine: same numbers as one process, one set of files, no waiting for dead processes."""

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
from experiments.config import errors
from experiments.devices import distributed, mesh as meshes
from experiments.folder import checkpoint, log, records, workdir as workdirs

SECONDS = 150  # timeout of each process, also on a busy machine
STEPS = 6


@pytest.fixture(scope="module")
def arguments(tmp_path_factory):
    """Return the launcher's arguments for a run of halves.py, without --workdir."""
    changes = tiny.TRAIN | {"optim.schedule": "constant", "mesh.fsdp": 2}
    changes |= {"train.log_every": 1, "train.evaluate_every": 0, "train.save_every": 0}
    return "--device=cpu", "--config", tiny.config_file(tmp_path_factory.mktemp("config"), "halves", **changes)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def run_action(folder: pathlib.Path, variables: dict[str, str], action, *arguments) -> None:
    """Run the action in this new process, and redirect its output to files in the folder."""
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT), number)
    os.environ.update(variables)
    with tiny.without_figures():
        action(*arguments)


def train(*arguments: str) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(launch.main(["launch.py", *arguments]))


def exchange_numbers(ending: str) -> None:
    """Exchange numbers between the processes. Then one process dies or refuses while the other waits for it."""
    with mock.patch.object(distributed, "HEARTBEAT_SECONDS", 5):
        with distributed.join(distributed.parse_group(None, None, None)):
            index = jax.process_index()
            print("first" if index == 0 else "nobody reads this", flush=True)
            numbers = [
                distributed.agree(3 + 5 * index),
                distributed.is_same(index),
                distributed.is_same(7),
                distributed.agree(-index),
            ]
            numbers += [distributed.call_in_main(lambda: 5 + index)]
            sharding = jax.sharding.NamedSharding(meshes.make(data=2), jax.P("data"))
            array = distributed.fetch(distributed.put({"x": np.arange(6)}, {"x": sharding}))["x"]
            distributed.barrier()
            print(numbers, array.tolist(), file=sys.stderr, flush=True)
            try:
                distributed.call_in_main(refuse if ending == "refuses" else lambda: 0)
            except errors.UserError as error:
                print(error, file=sys.stderr, flush=True)
            while ending == "dies":
                distributed.barrier()


def refuse():
    raise errors.UserError("no such thing")


AGREEMENT = "[8, False, True, 0, 5] [0, 1, 2, 3, 4, 5]\n"


class Running(NamedTuple):
    """A started process and the folder with its output."""

    process: multiprocessing.Process
    folder: pathlib.Path

    def output(self, name: str = "err") -> str:
        """Return the output so far, without warnings of libraries."""
        file = self.folder / name
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        return "".join(line for line in lines if not line.startswith("WARNING:absl:") and "[Gloo]" not in line)

    def wait(self) -> tiny.Outcome:
        """Wait for the end of the process. Return its exit code and output."""
        self.process.join(SECONDS)
        return tiny.Outcome(self.process.exitcode, self.output("out"), self.output())


@contextlib.contextmanager
def start_pair(folder: pathlib.Path, action, *arguments: str):
    """Context manager: run an action in two processes with one device each, and kill them at the end.

    Both are forks of a process that has imported everything and started no device.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    address, number, process_id = distributed.VARIABLES
    variables = {address: f"127.0.0.1:{free_port()}", number: "2"}
    variables |= {"XLA_FLAGS": os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=1")}
    variables |= {"JAX_COMPILATION_CACHE_DIR": str(folder / "cache")}
    with contextlib.ExitStack() as stack:
        processes = []
        for i in range(2):
            output_folder = pathlib.Path(tempfile.mkdtemp(dir=folder))
            process = context.Process(
                target=run_action, args=(output_folder, variables | {process_id: str(i)}, action, *arguments)
            )
            with mock.patch.dict(
                os.environ, PYTHONPATH=os.pathsep.join(sys.path)
            ):  # the fork server imports the modules
                process.start()
            stack.callback(process.join)
            stack.callback(process.kill)
            processes.append(Running(process, output_folder))
        yield processes


def wait_for(condition, processes: list[Running]) -> None:
    """Wait until condition() is true. Fail with the output if a process ends before, or after SECONDS."""
    deadline = time.monotonic() + SECONDS
    while not condition():
        if time.monotonic() > deadline or not all(process.process.is_alive() for process in processes):
            pytest.fail(f"nothing happened: {[process.output() for process in processes]}")
        time.sleep(0.05)


def losses(folder: pathlib.Path) -> dict[int, float]:
    return {row["step"]: row["train/loss"] for row in records.read_metrics(folder) if "train/loss" in row}


def test_two_processes_train_as_one_stop_together_and_write_once(arguments, tmp_path):
    """A signal to one process stops and saves both. Resumed, both end with the numbers of a single process."""
    folder, alone = tmp_path / "run", tmp_path / "alone"
    words = *arguments, "--workdir", str(folder)
    with start_pair(tmp_path, train, *words, "--config.train.steps=1000000") as processes:
        wait_for(lambda: len(losses(folder)) > 2, processes)
        os.kill(processes[1].process.pid, signal.SIGINT)
        outcomes = [process.wait() for process in processes]
    step = checkpoint.newest(folder / "checkpoints")
    for outcome in outcomes:
        assert (
            outcome.code == 143 and f"stopped after step {step:,}" in outcome.err and "Traceback" not in outcome.err
        ), outcome.err
    assert max(losses(folder)) == step
    with start_pair(tmp_path, train, *words, f"--config.train.steps={step + STEPS}") as processes:
        first, second = [process.wait() for process in processes]
    assert (first.code, second.code) == (0, 0), (first.err, second.err)
    assert f"resuming {folder} at step {step}" in first.out and "eval/loss" in first.out and "mesh" in first.out
    assert second.out == ""
    # A cached program may hang: XLA:CPU loses the order of its collectives.
    assert not list(tmp_path.glob("cache/*step*"))
    flags = "--config.mesh.data=1", f"--config.train.steps={step + STEPS}"
    with tiny.without_figures():
        assert tiny.run(*arguments, "--workdir", str(alone), *flags).code == 0
    assert records.read_metrics(folder) == records.read_metrics(alone)  # bit for bit
    summaries = [json.loads((run / "summary.json").read_text()) for run in (folder, alone)]
    digest = checkpoint.digest(checkpoint.parameters(folder / "checkpoints", step + STEPS))
    assert [(summary["devices"], summary["params_sha256"]) for summary in summaries] == [(2, digest)] * 2
    assert "skipped" not in summaries[0]  # train.nan = abort


@pytest.mark.parametrize("ending", ["dies", "refuses"])
def test_two_processes_agree_and_if_one_dies_or_process_0_refuses_both_end(tmp_path, ending):
    with start_pair(tmp_path, exchange_numbers, ending) as processes:
        if ending == "dies":
            wait_for(lambda: all(AGREEMENT in process.output() for process in processes), processes)
            os.kill(processes[1].process.pid, signal.SIGKILL)
        first, second = [process.wait() for process in processes]
    assert (first.out, second.out) == ("first\n", "")
    if ending == "dies":
        assert first.code not in (0, None) and second.code == -signal.SIGKILL
    else:
        assert (first.code, second.code) == (0, 0), (first.err, second.err)
        assert first.err == f"{AGREEMENT}no such thing\n" and second.err.startswith(f"{AGREEMENT}process 0")


def test_a_group_of_processes_comes_from_flags_or_variables_or_is_refused(monkeypatch):
    for name in distributed.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert distributed.parse_group(None, None, None) is None
    assert distributed.parse_group("[::1]:80", 3, 2) == distributed.Group("[::1]:80", 3, 2)
    for values, part in (
        (("a:1", 2, None), "JAX_PROCESS_ID = None"),
        (("a", 2, 0), "= a,"),
        (("a:65536", 2, 0), "a:65536"),
        ((":1", 2, 0), "= :1"),
        (("a:1", 2, 2), "JAX_PROCESS_ID = 2"),
        (("a:1", 0, 0), "JAX_NUM_PROCESSES = 0"),
    ):
        with raises(errors.UserError, part):
            distributed.parse_group(*values)
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


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_disk_that_is_not_shared_is_refused_after_a_minute(tmp_path, monkeypatch, is_shared):
    clock, settings = [0.0], tiny.settings("vision")

    def sleep(seconds):
        clock[0] += seconds
        (tmp_path / "config.json").write_text("") if is_shared else None

    monkeypatch.setattr(distributed, "is_main", lambda: False)
    monkeypatch.setattr(distributed, "call_in_main", lambda action: 0)
    monkeypatch.setattr(workdirs.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(workdirs.time, "sleep", sleep)
    with contextlib.nullcontext() if is_shared else raises(errors.UserError, tmp_path):
        assert not workdirs.open_run(tmp_path, settings.to_dict())


def test_loaded_arrays_get_the_types_of_the_leaves_that_they_replace():
    tree = {"a_D": jax.numpy.ones(3, "bfloat16"), "b_D": jax.numpy.ones(2)}
    result = distributed.put_into(tree, {"a_D": np.arange(3.0)})
    assert result["a_D"].dtype == "bfloat16" and result["a_D"].tolist() == [0, 1, 2] and result["b_D"] is tree["b_D"]

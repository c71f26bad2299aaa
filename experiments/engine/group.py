"""Several processes of one run, one on each host: who belongs to it, and where they meet."""

import contextlib
import os
import re
import socket
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax

from experiments.engine import errors, parting

START_SECONDS = 120  # for all processes to be there
HEARTBEAT_SECONDS = 30  # without a sign of life, a process is dead


class Group(NamedTuple):
    """The processes of a run: where they meet, how many, which one this is."""

    coordinator: str
    processes: int
    process: int


def given(coordinator: str | None, processes: int | None, process: int | None) -> Group | None:
    """The group that flags, or else the environment, name; None: this process is alone. UserError for half a group."""
    values = {
        "--coordinator (JAX_COORDINATOR_ADDRESS)": coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS"),
        "--processes (JAX_NUM_PROCESSES)": _number(processes, "JAX_NUM_PROCESSES"),
        "--process (JAX_PROCESS_ID)": _number(process, "JAX_PROCESS_ID"),
    }
    missing = [name for name, value in values.items() if value is None]
    if len(missing) == len(values):
        return None
    if missing:
        raise errors.UserError(f"several processes need {', '.join(values)}; missing: {', '.join(missing)}")
    group = Group(*values.values())
    if not re.fullmatch(r".+:\d{1,5}", group.coordinator) or not 0 < _port(group) < 2**16:
        raise errors.UserError(f'--coordinator must be host:port, as 10.0.0.1:8476, and "{group.coordinator}" is not')
    if group.processes < 1 or not 0 <= group.process < group.processes:
        raise errors.UserError(
            f"--process must lie between 0 and --processes - 1, and {group.process} of {group.processes} does not"
        )
    return group


def _number(flag: int | None, variable: str) -> int | None:
    text = os.environ.get(variable)
    if flag is not None or not text:
        return flag
    if not re.fullmatch(r"\d+", text):
        raise errors.UserError(f'{variable} must be a number, and "{text}" is not')
    return int(text)


def _port(group: Group) -> int:
    return int(group.coordinator.rpartition(":")[2])


@contextlib.contextmanager
def joined(group: Group | None, *, detect: bool = False, how_to_go_on: str = "") -> Iterator[None]:
    """What is inside runs in all processes of the group; only the first one prints to stdout.

    detect: without a group, ask JAX for what the cluster says (Slurm, TPU pods, ...). With neither, nothing is changed.
    An error in one process ends the others with its sentence and its exit code, and so does a signal; how_to_go_on:
    what is said behind "stopped". Must begin before a device is touched.
    """
    if group is None and not detect:
        yield
        return
    start(group)
    with parting.together(how_to_go_on) as first, contextlib.ExitStack() as stack:
        if not first:
            stack.enter_context(contextlib.redirect_stdout(stack.enter_context(open(os.devnull, "w"))))
        yield
    jax.distributed.shutdown()
    parting.at_abort(None)


def start(group: Group | None) -> None:
    """Meet the other processes. RunError where they do not come, UserError where no cluster can be detected."""
    parting.quiet()
    options: dict[str, Any] = {
        "initialization_timeout": START_SECONDS,
        "heartbeat_timeout_seconds": HEARTBEAT_SECONDS,
    }
    if group:
        _reach(group)
        parting.at_abort(f"not all {group.processes} processes came to {group.coordinator} within {START_SECONDS} s")
        options |= dict(zip(("coordinator_address", "num_processes", "process_id"), group, strict=True))
        options |= {"cluster_detection_method": "deactivate"}
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(**options)
        parting.at_abort(f"{parting.LOST} (with TF_CPP_MIN_LOG_LEVEL=0, JAX says more)")
    except (RuntimeError, ValueError, TypeError) as error:
        reason = str(error).splitlines()[0]
        if group is None:
            raise errors.UserError(f"--distributed finds no cluster to join ({reason})") from error
        raise errors.RunError(f"the processes cannot meet at {group.coordinator}: {reason}") from error


def _reach(group: Group) -> None:
    """Wait until the coordinator, which is in process 0, listens: JAX would end this process with a stack trace."""
    host, until = group.coordinator.rpartition(":")[0].strip("[]"), time.monotonic() + START_SECONDS
    while group.process:
        try:
            socket.create_connection((host, _port(group)), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() > until:
                raise errors.RunError(
                    f"the coordinator {group.coordinator} could not be reached within {START_SECONDS} s:"
                    f" {error.strerror or error}; is process 0 running there?"
                ) from error
        time.sleep(0.2)

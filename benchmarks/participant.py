"""A participant is a process that builds a model once, takes steps on request, and sleeps otherwise."""

import importlib
import multiprocessing
import os
import resource
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from benchmarks import sizes

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",  # more compile workers would stay alive during the timing
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # participants share the memory of a GPU
    "JAX_ENABLE_COMPILATION_CACHE": "0",
}
PLATFORMS = {"cpu": "cpu", "gpu": "cuda,cpu"}  # for jax_platforms; the first one computes


class Unavailable(Exception):
    """Raised with the reason why a participant cannot take part."""


class Built(NamedTuple):
    """A built model.

    steps(n): takes n steps, waits for the last, and returns its loss (0 for generation). facts: other numbers about the
    build, such as compile_seconds.
    """

    steps: Callable[[int], float]
    parameters: int
    facts: dict[str, Any] = {}


def serve(connection: Connection, size: sizes.Workload, module: str, *options: str) -> None:
    """Run in the participant's process: build the model, then take steps for each message (lead, steps) and reply."""
    os.environ.update(ENVIRONMENT | {"JAX_PLATFORMS": PLATFORMS[size.platform]})
    try:
        built = importlib.import_module(module).build(size, *options)
        if size.warm_up:
            built.steps(size.warm_up)
    except (ImportError, Unavailable) as error:
        return connection.send(Unavailable(str(error).strip().splitlines()[0]))
    connection.send({"parameters": built.parameters, "threads": len(os.sched_getaffinity(0)), **built.facts})
    for lead, steps in iter(connection.recv, None):
        if lead:
            built.steps(lead)
        begin = time.perf_counter()
        loss = built.steps(steps)
        seconds = time.perf_counter() - begin
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
        connection.send({"seconds": seconds, "loss": loss, "peak_bytes": peak})


class Participant:
    """A handle on a process with a model that is built and warmed up. Close it after use.

    command: the module that builds the model, and arguments of its `build`. Raises Unavailable if the process cannot
    take part (a library is missing), RuntimeError if it ends.
    """

    def __init__(self, name: str, command: tuple[str, ...], size: sizes.Workload):
        context = multiprocessing.get_context("spawn")
        self.name, (self._connection, end) = name, context.Pipe()
        self._process = context.Process(target=serve, args=(end, size, *command), daemon=True)
        self._process.start()
        end.close()
        self.facts = self._receive()

    def take(self, steps: int, *, lead: int = 0) -> dict[str, float]:
        """Take `lead` untimed and `steps` timed steps. Return {"seconds", "loss", "peak_bytes"}."""
        self._connection.send((lead, steps))
        return self._receive()

    def _receive(self) -> dict[str, Any]:
        try:
            message = self._connection.recv()
        except (EOFError, ConnectionError) as error:
            raise RuntimeError(f"{self.name} has ended: see its message above") from error
        if isinstance(message, Unavailable):
            raise message
        return message

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        self._connection.close()

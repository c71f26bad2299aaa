"""A participant is a process that builds a model once, takes steps on request, and sleeps otherwise."""

import importlib
import multiprocessing
import os
import resource
import time
from collections.abc import Callable
from concurrent import futures
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


def build(size: sizes.Workload, module: str, *options: str) -> dict[str, Any]:
    """Build the model of the participant's process, take the first steps, and return its facts."""
    global _built  # of this process, for `take`
    cores = len(os.sched_getaffinity(0))
    jax_settings = {"JAX_PLATFORMS": PLATFORMS[size.platform], "JAX_NUM_CPU_DEVICES": str(min(size.devices, cores))}
    os.environ.update(ENVIRONMENT | jax_settings)
    try:
        _built = importlib.import_module(module).build(size, *options)
    except ImportError as error:
        raise Unavailable(str(error).strip().splitlines()[0]) from error
    if size.warm_up:
        _built.steps(size.warm_up)
    return {"parameters": _built.parameters, "threads": cores, **_built.facts}


def take(lead: int, steps: int) -> dict[str, float]:
    """Take steps in the participant's process: `lead` untimed ones, and `steps` timed ones."""
    if lead:
        _built.steps(lead)
    begin = time.perf_counter()
    loss = _built.steps(steps)
    seconds = time.perf_counter() - begin
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
    return {"seconds": seconds, "loss": loss, "peak_bytes": peak}


class Participant:
    """A handle on a process with a model that is built and warmed up. Close it after use.

    command: the module that builds the model, and arguments of its `build`. Raises Unavailable if the process cannot
    take part (a library is missing).
    """

    def __init__(self, name: str, command: tuple[str, ...], size: sizes.Workload):
        self.name, self._process = name, futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
        self.facts = self._process.submit(build, size, *command).result()

    def take(self, steps: int, *, lead: int = 0) -> dict[str, float]:
        """Take `lead` untimed and `steps` timed steps. Return {"seconds", "loss", "peak_bytes"}."""
        return self._process.submit(take, lead, steps).result()

    def close(self) -> None:
        self._process.shutdown()

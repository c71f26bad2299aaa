"""A participant is a process that builds a model once, and then takes steps when it is asked to and sleeps otherwise.

`python -m benchmarks.participant MODULE SIZE [WAY]`, of ours, torch_peer, flax_peer; both sides talk in lines of JSON:

    participant  {"ready": {...}}                                              what was built
    harness      {"lead": 2, "steps": 30}                                      2 that do not count, after the sleep
    participant  {"seconds": 0.61, "loss": 4.2, "peak_bytes": 463470592}       and so on, until the input ends
"""

import contextlib
import dataclasses
import importlib
import json
import os
import pathlib
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from benchmarks import sizes

ROOT = pathlib.Path(__file__).parent.parent
# No network, no message about it.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",  # its other compiling processes would stay, beside those that are timed
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # participants share the GPU: none may take its whole memory
}
PLATFORMS = {"cpu": "cpu", "gpu": "cuda,cpu"}  # as jax_platforms has them; the first is the one that computes


class Unavailable(Exception):
    """A participant that cannot take part; the message says why in a sentence."""


class Built(NamedTuple):
    """What a participant is: `steps(n)` takes n steps, waits for the last, and returns its loss (0: it has none)."""

    steps: Callable[[int], float]
    parameters: int
    facts: dict[str, Any]  # what the harness writes down: versions, settings


def serve(module: str, text: str, *way: str) -> None:
    """The participant's side: what module.build(size, *way) has built. What libraries print goes to standard error."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def answer(**what: Any) -> None:
        answers.write(json.dumps(what) + "\n")

    try:
        size = sizes.Workload(**json.loads(text))
        built = importlib.import_module(module).build(size, *way)
        if size.warm_up and size.kind != "generation":  # generation warms up where it is built
            built.steps(size.warm_up)
    except (ImportError, Unavailable) as error:
        answer(unavailable=str(error).strip().splitlines()[0])
        return
    answer(ready={"parameters": built.parameters, "threads": len(os.sched_getaffinity(0)), **built.facts})
    for line in sys.stdin:
        turn = json.loads(line)
        if turn["lead"]:
            built.steps(turn["lead"])
        begin = time.perf_counter()
        loss = built.steps(turn["steps"])
        seconds = time.perf_counter() - begin
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
        answer(seconds=seconds, loss=loss, peak_bytes=peak)


class Participant:
    """The harness's side: a process that has been built and warmed up. To be closed.

    Unavailable where the process says that it cannot take part (a library is missing); RuntimeError where it fails.
    """

    def __init__(self, name: str, command: tuple[str, ...], size: sizes.Workload, environment: Mapping[str, str] = {}):
        """command: the module, and the way in which it does it. environment: more variables of the process."""
        self.name = name
        self._log = tempfile.TemporaryFile("w+")
        module, *way = command
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.participant", module, json.dumps(dataclasses.asdict(size)), *way],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            bufsize=1,
            cwd=ROOT,
            env={**os.environ, **ENVIRONMENT, "JAX_PLATFORMS": PLATFORMS[size.platform], **environment},
        )
        with contextlib.ExitStack() as stack:
            stack.callback(self.close)  # where it does not get ready
            answer = self._read()
            if "unavailable" in answer:
                raise Unavailable(answer["unavailable"])
            stack.pop_all()
        self.facts = answer["ready"]

    def take(self, steps: int, *, lead: int = 0) -> dict[str, float]:
        """Take so many steps, after some that do not count: {"seconds", "loss", "peak_bytes"}."""
        self._process.stdin.write(json.dumps({"lead": lead, "steps": steps}) + "\n")
        return self._read()

    def _read(self) -> dict[str, Any]:
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            tail = "".join(self._log.readlines()[-15:])
            raise RuntimeError(f"{self.name} has ended (exit code {self._process.wait()}):\n{tail}")
        return json.loads(line)

    def close(self) -> None:
        self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._log.close()


if __name__ == "__main__":
    from benchmarks import participant  # whose Unavailable is that of the modules

    participant.serve(*sys.argv[1:])

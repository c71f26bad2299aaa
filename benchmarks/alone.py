"""A function called in a process of its own, which is started as launch.py starts a run.

python -m benchmarks.alone MODULE FUNCTION ARGUMENTS, started by `call`.
"""

import importlib
import json
import os
import subprocess
import sys
from typing import Any

from benchmarks import participant
from experiments import engine


def call(module: str, function: str, **arguments: Any) -> Any:
    """What the function returns for these arguments; all of it must be fit for JSON. RuntimeError where it fails."""
    command = [sys.executable, "-m", "benchmarks.alone", module, function, json.dumps(arguments)]
    environment = {engine.VARIABLE: engine.LARGE} | os.environ | participant.ENVIRONMENT
    done = subprocess.run(command, cwd=participant.ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{module}.{function} has failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main(module: str, function: str, arguments: str) -> None:
    """Print what the function returns as the last line."""
    print(json.dumps(getattr(importlib.import_module(module), function)(**json.loads(arguments))))


if __name__ == "__main__":
    main(*sys.argv[1:])

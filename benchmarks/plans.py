"""The plan of a run of one of the workloads, made without a word."""

import contextlib
import io
import pathlib
import tempfile
from typing import Any

from benchmarks import ours
from experiments.engine import step as training_step


def made(name: str, **changes: Any) -> training_step.Plan:
    """Everything that a run of this workload needs. changes: to its config, by whole keys such as "model.M"."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        return ours.prepared(name, pathlib.Path(folder), **changes)

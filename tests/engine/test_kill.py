"""SIGKILL at any moment: what comes out of the run that is started again is that of one that nothing disturbed."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.parametrize("every", [108, pytest.param(1, marks=pytest.mark.slow)])
def test_a_kill_before_each_change_of_a_file(tmp_path, every):
    """The run is one of three steps, each of which is saved: some 100 changes. 108: within the second save."""
    flags = os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=1")
    environment = {name: value for name, value in os.environ.items() if name != "JAX_ENABLE_COMPILATION_CACHE"}
    command = [sys.executable, "tests/helpers/kill.py", str(tmp_path), f"--every={every}"]
    options = {"cwd": ROOT, "env": environment | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}}
    done = subprocess.run(command, capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    tried = re.search(r"killed before (\d+) of (\d+) changes of files: 0 failed", done.stdout)
    assert tried and int(tried[2]) > 50 and int(tried[1]) == len(range(every // 2, int(tried[2]), every)) > 0

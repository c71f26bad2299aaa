"""A process starts again with large pages: once, with the same arguments, and only where it is the script itself."""

import os
import pathlib
import subprocess
import sys

import pytest

from experiments import engine

ROOT = pathlib.Path(__file__).parents[2]
SCRIPT = """
import os, sys
print("started", os.getpid())
from experiments import engine
engine.large_pages(__file__)
print("went on", os.environ.get("GLIBC_TUNABLES"), sys.argv[1:], sys.flags.optimize)
"""
glibc = pytest.mark.skipif("CS_GNU_LIBC_VERSION" not in os.confstr_names, reason="this C library is not glibc")


@pytest.fixture
def script(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    return str(tmp_path / "script.py")


def lines(*command: str, **variables: str) -> list[str]:
    kept = {name: value for name, value in os.environ.items() if name != engine.VARIABLE}
    environment = kept | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"} | variables
    done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@glibc
def test_it_starts_once_more_as_the_same_process_with_the_same_arguments_unless_the_variable_is_set(script):
    first, second, last = lines("-O", script, "a b", "--c='d'")
    assert first == second and first.startswith("started ")
    assert last == f"""went on {engine.LARGE} ['a b', "--c='d'"] 1"""
    assert len(lines(script, GLIBC_TUNABLES="")) == 2
    assert lines(script, GLIBC_TUNABLES="glibc.malloc.hugetlb=0")[1:] == ["went on glibc.malloc.hugetlb=0 [] 0"]


def test_another_program_that_runs_the_script_is_not_started_again(script):
    program = f"import runpy; runpy.run_path({script!r}, run_name='__main__'); print('behind')"
    _, last, behind = lines("-c", program)
    assert last == "went on None [] 0" and behind == "behind"


def test_without_glibc_nothing_happens(monkeypatch):
    monkeypatch.setattr(os, "confstr_names", {})
    monkeypatch.setattr(sys, "orig_argv", ["python", "script.py"])
    monkeypatch.setattr(os, "execv", lambda *arguments: pytest.fail("it was started again"))
    monkeypatch.delenv(engine.VARIABLE, raising=False)
    engine.large_pages("script.py")
    assert engine.VARIABLE not in os.environ


@glibc
def test_the_launcher_asks_for_it_before_it_imports_anything_heavy(tmp_path):
    spy = (
        "import os, sys\n"
        "def again(*_): print('again', sorted({'jax', 'numpy', 'absl'} & sys.modules.keys())); os._exit(0)\n"
        "os.execv = again\n"
    )
    (tmp_path / "sitecustomize.py").write_text(spy)
    assert lines("-u", str(ROOT / "launch.py"), "--help", PYTHONPATH=f"{tmp_path}:{ROOT}") == ["again []"]

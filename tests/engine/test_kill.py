"""SIGKILL at any moment: what comes out of the run that is started again is that of one that nothing disturbed."""

import os
import re
import signal
import subprocess
import sys

import jax.numpy as jnp
import kill
import killed_run
import pytest

from experiments.engine import checkpoint, disk, workdir

# A process of its own that compiles one program and keeps it; the limit is that of the bytes of a file.
COMPILES = """
import resource, signal, sys
import jax
from experiments.engine import compilation
compilation.keep_in(sys.argv[1])
hits = []
jax.monitoring.register_event_listener(lambda event, **more: hits.append(event.endswith("/cache_hits")))
limit = int(sys.argv[2])
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL if sys.argv[3] == "dies" else signal.SIG_IGN)
print(jax.jit(lambda x: x * 2 + 1)(3.0), sum(hits))
"""
LIMIT = 500  # bytes, of the more than 1000 of the entry


def plain(**more):
    """The environment of a command that a person types, with one device; it compiles as fast as the tests."""
    kept = {name: value for name, value in os.environ.items() if name not in ("JAX_ENABLE_COMPILATION_CACHE",)}
    flags = os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=1")
    return kept | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"} | more


def compiled(folder, limit=0, then=""):
    command = [sys.executable, "-c", COMPILES, str(folder), str(limit), then]
    told = subprocess.run(command, cwd=killed_run.ROOT, env=plain(), capture_output=True, text=True, timeout=120)
    return told.returncode, told.stdout, told.stderr


def entries(folder):
    return {file.name: file.stat().st_size for file in folder.iterdir() if file.name.endswith("-cache")}


def test_three_kills(tmp_path):
    """In a save, between steps, and behind the last one, over three epochs and with both sizes of batches."""
    config = kill.small_config(tmp_path, train__steps=24, train__growth=[[12, 24]], train__evaluate_every=12)
    options = {"kills": 3, "seed": 1664, "environment": plain(), "cache": "compiled", "say": lambda line: None}
    assert kill.survive(config, tmp_path, **options).total() == 3


@pytest.mark.slow
def test_fifty_kills(tmp_path):
    found = kill.survive(kill.small_config(tmp_path), tmp_path, kills=50, environment=plain())
    assert found.total() == 50
    assert found[killed_run.SAVING] >= 10 and found[killed_run.STEPS] and found[killed_run.END]
    assert found[killed_run.START] and found[killed_run.COMPILING]


@pytest.mark.slow
def test_kills_on_eight_devices(tmp_path):
    several = plain(XLA_FLAGS=os.environ["XLA_FLAGS"])
    mesh = [f"--config.mesh.{axis}=2" for axis in ("data", "fsdp", "tensor")]
    assert kill.survive(kill.small_config(tmp_path), tmp_path, kills=6, more=mesh, environment=several).total() == 6


@pytest.mark.slow
def test_a_kill_before_each_change_of_a_file(tmp_path):
    """The run is one of two steps, of which each is saved and one is kept: some 75 changes."""
    command = [sys.executable, "tests/kill_at_files.py", str(tmp_path)]
    told = subprocess.run(command, cwd=killed_run.ROOT, env=plain(), capture_output=True, text=True)
    assert told.returncode == 0, told.stdout + told.stderr
    tried = re.search(r"killed before (\d+) of (\d+) changes of files: 0 failed", told.stdout)
    assert tried and int(tried[1]) == int(tried[2]) > 60


@pytest.mark.parametrize("left", [f"config.json.0123abcd{disk.DRAFT}", "config.json.tmp"])
def test_a_run_killed_before_its_config_was_in_place_can_be_started_again(tmp_path, left):
    """The latter by an older version, which gave drafts this name."""
    config = {"train": {"steps": 3}}
    (tmp_path / left).write_bytes(disk.as_json(config)[:9])
    assert not workdir.enter(tmp_path, config)
    assert (tmp_path / "config.json").read_bytes().startswith(b'{\n  "config": ')
    assert (tmp_path / left).exists() == (not left.endswith(disk.DRAFT))


def test_what_a_killed_run_had_still_to_remove_is_removed(tmp_path):
    """After the last step there is no further save that would do it."""
    for keep in (3, 1):
        saves = checkpoint.Checkpoints(tmp_path, keep=keep)
        for step in (1, 2, 3) if keep == 3 else ():
            saves.save(step, {"x_D": jnp.full(5, step)})
        assert saves.resume({"x_D": jnp.zeros(5, int)}, fall_back=False)[0] == 3
        saves.close()
        assert sorted(file.name for file in tmp_path.iterdir()) == [str(step) for step in range(4 - keep, 4)]


def test_death_while_a_compiled_program_is_written_does_no_lasting_harm(tmp_path):
    code, out, _ = compiled(tmp_path, LIMIT, "dies")
    assert (code, out) == (-signal.SIGXFSZ, "")
    cut = entries(tmp_path)
    assert LIMIT in cut.values()
    code, out, err = compiled(tmp_path)
    assert (code, err) == (0, "") and out.endswith("\n7.0 0\n")
    assert re.fullmatch(
        r"the compiled program jit_\S+ was not kept whole, and is compiled anew\n", out.removesuffix("7.0 0\n")
    )
    assert entries(tmp_path).keys() >= cut.keys() and LIMIT not in entries(tmp_path).values()
    code, out, err = compiled(tmp_path)
    assert (code, err) == (0, "") and re.fullmatch("7.0 [1-9]\n", out)


def test_a_compiled_program_that_does_not_fit_on_the_disk(tmp_path):
    code, out, err = compiled(tmp_path, LIMIT, "goes on")
    assert (code, err) == (0, "") and "cannot be kept: [Errno 27] File too large\n" in out and out.endswith("7.0 0\n")
    assert not entries(tmp_path)

"""What is compiled how often, and that a program from the cache computes the same bits."""

import json
import os
import pathlib
import subprocess
import sys
import tempfile

import jax
import matplotlib
import pytest
import tiny

from experiments import vision
from experiments.engine import batches, compilation, errors, log, mesh

ROOT = pathlib.Path(__file__).parents[2]
CHANGES = {"image.patch": 4, "model.M": 1, "model.D": 8, "model.H": 2, "train.batch_size": 16, "train.steps": 6}
CHANGES |= {"train.log_every": 1, "train.evaluate_batch": 64, "train.evaluate_every": 2, "train.save_every": 2}
CHANGES |= {"optim.warmup_steps": 1, "mesh.data": 2, "train.spike": 6.0}
BACKEND = "/jax/core/compile/backend_compile_duration"
compilations: list[str] = []  # the names of what has been compiled


@pytest.fixture(scope="module", autouse=True)
def listening():
    def listen(event, seconds, **about):
        if event == BACKEND:
            compilations.append(about["fun_name"])

    jax.monitoring.register_event_duration_secs_listener(listen)  # there is no public way to take it back


class Stopped(Exception):
    """The machine goes away."""


def test_one_compilation_for_each_shape_through_evaluations_saves_and_a_resume(tmp_path, monkeypatch):
    monkeypatch.setattr(compilation, "measured_peak", lambda *, devices: 1e9)
    monkeypatch.setattr(vision, "figures", lambda *arguments: [])
    arguments = ("--config", tiny.config_file(tmp_path, "vision", **CHANGES), "--workdir", str(tmp_path / "run"))
    seen, whole = {}, batches.iterate

    def iterate(dataset, *, start):
        for n, batch in enumerate(whole(dataset, start=start), start + 1):
            seen[n] = len(compilations)
            if n == 6 and start == 0:
                raise Stopped
            yield batch

    monkeypatch.setattr(batches, "iterate", iterate)
    compilations.clear()
    with pytest.raises(Stopped):
        tiny.run(*arguments)
    assert compilations.count("jit(step)") == compilations.count("jit(sums)") == 1
    assert seen[2] == seen[1] and seen[3] > seen[2]  # the first evaluation comes behind step 2
    assert seen[6] == seen[5] == seen[4] == seen[3]  # another one, and a save, behind step 4
    seen.clear()
    compilations.clear()
    assert tiny.run(*arguments).code == 0
    assert compilations.count("jit(step)") == compilations.count("jit(sums)") == 1
    assert list(seen) == [5, 6] and seen[6] == seen[5]


# The cache


def launched(folder, *more, cache):
    """The summary of a run in a process of its own, with this cache folder."""
    # Strings are hashed alike: JAX 0.8 numbers the functions of a program as they lie in its sets of strings.
    environment = os.environ | {"PYTHONHASHSEED": "0"}
    environment |= {"JAX_ENABLE_COMPILATION_CACHE": "true", "XDG_CACHE_HOME": str(cache)}
    environment["MPLCONFIGDIR"] = matplotlib.get_cachedir()  # or its fonts are looked for anew, with a warning
    environment.pop(compilation.FOLDER, None)
    config = tiny.config_file(
        folder.parent, "vision", **(CHANGES | {"optim.schedule": "constant", "train.evaluate_every": 0})
    )
    command = [sys.executable, str(ROOT / "launch.py"), "--config", config, "--workdir", str(folder), *more]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    spoken = [line for line in ended.stderr.splitlines() if not line.startswith("WARNING:absl:")]  # Grain, on old JAX
    assert (ended.returncode, spoken) == (0, [])
    return json.loads((folder / "summary.json").read_text())


def entries(cache):
    return sorted(file.name for file in cache.rglob("*-cache"))


def test_a_second_start_takes_its_programs_from_the_cache_and_computes_the_same_bits(tmp_path):
    """Against a run that found nothing there, one that stops at half and goes on, with programs from the cache."""
    cache = tmp_path / "cache"
    first = launched(tmp_path / "a", cache=cache)
    kept = entries(cache / "tfm" / "compiled")
    assert any("jit_step" in name for name in kept)
    half = launched(tmp_path / "b", "--config.train.steps=3", cache=cache)
    second = launched(tmp_path / "b", cache=cache)
    assert entries(cache) == kept and max(half["compile_seconds"], second["compile_seconds"]) < first["compile_seconds"]
    assert first["params_sha256"] == second["params_sha256"] != half["params_sha256"]
    losses = [[row["train/loss"] for row in log.read(tmp_path / name) if "train/loss" in row] for name in ("a", "b")]
    assert losses[0] == losses[1] and len(losses[0]) == 6


@pytest.fixture
def settings_of_jax(monkeypatch):
    """The cache is allowed, and what a test sets is set back."""
    names = ("jax_enable_compilation_cache", "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update("jax_enable_compilation_cache", True)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def test_where_programs_are_kept(settings_of_jax, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(compilation.FOLDER, raising=False)
    compilation.keep_in("user")
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "cache" / "tfm" / "compiled")
    monkeypatch.setenv(compilation.FOLDER, str(tmp_path / "own"))
    compilation.keep_in("user")
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "own")
    compilation.keep_in(str(tmp_path / "given"))
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "given") and (tmp_path / "given").is_dir()
    assert jax.config.jax_enable_compilation_cache and capsys.readouterr().out == ""
    compilation.keep_in("")
    assert not jax.config.jax_enable_compilation_cache
    compilation.keep_in(str(tmp_path / "more"))  # as under JAX_ENABLE_COMPILATION_CACHE=false
    assert not (tmp_path / "more").exists()


def test_a_folder_that_cannot_be_written(settings_of_jax, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    with pytest.raises(errors.UserError, match="compilation_cache = .*: the folder cannot be written"):
        compilation.keep_in(str(tmp_path / "file" / "a"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.delenv(compilation.FOLDER, raising=False)
    before = jax.config.jax_compilation_cache_dir
    compilation.keep_in("user")
    assert "compiled programs are not kept: " in capsys.readouterr().out
    assert jax.config.jax_compilation_cache_dir == before


def test_what_runs_once_is_compiled_quickly_and_as_xla_flags_say(monkeypatch):
    assert compilation.for_one_run(mesh.make()) == {}  # the tests' own level, which is lower
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    assert compilation.for_one_run(mesh.make()) == {"xla_backend_optimization_level": 1}


def test_the_tests_write_nothing_into_the_cache_of_the_user():
    where = pathlib.Path(os.environ[compilation.FOLDER])
    assert where.parent == pathlib.Path(tempfile.gettempdir()) and where.name.startswith("tfm-compiled-")

"""What is compiled how often, and that a program from the cache computes the same bits."""

import os
import pathlib
import tempfile

import jax
import pytest
from checkpoints import saved
from resuming import Stopped, run

from experiments.engine import batches, compilation, mesh

BACKEND = "/jax/core/compile/backend_compile_duration"
compilations: list[str] = []  # the names of what has been compiled


@pytest.fixture(scope="module", autouse=True)
def listening():
    def listen(event, seconds, **about):
        if event == BACKEND:
            compilations.append(about["fun_name"])

    jax.monitoring.register_event_duration_secs_listener(listen)  # there is no public way to take it back


def test_one_compilation_for_each_shape_through_evaluations_saves_and_a_resume(tmp_path, monkeypatch):
    changes = {"train__steps": 6, "train__evaluate_every": 2, "train__save_every": 2}
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
        run(tmp_path / "run", **changes)
    assert compilations.count("jit(train_step)") == compilations.count("jit(held_out)") == 1
    assert seen[2] == seen[1] and seen[3] > seen[2]  # the first evaluation comes behind step 2
    assert seen[6] == seen[5] == seen[4] == seen[3]  # another one, and a save, behind step 4
    seen.clear()
    compilations.clear()
    run(tmp_path / "run", **changes)
    assert compilations.count("jit(train_step)") == compilations.count("jit(held_out)") == 1
    assert list(seen) == [5, 6] and seen[6] == seen[5]


def test_small_arrays_that_devices_share_are_saved_in_one_piece(tmp_path):
    """Orbax's pieces are programs: of a shape that no other test has, so that they would be compiled here."""
    compilations.clear()
    saved(tmp_path, layout="8 whole", D=72)
    assert "jit(slice)" not in compilations


@pytest.fixture
def settings_of_jax(monkeypatch):
    """The cache is allowed, and what a test sets is set back."""
    names = ("jax_enable_compilation_cache", "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update("jax_enable_compilation_cache", True)
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation.compilation_cache.reset_cache()


def test_a_second_start_takes_its_programs_from_the_cache(settings_of_jax, tmp_path, monkeypatch):
    monkeypatch.setenv(compilation.FOLDER, str(tmp_path / "cache"))
    hits, values = [], []
    jax.monitoring.register_event_listener(lambda event, **more: hits.append(event) if "cache_hits" in event else None)
    for _ in range(2):
        compilation.keep()
        values.append((float(jax.jit(lambda x: jax.numpy.tanh(x) * 2 + 1)(3.0)), len(hits) > 0))  # unknown to jit
    (first, hit), (second, again) = values
    assert first == second and (hit, again) == (False, True) and any((tmp_path / "cache").iterdir())


def test_where_programs_are_kept(settings_of_jax, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(compilation.FOLDER, raising=False)
    compilation.keep()
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "cache" / "tfm" / "compiled")
    monkeypatch.setenv(compilation.FOLDER, str(tmp_path / "own"))
    compilation.keep()
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "own")
    assert (tmp_path / "own").is_dir() and capsys.readouterr().out == ""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(compilation.FOLDER, str(tmp_path / "file" / "below"))
    compilation.keep()
    assert "compiled programs are not cached: " in capsys.readouterr().out
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "own")
    compilation.keep_nothing()
    monkeypatch.setenv(compilation.FOLDER, str(tmp_path / "more"))
    compilation.keep()  # as under JAX_ENABLE_COMPILATION_CACHE=false
    assert not jax.config.jax_enable_compilation_cache and not (tmp_path / "more").exists()


def test_what_runs_once_is_compiled_quickly_and_as_xla_flags_say(monkeypatch):
    assert compilation.for_one_run(mesh.make()) == {}  # the tests' own level, which is lower
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    assert compilation.for_one_run(mesh.make()) == {"xla_backend_optimization_level": 1}


def test_the_tests_write_nothing_into_the_cache_of_the_user():
    where = pathlib.Path(os.environ[compilation.FOLDER])
    assert where.parent == pathlib.Path(tempfile.gettempdir()) and where.name.startswith("tfm-compiled-")

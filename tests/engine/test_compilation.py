"""Compilation: the backend, what is compiled how often and kept, FLOPs against E29, and memory, checked before use."""

import os
import pathlib
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from checkpoints import saved
from errors import raises
from resuming import Stopped, run

from experiments.engine import batches, compilation, disk, errors, mesh, train_step

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


HELD = "Unable to initialize backend 'tpu': ABORTED: The TPU is already in use by process with pid 71."


@pytest.fixture
def platforms():
    """A function that sets JAX's flag; afterwards it is as before."""
    before = jax.config.jax_platforms
    yield lambda value: jax.config.update("jax_platforms", value)
    jax.config.update("jax_platforms", before)


@pytest.mark.parametrize("device", ["gpu", "tpu", "npu"])
def test_a_device_that_is_not_available_is_refused(tmp_path, device):
    file = tiny.config_file(tmp_path, "vision", **tiny.TRAIN)
    outcome = tiny.run("--config", file, "--workdir", str(tmp_path / "run"), f"--device={device}")
    assert (outcome.code, outcome.out) == (2, "") and not (tmp_path / "run").exists()
    assert device in outcome.err and ("runtime" in outcome.err) == (device == "tpu")


def test_a_tpu_in_use_is_an_error_in_jaxs_words_with_a_hint(platforms, monkeypatch):
    def default_backend():
        if jax.config.jax_platforms == "cpu":
            return "cpu"
        raise RuntimeError(f"{HELD}\nand more")

    monkeypatch.setattr(jax, "default_backend", default_backend)
    for device in ("any", "tpu"):
        platforms(None)
        with raises(errors.UserError, HELD, "--device=cpu") as caught:
            compilation.start(device)
        assert "and more" not in str(caught.value)
    compilation.start("cpu")


def test_a_dry_run_of_a_larger_mesh_has_fake_devices(monkeypatch):
    sizes = {"data": -1, "fsdp": 2, "tensor": 4}
    assert compilation.split(sizes, "any", fake=True) is None  # the tests have eight devices
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    fake = compilation.split(sizes, "any", fake=True)
    assert mesh.make(fsdp=2, tensor=4, devices=fake).devices.size == 8
    with raises(errors.UserError, "mesh", 8192):
        compilation.split({"data": 4096, "fsdp": 2}, "any", fake=True)


def test_the_memory_of_the_host(tmp_path, monkeypatch):
    assert 2**20 < disk.host_memory() < 2**50
    (tmp_path / "meminfo").write_text("MemTotal:  9000 kB\nMemAvailable:  7000 kB\n")
    (tmp_path / "max").write_text("max\n")
    monkeypatch.setattr(disk, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(disk, "GROUP", tmp_path / "max")
    assert disk.host_memory() == 7000 * 1024
    (tmp_path / "max").write_text("5000\n")
    assert disk.host_memory() == 5000
    monkeypatch.setattr(disk, "MEMINFO", tmp_path / "nothing")
    monkeypatch.setattr(disk, "GROUP", tmp_path / "nothing")
    assert 2**20 < disk.host_memory()  # what the system itself says, or no limit


def test_what_does_not_fit_is_refused(monkeypatch):
    disk.check_memory("this", 5000, 5000)
    with raises(errors.UserError, "this", "3 GiB", "1.25 MiB", "less"):
        disk.check_memory("this", 3 * 2**30, 2**20 + 2**18, ": less")
    monkeypatch.setattr(disk, "host_memory", lambda: 100)
    disk.check_memory("this", 100)
    with raises(errors.UserError, "101 bytes", "100 bytes"):
        disk.check_memory("this", 101)
    sizes = {1000: "1,000 bytes", 1024: "1 KiB", 12345678: "11.8 MiB", 999.7 * 2**20: "1,000 MiB"}
    assert {n: disk.size(n) for n in sizes} == sizes
    assert compilation.tree_bytes({"a": jnp.ones((3, 5)), "b": (np.int8(1), None)}) == 61


def test_a_state_is_counted_once_for_each_device_that_holds_it(monkeypatch):
    """D = 5, C = 3: 18 parameters of 4 bytes, as many gradients; no moments; step and key have 12 bytes."""
    task, devices = tiny.linear_task(), mesh.make(data=8)
    state = train_step.abstract_state(task, optax.sgd(0.1), mesh=devices)
    needed = 8 * (2 * 18 * 4 + 4 + jax.random.key(0).dtype.itemsize)
    monkeypatch.setattr(disk, "host_memory", lambda: needed)
    compilation.check_state(state, devices, described=False)
    monkeypatch.setattr(disk, "host_memory", lambda: needed - 1)
    with raises(errors.UserError, "8 devices"):
        compilation.check_state(state, devices, described=False)
    compilation.check_state(state, devices, described=True)  # of a mesh that is only described
    monkeypatch.setattr(compilation, "UNLIMITED", needed // 8 - 1)
    with raises(errors.UserError, "memory"):
        compilation.check_state(state, devices, described=True)


def test_batches_are_refused_before_they_are_made(monkeypatch):
    asked = []

    def fetch(index_B, rng):
        asked.append(len(index_B))
        return {"x_BD": np.zeros((len(index_B), 125)), "y_B": index_B}  # 1008 bytes

    monkeypatch.setattr(disk, "host_memory", lambda: 1008 * 200)
    batches.train(fetch, n=10**6, batch=20, seed=0)
    batches.evaluation(fetch, n=10**6, batch=100)
    for growth in ((), [[5, 21]]):
        with raises(errors.UserError, "210 examples", "1008 bytes"):
            batches.train(fetch, n=10**6, batch=20 if growth else 21, seed=0, growth=growth)
    with raises(errors.UserError, "202 examples", "1008 bytes"):
        batches.evaluation(fetch, n=10**6, batch=101)
    assert set(asked) == {1}


def test_a_model_of_absurd_size_is_refused_before_it_is_made(tmp_path):
    file = tiny.config_file(tmp_path, "vision", **tiny.MODEL | {"image.patch": 4, "model.F": 2000000000})
    outcome = tiny.run("--config", file, "--workdir", str(tmp_path / "run"))
    assert outcome.code == 2 and "TiB of memory" in outcome.err and "make model.D" in outcome.err
    assert not (tmp_path / "run").exists()


def test_a_step_is_refused_where_it_would_take_more_than_there_is(monkeypatch):
    devices = mesh.make(data=8)
    product = jax.jit(lambda x_BD: (x_BD @ x_BD.T) @ x_BD).lower(jax.ShapeDtypeStruct((101, 3), np.float32)).compile()
    needed = 8 * product.memory_analysis().temp_size_in_bytes
    assert needed >= 8 * 101 * 101 * 4
    monkeypatch.setattr(disk, "host_memory", lambda: needed)
    compilation.check_step(product, devices)
    monkeypatch.setattr(disk, "host_memory", lambda: needed - 1)
    with raises(errors.UserError, "training step", "8 devices"):
        compilation.check_step(product, devices)


def test_a_run_whose_step_takes_too_much_stops_before_it(tmp_path, monkeypatch):
    """Of a MiB: state and batches fit, and what is computed of two examples on each of 8 devices does not."""
    monkeypatch.setattr(disk, "host_memory", lambda: 2**20)
    task = tiny.linear_task()

    def loss(params, batch, **options):
        large_BX = jnp.cumsum(jnp.repeat(batch["x_BD"], 50_000, axis=1), axis=1)
        measures, aux = task.loss(params, batch)
        return measures | {"large": (large_BX.max(), jnp.float32(1))}, aux

    with raises(errors.UserError, "training step", "8 devices"):
        tiny.trained(tmp_path / "run", task._replace(loss=loss), mesh__data=8)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()

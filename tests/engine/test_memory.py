"""Memory is looked at before anything is allocated, and what does not fit is refused in one sentence."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tiny
from errors import raises

from experiments.engine import batches, compilation, disk, errors, mesh, train_step


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

"""Numbers of the parameters that are logged while a model trains: the probe of a task, such as symmetry."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from errors import raises

from experiments.config import errors
from experiments.devices import mesh as meshes
from experiments.engine import run as runs, run_plan, train_step
from experiments.folder import checkpoint, records
from experiments.model import probe


def run_steps(mesh, **options):
    """Return the metrics of six steps of the linear task, and how often the probe was computed."""
    calls = []

    def probe(params):
        jax.debug.callback(lambda: calls.append(1))
        return {"size": jnp.sum(jnp.square(params["G_CD"]))}

    task, (rate, optimiser) = tiny.linear_task()._replace(probe=probe), tiny.adamw()
    state, metrics = train_step.initial_state(task, optimiser, seed=0, mesh=mesh), []
    step = train_step.update(task=task, optimiser=optimiser, rate=rate, mesh=mesh, **options)
    for i in range(6):
        batch = dict(task.train[i])
        if i == 2:
            batch["x_BD"] = np.full_like(batch["x_BD"], np.nan)
        state, numbers = step(state, meshes.place_batch(mesh, batch))
        metrics.append(jax.device_get(numbers) | {"size": np.square(state.params["G_CD"]).sum()})
    jax.effects_barrier()
    return metrics, len(calls)


def test_the_probe_is_computed_after_the_steps_that_are_due_and_no_others():
    mesh = meshes.make(data=1)
    rows, calls = run_steps(mesh, accumulation=2, nan="skip", probe_due=lambda n: run_plan.is_due(n, every=3, steps=5))
    sizes = [metrics["probe/size"] for metrics in rows]
    assert calls == 3 and sizes[0] == sizes[1] == sizes[3] == 0
    assert [sizes[n - 1] for n in (3, 5, 6)] == pytest.approx([rows[n - 1]["size"] for n in (3, 5, 6)])
    assert rows[2]["skipped"] == 1 and rows[2]["size"] == rows[1]["size"]  # a skipped step counts
    plain, calls = run_steps(mesh, accumulation=2, nan="skip")
    assert calls == 0
    for row, probed_row in zip(plain, rows, strict=True):
        np.testing.assert_equal(row, {name: x for name, x in probed_row.items() if name != "probe/size"})


def test_the_steps_that_are_due_include_the_last():
    assert [n for n in range(1, 8) if run_plan.is_due(n, every=3, steps=7)] == [3, 6, 7]
    assert [n for n in range(1, 8) if run_plan.is_due(n, every=0, steps=7)] == [7]


def test_the_probe_has_the_same_numbers_on_eight_devices_as_on_one():
    settings = tiny.settings("vision", image__patch=4, model__H=4, model__D=32, model__K=3)
    measure = probe.symmetry_metrics(settings.model)
    measures = []
    for mesh in (meshes.make(data=2, fsdp=2, tensor=2), meshes.make(data=1)):
        task = tiny.work_of(settings, mesh).task
        params = jax.tree.map(np.array, tiny.draw_params(task))
        params["blocks"]["score"]["Uq_HKD"][..., 5] *= 9  # a direction
        sharded = jax.device_put(params, meshes.shardings(mesh, params, task.layout))
        assert sharded["blocks"]["score"]["Uq_HKD"].is_fully_replicated == (mesh.size == 1)
        measures.append({name: float(x) for name, x in jax.jit(measure)(sharded).items()})
    assert measures[0] == pytest.approx(measures[1], rel=1e-4, abs=1e-5)
    assert all(abs(x) > 1e-3 for x in measures[1].values())


def test_a_run_logs_the_probe_with_the_loss_and_logs_the_same_after_a_resume(tmp_path, capsys):
    task = tiny.linear_task()._replace(probe=lambda params: {"size": jnp.sum(jnp.square(params["G_CD"]))})
    changes = dict(log=["tensorboard", "symmetry"], train__save_every=3, train__log_every=2, mesh__data=1)
    tiny.train(tmp_path, task, **changes)
    rows = records.read_metrics(tmp_path)
    sizes = {row["step"]: row["size"] for row in rows if "train/loss" in row}
    assert sorted(sizes) == [2, 4, 5] and len(set(sizes.values())) == 3
    assert sizes[5] == pytest.approx(np.square(checkpoint.parameters(tmp_path / "checkpoints", 5)["G_CD"]).sum())
    assert not any(name.startswith(("train/probe", "train/size")) for row in rows for name in row)
    shutil.rmtree(tmp_path / "checkpoints" / "5")
    (tmp_path / "summary.json").unlink()
    tiny.train(tmp_path, task, **changes)
    assert "at step 3" in capsys.readouterr().out and records.read_metrics(tmp_path) == rows


def test_a_run_without_a_probe_cannot_log_it():
    settings = tiny.settings("vision", model__score="constant", log=["symmetry"], mesh__data=1, image__patch=4)
    with raises(errors.UserError, "log", "symmetry"):
        run_plan.make_plan(settings, tiny.task_of(settings), runs.make_mesh(settings))


def test_debug_nans_finds_no_nan_in_steps_without_a_probe():
    with jax.debug_nans(True):
        mesh = meshes.make(data=1)
        task, (rate, optimiser) = tiny.linear_task(), tiny.adamw()
        task = task._replace(probe=lambda params: {"x": 1.0 + params["b_C"][0]})
        state = train_step.initial_state(task, optimiser, seed=0, mesh=mesh)
        options = {"task": task, "optimiser": optimiser, "rate": rate, "mesh": mesh, "accumulation": 1}
        step = train_step.update(**options, probe_due=lambda n: n == 2)
        assert float(step(state, task.train[0])[1]["probe/x"]) == 0

"""The switches of config.debug: what each finds, and that none changes a number."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from experiments.engine import compilation, debug, errors, log, loop
from experiments.engine import run as runs


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setattr(compilation, "measured_peak", lambda *, devices: 1e9)

    def run(name, *, task=None, **changes):
        """(sha256 of the last parameters, log) of three steps with an evaluation and a save after each."""
        quick = {"train__steps": 3, "train__log_every": 1, "train__save_every": 1, "train__evaluate_every": 1}
        settings = tiny.settings("vision", model=False, **({"mesh__data": 2} | quick | changes))
        assert settings.experiment
        made = task or tiny.linear_task()
        work = runs.Work(made, lambda params, folder, rows: [])
        runs.run(settings, tmp_path / name, work, runs.devices(settings))
        return json.loads((tmp_path / name / "summary.json").read_text())["params_sha256"], log.read(tmp_path / name)

    return run


def task_that(change):
    """The linear task with a measure of which this function changes the loss: (loss, params) -> loss."""
    task = tiny.linear_task()

    def loss_and_metrics(params, batch, key_B, *layout):
        ratios = task.loss_and_metrics(params, batch, key_B, *layout)
        total, count = ratios["loss"]
        return ratios | {"loss": (change(total, params), count)}

    return task._replace(loss_and_metrics=loss_and_metrics)


def test_no_switch_changes_a_number_and_nothing_moves_unasked_between_host_and_devices(run):
    """The whole loop, with logs, evaluations and saves, under transfer_guard = disallow."""
    plain = run("plain")
    for name, switches in {
        "guarded": {"debug__transfer_guard": "disallow", "debug__check_shapes": True, "train__spike": 6.0},
        "nans": {"debug__nans": True},
    }.items():
        assert run(name, **switches) == plain if name == "nans" else run(name, **switches)[0] == plain[0]


def test_the_transfer_guard_is_on_in_the_loop_and_off_behind_it(run):
    def task():
        table = np.arange(3, dtype=np.float32)
        return tiny.linear_task()._replace(evaluation=[_Moves(table)])

    with pytest.raises((errors.RunError, RuntimeError), match="[Dd]isallowed host-to-device transfer"):
        run("a", task=task(), debug__transfer_guard="disallow")
    jnp.add(np.ones(3), 1)  # no longer guarded


class _Moves(dict):
    """A batch that, when it is placed, has something else moved to the device without being asked to."""

    def __init__(self, table):
        super().__init__(tiny.linear_task().evaluation[0])
        self._table = table

    def items(self):
        jnp.add(self._table, 1)
        return super().items()


def test_nans_names_the_operation_and_the_line(run):
    bad = task_that(lambda total, params: total + jnp.log(-1 - jnp.sum(jnp.square(params["G_CD"]))))
    with pytest.raises(errors.RunError, match=r"debug.nans: [Ii]nvalid value \(nan\) encountered") as caught:
        run("a", task=bad, debug__nans=True)
    lines = pathlib.Path(__file__).read_text().splitlines()
    line = next(n for n, text in enumerate(lines, 1) if "+ jnp.log(-1 -" in text)
    assert f"test_debug.py, line {line} " in str(caught.value) and "\n" not in str(caught.value)
    assert not jax.config.jax_debug_nans


def test_no_jit_computes_one_operation_after_the_other_and_compiles_no_step_ahead(run, monkeypatch):
    seen, few = [], {"mesh__data": 1, "train__save_every": 0, "train__evaluate_every": 0}

    def look(total, params):
        seen.append(isinstance(params["G_CD"], jax.core.Tracer))
        return total

    task = task_that(look)._replace(evaluation=tiny.linear_task(n_evaluation=8).evaluation)
    # Inside shard_map and grad a value is traced in any case; but not once for all steps.
    _, expected = run("compiled", task=task, **few)
    compiled = len(seen)
    seen.clear()
    monkeypatch.setattr(compilation, "ahead", None)
    _, rows = run("interpreted", task=task, debug__no_jit=True, **few)
    assert len(seen) > compiled
    np.testing.assert_allclose(
        [row["train/loss"] for row in rows if "train/loss" in row],
        [row["train/loss"] for row in expected if "train/loss" in row],
        rtol=1e-5,
    )


def test_check_shapes_names_the_batch_that_is_not_as_its_letters_say(run):
    task = tiny.linear_task()
    longer = task._replace(train=task.train.map(lambda batch: batch | {"other_B": batch["label_B"][:8]}))
    run("unchecked", task=longer)
    with pytest.raises(errors.RunError, match="debug.check_shapes: in a batch, B is 8 in other_B but 16 in "):
        run("a", task=longer, debug__check_shapes=True)
    flat = task._replace(train=task.train.map(lambda batch: batch | {"other_BN": batch["label_B"]}))
    with pytest.raises(errors.RunError, match=r"in a batch, other_BN has shape \(16,\), but its name asks for .*'BN'"):
        run("b", task=flat, debug__check_shapes=True)


def test_check_shapes_looks_at_every_batch_and_at_the_state_after_each_step():
    batches = debug.checked_batches(iter([{"x_B": np.zeros(2), "y_B": np.zeros(n)} for n in (2, 3)]))
    next(batches)
    with pytest.raises(errors.RunError, match="debug.check_shapes: in a batch, B is"):
        next(batches)

    def step(state, batch, alive):
        return {"G_CD": jnp.zeros((3, 5)), "b_C": jnp.zeros(4)}, {}

    with pytest.raises(errors.RunError, match="debug.check_shapes: in the state, C is"):
        debug.checked_step(step)({}, {}, True)


def test_a_transfer_guard_that_there_is_not(run, tmp_path):
    with pytest.raises(errors.UserError, match='unknown debug.transfer_guard "deny"'):
        run("a", debug__transfer_guard="deny")
    assert not (tmp_path / "a").exists()


# What a device says


def test_a_device_that_is_out_of_memory_is_one_sentence():
    with pytest.raises(errors.RunError, match="ran out of memory: --dry_run shows what the step needs") as caught:
        with loop.device_errors():
            jax.block_until_ready(jnp.zeros(2**50, jnp.int8))
    assert "\n" not in str(caught.value)


def test_another_error_of_a_device_is_one_sentence_and_one_of_the_program_is_not_hidden():
    with pytest.raises(errors.RunError, match="^a device, or the way to another one, failed: INTERNAL: it broke$"):
        with loop.device_errors():
            raise jax.errors.JaxRuntimeError("INTERNAL: it broke\nstack")
    with pytest.raises(RuntimeError, match="^my own$"), loop.device_errors():
        raise RuntimeError("my own")

"""A step whose loss, gradient or parameters are not finite changes nothing: train.nan, messages of a run."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from errors import raises

from experiments.config import errors
from experiments.devices import mesh as meshes
from experiments.engine import loop, optim, train_step
from experiments.folder import checkpoint, records

BAD, DEVICES = 7, 2


def add_factor(task):
    """Return the task with a running mean and a loss that is multiplied by the batch's factor_B."""

    def loss(params, batch, *, key_B=None, layout=None):
        measures, aux = task.loss(params, batch)
        if key_B is None:
            return measures, aux
        total, count = measures["loss"]
        losses = {"loss": (total * jnp.max(batch["factor_B"]), count)}
        return measures | losses, {"running": {"mean_D": batch["x_BD"].mean(0)}}

    def init(key):
        return task.init(key) | {"mean_D": jnp.zeros(tiny.D)}

    return task._replace(loss=loss, init=init)


def with_factor(batch, value):
    """Return the batch with factor_B = value for the example BAD, and 1 for the others."""
    return batch | {"factor_B": np.where(batch["example_B"] == BAD, np.float32(value), np.float32(1))}


TASK = add_factor(tiny.linear_task())
BAD_STEP = next(i for i in range(20) if BAD in TASK.train[i]["example_B"])  # the first batch with BAD, counted from 0


@functools.cache
def make_step(rate=None, **options):
    """Return (step, fresh). step(state, i, factor, alive) trains on batch i; fresh() returns an initial state."""
    rate = rate or optim.schedule("linear", peak=0.1, steps=50, warmup_steps=3)
    optimiser = optim.adamw(rate, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, clip=1.0)
    mesh = meshes.make(data=DEVICES)
    update = train_step.update(task=TASK, optimiser=optimiser, rate=rate, mesh=mesh, accumulation=1, **options)

    def step(state, i, factor, *alive):
        return update(state, meshes.place_batch(mesh, with_factor(TASK.train[i], factor)), *alive)

    return step, lambda: train_step.initial_state(TASK, optimiser, seed=0, mesh=mesh)


def to_arrays(state, *exclude):
    """Return {path: array} of all leaves. The arrays are copies, because the next step donates the state."""
    leaves = jax.tree_util.tree_leaves_with_path(state.replace(key=jax.random.key_data(state.key)))
    arrays = {jax.tree_util.keystr(path): np.array(leaf) for path, leaf in leaves}
    return {name: leaf for name, leaf in arrays.items() if name not in exclude}


def are_equal(first, second):
    return first.keys() == second.keys() and all(np.array_equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("value", [np.nan, 1e38])  # 1e38: the loss is finite and the gradient's norm is not
def test_abort_leaves_the_state_exactly_as_it_was_and_later_steps_do_nothing(value):
    (step, fresh), alive = make_step(), True
    state = fresh()
    for i in range(BAD_STEP):
        state, metrics = step(state, i, value, alive)
        alive = metrics["alive"]
    assert bool(alive) and "skipped" not in metrics
    before = to_arrays(state)
    for i in (BAD_STEP, BAD_STEP + 1):
        state, metrics = step(state, i, value, alive)
        alive = metrics["alive"]
        assert not bool(alive) and are_equal(to_arrays(state), before)
    assert np.isfinite(float(metrics["loss"]))  # the loss of the step after the bad step
    assert np.any(before[".params['mean_D']"] != 0)


@pytest.mark.parametrize("value", [np.nan, 1e38])
def test_skip_changes_only_the_step_counter_and_training_continues(value):
    step, fresh = make_step(nan="skip")
    state, skip_counts, rates = fresh(), [], []
    for i in range(BAD_STEP + 2):
        before = to_arrays(state, ".step")
        state, metrics = step(state, i, value)
        skip_counts.append(int(metrics["skipped"]))
        rates.append(float(metrics["learning_rate"]))
        assert bool(metrics["alive"]) and are_equal(to_arrays(state, ".step"), before) == (i == BAD_STEP)
    assert skip_counts == [0] * BAD_STEP + [1, 1] and int(state.step) == BAD_STEP + 2
    assert rates[BAD_STEP + 1] == rates[BAD_STEP]  # a skipped step does not advance the schedule
    assert np.all([np.isfinite(leaf).all() for leaf in to_arrays(state).values()])


def infinite_rate(step):
    return jnp.float32(np.inf)


def test_infinite_parameters_are_refused_although_loss_and_gradient_are_finite():
    """Otherwise a checkpoint could have infinite parameters, and train.nan = skip would skip all later steps."""
    step, fresh = make_step(infinite_rate)
    state = fresh()
    before = to_arrays(state)
    state, metrics = step(state, 0, 1)
    assert np.isfinite([float(metrics["loss"]), float(metrics["gradient_norm"])]).all()
    assert not bool(metrics["alive"]) and are_equal(to_arrays(state), before)


@pytest.mark.parametrize(
    ("steps", "nan", "at"),
    [(1, "abort", 1), (5, "abort", 1), (5, "skip", 3)],
    ids=["at the save of the step", "at the loss of the next step", "at the limit of skipped steps"],
)
def test_infinite_parameters_after_a_finite_gradient_end_the_run_and_are_not_saved(
    tmp_path, monkeypatch, steps, nan, at
):
    adamw, huge = optim.adamw, (optax.scale(1e30), optax.scale(1e30))

    @functools.wraps(adamw)
    def make_huge_steps(*arguments, **options):
        return optax.chain(adamw(*arguments, **options), *huge)

    monkeypatch.setitem(optim.OPTIMISERS, "adamw", make_huge_steps)
    changes = {"train__steps": steps, "train__nan": nan, "train__save_every": 0, "optim__schedule": "constant"}
    changes |= {"optim__warmup_steps": 0}
    with raises(errors.RunError, f"step {at}", "parameter", "last checkpoint"):
        tiny.train(tmp_path / "run", tiny.linear_task(), **changes)
    assert not any((tmp_path / "run" / "checkpoints").iterdir())


def test_too_many_skipped_steps_in_a_row_end_the_run(tmp_path, monkeypatch):
    """Only the eighth batch has a finite loss. The eight skipped steps after it end the run."""
    monkeypatch.setattr(loop, "PATIENCE", 8)
    task, good_step = tiny.linear_task(), 7

    def loss(params, batch, *, key_B=None, layout=None):
        measures, aux = task.loss(params, batch)
        is_finite, (total, count) = jnp.all(batch["x_BD"] == 100) | (key_B is None), measures["loss"]
        return measures | {"loss": (jnp.where(is_finite, total, jnp.nan), count)}, aux

    train = task.train.map_with_index(
        lambda n, batch: batch | {"x_BD": batch["x_BD"] * (n != good_step) + 100 * (n == good_step)}
    )
    bad = task._replace(train=train, loss=loss)
    with raises(errors.RunError, "step 16", "8 steps"):
        tiny.train(tmp_path / "run", bad, train__nan="skip", train__steps=20, mesh__data=1)


@pytest.fixture
def train_run(tmp_path):
    """Return a function that trains a task whose loss is NaN in step `bad` (counted from 0)."""
    task = add_factor(tiny.linear_task(n=241))
    task = task._replace(train=task.train.map(lambda batch: with_factor(batch, np.nan)))
    bad = next(i for i in range(15) if BAD in task.train[i]["example_B"])
    assert bad > 0

    def train_run(**changes):
        quick = {"train__steps": bad + 2, "train__log_every": 1, "train__save_every": 0, "mesh__data": DEVICES}
        return tiny.train(tmp_path / "run", task, **(quick | changes)).summary

    train_run.bad, train_run.batch = bad, task.train[bad]
    return train_run


def test_a_run_aborts_with_one_sentence_and_resumes_from_the_state_before_the_step(
    train_run, tmp_path, capsys, monkeypatch
):
    folder, bad = tmp_path / "run", train_run.bad

    def raise_full(self, step, state, metrics=None):
        raise errors.RunError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.Checkpoints, "save", raise_full)
        with raises(errors.RunError, f"step {bad + 1}", "last checkpoint", "the disk is full"):
            train_run()
    examples = ", ".join(str(number) for number in train_run.batch["example_B"][:8].tolist())
    words = [f"step {bad + 1}", "the loss (nan)", "the gradient norm (nan)", "batch/factor_B", examples, "16"]
    words += [f"JAX_DEBUG_NANS=1 python launch.py --config={folder / 'config.json'} --workdir={folder}"]
    with raises(errors.RunError, *words, "train.nan = skip", f"the checkpoint of step {bad}") as caught:
        train_run()
    assert "\n" not in str(caught.value)
    assert [file.name for file in (folder / "checkpoints").iterdir()] == [str(bad)]
    assert [row["step"] for row in records.read_metrics(folder)] == list(range(1, bad + 1))
    assert not (folder / "summary.json").exists()
    # A run that aborted may resume with train.nan = skip. It counts the step that it skips.
    summary = train_run(train__nan="skip", train__steps=bad + 3)
    assert summary["skipped"] == 1 and summary["steps"] == bad + 3
    assert [row["train/skipped"] for row in records.read_metrics(folder) if "train/skipped" in row] == [1] * 3
    assert f"train.steps was {bad + 2} and is {bad + 3}: the rest of the learning" in capsys.readouterr().out

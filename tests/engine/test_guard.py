"""A step whose numbers go wrong changes nothing: what is judged, what is left alone, and what a run says of it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from errors import raises

from experiments.engine import checkpoint, errors, log, loop, mesh as meshes, optim, spikes, train_step as steps

BAD, DEVICES = 7, 2


def guarded(task):
    """The linear task whose loss is multiplied on a device by a number of the batch, and with a running mean."""

    def loss(params, batch, *, key_B=None, layout=None):
        measures, aux = task.loss(params, batch)
        if key_B is None:
            return measures, aux
        total, count = measures["loss"]
        scaled = {"loss": (total * jnp.max(batch["factor_B"]), count)}
        return measures | scaled, {"running": {"mean_D": batch["x_BD"].mean(0)}}

    def init(key):
        return task.init(key) | {"mean_D": jnp.zeros(tiny.D)}

    return task._replace(loss=loss, init=init)


def with_factor(batch, value):
    """A batch whose loss is so many times larger where example BAD is in it."""
    return batch | {"factor_B": np.where(batch["example_B"] == BAD, np.float32(value), np.float32(1))}


TASK = guarded(tiny.linear_task())
BAD_STEP = next(i for i in range(20) if BAD in TASK.train[i]["example_B"])  # the first, counted from 0


@functools.cache
def machine(rate=None, **options):
    """(a function of state, batch number, factor of BAD and `alive`, a function that makes a fresh state)"""
    rate = rate or optim.schedule("linear", peak=0.1, steps=50, warmup_steps=3)
    optimiser = optim.adamw(rate, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, clip=1.0)
    if options.get("nan") == "skip_spikes":
        optimiser = spikes.remember(optimiser)
    mesh = meshes.make(data=DEVICES)
    compiled = steps.update(task=TASK, optimiser=optimiser, rate=rate, mesh=mesh, accumulation=1, **options)

    def step(state, i, factor, *alive):
        return compiled(state, meshes.place_batch(mesh, with_factor(TASK.train[i], factor)), *alive)

    return step, lambda: steps.initial_state(TASK, optimiser, seed=0, mesh=mesh)


def numbers(state, *without):
    """Every leaf on the host, by its path; copied, since a state is donated."""
    leaves = jax.tree_util.tree_leaves_with_path(state.replace(key=jax.random.key_data(state.key)))
    named = {jax.tree_util.keystr(path): np.array(leaf) for path, leaf in leaves}
    return {name: leaf for name, leaf in named.items() if name not in without}


def same(one, other):
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("value", [np.nan, 1e38])  # the last: a finite loss whose gradient's norm is not
def test_abort_leaves_the_state_exactly_as_it_was_and_later_steps_do_nothing(value):
    (step, fresh), alive = machine(), True
    state = fresh()
    for i in range(BAD_STEP):
        state, metrics = step(state, i, value, alive)
        alive = metrics["alive"]
    assert bool(alive) and "skipped" not in metrics
    before = numbers(state)
    for i in (BAD_STEP, BAD_STEP + 1):
        state, metrics = step(state, i, value, alive)
        alive = metrics["alive"]
        assert not bool(alive) and same(numbers(state), before)
    assert np.isfinite(float(metrics["loss"]))  # of the second, which was not to blame, but too late
    assert np.any(before[".params['mean_D']"] != 0)


@pytest.mark.parametrize("value", [np.nan, 1e38])
def test_skip_leaves_everything_but_the_step_and_goes_on_as_if_there_had_been_no_such_batch(value):
    step, fresh = machine(nan="skip")
    state, skipped, rates = fresh(), [], []
    for i in range(BAD_STEP + 2):
        before = numbers(state, ".step")
        state, metrics = step(state, i, value)
        skipped.append(int(metrics["skipped"]))
        rates.append(float(metrics["learning_rate"]))
        assert bool(metrics["alive"]) and same(numbers(state, ".step"), before) == (i == BAD_STEP)
    assert skipped == [0] * BAD_STEP + [1, 1] and int(state.step) == BAD_STEP + 2
    assert rates[BAD_STEP + 1] == rates[BAD_STEP]  # the rate that was used, which waits with the moments
    assert np.all([np.isfinite(leaf).all() for leaf in numbers(state).values()])


def infinite(step):
    return jnp.float32(np.inf)


def test_parameters_that_would_not_be_finite_are_refused_though_loss_and_gradient_are():
    """Without this, a checkpoint could hold them, and train.nan = skip would skip all that follows."""
    step, fresh = machine(infinite)
    state = fresh()
    before = numbers(state)
    state, metrics = step(state, 0, 1)
    assert np.isfinite([float(metrics["loss"]), float(metrics["gradient_norm"])]).all()
    assert not bool(metrics["alive"]) and same(numbers(state), before)


@pytest.mark.parametrize(
    ("steps", "nan", "at"),
    [(1, "abort", 1), (5, "abort", 1), (5, "skip", 3)],
    ids=["where it is to be saved", "by the next step's loss", "where steps are skipped in a row"],
)
def test_what_the_optimiser_makes_of_finite_numbers_ends_the_run_and_is_not_saved(
    tmp_path, monkeypatch, steps, nan, at
):
    adamw, huge = optim.adamw, (optax.scale(1e30), optax.scale(1e30))

    @functools.wraps(adamw)
    def too_far(*of, **how):
        return optax.chain(adamw(*of, **how), *huge)

    monkeypatch.setitem(optim.OPTIMISERS, "adamw", too_far)
    quick = {"train__steps": steps, "train__nan": nan, "train__save_every": 0, "optim__schedule": "constant"}
    quick |= {"optim__warmup_steps": 0}
    with raises(errors.RunError, f"step {at}", "parameter", "last checkpoint"):
        tiny.trained(tmp_path / "run", tiny.linear_task(), **quick)
    assert not any((tmp_path / "run" / "checkpoints").iterdir())


RULE = spikes.remember(optax.identity())
REMEMBER = jax.jit(RULE.update)


def history(losses, norms=None):
    state = RULE.init(0.0)
    for loss, norm in zip(losses, norms if norms is not None else np.ones(len(losses)), strict=True):
        _, state = REMEMBER(0.0, state, value=loss, norm=norm)
    return state.history


def test_a_spike_is_upward_by_so_many_deviations_of_the_last_steps():
    """Against the definition on the last 128 numbers in float64."""
    rng = np.random.default_rng(0)
    losses, norms = rng.normal(3, 0.5, 200), rng.normal(100, 9, 200)
    past = history(losses, norms)
    last = losses[-spikes.PAST :], norms[-spikes.PAST :]
    assert spikes.PAST == 128 and not np.isclose(losses.mean(), last[0].mean(), atol=0.001)
    limits, is_spike = [x.mean() + 6 * x.std() for x in last], jax.jit(spikes.is_spike)
    usual = [x.mean() for x in last]
    for at in (0, 1):
        for factor, spike in ((0.999, False), (1.001, True), (-5, False)):
            new = list(usual)
            new[at] = limits[at] * factor
            assert bool(is_spike(past, *map(jnp.float32, new))) == spike
    assert bool(is_spike(past, jnp.float32(np.inf), jnp.float32(100)))


def test_nothing_is_judged_before_there_is_enough_to_judge_by_and_rounding_is_no_spike():
    for n in (0, 31, 32):
        past = history(([2.0, 2.1] * 16)[:n])
        assert bool(spikes.is_spike(past, jnp.float32(1e6), jnp.float32(1))) == (n == spikes.ENOUGH)
    past = history(np.full(40, 0.5))  # whose mean is exact, and whose spread is 0
    assert not bool(spikes.is_spike(past, jnp.nextafter(jnp.float32(0.5), jnp.float32(1)), jnp.float32(1)))
    assert bool(spikes.is_spike(past, jnp.float32(0.501), jnp.float32(1)))


def test_a_jump_is_skipped_as_nan_is_and_leaves_the_history_and_the_rest_alone():
    step, fresh = machine(nan="skip_spikes")
    state, n = fresh(), spikes.ENOUGH
    for i in range(n):
        state, metrics = step(state, i, 1)
    bad = next(i for i in range(n, n + 20) if BAD in TASK.train[i]["example_B"])
    for value, skipped in ((1000, 1), (1, 1), (np.nan, 2)):
        before = numbers(state, ".step")
        state, metrics = step(state, bad, value)
        assert same(before, numbers(state, ".step")) == (value != 1)
        assert int(metrics["skipped"]) == skipped and bool(metrics["alive"])
    assert int(state.step) == n + 3 and int(state.opt_state.history.count) == n + 1
    losses_T = np.asarray(state.opt_state.history.loss_T)
    assert losses_T.max() < 100 and np.count_nonzero(losses_T) == n + 1


def test_patience_ends_where_nothing_is_learnt_any_more(tmp_path, monkeypatch):
    """All batches are wrong but the eighth, behind which seven more are not enough."""
    monkeypatch.setattr(loop, "PATIENCE", 8)
    task, good = tiny.linear_task(), 7

    def loss(params, batch, *, key_B=None, layout=None):
        measures, aux = task.loss(params, batch)
        right, (total, count) = jnp.all(batch["x_BD"] == 100) | (key_B is None), measures["loss"]
        return measures | {"loss": (jnp.where(right, total, jnp.nan), count)}, aux

    train = task.train.map_with_index(
        lambda n, batch: batch | {"x_BD": batch["x_BD"] * (n != good) + 100 * (n == good)}
    )
    bad = task._replace(train=train, loss=loss)
    with raises(errors.RunError, "step 16", "8 steps"):
        tiny.trained(tmp_path / "run", bad, train__nan="skip", train__steps=20, mesh__data=1)


@pytest.fixture
def run(tmp_path):
    """A function that trains where the loss of one batch of the first 15, that of step `bad`, is NaN."""
    task = guarded(tiny.linear_task(n=241))
    task = task._replace(train=task.train.map(lambda batch: with_factor(batch, np.nan)))
    bad = next(i for i in range(15) if BAD in task.train[i]["example_B"])
    assert bad > 0

    def run(**changes):
        quick = {"train__steps": bad + 2, "train__log_every": 1, "train__save_every": 0, "mesh__data": DEVICES}
        return tiny.trained(tmp_path / "run", task, **(quick | changes)).summary

    run.bad, run.batch = bad, task.train[bad]
    return run


def test_a_run_aborts_with_a_sentence_and_the_state_before_the_step_and_goes_on_from_there(
    run, tmp_path, capsys, monkeypatch
):
    folder, bad = tmp_path / "run", run.bad

    def full(self, step, state, metrics=None):
        raise errors.RunError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.Checkpoints, "save", full)
        with raises(errors.RunError, f"step {bad + 1}", "last checkpoint", "the disk is full"):
            run()
    listed = ", ".join(str(number) for number in run.batch["example_B"][:8].tolist())
    words = [f"step {bad + 1}", "the loss (nan)", "the gradient norm (nan)", "batch/factor_B", listed, "16"]
    words += [f"JAX_DEBUG_NANS=1 python launch.py --config={folder / 'config.json'} --workdir={folder}"]
    with raises(errors.RunError, *words, "train.nan = skip", f"step {bad}, which is saved") as caught:
        run()
    assert "\n" not in str(caught.value)
    assert [file.name for file in (folder / "checkpoints").iterdir()] == [str(bad)]
    assert [row["step"] for row in log.read(folder)] == list(range(1, bad + 1))
    assert not (folder / "summary.json").exists()
    with raises(errors.UserError, "train.nan", "abort", "skip_spikes"):
        run(train__nan="skip_spikes")
    # skip may follow on abort: the run goes on from there, and counts the step that it leaves out.
    summary = run(train__nan="skip", train__steps=bad + 3)
    assert summary["skipped"] == 1 and summary["steps"] == bad + 3
    assert [row["train/skipped"] for row in log.read(folder) if "train/skipped" in row] == [1] * 3
    assert f"train.steps was {bad + 2} and is {bad + 3}: the rest of the learning" in capsys.readouterr().out

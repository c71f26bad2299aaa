"""A step whose numbers go wrong changes nothing: what is judged, what is left alone, and what a run says of it."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny

from experiments.engine import checkpoint, errors, log, optim
from experiments.engine import mesh as meshes
from experiments.engine import step as steps

BAD, DEVICES = 7, 2


def task_with(value, *, n=61):
    """The linear task whose loss is `value` times larger where example BAD is in the batch, and with a running mean."""
    task = tiny.linear_task(n=n)

    def loss_and_metrics(params, batch, key_B, *layout):
        ratios = task.loss_and_metrics(params, batch, key_B, *layout)
        if key_B is None:
            return ratios
        total, count = ratios["loss"]
        bad = jnp.sum(batch["example_B"] == BAD)
        mean = {"running/mean_D": (batch["x_BD"].sum(0), jnp.float32(len(batch["x_BD"])))}
        return ratios | {"loss": (total * jnp.where(bad > 0, jnp.float32(value), 1), count)} | mean

    def init(key):
        return task.init(key) | {"mean_D": jnp.zeros(tiny.D)}

    return task._replace(loss_and_metrics=loss_and_metrics, init=init)


def bad_step(task):
    """The first step, counted from 0, whose batch holds BAD."""
    return next(i for i in range(20) if BAD in task.train[i]["example_B"])


def machine(task, **options):
    """(step function, fresh state)"""
    rate = optim.schedule("linear", peak=0.1, steps=50, warmup_steps=3, final_fraction=0.1, decay_fraction=0.0)
    optimiser = optim.adamw(rate, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, clip=1.0)
    if options.get("spike"):
        optimiser = steps.remembering(optimiser)
    mesh = meshes.make(data=DEVICES)
    state = steps.initial_state(task, optimiser, seed=0, mesh=mesh)
    step = steps.update(task, optimiser, rate, mesh, accumulation=1, **options)
    return lambda state, batch, *rest: step(state, meshes.place_batch(mesh, batch), *rest), state


def numbers(state, *without):
    """Every leaf on the host, by its path; copied, since a state is donated."""
    leaves = jax.tree_util.tree_leaves_with_path(state.replace(key=jax.random.key_data(state.key)))
    named = {jax.tree_util.keystr(path): np.array(leaf) for path, leaf in leaves}
    return {name: leaf for name, leaf in named.items() if name not in without}


def same(one, other):
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("value", [np.nan, 1e38])  # the last: a finite loss whose gradient's norm is not
def test_abort_leaves_the_state_exactly_as_it_was_and_later_steps_do_nothing(value):
    task = task_with(value)
    step, state = machine(task)
    bad, alive = bad_step(task), True
    for i in range(bad):
        state, metrics = step(state, task.train[i], alive)
        alive = metrics["alive"]
    assert bool(alive) and "skipped" not in metrics
    before = numbers(state)
    for i in (bad, bad + 1):
        state, metrics = step(state, task.train[i], alive)
        alive = metrics["alive"]
        assert not bool(alive) and same(numbers(state), before)
    assert np.isfinite(float(metrics["loss"]))  # of step bad + 1, which was not to blame, but too late
    assert np.any(before[".params['mean_D']"] != 0)


@pytest.mark.parametrize("value", [np.nan, 1e38])
def test_skip_leaves_everything_but_the_step_and_goes_on_as_if_there_had_been_no_such_batch(value):
    task = task_with(value)
    step, state = machine(task, nan="skip")
    bad = bad_step(task)
    skipped, rates = [], []
    for i in range(bad + 2):
        before = numbers(state, ".step")
        state, metrics = step(state, task.train[i])
        skipped.append(int(metrics["skipped"]))
        rates.append(float(metrics["learning_rate"]))
        assert bool(metrics["alive"]) and same(numbers(state, ".step"), before) == (i == bad)
    assert skipped == [0] * bad + [1, 1] and int(state.step) == bad + 2
    assert rates[bad + 1] == rates[bad]  # the rate that was used, which waits with the moments
    assert np.all([np.isfinite(leaf).all() for leaf in numbers(state).values()])


def test_parameters_that_would_not_be_finite_are_refused_though_loss_and_gradient_are():
    """Without this, a checkpoint could hold them, and train.nan = skip would skip all that follows."""
    task = tiny.linear_task()
    rate = lambda step: jnp.float32(np.inf)  # noqa: E731
    optimiser = optim.adamw(rate, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, clip=1.0)
    mesh = meshes.make(data=DEVICES)
    state = steps.initial_state(task, optimiser, seed=0, mesh=mesh)
    before = numbers(state)
    step = steps.update(task, optimiser, rate, mesh, accumulation=1)
    state, metrics = step(state, meshes.place_batch(mesh, task.train[0]))
    assert np.isfinite([float(metrics["loss"]), float(metrics["gradient_norm"])]).all()
    assert not bool(metrics["alive"]) and same(numbers(state), before)


# Spikes


def history(losses, norms=None):
    rule = steps.remembering(optax.identity())
    state, remember = rule.init(0.0), jax.jit(rule.update)
    for loss, norm in zip(losses, norms if norms is not None else np.ones(len(losses)), strict=True):
        _, state = remember(0.0, state, value=loss, norm=norm)
    return state.history


def test_a_spike_is_upward_by_so_many_deviations_of_the_last_steps():
    """Against the definition on the last 128 numbers in float64."""
    rng = np.random.default_rng(0)
    losses, norms = rng.normal(3, 0.5, 200), rng.normal(100, 9, 200)
    past = history(losses, norms)
    last = losses[-steps.PAST :], norms[-steps.PAST :]
    assert steps.PAST == 128 and not np.isclose(losses.mean(), last[0].mean(), atol=0.001)
    limits = [x.mean() + 6 * x.std() for x in last]
    usual = [x.mean() for x in last]
    for at in (0, 1):
        for factor, spike in ((0.999, False), (1.001, True), (-5, False)):
            new = list(usual)
            new[at] = limits[at] * factor
            assert bool(steps.is_spike(past, *map(jnp.float32, new), 6.0)) == spike
    assert not bool(steps.is_spike(past, jnp.float32(np.nan), jnp.float32(100), 6.0))  # that is for train.nan
    assert bool(steps.is_spike(past, jnp.float32(np.inf), jnp.float32(100), 6.0))


def test_nothing_is_judged_before_there_is_enough_to_judge_by_and_rounding_is_no_spike():
    for n in (0, 31, 32):
        past = history(([2.0, 2.1] * 16)[:n])
        assert bool(steps.is_spike(past, jnp.float32(1e6), jnp.float32(1), 6.0)) == (n == steps.ENOUGH)
    past = history(np.full(40, 0.5))  # whose mean is exact, and whose spread is 0
    assert not bool(steps.is_spike(past, jnp.nextafter(jnp.float32(0.5), jnp.float32(1)), jnp.float32(1), 6.0))
    assert bool(steps.is_spike(past, jnp.float32(0.501), jnp.float32(1), 6.0))


def test_a_jump_is_skipped_and_leaves_the_history_and_the_rest_alone(monkeypatch):
    monkeypatch.setattr(steps, "ENOUGH", 3)
    task = task_with(1000.0, n=241)  # from 16 examples a step, BAD comes behind a few steps
    bad = bad_step(task)
    assert bad >= 3
    for spike, stays in ((6.0, True), (1e6, False)):
        step, state = machine(task, spike=spike)
        for i in range(bad + 2):
            before = numbers(state, ".step")
            state, metrics = step(state, task.train[i])
            if i == bad:
                assert same(before, numbers(state, ".step")) == stays
        assert int(metrics["skipped"]) == (1 if stays else 0) and bool(metrics["alive"])
        assert int(state.opt_state.history.count) == bad + 2 - stays
        losses_T = np.asarray(state.opt_state.history.loss_T)
        assert (losses_T.max() > 100) != stays and np.count_nonzero(losses_T) == bad + 2 - stays


def test_both_options_together():
    task = task_with(np.nan)
    step, state = machine(task, spike=6.0)  # nan = abort
    for i in range(bad_step(task) + 1):
        state, metrics = step(state, task.train[i])
    assert not bool(metrics["alive"]) and int(metrics["skipped"]) == 0


def test_patience_ends_where_nothing_is_learnt_any_more(tmp_path):
    """All batches are wrong but the 129th, where the first 128 have not told of 128 more than there were before."""
    task, good = tiny.linear_task(), 128

    def loss_and_metrics(params, batch, key_B, *layout):
        ratios = task.loss_and_metrics(params, batch, key_B, *layout)
        right = jnp.all(batch["x_BD"] == 100) | (key_B is None)
        return ratios | {"loss": (jnp.where(right, ratios["loss"][0], jnp.nan), ratios["loss"][1])}

    train = task.train.map_with_index(
        lambda n, batch: batch | {"x_BD": batch["x_BD"] * (n != good) + 100 * (n == good)}
    )
    bad = task._replace(train=train, loss_and_metrics=loss_and_metrics)
    with pytest.raises(errors.RunError, match="step 257: 128 steps in a row have been skipped"):
        tiny.trained(tmp_path / "run", bad, train__nan="skip", train__steps=300, mesh__data=1)


# A run


def long_task():
    """BAD is in one batch of the first 15 only."""
    return task_with(np.nan, n=241)


@pytest.fixture
def run(tmp_path):
    quick = {"train__steps": bad_step(long_task()) + 2, "train__log_every": 1, "train__save_every": 1}
    return lambda **changes: (
        tiny.trained(tmp_path / "run", long_task(), **(quick | {"mesh__data": DEVICES} | changes)).folder
    )


def test_a_run_aborts_with_a_sentence_and_its_last_good_checkpoint_and_goes_on_from_there(run, tmp_path, capsys):
    bad = bad_step(long_task())
    assert bad > 0
    with pytest.raises(errors.RunError) as caught:
        run()
    sentence, batch = str(caught.value), long_task().train[bad]
    listed = ", ".join(str(number) for number in batch["example_B"][:8].tolist())
    for words in (
        f"step {bad + 1}: the loss (nan) and the gradient norm (nan) are not finite",
        "the first such number is in gradient/G_CD",
        f"the examples were {listed}, ... (16 in all)",
        f"python launch.py --replay {tmp_path / 'run' / 'replay' / f'step_{bad + 1}'} shows it again",
    ):
        assert words in sentence
    assert "\n" not in sentence
    assert [row["step"] for row in log.read(tmp_path / "run")] == list(range(1, bad + 1))
    assert max(int(file.name) for file in (tmp_path / "run" / "checkpoints").iterdir()) == bad
    assert not (tmp_path / "run" / "summary.json").exists()
    # train.nan may change on resume: the run goes on from there, and counts the step that it leaves out.
    for steps_more in (1, 3):
        folder = run(train__nan="skip", train__steps=bad + steps_more)
        summary = json.loads((folder / "summary.json").read_text())
        assert summary["skipped"] == 1 and summary["steps"] == bad + steps_more
        rows = [row["train/skipped"] for row in log.read(folder) if "train/skipped" in row]
        assert rows == [1] * steps_more
    assert f"train.steps was {bad + 1} and is {bad + 3}: the rest of the learning" in capsys.readouterr().out


@pytest.mark.parametrize(("changes", "skipped"), [({}, None), ({"train__spike": 6.0}, 0)])
def test_a_run_that_may_leave_steps_out_tells_how_many_it_has(run, changes, skipped):
    summary = json.loads((run(train__steps=bad_step(long_task()), **changes) / "summary.json").read_text())
    assert summary.get("skipped") == skipped


def test_an_aborted_run_keeps_the_state_before_the_step(run, tmp_path, monkeypatch):
    bad = bad_step(long_task())
    folder, only_at_the_end = tmp_path / "run" / "checkpoints", {"train__save_every": 0}

    def full(self, step, state, metrics=None):
        raise errors.RunError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.Checkpoints, "save", full)
        with pytest.raises(errors.RunError, match=rf"step {bad + 1}: .* from its last checkpoint \(the disk is full"):
            run(**only_at_the_end)
    for _ in range(2):  # the second time from there
        with pytest.raises(errors.RunError, match=f"step {bad + 1}: .* can go on with .* from step {bad}, which is"):
            run(**only_at_the_end)
        assert [file.name for file in folder.iterdir()] == [str(bad)]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"train__nan": "stop"}, 'unknown train.nan "stop"; the right ones are: abort, skip'),
        ({"train__spike": -1.0}, "train.spike must be at least 0"),
        ({"train__spike": float("inf")}, "train.spike = inf"),
        ({"resume": "newest"}, 'unknown resume "newest"; the right ones are: latest, latest_valid'),
    ],
)
def test_settings_that_there_are_not(run, tmp_path, changes, words):
    with pytest.raises(errors.UserError, match=words):
        run(**changes)
    assert not (tmp_path / "run").exists()

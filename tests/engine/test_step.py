"""The loop: devices, accumulation and evaluation batches change no number, and the same seed gives the same bits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from experiments.engine import mesh as meshes
from experiments.engine import optim
from experiments.engine import step as training

EIGHT = 8


@functools.cache
def mesh(n):
    return meshes.make(data=n)


@pytest.fixture(scope="module")
def masked(tmp_path_factory):
    """A small language model whose devices are asked for unequal numbers of words."""
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_bytes(tiny.TEXT)
    text = {"text__source": str(file), "text__N": 7, "train__evaluate_batch": 8, "model__M": 1}
    return tiny.task_of(tiny.settings("language", text__objective="masked", **text))


def adamw():
    """A schedule, and AdamW with it."""
    rate = optim.schedule("cosine", peak=0.01, steps=50, warmup_steps=3, final_fraction=0.1, decay_fraction=0.0)
    return rate, optim.adamw(rate, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, clip=1.0)


def trained(task, *, devices, params=None, seed=3, steps=5):
    """The losses and the last state of a few steps from the initial parameters, or from these."""
    rate, optimiser = adamw()
    if params is None:
        state = training.initial_state(task, optimiser, seed=seed, mesh=mesh(devices))
    else:
        state = training.State(jnp.int32(0), params, optimiser.init(params), jax.random.key(seed))
    state = jax.device_put(state, meshes.replicated(mesh(devices)))
    step = training.update(task, optimiser, rate, mesh(devices), accumulation=1)
    losses = []
    for i in range(steps):
        state, metrics = step(state, meshes.place_batch(mesh(devices), task.train[i]))
        losses.append(float(metrics["loss"]))
    return losses, state


def batch_with(**arrays):
    """A batch of the linear task with other arrays."""
    return dict(tiny.linear_task().train[0]) | arrays


def gradients(task, params, batch, *, devices, accumulation=1):
    function = jax.jit(training.gradient(task, mesh(devices), accumulation=accumulation))
    return function(params, meshes.place_batch(mesh(devices), batch), jax.random.key(1))


def plain(task, params, batch):
    """Gradient and means as they are defined: sum / count over the whole batch, on one device."""

    def means(params, batch):
        ratios = task.loss_and_metrics(params, batch, None)
        found = {name: total / count for name, (total, count) in ratios.items()}
        return found["loss"], found

    return jax.jit(jax.grad(means, has_aux=True))(params, batch)


def close(one, other, rtol=1e-5, atol=1e-6):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), one, other)


def asked_per_device(batch):
    (weight,) = (array for name, array in batch.items() if name.startswith("weight_"))
    return weight.reshape(EIGHT, -1).sum(-1).astype(int).tolist()


def test_the_initial_values_are_those_of_the_task_or_given_by_their_paths():
    task, (_, optimiser) = tiny.linear_task(), adamw()
    given = {"b_C": np.arange(3.0), "there/is_none": np.ones(1)}
    for params, bias in ((None, np.zeros(3)), (given, given["b_C"])):
        state = training.initial_state(task, optimiser, seed=3, mesh=mesh(EIGHT), params=params)
        close(state.params, task.init(jax.random.key(3)) | {"b_C": bias}, rtol=1e-6, atol=1e-7)
        like = training.abstract_state(task, optimiser, mesh=mesh(EIGHT))
        facts = [[(x.shape, x.dtype, x.sharding) for x in jax.tree.leaves(tree)] for tree in (state, like)]
        assert facts[0] == facts[1] and int(state.step) == 0


def test_eight_devices_train_as_one():
    task = tiny.linear_task()
    (eight, _), (one, state) = (trained(task, devices=n) for n in (EIGHT, 1))
    np.testing.assert_allclose(eight, one, rtol=2e-5)
    assert len(set(one)) == 5 and int(state.step) == 5


@pytest.mark.parametrize(("devices", "accumulation"), [(1, 1), (EIGHT, 2)])
def test_running_averages_follow_the_statistics_of_the_batches(devices, accumulation):
    def loss_and_metrics(params, batch, key_B, over=None):
        answer = tiny.linear_task().loss_and_metrics({name: params[name] for name in ("G_CD", "b_C")}, batch, key_B)
        now = jax.lax.pmean(batch["x_BD"].mean(0), meshes.BATCH)
        return answer | training.running({"running": {"norm": {"mean_D": now}}})

    task = tiny.linear_task()._replace(loss_and_metrics=loss_and_metrics)
    rate, optimiser = adamw()
    params = tiny.linear_task().init(jax.random.key(0)) | {"norm": {"mean_D": jnp.ones(tiny.D)}}
    state = training.State(jnp.int32(0), params, optimiser.init(params), jax.random.key(0))
    step = training.update(task, optimiser, rate, mesh(devices), accumulation=accumulation)
    expected = np.ones(tiny.D)
    for i in range(3):
        state, metrics = step(
            jax.device_put(state, meshes.replicated(mesh(devices))), meshes.place_batch(mesh(devices), task.train[i])
        )
        expected = 0.9 * expected + 0.1 * task.train[i]["x_BD"].mean(0)
    np.testing.assert_allclose(state.params["norm"]["mean_D"], expected, rtol=1e-5)
    assert metrics.keys() == {"loss", "accuracy", "gradient_norm", "learning_rate", "alive"}


def test_the_gradient_is_that_of_the_mean_over_the_batch(masked):
    asked = [asked_per_device(masked.train[i]) for i in range(9)]
    assert all(len(set(counts)) > 2 for counts in asked)  # what makes this a test of ragged sums
    batch = next(masked.train[i] for i in range(9) if 0 in asked[i])
    params = tiny.drawn(masked)
    expected, means = plain(masked, params, batch)
    gradient, metrics = gradients(masked, params, batch, devices=EIGHT, accumulation=2)
    close(gradient, expected)
    close(metrics, means)


@pytest.mark.parametrize(("devices", "accumulation"), [(1, 1), (1, 4), (4, 1), (4, 2)])
def test_accumulated_parts_are_the_whole_batch(devices, accumulation):
    task = tiny.linear_task()
    batch, params = task.train[0], task.init(jax.random.key(0))
    parts = batch["weight_B"].reshape(devices * accumulation, -1).sum(-1)
    assert parts.size == 1 or len(set(parts.tolist())) > 1
    expected, means = plain(task, params, batch)
    found, metrics = gradients(task, params, batch, devices=devices, accumulation=accumulation)
    close(found, expected)
    close(metrics, means)


@pytest.mark.parametrize(("devices", "accumulation"), [(1, 1), (1, 4), (EIGHT, 1), (EIGHT, 2)])
def test_every_example_has_a_random_key_of_its_own(devices, accumulation):
    """What is random about an example depends on its place in the batch, not on who computes it."""

    def loss_and_metrics(params, batch, key_B, over=None):
        draw_B = jax.vmap(jax.random.normal)(key_B)
        return {"loss": (jnp.sum(params["G_CD"].sum() * draw_B * batch["x_BD"][:, 0]), jnp.float32(len(draw_B)))}

    task = tiny.linear_task()._replace(loss_and_metrics=loss_and_metrics)
    params = {"G_CD": jnp.ones((tiny.C, tiny.D))}
    batch = task.train[0]
    grads, _ = gradients(task, params, batch, devices=devices, accumulation=accumulation)
    draws = [float(jax.random.normal(jax.random.fold_in(jax.random.key(1), i))) for i in range(16)]
    assert len(set(draws)) == 16
    expected = np.dot(draws, batch["x_BD"][:, 0]) / 16
    np.testing.assert_allclose(grads["G_CD"], np.full((tiny.C, tiny.D), expected), rtol=1e-5)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("asked", [[1, 2, 0, 0, 3, 0, 0, 0, 1, 1, 0, 0, 0, 0, 5, 1], [0] * 16])
def test_nothing_asked_of_a_device_or_of_a_whole_batch_is_no_nan(accumulation, asked):
    task = tiny.linear_task()
    batch, params = batch_with(weight_B=np.float32(asked)), task.init(jax.random.key(0))
    found, metrics = gradients(task, params, batch, devices=EIGHT, accumulation=accumulation)
    if any(asked):
        expected, means = plain(task, params, batch)
    else:
        expected, means = jax.tree.map(jnp.zeros_like, params), {"loss": 0.0, "accuracy": 0.0}
    close(found, expected)
    close(metrics, means)


def by_hand(task, params):
    """The means over the evaluation part of the linear task, example by example, in float64."""
    total, right, count = 0.0, 0.0, 0.0
    wide = {name: np.asarray(array, np.float64) for name, array in params.items()}
    for i in range(len(task.evaluation)):
        for x_D, label, weight in zip(*(task.evaluation[i][k] for k in ("x_BD", "label_B", "weight_B")), strict=True):
            l_C = wide["G_CD"] @ x_D + wide["b_C"]
            total += weight * (np.log(np.sum(np.exp(l_C))) - l_C[label])
            right += weight * (np.argmax(l_C) == label)
            count += weight
    return {"loss": total / count, "accuracy": right / count}, count


@pytest.mark.parametrize(("devices", "size"), [(1, 8), (EIGHT, 16), (EIGHT, 32)])
def test_evaluation_is_exact(devices, size):
    n, n_evaluation = 61, 29
    task = tiny.linear_task(n=n, n_evaluation=n_evaluation, evaluate_batch=size)
    params = task.init(jax.random.key(2))
    expected, count = by_hand(task, params)
    assert len(task.evaluation) * size > n_evaluation  # the last batch is padded
    assert count == sum(i % 3 for i in range(n, n + n_evaluation))
    found = training.evaluator(task, mesh(devices))(params)
    assert found == pytest.approx(expected, rel=1e-6)


def test_evaluation_of_an_experiment_is_exact(masked):
    """Against the examples one by one."""
    params, measure = tiny.drawn(masked), jax.jit(masked.loss_and_metrics)
    totals = {"loss": np.zeros(2), "accuracy": np.zeros(2)}
    for i in range(len(masked.evaluation)):
        batch = masked.evaluation[i]
        for at in range(8):
            one = {name: array[at : at + 1] for name, array in batch.items()}
            if one["weight_BN"].any():
                for name, ratio in measure(params, one, None).items():
                    totals[name] += np.asarray(ratio, np.float64)
    expected = {name: total / count for name, (total, count) in totals.items()}
    assert training.evaluator(masked, mesh(EIGHT))(params) == pytest.approx(expected, rel=1e-5)


def counted(task):
    traces = []

    def loss_and_metrics(params, batch, key_B, over=None):
        traces.append(1)
        return task.loss_and_metrics(params, batch, key_B)

    return task._replace(loss_and_metrics=loss_and_metrics), traces


def test_nothing_is_compiled_twice():
    task, traces = counted(tiny.linear_task())
    trained(task, devices=EIGHT, steps=1)
    first = len(traces)
    _, state = trained(task, devices=EIGHT, steps=6)
    assert len(traces) == 2 * first > 0
    evaluate = training.evaluator(task, mesh(EIGHT))
    evaluate(state.params)
    again = len(traces)
    evaluate(state.params)
    assert len(traces) == again


def test_the_state_is_whole_on_every_device_and_donated_and_metrics_tell_the_norm_before_clipping():
    task, (rate, optimiser) = tiny.linear_task(), adamw()
    old = training.initial_state(task, optimiser, seed=0, mesh=mesh(EIGHT))
    expected, means = plain(task, old.params, task.train[0])
    step = training.update(task, optimiser, rate, mesh(EIGHT), accumulation=1)
    new, metrics = step(old, meshes.place_batch(mesh(EIGHT), task.train[0]))
    for leaf in jax.tree.leaves((new, metrics)):
        assert leaf.sharding.is_fully_replicated and len(leaf.sharding.device_set) == EIGHT
    assert old.params["G_CD"].is_deleted() and jax.tree.leaves(old.opt_state)[1].is_deleted()
    assert not new.params["G_CD"].is_deleted()
    norm = np.sqrt(sum(np.sum(np.square(np.asarray(leaf, np.float64))) for leaf in jax.tree.leaves(expected)))
    assert metrics.keys() == {"loss", "accuracy", "gradient_norm", "learning_rate", "alive"}
    assert float(metrics["gradient_norm"]) == pytest.approx(norm, rel=1e-5) and norm > 1
    assert float(metrics["learning_rate"]) == pytest.approx(0.01 / 3)
    close({name: metrics[name] for name in means}, means)


def test_the_random_key_of_a_step_depends_on_seed_and_step():
    def loss_and_metrics(params, batch, key_B, over=None):
        draw = jax.random.uniform(key_B[0])
        return {"loss": (params["G_CD"].sum(), jnp.sum(batch["weight_B"])), "draw": (draw, jnp.float32(1))}

    task = tiny.linear_task()._replace(loss_and_metrics=loss_and_metrics)
    rate, optimiser = adamw()
    step = training.update(task, optimiser, rate, mesh(1), accumulation=1)
    draws = []
    for seed in (0, 1):
        state = training.initial_state(task, optimiser, seed=seed, mesh=mesh(1))
        for i in range(3):
            state, metrics = step(state, task.train[i])
            draws.append(float(metrics["draw"]))
    assert len(set(draws)) == 6


def test_the_same_seed_gives_the_same_bits_and_another_seed_others():
    def bits(seed):
        losses, state = trained(tiny.linear_task(seed=seed), devices=EIGHT, seed=seed)
        return losses[0], losses[1:], np.asarray(state.params["G_CD"]).tobytes()

    first, again, other = bits(5), bits(5), bits(6)
    assert first == again
    assert all(one != another for one, another in zip(first, other, strict=True))

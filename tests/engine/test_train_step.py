"""Training steps: devices, accumulation and evaluation batches do not change the numbers; seeds are reproducible."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from errors import raises

from experiments.config import errors
from experiments.devices import compilation, mesh as meshes
from experiments.engine import train_step

EIGHT = 8


@functools.cache
def mesh(n):
    return meshes.make(data=n)


def make_step(task, devices, accumulation=1):
    """Return (fresh, step): fresh(seed=...) is an initial state, and step(state, batch) trains on one batch."""
    rate, optimiser = tiny.adamw()
    options = {"rate": rate, "mesh": mesh(devices), "accumulation": accumulation}
    update = train_step.update(task=task, optimiser=optimiser, **options)
    fresh = functools.partial(train_step.initial_state, task, optimiser, mesh=mesh(devices))
    return fresh, lambda state, batch: update(state, meshes.place_batch(mesh(devices), batch))


linear_step = functools.cache(lambda devices: make_step(tiny.linear_task(), devices))


def run_steps(*, devices, seed):
    """Train the linear task for five steps. Return (losses, last state)."""
    task, (fresh, step) = tiny.linear_task(seed=seed), linear_step(devices)
    state, losses = fresh(seed=seed), []
    for i in range(5):
        state, metrics = step(state, task.train[i])
        losses.append(float(metrics["loss"]))
    return losses, state


def test_steps_and_evaluations_are_compiled_with_the_option_of_deterministic_operations(monkeypatch):
    monkeypatch.setattr(compilation, "deterministic_options", lambda mesh, on: {"none_such": True} if on else {})
    task = tiny.linear_task()._replace(deterministic=True)
    fresh, step = make_step(task, 1)
    state, evaluate = fresh(seed=0), train_step.evaluator(task, mesh(1))
    for program in (lambda: evaluate(state.params), lambda: step(state, task.train[0])):
        with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option"):
            program()


@pytest.mark.parametrize("kind", ["debug", "pure", "io"])
def test_an_exception_of_a_callback_is_shown_with_its_line(tmp_path, kind):
    """JAX reports a failed device; the run names the user's file, line and exception."""

    def fail(x):
        raise LookupError(f"no row\nof {np.shape(x)}")

    def loss(params, batch, **options):
        count, x_BD = batch["weight_B"].sum(), batch["x_BD"]
        if kind == "debug":
            jax.debug.callback(fail, x_BD)
        else:
            call = jax.pure_callback if kind == "pure" else jax.experimental.io_callback
            x_BD = call(fail, jax.ShapeDtypeStruct(x_BD.shape, x_BD.dtype), x_BD)
        return {"loss": (count + 0 * params["b_C"].sum() + 0 * jax.lax.stop_gradient(x_BD).sum(), count)}, {}

    line = fail.__code__.co_firstlineno + 1
    with raises(errors.RunError, f"{__file__}, line {line}: ", "LookupError: no row"):
        tiny.train(tmp_path, tiny.linear_task()._replace(loss=loss), mesh__data=1)


def make_reference(task):
    """Return a function (params, batch, key_B) -> (gradient, means) by definition: sum / count on one device."""

    def means(params, batch, key_B=None):
        ratios, _ = task.loss(params, batch, key_B=key_B)
        result = {name: total / count for name, (total, count) in ratios.items()}
        return result["loss"], result

    return jax.jit(jax.grad(means, has_aux=True))


def assert_close(result, expected, rtol=1e-5, atol=1e-6):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), result, expected)


def test_initial_values_come_from_the_task_or_from_arrays_by_their_paths():
    task, (_, optimiser) = tiny.linear_task(), tiny.adamw()
    values, initial = {"b_C": np.arange(3.0), "there/is_none": np.ones(1)}, jax.jit(task.init)(jax.random.key(3))
    abstract_state = train_step.abstract_state(task, optimiser, mesh=mesh(EIGHT))
    for params, bias in ((None, np.zeros(3)), (values, values["b_C"])):
        state = train_step.initial_state(task, optimiser, seed=3, mesh=mesh(EIGHT), params=params)
        assert_close(state.params, initial | {"b_C": bias}, rtol=1e-6, atol=1e-7)
        layouts = [[(x.shape, x.dtype, x.sharding) for x in jax.tree.leaves(tree)] for tree in (state, abstract_state)]
        assert layouts[0] == layouts[1] and int(state.step) == 0


def test_the_same_seed_gives_the_same_bits_and_one_device_the_same_losses():
    results = [run_steps(devices=EIGHT, seed=seed) for seed in (5, 5, 6)]
    first, second, other_losses = (losses for losses, _ in results)
    bits = [np.asarray(state.params["G_CD"]).tobytes() for _, state in results]
    assert first == second and bits[0] == bits[1] != bits[2]
    assert len({*first, *other_losses}) == 10 and int(results[0][1].step) == 5
    np.testing.assert_allclose(run_steps(devices=1, seed=5)[0], first, rtol=2e-5)


def test_running_averages_follow_the_statistics_of_the_batches():
    linear = tiny.linear_task()

    def init(key):
        return linear.init(key) | {"norm": {"mean_D": jnp.ones(tiny.D)}}

    def loss(params, batch, *, key_B=None, layout=None):
        measures, _ = linear.loss({name: params[name] for name in ("G_CD", "b_C")}, batch)
        mean_D = jax.lax.pmean(batch["x_BD"].mean(0), meshes.BATCH)
        return measures, {"running": {"norm": {"mean_D": mean_D}}}

    fresh, step = make_step(linear._replace(init=init, loss=loss), EIGHT, accumulation=2)
    state, expected = fresh(seed=0), np.ones(tiny.D)
    for batch in linear.train[:3]:
        state, metrics = step(state, batch)
        expected = 0.9 * expected + 0.1 * batch["x_BD"].mean(0)
    np.testing.assert_allclose(state.params["norm"]["mean_D"], expected, rtol=1e-5)
    assert metrics.keys() == {"loss", "accuracy", "gradient_norm", "learning_rate", "alive"}


def fold_keys(key):
    """Return the keys of the 16 examples of a batch, and a number drawn from each."""
    key_B = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(16))
    return key_B, jax.vmap(jax.random.normal)(key_B)


@pytest.mark.parametrize(("devices", "accumulation"), [(1, 4), (EIGHT, 2)])
def test_devices_and_microbatches_have_the_gradient_of_the_mean_over_the_batch(devices, accumulation):
    """Microbatches may have unequal or zero weights. The key of an example depends only on its index in the batch."""
    linear = tiny.linear_task()

    def loss(params, batch, *, key_B=None, layout=None):
        draw_B = jax.vmap(jax.random.normal)(key_B)
        ratios, _ = linear.loss(params, batch)
        total, count = ratios["loss"]
        noise = jnp.sum(params["G_CD"].sum() * draw_B * batch["weight_B"])
        return ratios | {"loss": (total + noise, count), "draw": (draw_B.sum(), jnp.float32(len(draw_B)))}, {}

    task, key = linear._replace(loss=loss), jax.random.key(1)
    params = tiny.draw_params(linear)
    gradient = tiny.gradient(task, mesh(devices), accumulation)
    key_B, draw_B = jax.jit(fold_keys)(key)
    assert len(set(draw_B.tolist())) == 16
    batch, reference = dict(linear.train[0]), make_reference(task)
    for weight_B in (batch["weight_B"], [1, 2, 0, 0, 3, 0, 0, 0, 1, 1, 0, 0, 0, 0, 5, 1], [0] * 16):
        batch["weight_B"] = np.float32(weight_B)
        result, metrics, _ = gradient(params, meshes.place_batch(mesh(devices), batch), key)
        expected, means = reference(params, batch, key_B)
        if not any(weight_B):  # zero weights give zeros, not NaN
            expected, means = jax.tree.map(np.zeros_like, params), means | {"loss": 0.0, "accuracy": 0.0}
        assert_close(result, expected)
        assert_close(metrics, means)


def evaluate_slowly(task, params):
    """Return (means over the evaluation split, sum of weights), computed example by example in float64."""
    total, correct, count = 0.0, 0.0, 0.0
    params64 = {name: np.asarray(array, np.float64) for name, array in params.items()}
    for i in range(len(task.evaluation)):
        for x_D, label, weight in zip(*(task.evaluation[i][k] for k in ("x_BD", "label_B", "weight_B")), strict=True):
            l_C = params64["G_CD"] @ x_D + params64["b_C"]
            total += weight * (np.log(np.sum(np.exp(l_C))) - l_C[label])
            correct += weight * (np.argmax(l_C) == label)
            count += weight
    return {"loss": total / count, "accuracy": correct / count}, count


@pytest.mark.parametrize(("devices", "size"), [(1, 8), (EIGHT, 16)])
def test_evaluation_equals_the_mean_over_all_examples(devices, size):
    n, n_evaluation = 61, 29
    task = tiny.linear_task(n=n, n_evaluation=n_evaluation, evaluate_batch=size)
    params = tiny.draw_params(task)
    expected, count = evaluate_slowly(task, params)
    assert len(task.evaluation) * size > n_evaluation  # the last batch is padded
    assert count == sum(i % 3 for i in range(n, n + n_evaluation))
    result = train_step.evaluator(task, mesh(devices))(params)
    assert result == pytest.approx(expected, rel=1e-6)


def test_sums_over_batches_have_more_bits_than_float32():
    task = tiny.linear_task(n_evaluation=29, evaluate_batch=8)
    pairs = iter([(2.0**24, 1.0), (1.0, 1.0), (1.0, 1.0), (1.0, 1.0)])
    result = train_step.evaluate(task, mesh(1), lambda params, batch: {"loss": np.float32(next(pairs))}, {})
    assert result == {"loss": (2**24 + 3) / 4}


def test_the_state_is_replicated_and_donated_and_the_gradient_norm_is_measured_before_clipping():
    task, (fresh, step) = tiny.linear_task(), linear_step(EIGHT)
    old = fresh(seed=0)
    expected, means = make_reference(task)(old.params, task.train[0])
    new, metrics = step(old, task.train[0])
    for leaf in jax.tree.leaves((new, metrics)):
        assert leaf.sharding.is_fully_replicated and len(leaf.sharding.device_set) == EIGHT
    assert old.params["G_CD"].is_deleted() and jax.tree.leaves(old.opt_state)[1].is_deleted()
    assert not new.params["G_CD"].is_deleted()
    norm = np.sqrt(sum(np.sum(np.square(np.asarray(leaf, np.float64))) for leaf in jax.tree.leaves(expected)))
    assert metrics.keys() == {"loss", "accuracy", "gradient_norm", "learning_rate", "alive"}
    assert float(metrics["gradient_norm"]) == pytest.approx(norm, rel=1e-5) and norm > 1
    assert float(metrics["learning_rate"]) == pytest.approx(0.01 / 3)
    assert_close({name: metrics[name] for name in means}, means)


def test_the_random_key_of_a_step_depends_on_seed_and_step():
    def loss(params, batch, *, key_B=None, layout=None):
        draw = jax.random.uniform(key_B[0])
        return {"loss": (params["G_CD"].sum(), jnp.sum(batch["weight_B"])), "draw": (draw, jnp.float32(1))}, {}

    task = tiny.linear_task()._replace(loss=loss)
    (fresh, step), draws = make_step(task, 1), []
    for seed in (0, 1):
        state = fresh(seed=seed)
        for i in range(3):
            state, metrics = step(state, task.train[i])
            draws.append(float(metrics["draw"]))
    assert len(set(draws)) == 6

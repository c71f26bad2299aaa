"""Parts of the user's that see later tokens are refused, also if they have no effect at first or no gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import small_files
import tiny
from errors import raises

from experiments.config import errors
from experiments.devices import mesh as meshes
from experiments.engine import causality, optim
from experiments.model import baselines, losses, splits


def init(key, **sizes):
    return {"W_D": jnp.zeros(sizes["D"])}


def see_next(params, x_BND):
    return params["W_D"] * jnp.roll(x_BND, -1, 1) + x_BND


def see_both(params, x_BND):  # these differences of the four sequences have about the sum 0
    return params["W_D"] * (jnp.roll(x_BND, 1, 1) + jnp.roll(x_BND, -1, 1)) + x_BND


def see_largest(params, x_BND):  # without a gradient
    return x_BND + params["W_D"] * jax.lax.stop_gradient(x_BND.max(1, keepdims=True))


def convolve(params, x_BND):  # causal, but an FFT rounds all positions
    N, kernel_N1 = x_BND.shape[1], jnp.exp(-jnp.arange(x_BND.shape[1]))[:, None]
    product = jnp.fft.rfft(x_BND, 2 * N, 1) * jnp.fft.rfft(kernel_N1, 2 * N, 0)
    return params["W_D"] * jnp.fft.irfft(product, 2 * N, 1)[:, :N]


def narrow(params, x_BND):
    return (params["W_D"] * x_BND).sum(-1, keepdims=True)


def overflow(params, x_BND):
    return params["W_D"] + x_BND * jnp.inf


def scale_by_all(params, x_BND, *, eps):
    return params["W_D"] * x_BND / jnp.sqrt((x_BND**2).mean((1, 2), keepdims=True) + eps)


next_token, both, largest, fft, small, infinite = (
    (init, apply) for apply in (see_next, see_both, see_largest, convolve, narrow, overflow)
)
norm_of_all = (init, scale_by_all)


def check(experiment="language", **changes):
    settings = tiny.settings(experiment, **{"mesh__data": 1, "model__M": 1} | changes)
    causality.check(settings, tiny.task_of(settings))


@pytest.mark.parametrize(
    ("experiment", "changes"),
    [
        ("language", {"model__mlp": "next_token"}),
        ("language", {"model__mlp": "largest"}),
        ("language", {"model__mlp": "both", "model__M": 2, "text__N": 8, "text__source": "text.txt"}),
        ("language", {"model__norm": "norm_of_all", "text__objective": "prefix"}),
        ("translation", {"model__mlp": "next_token"}),
        ("captions", {"model__mlp": "next_token"}),
        ("synthetic", {"model__mlp": "largest", "synthetic__task": "previous_causal"}),
    ],
)
def test_parts_that_see_later_tokens_are_refused(experiment, changes, tmp_path):
    if experiment == "translation":
        pytest.importorskip("sacrebleu", reason='the library sacrebleu is missing: pip install -e ".[text]"')
        changes = changes | small_files.sources(tmp_path, ["pairs"], "one")
    if "text__source" in changes:
        (tmp_path / "text.txt").write_bytes(tiny.TEXT * 3)
        changes = changes | {"text__source": str(tmp_path / "text.txt")}
    changes = {key: f"test_causality:{x}" if key[7:] in ("mlp", "norm") else x for key, x in changes.items()}
    with raises(errors.UserError, "test_causality:", "not causal"):
        check(experiment, **changes)


@pytest.mark.parametrize("changes", [{"model__mlp": "test_causality:fft"}, {"model__dropout": 0.1}])
def test_causal_parts_are_accepted(changes):
    check(**changes)


def test_a_loss_that_is_not_finite_is_said_to_be_so():
    with raises(errors.UserError, "test_causality:infinite", "not a finite number"):
        check(model__mlp="test_causality:infinite")


def test_a_part_that_returns_another_shape_is_named():
    with raises(errors.UserError, "test_causality:small", "narrow (", "test_causality.py", "(2, 3, 1), not (2, 3"):
        check(model__mlp="test_causality:small")


def test_class_weights_below_one_give_the_same_loss_and_gradient():
    results, mesh = [], meshes.make(data=1)
    for weights in ("1,2,1,1,1,1,1,1,1,1", "1e-3,2e-3,1e-3,1e-3,1e-3,1e-3,1e-3,1e-3,1e-3,1e-3"):
        task = tiny.task_of(tiny.settings("vision", mesh__data=1, train__loss=f"class_weights:{weights}"))
        results.append(tiny.gradient(task, mesh)(tiny.draw_params(task), task.train[0], jax.random.key(0)))
    for a, b in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6)


def test_class_weights_that_are_all_zero_are_refused():
    with raises(errors.UserError, "class_weights:0,0", "not all 0"):
        losses.choose_loss(tiny.settings("vision", train__loss="class_weights:0,0"))


def test_an_experiment_that_says_which_values_are_better_keeps_train_metrics():
    settings = tiny.settings("synthetic", train__metrics=["top5"])
    fields = {"train": [], "evaluation": [], "tokens_per_example": 1, "better": {"mine": "less"}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(splits, "make_splits", lambda *_, **__: fields)
        patch.setattr(baselines, "guess_token", lambda *_, **__: {})
        task = tiny.task_of(settings)
    assert task.better == {"top5": "more", "mine": "less"}


def test_schedule_free_is_trained_and_evaluated_where_optax_says():
    rule = optax.contrib.schedule_free_sgd(0.1)
    params, ours = {"w": jnp.arange(3.0)}, optim.evaluate_average(rule)
    mean, state, expected = params, ours.init(params), rule.init(params)
    for _ in range(5):
        grads = {"w": optim.training_params(mean, state)["w"] ** 2}
        np.testing.assert_allclose(grads["w"], params["w"] ** 2, rtol=1e-5)
        updates, state = ours.update(grads, state, mean)
        mean = optax.apply_updates(mean, updates)
        updates, expected = rule.update(grads, expected, params)
        params = optax.apply_updates(params, updates)
    right = optax.contrib.schedule_free_eval_params(expected, params)
    np.testing.assert_allclose(mean["w"], right["w"], rtol=1e-5)
    assert abs(right["w"] - params["w"]).max() > 1e-3

"""Masked images (E26): the choice of hidden patches, the task, its figures, and its equations."""

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import reference_image
import tiny
import translate
from cases import B, D, N
from errors import raises

from experiments.config import errors
from experiments.data import windows
from experiments.engine import batches
from experiments.figures import images as image_figures
from experiments.model import build, losses
from tfm import embed as embeds, head as heads, loss


def fetch_numbered(index_B, rng):
    """Return images of one patch, whose pixels are their index."""
    return {"v_BNP": index_B.reshape(-1, 1, 1).astype(np.float32), "label_B": index_B, "weight_B": index_B}


@pytest.mark.parametrize(("patches", "share", "count"), [(16, 0.75, 12), (49, 0.75, 37), (2, 0.5, 1)])
def test_a_share_of_the_patches_is_hidden(patches, share, count):
    fetch = windows.patches(fetch_numbered, N=patches, share=share)
    for rng in (None, np.random.default_rng(0)):
        batch = fetch(np.arange(211), rng)
        assert batch.keys() == {"v_BNP", "hidden_BN", "weight_BN"}
        assert batch["hidden_BN"].dtype == bool and batch["weight_BN"].dtype == np.float32
        assert batch["hidden_BN"].shape == (211, patches) and (batch["hidden_BN"].sum(1) == count).all()
        np.testing.assert_array_equal(batch["hidden_BN"], batch["weight_BN"])
        rate = count / patches  # all patches are hidden equally often
        assert abs(batch["hidden_BN"].mean(0) - rate).max() < 5 * np.sqrt(rate * (1 - rate) / 211)
        assert len(np.unique(batch["hidden_BN"], axis=0)) > 1


@pytest.mark.parametrize(("N", "share"), [(16, 0.0), (16, 1.0), (16, -0.5), (16, 0.99), (7, 0.07)])
def test_a_share_that_hides_all_or_nothing_is_refused(N, share):
    with raises(errors.UserError, "image.patch", share, N):
        windows.patches(fetch_numbered, N=N, share=share)


def test_hidden_patches_depend_on_the_example_in_evaluation_and_on_the_step_in_training():
    fetch = windows.patches(fetch_numbered, N=16, share=0.75)
    rows = fetch(np.arange(13), None)["hidden_BN"]
    assert len(np.unique(rows, axis=0)) == 13
    np.testing.assert_array_equal(fetch(np.array([7, 2, 7]), None)["hidden_BN"], rows[[7, 2, 7]])
    assert not batches.evaluation(fetch, n=13, batch=16)[0]["weight_BN"][13:].any()
    first, second, other_seed = (fetch(np.arange(8), np.random.default_rng(seed))["hidden_BN"] for seed in (0, 0, 1))
    assert (first == second).all() and (first != other_seed).any()


def test_the_baseline_the_metrics_and_the_figures_of_the_task(tmp_path, monkeypatch):
    """Colour images of 4 x 6 pixels get brighter to the right. The expected baseline is computed in a loop."""
    rng = np.random.default_rng(0)
    x = (rng.random((16, 4, 6, 3)) + np.linspace(0, 3, 6)[:, None]).astype(np.float32)
    y, train_BYXZ, held_out_BYXZ = np.zeros(16, np.int32), x[:11], x[11:]
    np.savez(tmp_path / "a.npz", x_train=train_BYXZ, y_train=y[:11], x_test=held_out_BYXZ, y_test=y[11:])
    changes = {"image.source": str(tmp_path / "a.npz"), "model.M": 1, "mesh.data": 1, "train.batch_size": 8}
    rows = [{"step": 1, "eval/loss": 0.5, "eval/explained": 0.458}]
    values_of_figure, draw = {}, image_figures.hidden_patches
    monkeypatch.setattr(
        image_figures, "hidden_patches", lambda path, **values: draw(path, **values_of_figure.update(values) or values)
    )
    work, (files, _), _ = tiny.make_figures(tiny.settings("masked_image", **changes), tmp_path, rows)
    assert [file.name for file in files] == ["loss.png", "prediction.png", "attention.png"]
    task, batch = work.task, work.task.evaluation[0]
    hidden_BN = batch["hidden_BN"][:5]
    mean_Z, std_Z = train_BYXZ.mean((0, 1, 2), dtype=np.float64), train_BYXZ.std((0, 1, 2), dtype=np.float64)
    squared_error = 0.0
    for image_YXZ, hidden_N in zip((held_out_BYXZ - train_BYXZ.mean(0)) / std_Z, hidden_BN, strict=True):
        patches = [np.square(image_YXZ[n // 3 * 2 :][:2, n % 3 * 2 :][:, :2]).sum() for n in range(6)]
        squared_error += sum(np.array(patches)[hidden_N])
    assert tiny.baseline(task) == {"loss": pytest.approx(squared_error / (hidden_BN.sum() * 2 * 2 * 3), rel=1e-5)}
    assert task.tokens_per_example == 6 and hidden_BN.sum(1).tolist() == [4] * 5
    image_BYXZ = embeds.join(batch["v_BNP"][:5], Y=held_out_BYXZ.shape[1], X=held_out_BYXZ.shape[2], size=2)
    np.testing.assert_allclose(image_BYXZ * std_Z + mean_Z, held_out_BYXZ, atol=1e-5)
    metrics = tiny.measure(task)(tiny.draw_params(task), batch, None)
    means = {name: float(total / count) for name, (total, count) in metrics.items()}
    assert means["explained"] == pytest.approx(1 - means["loss"] / tiny.baseline(task)["loss"], rel=1e-4)
    v_BNP = np.asarray(jax.jit(work.apply)(tiny.draw_params(task), batch))[:5]
    prediction_BYXZ = v_BNP.reshape(5, 2, 3, 2, 2, 3).swapaxes(2, 3).reshape(5, 4, 6, 3) * std_Z + mean_Z
    np.testing.assert_allclose(values_of_figure["prediction_BYXZ"], prediction_BYXZ, rtol=1e-4, atol=1e-4)
    assert "4 of 6 patches" in values_of_figure["title"] and "46 %" in values_of_figure["title"]


def test_explained_variance_is_0_for_the_average_and_1_for_the_truth():
    truth_BNP, average_NP = np.split(np.random.default_rng(0).random((6, 6, 12), np.float32), [5])
    average_BNP, weight_BN = np.broadcast_to(average_NP, truth_BNP.shape), np.eye(5, 6, dtype=np.float32)
    explain = jax.jit(losses.explain_variance)
    for share, v_BNP in ((0, average_BNP), (1, truth_BNP), (0.75, (truth_BNP + average_BNP) / 2)):
        metrics = explain(v_BNP, truth_BNP, average_NP, weight_BN)
        explained_share, error = (float(metrics[name][0] / metrics[name][1]) for name in ("explained", "loss"))
        assert explained_share == pytest.approx(share, abs=1e-6) and metrics["loss"][1] == 5 * 12
        assert error == pytest.approx(np.square(v_BNP - truth_BNP)[np.eye(5, 6) > 0].mean(), abs=1e-6)


@pytest.mark.parametrize(
    ("setting", "value", "part"),
    [("image.patch", 3, "3 x 3"), ("image.patch", 8, "N = 1"), ("model.output_cap", 5.0, "model.output_cap")],
)
def test_invalid_settings_are_refused(setting, value, part):
    with raises(errors.UserError, setting, part):
        tiny.task_of(tiny.settings("masked_image", **{setting: value}))


# Equations

P = 31
HIDDEN_BN = np.array([[1, 0, 0, 1, 1, 0, 1], [0, 1, 1, 0, 0, 0, 1]], bool)  # B x N


@cases.float64()
def test_masked_patches_and_pixels_equal_the_reference():
    image_BYXZ, hidden_BN = cases.normal(0, 2, 6, 9, 5), HIDDEN_BN[:, :6]
    params = cases.draw_params(lambda key: embeds.masked_patches.init(key, P=45, D=D))
    head_params = cases.draw_params(lambda key: heads.pixels.init(key, P=P, D=D))

    @jax.jit
    def compute(image_BYXZ):
        inputs = {"v_BNP": embeds.cut(image_BYXZ, size=3), "hidden_BN": hidden_BN}
        x_BND = embeds.masked_patches.apply(params, inputs)
        return x_BND, heads.pixels.apply(head_params, x_BND)

    x_BND, v_BNP = jax.device_get(compute(image_BYXZ))
    for b in range(2):
        X = reference.patch_tokens(np.asarray(image_BYXZ[b]), np.asarray(params["W_DP"]), 3)
        X = X + np.asarray(params["b_D"])[:, None]
        cases.assert_close(x_BND[b], reference_image.masked_tokens(X, hidden_BN[b], np.asarray(params["h_D"])).T)
        W, bias = np.asarray(head_params["W_PD"]), np.asarray(head_params["b_P"])
        cases.assert_close(v_BNP[b], reference_image.predicted_patches(translate.columns(x_BND[b]), W, bias).T)


@cases.float64()
def test_squared_error_equals_the_reference_and_ignores_patches_of_weight_0():
    visible_BN1, error = ~HIDDEN_BN[..., None], jax.jit(loss.squared_error)
    prediction_BNP, target_BNP = (np.where(visible_BN1, np.nan, cases.normal(i, B, N, P)) for i in (0, 1))
    for b in range(B):
        prediction, truth = (np.asarray(v_BNP[b]).T for v_BNP in (prediction_BNP, target_BNP))
        total, count = error(prediction_BNP[b : b + 1], target_BNP[b : b + 1], HIDDEN_BN[b : b + 1] * 1.0)
        assert count == HIDDEN_BN[b].sum() * P
        cases.assert_close(total / count, reference_image.mean_squared_error(prediction, truth, HIDDEN_BN[b]))
    grads_BNP = jax.jit(jax.grad(lambda v: loss.squared_error(v, target_BNP, HIDDEN_BN * 1.0)[0]))(prediction_BNP)
    cases.assert_close(grads_BNP, np.where(visible_BN1, 0, 2 * (prediction_BNP - target_BNP)))


def test_squared_error_weights_patches_and_counts_pixels():
    arrays, error = np.array([[[[1.0, 2], [5, 5]]], [[[0.0, 0], [4, 5]]]], np.float32), jax.jit(loss.squared_error)
    assert error(*arrays, np.array([[0.5, 2.0]], np.float32)) == (4.5, 5)
    assert error(*arrays, np.zeros((1, 2), np.float32)) == (0, 0)


def test_no_hidden_pixel_reaches_an_output_or_a_gradient():
    """Not even NaN does. A visible pixel changes the outputs of all patches, also of hidden ones."""
    variants = {"embed": build.bind_sizes(embeds.masked_patches, P=P), "head": build.bind_sizes(heads.pixels, P=P)}
    model = build.model(tiny.settings("masked_image", model__M=1).model, **variants, N=N)
    params = cases.draw_params(model.init)

    @jax.jit
    def compute(v_BNP):
        def predict(params):
            return model.apply(params, {"v_BNP": v_BNP, "hidden_BN": HIDDEN_BN}, mask=None)[0]

        return predict(params), jax.grad(lambda params: jnp.sum(predict(params) ** 2))(params)

    v_BNP, other_BNP = (np.array(cases.normal(0, B, N, P)) for _ in range(2))
    other_BNP[0, 1, 3] += 1  # patch 1 of image 0 is visible
    arrays = v_BNP, np.where(HIDDEN_BN[..., None], np.float32("nan"), v_BNP), other_BNP
    clean, dirty, other = (jax.device_get(compute(array)) for array in arrays)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(clean))
    jax.tree.map(np.testing.assert_array_equal, clean, dirty)
    is_changed = other[0] != clean[0]
    assert is_changed[0].any(-1).all() and not is_changed[1].any()
    assert clean[1]["embed"]["h_D"].any() and clean[1]["embed"]["W_DP"].any()


def test_join_is_the_inverse_of_cut():
    image_BYXZ = np.asarray(cases.normal(0, 2, 6, 9, 5))
    v_BNP = np.asarray(embeds.cut(image_BYXZ, size=3))
    np.testing.assert_array_equal(embeds.join(v_BNP, Y=6, X=9, size=3), image_BYXZ)
    for slow, image_YXZ in zip(v_BNP, image_BYXZ, strict=True):
        cases.assert_close(slow, reference_image.vec_patches(image_YXZ, 3).T, 1e-6)
    for sizes in ({"Y": 6, "X": 6, "size": 3}, {"Y": 7, "X": 9, "size": 3}, {"Y": 10, "X": 15, "size": 5}):
        with raises(ValueError, f"{sizes['Y']} x {sizes['X']}"):
            embeds.join(v_BNP, **sizes)

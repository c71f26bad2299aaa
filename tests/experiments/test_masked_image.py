"""Image-to-image prediction (E26): which patches are hidden, the task they make, and what is shown of it."""

import jax
import numpy as np
import pytest
import tiny
from errors import raises

from experiments.build import losses
from experiments.data import windows
from experiments.engine import batches, errors
from experiments.figures import images


def numbered(index_B, rng):
    """Return images whose pixels are their index."""
    return {"image_BYXZ": index_B.reshape(-1, 1, 1, 1).astype(np.float32), "label_B": index_B, "weight_B": index_B}


@pytest.mark.parametrize(("patches", "share", "count"), [(16, 0.75, 12), (49, 0.75, 37), (2, 0.5, 1)])
def test_so_many_patches_are_hidden(patches, share, count):
    fetch = windows.patches(numbered, N=patches, share=share)
    for rng in (None, np.random.default_rng(0)):
        batch = fetch(np.arange(211), rng)
        assert batch.keys() == {"image_BYXZ", "hidden_BN", "weight_BN"}
        assert batch["hidden_BN"].dtype == bool and batch["weight_BN"].dtype == np.float32
        assert batch["hidden_BN"].shape == (211, patches) and (batch["hidden_BN"].sum(1) == count).all()
        np.testing.assert_array_equal(batch["hidden_BN"], batch["weight_BN"])
        rate = count / patches  # every patch is hidden as often as any other
        assert abs(batch["hidden_BN"].mean(0) - rate).max() < 5 * np.sqrt(rate * (1 - rate) / 211)
        assert len(np.unique(batch["hidden_BN"], axis=0)) > 1


@pytest.mark.parametrize(("N", "share"), [(16, 0.0), (16, 1.0), (16, -0.5), (16, 0.99), (16, float("nan")), (7, 0.07)])
def test_a_share_that_hides_all_or_nothing_is_refused(N, share):
    with raises(errors.UserError, "image.mask_ratio", share, N):
        windows.patches(numbered, N=N, share=share)


def test_in_evaluation_it_depends_on_the_example_and_in_training_on_the_step():
    fetch = windows.patches(numbered, N=16, share=0.75)
    small, large = (batches.evaluation(fetch, n=13, batch=batch) for batch in (4, 16))
    rows = np.concatenate([small[i]["hidden_BN"] for i in range(len(small))])[:13]
    np.testing.assert_array_equal(rows, large[0]["hidden_BN"][:13])
    assert len(np.unique(rows, axis=0)) == 13 and large[0]["weight_BN"][13:].sum() == 0
    train = batches.train(fetch, n=8, batch=8, seed=0)
    order, later = (train[step]["image_BYXZ"].ravel().argsort() for step in (0, 1))
    np.testing.assert_array_equal(train[0]["hidden_BN"], batches.train(fetch, n=8, batch=8, seed=0)[0]["hidden_BN"])
    assert (train[0]["hidden_BN"][order] != train[1]["hidden_BN"][later]).any()


def test_the_task_its_baseline_and_what_is_shown(tmp_path, monkeypatch):
    """Colour images of 4 x 6 pixels get brighter to the right; the baseline is computed by loops."""
    rng = np.random.default_rng(0)
    x = (rng.random((16, 4, 6, 3)) + np.linspace(0, 3, 6)[:, None]).astype(np.float32)
    y, train_BYXZ, held_out_BYXZ = np.zeros(16, np.int32), x[:11], x[11:]
    np.savez(tmp_path / "a.npz", x_train=train_BYXZ, y_train=y[:11], x_test=held_out_BYXZ, y_test=y[11:])
    changes = {"image.source": str(tmp_path / "a.npz"), "model.M": 1, "mesh.data": 1}
    changes |= {"train.batch_size": 8}
    rows = [{"step": 1, "eval/loss": 0.5, "eval/explained": 0.458}]
    given, draw = {}, images.hidden_patches
    monkeypatch.setattr(images, "hidden_patches", lambda path, **some: draw(path, **given.update(some) or some))
    work, (files, _), _ = tiny.shown(tiny.settings("masked_image", **changes), tmp_path, rows)
    assert [file.name for file in files] == ["loss.png", "prediction.png", "attention.png"]
    task, batch = work.task, work.task.evaluation[0]
    hidden_BN = batch["hidden_BN"][:5]
    mean_Z, std_Z = train_BYXZ.mean((0, 1, 2), dtype=np.float64), train_BYXZ.std((0, 1, 2), dtype=np.float64)
    wrong = 0.0
    for image_YXZ, hidden_N in zip((held_out_BYXZ - train_BYXZ.mean(0)) / std_Z, hidden_BN, strict=True):
        wrong += sum(np.square(image_YXZ[n // 3 * 2 :][:2, n % 3 * 2 :][:, :2]).sum() for n in range(6) if hidden_N[n])
    assert task.baseline == {"loss": pytest.approx(wrong / (hidden_BN.sum() * 2 * 2 * 3), rel=1e-5)}
    assert task.tokens_per_example == 6 and hidden_BN.sum(1).tolist() == [4] * 5
    np.testing.assert_allclose(batch["image_BYXZ"][:5] * std_Z + mean_Z, held_out_BYXZ, atol=1e-5)
    measured = tiny.measure(task)(tiny.drawn(task), batch, None)
    found = {name: float(total / count) for name, (total, count) in measured.items()}
    assert found["explained"] == pytest.approx(1 - found["loss"] / task.baseline["loss"], rel=1e-4)
    v_BNP = np.asarray(jax.jit(work.apply)(tiny.drawn(task), batch))[:5]
    prediction_BYXZ = v_BNP.reshape(5, 2, 3, 2, 2, 3).swapaxes(2, 3).reshape(5, 4, 6, 3) * std_Z + mean_Z
    np.testing.assert_allclose(given["prediction_BYXZ"], prediction_BYXZ, rtol=1e-4, atol=1e-4)
    assert "4 of 6 patches hidden" in given["title"] and "explains 46 %" in given["title"]


def test_the_share_explained_is_0_for_the_average_and_1_for_the_truth():
    truth_BNP, average_NP = np.split(np.random.default_rng(0).random((6, 6, 12), np.float32), [5])
    average_BNP, weight_BN = np.broadcast_to(average_NP, truth_BNP.shape), np.eye(5, 6, dtype=np.float32)
    for share, v_BNP in ((0, average_BNP), (1, truth_BNP), (0.75, (truth_BNP + average_BNP) / 2)):
        found = losses.explain_variance(v_BNP, truth_BNP, average_NP, weight_BN)
        total, count = found["explained"]
        assert float(total / count) == pytest.approx(share, abs=1e-6)
        total, count = found["loss"]
        error = np.square(v_BNP - truth_BNP)[np.eye(5, 6) > 0].mean()
        assert float(total / count) == pytest.approx(error, abs=1e-6) and count == 5 * 12


@pytest.mark.parametrize(
    ("setting", "value", "shown"),
    [("image.patch", 3, "3 x 3"), ("image.mask_ratio", 1.0, 1.0), ("model.output_cap", 5.0, "model.output_cap")],
)
def test_what_cannot_be_hidden_is_refused(setting, value, shown):
    with raises(errors.UserError, setting, shown):
        tiny.task_of(tiny.settings("masked_image", **{setting: value}))

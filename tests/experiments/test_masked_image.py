"""Image-to-image prediction (E26): which patches are hidden, the task they make, whole runs and their figures."""

import itertools
import json
import pathlib

import numpy as np
import pytest
import tiny
from matplotlib import image, text

from experiments import masked_image
from experiments.data import masking
from experiments.engine import batches, compilation, errors, log
from experiments.figures import images
from tfm import embed

# ------------------------------------------------------------------------------------------------- what is hidden


def numbered(index_B, rng):
    """Images that say which they are."""
    return {"image_BYXZ": index_B.reshape(-1, 1, 1, 1).astype(np.float32), "label_B": index_B, "weight_B": index_B}


@pytest.mark.parametrize(("patches", "share", "count"), [(16, 0.75, 12), (49, 0.75, 37), (2, 0.5, 1), (7, 0.07, 0)])
def test_so_many_patches_are_hidden(patches, share, count):
    if not count:
        with pytest.raises(errors.UserError, match="of 7 patches .* image.mask_ratio = 0.07"):
            masking.patches(numbered, N=patches, share=share)
        return
    fetch = masking.patches(numbered, N=patches, share=share)
    for rng in (None, np.random.default_rng(0)):
        batch = fetch(np.arange(211), rng)
        assert batch.keys() == {"image_BYXZ", "hidden_BN", "weight_BN"}
        assert batch["hidden_BN"].dtype == bool and batch["weight_BN"].dtype == np.float32
        assert batch["hidden_BN"].shape == (211, patches) and (batch["hidden_BN"].sum(1) == count).all()
        np.testing.assert_array_equal(batch["hidden_BN"], batch["weight_BN"])
        rate = count / patches  # every patch is hidden as often as any other
        assert abs(batch["hidden_BN"].mean(0) - rate).max() < 5 * np.sqrt(rate * (1 - rate) / 211)
        assert len(np.unique(batch["hidden_BN"], axis=0)) > 1


@pytest.mark.parametrize("share", [0.0, 1.0, -0.5, 1.5, 0.99, float("nan")])
def test_a_share_that_hides_all_or_nothing_is_refused(share):
    with pytest.raises(
        errors.UserError, match="of 16 patches at least one must be hidden and one be seen.*image.mask_ratio"
    ):
        masking.patches(numbered, N=16, share=share)


def test_in_evaluation_it_depends_on_the_example_and_in_training_on_the_step():
    fetch = masking.patches(numbered, N=16, share=0.75)
    small, large = (batches.evaluation(fetch, n=13, batch=batch) for batch in (4, 16))
    rows = np.concatenate([small[i]["hidden_BN"] for i in range(len(small))])[:13]
    np.testing.assert_array_equal(rows, large[0]["hidden_BN"][:13])
    assert len(np.unique(rows, axis=0)) == 13 and large[0]["weight_BN"][13:].sum() == 0
    train = batches.train(fetch, n=8, batch=8, seed=0)
    order, later = (train[step]["image_BYXZ"].ravel().argsort() for step in (0, 1))
    np.testing.assert_array_equal(train[0]["hidden_BN"], batches.train(fetch, n=8, batch=8, seed=0)[0]["hidden_BN"])
    assert (train[0]["hidden_BN"][order] != train[1]["hidden_BN"][later]).any()


# --------------------------------------------------------------------------------------------------------- tasks


def archive(folder, *, train=11, held_out=5):
    """Colour images of 4 x 6 pixels, whose brightness differs between places."""
    rng = np.random.default_rng(0)
    x = (rng.random((train + held_out, 4, 6, 3)) + np.linspace(0, 3, 6)[:, None]).astype(np.float32)
    y = np.zeros(train + held_out, np.int32)
    parts = {"x_train": x[:train], "y_train": y[:train], "x_test": x[train:], "y_test": y[train:]}
    np.savez(folder / "a.npz", **parts)
    return str(folder / "a.npz"), parts["x_train"], parts["x_test"]


def test_the_baseline_is_the_error_of_the_average_training_image(tmp_path):
    source, train_BYXZ, held_out_BYXZ = archive(tmp_path)
    settings = tiny.settings("masked_image", image__source=source, train__batch_size=8, train__evaluate_batch=8)
    task = tiny.task_of(settings)
    hidden_BN = task.evaluation[0]["hidden_BN"][:5]
    mean_Z, std_Z = train_BYXZ.mean((0, 1, 2), dtype=np.float64), train_BYXZ.std((0, 1, 2), dtype=np.float64)
    wrong = 0.0
    for image_YXZ, hidden_N in zip((held_out_BYXZ - train_BYXZ.mean(0)) / std_Z, hidden_BN, strict=True):
        wrong += sum(image_YXZ[n // 3 * 2 :][:2, n % 3 * 2 :][:, :2].__pow__(2).sum() for n in range(6) if hidden_N[n])
    pixels = hidden_BN.sum() * 2 * 2 * 3
    assert task.baseline == {"loss": pytest.approx(wrong / pixels, rel=1e-5)}
    assert task.tokens_per_example == 6 and hidden_BN.sum(1).tolist() == [4] * 5
    given = task.evaluation[0]["image_BYXZ"][:5] * std_Z + mean_Z
    np.testing.assert_allclose(given, held_out_BYXZ, atol=1e-5)


def test_the_share_explained_is_0_for_the_average_and_1_for_the_truth(tmp_path):
    rng = np.random.default_rng(0)
    batch = {"image_BYXZ": rng.random((5, 4, 6, 3), np.float32), "weight_BN": np.eye(5, 6, dtype=np.float32)}
    average_YXZ = rng.random((4, 6, 3), np.float32)
    truth_BNP = embed.cut(batch["image_BYXZ"], size=2)
    average_BNP = np.broadcast_to(embed.cut(average_YXZ[None], size=2), truth_BNP.shape)
    for share, v_BNP in ((0, average_BNP), (1, truth_BNP), (0.75, (truth_BNP + average_BNP) / 2)):
        found = masked_image.measures(v_BNP, batch, average_YXZ, size=2)
        total, count = found["explained"]
        assert float(total / count) == pytest.approx(share, abs=1e-6)
        total, count = found["loss"]
        error = np.square(v_BNP - truth_BNP)[np.eye(5, 6) > 0].mean()
        assert float(total / count) == pytest.approx(error, abs=1e-6) and count == 5 * 12


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"image__patch": 3}, "images of 8 x 8 pixels do not divide into patches of 3 x 3"),
        ({"image__patch": 8}, "of 1 patches at least one must be hidden"),
        ({"image__mask_ratio": 1.0}, "image.mask_ratio = 1.0"),
    ],
)
def test_what_cannot_be_hidden_is_refused(changes, complaint):
    with pytest.raises(errors.UserError, match=complaint):
        tiny.task_of(tiny.settings("masked_image", **changes))


# ---------------------------------------------------------------------------------------------------------- runs


def fashion(folder):
    """Random garments in the files of Fashion-MNIST."""
    (folder / "fashion-mnist").mkdir()
    for part, n in (("train", 64), ("t10k", 11)):
        pixels = np.random.default_rng(n).integers(0, 256, (n, 28, 28), np.uint8)
        for kind, array in (("images-idx3", pixels), ("labels-idx1", np.zeros(n, np.uint8))):
            header = bytes([0, 0, 8, array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape)
            (folder / "fashion-mnist" / f"{part}-{kind}-ubyte").write_bytes(header + array.tobytes())


SMALL = {
    "masked_image": {"model.M": 1, "model.D": 32, "optim.learning_rate": 1e-2, "train.steps": 120},
    "masked_image_fashion": {"model.M": 1, "model.D": 8, "train.steps": 2},
}


@pytest.mark.parametrize("name", SMALL)
def test_a_run_from_its_command_to_its_figures(name, tmp_path, monkeypatch):
    fashion(tmp_path)
    monkeypatch.setenv("TFM_DATA", str(tmp_path))
    monkeypatch.setattr(compilation, "measured_peak", lambda *, devices: 1e9)
    changes = {"optim.warmup_steps": 1, "train.evaluate_every": 0, "train.save_every": 0} | SMALL[name]
    root = pathlib.Path(masked_image.__file__).parent.parent
    words = [f"--config.{key}={value}" for key, value in changes.items()]
    outcome = tiny.run("--config", str(root / f"configs/{name}.py"), "--workdir", str(tmp_path / "run"), *words)
    assert (outcome.code, outcome.err) == (0, "")
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    explained = 1 - summary["eval/loss"] / summary["baseline/loss"]
    assert summary["eval/explained"] == pytest.approx(explained, abs=1e-4)
    if name == "masked_image":
        assert explained > 0.02 and log.read(tmp_path / "run")[0]["train/explained"] < 0
    assert {path.stem for path in (tmp_path / "run/figures").iterdir()} == {"loss", "prediction", "attention"}
    for path in (tmp_path / "run/figures").iterdir():
        assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n") and str(path) in outcome.out


# ------------------------------------------------------------------------------------------------------- figures


@pytest.fixture
def drawn(monkeypatch):
    """The figures handed over for writing, and every word of them with the box it was drawn in."""
    handed, seen, draw, write = [], {}, text.Text.draw, images.plots.write

    def record(self, renderer):
        draw(self, renderer)
        if self.get_visible() and self.get_text().strip():
            seen[self] = self.get_window_extent(renderer).frozen(), self.get_figure().bbox.frozen()

    monkeypatch.setattr(text.Text, "draw", record)
    monkeypatch.setattr(images.plots, "write", lambda d, path: (handed.append(d), write(d, path)))
    return handed, seen


@pytest.mark.parametrize(("count", "Z", "Y"), [(1, 1, 4), (3, 3, 4), (11, 1, 8)])
def test_the_figure_shows_input_prediction_and_truth(count, Z, Y, drawn, tmp_path, caplog):
    rng = np.random.default_rng(0)
    image_BYXZ = rng.integers(0, 256, (count, Y, 6, Z)).astype(np.uint8)
    image_BYXZ[0, 0, :2, 0] = [0, 255]
    prediction_BYXZ = rng.normal(128, 200, image_BYXZ.shape)
    hidden_BN = rng.random((count, Y // 2 * 3)) < 0.7
    words = "12 of 16 patches hidden, $5 of them: the prediction explains 45 % of the hidden pixels' variance"
    images.hidden_patches(
        tmp_path / "a.png",
        **{"image_BYXZ": image_BYXZ, "prediction_BYXZ": prediction_BYXZ, "hidden_BN": hidden_BN},
        size=2,
        title=words,
    )
    assert image.imread(tmp_path / "a.png")[..., :3].std() > 0.01 and "Clipping" not in caplog.text
    handed, seen = drawn
    panels = np.reshape(handed[0].axes, (3, min(count, 8)))
    assert [row[0].get_ylabel() for row in panels] == ["input", "prediction", "truth"]
    for b, column in enumerate(panels.T):
        given, predicted, truth = (np.asarray(panel.images[0].get_array()) for panel in column)
        np.testing.assert_allclose(truth, np.broadcast_to(image_BYXZ[b] / 255, (Y, 6, 3)), atol=1e-6)
        for y, x in itertools.product(range(Y), range(6)):
            is_hidden = hidden_BN[b, y // 2 * 3 + x // 2]
            expected = np.clip(prediction_BYXZ[b, y, x] / 255, 0, 1) if is_hidden else truth[y, x]
            np.testing.assert_allclose(predicted[y, x], np.broadcast_to(expected, 3), atol=1e-6)
            np.testing.assert_allclose(given[y, x], images.HIDDEN if is_hidden else truth[y, x], atol=1e-6)
    assert {word.get_text().replace("\n", " ") for word in seen} == {words, "input", "prediction", "truth"}
    for box, whole in seen.values():
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= whole.x1 and box.y1 <= whole.y1
    for (a, _), (b, _) in itertools.combinations(seen.values(), 2):
        assert min(min(a.x1, b.x1) - max(a.x0, b.x0), min(a.y1, b.y1) - max(a.y0, b.y0)) < 1

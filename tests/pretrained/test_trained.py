"""Opened models: raw images are normalised as in training, and activations and features are those of the head."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import published
import pytest
import tiny
from errors import raises
from PIL import Image

from experiments.config import errors
from experiments.data import image_file, images
from experiments.pretrained import open_model, trained
from experiments.tools import sample
from tfm import inside

N, LENGTHS = 11, (5, 11, 8)
VALID_BN = np.arange(N) < np.array(LENGTHS)[:, None]
RAW_BYXZ = np.random.default_rng(0).integers(0, 17, (3, 8, 8, 1)).astype(np.uint8)
M, D, H = 2, 8, 2
TEXT = {"text.N": N}


def draw_ids(W: int) -> np.ndarray:
    return np.where(VALID_BN, np.random.default_rng(1).integers(1, W, (3, N)), 0)


def open_run(folder, experiment, **changes) -> trained.Trained:
    if experiment == "text_classification":
        (folder / "texts.csv").write_text("text,label\n" + "".join(f"word {i},{i % 3}\n" for i in range(99)))
        changes = changes | {"text.source": str(folder / "texts.csv")}
    return open_model.open(published.write_run(folder / "run", experiment, **changes))


MODELS = [
    ("language", TEXT | {"text.objective": "causal"}),
    ("language", TEXT | {"text.objective": "masked"}),
    ("text_classification", TEXT | {"text.head": "linear"}),
    ("text_classification", TEXT | {"text.head": "pooled"}),
    ("vision", {"image.patch": 4, "image.head": "pooled"}),
    ("vision", {"image.patch": 4, "image.head": "class_token"}),
]


@pytest.mark.parametrize(("experiment", "changes"), MODELS)
def test_logits_are_linear_in_the_features_and_do_not_depend_on_the_batch(tmp_path, experiment, changes):
    """A head of one matrix maps the features to the logits of the example, of its last token, or of its mean token."""
    model = open_run(tmp_path, experiment, **changes)
    is_image, is_causal = experiment == "vision", changes.get("text.objective") == "causal"
    inputs, valid = (RAW_BYXZ, None) if is_image else (draw_ids(model.facts["W"]), VALID_BN)
    look, together = model.look(inputs, ("hidden", "q", "A"), valid), np.asarray(model(inputs, valid))
    head, logits = model.params["head"], together
    if is_causal:
        logits = logits[np.arange(3), np.array(LENGTHS) - 1]
    elif logits.ndim == 3:
        logits = (logits * VALID_BN[..., None]).sum(1) / VALID_BN.sum(1, keepdims=True)
    matrix = head["G_CD"] if "G_CD" in head else head["G_WD"]
    np.testing.assert_allclose(look["features"] @ matrix.T + head.get("b_C", 0), logits, atol=2e-5)
    tokens = N if not is_image else 4 + (changes["image.head"] == "class_token")
    assert look["features"].shape == (3, D) and look["hidden"].shape == (M, 3, tokens, D)
    assert look["q"].shape == (M, 3, H, tokens, D // H) and look["A"].shape == (M, 3, H, tokens, tokens)
    assert {array.dtype for array in look.values()} == {np.dtype("float32")}
    np.testing.assert_allclose(look["A"].sum(-1), 1, atol=1e-5)
    double_last = {"hidden": lambda x_BND, m: jnp.where(m == M - 1, 2 * x_BND, x_BND)}
    edited = model.look(inputs, ("hidden",), valid, edit=double_last)["hidden"]
    np.testing.assert_allclose(edited, look["hidden"] * np.array([1, 2])[:, None, None, None], rtol=1e-5, atol=1e-6)
    if is_image:
        return
    own = dataclasses.replace(model, own=model.network())  # as of a user's experiment
    np.testing.assert_allclose(own(inputs), model(inputs), atol=1e-6)
    assert (look["A"][:, ~VALID_BN[:, None, None].repeat(H, 1).repeat(N, 2)] == 0).all()
    if changes.get("text.head") == "linear":
        return
    for b, n in enumerate(LENGTHS[:2]):  # with padding, and of the longest text
        alone_N = np.asarray(model(inputs[b : b + 1, :n]))[0]
        np.testing.assert_allclose(alone_N, together[b] if alone_N.ndim == 1 else together[b, :n], atol=2e-5)
    unmasked_N = np.asarray(model(inputs[:1]))[0]  # the padding counts as text
    difference_N = unmasked_N - together[0]
    assert (np.abs(difference_N if difference_N.ndim == 1 else difference_N[: LENGTHS[0]]).max() < 1e-5) == is_causal


RUNS = [*MODELS[:1], MODELS[3], MODELS[4], ("masked_image", {"image.patch": 4}), ("translation", {})]


@pytest.mark.parametrize(("experiment", "changes"), RUNS)
def test_run_edits_every_model_under_jit_vmap_and_grad(tmp_path, experiment, changes):
    """Doubled tokens of the last layer: compiled with an edit of tfm.inside, and by a function of the caller."""
    if experiment == "translation":
        pytest.importorskip("sacrebleu")
        (tmp_path / "pairs.txt").write_text("".join(f"one {n}\tuno {n}\n" for n in range(50)))
        changes = {"pairs__source": str(tmp_path / "pairs.txt"), "pairs__N": N}
    model = open_run(tmp_path, experiment, **changes)
    is_image, options = "image" in experiment or experiment == "vision", {}
    if experiment == "translation":
        source_BS = np.random.default_rng(2).integers(1, model.facts["W"], (3, model.facts["N"]))
        inputs = source_BS, source_BS > 0, source_BS[:, ::-1].copy()
    else:
        inputs = RAW_BYXZ if is_image else draw_ids(model.facts["W"])
        options = {} if is_image else {"valid": VALID_BN}
    plain, look = model.run(inputs, look=("hidden", "y"), **options)
    assert {name: x.ndim for name, x in look.items()} == {"hidden": 4, "y": 5} and look["y"].shape[2] == H
    if experiment not in ("masked_image", "translation"):
        np.testing.assert_array_equal(plain, model(inputs, *options.values()))
    np.testing.assert_array_equal(model.run(inputs, edit={}, **options)[0], plain)

    x_MBND = look["hidden"]
    is_last_M = (jnp.arange(M) == M - 1)[:, None, None, None]

    def scale(factor):
        return model.run(inputs, edit={"hidden": inside.replace(factor * x_MBND, is_last_M)}, **options)[0]

    def double(x, m):
        return jnp.where(m == M - 1, 2 * x, x)

    by_function, edited = model.run(inputs, edit={"hidden": double}, look=("hidden",), **options)
    np.testing.assert_allclose(edited["hidden"][-1], 2 * x_MBND[-1], rtol=1e-6)
    together = jax.jit(jax.vmap(scale))(jnp.array([1.0, 2.0]))
    np.testing.assert_allclose(together[0], plain, atol=2e-5)
    np.testing.assert_allclose(together[1], by_function, atol=2e-5)
    np.testing.assert_allclose(scale(2.0), by_function, atol=2e-5)
    slope = jax.grad(lambda factor: jnp.square(scale(factor)).sum())(1.5)
    values = [float(np.square(np.asarray(scale(factor), np.float64)).sum()) for factor in (1.49, 1.51)]
    np.testing.assert_allclose(slope, (values[1] - values[0]) / 0.02, rtol=0.02, atol=1e-2)


def test_run_computes_the_logits_of_one_token_of_each_text(tmp_path):
    model = open_run(tmp_path / "text", *MODELS[0][:1], **MODELS[0][1])
    w_BN = draw_ids(model.facts["W"])
    logits_BNW, _ = model.run(w_BN, valid=VALID_BN)
    last_B = np.array(LENGTHS) - 1
    np.testing.assert_allclose(
        model.run(w_BN, valid=VALID_BN, at=last_B)[0], logits_BNW[np.arange(3), last_B], atol=1e-6
    )
    np.testing.assert_allclose(model.run(w_BN, valid=VALID_BN, at=-1)[0], logits_BNW[:, -1], atol=1e-6)
    with raises(errors.UserError, f"at = {N}", f"{N} tokens"):
        model.run(w_BN, at=N)
    image = open_run(tmp_path / "image", "vision", **MODELS[4][1])
    with raises(errors.UserError, "at = -1", "classifies images"):
        image.run(RAW_BYXZ, at=-1)


def test_names_lists_what_run_returns(tmp_path):
    model = open_run(tmp_path / "text", *MODELS[0][:1], **MODELS[0][1])
    _, look = model.run(draw_ids(model.facts["W"]), look=tuple(model.names()))
    assert {name: len(axes.split()) for name, axes in model.names().items()} == {n: x.ndim for n, x in look.items()}
    assert model.names()["hidden"] == f"M={M} B N D={D}" and model.names()["q"] == f"M={M} B H={H} N K={D // H}"
    for name, x in look.items():
        for size, axis in zip(x.shape, model.names()[name].split(), strict=True):
            assert "=" not in axis or axis.endswith(f"={size}"), name
    with raises(errors.UserError, "hiden", "hidden"):
        model.run(draw_ids(model.facts["W"]), edit={"hiden": lambda x, m: x})


def test_features_of_masked_images_are_the_mean_of_tokens_without_a_mask(tmp_path):
    model = open_run(tmp_path, "masked_image", **{"image.patch": 4})
    look = model.look(RAW_BYXZ, ("hidden",))
    assert model.kind == "masked_image" and look["hidden"].shape == (M, 3, 4, D)
    assert np.abs(np.diff(look["features"], axis=0)).max() > 0.01  # the images differ, and no patch is masked
    norm, last_BND = jax.device_get(model.params["norm"]), look["hidden"][-1]
    centred_BND = last_BND - last_BND.mean(-1, keepdims=True)
    normed_BND = centred_BND / np.sqrt(last_BND.var(-1, keepdims=True) + 1e-5) * norm["gain_D"] + norm["shift_D"]
    np.testing.assert_allclose(look["features"], normed_BND.mean(1), atol=1e-5)


def test_published_models_with_and_without_a_head(tmp_path):
    """BERT's features are the mean of the real tokens, and do not depend on the head. A ViT's are its class token."""
    whole = open_model.open(published.save(tmp_path / "whole", "bert"))
    arrays = {name: x for name, x in published.tensors("bert").items() if not name.startswith("cls.")}
    headless = open_model.open(published.save(tmp_path / "headless", "bert", arrays))
    w_BN = draw_ids(published.W)
    look, alone = (model.look(w_BN, ("k",), VALID_BN) for model in (whole, headless))
    assert headless.facts["headless"] and look["k"].shape == (2, 3, published.H, N, published.K)
    for name in look:
        np.testing.assert_array_equal(look[name], alone[name])
    first = headless.look(w_BN[:1, : LENGTHS[0]], ())
    np.testing.assert_allclose(first["features"][0], look["features"][0], atol=1e-5)
    assert first.keys() == {"features"}

    vit = open_model.open(published.save(tmp_path / "vit", "vit"))
    image_BYXZ = np.random.default_rng(0).integers(0, 256, (2, 15, 10, 2), np.uint8)
    head = jax.device_get(vit.params["head"])
    expected_BC = vit.look(image_BYXZ)["features"] @ head["G_CD"].T + head["b_C"]
    np.testing.assert_allclose(expected_BC, vit(image_BYXZ), atol=1e-4)


def test_an_unknown_activation_and_a_model_of_another_kind_are_refused(tmp_path):
    model = open_run(tmp_path, "vision", **{"image.patch": 4})
    with raises(errors.UserError, "hiden", "hidden"):
        model.look(RAW_BYXZ, ("hiden",))
    with raises(errors.UserError, "hiden", "hidden"):
        model.look(RAW_BYXZ, edit={"hiden": lambda x, m: x})
    other = published.write_run(tmp_path / "convolution", "convolution")
    with raises(errors.UserError, other, "convolution"):
        open_model.open(other).look(draw_ids(5))
    for name in ("image", "causal"):  # a file of the user's may have the name of a kind
        copy = published.copy_with_changes(model.path, tmp_path / name, experiment=name)
        for call in (lambda opened: opened(RAW_BYXZ), lambda opened: opened.look(RAW_BYXZ), trained.Trained.network):
            with raises(errors.UserError, f"belongs to the experiment {name}"):
                call(open_model.open(copy))


@pytest.mark.parametrize(
    ("task", "W", "kind"),
    [
        ("previous_causal:11", 22, "synthetic"),
        ("modular_addition:11", 12, "synthetic"),
        ("induction:11", 22, "causal"),
        ("ring:11", 22, "synthetic"),
    ],
)
def test_a_synthetic_run_is_opened_and_only_a_causal_one_ignores_later_tokens(tmp_path, task, W, kind):
    model = open_run(tmp_path, "synthetic", **{"synthetic.task": task})
    work = tiny.work_of(tiny.settings("synthetic", **{"synthetic.task": task}))
    batch = work.task.evaluation[0]
    w_BN = batch["w_BN"]
    assert model.kind == kind and (model.facts["N"], model.facts["W"]) == (w_BN.shape[1], W)
    logits_BNW = np.asarray(model(w_BN))
    np.testing.assert_allclose(logits_BNW, work.apply(model.params, batch), atol=1e-5)
    other_BN = np.concatenate([w_BN[:, :-1], (w_BN[:, -1:] + 1) % W], axis=1)
    is_same = np.allclose(np.asarray(model(other_BN))[:, 0], logits_BNW[:, 0], atol=1e-6)
    assert is_same == (task != "ring:11")
    assert model.look(w_BN, ("A",))["A"].shape == (M, len(w_BN), H, *w_BN.shape[1:] * 2)
    with raises(errors.UserError, model.path):  # it has no tokenizer
        sample.run(model.path, prompt="a")


def test_the_users_metric_of_a_run_is_not_executed_without_trust(tmp_path, monkeypatch):
    """A finished run has recorded which values of the metric are better."""
    run = published.write_run(tmp_path / "run", "vision", **{"image.patch": 4})
    changes = {"train__keep_best": "eval/evil", "train__metrics": ["my_evil:evil"]}
    copy = published.copy_with_changes(run, tmp_path / "copy", **changes)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_evil.py").write_text("raise SystemExit")
    with raises(errors.UserError, copy, "train.metrics", "--trust=my_evil:evil"):
        open_model.open(copy)
    (copy / "summary.json").write_text('{"steps": 2, "better": {"evil": "less"}}')
    assert open_model.open(copy).kind == "image"


# Raw images.


@pytest.fixture(scope="module")
def vision(tmp_path_factory):
    """Return a model of scikit-learn's digits: images of 8 x 8 pixels with values from 0 to 16."""
    changes = {"image.patch": 4, "image.head": "class_token"}
    return open_model.open(published.write_run(tmp_path_factory.mktemp("runs") / "image", "vision", **changes))


@pytest.fixture(scope="module")
def digits():
    return images.load("digits")


def test_raw_images_are_normalised_as_in_training(vision, digits):
    raw_BYXZ, (mean_Z, std_Z) = digits.evaluation_image_BYXZ[:9], images.statistics(digits.train_image_BYXZ)
    assert raw_BYXZ.dtype == np.uint8 and raw_BYXZ.max() == 16
    expected_BC = np.asarray(vision.logits((raw_BYXZ - mean_Z) / std_Z))
    assert np.abs(expected_BC - np.asarray(vision.logits(raw_BYXZ))).max() > 0.01  # normalisation changes the logits
    for batch in (raw_BYXZ, raw_BYXZ[..., 0], raw_BYXZ.astype(np.float64), raw_BYXZ.astype(np.int64)):
        np.testing.assert_allclose(vision(batch), expected_BC, atol=2e-6)
    for image in (raw_BYXZ[0], raw_BYXZ[0, ..., 0], [raw_BYXZ[0, ..., 0].tolist()]):
        np.testing.assert_allclose(vision(image), expected_BC[:1], atol=2e-6)
    white_BYX = np.round(raw_BYXZ[..., 0] * 255 / 16).astype(np.uint8)
    np.testing.assert_allclose(vision(white_BYX), expected_BC, atol=0.05)


@pytest.mark.parametrize("shape", [(20, 12), (16, 16, 3), (9, 7, 4)])
def test_images_of_another_size_or_with_colours_equal_their_file(vision, tmp_path, shape):
    image = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    Image.fromarray(image).save(tmp_path / "image.png")
    expected_1YXZ, _ = image_file.read(tmp_path / "image.png", vision.image_format)
    batch = image.reshape(1, *shape[:2], -1)
    np.testing.assert_array_equal(image_file.prepare(batch, vision.image_format), expected_1YXZ)
    np.testing.assert_array_equal(vision(batch), vision.logits(expected_1YXZ))


AMBIGUOUS = [
    (lambda raw: (raw - 4.9) / 6.0, "model.logits"),  # normalised already
    (lambda raw: raw / 16, "0 to 16"),
    (lambda raw: np.where(raw > 15, np.nan, raw), "nan"),
    (lambda raw: np.repeat(raw, 2, 1), "16, 8"),
    (lambda raw: raw.astype(bool), "bool"),
]


@pytest.mark.parametrize(("change", "part"), AMBIGUOUS)
def test_ambiguous_images_are_refused(vision, digits, change, part):
    with raises(errors.UserError, part):
        vision(change(digits.evaluation_image_BYXZ[:4].astype(np.float64)))


PHOTO = np.random.default_rng(0).integers(0, 256, (30, 40, 3), dtype=np.uint8)
COLOUR = image_file.describe_size(12, 16, 3) | {"values": [0, 255], "mean": [120.0] * 3, "std": [70.0] * 3}
GREY = image_file.describe_size(8, 8, 1) | {"values": [0, 16], "mean": [5.0], "std": [6.0]}


@pytest.mark.parametrize("like", [COLOUR, GREY], ids=["colour", "grey"])
@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "P", "1", "CMYK", "turned"])
def test_an_image_of_pillow_equals_its_file(tmp_path, like, mode):
    exif, file = Image.Exif(), tmp_path / ("image.tif" if mode == "CMYK" else "image.png")
    exif[image_file.ORIENTATION] = 6 if mode == "turned" else 1
    Image.fromarray(PHOTO).convert("RGB" if mode == "turned" else mode).save(file, exif=exif)
    expected_1YXZ, _ = image_file.read(file, like | {"assumed": False})
    with Image.open(file) as image:
        np.testing.assert_array_equal(image_file.prepare(image, like), expected_1YXZ)
        both_2YXZ = image_file.prepare([image, image.resize((20, 20))], like)
        assert both_2YXZ.shape == (2, *like["image"])
        if mode in ("RGB", "RGBA", "L"):  # one array of axes YX or YXZ, whatever the model's channels are
            np.testing.assert_array_equal(image_file.prepare(np.asarray(image), like), expected_1YXZ)


@pytest.mark.parametrize("image", [PHOTO.transpose(2, 0, 1), PHOTO[:12, :16] / 100 - 1, PHOTO[:12, :16] / 255])
def test_colours_that_come_first_or_are_normalised_are_refused(image):
    with raises(errors.UserError, image.shape):
        image_file.prepare(image, COLOUR)

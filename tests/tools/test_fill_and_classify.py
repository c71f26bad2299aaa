"""The tools fill and classify: masked tokens, and classes of images and of tokens."""

import json
import shutil

import numpy as np
import published
import pytest
import tiny
from errors import raises
from open_once import open_once  # noqa: F401  a fixture
from PIL import Image
from scipy.special import expit, softmax

from experiments.config import errors
from experiments.data import image_file, images, pretrained_tokenizer, tokenization
from experiments.pretrained import open_model
from experiments.tools import classify, export, fill, sample

N = 17


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return the folders of runs by their kinds."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "text.txt").write_bytes(tiny.TEXT)
    text = {"text.N": N, "text.source": str(folder / "text.txt"), "model.M": 1}
    return {
        "causal": published.write_run(folder / "causal", "language", **text),
        "masked": published.write_run(folder / "masked", "language", **text, text__objective="masked"),
        "image": published.write_run(folder / "image", "vision", image__patch=4, image__head="class_token"),
    }


def save(folder, pixels, name="a.png"):
    Image.fromarray(pixels).save(folder / name)
    return folder / name


def test_a_run_saves_its_tokenizer_and_the_format_of_its_images(runs):
    assert pretrained_tokenizer.read(runs["masked"]).mask == 256
    data = json.loads((runs["image"] / "data.json").read_text())
    assert data["image"] == [8, 8, 1] and data["values"] == [0, 16]
    assert data["classes"] == [str(digit) for digit in range(10)]
    digits = images.load("digits")
    np.testing.assert_allclose(data["mean"], digits.train_image_BYXZ.mean(), rtol=1e-5)


def test_a_model_of_another_kind_is_an_error(runs):
    for tool, kind in ((sample, "masked"), (sample, "image"), (fill, "causal"), (classify, "causal")):
        with raises(errors.UserError, runs[kind]):
            tool.run(runs[kind], prompt="[MASK]")


# Masked tokens.


def test_masked_tokens_are_filled_in_with_probabilities(runs, tmp_path):
    run = runs["masked"]
    outcome = tiny.command(fill, workdir=tmp_path / "out", checkpoint=run, prompt="A k[MASK]ng [MASK]")
    assert (outcome.code, outcome.err) == (0, "")
    p_NW = softmax(np.asarray(open_model.open(run)(np.array([[*b"A k", 256, *b"ng ", 256]])))[0], axis=-1)[:, :257]
    text, first, second = outcome.out.splitlines()
    tokens = pretrained_tokenizer.read(run)
    assert text == tokens.decode([*b"A k", p_NW[3].argmax(), *b"ng ", p_NW[7].argmax()])
    for line, n, p_W in ((first, 1, p_NW[3]), (second, 2, p_NW[7])):
        likely = ", ".join(f"{tokens.decode([w]) or tokens.name(w)!r} {p_W[w]:.3f}" for w in np.argsort(-p_W)[:5])
        assert line == f"  [MASK] {n}: {likely}"
    assert (tmp_path / "out" / "filled.txt").read_text(encoding="utf-8") == outcome.out
    for prompt, *parts in (("A king", "[MASK]"), ("[MASK]" + "A" * N, N + 1, N)):
        with raises(errors.UserError, *parts):
            fill.run(run, prompt=prompt)
    assert "\x1b" not in tiny.command(fill, checkpoint=run, prompt="\x1b[2J[MASK]").out


def test_a_published_bert_fills_tokens_in(tmp_path):
    tokenizer = published.save_bert_with_tokenizer(tmp_path)
    outcome = tiny.command(fill, checkpoint=tmp_path, prompt="word3   [MASK] word0")
    assert (outcome.code, outcome.err) == (0, "")
    text, line = outcome.out.splitlines()
    p_W = softmax(np.asarray(open_model.open(tmp_path)(np.array([[2, 8, 4, 5, 3]])))[0, 2])
    token = tokenizer.decode([int(p_W.argmax())], skip_special_tokens=True)
    assert text.split() == ["word3", *token.split(), "word0"] and f"{token!r}" in line and f"{p_W.max():.3f}" in line
    bare = {name: array for name, array in published.tensors("bert").items() if not name.startswith("cls.")}
    published.save(tmp_path / "bare", "bert", bare)
    with raises(errors.UserError, tmp_path / "bare", "head"):
        fill.run(tmp_path / "bare", prompt="[MASK]")


def test_a_published_bert_classifies_each_token(tmp_path):
    problems, names = ("multi_label_classification", "regression"), ("noun", "verb", "other")
    outputs, lines = [], []
    for problem in problems:
        folder = published.save_bert_classifier(tmp_path / problem, of_tokens=True, problem_type=problem)
        outputs.append(np.asarray(open_model.open(folder)(np.array([[2, 8, 5, 3]])))[0])
        lines.append(tiny.command(classify, checkpoint=folder, prompt="word3 word0").out.splitlines())
    tokens = zip(["[CLS]", "word3", "word0", "[SEP]"], expit(outputs[0]), strict=True)
    assert lines[0] == [f"  {p_C.max():.3f}  {names[p_C.argmax()]}  {token}" for token, p_C in tokens]
    assert lines[1] == [f"  {x}  {name}" for name, x in zip(names, outputs[1].T.tolist(), strict=True)]


def test_one_output_is_a_regression_unless_the_config_names_another_problem(tmp_path):
    images = published.tensors("vit")
    images |= {"classifier.weight": images["classifier.weight"][:1], "classifier.bias": images["classifier.bias"][:1]}
    published.save(tmp_path, "vit", images, id2label={"0": "age"})
    file = save(tmp_path, np.random.default_rng(0).integers(0, 256, (15, 10, 2), dtype=np.uint8))
    model = open_model.open(tmp_path)
    number = float(model.logits(image_file.read(file, model.image_format)[0])[0, 0])
    texts = {"single_label_classification": "1.000", "multi_label_classification": f"{expit(number):.3f}"}
    for problem, text in {"": number, "regression": number, **texts}.items():
        model.extras["problem_type"] = problem or None
        assert tiny.command(classify, checkpoint=tmp_path, file=file).out.splitlines()[1:] == [f"  {text}  age"]
    assert abs(number) > 0.01


def test_the_weights_of_a_head_decide_the_number_of_classes(tmp_path, capsys):
    for labels, names in (({"1": "b", "2": "c"}, ["LABEL_0", "b", "c"]), ({"2": "c", "0": "a", "1": "b"}, list("abc"))):
        folder = published.save(tmp_path / names[0], "vit", id2label=labels)
        assert open_model.open(folder).extras["class_names"] == names
        assert ("3 classes" in capsys.readouterr().out) == (len(labels) < 3)


def test_a_model_of_bytes_fills_in_one_character_and_names_special_tokens():
    byte_tokens = tokenization.Plain("bytes", "", ("[MASK]",))
    id_N = fill.encode(byte_tokens, "k[MASK][MASK]nig", N)
    text, *lines = fill.table(byte_tokens, id_N, np.eye(257)[[*"\xf6".encode()]]).split("\n")
    assert text == "k\xf6nig" and len(lines) == 2
    text = fill.table(byte_tokens, np.array([256]), np.eye(257)[[256]])
    assert text.endswith("'[MASK]' 1.000, '\\x00' 0.000, '\\x01' 0.000, '\\x02' 0.000, '\\x03' 0.000")


# Classes of images.


def test_an_image_file_is_classified_like_its_pixels(runs, tmp_path):
    run, digits = runs["image"], images.load("digits")
    image_YX = digits.evaluation_image_BYXZ[0, ..., 0]
    file = save(tmp_path, (image_YX.astype(int) * 255 // 16).astype(np.uint8))
    outcome = tiny.command(classify, workdir=tmp_path / "out", checkpoint=run, file=file)
    assert (outcome.code, outcome.err) == (0, "")
    p_C = softmax(np.asarray(open_model.open(run)(image_YX))[0])
    line, *lines = outcome.out.splitlines()
    assert line == f"{file}: 8 x 8 pixels, grey; resized to 8 x 8; grey, black 0 and white 16 like the model's images"
    assert [text.split()[1] for text in lines] == [str(c) for c in np.argsort(-p_C)[:5]]
    np.testing.assert_allclose([float(text.split()[0]) for text in lines], np.sort(p_C)[:-6:-1], atol=6e-3)
    assert (tmp_path / "out" / "classes.txt").read_text(encoding="utf-8") == outcome.out


def test_an_invalid_image_file_is_an_error(runs, tmp_path):
    (tmp_path / "text.png").write_text("no image")
    save(tmp_path, np.zeros((3, 3), np.uint16), "deep.png")
    for name, *parts in (("text.png", "image"), ("deep.png", "8 bits"), ("absent.png", "")):
        with raises(errors.UserError, tmp_path / name, *parts):
            classify.run(runs["image"], file=tmp_path / name)
    with raises(errors.UserError, "--file"):
        classify.run(runs["image"])
    file = save(tmp_path, np.zeros((3, 3), np.uint8), "\x1b[2J.png")
    assert "\x1b" not in tiny.command(classify, checkpoint=runs["image"], file=file).out
    with raises(errors.UserError, "image.head", "--trust=payload:s"):
        classify.run(published.copy_with_changes(runs["image"], tmp_path / "code", image__head="payload:s"), file=file)
    copy = shutil.copytree(runs["image"], tmp_path / "copy")
    (copy / "data.json").unlink()
    with raises(errors.UserError, "data.json"):
        classify.run(copy, file=file)


def test_a_published_vit_without_biases_of_queries_classifies(tmp_path):
    sides = ("query.bias", "key.bias", "value.bias")
    arrays = {name: x for name, x in published.tensors("vit").items() if not name.endswith(sides)}
    published.save(tmp_path, "vit", arrays, qkv_bias=False)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.1, 0.2], "image_std": [0.3, 0.4]}))
    image_format = image_file.load_format(tmp_path, open_model.open(str(tmp_path)).extras, Z=2, C=3)
    assert (image_format["image"], image_format["mean"]) == ([15, 10, 2], [0.1, 0.2])
    assert image_format["values"] == [0, pytest.approx(1)]
    file = save(tmp_path, np.random.default_rng(0).integers(0, 255, (15, 10, 2), np.uint8))
    outcome = tiny.command(classify, checkpoint=tmp_path, file=file)
    assert (outcome.code, outcome.err) == (0, "")
    assert {line.split()[1] for line in outcome.out.splitlines()[1:]} == {"cat", "dog", "owl"}


def test_an_export_describes_the_range_of_pixels(runs, tmp_path):
    folder_of_run = shutil.copytree(runs["image"], tmp_path / "run")
    data = json.loads((folder_of_run / "data.json").read_text()) | {"values": [-1.5, 3.0]}
    (folder_of_run / "data.json").write_text(json.dumps(data))
    outcome = tiny.command(export, workdir=tmp_path / "out", checkpoint=folder_of_run, family="vit")
    assert (outcome.code, outcome.err) == (0, "") and "preprocessor_config.json" in outcome.out
    file = save(tmp_path, np.random.default_rng(0).integers(0, 255, (11, 9), np.uint8))
    models = [open_model.open(str(folder)) for folder in (folder_of_run, tmp_path / "out")]
    run_format, export_format = (image_file.load_format(model.path, model.extras, Z=1, C=10) for model in models)
    assert run_format["classes"] == export_format["classes"]
    np.testing.assert_allclose(image_file.read(file, export_format)[0], image_file.read(file, run_format)[0], atol=1e-5)


def test_an_assumed_format_of_images_is_printed_and_not_exported(tmp_path):
    published.save(tmp_path / "vit", "vit")
    file = save(tmp_path, np.zeros((15, 10, 2), np.uint8))
    outcome = tiny.command(classify, checkpoint=tmp_path / "vit", file=file)
    assert outcome.code == 0 and "(assumed: there is no preprocessor_config.json)" in outcome.out.splitlines()[0]
    outcome = tiny.command(export, workdir=tmp_path / "out", checkpoint=tmp_path / "vit", family="vit")
    assert (outcome.code, outcome.err) == (0, "") and "preprocessor" not in outcome.out
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]

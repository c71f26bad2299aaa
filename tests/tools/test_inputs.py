"""Tools that read texts and images: fill, classify, features, evaluate. Many inputs have the results of each input."""

import contextlib
import csv
import functools
import io
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
from small_files import KING

from experiments.config import disk, errors
from experiments.data import image_file, images, labelled, pretrained_tokenizer, tokenization
from experiments.pretrained import open_model, trained
from experiments.tools import classify, evaluate, export, features, fill, sample

N = 17
RNG = np.random.default_rng(0)
MANY = "multi_label_classification"
TEXTS, LABELS = ["word3", "word0 word1 word2", "word5", "word7"], ["noun", "verb", "other"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return the folders of runs by their kinds. Next to them is reviews.csv, the texts of the classes."""
    folder = tmp_path_factory.mktemp("runs")
    rows = "".join(f"good {i} {'long ' * (i % 4)},praise\nbad {i},blame\n" for i in range(50))
    (folder / "reviews.csv").write_text(f"text,label\n{rows}")
    (folder / "king.txt").write_bytes(KING)
    text = {"text.N": N, "text.source": str(folder / "king.txt"), "model.M": 1}
    reviews = text | {"text.source": str(folder / "reviews.csv"), "text.head": "pooled"}
    settings = {
        "causal": ("language", text),
        "masked": ("language", text | {"text.objective": "masked"}),
        "classes": ("text_classification", reviews),
        "image": ("vision", {"image.patch": 4, "image.head": "class_token"}),
    }
    return {name: published.write_run(folder / name, kind, **fields) for name, (kind, fields) in settings.items()}


def save_image(file, pixels):
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(file)
    return file


def run_tool(tool, **values) -> str:
    """Return what the command prints. It has no errors."""
    outcome = tiny.command(tool, **values)
    assert (outcome.code, outcome.err) == (0, "")
    return outcome.out


def read_csv(file) -> list[dict]:
    with open(file, encoding="utf-8", newline="") as content:
        return [*csv.DictReader(content)]


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
    out = run_tool(fill, workdir=tmp_path / "out", checkpoint=run, prompt="A k[MASK]ng [MASK]")
    p_NW = softmax(np.asarray(open_model.open(run)(np.array([[*b"A k", 256, *b"ng ", 256]])))[0], axis=-1)[:, :257]
    text, first, second = out.splitlines()
    tokens = pretrained_tokenizer.read(run)
    assert text == tokens.decode([*b"A k", p_NW[3].argmax(), *b"ng ", p_NW[7].argmax()])
    for line, n, p_W in ((first, 1, p_NW[3]), (second, 2, p_NW[7])):
        likely = ", ".join(f"{tokens.decode([w]) or tokens.name(w)!r} {p_W[w]:.3f}" for w in np.argsort(-p_W)[:5])
        assert line == f"  [MASK] {n}: {likely}"
    assert (tmp_path / "out" / "filled.txt").read_text(encoding="utf-8") == out
    for prompt, *parts in (("A king", "[MASK]"), ("[MASK]" + "A" * N, N + 1, N)):
        with raises(errors.UserError, *parts):
            fill.run(run, prompt=prompt)
    assert "\x1b" not in run_tool(fill, checkpoint=run, prompt="\x1b[2J[MASK]")


def test_a_model_of_bytes_fills_in_one_character_and_names_special_tokens():
    byte_tokens = tokenization.Plain("bytes", "", ("[MASK]",))
    id_N = fill.encode(byte_tokens, "k[MASK][MASK]nig", N)
    text, *lines = fill.table(byte_tokens, id_N, np.eye(257)[[*"\xf6".encode()]]).split("\n")
    assert text == "k\xf6nig" and len(lines) == 2
    text = fill.table(byte_tokens, np.array([256]), np.eye(257)[[256]])
    assert text.endswith("'[MASK]' 1.000, '\\x00' 0.000, '\\x01' 0.000, '\\x02' 0.000, '\\x03' 0.000")


def test_a_file_of_prompts_is_filled_in_like_each_prompt(tmp_path, monkeypatch):
    tokenizer = published.save_bert_with_tokenizer(tmp_path / "bert")
    prompts = ["word3   [MASK] word0", "[MASK] word1 [MASK]", "[MASK]"]
    (tmp_path / "prompts.txt").write_text("\n".join(prompts))
    monkeypatch.setattr(fill, "BATCH", 2 * 5)  # two prompts of five tokens
    values = {"checkpoint": tmp_path / "bert", "file": tmp_path / "prompts.txt"}
    single = [run_tool(fill, checkpoint=tmp_path / "bert", prompt=prompt) for prompt in prompts]
    text, line = single[0].splitlines()
    p_W = softmax(np.asarray(open_model.open(tmp_path / "bert")(np.array([[2, 8, 4, 5, 3]])))[0, 2])
    token = tokenizer.decode([int(p_W.argmax())], skip_special_tokens=True)
    assert text.split() == ["word3", *token.split(), "word0"] and f"{token!r} {p_W.max():.3f}" in line
    assert run_tool(fill, **values) == "".join(single)
    run_tool(fill, **values, output=tmp_path / "out.csv")
    for row, prompt, out in zip(read_csv(tmp_path / "out.csv"), prompts, single, strict=True):
        filled, *lines = out.splitlines()
        assert row["text"] == prompt and row["filled"] == filled
        for r in (1, 2):
            token, probability = row[f"token_{r}"], row[f"probability_{r}"]
            assert bool(token) == bool(probability) == (r <= len(lines))
            assert not token or f"[MASK] {r}: {token!r} {float(probability):.3f}," in lines[r - 1]
    (tmp_path / "prompts.txt").write_text("\n".join([*prompts, "word1"]))
    assert "prompts.txt, line 4" in tiny.refusal(fill, **values, output=tmp_path / "new.csv")
    assert not (tmp_path / "new.csv").exists()
    assert f"--prompt and --file = {values['file']}" in tiny.refusal(fill, **values, prompt="[MASK]")
    bare = {name: array for name, array in published.tensors("bert").items() if not name.startswith("cls.")}
    published.save(tmp_path / "bare", "bert", bare)
    assert "bare has no head" in tiny.refusal(fill, checkpoint=tmp_path / "bare", prompt="[MASK]")


# Classes of texts and tokens.


@pytest.mark.parametrize(("problem", "of_tokens"), [(x, t) for x in (None, "regression", MANY) for t in (0, 1)])
def test_predictions_for_texts_equal_those_for_each_text_also_in_a_csv_file(tmp_path, problem, of_tokens):
    """Of each token there is a row, and a line."""
    activation = {MANY: expit, "regression": np.asarray}.get(problem, functools.partial(softmax, axis=-1))
    folder = published.save_bert_classifier(tmp_path / "bert", of_tokens=of_tokens, problem_type=problem)
    model, is_regression = open_model.open(folder), problem == "regression"
    predictions = model.predict(TEXTS)
    assert list(model.classes) == LABELS
    for text, p in zip(TEXTS, predictions, strict=True):
        np.testing.assert_allclose(p, activation(np.asarray(model(model.tokenizer.encode(text)[None])))[0], atol=1e-5)
    assert np.shape(predictions[1]) == ((5, 3) if of_tokens else (3,))
    assert np.ptp(np.vstack(predictions), axis=0).max() > 1e-3
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS))
    run_tool(classify, checkpoint=folder, file=tmp_path / "texts.txt", output=tmp_path / "out.csv")
    rows, prefix = read_csv(tmp_path / "out.csv"), "" if is_regression else "p_"
    numbers = [[float(row[prefix + label]) for label in LABELS] for row in rows]
    np.testing.assert_allclose(numbers, np.vstack(predictions), atol=1e-5)
    assert ("class" in rows[0]) == (not is_regression) and ("token" in rows[0]) == of_tokens
    lines, p = run_tool(classify, checkpoint=folder, prompt=TEXTS[0]).splitlines(), predictions[0]
    if is_regression:
        lines = [(line.split()[0].strip("[],"), line.split()[-1]) for line in lines]
        assert [name for _, name in lines] == LABELS
        np.testing.assert_allclose([float(x) for x, _ in lines], np.atleast_2d(p)[0], atol=1e-5)
    elif of_tokens:
        tokens = "[CLS] word3 [SEP] [CLS] word0 word1 word2 [SEP] [CLS] word5 [SEP] [CLS] word7 [SEP]".split()
        assert [row["token"] for row in rows] == tokens
        names = zip(tokens[:3], p, strict=True)
        assert lines == [f"  {p_C.max():.3f}  {LABELS[p_C.argmax()]}  {token}" for token, p_C in names]
    else:
        assert lines == [f"  {p[c]:.3f}  {LABELS[c]}" for c in np.argsort(-p)]


def test_texts_are_averaged_without_padding_and_the_number_of_truncated_texts_is_printed(runs, capsys):
    model, texts = open_model.open(runs["classes"]), ["good", "A" * (N - 1), "A" * N, "bad " * 9]
    p_BC = model.predict(texts, batch=3)
    assert "2 of 4 " in capsys.readouterr().out and list(model.classes) == ["blame", "praise"]
    for text, p_C in zip(texts, p_BC, strict=True):
        id_1N = np.array([[256, *text.encode()][:N]])
        np.testing.assert_allclose(p_C, softmax(np.asarray(model(id_1N))[0]), atol=1e-5)
    model.predict(texts[:1])
    assert not capsys.readouterr().out


def test_predictions_are_refused_for_other_inputs_and_models(runs):
    texts, language = open_model.open(runs["classes"]), open_model.open(runs["causal"])
    for model, inputs, batch, *parts in (
        (language, ["A king"], 3, runs["causal"], "next token"),
        (texts, "one text", 3, "list of texts"),
        (texts, [np.zeros((8, 8))], 3, "list of texts"),
        (texts, [], 3, "number of inputs", 0),
        (texts, ["a"], 0, "batch", 0),
        (open_model.open(runs["image"]), ["a"], 3, "images"),
    ):
        with raises(errors.UserError, *parts):
            model.predict(inputs, batch=batch)


def test_tables_and_files_of_texts_are_classified(runs, tmp_path):
    run, texts, labels = runs["classes"], ['good, "very"', "bad\nend", ""], ["praise", "praise", "blame"]
    with (tmp_path / "a.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("body", "stars", "n"), *zip(texts, labels, "123", strict=True)])
    lines = [json.dumps({"body": text or None, "stars": name}) for text, name in zip(texts, labels, strict=True)]
    (tmp_path / "b.jsonl").write_text("\n".join(lines))
    p_BC = open_model.open(run).predict(texts)
    for name in ("a.csv", "b.jsonl"):
        output = tmp_path / f"of_{name}.csv"
        out = run_tool(classify, checkpoint=run, file=tmp_path / name, field="body,stars", output=output)
        rows, predicted = read_csv(output), [("blame", "praise")[p_C.argmax()] for p_C in p_BC]
        assert [row["text"] for row in rows] == texts
        assert [row["class"] for row in rows] == predicted and [row["label"] for row in rows] == labels
        np.testing.assert_allclose([[float(row["p_blame"]), float(row["p_praise"])] for row in rows], p_BC, atol=1e-5)
        assert f"({sum(map(str.__eq__, predicted, labels))} of 3)" in out
    assert "'1'" in tiny.refusal(classify, checkpoint=run, file=tmp_path / "a.csv", field="body,n")
    assert "stars" in tiny.refusal(classify, checkpoint=run, file=tmp_path / "a.csv")
    (tmp_path / "b.jsonl").write_text("\n".join([*lines, '{"body": 3, "stars": "praise"}']))
    error = tiny.refusal(classify, checkpoint=run, file=tmp_path / "b.jsonl", field="body", output=tmp_path / "x.csv")
    assert "b.jsonl: line 4" in error and not (tmp_path / "x.csv").exists()


def test_the_lines_of_a_text_and_the_files_of_a_folder_are_classified_like_prompts(runs, tmp_path, monkeypatch):
    run, texts = runs["classes"], ["good", "evil"]
    (tmp_path / "texts.txt").write_bytes(b"good\r\nevil\n")
    (tmp_path / "folder" / "praise").mkdir(parents=True)
    for name, text in zip("ab", texts, strict=True):
        (tmp_path / "folder" / "praise" / f"{name}.txt").write_text(text)
    prompts = [run_tool(classify, checkpoint=run, prompt=text) for text in texts]
    for name, names in (("texts.txt", ["line 1", "line 2"]), ("folder", ["praise/a.txt", "praise/b.txt"])):
        out = run_tool(classify, checkpoint=run, file=tmp_path / name)
        for part, prompt in zip(names, prompts, strict=True):
            assert f"{part}\n{prompt}" in out
        assert ("accuracy" in out) == (name == "folder")
    monkeypatch.setattr(classify, "MOST_COLUMNS", 1)
    run_tool(classify, checkpoint=run, file=tmp_path / "texts.txt", output=tmp_path / "out.csv")
    assert [*read_csv(tmp_path / "out.csv")[0]] == ["text", "class", "probability"]


# Classes of images.


def test_predictions_for_images_equal_those_for_each_image_in_one_compiled_shape(runs, monkeypatch):
    model, image_BYXZ = open_model.open(runs["image"]), images.load("digits").evaluation_image_BYXZ[:7]
    traces, network = [], trained.Trained.network
    monkeypatch.setattr(trained.Trained, "network", lambda *args, **size: traces.append(1) or network(*args, **size))
    files = [np.uint8(image_YXZ[..., 0] * 15).repeat(b + 1, axis=0) for b, image_YXZ in enumerate(image_BYXZ)]
    for inputs in (image_BYXZ, files):
        p_BC = model.predict(inputs, batch=3)
        assert isinstance(p_BC, np.ndarray) and p_BC.shape == (7, 10) and len(traces) == 1
        expected = [softmax(np.asarray(model(inputs[b : b + 1]))[0]) for b in range(7)]
        np.testing.assert_allclose(p_BC, expected, atol=5e-6)
        assert p_BC.std(0).max() > 5e-4
        traces.pop()  # of the single images
    assert list(model.classes) == [str(digit) for digit in range(10)]


def test_a_folder_of_images_is_classified_into_a_csv_file(runs, tmp_path):
    digits = images.load("digits")
    for b in range(5):
        folder = tmp_path / "digits" / str(digits.evaluation_label_B[b])
        folder.mkdir(parents=True, exist_ok=True)
        image_YX = (digits.evaluation_image_BYXZ[b, ..., 0].astype(int) * 255 // 16).astype(np.uint8)
        Image.fromarray(image_YX).save(folder / f"{b}.png")
    (tmp_path / "digits" / "notes.txt").write_text("notes")
    values = {"checkpoint": runs["image"], "file": tmp_path / "digits", "output": tmp_path / "out.csv"}
    out = run_tool(classify, **values)
    assert "1 .txt" in out
    rows, model = read_csv(tmp_path / "out.csv"), open_model.open(runs["image"])
    assert len(rows) == 5 and [row["file"] for row in rows] == sorted(row["file"] for row in rows)
    for row in rows:
        p_C = np.array([float(row[f"p_{digit}"]) for digit in range(10)])
        expected = softmax(np.asarray(model([np.asarray(Image.open(tmp_path / "digits" / row["file"]))]))[0])
        np.testing.assert_allclose(p_C, expected, atol=1e-5)
        assert row["class"] == str(p_C.argmax()) and float(row["probability"]) == p_C.max()
        assert row["label"] == row["file"][0]
    correct = sum(row["class"] == row["label"] for row in rows)
    assert f"accuracy {correct / 5:.4f} ({correct} of 5)" in out
    assert str(tmp_path / "out.csv") in tiny.refusal(classify, **values)
    (folder / "z.png").write_text("no image")
    assert "z.png" in tiny.refusal(classify, **values | {"output": tmp_path / "new.csv"})
    assert not (tmp_path / "new.csv").exists()
    assert "new.txt" in tiny.refusal(classify, **values | {"output": tmp_path / "new.txt"})


def test_one_output_is_a_regression_unless_the_config_names_another_problem(tmp_path):
    images = published.tensors("vit")
    images |= {"classifier.weight": images["classifier.weight"][:1], "classifier.bias": images["classifier.bias"][:1]}
    published.save(tmp_path, "vit", images, id2label={"0": "age"})
    file = save_image(tmp_path / "a.png", np.random.default_rng(0).integers(0, 256, (15, 10, 2), dtype=np.uint8))
    model = open_model.open(tmp_path)
    number = float(model.logits(image_file.read(file, model.image_format)[0])[0, 0])
    texts = {"single_label_classification": "1.000", "multi_label_classification": f"{expit(number):.3f}"}
    for problem, text in {"": number, "regression": number, **texts}.items():
        model.facts["problem_type"] = problem or None
        assert run_tool(classify, checkpoint=tmp_path, file=file).splitlines()[1:] == [f"  {text}  age"]
    assert abs(number) > 0.01


def test_the_weights_of_a_head_decide_the_number_of_classes(tmp_path, capsys):
    for labels, *names in (
        ({"1": "b", "2": "c"}, "LABEL_0", "b", "c"),
        ({"2": "c", "0": "a", "1": "b"}, "a", "b", "c"),
        (None, "LABEL_0", "LABEL_1", "LABEL_2"),
    ):
        folder = published.save(tmp_path / "_".join(names), "vit", id2label=labels)
        assert open_model.open(folder).facts["class_names"] == names
        assert ("3 classes" in capsys.readouterr().out) == (labels is not None and len(labels) < 3)


def test_an_image_file_is_classified_like_its_pixels(runs, tmp_path):
    run, digits = runs["image"], images.load("digits")
    image_YX = digits.evaluation_image_BYXZ[0, ..., 0]
    file = save_image(tmp_path / "a.png", (image_YX.astype(int) * 255 // 16).astype(np.uint8))
    out = run_tool(classify, workdir=tmp_path / "out", checkpoint=run, file=file)
    p_C = softmax(np.asarray(open_model.open(run)(image_YX))[0])
    line, *lines = out.splitlines()
    assert line == f"{file}: 8 x 8 pixels, grey; resized to 8 x 8; grey, black 0 and white 16 like the model's images"
    assert [text.split()[1] for text in lines] == [str(c) for c in np.argsort(-p_C)[:5]]
    np.testing.assert_allclose([float(text.split()[0]) for text in lines], np.sort(p_C)[:-6:-1], atol=6e-3)
    assert (tmp_path / "out" / "classes.txt").read_text(encoding="utf-8") == out


def test_an_invalid_image_file_is_an_error(runs, tmp_path):
    (tmp_path / "text.png").write_text("no image")
    save_image(tmp_path / "deep.png", np.zeros((3, 3), np.uint16))
    for name, *parts in (("text.png", "image"), ("deep.png", "8 bits"), ("absent.png", "")):
        with raises(errors.UserError, tmp_path / name, *parts):
            classify.run(runs["image"], file=tmp_path / name)
    with raises(errors.UserError, "--file"):
        classify.run(runs["image"])
    file = save_image(tmp_path / "\x1b[2J.png", np.zeros((3, 3), np.uint8))
    assert "\x1b" not in run_tool(classify, checkpoint=runs["image"], file=file)
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
    image_format = image_file.load_format(tmp_path, open_model.open(str(tmp_path)).facts, Z=2, C=3)
    assert (image_format["image"], image_format["mean"]) == ([15, 10, 2], [0.1, 0.2])
    assert image_format["values"] == [0, pytest.approx(1)]
    file = save_image(tmp_path / "a.png", np.random.default_rng(0).integers(0, 255, (15, 10, 2), np.uint8))
    out = run_tool(classify, checkpoint=tmp_path, file=file)
    assert {line.split()[1] for line in out.splitlines()[1:]} == {"cat", "dog", "owl"}


def test_an_export_describes_the_range_of_pixels(runs, tmp_path):
    folder_of_run = shutil.copytree(runs["image"], tmp_path / "run")
    data = json.loads((folder_of_run / "data.json").read_text()) | {"values": [-1.5, 3.0]}
    (folder_of_run / "data.json").write_text(json.dumps(data))
    out = run_tool(export, workdir=tmp_path / "out", checkpoint=folder_of_run, family="vit")
    assert "preprocessor_config.json" in out
    file = save_image(tmp_path / "a.png", np.random.default_rng(0).integers(0, 255, (11, 9), np.uint8))
    models = [open_model.open(str(folder)) for folder in (folder_of_run, tmp_path / "out")]
    run_format, export_format = (image_file.load_format(model.path, model.facts, Z=1, C=10) for model in models)
    assert run_format["classes"] == export_format["classes"]
    np.testing.assert_allclose(image_file.read(file, export_format)[0], image_file.read(file, run_format)[0], atol=1e-5)


def test_an_assumed_format_of_images_is_printed_and_not_exported(tmp_path):
    published.save(tmp_path / "vit", "vit")
    file = save_image(tmp_path / "a.png", np.zeros((15, 10, 2), np.uint8))
    out = run_tool(classify, checkpoint=tmp_path / "vit", file=file)
    assert "(assumed: there is no preprocessor_config.json)" in out.splitlines()[0]
    out = run_tool(export, workdir=tmp_path / "out", checkpoint=tmp_path / "vit", family="vit")
    assert "preprocessor" not in out
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]


# Features, and measures of documents.


def compute(checkpoint, file, **options) -> dict[str, np.ndarray]:
    """Return the arrays of the file that the tool writes."""
    output = checkpoint.parent / f"{len(list(checkpoint.parent.iterdir()))}.npz"
    with contextlib.redirect_stdout(io.StringIO()):
        assert features.run(checkpoint, file=file, output=output, **options) == output
    return disk.read_npz(output)


def test_arrays_of_images(runs, tmp_path):
    """The last of three batches is not full. The labels and the held-out part are those of a run with this source."""
    image_BYX, label_B = RNG.integers(0, 17, (2 * trained.BATCH + 5, 8, 8), np.uint8), np.arange(69) % 3
    np.savez(tmp_path / "images.npz", x=image_BYX, y=label_B)
    arrays, data = (
        compute(runs["image"], tmp_path / "images.npz", names="hidden,A"),
        images.load(str(tmp_path / "images.npz")),
    )
    raw_BYXZ = np.concatenate([data.train_image_BYXZ, data.evaluation_image_BYXZ])
    expected = open_model.open(runs["image"]).look(raw_BYXZ, ("hidden", "A"))
    assert arrays.keys() == {"features", "hidden", "A", "names", "labels", "classes", "held_out"}
    for name, array in expected.items():
        assert arrays[name].dtype == np.float32
        np.testing.assert_allclose(arrays[name], array, atol=1e-5)
    assert arrays["classes"].tolist() == ["0", "1", "2"]
    assert arrays["held_out"].sum() == len(data.evaluation_label_B) and not arrays["held_out"][0]
    np.testing.assert_array_equal(arrays["labels"][arrays["held_out"]], data.evaluation_label_B)


def test_folders_of_image_files_with_and_without_classes_and_one_file(runs, tmp_path):
    model, pictures = open_model.open(runs["image"]), {}
    for i in range(7):
        name, pixels = f"{'cat' if i % 2 else 'dog'}/{i}.png", RNG.integers(0, 256, (9, 12, 3), np.uint8)
        for file in (tmp_path / "labelled" / name, tmp_path / "flat" / f"{i}.png"):
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(file)
        pictures[name] = model.look(Image.fromarray(pixels))["features"][0]
    arrays = compute(runs["image"], tmp_path / "labelled")
    assert sorted(arrays["names"]) == sorted(pictures) and arrays["held_out"].any() and not arrays["held_out"].all()
    for name, label, vector in zip(arrays["names"], arrays["labels"], arrays["features"], strict=True):
        assert arrays["classes"][label] == name.partition("/")[0]
        np.testing.assert_allclose(vector, pictures[name], atol=1e-5)
    flat, single = compute(runs["image"], tmp_path / "flat"), compute(runs["image"], tmp_path / "flat/3.png")
    assert flat.keys() == single.keys() == {"features", "names"}
    np.testing.assert_allclose(flat["features"], list(pictures.values()), atol=1e-5)
    np.testing.assert_allclose(single["features"], flat["features"][3:4], atol=1e-5)


def test_texts_with_classes(runs):
    """The features of a text do not depend on the padding to the longest text."""
    file = runs["classes"].with_name("reviews.csv")
    arrays, data = compute(runs["classes"], file, field="text,label", names="q"), labelled.load(str(file))
    model, rows = open_model.open(runs["classes"]), [*data.train, *data.evaluation]
    assert arrays["names"].tolist() == [" ".join(content.split()) for content, _ in rows]
    assert arrays["classes"][arrays["labels"]].tolist() == [name for _, name in rows]
    assert arrays["held_out"].sum() == len(data.evaluation)
    assert arrays["q"].shape == (1, 100, 2, N, 4)
    for b in (0, 5, 98):
        id_1N, valid_1N, _ = labelled.encode(model.tokenizer, [rows[b][0]], N=N)
        alone = model.look(id_1N[:, valid_1N[0]], ())["features"][0]
        np.testing.assert_allclose(arrays["features"][b], alone, atol=1e-5)


def test_lines_of_a_text_and_a_column_without_classes(runs, tmp_path):
    (tmp_path / "lines.txt").write_text("a king\n\nwho reads\n")
    reviews, model = runs["classes"].with_name("reviews.csv"), open_model.open(runs["causal"])
    arrays, column = compute(runs["causal"], tmp_path / "lines.txt"), compute(runs["causal"], reviews, field="text")
    assert arrays.keys() == column.keys() == {"features", "names"} and column["features"].shape == (100, 8)
    assert arrays["names"].tolist() == ["a king", "who reads"]
    for vector, line in zip(arrays["features"], arrays["names"], strict=True):
        ids = model.tokenizer.encode(str(line))
        np.testing.assert_allclose(vector, model.look(ids[None], ())["features"][0], atol=1e-5)


def test_wrong_flags_are_refused_and_write_nothing(runs, tmp_path, monkeypatch):
    (tmp_path / "old.npz").write_bytes(b"")
    flags = {"checkpoint": runs["image"], "file": "digits", "output": tmp_path / "new.npz"}
    for changes, parts in (
        ({"output": tmp_path / "old.npz"}, ("--output", "old.npz")),
        ({"output": tmp_path / "new.txt"}, ("--output", "new.txt")),
        ({"names": "hidden,queries"}, ("queries", "hidden")),
        ({"file": tmp_path / "missing"}, ("missing",)),
        ({"field": "text"}, ("--field=text",)),
    ):
        error = tiny.refusal(features, **flags | changes)
        assert all(part in error for part in parts), error
    monkeypatch.setattr(disk, "host_memory", lambda: 10**6)
    with raises(errors.UserError, "--names"), contextlib.redirect_stdout(io.StringIO()):
        features.run(runs["image"], file="digits", names="A", output=tmp_path / "new.npz")
    assert [file.name for file in tmp_path.iterdir()] == ["old.npz"]


def test_each_document_is_evaluated_as_if_it_were_alone(runs, tmp_path, capsys):
    (tmp_path / "folder").mkdir()
    texts = {"a.txt": b"A king who reads is worth two kings who fight.", "b.txt": b"Kings fight", "c.txt": b"K"}
    for name, content in texts.items():
        (tmp_path / "folder" / name).write_bytes(content)
    lines = [json.dumps({"text": content.decode()}) for content in [b"", *texts.values()]]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    run, stride = runs["causal"], 5
    alone = [evaluate.run(run, file=tmp_path / "folder" / name, stride=stride) for name in ("a.txt", "b.txt")]
    places = [f"{tmp_path / 'rows.jsonl'}, line {i}" for i in (2, 3, 4)]
    for file, field, names in (("folder", "", [*texts]), ("rows.jsonl", "text", places)):
        output = tmp_path / f"{file}.csv"
        evaluate.run(run, stride=stride, file=tmp_path / file, field=field, output=output)
        rows = read_csv(output)
        assert [row["document"] for row in rows] == names and [row["tokens"] for row in rows] == ["45", "10", "0"]
        assert rows[2]["nats_per_token"] == rows[2]["bits_per_byte"] == ""
        for row, measures in zip(rows[:2], alone, strict=True):
            for measure in ("nats_per_token", "bits_per_byte"):
                assert float(row[measure]) == pytest.approx(measures[measure], rel=1e-5)
    assert capsys.readouterr().out.count("tokens in windows") == 4

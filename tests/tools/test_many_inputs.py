"""Predictions for many inputs equal those for each input, in a notebook and in the CSV files of the tools."""

import csv
import functools
import json

import numpy as np
import published
import pytest
import tiny
from errors import raises
from open_once import open_once  # noqa: F401  a fixture
from PIL import Image
from scipy.special import expit, softmax
from small_files import KING

from experiments.config import errors
from experiments.data import images
from experiments.pretrained import open_model
from experiments.tools import classify, evaluate, fill

N = 17
TEXTS = ["word3", "word0 word1 word2", "word5", "word7"]
LABELS = ["noun", "verb", "other"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return the folders of runs by their kinds, and of data for them."""
    folder = tmp_path_factory.mktemp("runs")
    rows = "".join(f"good {i},praise\nbad {i},blame\n" for i in range(20))
    (folder / "reviews.csv").write_text(f"text,label\n{rows}")
    (folder / "king.txt").write_bytes(KING)
    text = {"text.source": str(folder / "reviews.csv"), "text.N": N, "model.M": 1}
    changes = {
        "vision": {"image.patch": 4},
        "text_classification": text | {"text.head": "pooled"},
        "language": {"text.source": str(folder / "king.txt"), "text.N": N, "model.M": 1},
    }
    return {name: published.write_run(folder / name, name, **settings) for name, settings in changes.items()}


def count_traces(monkeypatch) -> list:
    """Return a list that grows each time that a model is traced for the compiler."""
    traces, network = [], open_model.Trained.network
    monkeypatch.setattr(open_model.Trained, "network", lambda *args, **size: traces.append(1) or network(*args, **size))
    return traces


def read_csv(file) -> list[dict]:
    with open(file, encoding="utf-8", newline="") as content:
        return [*csv.DictReader(content)]


# model.predict


def test_predictions_for_images_equal_those_for_each_image_in_one_compiled_shape(runs, monkeypatch):
    model, image_BYXZ = open_model.open(runs["vision"]), images.load("digits").evaluation_image_BYXZ[:7]
    traces = count_traces(monkeypatch)
    files = [np.uint8(image_YXZ[..., 0] * 15).repeat(b + 1, axis=0) for b, image_YXZ in enumerate(image_BYXZ)]
    for inputs in (image_BYXZ, files):
        p_BC = model.predict(inputs, batch=3)
        assert isinstance(p_BC, np.ndarray) and p_BC.shape == (7, 10) and len(traces) == 1
        expected = [softmax(np.asarray(model(inputs[b : b + 1]))[0]) for b in range(7)]
        np.testing.assert_allclose(p_BC, expected, atol=1e-5)
        assert p_BC.std(0).max() > 1e-3
        traces.pop()  # of the single images
    assert list(model.classes) == [str(digit) for digit in range(10)]


@pytest.mark.parametrize(
    ("problem", "activation"),
    [
        ("multi_label_classification", expit),
        ("regression", np.asarray),
        ("tokens", functools.partial(softmax, axis=-1)),
    ],
)
def test_predictions_for_texts_equal_those_for_each_text_also_in_a_csv_file(tmp_path, problem, activation):
    """Of each token there is a row."""
    fields = {"of_tokens": True} if problem == "tokens" else {"problem_type": problem}
    model = open_model.open(published.save_bert_classifier(tmp_path / "bert", **fields))
    predictions = model.predict(TEXTS)
    assert list(model.classes) == LABELS
    for text, p in zip(TEXTS, predictions, strict=True):
        np.testing.assert_allclose(p, activation(np.asarray(model(model.tokenizer.encode(text)[None])))[0], atol=1e-5)
    assert np.shape(predictions[1]) == ((5, 3) if problem == "tokens" else (3,))
    assert np.ptp(np.vstack(predictions), axis=0).max() > 1e-3
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS))
    values = {"checkpoint": tmp_path / "bert", "file": tmp_path / "texts.txt", "output": tmp_path / "out.csv"}
    assert tiny.command(classify, **values).code == 0
    rows, prefix = read_csv(values["output"]), "" if problem == "regression" else "p_"
    numbers = [[float(row[prefix + label]) for label in LABELS] for row in rows]
    np.testing.assert_allclose(numbers, np.vstack(predictions), atol=1e-5)
    assert ("class" in rows[0]) == (problem != "regression") and ("token" in rows[0]) == (problem == "tokens")
    if problem == "tokens":
        tokens = "[CLS] word3 [SEP] [CLS] word0 word1 word2 [SEP] [CLS] word5 [SEP] [CLS] word7 [SEP]"
        assert [row["token"] for row in rows] == tokens.split()


def test_texts_are_averaged_without_padding_and_the_number_of_truncated_texts_is_printed(runs, capsys):
    model, texts = open_model.open(runs["text_classification"]), ["good", "A" * (N - 1), "A" * N, "bad " * 9]
    p_BC = model.predict(texts, batch=3)
    assert "2 of 4 " in capsys.readouterr().out and list(model.classes) == ["blame", "praise"]
    for text, p_C in zip(texts, p_BC, strict=True):
        id_1N = np.array([[256, *text.encode()][:N]])
        np.testing.assert_allclose(p_C, softmax(np.asarray(model(id_1N))[0]), atol=1e-5)
    model.predict(texts[:1])
    assert not capsys.readouterr().out


def test_predictions_are_refused_for_other_inputs_and_models(runs):
    texts, language = open_model.open(runs["text_classification"]), open_model.open(runs["language"])
    for model, inputs, batch, *parts in (
        (language, ["A king"], 3, runs["language"], "next token"),
        (texts, "one text", 3, "list of texts"),
        (texts, [np.zeros((8, 8))], 3, "list of texts"),
        (texts, [], 3, "number of inputs", 0),
        (texts, ["a"], 0, "batch", 0),
        (open_model.open(runs["vision"]), ["a"], 3, "images"),
    ):
        with raises(errors.UserError, *parts):
            model.predict(inputs, batch=batch)


# The tools.


def test_a_folder_of_images_is_classified_into_a_csv_file(runs, tmp_path):
    digits = images.load("digits")
    for b in range(5):
        folder = tmp_path / "digits" / str(digits.evaluation_label_B[b])
        folder.mkdir(parents=True, exist_ok=True)
        image_YX = (digits.evaluation_image_BYXZ[b, ..., 0].astype(int) * 255 // 16).astype(np.uint8)
        Image.fromarray(image_YX).save(folder / f"{b}.png")
    (tmp_path / "digits" / "notes.txt").write_text("notes")
    values = {"checkpoint": runs["vision"], "file": tmp_path / "digits", "output": tmp_path / "out.csv"}
    outcome = tiny.command(classify, **values)
    assert (outcome.code, outcome.err) == (0, "") and "1 .txt" in outcome.out
    rows, model = read_csv(tmp_path / "out.csv"), open_model.open(runs["vision"])
    assert len(rows) == 5 and [row["file"] for row in rows] == sorted(row["file"] for row in rows)
    for row in rows:
        p_C = np.array([float(row[f"p_{digit}"]) for digit in range(10)])
        expected = softmax(np.asarray(model([np.asarray(Image.open(tmp_path / "digits" / row["file"]))]))[0])
        np.testing.assert_allclose(p_C, expected, atol=1e-5)
        assert row["class"] == str(p_C.argmax()) and float(row["probability"]) == p_C.max()
        assert row["label"] == row["file"][0]
    correct = sum(row["class"] == row["label"] for row in rows)
    assert f"accuracy {correct / 5:.4f} ({correct} of 5)" in outcome.out
    assert str(tmp_path / "out.csv") in tiny.refusal(classify, **values)
    (folder / "z.png").write_text("no image")
    assert "z.png" in tiny.refusal(classify, **values | {"output": tmp_path / "new.csv"})
    assert not (tmp_path / "new.csv").exists()
    assert "new.txt" in tiny.refusal(classify, **values | {"output": tmp_path / "new.txt"})


def test_tables_and_files_of_texts_are_classified(runs, tmp_path):
    run, texts, labels = runs["text_classification"], ['good, "very"', "bad\nend", ""], ["praise", "praise", "blame"]
    with (tmp_path / "a.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("body", "stars", "n"), *zip(texts, labels, "123", strict=True)])
    lines = [json.dumps({"body": text or None, "stars": name}) for text, name in zip(texts, labels, strict=True)]
    (tmp_path / "b.jsonl").write_text("\n".join(lines))
    p_BC = open_model.open(run).predict(texts)
    for name in ("a.csv", "b.jsonl"):
        output = tmp_path / f"of_{name}.csv"
        outcome = tiny.command(classify, checkpoint=run, file=tmp_path / name, field="body,stars", output=output)
        rows, predicted = read_csv(output), [("blame", "praise")[p_C.argmax()] for p_C in p_BC]
        assert (outcome.code, outcome.err) == (0, "") and [row["text"] for row in rows] == texts
        assert [row["class"] for row in rows] == predicted and [row["label"] for row in rows] == labels
        np.testing.assert_allclose([[float(row["p_blame"]), float(row["p_praise"])] for row in rows], p_BC, atol=1e-5)
        assert f"({sum(map(str.__eq__, predicted, labels))} of 3)" in outcome.out
    assert "'1'" in tiny.refusal(classify, checkpoint=run, file=tmp_path / "a.csv", field="body,n")
    assert "stars" in tiny.refusal(classify, checkpoint=run, file=tmp_path / "a.csv")
    (tmp_path / "b.jsonl").write_text("\n".join([*lines, '{"body": 3, "stars": "praise"}']))
    error = tiny.refusal(classify, checkpoint=run, file=tmp_path / "b.jsonl", field="body", output=tmp_path / "x.csv")
    assert "b.jsonl: line 4" in error and not (tmp_path / "x.csv").exists()


def test_the_lines_of_a_text_and_the_files_of_a_folder_are_classified_like_prompts(runs, tmp_path):
    run, texts = runs["text_classification"], ["good", "evil"]
    (tmp_path / "texts.txt").write_bytes(b"good\r\nevil\n")
    (tmp_path / "folder" / "praise").mkdir(parents=True)
    for name, text in zip("ab", texts, strict=True):
        (tmp_path / "folder" / "praise" / f"{name}.txt").write_text(text)
    prompts = [tiny.command(classify, checkpoint=run, prompt=text).out for text in texts]
    for name, names in (("texts.txt", ["line 1", "line 2"]), ("folder", ["praise/a.txt", "praise/b.txt"])):
        out = tiny.command(classify, checkpoint=run, file=tmp_path / name).out
        for part, prompt in zip(names, prompts, strict=True):
            assert f"{part}\n{prompt}" in out
        assert ("accuracy" in out) == (name == "folder")


def test_many_classes_have_no_columns(runs, tmp_path, monkeypatch):
    monkeypatch.setattr(classify, "MOST_COLUMNS", 1)
    (tmp_path / "texts.txt").write_text("good")
    values = {"file": tmp_path / "texts.txt", "output": tmp_path / "out.csv"}
    assert tiny.command(classify, checkpoint=runs["text_classification"], **values).code == 0
    assert [*read_csv(tmp_path / "out.csv")[0]] == ["text", "class", "probability"]


def test_a_file_of_prompts_is_filled_in_like_each_prompt(tmp_path, monkeypatch):
    published.save_bert_with_tokenizer(tmp_path / "bert")
    prompts = ["word3   [MASK] word0", "[MASK] word1 [MASK]", "[MASK]"]
    (tmp_path / "prompts.txt").write_text("\n".join(prompts))
    monkeypatch.setattr(fill, "BATCH", 2 * 5)  # two prompts of five tokens
    values = {"checkpoint": tmp_path / "bert", "file": tmp_path / "prompts.txt"}
    single = [tiny.command(fill, checkpoint=tmp_path / "bert", prompt=prompt).out for prompt in prompts]
    assert tiny.command(fill, **values).out == "".join(single)
    assert tiny.command(fill, **values, output=tmp_path / "out.csv").code == 0
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


def test_each_document_is_evaluated_as_if_it_were_alone(runs, tmp_path, capsys):
    (tmp_path / "folder").mkdir()
    texts = {"a.txt": b"A king who reads is worth two kings who fight.", "b.txt": b"Kings fight", "c.txt": b"K"}
    for name, content in texts.items():
        (tmp_path / "folder" / name).write_bytes(content)
    lines = [json.dumps({"text": content.decode()}) for content in [b"", *texts.values()]]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    run, stride = runs["language"], 5
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

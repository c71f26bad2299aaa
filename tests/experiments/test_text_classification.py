"""Text classification: how texts are read, truncated and padded, and how a run classifies them."""

import gzip
import json

import jax
import numpy as np
import published
import pytest
import tiny
from errors import raises
from hypothesis import given, settings, strategies as st
from scipy.special import softmax
from small_files import write

from experiments.config import errors
from experiments.data import labelled, tokenization
from experiments.model import task as tasks
from experiments.pretrained import open_model
from experiments.tools import classify

ROWS = [(f"a {word} film, {i}", "praise" if word == "good" else "blame") for word in ("good", "bad") for i in range(40)]
JSONL = "".join(json.dumps({"review": text, "stars": kind}) + "\n" for text, kind in ROWS).encode()
CSV = ("label,text\n" + "".join(f'{kind},"{text}"\n' for text, kind in ROWS)).encode()


@pytest.mark.parametrize(
    ("files", "columns"),
    [
        ({"reviews.csv": CSV}, ()),
        ({"reviews.jsonl.gz": gzip.compress(JSONL), "README.txt": b"about"}, ["review, stars"]),
        ({f"{kind}/{i}.txt": text.encode() for i, (text, kind) in enumerate(ROWS)} | {"about.json": b"{}"}, ()),
    ],
    ids=["csv", "jsonl", "folders"],
)
def test_texts_and_classes_come_from_tables_and_folders(tmp_path, files, columns):
    """If no file name defines the evaluation split, a tenth of the texts is held out, the same in every format."""
    result = labelled.load(str(write(tmp_path / "in", **files)), *columns)
    assert sorted(result.train + result.evaluation) == sorted(ROWS) and result.classes == ("blame", "praise")
    assert 2 <= len(result.evaluation) <= 16 and not set(result.train) & set(result.evaluation)
    csv_result = labelled.load(str(write(tmp_path / "csv", **{"b.csv": CSV})))
    assert sorted(csv_result.evaluation) == sorted(result.evaluation)


def test_file_names_define_the_evaluation_split(tmp_path):
    parts = {"train.tsv": ROWS[::2], "test.tsv": ROWS[1::2]}
    tables = {name: "text\tlabel\n" + "".join(f"{a}\t{b}\n" for a, b in rows) for name, rows in parts.items()}
    result = labelled.load(str(write(tmp_path, **{k: v.encode() for k, v in tables.items()})))
    assert (result.train, result.evaluation) == (ROWS[::2], ROWS[1::2])
    assert "train.tsv to train on; test.tsv to evaluate" in result.description
    rows = "".join(f"{a}\t{b}\n" for a, b in [*ROWS[:3], ("x", "praise")])
    (tmp_path / "test.tsv").write_text(f"text\tlabel\n{rows}")
    assert "2 of 4" in labelled.load(str(tmp_path)).description
    for rows, part in (("", "test.tsv"), ("x\tnew\n" * 99, '"new"'), (None, "test.tsv")):
        (tmp_path / "test.tsv").write_text("" if rows is None else f"text\tlabel\n{rows}")
        with raises(errors.UserError, part):
            labelled.load(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "content", "parts"),
    [
        ("a.csv", b"text,kind\nx,y\n", ("line 2", "no column 'label'. Set text.field", "text, kind")),
        ("a.csv", b"text,label\nx,y\nz,y\n", ("1 class",)),
        ("a.jsonl", b'{"text": "x", "label": ["y"]}', ("line 1", "'label'", "['y']")),
        ("a.txt", b"x", ("a.txt",)),
        ("pos/a.txt", b"caf\xe9 au lait", ("pos/a.txt", "UTF-8", "line 1")),
    ],
)
def test_files_without_texts_with_classes_are_refused(tmp_path, name, content, parts):
    write(tmp_path, **{name: content} | ({"neg/a.txt": b"x"} if "/" in name else {}))
    with raises(errors.UserError, *parts):
        labelled.load(str(tmp_path if "/" in name else tmp_path / name))


def make_folders(*paths):
    return {path: path.encode() for path in paths}


@pytest.mark.parametrize(
    ("files", "classes", "words"),
    [
        (make_folders("a/2019/0.txt", "b/2020/0.txt", "a/2020/0.txt", "b/@eaDir/x.txt", "__MACOSX/a/y.txt"), "ab", ""),
        (
            make_folders(*(f"{part}/{c}/{i}.txt" for part in ("train", "test") for c in "np" for i in (0, 1)))
            | make_folders("train/urls_n.txt", "train/unsup/0.txt", "train/unsup/1.txt", "test/urls_n.txt"),
            "np",
            "unsup): 2",
        ),
        (make_folders("train/e\u0301/0.txt", "train/b/0.txt", "test/\u00e9/0.txt"), "b\u00e9", "to evaluate"),
        ({"a.csv": b'text, label\nx y, "a"\nz, b \n' + b"w,b\nv,a\n" * 9}, "ab", ""),
        (
            {
                "a.jsonl": b'{"text":"x","label":1.0}\n{"text":"z","label":NaN}\n{"text":"y","label":0}\n'
                b'{"text":"w","label":1}\n{"text":"v","label":0}'
            },
            "01",
            "1 missing",
        ),
        ({"a.csv": b"text,label\nx,1\ny,2.0\nz,NA\nw,1.0\nv,\n"}, "12", "2 (1 missing, 1 'NA')"),
        ({"a.csv": b"text,label\nx,NA\ny,DE\nz,NA\nw,DE\n"}, ("DE", "NA"), ""),
        ({"a.csv": b"text,label\nx,NaN\n" + b"".join(b"%d a,p\n%d b,n\n" % (i, i) for i in range(9))}, "np", "1 'NaN'"),
        ({"a.csv": b"text,label\nx,1.5\ny,2.0\nz,nan\n"}, None, "decimals: 1.5"),
        ({"train.csv": b"text,label\nx,a\ny,b\n", "test.csv": b"text,label\nx,c\ny,d\n"}, None, '"c", "d"'),
    ],
)
def test_classes_of_folders_and_columns(tmp_path, files, classes, words):
    source = str(write(tmp_path, **files) / ("" if len(files) > 1 else next(iter(files))))
    if classes is None:
        with raises(errors.UserError, words):
            labelled.load(source)
    else:
        data = labelled.load(source)
        assert data.classes == tuple(classes) and words in data.description


def test_an_invalid_source_or_field_is_refused():
    for setting in (("absent",), ("docstrings", "text"), ("docstrings", "text,label,kind")):
        with raises(errors.UserError, setting[-1]):
            labelled.load(*setting)


class EndTokens(tokenization.Plain):
    """A tokenizer that, like BERT's, adds special tokens before and after a text."""

    def encode(self, text, *, specials=True):
        return np.concatenate([[256], super().encode(text), [257]])


@settings(max_examples=15, deadline=None)
@given(st.lists(st.text(max_size=20), min_size=1, max_size=3), st.integers(2, 12))
def test_a_text_follows_the_class_token_and_a_longer_text_is_cut(texts, N):
    tokenizers = tokenization.make("bytes", [], specials=(labelled.CLS,)), EndTokens("bytes", "", ("x", "y"))
    for tokenizer, ends in zip(tokenizers, ([], [257]), strict=True):
        id_BN, valid_BN, cut = labelled.encode(tokenizer, texts, N=N)
        assert cut == sum(1 + len(text.encode()) + len(ends) > N for text in texts)
        for text, id_N, valid_N in zip(texts, id_BN, valid_BN, strict=True):
            expected = [256, *text.encode()][: N - len(ends)] + ends
            assert id_N[valid_N].tolist() == expected
            assert valid_N[: len(expected)].all() and not id_N[len(expected) :].any()
    with raises(errors.UserError, "[CLS]"):
        labelled.encode(tokenization.make("bytes", []), ["a"], N=N)


class EndToken(EndTokens):
    """A tokenizer with a special token after a text, and none before it."""

    def encode(self, text, *, specials=True):
        return super().encode(text)[1:]


@pytest.mark.parametrize(
    ("make", "side", "expected"),
    [
        (EndTokens, "right", [256, 97, 98, 257]),
        (EndTokens, "left", [256, 101, 102, 257]),
        (EndToken, "right", [97, 98, 99, 257]),
        (EndToken, "left", [100, 101, 102, 257]),
        (tokenization.Plain, "left", [99, 100, 101, 102]),
    ],
)
def test_special_tokens_stay_where_a_text_is_cut_at_either_side(make, side, expected):
    tokenizer = make("bytes", "", ("x", "y"))
    tokenizer.truncation_side = side
    id_BN, _, truncated = labelled.encode(tokenizer, ["abcdef", "a"], N=4, classifies=False)
    assert id_BN[0].tolist() == expected and truncated == 1
    if make is EndToken:
        with raises(errors.UserError, "before a text"):  # an ordinary token would predict the class
            labelled.encode(tokenizer, ["abcdef"], N=4)


@pytest.mark.parametrize("head", ["tanh", "linear", "pooled"])
def test_metrics_do_not_depend_on_padding(tmp_path, head):
    write(tmp_path, **{"reviews.csv": CSV})
    task = tiny.task_of(tiny.settings("text_classification", **make_changes(tmp_path, head)))
    assert tiny.baseline(task)["accuracy"] <= 0.7 and task.train[0]["w_BN"].shape == (16, 17)
    params, batch, measure = tiny.draw_params(task), task.evaluation[0], tiny.measure(task)
    junk_BN = np.where(batch["valid_BS"], batch["w_BN"], 99)
    metrics, junk_metrics = (measure(params, batch | {"w_BN": w_BN}, None) for w_BN in (batch["w_BN"], junk_BN))
    assert not batch["valid_BS"].all() and float(metrics["loss"][0]) == float(junk_metrics["loss"][0])


def test_the_number_of_truncated_texts_is_printed(tmp_path):
    write(tmp_path, **{"reviews.csv": CSV})
    parts = labelled.load(str(tmp_path / "reviews.csv"))[1:3]
    for N in (9, 60):
        work = tiny.work_of(tiny.settings("text_classification", **make_changes(tmp_path, "tanh") | {"text.N": N}))
        longer = [sum(1 + len(text.encode()) > N for text, _ in part) for part in parts]
        line = f"{longer[0]} of {len(parts[0])} and {longer[1]} of {len(parts[1])} texts have more than text.N = {N}"
        assert (line in "\n".join(work.lines)) == (N < 60) == (longer[0] > 0)


def test_classes_have_no_tied_output(tmp_path):
    write(tmp_path, **{"reviews.csv": CSV})
    with raises(errors.UserError, "head", "tied", "pooled"):
        tiny.work_of(tiny.settings("text_classification", **make_changes(tmp_path, "tied")))


def make_changes(folder, head):
    small = {"model.M": 1, "model.norm": "rms", "model.mlp": "relu", "model.bias": "none"}
    small |= {"model.attention": "explicit", "text.N": 17}
    return small | {"text.source": str(folder / "reviews.csv"), "text.head": head}


def test_a_run_classifies_texts(tmp_path):
    write(tmp_path, **{"reviews.csv": CSV})
    changes = make_changes(tmp_path, "pooled")
    work = tiny.work_of(tiny.settings("text_classification", **changes))
    params, batch = tiny.draw_params(work.task), work.task.evaluation[0]
    folder = published.write_run(tmp_path / "run", "text_classification", params, **changes)
    id_1N, model = batch["w_BN"][:1, batch["valid_BS"][0]], open_model.open(folder)
    np.testing.assert_allclose(model(id_1N)[0], jax.jit(work.apply)(params, batch)[0], rtol=1e-4, atol=1e-5)
    outcome = tiny.command(classify, checkpoint=folder, prompt="a good film")
    p_C = softmax(np.asarray(model(np.array([[256, *b"a good film"]]))[0]))
    expected = [f"  {p_C[c]:.3f}  {('blame', 'praise')[c]}" for c in np.argsort(-p_C)]
    assert (outcome.code, outcome.out.splitlines()) == (0, expected) and p_C.min() > 1e-6
    with raises(errors.UserError, "--prompt", "--file"):
        classify.run(folder)


def test_classes_of_numbers_and_of_data_sets_keep_their_order(tmp_path):
    rows = "".join(f"text {i},{i % 12}\n" for i in range(240))
    result = labelled.load(str(write(tmp_path, **{"a.csv": f"text,label\n{rows}".encode()}) / "a.csv"))
    assert result.classes == tuple(map(str, range(12)))
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    kinds = datasets.Features(text=datasets.Value("string"), label=datasets.ClassLabel(names=["zebra", "10", "ant"]))
    splits = {}
    for part, labels in (("train", [0, 1, 2, 0]), ("test", [2, -1, 0])):
        texts = [f"{part} {i}" for i in range(len(labels))]
        splits[part] = datasets.Dataset.from_dict({"text": texts, "label": labels}, features=kinds)
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "saved")
    result = labelled.load(f"hub:{tmp_path / 'saved'}")
    assert result.classes == ("zebra", "10", "ant") and "no class: 1" in result.description
    assert [name for _, name in result.train] == ["zebra", "10", "ant", "zebra"]
    assert [name for _, name in result.evaluation] == ["ant", "zebra"]


def test_the_calibration_error_compares_confidence_with_accuracy_in_fifteen_bins():
    """Bin (0.8, 0.867]: two of 0.85, one correct. Bin (0.933, 1]: three of 0.95 and 1, all correct."""
    label_B, predicted_B = np.array([0, 1, 2, 0, 1]), np.array([0, 2, 2, 0, 1])
    probability_B = np.array([0.85, 0.85, 0.95, 0.95, 1.0], np.float32)
    expected = (2 * abs(0.5 - 0.85) + 3 * abs(1 - 2.9 / 3)) / 5
    (error,) = tasks.measure_calibration(label_B, predicted_B, probability_B).values()
    assert error == pytest.approx(expected, abs=1e-6)
    edge = np.array([0.19, 0.2], np.float32)  # 3/15 belongs to the bin that ends there; the first is correct
    (error,) = tasks.measure_calibration(np.array([0, 1]), np.zeros(2, int), edge).values()
    assert error == pytest.approx(abs(1 - 0.39) / 2, abs=1e-6)


def test_recall_is_reported_for_each_class_or_for_the_lowest_of_many():
    label_B, predicted_B = np.array([0, 0, 0, 2, 2, 3]), np.array([0, 0, 2, 2, 2, 1])
    assert tasks.measure_recalls(label_B, predicted_B, "abcd") == {"recall": {"a": 2 / 3, "c": 1.0, "d": 0.0}}
    label_B = np.arange(100_000)
    (result,) = tasks.measure_recalls(label_B, np.where(label_B > 99_950, 0, label_B), [*map(str, label_B)]).values()
    assert len(result) == tasks.RECALLS and sum(value == 0 for value in result.values()) == 49

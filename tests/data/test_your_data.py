"""Data of the user's: a reader, a tokenizer, and several sources with shares, as in the guide your_data."""

import contextlib
import json
import re
import sqlite3
import sys

import numpy as np
import pytest
import tiny
from errors import raises

from experiments.config import by_name, errors, files as config_files, settings as configs
from experiments.data import corpus as corpora, pretrained_tokenizer, text
from experiments.folder import records
from experiments.pretrained import open_model
from experiments.tools import evaluate, sample

PAGE = (by_name.ROOT / "docs" / "guides" / "your_data.md").read_text(encoding="utf-8")
CODE = re.findall(r"^```python\n(# (my_\w+)\.py\n.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)
QUICK = "--config.model.M=1 --config.model.D=8 --config.model.H=2 --config.train.steps=2 --config.mesh.data=1".split()
READERS = """
def read(): return [b"a king", "", "two kings"] * 9, ["who", "a king"]
def fails(): raise KeyError("lost")
def one(): return ["a"]
def letters(): return "a king", ["b"]
def nothing(): return ["a"], [""]
def number(): return ["a"], [1]
def nul(): return ["a\\0b"], ["c"]
class Letters:
    size, between = 129, 128
    def __init__(self, documents): self.n = len([*documents])
    def encode(self, text): return [min(ord(c), 127) for c in text]
    def decode(self, ids): return "".join(map(chr, ids))
class Large(Letters): size = 100
class Fails(Letters):
    def encode(self, text): return {}[text]
def without(documents): return [*documents]
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return the working directory, with the files of the guide, its data, and mine.py."""
    monkeypatch.setattr("sys.path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    for name, content in [*((name, code) for code, name in CODE), ("mine", READERS)]:
        monkeypatch.delitem(sys.modules, name, raising=False)
        (tmp_path / f"{name}.py").write_text(content, encoding="utf-8")
    with contextlib.closing(sqlite3.connect("notes.db")) as data, data:
        data.execute("CREATE TABLE notes (id, body)")
        data.executemany("INSERT INTO notes VALUES (?, ?)", [(i, f"note {i} of the king, " * 20) for i in range(30)])
    (tmp_path / "letters.txt").write_bytes(tiny.TEXT)
    return tmp_path


def read(source="mine:read", tokenizer="bytes", **changes):
    return corpora.read_corpus(tiny.settings("language", text__source=source, text__tokenizer=tokenizer).text, ())


def test_the_files_of_the_guide_run(folder):
    lengths = {name: len(code.splitlines()) for code, name in CODE}
    assert lengths["my_data"] <= 35 and max(lengths.values()) <= 35
    outcome = tiny.run("--config", "my_notes.py", "--workdir", "own", *QUICK)
    assert outcome.code == 0, outcome.err
    assert "my_data:read: 27 documents to train on; 3 to evaluate" in outcome.out
    assert "unknown tokens: 0.00% of the training data" in outcome.out
    for tool, flags in ((sample, {"prompt": "king"}), (evaluate, {"file": "letters.txt"})):
        error = tiny.refusal(tool, checkpoint="own", **flags)
        assert "own/tokenizer.json" in error and "my_data:Words" in error
    flags = ["--config.text.tokenizer=my_words:learn", "--config.text.source=my_data:read:0.7, letters.txt:0.3"]
    outcome = tiny.run("--config", "my_notes.py", "--workdir", "mixed", *flags, *QUICK)
    assert outcome.code == 0, outcome.err
    assert "my_data:read: 70.0% of the training tokens" in outcome.out and "letters.txt: 30.0%" in outcome.out
    (folder / "my_data.py").unlink()  # tools do not import the reader
    assert tiny.command(sample, checkpoint="mixed", prompt="king", max_new_tokens=2).code == 0
    assert open_model.open("mixed").tokenizer.name(0) == "[UNK]"
    sources = folder / "mixed" / "source"
    assert {"my_words.py", "my_data.py"} <= {file.name for file in sources.iterdir()}
    assert records.read_config(folder / "mixed")["data"]["sha256"]


def test_the_documents_of_a_reader_are_the_parts(folder):
    data = text.load("mine:read")
    assert b"".join(data.train).split(b"\0") == [b"a king", b"two kings"] * 9
    assert b"".join(data.evaluation) == b"who\0a king" and "(1 of 2 held-out texts" in data.description
    before = data.sha256
    (folder / "mine2.py").write_text(READERS.replace('"who"', '"whom"'))
    assert text.load("mine2:read").sha256 != before


FAULTS = [  # (the function that reads it, the function of the user's, words of the message)
    (text.load, "fails", ["KeyError", "lost", "mine.py, line 3"]),
    (text.load, "one", ["unpack"]),
    (text.load, "letters", ["two iterables"]),
    (text.load, "nothing", ["no text"]),
    (text.load, "number", ["str or bytes"]),
    (text.load, "nul", ["NUL"]),
    (text.load, "absent", ["no absent"]),
    (lambda name: text.load(name, "said"), "read", ["text.field = 'said'"]),
    (lambda name: read(tokenizer=name), "Large", ["encode(", "from 0 to 99"]),
    (lambda name: read(tokenizer=name), "Fails", ["KeyError", "mine.py"]),
    (lambda name: read(tokenizer=name), "without", ["list", "size, encode, decode", "tokenizers.Tokenizer"]),
    (lambda name: read(tokenizer=name), "absent", ["no absent"]),
]


@pytest.mark.parametrize(("load", "name", "words"), FAULTS)
def test_a_reader_or_a_tokenizer_that_fails_is_refused(folder, load, name, words):
    with raises(errors.UserError, f"mine:{name}", *words):
        load(f"mine:{name}")


def test_a_tokenizer_of_the_users_encodes_documents_and_their_separator(folder, monkeypatch):
    monkeypatch.setattr(text, "LARGE", 1)  # no file of the cache holds its ids: nothing identifies them
    corpus = read(tokenizer="mine:Letters")
    assert corpus.evaluation_T.tolist() == [*b"who", 128, *b"a king"] and corpus.tokenizer.theirs.n == 18
    assert not (folder / "cache").exists() and corpus.tokenizer.special == {128}
    assert corpora.count_documents(corpus.train_T, corpus.tokenizer) == 18
    assert list(corpus.tokenizer.stream([97, 98])) == ["a", "b"] and corpus.tokenizer.show(128) == "\x80"
    (folder / "run").mkdir()
    (folder / "run" / "tokenizer.json").write_bytes(corpus.tokenizer.files["tokenizer.json"])
    with raises(errors.UserError, "run/tokenizer.json", "mine:Letters", "tokenizers.Tokenizer"):
        pretrained_tokenizer.read(folder / "run")


@pytest.mark.parametrize("separator", [None, 9])
@pytest.mark.parametrize("shares", [(0.7, 0.3), (0.2, 0.8), (0.5, 0.5)])
def test_a_mixture_repeats_texts_until_they_have_their_shares(separator, shares):
    texts = np.arange(5, dtype=np.uint8), np.arange(5, 8, dtype=np.uint8)
    mixture = corpora.Mixture(texts, shares, separator)
    end = [] if separator is None else [separator]
    expected = [np.resize([*id_T, *end], n) for id_T, n in zip(texts, mixture.lengths, strict=True)]
    np.testing.assert_array_equal(mixture[:], np.concatenate(expected))
    np.testing.assert_array_equal(mixture[3:7], mixture[:][3:7])
    index = np.array([[0, len(mixture) - 1], [6, 5]])
    np.testing.assert_array_equal(mixture[index], mixture[:][index])
    assert mixture[-1] == mixture[:][-1] and mixture.dtype == mixture[:].dtype == np.uint8
    assert {*range(8)} <= {*mixture[:].tolist()}  # a pass has every token of each text
    np.testing.assert_allclose(np.array(mixture.lengths) / len(mixture), shares, atol=0.5 / len(mixture))


def test_several_sources_are_read_with_their_shares_and_all_are_held_out(folder):
    corpus, alone = read("mine:read:3, letters.txt:1"), read("letters.txt")
    joined = b"who\0a king\0" + bytes(alone.evaluation_T)
    assert bytes(corpus.evaluation_T) == joined and len(corpus.train_T) == sum(corpus.train_T.lengths)
    assert corpus.train_T.lengths[0] == 3 * corpus.train_T.lengths[1]
    printed = "\n".join(corpus.lines)
    for line in ("mine:read: 75.0% of the training tokens", "letters.txt: 25.0%", "held out of all sources"):
        assert line in printed
    assert corpus.sha256 == read("mine:read:0.75,letters.txt:0.25").sha256
    (folder / "letters.txt").write_bytes(tiny.TEXT + b"more")
    assert corpus.sha256 != read("mine:read:3, letters.txt:1").sha256
    with raises(errors.UserError, "text.source", "above 0"):
        read("mine:read:0, letters.txt:1")
    with raises(errors.UserError, "letters.txt:0.5,stdlib", "share each"):
        read("letters.txt:0.5,stdlib")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("text.source", "mine:read"),
        ("text.source", "letters.txt:0.5, mine:read:0.5"),
        ("text.tokenizer", "mine:Letters"),
    ],
)
def test_a_json_config_does_not_execute_a_reader_or_a_tokenizer(folder, key, value):
    (folder / "config.json").write_text(json.dumps({"experiment": "language", key: value}))
    with raises(errors.UserError, key, "mine:", "would execute code", f"--config.{key}={value}"):
        config_files.load("config.json", explicit={})
    config_files.load("config.json", explicit={key: value})
    assert "mine" not in sys.modules
    assert not [*configs.find_code("text.source", "hub:mine, a:b/c")]

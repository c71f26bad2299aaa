"""Sentence pairs are read, split by their source sentences, and encoded as arrays of subwords."""

import gzip
import hashlib
import random

import hypothesis
import numpy as np
import pytest
from errors import raises
from hypothesis import strategies as st
from small_files import make_zip, write

from experiments.config import errors
from experiments.data import pairs, pretrained_tokenizer
from experiments.engine import batches

WORDS = "a king who reads is worth two kings who fight".split()
PAIRS = [(f"{a} {b} {c}.", f"{c} {b} {a}!") for a in WORDS for b in WORDS for c in WORDS]


def text(rows) -> bytes:
    return "".join(f"{source}\t{target}\n" for source, target in rows).encode()


def load(path):
    """Return the sorted pairs of both splits."""
    data = pairs.load(str(path))
    return sorted(data.train + data.evaluation)


@pytest.fixture
def file(tmp_path):
    return write(tmp_path, **{"said.tsv": text(PAIRS)}) / "said.tsv"


# Reading


def test_lines_of_a_file_a_folder_or_a_zip_are_pairs_without_hidden_and_other_files(tmp_path):
    """Text is normalised to NFC, and further columns are ignored. Numbers may be sentences."""
    content = "\ufeffGo.\tVe\u0301te.\r\n\nStop!  \t Para. \tby a person\nA\u2028b\tc"
    write(tmp_path, **{"a.txt": content.encode(), "n.tsv": text((i, f"number {i}") for i in range(99))})
    assert load(tmp_path / "a.txt") == [("A\u2028b", "c"), ("Go.", "V\u00e9te."), ("Stop!", "Para.")]
    assert "1 lines have more than two columns" in pairs.load(str(tmp_path / "a.txt")).description
    assert len(load(tmp_path / "n.tsv")) == 99
    contents = {"a.tsv": b"a\tb", "sub/c.TXT": b"c\td", "_about.txt": b"no pair", ".x.tsv": b"no", ".git/x.tsv": b"no"}
    contents |= {"r": b"no", "sub/_x/y.tsv": b"no", "e.tsv.gz": gzip.compress(b"e\tf")}
    write(tmp_path / "set", **contents)
    members = [("set/", b""), *((f"./set/{name}", content) for name, content in contents.items())]
    write(tmp_path, **{"set.zip": make_zip(members)})
    for source in ("set", "set.zip"):
        assert load(tmp_path / source) == [("a", "b"), ("c", "d"), ("e", "f")]


def add_numbers(form: str) -> bytes:
    return "".join(form.format(i=i, a=a, b=b) for i, (a, b) in enumerate(PAIRS)).encode()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"a\tb\nno tab here\nc\td", ["line 2", "'no tab here'"]),
        (b"a\tb\nc\td\n\t\n", ["line 3"]),
        (b"a\t\xc2\xa0\n", ["line 1"]),
        (b"a\tb\n\xff\tc", ["line 2", "\\xff"]),
        (b"\xef\xbb\xbfSource\ttarget\na\tb", ["line 1", "header"]),
        (b"\nEnglish\tSpanish\na\tb", ["line 2", "header"]),
        (b"id\tsource\ttarget\n1\ta\tb", ["line 1", "header"]),
        (b"en-GB\tpt_BR\na\tb", ["line 1", "header"]),
        (add_numbers("{i}\t{a}\t{b}\n"), ["column 1", "1,000"]),
        (add_numbers("{a}\t{i}\t{b}\n"), ["column 2"]),
        (add_numbers("0.{i}\t{a}\t{b}\n"), ["column 1"]),
        (b"\n\n", ["sentence pairs"]),
        (make_zip([("b.tsv", b"a\0\tb\n")]), ["said.tsv:b.tsv", "byte 1,"]),
    ],
    ids=lambda value: "",  # a zip file contains the time, so ids would change
)
def test_an_invalid_line_is_refused_with_its_file_and_number(tmp_path, content, words):
    write(tmp_path, **{"said.tsv": content})
    with raises(errors.UserError, tmp_path / "said.tsv", *words):
        pairs.load(str(tmp_path / "said.tsv"))


def test_a_named_set_has_its_checksum_and_is_split_by_content_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("TFM_DATA", str(write(tmp_path, **{"spa-eng.zip": b"another"})))
    with raises(errors.UserError, tmp_path / "spa-eng.zip", "sha256"):
        pairs.load("spa-eng")
    content = make_zip([("train.txt", text(PAIRS[:9])), ("test.txt", text(PAIRS[9:]))])
    monkeypatch.setitem(pairs.NAMED, "spa-eng", ("spa-eng.zip", "http://", hashlib.sha256(content).hexdigest()))
    write(tmp_path, **{"spa-eng.zip": content})
    assert load("spa-eng") == sorted(PAIRS) and pairs.load("spa-eng").description == ""


def test_the_language_of_a_text_is_recognised():
    english, spanish = ["the king is here", "the queen and the king"], ["el rey", "la reina y el rey"]
    assert pairs.most_common_words(english, 2) == ["the", "king"]
    assert pairs.share_of_words(["The KING, el!"], pairs.most_common_words(english)) == 2 / 3
    assert pairs.share_of_words(spanish, pairs.most_common_words(english)) == 0 == pairs.share_of_words([""], ["a"])


# Parallel files


def write_parallel(folder, stem, rows, *, ends=(".en", ".es"), line_end="\n"):
    """Write two files with the sides of the pairs."""
    for end, side in zip(ends, zip(*rows, strict=True), strict=True):
        content = "".join(line + line_end for line in side).encode()
        write(folder, **{f"{stem}{end}": gzip.compress(content) if end.endswith(".gz") else content})
    return folder


def test_parallel_files_are_pairs_line_by_line(tmp_path, file):
    """The splits are equal to the splits of a single file with these pairs."""
    folder, stem = write_parallel(tmp_path / "one", "europarl-v7.es-en", PAIRS), "europarl-v7.es-en"
    packed_folder = write_parallel(tmp_path / "packed", "said", PAIRS, ends=(".pt_BR.gz", ".zh-CN"), line_end="\r\n")
    stems = write_parallel(tmp_path / "stems", "said", PAIRS, ends=(".eng", ".spa.gz"))
    members = [("README", b"about"), *((file.name, file.read_bytes()) for file in folder.iterdir())]
    moses = write(tmp_path, **{"moses.zip": make_zip(members)}) / "moses.zip"
    for source in (folder, folder / stem, packed_folder, stems / "said", moses):
        assert pairs.load(str(source))[1:3] == pairs.load(str(file))[1:3]
    assert f"the lines of {stem}.en -> {stem}.es are pairs" in pairs.load(str(folder)).description
    write(folder, **{"more.tsv": text(PAIRS[:100])})
    assert len(load(folder)) == 100  # other files next to tab-separated files are not read


def test_lines_without_a_translation_are_skipped_and_files_that_are_not_parallel_are_refused(tmp_path):
    folder = write_parallel(tmp_path / "set", "a", [("a", "x"), ("", "y"), ("c", " "), ("d", "z")])
    assert load(folder) == [("a", "x"), ("d", "z")] and "2 lines are skipped" in pairs.load(str(folder)).description
    write(folder, **{"a.es": b"x\ny\nz"})
    with raises(errors.UserError, "a.en has 4", "a.es has 3"):
        pairs.load(str(folder))
    for names in ({"b.en": b"x", "b.de": b"x"}, {"a.de": b"x"}):  # a second pair of languages, and a third language
        with raises(errors.UserError, ".de, .en, .es"):
            pairs.load(str(write(folder, **names)))


# Splits


def test_names_define_train_valid_and_test(tmp_path):
    sides = {"train": PAIRS[:900], "valid": PAIRS[900:950], "test": PAIRS[950:]}
    for part, rows in sides.items():
        write_parallel(tmp_path / "set", part, rows)
    data = pairs.load(str(tmp_path / "set"))
    assert (data.train, data.evaluation) == (sides["train"], sides["valid"])
    assert "by their names, train.en -> train.es to train on; valid.en -> valid.es to evaluate; " in data.description
    assert "test.en -> test.es not used" in data.description and "in the training data" not in data.description
    write(tmp_path / "tsv", **{"said.train.tsv": text(PAIRS[:900]), "said.dev.tsv": text(PAIRS[890:920])})
    data = pairs.load(str(tmp_path / "tsv"))
    assert (len(data.train), data.evaluation) == (900, PAIRS[890:920]) and "(10 of 30 held-out" in data.description
    write(tmp_path / "tsv", **{"said.dev.tsv": b"\n" * 999})
    with raises(errors.UserError, "tsv (said.dev.tsv)"):
        pairs.load(str(tmp_path / "tsv"))


def test_no_source_sentence_is_in_both_parts(tmp_path, file):
    variants = [(source.upper().replace(".", "?!").replace(" ", " , "), target) for source, target in PAIRS]
    before = pairs.load(str(file))
    after = pairs.load(str(write(tmp_path, **{"more.tsv": text(PAIRS + variants)}) / "more.tsv"))
    keys = [{pairs.sentence_key(source) for source, _ in part} for part in (after.train, after.evaluation)]
    assert not keys[0] & keys[1] and len(keys[0] | keys[1]) == len({source for source, _ in PAIRS})
    # No pair changes its split.
    assert set(before.train) < set(after.train) and set(before.evaluation) < set(after.evaluation)
    # The share is 5 % of 1,000 pairs, so about 50.
    assert len(after.evaluation) == 2 * len(before.evaluation) and 10 < len(before.evaluation) < 100
    assert pairs.sentence_key("Go  ON!") == pairs.sentence_key("go on") != pairs.sentence_key("goon")
    # They differ in a vowel sign, which is not a letter.
    assert pairs.sentence_key("किताब") != pairs.sentence_key("कीताब")
    assert pairs.sentence_key("?!") != pairs.sentence_key("...")


# Subwords


@pytest.fixture(scope="module")
def subwords():
    return pairs.train([side for pair in PAIRS for side in pair], W=277)


@hypothesis.given(st.lists(st.text(), max_size=5))
@hypothesis.example(["[BOS]a king[EOS][PAD]"])  # in a text, these are letters, not special tokens
@hypothesis.settings(deadline=None, max_examples=40)
def test_any_text_is_decoded_to_itself(subwords, sentences):
    for text, id_T in zip(sentences, map(np.array, subwords.encode_all(sentences)), strict=True):
        assert subwords.decode(id_T) == text
        assert not id_T.size or (pairs.EOS < id_T.min() and id_T.max() < subwords.size)


def test_specials_are_ids_only_and_the_text_ends_at_eos(subwords):
    king = subwords.encode_all(["a king"])[0]
    assert subwords.decode([pairs.BOS, *king, pairs.EOS, *king, pairs.PAD]) == "a king"
    assert (pairs.PAD, pairs.BOS, pairs.EOS) == (0, 1, 2)
    assert [subwords.name(i) for i in range(3)] == ["[PAD]", "[BOS]", "[EOS]"] and not subwords.decode([0, 1])
    assert pairs.train([], W=259).size == 259
    with raises(errors.UserError, "pairs.vocabulary", 258, 259):
        pairs.train(["a"], W=258)
    for call in (lambda: subwords.encode_all(["\ud800"]), lambda: pairs.train(["\ud800"], W=300)):
        with raises(errors.UserError, repr("\ud800")):
            call()


def test_training_depends_on_the_sentences_alone_and_merges_frequent_pairs(subwords, tmp_path):
    sentences = [side for pair in PAIRS for side in pair]
    random.Random(0).shuffle(sentences)
    content = subwords.library.to_str().encode()
    assert pairs.train(sentences, W=277).library.to_str().encode() == content and subwords.size == 277
    assert len(subwords.encode_all([" king"])[0]) < 5 == len(subwords.encode_all([" gnik"])[0])
    small = pairs.train(["aa"], W=277)
    assert small.size == 3 + 256 + 1 and small.encode_all(["aa"])[0] == [259]
    tokenizer = pretrained_tokenizer.read(write(tmp_path, **{"tokenizer.json": content}))
    sentence = "¿Un rey? two kings\n"
    assert tokenizer.decode(tokenizer.encode(sentence)) == sentence
    assert (tokenizer.pad, tokenizer.size) == (pairs.PAD, 277)
    assert np.array_equal(tokenizer.encode(sentence), subwords.encode_all([sentence])[0])


# Rows


def test_rows_are_whole_sentences_in_their_order(subwords):
    long_sentence = "a king who reads is worth"
    rows = pairs.rows(subwords, [("a", "two kings"), (long_sentence, "b"), ("b", long_sentence), ("c", "d")], N=7)
    assert rows.longer == 2 and rows.source_BS.shape == rows.target_BN.shape == (2, 7)
    assert [subwords.decode(row) for row in rows.target_BN] == ["two kings", "d"]
    fetch, n = pairs.examples(rows)
    batch = batches.evaluation(fetch, n=n, batch=3)[0]
    target_N, kings = batch["target_BN"][0], subwords.encode_all(["two kings"])[0]
    length = len(kings)
    assert np.array_equal(target_N, [*kings, pairs.EOS, *[pairs.PAD] * (6 - length)])
    assert np.array_equal(batch["w_BN"][0], [pairs.BOS, *target_N[:-1]])
    assert np.array_equal(batch["weight_BN"][0], np.arange(7) <= length)  # [EOS] is predicted, padding is not
    assert np.array_equal(batch["weight_BN"].sum(1), [length + 1, 2, 0])  # the third row is padding of the batch
    assert np.array_equal(batch["valid_BS"], batch["source_BS"] != pairs.PAD)
    assert batch["valid_BS"].sum(1).tolist() == [2, 2, 2] and batch["weight_BN"].dtype == np.float32


def test_rows_are_encoded_in_pieces_and_never_truncated(subwords):
    numbers = [(f"{n % 7}", f"{n % 5}") for n in range(pairs.PIECE + 5)]
    rows = pairs.rows(subwords, numbers, N=2)
    assert rows.longer == 0 and [*map(subwords.decode, rows.source_BS[-6:])] == [source for source, _ in numbers[-6:]]
    (id_T,) = subwords.encode_all(["a king who reads is worth"])
    for N, row in ((len(id_T) + 1, [*id_T, pairs.EOS]), (len(id_T), [pairs.PAD] * len(id_T))):
        id_BN, fits_B = pairs.pad(subwords, ["a king who reads is worth"], N=N)
        assert fits_B.tolist() == [N > len(id_T)] and id_BN.tolist() == [row]
    with raises(errors.UserError, 1000, "N = 2"):
        pairs.rows(subwords, PAIRS, N=2)

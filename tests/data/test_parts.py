"""Sources are found or refused; the names of files define the splits, or else their contents."""

import argparse
import hashlib
import inspect
import os
import pathlib
import sysconfig
import textwrap

import hypothesis
import numpy as np
import pytest
from errors import raises
from hypothesis import strategies as st
from small_files import KING, documents, write

from experiments.config import errors
from experiments.data import files as data_files, images, labelled, pairs, text, tokenization


def write_corpus(folder, *names):
    """Write files whose content is their name, 50 times. Return the folder."""
    return str(write(folder, **{name: name.encode() * 50 for name in names}))


def list_parts(data):
    """Return the names of the files in the training split and in the evaluation split."""
    return [sorted({content.decode()[: len(content) // 50] for content in documents(part)}) for part in data[1:3]]


# Splits by names


@pytest.mark.parametrize(
    ("part", "paths"),
    {
        "train": "train.txt wiki.train.tokens Train-00000-of-00002.txt.gz training.txt",
        # the outermost name counts
        "valid": "ptb.valid.txt TinyStories-V2-valid.txt dev.en validation/a.txt val/train_a.txt train_test/dev.txt",
        "test": "test_2016_flickr.en test2016.en TEST testset.txt newstest2014.de tst2012.en",
        # no name of a split, or two
        "": "retraining.txt latest.txt contest/attest.txt tests/evaluate.txt train-test.txt",
    }.items(),
)
def test_a_name_has_this_part(part, paths):
    assert [part] * len(paths.split()) == [data_files.part_of_name(pathlib.PurePath(path)) for path in paths.split()]


@pytest.mark.parametrize(
    ("names", "train", "evaluation", "words"),
    [
        ("train.txt valid.txt test.txt", "train.txt", "valid.txt", "test.txt not used"),
        ("wiki.train.tokens wiki.test.tokens", "wiki.train.tokens", "wiki.test.tokens", "to evaluate"),
        ("train/a train/b dev/a test/a", "train/a train/b", "dev/a", "test/a not used"),
        ("train.txt valid.txt README", "train.txt", "valid.txt", "README left out"),
        ("corpus.txt more.txt test.txt", "corpus.txt more.txt", "test.txt", "test.txt to evaluate"),
        # IWSLT, and a test set with a number
        ("train.en tst2012.en tst2013.en", "train.en", "tst2012.en tst2013.en", "tst2013.en to evaluate"),
        ("europarl.en test2016.en", "europarl.en", "test2016.en", "test2016.en to evaluate"),
        ("training.txt validation.txt testing.txt", "training.txt", "validation.txt", "testing.txt not used"),
        ("train-0 train-1 train-2 dev train-3", "train-0 train-1 train-2 train-3", "dev", "train-0 and 3 more to"),
        # the files named train are smaller than the rest, so the rest is not a README
        ("train.py test.py a.py b.py c.py", "a.py b.py c.py train.py", "test.py", "test.py to evaluate"),
    ],
)
def test_names_define_the_part_of_a_file(tmp_path, names, train, evaluation, words):
    data = text.load(write_corpus(tmp_path, *names.split()))
    assert list_parts(data) == [train.split(), evaluation.split()]
    assert f"{tmp_path}: by their names, " in data.description and words in data.description


def test_a_named_file_is_the_evaluation_part_if_it_has_a_hundredth_of_all_bytes(tmp_path):
    write(tmp_path, **{f"{name}.py": name.encode() * 1353 for name in "abc"})
    for size, line in ((41, "by their names"), (40, "by their contents")):
        assert line in text.load(str(write(tmp_path, **{"dev.txt": b"x" * size}))).description


@pytest.mark.parametrize(
    "names", ["a.txt b.txt c.txt", "train-1 train-2", "a.py b.py test_a.py", "a.py b.py c.py train.py test_a.py"]
)
def test_contents_define_the_parts_if_names_do_not(tmp_path, names):
    data = text.load(write_corpus(tmp_path, *names.split()))
    (held_out,) = list_parts(data)[1]
    train_names = data_files.join_names(sorted({*names.split()} - {held_out}))
    assert f"by their contents, {train_names} to train on; {held_out} to evaluate" in data.description


def test_parts_without_training_data_or_text_are_refused_and_texts_in_both_are_counted(tmp_path):
    for number, names in enumerate((["valid.txt", "test.txt"], ["test/a.txt"])):
        with raises(errors.UserError, names[0], "text.source"):
            text.load(write_corpus(tmp_path / str(number), *names))
    write(tmp_path, **{"empty/train.txt": KING, "empty/valid.txt": b"", "test/a.txt": KING})
    with raises(errors.UserError, "empty", "valid.txt"):
        text.load(str(tmp_path / "empty"))
    # Names of parent folders do not count.
    assert "the first 90 %" in text.load(str(tmp_path / "test" / "a.txt")).description
    contents = {"train/a": b"a" * 90, "train/b": b"b" * 90, "valid/a": b"a" * 90, "valid/c": b"c" * 90}
    data = text.load(str(write(tmp_path / "repeated", **contents)))
    assert "(1 of 2 held-out texts" in data.description and len(documents(data.evaluation)) == 2


# Splits by contents

CONTENTS = st.lists(st.binary(max_size=3), min_size=2, max_size=31).filter(lambda contents: len(set(contents)) > 1)


@hypothesis.given(CONTENTS, st.sampled_from([0.001, 0.1, 0.5, 0.999]))
@hypothesis.settings(deadline=None, max_examples=40)
def test_rows_are_divided_by_their_contents_and_neither_side_is_empty(contents, share):
    training, evaluation = divide(contents, share)
    assert evaluation and training and not {*evaluation} & {*training}
    assert divide(contents[::-1], share) == [training[::-1], evaluation[::-1]]


def divide(contents, share):
    return data_files.divide(contents, map(data_files.digest, contents), share=share)


def test_this_share_with_the_smallest_digests_is_held_out():
    contents = [str(number).encode() for number in range(10_007)]
    _, out = divide(contents, 0.1)
    assert abs(len(out) / len(contents) - 0.1) < 5 * np.sqrt(0.09 / len(contents))
    # An additional text does not change the split of others.
    assert [content for content in divide([*contents, b"another"], 0.1)[1] if content != b"another"] == out
    assert divide(contents[:3], 1e-9)[1] == [min(contents[:3], key=lambda content: hashlib.sha256(content).digest())]
    with raises(errors.UserError, "differ"):
        divide([b"a", b"a"], 0.1)


@pytest.mark.parametrize("characters", ["a" * 97, "é" * 17, "aé€😀" * 5, "€" * 11, "😀" * 11, "😀a😀" * 7])
def test_one_file_is_cut_after_nine_tenths_and_never_inside_a_character(tmp_path, characters):
    content = characters.encode()
    data = text.load(str(write(tmp_path, a=content) / "a"))
    train, evaluation = map(b"".join, data[1:3])
    assert train.decode() + evaluation.decode() == characters and data.name == str(tmp_path / "a")
    assert 0 <= len(content) * 9 // 10 - len(train) < (4 if len(content) > len(characters) else 1)


def test_a_folder_is_read_in_order_without_hidden_and_empty_files(tmp_path):
    names = [f"f{number:02}" for number in range(37)]
    write(tmp_path, **{name: name.encode() for name in names}, **{"sub/copy": b"f07", "sub/twin": b"f30"})
    write(tmp_path, **{"empty": b"", ".hidden": b"hidden", ".git/config": b"config"})
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(write(tmp_path / ".elsewhere", linked=b"linked"))
    expected = [name.encode() for name in [*names, "f07", "f30"]]
    train, evaluation = map(documents, text.load(str(tmp_path))[1:3])
    assert sorted(train + evaluation) == sorted(expected) and train == [name for name in expected if name in train]
    assert not set(train) & set(evaluation) and evaluation
    # A single distinct text is cut in two.
    equal = text.load(str(write(tmp_path / "twice", a=b"0123456789", b=b"0123456789")))
    assert [*map(documents, equal[1:3])] == [[b"012345678"], [b"9"]]
    assert equal.description.endswith("twice: the first 90 % are for training, the rest is held out")


def test_the_standard_library_is_text_and_its_docstrings_are_english(tmp_path, monkeypatch):
    library = pathlib.Path(sysconfig.get_path("stdlib"))
    code = text.load("stdlib")
    train, evaluation = (documents(part) for part in code[1:3])
    assert (library / "argparse.py").read_bytes() in train + evaluation and len(train) > 100
    assert 0.02 < code.evaluation.size / (code.train.size + code.evaluation.size) < 0.3 and code.description == ""
    modules = {name: (library / name).read_bytes() for name in ("argparse.py", "ast.py", "textwrap.py", "queue.py")}
    # Parsing all modules is slow.
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(write(tmp_path, **modules)))
    docstrings = documents(text.load_whole("docstrings"))
    code, english = b"".join(modules.values()), b"".join(docstrings)
    assert inspect.getdoc(argparse).encode() in english and inspect.getdoc(textwrap.dedent).encode() in english
    assert 0.1 * len(code) < len(english) < 0.5 * len(code) and len(docstrings) == 4
    assert english.count(b"self.") / len(english) < 0.1 * code.count(b"self.") / len(code)  # prose, not code


@pytest.mark.parametrize("source", ["", "nothing/here", "a\0b", "tinyshakespear", "x" * 5000, "x" * 300 + "/y"])
@pytest.mark.parametrize(
    ("load", "names"),
    [
        (text.load, "stdlib, docstrings, tinyshakespeare"),
        (pairs.load, "spa-eng"),
        (images.load, "digits, fashion_mnist, mnist"),
        (labelled.load, "docstrings"),
    ],
)
def test_a_missing_source_is_refused_with_the_names_of_data_sets(tmp_path, monkeypatch, load, names, source):
    monkeypatch.chdir(tmp_path)
    with raises(errors.UserError, repr(source), names, tmp_path):
        load(source)


def test_text_that_cannot_be_used_is_refused(tmp_path, monkeypatch):
    write(tmp_path, **{"empty": b"", "short": b"x", "accent": "é".encode(), "folder/empty": b"", "broken/a": b"a"})
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "broken" / "link").symlink_to(tmp_path / "nowhere")
    for source in ("empty", "folder", "short", "accent", "loop", "broken"):
        with raises(errors.UserError, "link" if source == "broken" else source):
            text.load(str(tmp_path / source))

    def scandir(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "scandir", scandir)  # root may read every folder, and the tests may run as root
    with raises(errors.UserError, tmp_path, "Permission denied"):
        text.load(str(tmp_path))


HAS_TINYSHAKESPEARE = os.path.isfile(os.path.join(os.environ.get("TFM_DATA", ""), "tinyshakespeare.txt"))


@pytest.mark.skipif(not HAS_TINYSHAKESPEARE, reason="$TFM_DATA names no folder with tinyshakespeare.txt")
def test_tinyshakespeare_has_its_published_size():
    _, train, evaluation, _ = text.load("tinyshakespeare")
    chosen = tokenization.make("characters", train, specials=(), evaluation=evaluation)
    assert chosen.size == 65 and chosen.specials == ()
    assert (len(chosen.join(train)), len(chosen.join(evaluation))) == (1_003_854, 111_540)

"""Text is found whole or not at all: what a file's name says of its part is taken at its word, else contents decide."""

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

from experiments.data import files, text, tokenizer
from experiments.engine import errors


def corpus(folder, *names):
    """Files that hold their own names, 50 times."""
    return str(write(folder, **{name: name.encode() * 50 for name in names}))


def became(found):
    """The files of the training and the evaluation part."""
    return [sorted({content.decode()[: len(content) // 50] for content in documents(part)}) for part in found[1:3]]


# Names.


@pytest.mark.parametrize(
    ("part", "paths"),
    {
        "train": "train.txt wiki.train.tokens Train-00000-of-00002.txt.gz training.txt",
        # the outermost name counts
        "valid": "ptb.valid.txt TinyStories-V2-valid.txt dev.en validation/a.txt val/train_a.txt train_test/dev.txt",
        "test": "test_2016_flickr.en test2016.en TEST testset.txt newstest2014.de tst2012.en",
        # no word, or two at once
        "": "retraining.txt latest.txt contest/attest.txt tests/evaluate.txt train-test.txt",
    }.items(),
)
def test_the_part_that_a_name_tells(part, paths):
    assert {path: files.part_of_name(pathlib.PurePath(path)) for path in paths.split()} == dict.fromkeys(
        paths.split(), part
    )


@pytest.mark.parametrize(
    ("names", "train", "evaluation", "words"),
    [
        # the folder of the issue, of which train.txt was held out, and test.txt trained on
        ("train.txt valid.txt test.txt", "train.txt", "valid.txt", "test.txt left alone"),
        ("wiki.train.tokens wiki.test.tokens", "wiki.train.tokens", "wiki.test.tokens", "to evaluate"),
        ("train/a train/b dev/a test/a", "train/a train/b", "dev/a", "test/a left alone"),
        ("train.txt valid.txt README", "train.txt", "valid.txt", "README left out"),
        ("corpus.txt more.txt test.txt", "corpus.txt more.txt", "test.txt", "test.txt to evaluate"),
        # those of IWSLT, and of one whose test set has a number
        ("train.en tst2012.en tst2013.en", "train.en", "tst2012.en tst2013.en", "tst2013.en to evaluate"),
        ("europarl.en test2016.en", "europarl.en", "test2016.en", "test2016.en to evaluate"),
        ("training.txt validation.txt testing.txt", "training.txt", "validation.txt", "testing.txt left"),
        ("train-0 train-1 train-2 dev train-3", "train-0 train-1 train-2 train-3", "dev", "train-0 and 3 more to"),
        # what is named train is smaller than the rest, so the rest is no README
        ("train.py test.py a.py b.py c.py", "a.py b.py c.py train.py", "test.py", "test.py to evaluate"),
    ],
)
def test_names_tell_what_a_file_becomes(tmp_path, names, train, evaluation, words):
    found = text.load(corpus(tmp_path, *names.split()))
    assert became(found) == [train.split(), evaluation.split()]
    assert f"{tmp_path}: by their names, " in found.description and words in found.description


def test_a_small_file_is_not_all_that_a_folder_of_programs_is_evaluated_on(tmp_path):
    """But one of at least a hundredth of all bytes is."""
    write(tmp_path, **{"dev.txt": b"x" * 41, **{f"{name}.py": name.encode() * 1353 for name in "abc"}})
    found = text.load(str(tmp_path))
    assert "dev.txt to evaluate" in found.description and "by their names" in found.description
    write(tmp_path, **{"dev.txt": b"x" * 40})
    assert "by their contents" in text.load(str(tmp_path)).description


@pytest.mark.parametrize(
    "names", ["a.txt b.txt c.txt", "train-1 train-2", "a.py b.py test_a.py", "a.py b.py c.py train.py test_a.py"]
)
def test_where_names_tell_no_parts_contents_do_and_it_is_said(tmp_path, names):
    found = text.load(corpus(tmp_path, *names.split()))
    (held,) = became(found)[1]
    assert f"by their contents, {files.join_names(sorted({*names.split()} - {held}))} to train on" in found.description
    assert f"{held} to evaluate" in found.description


def test_named_parts_that_cannot_be_used_are_refused_and_what_is_on_both_sides_is_counted(tmp_path):
    for number, names in enumerate((["valid.txt", "test.txt"], ["test/a.txt"])):
        with raises(errors.UserError, names[0], "text.source"):
            text.load(corpus(tmp_path / str(number), *names))
    write(tmp_path, **{"empty/train.txt": KING, "empty/valid.txt": b"", "test/a.txt": KING})
    with raises(errors.UserError, "empty", "valid.txt"):
        text.load(str(tmp_path / "empty"))
    assert (
        "the first 90 %" in text.load(str(tmp_path / "test" / "a.txt")).description
    )  # a file alone is what it is, anywhere
    both = {"train/a": b"a" * 90, "train/b": b"b" * 90, "valid/a": b"a" * 90, "valid/c": b"c" * 90}
    found = text.load(str(write(tmp_path / "both", **both)))
    assert (
        "(1 of 2 held-out texts are also in the training data)" in found.description
        and len(documents(found.evaluation)) == 2
    )


# Contents.

CONTENTS = st.lists(st.binary(max_size=3), min_size=2, max_size=31).filter(lambda contents: len(set(contents)) > 1)


@hypothesis.given(CONTENTS, st.sampled_from([0.001, 0.1, 0.5, 0.999]))
@hypothesis.settings(deadline=None, max_examples=40)
def test_held_out_follows_content_and_leaves_neither_side_empty(contents, share):
    out = files.held_out(contents, share=share)
    held, kept = ({c for c, o in zip(contents, out, strict=True) if o == side} for side in (True, False))
    assert held and kept and not held & kept
    assert np.array_equal(files.held_out(contents[::-1], share=share), out[::-1])


def test_held_out_is_the_share_and_the_smallest_digests():
    contents = [str(number).encode() for number in range(10_007)]
    out = files.held_out(contents, share=0.1)
    assert abs(out.mean() - 0.1) < 5 * np.sqrt(0.09 / len(contents))
    more = files.held_out(contents + [b"another"], share=0.1)
    assert np.array_equal(more[:-1], out)  # what is added moves nothing else
    few = contents[:3]
    smallest = min(few, key=lambda content: hashlib.sha256(content).digest())
    assert [content for content, o in zip(few, files.held_out(few, share=1e-9), strict=True) if o] == [smallest]
    with raises(errors.UserError, "differ"):
        files.held_out([b"a", b"a"], share=0.1)


@pytest.mark.parametrize("characters", ["a" * 97, "é" * 17, "aé€😀" * 5, "€" * 11, "😀" * 11, "😀a😀" * 7])
def test_one_file_is_cut_after_nine_tenths_and_never_inside_a_character(tmp_path, characters):
    content = characters.encode()
    found = text.load(str(write(tmp_path, a=content) / "a"))
    train, evaluation = map(b"".join, found[1:3])
    assert train.decode() + evaluation.decode() == characters and found.name == str(tmp_path / "a")
    assert 0 <= len(content) * 9 // 10 - len(train) < (4 if len(content) > len(characters) else 1)


def test_a_folder_is_read_in_order_without_what_is_hidden_or_empty(tmp_path):
    names = [f"f{number:02}" for number in range(37)]
    write(tmp_path, **{name: name.encode() for name in names}, **{"sub/copy": b"f07", "sub/twin": b"f30"})
    write(tmp_path, **{"empty": b"", ".hidden": b"hidden", ".git/config": b"config"})
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(write(tmp_path / ".elsewhere", linked=b"linked"))
    found = text.load(str(tmp_path))
    expected = [name.encode() for name in [*names, "f07", "f30"]]
    train, evaluation = map(documents, found[1:3])
    assert sorted(train + evaluation) == sorted(expected) and train == [name for name in expected if name in train]
    assert not set(train) & set(evaluation) and evaluation
    one = text.load(str(write(tmp_path / "twice", a=b"0123456789", b=b"0123456789")))  # a single text is cut
    assert [*map(documents, one[1:3])] == [[b"012345678"], [b"9"]]
    assert one.description.endswith("twice: the first 90 % are for training, the rest is held out")


def test_the_standard_library_is_text_and_its_docstrings_are_english(tmp_path, monkeypatch):
    library = pathlib.Path(sysconfig.get_path("stdlib"))
    code = text.load("stdlib")
    both = [documents(part) for part in code[1:3]]
    assert (library / "argparse.py").read_bytes() in sum(both, []) and len(both[0]) > 100
    sizes = [code.train.size, code.evaluation.size]
    assert 0.02 < sizes[1] / sum(sizes) < 0.3 and code.description == ""
    some = {name: (library / name).read_bytes() for name in ("argparse.py", "ast.py", "textwrap.py", "queue.py")}
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(write(tmp_path, **some)))  # to parse all takes seconds
    words = text.load("docstrings")
    contents = documents(words.train) + documents(words.evaluation)
    code, everything = b"".join(some.values()), b"".join(contents)
    assert inspect.getdoc(argparse).encode() in everything and inspect.getdoc(textwrap.dedent).encode() in everything
    assert 0.1 * len(code) < len(everything) < 0.5 * len(code) and len(contents) == 4
    selves = [content.count(b"self.") / len(content) for content in (everything, code)]
    assert selves[0] < 0.1 * selves[1]  # words about code, not the code


def test_text_that_is_not_there_or_cannot_be_used_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for source in ("", "nothing/here", "a\0b", "tinyshakespear", "x" * 5000):
        with raises(errors.UserError, "stdlib, docstrings, tinyshakespeare", tmp_path):
            text.load(source)
    write(tmp_path, **{"empty": b"", "short": b"x", "accent": "é".encode(), "folder/empty": b"", "broken/a": b"a"})
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "broken" / "link").symlink_to(tmp_path / "nowhere")
    for source in ("empty", "folder", "short", "accent", "loop", "broken"):
        with raises(errors.UserError, "link" if source == "broken" else source):
            text.load(str(tmp_path / source))

    def scandir(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "scandir", scandir)  # the suite may run as one who may read everything
    with raises(errors.UserError, tmp_path, "Permission denied"):
        text.load(str(tmp_path))


HERE = os.path.isfile(os.path.join(os.environ.get("TFM_DATA", ""), "tinyshakespeare.txt"))


@pytest.mark.skipif(not HERE, reason="$TFM_DATA names no folder with tinyshakespeare.txt")
def test_tinyshakespeare_is_the_usual_one():
    found = text.load("tinyshakespeare")
    made = tokenizer.make("characters", found.train, specials=(), evaluation=found.evaluation)
    assert made.size == 65 and made.specials == ()
    assert len(made.join(found.train)) == 1_003_854
    assert len(made.join(found.evaluation)) == 111_540

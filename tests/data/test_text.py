"""Text is found whole or not at all, and split by its content."""

import argparse
import hashlib
import inspect
import os
import sysconfig
import textwrap

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from experiments.data import parts, text, tokenizer
from experiments.engine import errors

# Split.

CONTENTS = st.lists(st.binary(max_size=3), min_size=2, max_size=31).filter(lambda contents: len(set(contents)) > 1)


@hypothesis.given(CONTENTS, st.sampled_from([0.001, 0.1, 0.5, 0.999]))
@hypothesis.settings(deadline=None)
def test_held_out_follows_content_and_leaves_neither_side_empty(contents, share):
    out = parts.held_out(contents, share=share)
    held, kept = ({c for c, o in zip(contents, out, strict=True) if o == side} for side in (True, False))
    assert held and kept and not held & kept
    assert np.array_equal(parts.held_out(contents[::-1], share=share), out[::-1])


def test_held_out_is_the_share_and_the_smallest_digests():
    contents = [str(number).encode() for number in range(10_007)]
    out = parts.held_out(contents, share=0.1)
    assert abs(out.mean() - 0.1) < 5 * np.sqrt(0.09 / len(contents))
    more = parts.held_out(contents + [b"another"], share=0.1)
    assert np.array_equal(more[:-1], out)  # what is added moves nothing else
    few = contents[:3]
    smallest = min(few, key=lambda content: hashlib.sha256(content).digest())
    assert [content for content, o in zip(few, parts.held_out(few, share=1e-9), strict=True) if o] == [smallest]
    with pytest.raises(errors.UserError, match="differ"):
        parts.held_out([b"a", b"a"], share=0.1)


# Text.


def write(folder, **contents):
    for name, content in contents.items():
        (folder / name).write_bytes(content)


def test_one_file_is_cut_after_nine_tenths(tmp_path):
    write(tmp_path, a=bytes(range(1, 98)))
    found = text.load(str(tmp_path / "a"))
    assert found.train == [bytes(range(1, 88))] and found.evaluation == [bytes(range(88, 98))]
    assert found.name == str(tmp_path / "a")


@hypothesis.given(st.text(st.sampled_from("aé€😀"), min_size=11, max_size=61))
@hypothesis.settings(deadline=None, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
def test_one_file_is_never_cut_inside_a_character(tmp_path, characters):
    content = characters.encode()
    write(tmp_path, a=content)
    found = text.load(str(tmp_path / "a"))
    train, evaluation = map(bytes, found.train + found.evaluation)
    assert train.decode() + evaluation.decode() == characters
    assert 0 <= len(content) * 9 // 10 - len(train) < 4


def test_a_folder_is_read_in_order_without_what_is_hidden_or_empty(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / ".git").mkdir()
    names = [f"f{number:02}" for number in range(37)]
    write(tmp_path, **{name: name.encode() for name in names})
    write(tmp_path, empty=b"", **{".hidden": b"hidden"})
    write(tmp_path / ".git", config=b"config")
    write(tmp_path / "sub", copy=b"f07", twin=b"f30")
    os.mkfifo(tmp_path / "pipe")
    found = text.load(str(tmp_path))
    expected = [*sorted(names), "f07", "f30"]
    assert sorted(found.train + found.evaluation) == sorted(name.encode() for name in expected)
    assert found.train == [name.encode() for name in expected if name.encode() in found.train]
    assert not set(found.train) & set(found.evaluation) and found.evaluation


def test_a_folder_with_a_single_text_is_cut_like_a_file(tmp_path):
    write(tmp_path, a=b"0123456789", b=b"0123456789")
    found = text.load(str(tmp_path))
    assert (found.train, found.evaluation, found.said) == ([b"012345678"], [b"9"], "")


def test_the_standard_library_is_text():
    found = text.load("stdlib")
    with open(os.path.join(sysconfig.get_path("stdlib"), "argparse.py"), "rb") as file:
        assert file.read() in found.train + found.evaluation
    sizes = [sum(map(len, part)) for part in (found.train, found.evaluation)]
    assert len(found.train) + len(found.evaluation) > 100
    assert 0.02 < sizes[1] / sum(sizes) < 0.3
    assert text.load("stdlib") == found


def test_docstrings_are_the_english_of_the_standard_library():
    found = text.load("docstrings")
    everything = b"".join(found.train + found.evaluation)
    assert inspect.getdoc(argparse).encode() in everything and inspect.getdoc(textwrap.dedent).encode() in everything
    code = b"".join(text.load("stdlib").train + text.load("stdlib").evaluation)
    assert 0.1 * len(code) < len(everything) < 0.5 * len(code)
    share = [content.count(b"self.") / len(content) for content in (everything, code)]
    assert share[0] < 0.1 * share[1]  # words about code, not the code


@pytest.mark.parametrize("source", ["", "nothing/here", "a\0b", "tinyshakespear"])
def test_an_unknown_source_lists_the_named_ones(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(errors.UserError, match=r"stdlib, docstrings, tinyshakespeare.*" + str(tmp_path)):
        text.load(source)


def test_text_that_cannot_be_used_is_refused(tmp_path, monkeypatch):
    write(tmp_path, empty=b"", short=b"x", accent="é".encode())
    (tmp_path / "folder").mkdir()
    write(tmp_path / "folder", empty=b"")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "link").symlink_to(tmp_path / "nowhere")
    for source, complaint in (
        ("empty", "holds no text"),
        ("folder", "holds no text"),
        ("short", "too little text"),
        ("accent", "too little text"),
        ("loop", "cannot be read"),
        ("broken", "link cannot be read"),
        ("x" * 5000, "cannot be read"),
    ):
        with pytest.raises(errors.UserError, match=complaint):
            text.load(str(tmp_path / source))


def test_a_folder_without_permission_is_refused(tmp_path, monkeypatch):
    def scandir(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "scandir", scandir)  # the suite may run as one who may read everything
    with pytest.raises(errors.UserError, match="Permission denied"):
        text.load(str(tmp_path))


HERE = os.path.isfile(os.path.join(os.environ.get("TFM_DATA", ""), "tinyshakespeare.txt"))


@pytest.mark.skipif(not HERE, reason="$TFM_DATA names no folder with tinyshakespeare.txt")
def test_tinyshakespeare_is_the_usual_one():
    found = text.load("tinyshakespeare")
    made = tokenizer.make("characters", found.train, evaluation=found.evaluation)
    assert made.size == 65 and made.specials == ()
    assert len(made.join(found.train)) == 1_003_854
    assert len(made.join(found.evaluation)) == 111_540

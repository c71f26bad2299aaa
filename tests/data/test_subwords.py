"""Subwords are learned from text, and give it back."""

import json
import random

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from experiments.data import subwords
from experiments.engine import errors

WORDS = "a king who reads is worth two kings who fight".split()
SAID = [(f"{a} {b} {c}.", f"{c} {b} {a}!") for a in WORDS for b in WORDS for c in WORDS]


def text(some) -> bytes:
    return "".join(f"{source}\t{target}\n" for source, target in some).encode()


def both(loaded):
    return sorted(loaded.train + loaded.evaluation)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "said.tsv"
    path.write_bytes(text(SAID))
    return path


# Subwords.


@pytest.fixture(scope="module")
def made():
    return subwords.train([side for pair in SAID for side in pair], W=277)


@hypothesis.given(st.lists(st.text(), max_size=5))
@hypothesis.settings(deadline=None)
def test_any_text_comes_back(made, sentences):
    for text, id_T in zip(sentences, made.encode(sentences), strict=True):
        assert made.decode(id_T) == text and id_T.dtype == np.int32
        assert not id_T.size or (subwords.EOS < id_T.min() and id_T.max() < made.size)


def test_specials_are_ids_only_and_the_text_ends_at_eos(made):
    literal = "[BOS]a king[EOS][PAD]"
    (id_T,) = made.encode([literal])
    assert made.decode(id_T) == literal and not set(id_T.tolist()) & {subwords.PAD, subwords.BOS, subwords.EOS}
    king = made.encode(["a king"])[0]
    assert made.decode([subwords.BOS, *king, subwords.EOS, *king, subwords.PAD]) == "a king"
    assert (subwords.PAD, subwords.BOS, subwords.EOS) == (0, 1, 2)
    assert made.names([1, *king, 2]) == ["[BOS]", *(made.decode([i]) for i in king), "[EOS]"]
    for wrong in (-1, made.size):
        with pytest.raises(ValueError, match="between 0 and 276"):
            made.decode([wrong])


def test_training_depends_on_the_sentences_alone_and_merges_what_is_frequent(made):
    sentences = [side for pair in SAID for side in pair]
    random.Random(0).shuffle(sentences)
    assert subwords.train(sentences, W=277) == made and made.size == 277
    assert len(made.merges) == 277 - 3 - 256
    assert len(made.encode([" king"])[0]) < 5 == len(made.encode([" gnik"])[0])
    few = subwords.train(["aa"], W=277)
    assert few.size == 3 + 256 + 1 and few.merges == (("a", "a"),)


def test_saved_subwords_are_the_same(made):
    saved = json.loads(json.dumps(made.to_json()))
    again = subwords.from_json(saved)
    assert again == made and again.size == made.size
    sentence = "¿Un rey? two kings\n"
    assert np.array_equal(again.encode([sentence])[0], made.encode([sentence])[0])


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"kind": "bytes"}, "entries kind"),
        ({"more": 1}, "entries kind"),
        ({"specials": ["[PAD]"]}, "specials"),
        ({"merges": "ab"}, "list of pairs"),
        ({"merges": [["a", "b"], "ab"]}, "list of pairs"),
        ({"merges": [["a", 1]]}, "list of pairs"),
        ({"merges": [["ab", "c"], ["a", "b"]]}, "no merge before it"),
    ],
)
def test_saved_subwords_that_do_not_hold_together_are_refused(made, wrong, words):
    with pytest.raises(errors.UserError, match=words):
        subwords.from_json(made.to_json() | wrong)


def test_a_small_vocabulary_and_half_a_surrogate_are_refused(made):
    assert subwords.train([], W=259).size == 259
    with pytest.raises(errors.UserError, match="at least 259 ids"):
        subwords.train(["a"], W=258)
    for call in (lambda: made.encode(["\ud800"]), lambda: subwords.train(["\ud800"], W=300)):
        with pytest.raises(errors.UserError, match="not Unicode"):
            call()

"""Text is turned into ids and back."""

import json

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from experiments.data import tokenizer
from experiments.engine import errors

# Tokenizer.

DOCUMENTS = st.lists(st.text(max_size=11).map(str.encode), min_size=1, max_size=5)


@hypothesis.given(DOCUMENTS, st.sampled_from(tokenizer.KINDS))
@hypothesis.settings(deadline=None)
def test_what_is_encoded_decodes_to_itself(documents, kind):
    made = tokenizer.make(kind, documents, specials=("[MASK]",))
    ids = made.join(documents)
    assert ids.dtype == np.uint8 and made.decode(ids) == "\0".join(document.decode() for document in documents)
    for document in documents:
        assert made.decode(made.encode(document.decode())) == document.decode()
    assert tokenizer.from_json(json.loads(made.files["tokenizer.json"])) == made


@hypothesis.given(st.binary(max_size=31))
def test_bytes_are_their_own_ids(document):
    made = tokenizer.make("bytes", [])
    assert made.size == made.ordinary == 256
    assert made.join([document]).tolist() == list(document)
    assert made.decode(list(document)) == document.decode("utf-8", "replace")


def test_characters_are_numbered_in_order_and_specials_follow():
    made = tokenizer.make("characters", ["béa😀b".encode()], specials=("[MASK]", "[SEP]"))
    assert made.characters == "abé😀" and made.ordinary == 4 and made.size == 6
    assert made.encode("😀ab").tolist() == [3, 0, 1]
    assert made.special("[MASK]") == made.mask == 4
    assert made.decode([0, 4, 3, 5]) == "a[MASK]😀[SEP]"
    for each, name in ((made, "[CLS]"), (tokenizer.make("characters", [b"a"]), "[MASK]")):
        with pytest.raises(errors.UserError, match="no special"):
            each.special(name)
    assert made.decode([0, -1, 6, 1]) == "ab"  # rows of a model that no word has


def test_the_separator_is_known_only_where_documents_are_joined():
    assert tokenizer.make("characters", [b"ab"]).characters == "ab"
    two = tokenizer.make("characters", [b"ab", b"ca"])
    assert two.characters == "\0abc" and two.join([b"ab", b"ca"]).tolist() == [1, 2, 0, 3, 1]
    assert two.join([b"ab"]).tolist() == [1, 2]
    one = tokenizer.make("characters", [b"ab"], evaluation=[b"a", b"b"])
    assert one.join([b"a", b"b"]).tolist() == [1, 0, 2] and one.specials == ()
    plain = tokenizer.make("bytes", [])
    assert plain.join([b"a", b"b"]).tolist() == [97, 0, 98]


@pytest.mark.parametrize("unseen", ["c", " ", "é", "😀"])  # between, below and above the known code points
def test_unseen_characters_are_unknown(unseen):
    documents, strange = [b"abd"], [f"a{unseen}d".encode()]
    made = tokenizer.make("characters", documents, specials=("[MASK]",), evaluation=strange)
    assert made.specials == ("[MASK]", "[UNK]") and made.characters == "abd"
    assert made.join(strange).tolist() == [0, 4, 2] and made.decode([0, 4, 2]) == "a[UNK]d"
    given = tokenizer.make("characters", documents, specials=("[UNK]", "[MASK]"), evaluation=strange)
    assert given.specials == ("[UNK]", "[MASK]") and given.join(strange).tolist() == [0, 3, 2]
    without = tokenizer.make("characters", documents, evaluation=[b"da"])
    assert without.specials == ()
    with pytest.raises(errors.UserError, match=f"{unseen!r} is unknown"):
        without.join(strange)


def test_an_unknown_kind_lists_the_known_ones():
    with pytest.raises(errors.UserError, match="'charcters'.*did you mean 'characters'.*bytes, characters"):
        tokenizer.make("charcters", [])
    with pytest.raises(errors.UserError, match="'words'.*bytes, characters"):
        tokenizer.make("words", [])


@pytest.mark.parametrize("chunk", range(1, 9))
def test_the_first_byte_that_is_no_utf8_is_named_wherever_a_piece_ends(monkeypatch, chunk):
    monkeypatch.setattr(tokenizer, "CHUNK", chunk)
    with pytest.raises(errors.UserError, match="byte 5, near"):
        tokenizer.make("characters", ["a\N{GRINNING FACE}".encode() + b"\xb6b"])


def test_characters_need_utf8():
    latin = "naïve".encode("latin-1")
    for documents, evaluation in (([b"a", latin], []), ([b"a"], [latin])):
        with pytest.raises(errors.UserError, match="not UTF-8 text .byte 2.*'bytes'"):
            tokenizer.make("characters", documents, evaluation=evaluation)
    with pytest.raises(errors.UserError, match="not UTF-8"):
        tokenizer.make("characters", [b"a"]).join([latin])
    assert tokenizer.make("bytes", [latin]).join([latin]).tolist() == list(latin)


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": "words"},
        {"kind": "bytes"},
        {"characters": "ba"},
        {"characters": "aa"},
        {"characters": 3},
        {"specials": "[UNK]"},
        {"specials": [1]},
        {"more": 1},
    ],
)
def test_a_saved_tokenizer_must_hold_together(wrong):
    saved = {"kind": "characters", "characters": "ab", "specials": ["[UNK]"]}
    assert tokenizer.from_json(saved).size == 3
    with pytest.raises(errors.UserError):
        tokenizer.from_json({**saved, **wrong})

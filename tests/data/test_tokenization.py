"""Text is encoded and decoded by bytes and by characters; unknown kinds are refused."""

import hypothesis
import numpy as np
import pytest
from errors import raises
from hypothesis import strategies as st

from experiments.config import errors
from experiments.data import pretrained_tokenizer, tokenization

DOCUMENTS = st.lists(st.text(max_size=11).map(str.encode), min_size=1, max_size=5)


@hypothesis.given(DOCUMENTS, st.sampled_from(tokenization.KINDS))
@hypothesis.settings(deadline=None, max_examples=40)
def test_encoded_text_is_decoded_to_itself(documents, kind):
    text = b"\0".join(documents)
    tokenizer = tokenization.make(kind, [text], specials=("[MASK]",))
    ids = tokenizer.join([text])
    assert ids.dtype == np.uint8 and tokenizer.decode(ids) == text.decode()
    for document in documents:
        assert tokenizer.decode(tokenizer.encode(document.decode())) == document.decode()


@pytest.mark.parametrize("kind", tokenization.KINDS)
def test_a_saved_tokenizer_of_a_run_is_read(tmp_path, kind):
    """Like a published tokenizer, it inserts no separator between documents."""
    expected = tokenization.make(kind, ["ab cé€".encode()], specials=("[MASK]",))
    (tmp_path / "tokenizer.json").write_bytes(expected.files["tokenizer.json"])
    tokenizer = pretrained_tokenizer.read(tmp_path)
    assert tokenizer.special == expected.special == {tokenizer.size - 1} | ({0} if kind == "bytes" else set())
    assert tokenizer.size == expected.size and tokenizer.mask == expected.mask == tokenizer.size - 1
    assert (tokenizer.bos, tokenizer.eos, tokenizer.pad) == (None, None, None)
    ids = tokenizer.encode("cab€é")
    np.testing.assert_array_equal(ids, expected.encode("cab€é"))
    np.testing.assert_array_equal(tokenizer.join([b"cab\0", "€é".encode()]), ids)
    assert tokenizer.decode(ids) == "cab€é" and tokenizer.decode([tokenizer.mask]) == "[MASK]"
    assert "".join(tokenizer.stream([*ids, tokenizer.mask, *ids[:2], -1, tokenizer.size])) == "cab€é[MASK]ca"
    assert list(tokenizer.stream(tokenizer.encode("a€")[1:], after=ids))[0] == "€"
    assert tokenization.make(kind, [b"a"]).mask is None


def test_bytes_are_their_own_ids_and_characters_are_numbered_in_order_and_specials_follow():
    chosen, document = tokenization.make("bytes", []), bytes(range(256))
    assert chosen.size == 256 and chosen.special == {0} and chosen.join([b"a\0", b"b"]).tolist() == [97, 0, 98]
    assert chosen.join([document]).tolist() == list(document)
    assert chosen.decode(list(document)) == document.decode("utf-8", "replace")
    chosen = tokenization.make("characters", ["béa😀b".encode()], specials=("[MASK]", "[SEP]"))
    assert chosen.characters == "abé😀" and chosen.special == {4, 5} and chosen.size == 6
    assert chosen.encode("😀ab").tolist() == [3, 0, 1]
    assert chosen.mask == 4 and tokenization.make("characters", [b"a"]).mask is None
    assert chosen.decode([0, 4, 3, 5]) == "a[MASK]😀[SEP]"
    assert chosen.decode([0, -1, 6, 1]) == "ab"  # ids without a token are skipped
    assert tokenization.make("characters", [b"ab"]).characters == "ab"  # no separator for a single document
    two_documents = tokenization.make("characters", [b"ab", b"\0ca"])
    assert two_documents.characters == "\0abc" and two_documents.join([b"ab\0ca"]).tolist() == [1, 2, 0, 3, 1]
    assert two_documents.join([b"ab"]).tolist() == [1, 2]
    with_evaluation = tokenization.make("characters", [b"ab"], evaluation=[b"a\0b"])
    assert with_evaluation.join([b"a\0b"]).tolist() == [1, 0, 2] and with_evaluation.specials == ()


@pytest.mark.parametrize("unseen", ["c", " ", "é", "😀"])  # code points between, below and above the known ones
def test_unseen_characters_are_unknown(unseen):
    documents, strange = [b"abd"], [f"a{unseen}d".encode()]
    chosen = tokenization.make("characters", documents, specials=("[MASK]",), evaluation=strange)
    assert chosen.specials == ("[MASK]", "[UNK]") and chosen.characters == "abd"
    assert chosen.join(strange).tolist() == [0, 4, 2] and chosen.decode([0, 4, 2]) == "a[UNK]d"
    reordered = tokenization.make("characters", documents, specials=("[UNK]", "[MASK]"), evaluation=strange)
    assert reordered.specials == ("[UNK]", "[MASK]") and reordered.join(strange).tolist() == [0, 3, 2]
    without_unknown = tokenization.make("characters", documents, evaluation=[b"da"])
    assert without_unknown.specials == ()
    with raises(errors.UserError, repr(unseen)):
        without_unknown.join(strange)


def test_an_unknown_kind_lists_the_known_ones_and_characters_need_utf8():
    with raises(errors.UserError, "text.tokenizer = charcters", "characters", "bpe:8192"):
        tokenization.make("charcters", [])
    latin = "naïve".encode("latin-1")
    for documents, evaluation in (([b"a\0", latin], []), ([b"a"], [latin])):
        with raises(errors.UserError, "na\\xefve", "= bytes"):
            tokenization.make("characters", documents, evaluation=evaluation)
    with raises(errors.UserError, "na\\xefve"):
        tokenization.make("characters", [b"a"]).join([latin])
    assert tokenization.make("bytes", [latin]).join([latin]).tolist() == list(latin)


def test_a_character_is_streamed_after_its_last_byte():
    chosen, read_ids = tokenization.make("bytes", []), []
    ids = chosen.encode("€a")
    stream = chosen.stream(read_ids.append(id) or id for id in ids)
    assert next(stream) == "€" and len(read_ids) == 3
    assert list(stream) == ["a"] and len(read_ids) == 4
    assert list(chosen.stream(ids[:2])) == ["\N{REPLACEMENT CHARACTER}"]  # the stream ends inside a character
    assert list(chosen.stream(ids[2:], after=ids[:2])) == ["€", "a"]
    assert list(chosen.stream([], after=ids)) == []


@hypothesis.given(text=st.text(max_size=9), next_ids=st.lists(st.integers(-1, 256), max_size=23))
@hypothesis.settings(deadline=None, max_examples=60)
def test_any_bytes_are_streamed_as_they_are_decoded(text, next_ids):
    chosen = tokenization.make("bytes", [])
    ids = chosen.encode(text)
    assert "".join(chosen.stream(iter(next_ids))) == chosen.decode(next_ids)
    assert text + "".join(chosen.stream(np.array(next_ids, int), after=ids)) == chosen.decode([*ids, *next_ids])

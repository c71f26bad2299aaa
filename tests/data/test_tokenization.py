"""Text is encoded and decoded by bytes, by characters, and by the pieces of llama2.c; other files are refused."""

import os
import pathlib

import hypothesis
import numpy as np
import pytest
from errors import raises
from hypothesis import strategies as st
from small_files import BYTES, TABLE, WORDS, pieces

from experiments.data import pretrained_tokenizer, tokenization
from experiments.engine import errors

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


# The pieces of llama2.c

TEXT = st.text(st.sampled_from("ab c<é€😀"), max_size=17)
LLAMA2C = pretrained_tokenizer.read_pieces(pieces(TABLE))


def join_slowly(text: str) -> list[bytes]:
    """Return the pieces by their definition: merge the best of all neighbouring pairs, and repeat."""
    contents = []
    for character in " " + text if text else "":
        content = character.encode()
        contents += [content] if content in WORDS else [BYTES[byte] for byte in content]
    while True:
        scores = [WORDS.get(contents[i] + contents[i + 1], -np.inf) for i in range(len(contents) - 1)]
        if not scores or max(scores) == -np.inf:
            return contents
        best = scores.index(max(scores))
        contents[best : best + 2] = [contents[best] + contents[best + 1]]


@hypothesis.given(text=TEXT | st.text("abc ", max_size=31), next_ids=st.lists(st.integers(-1, len(TABLE)), max_size=23))
@hypothesis.settings(deadline=None, max_examples=60)
def test_the_best_neighbours_join_first_and_pieces_stream_as_they_decode(text, next_ids):
    ids = LLAMA2C.encode(text)
    assert ids.dtype == np.int32 and ids[0] == LLAMA2C.bos == 1
    assert [TABLE[id][0] for id in ids[1:]] == join_slowly(text)
    np.testing.assert_array_equal(LLAMA2C.encode(text, specials=False), ids[1:])
    assert LLAMA2C.decode(ids) == LLAMA2C.decode(ids[1:]) == LLAMA2C.decode([*ids, LLAMA2C.eos]) == text
    assert "".join(LLAMA2C.stream(iter(next_ids))) == LLAMA2C.decode(next_ids)
    assert text + "".join(LLAMA2C.stream(np.array(next_ids, int), after=ids)) == LLAMA2C.decode([*ids, *next_ids])


def test_letters_are_never_joined_to_special_tokens_or_bytes():
    letters = [(letter.encode(), 0.0) for letter in "<0x41>su"] + [(b"<0", 1.0), (b"x41>", 1.0), (b"x4", 2), (b"1>", 1)]
    table = [(b"<unk>", 0.0), (b"<s>", 9.0), (b"</s>", 0.0), (b"<0x41>", 9.0), (b"<s", 3), *letters, (b"<", 5.0)]
    chosen = pretrained_tokenizer.Pieces(*zip(*table, strict=True))
    ids = chosen.encode("<0x41>", specials=False)
    assert [table[id][0] for id in ids] == [b"<unk>", b"<0", b"x41>"]
    assert chosen.encode("<", specials=False)[1] == table.index((b"<", 0.0))  # the first of two equal pieces
    assert [table[id][0] for id in chosen.encode("<s>", specials=False)] == [b"<unk>", b"<s", b">"]
    assert chosen.encode("A").tolist() == [1, 0, 3]  # as a byte; the space before it is unknown
    assert chosen.decode([1, 0, 3]) == "<unk>A"
    assert LLAMA2C.decode([-1, LLAMA2C.size, 10**9, LLAMA2C.bos, LLAMA2C.eos]) == ""
    assert LLAMA2C.decode(np.array([], np.int32)) == LLAMA2C.decode(LLAMA2C.encode("")) == ""
    assert (LLAMA2C.size, LLAMA2C.bos, LLAMA2C.eos, LLAMA2C.mask, LLAMA2C.pad) == (len(TABLE), 1, 2, None, None)


@pytest.mark.parametrize(
    "content", [b"", pieces(TABLE)[:-1], pieces(TABLE) + b"\0", pieces(TABLE[1:]), pieces(TABLE[:2])]
)
def test_other_content_is_not_read_as_pieces(tmp_path, content):
    (tmp_path / "tok9.bin").write_bytes(content)
    with raises(errors.UserError, tmp_path / "tok9.bin"):
        pretrained_tokenizer.read(tmp_path)


def test_the_published_pieces_decode_every_text_to_itself():
    file = pathlib.Path(os.environ.get("TFM_DATA", "")) / "stories260K" / "tok512.bin"
    if not os.environ.get("TFM_DATA") or not file.is_file():
        pytest.skip("TFM_DATA names no folder with stories260K/tok512.bin")
    chosen = pretrained_tokenizer.read(file)
    for text in ("Once upon a time,\n\tthere was  a tïny 😀.", " two spaces before", "", " "):
        assert chosen.decode(chosen.encode(text)) == text
    assert chosen.decode(chosen.encode("Lily's ball")[:3]) == "Lily'"


def test_a_character_is_streamed_after_its_last_byte_and_a_continuation_begins_with_its_space():
    ids = LLAMA2C.encode("€a", specials=False)[1:]
    read_ids = []
    stream = LLAMA2C.stream(read_ids.append(id) or id for id in ids)
    assert next(stream) == "€" and len(read_ids) == 3
    assert list(stream) == ["a"] and len(read_ids) == 4
    assert list(LLAMA2C.stream(ids[:2])) == ["\N{REPLACEMENT CHARACTER}"]  # the stream ends inside a character
    assert list(LLAMA2C.stream(ids[2:], after=ids[:2])) == ["€", "a"]
    assert list(LLAMA2C.stream([], after=ids)) == []
    prompt = LLAMA2C.encode("ab")
    next_ids = LLAMA2C.encode("ab ab")[len(prompt) :]
    assert "".join(LLAMA2C.stream(next_ids, after=prompt)) == " ab" and "".join(LLAMA2C.stream(next_ids)) == "ab"
    assert "".join(LLAMA2C.stream(next_ids, after=[LLAMA2C.bos])) == "ab"

"""Text is turned into ids and back, by bytes, by characters, and by the pieces of llama2.c; bad files are refused."""

import os
import pathlib

import hypothesis
import numpy as np
import pytest
from errors import raises
from hypothesis import strategies as st
from small_files import BYTES, TABLE, WORDS, pieces

from experiments.data import pretrained_tokenizer, tokenizer
from experiments.engine import errors

DOCUMENTS = st.lists(st.text(max_size=11).map(str.encode), min_size=1, max_size=5)


@hypothesis.given(DOCUMENTS, st.sampled_from(tokenizer.KINDS))
@hypothesis.settings(deadline=None, max_examples=40)
def test_what_is_encoded_decodes_to_itself(documents, kind):
    joined = b"\0".join(documents)
    made = tokenizer.make(kind, [joined], specials=("[MASK]",))
    ids = made.join([joined])
    assert ids.dtype == np.uint8 and made.decode(ids) == joined.decode()
    for document in documents:
        assert made.decode(made.encode(document.decode())) == document.decode()


@pytest.mark.parametrize("kind", tokenizer.KINDS)
def test_a_saved_tokenizer_of_a_run_is_read(tmp_path, kind):
    """Used as a published one is: nothing stands between documents."""
    ours = tokenizer.make(kind, ["ab cé€".encode()], specials=("[MASK]",))
    (tmp_path / "tokenizer.json").write_bytes(ours.files["tokenizer.json"])
    made = pretrained_tokenizer.read(tmp_path)
    assert made.special == ours.special == {made.size - 1} | ({0} if kind == "bytes" else set())
    assert made.size == ours.size and made.mask == ours.mask == made.size - 1
    assert (made.bos, made.eos, made.pad) == (None, None, None)
    ids = made.encode("cab€é")
    np.testing.assert_array_equal(ids, ours.encode("cab€é"))
    np.testing.assert_array_equal(made.join([b"cab\0", "€é".encode()]), ids)
    assert made.decode(ids) == "cab€é" and made.decode([made.mask]) == "[MASK]"
    assert "".join(made.stream([*ids, made.mask, *ids[:2], -1, made.size])) == "cab€é[MASK]ca"
    assert list(made.stream(made.encode("a€")[1:], after=ids))[0] == "€"
    assert tokenizer.make(kind, [b"a"]).mask is None


def test_bytes_are_their_own_ids_and_characters_are_numbered_in_order_and_specials_follow():
    made, document = tokenizer.make("bytes", []), bytes(range(256))
    assert made.size == 256 and made.special == {0} and made.join([b"a\0", b"b"]).tolist() == [97, 0, 98]
    assert made.join([document]).tolist() == list(document)
    assert made.decode(list(document)) == document.decode("utf-8", "replace")
    made = tokenizer.make("characters", ["béa😀b".encode()], specials=("[MASK]", "[SEP]"))
    assert made.characters == "abé😀" and made.special == {4, 5} and made.size == 6
    assert made.encode("😀ab").tolist() == [3, 0, 1]
    assert made.mask == 4 and tokenizer.make("characters", [b"a"]).mask is None
    assert made.decode([0, 4, 3, 5]) == "a[MASK]😀[SEP]"
    assert made.decode([0, -1, 6, 1]) == "ab"  # rows of a model that no word has
    assert tokenizer.make("characters", [b"ab"]).characters == "ab"  # the separator only where documents are joined
    two = tokenizer.make("characters", [b"ab", b"\0ca"])
    assert two.characters == "\0abc" and two.join([b"ab\0ca"]).tolist() == [1, 2, 0, 3, 1]
    assert two.join([b"ab"]).tolist() == [1, 2]
    one = tokenizer.make("characters", [b"ab"], evaluation=[b"a\0b"])
    assert one.join([b"a\0b"]).tolist() == [1, 0, 2] and one.specials == ()


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
    with raises(errors.UserError, repr(unseen)):
        without.join(strange)


def test_an_unknown_kind_lists_the_known_ones_and_characters_need_utf8():
    with raises(errors.UserError, "'charcters'", "characters", "bpe:8192"):
        tokenizer.make("charcters", [])
    latin = "naïve".encode("latin-1")
    for documents, evaluation in (([b"a\0", latin], []), ([b"a"], [latin])):
        with raises(errors.UserError, "na\\xefve", "'bytes'"):
            tokenizer.make("characters", documents, evaluation=evaluation)
    with raises(errors.UserError, "na\\xefve"):
        tokenizer.make("characters", [b"a"]).join([latin])
    assert tokenizer.make("bytes", [latin]).join([latin]).tolist() == list(latin)


# The pieces of llama2.c.

TEXT = st.text(st.sampled_from("ab c<é€😀"), max_size=17)
MADE = pretrained_tokenizer.read_pieces(pieces(TABLE))


def joined_slowly(text: str) -> list[bytes]:
    """As the definition says: look at all neighbours, join the best pair, begin anew."""
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


@hypothesis.given(text=TEXT | st.text("abc ", max_size=31), more=st.lists(st.integers(-1, len(TABLE)), max_size=23))
@hypothesis.settings(deadline=None, max_examples=60)
def test_the_best_neighbours_join_first_and_pieces_stream_as_they_decode(text, more):
    ids = MADE.encode(text)
    assert ids.dtype == np.int32 and ids[0] == MADE.bos == 1
    assert [TABLE[id][0] for id in ids[1:]] == joined_slowly(text)
    np.testing.assert_array_equal(MADE.encode(text, specials=False), ids[1:])
    assert MADE.decode(ids) == MADE.decode(ids[1:]) == MADE.decode([*ids, MADE.eos]) == text
    assert "".join(MADE.stream(iter(more))) == MADE.decode(more)
    assert text + "".join(MADE.stream(np.array(more, int), after=ids)) == MADE.decode([*ids, *more])


def test_specials_and_bytes_are_never_made_of_letters_nor_text_of_what_is_no_piece():
    letters = [(letter.encode(), 0.0) for letter in "<0x41>su"] + [(b"<0", 1.0), (b"x41>", 1.0), (b"x4", 2), (b"1>", 1)]
    table = [(b"<unk>", 0.0), (b"<s>", 9.0), (b"</s>", 0.0), (b"<0x41>", 9.0), (b"<s", 3), *letters, (b"<", 5.0)]
    made = pretrained_tokenizer.Pieces(*zip(*table, strict=True))
    ids = made.encode("<0x41>", specials=False)
    assert [table[id][0] for id in ids] == [b"<unk>", b"<0", b"x41>"]
    assert made.encode("<", specials=False)[1] == table.index((b"<", 0.0))  # of two equal pieces the first
    assert [table[id][0] for id in made.encode("<s>", specials=False)] == [b"<unk>", b"<s", b">"]
    assert made.encode("A").tolist() == [1, 0, 3]  # through its byte; the space before it has neither piece nor byte
    assert made.decode([1, 0, 3]) == "<unk>A"
    assert MADE.decode([-1, MADE.size, 10**9, MADE.bos, MADE.eos]) == ""
    assert MADE.decode(np.array([], np.int32)) == MADE.decode(MADE.encode("")) == ""
    assert (MADE.size, MADE.bos, MADE.eos, MADE.mask, MADE.pad) == (len(TABLE), 1, 2, None, None)


@pytest.mark.parametrize(
    "content", [b"", pieces(TABLE)[:-1], pieces(TABLE) + b"\0", pieces(TABLE[1:]), pieces(TABLE[:2])]
)
def test_other_content_is_not_read_as_pieces(tmp_path, content):
    (tmp_path / "tok9.bin").write_bytes(content)
    with raises(errors.UserError, tmp_path / "tok9.bin"):
        pretrained_tokenizer.read(tmp_path)


def test_the_published_pieces_give_every_text_back():
    file = pathlib.Path(os.environ.get("TFM_DATA", "")) / "stories260K" / "tok512.bin"
    if not os.environ.get("TFM_DATA") or not file.is_file():
        pytest.skip("TFM_DATA names no folder with stories260K/tok512.bin")
    made = pretrained_tokenizer.read(file)
    for text in ("Once upon a time,\n\tthere was  a tïny 😀.", " two spaces before", "", " "):
        assert made.decode(made.encode(text)) == text
    assert made.decode(made.encode("Lily's ball")[:3]) == "Lily'"


def test_a_character_is_streamed_when_its_last_byte_is_there_and_the_space_before_a_word_in_a_continuation():
    ids = MADE.encode("€a", specials=False)[1:]
    asked = []
    stream = MADE.stream(asked.append(id) or id for id in ids)
    assert next(stream) == "€" and len(asked) == 3
    assert list(stream) == ["a"] and len(asked) == 4
    assert list(MADE.stream(ids[:2])) == ["\N{REPLACEMENT CHARACTER}"]  # it ends inside a character
    assert list(MADE.stream(ids[2:], after=ids[:2])) == ["€", "a"]
    assert list(MADE.stream([], after=ids)) == []
    prompt = MADE.encode("ab")
    more = MADE.encode("ab ab")[len(prompt) :]
    assert "".join(MADE.stream(more, after=prompt)) == " ab" and "".join(MADE.stream(more)) == "ab"
    assert "".join(MADE.stream(more, after=[MADE.bos])) == "ab"

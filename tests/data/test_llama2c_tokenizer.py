"""The pieces of llama2.c: text to ids and back, streamed in whole characters, and bad files."""

import os
import pathlib
import struct

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from llama2c_words import BYTES, TABLE, TEXT, WORDS, made_vocabulary, packed  # noqa: F401  a fixture too

from experiments.data import llama2c_tokenizer, pretrained_tokenizer
from experiments.engine import errors

# The pieces of llama2.c.


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


@hypothesis.given(text=TEXT | st.text("abc ", max_size=31))
@hypothesis.settings(deadline=None, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
def test_the_best_neighbours_join_first(made, text):
    ids = made.encode(text)
    assert ids.dtype == np.int32 and ids[0] == made.bos == 1
    assert [TABLE[id][0] for id in ids[1:]] == joined_slowly(text)
    np.testing.assert_array_equal(made.encode(text, specials=False), ids[1:])
    assert made.decode(ids) == made.decode(ids[1:]) == made.decode([*ids, made.eos]) == text


def test_specials_and_bytes_are_never_made_of_letters():
    letters = [(letter.encode(), 0.0) for letter in "<0x41>su"] + [(b"<0", 1.0), (b"x41>", 1.0), (b"x4", 2), (b"1>", 1)]
    table = [(b"<unk>", 0.0), (b"<s>", 9.0), (b"</s>", 0.0), (b"<0x41>", 9.0), (b"<s", 3), *letters]
    made = llama2c_tokenizer.Pieces(*zip(*table, strict=True))
    assert [table[id][0] for id in made.encode("<0x41>", specials=False)] == [b"<unk>", b"<0", b"x41>"]
    assert [table[id][0] for id in made.encode("<s>", specials=False)] == [b"<unk>", b"<s", b">"]
    assert made.encode("A").tolist() == [1, 0, 3]  # through its byte; the space before it has neither piece nor byte
    assert made.decode([1, 0, 3]) == "<unk>A"


def test_ids_that_are_no_pieces_stand_for_no_text(made):
    assert made.decode([-1, made.size, 10**9, made.bos, made.eos]) == ""
    assert made.decode(np.array([], np.int32)) == made.decode(made.encode("")) == ""
    assert (made.size, made.bos, made.eos, made.mask, made.pad) == (len(TABLE), 1, 2, None, None)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "it has 0 bytes"),
        (bytes(3), "it has 3 bytes"),
        (packed(TABLE)[:-1], f"piece {len(TABLE) - 1}: the file is cut off"),
        (packed(TABLE) + b"\0", f"piece {len(TABLE)}: the file is cut off"),
        (packed(TABLE, longest=5), "piece 2: its length 6 is not between 1 and 5, that of the longest"),
        (packed([*TABLE, (b"", 0.0)]), f"piece {len(TABLE)}: its length 0 is not between"),
        (packed(TABLE) + struct.pack("<fi", 0, -5), f"piece {len(TABLE)}: its length -5 is not between"),
        (
            packed(TABLE, longest=2**31 - 1) + struct.pack("<fi", 0, 2**31 - 1),
            f"piece {len(TABLE)}: the file is cut off",
        ),
        (packed([*TABLE, (b"z", np.nan)]), f"piece {len(TABLE)}: its score nan is not"),
        (packed([*TABLE, (b"z", np.inf)]), f"piece {len(TABLE)}: its score inf is not"),
        (packed(TABLE[:2]), "its first pieces are not"),
        (packed(TABLE[1:]), "its first pieces are not"),
        (struct.pack("<i", 7), "its first pieces are not"),
        (b"\x80\x04\x95" + bytes(50), "piece 0: its length 0"),
    ],
)
def test_damaged_pieces_are_refused(tmp_path, content, sentence):
    (tmp_path / "tok.bin").write_bytes(content)
    with pytest.raises(errors.UserError, match=f"tok.bin.*{sentence}"):
        pretrained_tokenizer.read(tmp_path / "tok.bin")


@hypothesis.given(st.data())
@hypothesis.settings(max_examples=300, deadline=None, database=None)
def test_a_damaged_file_is_refused_or_still_a_vocabulary(data):
    content = bytearray(packed([*TABLE[:3], *TABLE[-10:]]))
    for at in data.draw(st.lists(st.integers(0, len(content) - 1), max_size=3)):
        content[at] ^= data.draw(st.integers(1, 255))
    cut = data.draw(st.one_of(st.just(len(content)), st.integers(0, len(content))))
    try:
        made = llama2c_tokenizer.read("tok.bin", bytes(content[:cut]))
    except errors.UserError as error:
        assert "tok.bin" in str(error)
        return
    ids = made.encode("abc é")
    assert 0 <= ids.min() <= ids.max() < made.size
    assert isinstance(made.decode(range(made.size)), str)


def test_the_published_pieces_give_every_text_back():
    file = pathlib.Path(os.environ.get("TFM_DATA", "")) / "stories260K" / "tok512.bin"
    if not os.environ.get("TFM_DATA") or not file.is_file():
        pytest.skip("TFM_DATA names no folder with stories260K/tok512.bin")
    made = pretrained_tokenizer.read(file)
    for text in ("Once upon a time,\n\tthere was  a tïny 😀.", " two spaces before", "", " "):
        assert made.decode(made.encode(text)) == text
    assert made.decode(made.encode("Lily's ball")[:3]) == "Lily'"


# Streaming.


@hypothesis.given(data=st.data())
@hypothesis.settings(deadline=None, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
def test_pieces_stream_as_they_decode(made, data):
    ids = data.draw(st.lists(st.integers(-1, made.size), max_size=23))
    assert "".join(made.stream(iter(ids))) == made.decode(ids)
    text = data.draw(TEXT)
    first = made.encode(text)
    assert text + "".join(made.stream(np.array(ids, int), after=first)) == made.decode([*first, *ids])


def test_a_character_is_streamed_when_its_last_byte_is_there(made):
    ids = made.encode("€a", specials=False)[1:]
    asked = []
    stream = made.stream(asked.append(id) or id for id in ids)
    assert next(stream) == "€" and len(asked) == 3
    assert list(stream) == ["a"] and len(asked) == 4
    assert list(made.stream(ids[:2])) == ["\N{REPLACEMENT CHARACTER}"]  # it ends inside a character
    assert list(made.stream(ids[2:], after=ids[:2])) == ["€", "a"]
    assert list(made.stream([], after=ids)) == []


def test_the_space_before_a_word_is_kept_in_a_continuation(made):
    prompt, ids = made.encode("ab"), made.encode("c ab")
    assert "".join(made.stream(ids[2:], after=prompt)) == "c ab"
    assert made.decode(ids) == "c ab"
    more = made.encode("ab ab")[len(prompt) :]
    assert "".join(made.stream(more, after=prompt)) == " ab" and "".join(made.stream(more)) == "ab"
    assert "".join(made.stream(more, after=[made.bos])) == "ab"

"""A small vocabulary of llama2.c."""

import struct

import pytest
from hypothesis import strategies as st

from experiments.data import pretrained_tokenizer, tokenizer

TEXT = st.text(st.sampled_from("ab c<é€😀"), max_size=17)
BYTES = [f"<0x{byte:02X}>".encode() for byte in range(256)]
WORDS = {b" ": -1, b"a": -2, b"b": -3, b"c": -4, "é".encode(): -5, b"ab": 3, b"bc": 4, b"abc": 1, b" a": 2, b"aa": 2}
WORDS |= {b"bb": 2, b"aab": 5, b" ab": 3, b" <": 6, b"<": -6, b"cab": 2.5, "éé".encode(): 1}
TABLE = [(piece, 0.0) for piece in (b"<unk>", b"\n<s>\n", b"\n</s>\n", *BYTES)] + list(WORDS.items())


def packed(table, longest: int | None = None) -> bytes:
    longest = max(len(piece) for piece, _ in table) if longest is None else longest
    return struct.pack("<i", longest) + b"".join(
        struct.pack("<fi", score, len(piece)) + piece for piece, score in table
    )


@pytest.fixture(name="made")
def made_vocabulary(tmp_path) -> tokenizer.Tokenizer:
    (tmp_path / "tok.bin").write_bytes(packed(TABLE))
    return pretrained_tokenizer.read(str(tmp_path / "tok.bin"))

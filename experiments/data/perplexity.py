"""Measures of a language model in units that do not depend on its tokens: bits per byte, word perplexity."""

import math
import os
from collections.abc import Iterable
from typing import NamedTuple

from experiments.data import tokenization

PIECE = 2**12  # characters that are decoded together
LONGEST = 50  # bytes: if words are longer on average, no spaces separate the words of the language


class Size(NamedTuple):
    """The numbers of bytes and words of a text. Words are separated by spaces, tabs and line ends."""

    bytes: int
    words: int


def size(text: Iterable[bytes], first: str = "") -> Size:
    """Return the numbers of bytes and words of a text, whose bytes come in pieces that end anywhere.

    NUL, which separates documents, also separates words and does not count. first: the text of the first token. No
    model predicts this token, so that its bytes do not count; its words do.
    """
    n, words, inside = -len(first.encode()), 0, False
    for piece in filter(None, text):
        n += len(piece) - piece.count(b"\0")
        piece = piece.replace(b"\0", b" ")
        words += len(piece.split()) - (inside and not piece[:1].isspace())
        inside = not piece[-1:].isspace()
    return Size(n, words)


def find_difference(tokenizer: tokenization.Tokenizer, text: Iterable[bytes], most: int = 2**20) -> str:
    """Return the first difference between a text and its decoded ids, such as "'Ab' becomes 'ab'".

    Return '' if the first `most` characters have none. Leading spaces are ignored.
    """
    if isinstance(tokenizer, tokenization.Plain) and tokenizer.kind == "bytes":  # also for text that is not UTF-8
        return ""
    decoded = tokenization.decode_pieces(text)
    parts = (part for piece in decoded for part in piece.split(tokenization.SEPARATOR))
    for piece in (part[at : at + PIECE] for part in parts for at in range(0, len(part), PIECE)):
        result, expected = tokenizer.decode(tokenizer.encode(piece, specials=False)).lstrip(" "), piece.lstrip(" ")
        if result != expected:
            at = len(os.path.commonprefix([result, expected]))
            near = slice(max(at - 10, 0), at + 10)
            return f"{expected[near]!r} becomes {result[near]!r}"
        if (most := most - len(piece)) <= 0:
            break
    return ""


def measure(nats: float, *, tokens: int, text: Size) -> dict[str, float]:
    """Return {"nats_per_token", "bits_per_byte", "token_perplexity", "word_perplexity": value}.

    Bits per byte are nats / (ln 2 bytes), perplexities exp(nats / tokens) and exp(nats / words). nats: -sum ln p
    of all tokens. The word perplexity is left out if words have more than LONGEST bytes on average: then spaces do not
    separate them.
    """
    logs = {"token_perplexity": nats / tokens}
    logs |= {"word_perplexity": nats / text.words} if text.bytes <= LONGEST * text.words else {}
    metrics = {"nats_per_token": nats / tokens, "bits_per_byte": nats / math.log(2) / max(text.bytes, 1)}
    return metrics | {name: math.exp(min(log, 700.0)) for name, log in logs.items()}  # exp(710) overflows

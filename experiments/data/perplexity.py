"""Measures of a language model in units that do not depend on its tokens: bits per byte, perplexity of words."""

import math
from collections.abc import Iterable
from typing import NamedTuple

from experiments.data import tokenizer

PIECE = 2**12  # characters that are decoded together
LONGEST = 50  # bytes of an average word; a text with more has no spaces between its words


class Size(NamedTuple):
    """The bytes of a text, and its words, which spaces, tabs and line ends separate."""

    bytes: int
    words: int


def size(text: Iterable[bytes], first: str = "") -> Size:
    """Return the size of a text (as in Tokenizer.join), without NUL between two documents, and without the bytes of
    `first`, its first token, which is not predicted."""
    n, words, inside = -len(first.encode()), 0, False
    for piece in filter(None, text):
        n += len(piece) - piece.count(b"\0")
        piece = piece.replace(b"\0", b" ")
        words += len(piece.split()) - (inside and not piece[:1].isspace())
        inside = not piece[-1:].isspace()
    return Size(n, words)


def lost(words: tokenizer.Tokenizer, text: Iterable[bytes], most: int = 2**20) -> str:
    """Return what a tokenizer does not give back of the first `most` characters of a text, '' if it gives back all."""
    decoded = tokenizer.decoded(text) if getattr(words, "kind", "") != "bytes" else ()
    parts = (part for piece in decoded for part in piece.split(tokenizer.SEPARATOR))
    for one in (part[at : at + PIECE] for part in parts for at in range(0, len(part), PIECE)):
        again, right = words.decode(words.encode(one, specials=False)).lstrip(" "), one.lstrip(" ")
        if again != right:
            at = next((i for i, pair in enumerate(zip(again, right, strict=False)) if len({*pair}) > 1), len(again))
            before, after = (some[max(at - 10, 0) : at + 10] for some in (right, again))
            return f"{before!r} comes back as {after!r}"
        if (most := most - len(one)) <= 0:
            break
    return ""


def measures(nats: float, *, tokens: int, of: Size) -> dict[str, float]:
    """Return the bits per byte, nats / (ln 2 bytes), and the perplexities exp(nats / words) and exp(nats / tokens), of
    the nats of all tokens, -sum ln p; the perplexity of words only if spaces separate these (LONGEST)."""
    logs = {"token_perplexity": nats / tokens}
    logs |= {"word_perplexity": nats / of.words} if of.bytes <= LONGEST * of.words else {}
    measures = {"nats_per_token": nats / tokens, "bits_per_byte": nats / math.log(2) / max(of.bytes, 1)}
    return measures | {name: math.exp(min(log, 700.0)) for name, log in logs.items()}  # larger ones overflow

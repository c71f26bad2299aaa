"""Tokenizers: the interface of all, and the tokenizers of bytes and of characters."""

import codecs
import dataclasses
import io
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments.config import by_name, errors

KINDS = ("bytes", "characters")
BPE = "bpe:8192"  # an example of the form (bpe.py)
UNKNOWN, MASK = "[UNK]", "[MASK]"
SEPARATOR = "\0"  # between two documents
# Characters: documents longer than LONGEST are cut into pieces of at least PIECE, because the tokenizers library needs
# about 240 bytes of memory for each character.
LONGEST, PIECE = 2**21, 2**16
BATCH = 2**20  # characters encoded at a time, for the same reason
LINE_END, ANY_END = re.compile(r"(?<=\w)(?=\n)"), re.compile(r"(?<=\n)")


class Piece(NamedTuple):
    """A whole document, or a part of one that is longer than LONGEST characters."""

    text: str
    begins: bool  # whether it is the beginning of the document
    ends: bool  # whether it is the end of the document


class Tokenizer:
    """The interface of all tokenizers: token ids 0 .. size-1 and their text. Further ids of a model have no text.

    A function of the user's, text.tokenizer = my_file:words, gets the training documents (an iterator of str) and
    returns a `tokenizers.Tokenizer`, or an object with

        size: the number of ids.
        encode(text): the ids of a text, integers from 0 to size-1. It must accept every text.
        decode(ids): the text of ids.
        bos, eos, mask, pad, between, unknown: ids of special tokens, each optional. `between` separates documents.

    `pretrained_tokenizer.Users` makes a tokenizer of ours from this object. Ours also have

        special: ids of special tokens, such as the id between two documents.
        encode(text, *, specials=True): int32 ids, with the specials around a text (<s>, or [CLS] and [SEP]). Raises
            UserError if the text is not Unicode or has an unknown character.
        around: the ids of the special tokens before and after each document of a text.
        name(id): the name of an id, also of a special token.
        files: contents by name, from which `pretrained_tokenizer.read` restores the tokenizer if `can_restore`.
    """

    size: int
    special: frozenset[int]
    files: dict[str, bytes]
    bos = eos = mask = pad = between = unknown = None  # ids
    around: tuple[Sequence[int], Sequence[int]] = (), ()
    truncation_side = "right"  # the side of a text that is cut if it has too many tokens
    has_chat_template, can_restore = False, True

    def encode_all(self, texts: Sequence[str]) -> Iterable[Sequence[int]]:
        """Return the ids of each text, without special tokens around it."""
        return [self.encode(text, specials=False).tolist() for text in texts]

    def encode_text(self, text: Iterable[bytes]) -> Iterator[np.ndarray]:
        """Yield the ids of a text, in pieces.

        text: the bytes of its documents, separated by NUL, in pieces that end anywhere. Each document has the ids of
        `around` before and after it. The id `between`, if not None, comes between two documents.
        """
        between, (before, after), is_first = [] if self.between is None else [self.between], self.around, True
        for batch in gather(documents(text), BATCH, lambda piece: len(piece.text)):
            ids: list[int] = []
            for piece, piece_ids in zip(batch, self.encode_all([piece.text for piece in batch]), strict=True):
                ids += [*between * (not is_first), *before] if piece.begins else []
                ids += piece_ids
                ids += after if piece.ends else []
                is_first = False
            yield np.array(ids, self.dtype)

    @property
    def document_start(self) -> int | None:
        """The last special token between two documents, before the second document's first token; None: no token."""
        before, after = self.around
        return next((id for id in (*reversed(before), self.between, *reversed(after)) if id is not None), None)

    def show(self, id: int) -> str:
        """Return the text of an id, or its name if it has no text."""
        return self.decode([id]) or self.name(id)

    def stream(self, ids: Iterable[int], after: Sequence[int] | np.ndarray = ()) -> Iterator[str]:
        """Yield the text that the ids add to that of the ids `after`, which come first, in nonempty pieces.

        A piece is yielded once its characters are complete, so that several ids may share one.
        """
        # What an id adds depends on earlier ids; the ids of the last piece are enough. (If bytes are not UTF-8, the
        # byte fallback of the library may change text that was yielded before.)
        window = to_list(after)
        start = len(window)  # the first id whose text was not yielded
        for id in ids:
            window.append(int(id))
            text, before = self.decode(window), self.decode(window[:start])
            if len(text) > len(before) and not text.endswith("\N{REPLACEMENT CHARACTER}"):
                yield text[len(before) :]
                window, start = window[start:], len(window) - start
        if rest := self.decode(window)[len(self.decode(window[:start])) :]:
            yield rest

    @property
    def dtype(self) -> np.dtype:
        """The smallest integers that hold the ids."""
        return np.min_scalar_type(self.size - 1)

    def join(self, text: Iterable[bytes]) -> np.ndarray:
        """Return the ids of a text.

        text: the bytes of its documents, separated by NUL, in pieces that end anywhere. Raises UserError as `encode`
        does and, unless each byte is an id, if the text is not UTF-8.
        """
        content = io.BytesIO()
        for id_T in self.encode_text(text):
            content.write(id_T.data)
        return np.frombuffer(content.getbuffer(), self.dtype)


@dataclasses.dataclass
class Plain(Tokenizer):
    """A tokenizer with an id for each byte or each of `characters`. The ids of the special tokens follow, in order.

    kind: "bytes", where `characters` is "", or "characters".
    """

    kind: str
    characters: str
    specials: tuple[str, ...]

    def __post_init__(self):
        names = [name.encode("utf-8", "surrogatepass") for name in (*self.characters, *self.specials)]
        self._contents = [bytes([byte]) for byte in range(256) if self.kind == "bytes"] + names
        self.size, first = len(self._contents), len(self._contents) - len(self.specials)
        ids = {name: first + i for i, name in enumerate(self.specials)}
        self.mask, self.unknown = ids.get(MASK), ids.get(UNKNOWN)
        self.special = frozenset({*ids.values()} | {i for i, content in enumerate(self._contents) if content == b"\0"})
        points = [*map(ord, self.characters)]
        # Code point -> id. The last entry is for all code points after those of `characters`.
        self._ids = np.full(max(points, default=0) + 2, -1 if self.unknown is None else self.unknown, np.int32)
        self._ids[points] = np.arange(len(points), dtype=np.int32)
        self.files = {"tokenizer.json": json.dumps(dataclasses.asdict(self)).encode()}

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(np.uint8) if self.kind == "bytes" else super().dtype  # in a text, bytes have no special tokens

    @property
    def document_start(self) -> int | None:
        return self._contents.index(b"\0") if b"\0" in self._contents else None

    def encode(self, text: str, *, specials: bool = True) -> np.ndarray:
        content = check_unicode(text).encode()
        return np.frombuffer(content, np.uint8).astype(np.int32) if self.kind == "bytes" else self._look_up(text)

    def encode_text(self, text: Iterable[bytes]) -> Iterator[np.ndarray]:
        """Yield the ids of a text, in pieces, with the NUL between documents as a token.

        An unknown character is '[UNK]'. Raises UserError for one if there is no '[UNK]'.
        """
        if self.kind == "bytes":
            return (np.frombuffer(piece, np.uint8) for piece in text)
        return (self._look_up(piece).astype(self.dtype) for piece in decode_pieces(text))

    def pieces(self, ids: Iterable[int]) -> Iterator[bytes]:
        """Yield the bytes that each id adds to the text: none for an id outside the vocabulary."""
        return (self._contents[id] if 0 <= id < self.size else b"" for id in ids)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the text, with U+FFFD for bytes that are not UTF-8."""
        return b"".join(self.pieces(to_list(ids))).decode("utf-8", "replace")

    def stream(self, ids: Iterable[int], after: Sequence[int] | np.ndarray = ()) -> Iterator[str]:
        before, decoder = to_list(after), codecs.getincrementaldecoder("utf-8")("replace")
        contents = self.pieces(itertools.chain(before, map(int, ids)))
        for content in itertools.islice(contents, len(before)):
            decoder.decode(content)
        yield from filter(None, map(decoder.decode, contents))
        yield from filter(None, [decoder.decode(b"", final=True)])

    def name(self, id: int) -> str:
        return self.decode([id])

    def _look_up(self, text: str) -> np.ndarray:
        """Return the ids of characters. Raises UserError if one is unknown and there is no '[UNK]'."""
        id_T = self._ids[np.minimum(np.frombuffer(text.encode("utf-32-le"), "<u4"), len(self._ids) - 1)]
        if id_T.size and id_T.min() < 0:
            character = text[int(id_T.argmin())]
            problem = f"the character {character!r} is unknown: it does not occur in the training text"
            raise errors.UserError(f"{problem}. Leave it out")
        return id_T


def make(
    kind: str, text: Iterable[bytes], *, specials: tuple[str, ...] = (), evaluation: Iterable[bytes] = ()
) -> Plain:
    """Return a tokenizer of 'bytes', or of the 'characters' of a training text.

    text, evaluation: the bytes of documents, separated by NUL. specials: names of special tokens, such as '[MASK]'. The
    characters include NUL if either text has several documents. If the evaluation text has further characters, '[UNK]'
    is added to the special tokens. Raises UserError for an unknown kind, and for characters if a document is not UTF-8.
    """
    if kind not in KINDS:
        hint, names = by_name.suggest(str(kind), (*KINDS, BPE)), ", ".join((*KINDS, BPE))
        allowed = f"{names}, a path that exists, or your function my_file:my_tokenizer"
        raise errors.UserError(f"text.tokenizer = {kind} is unknown{hint}. Choose {allowed}.")
    if kind == "bytes":
        return Plain(kind, "", specials)
    train, evaluated = (set(itertools.chain.from_iterable(decode_pieces(part))) for part in (text, evaluation))
    train |= evaluated & {SEPARATOR}
    if not evaluated <= train and UNKNOWN not in specials:
        specials = (*specials, UNKNOWN)
    return Plain(kind, "".join(sorted(train)), specials)


def check_unicode(text: str) -> str:
    """Return the text. Raises UserError if it has half a character (a lone surrogate), which a terminal may pass."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise errors.UserError(f"{text[:40]!r} is not Unicode text: {error.reason}. Write it in UTF-8") from error
    return text


def to_list(ids: Sequence[int] | np.ndarray) -> list[int]:
    """Return ids as a list of Python integers."""
    return np.asarray(ids, np.int64).reshape(-1).tolist()


def decode_pieces(text: Iterable[bytes]) -> Iterator[str]:
    """Yield the pieces of a text as characters. Raises UserError if it is not UTF-8.

    If the text is a text.Part, the message names its file.
    """
    decoder, document = codecs.getincrementaldecoder("utf-8")(), 0
    for piece in itertools.chain(text, [b""]):
        try:
            yield decoder.decode(piece, final=not piece)
        except UnicodeDecodeError as error:
            document += error.object[: error.start].count(b"\0")
            name = text.names[document] if hasattr(text, "names") else "a document"
            near = error.object[max(error.start - 20, 0) : error.start + 20]
            problem = f"{name} is not UTF-8 text, near {near!r}"
            raise errors.UserError(f"{problem}. Convert it to UTF-8 or set text.tokenizer = bytes.") from error
        document += piece.count(b"\0")


def documents(text: Iterable[bytes]) -> Iterator[Piece]:
    """Yield the nonempty documents between SEPARATORs. Cut documents of more than LONGEST characters into pieces.

    A piece that is not its document's last has at least PIECE characters. If possible it ends at the end of a line,
    after a letter or digit: no known byte-level tokenizer has a token that continues there.
    """
    rest, begins = "", True
    for characters in decode_pieces(text):
        *complete, rest = (rest + characters).split(SEPARATOR)
        for document in complete:
            if document or not begins:
                yield Piece(document, begins, ends=True)
            begins = True
        while len(rest) > (LONGEST if begins else 2 * PIECE):
            line = LINE_END.search(rest, PIECE) or ANY_END.search(rest, PIECE)
            end = line.start() if line else len(rest)
            yield Piece(rest[:end], begins, ends=False)
            rest, begins = rest[end:], False
    if rest or not begins:
        yield Piece(rest, begins, ends=True)


def gather(items: Iterable, least: int, measure: Callable[[Any], int] = len) -> Iterator[list]:
    """Yield lists of consecutive items whose measures sum to at least `least`; in the last list perhaps less."""
    batch, n = [], 0
    for item in items:
        batch.append(item)
        n += measure(item)
        if n >= least:
            yield batch
            batch, n = [], 0
    if batch:
        yield batch

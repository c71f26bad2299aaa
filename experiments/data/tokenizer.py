"""Between text and ids: what every tokenizer does, and those that a run makes of its own text."""

import codecs
import dataclasses
import io
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from experiments.engine import by_name, errors

KINDS = ("bytes", "characters")
BPE = "bpe:8192"  # as an example of its form; it is made by bpe.py
UNKNOWN, MASK = "[UNK]", "[MASK]"
SEPARATOR = "\0"  # stands between two documents
LONGEST, PIECE, PART = 2**21, 2**16, 2**20  # characters: a library takes some 240 bytes of memory for each
LINE_END, ANY_END = re.compile(r"(?<=\w)(?=\n)"), re.compile(r"(?<=\n)")


class Cut(str):
    """A part of a document that is longer than LONGEST; it begins or ends the document, or neither."""

    def __new__(cls, text: str, *, begins: bool, ends: bool):
        made = super().__new__(cls, text)
        made.begins, made.ends = begins, ends
        return made


class Tokenizer:
    """Ids 0 .. size-1 and the text they stand for; ids from `size` on, if a model has such rows, stand for none.

    special: the ids that are no words of a text, such as what stands between two documents. files: the contents, by
    name, of which `pretrained_tokenizer.read` makes this tokenizer again. Every kind has

        encode(text, *, specials=True): int32 ids, with the specials that belong around it (<s>, or [CLS] and [SEP]).
            UserError for what is not Unicode, and for a character that nothing stands for.
        name(id): what the id is called, the name of a special too.
        pieces(ids): the bytes that each id adds to the text; or decode and stream of its own.
    """

    size: int
    special: frozenset[int]
    files: dict[str, bytes]
    bos = eos = mask = pad = between = unknown = None  # the ids of these specials; between: of two documents

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text; what is not UTF-8 is U+FFFD."""
        return b"".join(self.pieces(listed(ids))).decode("utf-8", "replace")

    def stream(self, ids: Iterable[int], after: Sequence[int] | np.ndarray = ()) -> Iterator[str]:
        """What the ids add to the text of the ids `after`, as they come, in whole characters."""
        before, decoder = listed(after), codecs.getincrementaldecoder("utf-8")("replace")
        contents = self.pieces(itertools.chain(before, map(int, ids)))
        for content in itertools.islice(contents, len(before)):
            decoder.decode(content)
        yield from filter(None, map(decoder.decode, contents))
        yield from filter(None, [decoder.decode(b"", final=True)])

    def join(self, text: Iterable[bytes]) -> np.ndarray:
        """Ids of a text, in the smallest integers that hold them. text: the bytes of its documents, in pieces that may
        end anywhere, NUL between two documents. UserError as `encode`, and for no UTF-8."""
        content = io.BytesIO()
        for part in self.parts(text):
            content.write(self.ids(part).data)
        return np.frombuffer(content.getbuffer(), self.dtype)

    @property
    def dtype(self) -> np.dtype:
        return np.min_scalar_type(self.size - 1)

    def parts(self, text: Iterable[bytes]) -> Iterator[Any]:
        """Parts of a text, always the same ones, of which `ids` are made independently of each other. Here these are
        lists of documents; one of more than LONGEST characters counts as several, cut between two lines."""
        some, n = [], 0
        for document in documents(text):
            some.append(document)
            n += len(document)
            if n >= PART:
                yield some
                some, n = [], 0
        yield some

    def ids(self, part: Any) -> np.ndarray:
        """Those of one of the `parts`, in these integers."""
        rows = (self.encode(text, specials=getattr(text, "begins", True)).astype(self.dtype) for text in part)
        return np.concatenate([np.empty(0, self.dtype), *rows])

    def each(self, parts: Iterable[Any]) -> Iterator[np.ndarray]:
        """`ids` of each of many parts, in order."""
        return (self.ids(part) for part in parts)


@dataclasses.dataclass(frozen=True)
class Plain(Tokenizer):
    """256 bytes, or the characters in order of their code points; then the specials, which are shown by their names."""

    kind: str
    characters: str
    specials: tuple[str, ...]

    def __post_init__(self):
        names = [name.encode("utf-8", "surrogatepass") for name in (*self.characters, *self.specials)]
        contents = [bytes([byte]) for byte in range(256) if self.kind == "bytes"] + names
        size, first = len(contents), len(contents) - len(self.specials)
        ids = {name: first + i for i, name in enumerate(self.specials)}
        special = frozenset(i for i, content in enumerate(contents) if i >= first or content == SEPARATOR.encode())
        points = [*map(ord, self.characters)]
        # Code point -> id. The last entry stands for all points beyond the largest known one.
        table = np.full(max(points, default=0) + 2, ids.get(UNKNOWN, -1), np.int32)
        table[points] = np.arange(len(points), dtype=np.int32)
        files = {"tokenizer.json": json.dumps(dataclasses.asdict(self)).encode()}
        vars(self).update(
            size=size,
            special=special,
            mask=ids.get(MASK),
            unknown=ids.get(UNKNOWN),
            files=files,
            _contents=contents,
            _ids=table,
        )

    def encode(self, text: str, *, specials: bool = True) -> np.ndarray:
        content = checked(text).encode()
        return np.frombuffer(content, np.uint8).astype(np.int32) if self.kind == "bytes" else self._known(text)

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(np.uint8) if self.kind == "bytes" else super().dtype  # no text has a special of bytes

    def parts(self, text: Iterable[bytes]) -> Iterator[bytes | str]:
        """Pieces as they come, NUL among them: a character that never occurred in training is '[UNK]'."""
        return iter(text) if self.kind == "bytes" else decoded(text)

    def ids(self, part: bytes | str) -> np.ndarray:
        return np.frombuffer(part, np.uint8) if self.kind == "bytes" else self._known(part).astype(self.dtype)

    def pieces(self, ids: Iterable[int]) -> Iterator[bytes]:
        return (self._contents[id] if 0 <= id < self.size else b"" for id in ids)

    def name(self, id: int) -> str:
        return self.decode([id])

    def _known(self, text: str) -> np.ndarray:
        """The ids of characters. UserError where one has none."""
        id_T = self._ids[np.minimum(np.frombuffer(text.encode("utf-32-le"), "<u4"), len(self._ids) - 1)]
        if id_T.size and id_T.min() < 0:
            character = text[int(id_T.argmin())]
            raise errors.UserError(f"the character {character!r} is unknown: it does not occur in the training text")
        return id_T


def make(
    kind: str, text: Iterable[bytes], *, specials: tuple[str, ...] = (), evaluation: Iterable[bytes] = ()
) -> Plain:
    """The tokenizer of this text to train on (as in `Tokenizer.join`): of its characters, and NUL where either text has
    several documents. If the text to evaluate holds others, '[UNK]' joins the specials. UserError for an unknown kind,
    and where characters are asked for, a document that is not UTF-8."""
    _check_kind(kind)
    if kind == "bytes":
        return Plain(kind, "", specials)
    known, asked = (set(itertools.chain.from_iterable(decoded(one))) for one in (text, evaluation))
    known |= asked & {SEPARATOR}
    if not asked <= known and UNKNOWN not in specials:
        specials = (*specials, UNKNOWN)
    return Plain(kind, "".join(sorted(known)), specials)


def from_json(saved: dict, kind_of: type[Plain] = Plain) -> Plain:
    """The tokenizer that its file describes. Raises UserError where the description does not hold together."""
    match saved:
        case {"kind": kind, "characters": str(characters), "specials": [*specials]} if len(saved) == 3:
            _check_kind(kind)
            whole = list(characters) == sorted(set(characters)) and not (characters and kind == "bytes")
            if whole and all(isinstance(name, str) for name in specials):
                return kind_of(kind, characters, tuple(specials))
    letters = "characters (one string, sorted and without repetition, of bytes an empty one)"
    raise errors.UserError(f"a saved tokenizer has a kind, {letters}, specials (a list of names), and nothing else")


def checked(text: str) -> str:
    """The text, where it can be written in UTF-8: what a terminal passes on undecoded cannot, as half a character."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise errors.UserError(f"{text[:40]!r} is not Unicode text: {error.reason}") from error
    return text


def listed(ids: Sequence[int] | np.ndarray) -> list[int]:
    """Ids as Python's own numbers."""
    return np.asarray(ids, np.int64).reshape(-1).tolist()


def _check_kind(kind: str) -> None:
    if kind not in KINDS:
        near = by_name.nearest(str(kind), (*KINDS, BPE))
        right = f"{', '.join(KINDS)}, {BPE} for a BPE of 8,192 words, or a path that exists"
        raise errors.UserError(f"there is no tokenizer {kind!r}{near}: the tokenizers are {right}")


def decoded(text: Iterable[bytes]) -> Iterator[str]:
    """The pieces of a text as characters. UserError for what is not UTF-8, with its file where the text has `names`."""
    decoder, number, at = codecs.getincrementaldecoder("utf-8")(), 0, 0  # documents before this one, and bytes of it
    for piece in itertools.chain(text, [b""]):
        rest = decoder.getstate()[0]  # of a character that the piece before had in part
        try:
            yield decoder.decode(piece, final=not piece)
        except UnicodeDecodeError as error:
            *ended, begun = (rest + piece)[: error.start].split(b"\0")
            name, first = text.names[number + len(ended)] if hasattr(text, "names") else ("a document", 0)
            at = first + len(begun) + (0 if ended else at - len(rest))
            near = (rest + piece)[max(error.start - 20, 0) : error.start + 20]
            wrong = f"{name} is not UTF-8 text (byte {at}, near {near!r})"
            raise errors.UserError(f"{wrong}: use the 'bytes' tokenizer for it") from error
        number, cut = number + piece.count(b"\0"), piece.rfind(b"\0")
        at = at + len(piece) if cut < 0 else len(piece) - cut - 1


def occurrences(name: str, text: Iterable[bytes]) -> int:
    """Return how often the name of a special stands in a text."""
    n, rest, content = 0, b"", name.encode()
    for piece in text:
        n, rest = n + (rest + piece).count(content), (rest + piece)[1 - len(content) :] if content[1:] else b""
    return n


def documents(text: Iterable[bytes]) -> Iterator[str]:
    """The documents of a text, without empty ones; of one longer than LONGEST, pieces (Cut) of PIECE or more that end
    where a line does, behind a letter or digit if possible: there no known byte-level tokenizer has a token that goes
    on."""
    rest, most = "", LONGEST
    for characters in decoded(text):
        *whole, rest = (rest + characters).split(SEPARATOR)
        if whole and most < LONGEST:  # the end of a document of which there were pieces
            yield Cut(whole.pop(0), begins=False, ends=True)
            most = LONGEST
        yield from filter(None, whole)
        at = 0
        while len(rest) - at > most:
            end = LINE_END.search(rest, at + PIECE) or ANY_END.search(rest, at + PIECE)
            before, at, first = at, end.start() if end else len(rest), most == LONGEST
            most = 2 * PIECE
            yield Cut(rest[before:at], begins=first, ends=False)
        rest = rest[at:]
    if most < LONGEST:
        yield Cut(rest, begins=False, ends=True)
    elif rest:
        yield rest

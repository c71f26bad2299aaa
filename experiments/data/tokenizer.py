"""Between text and ids: what every tokenizer does, and those that a run makes of its own text."""

import codecs
import dataclasses
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from experiments.engine import by_name, disk, errors

KINDS = ("bytes", "characters")
UNKNOWN, MASK = "[UNK]", "[MASK]"
SEPARATOR = "\0"  # stands between two documents
CHUNK = 2**20  # bytes of a document that are made characters at a time
COPIES = 240  # bytes in memory for each of a document while a library encodes it (measured: 177 and 238)


class Tokenizer:
    """Ids 0 .. size-1 and the text they stand for; ids from `size` on, if a model has such rows, stand for none.

    ordinary: ids below it may take the place of a hidden word (all, as for BERT, but where specials come last). files:
    the contents, by name, of which `pretrained_tokenizer.read` makes this tokenizer again. Every kind has

        encode(text, *, specials=True): int32 ids, with the specials that belong around it (<s>, or [CLS] and [SEP]).
            UserError for what is not Unicode, and for a character that nothing stands for.
        name(id): what the id is called, the name of a special too.
        pieces(ids): the bytes that each id adds to the text; or decode and stream of its own.
    """

    size: int
    ordinary: int
    files: dict[str, bytes]
    bos = eos = mask = pad = None  # the ids of these specials

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

    def join(self, documents: Sequence[bytes]) -> np.ndarray:
        """Ids of all documents, in the smallest integers that hold them. UserError as `encode`, and for no UTF-8."""
        disk.check_memory("the text as words of this tokenizer", COPIES * max(map(len, documents)))
        least = np.min_scalar_type(self.size - 1)
        try:
            texts = (str(document, "utf-8").split(SEPARATOR) for document in documents)
            return np.concatenate([self.encode(text).astype(least) for some in texts for text in some])
        except UnicodeDecodeError as error:
            raise errors.UserError(f"the text is not UTF-8, which this tokenizer needs: {error}") from error


@dataclasses.dataclass(frozen=True)
class Plain(Tokenizer):
    """256 bytes, or the characters in order of their code points; then the specials, which are shown by their names."""

    kind: str
    characters: str
    specials: tuple[str, ...]

    def __post_init__(self):
        names = [name.encode("utf-8", "surrogatepass") for name in (*self.characters, *self.specials)]
        contents = [bytes([byte]) for byte in range(256) if self.kind == "bytes"] + names
        size, ordinary = len(contents), len(contents) - len(self.specials)
        ids = {name: ordinary + i for i, name in enumerate(self.specials)}
        points = [*map(ord, self.characters)]
        # Code point -> id. The last entry stands for all points beyond the largest known one.
        table = np.full(max(points, default=0) + 2, ids.get(UNKNOWN, -1), np.int32)
        table[points] = np.arange(len(points), dtype=np.int32)
        files = {"tokenizer.json": json.dumps(dataclasses.asdict(self)).encode()}
        vars(self).update(size=size, ordinary=ordinary, mask=ids.get(MASK), files=files, _contents=contents, _ids=table)

    def encode(self, text: str, *, specials: bool = True) -> np.ndarray:
        content = checked(text).encode()
        return np.frombuffer(content, np.uint8).astype(np.int32) if self.kind == "bytes" else self._known(text)

    def join(self, documents: Sequence[bytes]) -> np.ndarray:
        """Ids of all documents, the NUL character between two: one that never occurred in training is '[UNK]'."""
        if self.kind == "bytes":  # of a single document without a copy
            return np.frombuffer(documents[0] if len(documents) == 1 else SEPARATOR.encode().join(documents), np.uint8)
        parts = [part for document in documents for part in (SEPARATOR.encode(), document)][1:]
        id_T, T = np.empty(sum(map(len, parts)), np.min_scalar_type(self.size - 1)), 0  # a character has 1 to 4 bytes
        for text in itertools.chain.from_iterable(map(_texts, parts)):
            id_T[T : T + len(text)] = self._known(text)
            T += len(text)
        return id_T[:T]

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
    kind: str, documents: Sequence[bytes], *, specials: tuple[str, ...] = (), evaluation: Sequence[bytes] = ()
) -> Plain:
    """The tokenizer of these training documents: of their characters, and the separator where several are to be joined.

    If an evaluation document holds others, '[UNK]' joins the specials. UserError for an unknown kind, and where
    characters are asked for, a document that is not UTF-8.
    """
    _check_kind(kind)
    if kind == "bytes":
        return Plain(kind, "", specials)
    known = _characters(documents)
    if max(len(documents), len(evaluation)) > 1:
        known.add(SEPARATOR)
    if not _characters(evaluation) <= known and UNKNOWN not in specials:
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
        near = by_name.nearest(str(kind), KINDS)
        raise errors.UserError(f"there is no tokenizer {kind!r}{near}: the tokenizers are {', '.join(KINDS)}")


def _characters(documents: Sequence[bytes]) -> set[str]:
    return set(itertools.chain.from_iterable(itertools.chain.from_iterable(map(_texts, documents))))


def _texts(document: bytes) -> Iterator[str]:
    """The characters of a document, many but not all at a time: as text they may take four times the memory."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    for first in range(0, len(document), CHUNK):
        rest = len(decoder.getstate()[0])  # bytes of a character that the chunk before had in part
        try:
            yield decoder.decode(document[first : first + CHUNK], final=first + CHUNK >= len(document))
        except UnicodeDecodeError as error:
            at = first - rest + error.start
            near = bytes(document[max(at - 20, 0) : at + 20])
            wrong = f"a document is not UTF-8 text (byte {at}, near {near!r})"
            raise errors.UserError(f"{wrong}: use the 'bytes' tokenizer for it") from error

"""Between text and ids: bytes, or the characters that the training part shows; specials come after them."""

import codecs
import dataclasses
import difflib
import functools
import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from experiments.engine import errors

KINDS = ("bytes", "characters")
UNKNOWN = "[UNK]"
SEPARATOR = "\0"  # stands between two documents
CHUNK = 2**20  # bytes of a document that are made characters at a time


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """Ids 0 .. W-1: 256 bytes, or the characters in order of their code points; then the specials."""

    kind: str
    characters: str
    specials: tuple[str, ...]

    @property
    def ordinary(self) -> int:
        """How many ids stand for text: those below this number."""
        return 256 if self.kind == "bytes" else len(self.characters)

    @property
    def size(self) -> int:
        """W, the number of all ids."""
        return self.ordinary + len(self.specials)

    def special(self, name: str) -> int:
        """The id of a special. Raises UserError where there is none of this name."""
        if name not in self.specials:
            raise errors.UserError(
                f"this tokenizer has no special {name!r}: it has {', '.join(self.specials) or 'none'}"
            )
        return self.ordinary + self.specials.index(name)

    def encode(self, document: bytes) -> np.ndarray:
        """int32 ids of a document; one that never occurred in training is '[UNK]'.

        Raises:
          UserError: not UTF-8 where characters are asked for; an unknown character and no '[UNK]'.
        """
        if self.kind == "bytes":
            return np.frombuffer(document, np.uint8).astype(np.int32)
        return np.concatenate([np.zeros(0, np.int32), *map(self._ids, _texts(document))])

    def join(self, documents: Sequence[bytes]) -> np.ndarray:
        """Ids of all documents, the NUL character between two, in the smallest integers that hold them.

        T = total length + number of documents - 1. UserError as `encode`.
        """
        if self.kind == "bytes":  # of a single document without a copy
            return np.frombuffer(documents[0] if len(documents) == 1 else SEPARATOR.encode().join(documents), np.uint8)
        parts = [part for document in documents for part in (SEPARATOR.encode(), document)][1:]
        id_T, T = np.empty(sum(map(len, parts)), np.min_scalar_type(self.size - 1)), 0  # a character has 1 to 4 bytes
        for text in itertools.chain.from_iterable(map(_texts, parts)):
            id_T[T : T + len(text)] = self._ids(text)
            T += len(text)
        return id_T[:T]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text: specials by their names, what is not UTF-8 as U+FFFD. ValueError for ids outside 0 .. W-1."""
        id_T = np.asarray(ids, np.int64).reshape(-1)
        if id_T.size and not 0 <= id_T.min() <= id_T.max() < self.size:
            raise ValueError(f"ids must lie between 0 and {self.size - 1}")
        return b"".join([self._bytes_of_id[i] for i in id_T.tolist()]).decode("utf-8", "replace")

    def to_json(self) -> dict:
        """What `from_json` needs."""
        return {"kind": self.kind, "characters": self.characters, "specials": list(self.specials)}

    def _ids(self, text: str) -> np.ndarray:
        point_T = np.frombuffer(text.encode("utf-32-le"), "<u4")
        id_T = self._id_of_point[np.minimum(point_T, len(self._id_of_point) - 1)]
        if id_T.size and id_T.min() < 0:
            character = text[int(id_T.argmin())]
            raise errors.UserError(f"the character {character!r} is unknown: it does not occur in the training text")
        return id_T

    @functools.cached_property
    def _id_of_point(self) -> np.ndarray:
        """Code point -> id. The last entry stands for all points beyond the largest known one."""
        unknown = self.special(UNKNOWN) if UNKNOWN in self.specials else -1
        points = [ord(character) for character in self.characters]
        table = np.full(max(points, default=0) + 2, unknown, np.int32)
        table[points] = np.arange(len(points), dtype=np.int32)
        return table

    @functools.cached_property
    def _bytes_of_id(self) -> list[bytes]:
        ordinary = [bytes([byte]) for byte in range(256)] if self.kind == "bytes" else self.characters
        names = [*ordinary, *self.specials]
        return [name if isinstance(name, bytes) else name.encode("utf-8", "surrogatepass") for name in names]


def make(
    kind: str, documents: Sequence[bytes], *, specials: tuple[str, ...] = (), evaluation: Sequence[bytes] = ()
) -> Tokenizer:
    """The tokenizer of these training documents.

    Characters are those of the training documents, and the separator where several documents are to be joined. If an
    evaluation document holds others, '[UNK]' joins the specials.

    Raises:
      UserError: an unknown kind; a document that is not UTF-8 where characters are asked for.
    """
    _check_kind(kind)
    if kind == "bytes":
        return Tokenizer(kind=kind, characters="", specials=tuple(specials))
    known = _characters(documents)
    if max(len(documents), len(evaluation)) > 1:
        known.add(SEPARATOR)
    if not _characters(evaluation) <= known and UNKNOWN not in specials:
        specials = (*specials, UNKNOWN)
    return Tokenizer(kind=kind, characters="".join(sorted(known)), specials=tuple(specials))


def from_json(saved: dict) -> Tokenizer:
    """The tokenizer that `to_json` described. Raises UserError where the description does not hold together."""
    if set(saved) != {"kind", "characters", "specials"}:
        raise errors.UserError("a saved tokenizer has the entries kind, characters and specials, and no others")
    kind, characters, specials = saved["kind"], saved["characters"], saved["specials"]
    _check_kind(kind)
    if not isinstance(characters, str) or list(characters) != sorted(set(characters)):
        raise errors.UserError("the characters of a saved tokenizer are one string, sorted and without repetition")
    if kind == "bytes" and characters:
        raise errors.UserError("a saved tokenizer of bytes has no characters")
    if not isinstance(specials, list) or not all(isinstance(name, str) for name in specials):
        raise errors.UserError("the specials of a saved tokenizer are a list of names")
    return Tokenizer(kind=kind, characters=characters, specials=tuple(specials))


def _check_kind(kind: str) -> None:
    if kind not in KINDS:
        near = difflib.get_close_matches(str(kind), KINDS, n=1, cutoff=0.3)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise errors.UserError(f"there is no tokenizer {kind!r}{hint}: the tokenizers are {', '.join(KINDS)}")


def _characters(documents: Sequence[bytes]) -> set[str]:
    known = set()
    for text in itertools.chain.from_iterable(map(_texts, documents)):
        known.update(text)
    return known


def _texts(document: bytes) -> Iterator[str]:
    """The characters of a document, many but not all at a time: as text they may take four times the memory."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    for first in range(0, len(document), CHUNK):
        kept = len(decoder.getstate()[0])  # bytes of a character that the chunk before had in part
        try:
            yield decoder.decode(document[first : first + CHUNK], final=first + CHUNK >= len(document))
        except UnicodeDecodeError as error:
            at = first - kept + error.start
            near = bytes(document[max(at - 20, 0) : at + 20])
            raise errors.UserError(
                f"a document is not UTF-8 text (byte {at}, near {near!r}): use the 'bytes' tokenizer for it"
            ) from error

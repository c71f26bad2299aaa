"""Between text and ids: bytes, or the characters that the training part shows; specials come after them."""

import dataclasses
import difflib
import functools
from collections.abc import Sequence

import numpy as np

from experiments.engine import errors

KINDS = ("bytes", "characters")
UNKNOWN = "[UNK]"
SEPARATOR = "\0"  # stands between two documents


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
        text = _text(document)
        point_T = np.frombuffer(text.encode("utf-32-le"), "<u4")
        id_T = self._id_of_point[np.minimum(point_T, len(self._id_of_point) - 1)]
        if id_T.size and id_T.min() < 0:
            character = text[int(id_T.argmin())]
            raise errors.UserError(f"the character {character!r} is unknown: it does not occur in the training text")
        return id_T

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text: specials by their names, what is not UTF-8 as U+FFFD. ValueError for ids outside 0 .. W-1."""
        id_T = np.asarray(ids, np.int64).reshape(-1)
        if id_T.size and not 0 <= id_T.min() <= id_T.max() < self.size:
            raise ValueError(f"ids must lie between 0 and {self.size - 1}")
        return b"".join([self._bytes_of_id[i] for i in id_T.tolist()]).decode("utf-8", "replace")

    def to_json(self) -> dict:
        """What `from_json` needs."""
        return {"kind": self.kind, "characters": self.characters, "specials": list(self.specials)}

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


def join(tokenizer: Tokenizer, documents: Sequence[bytes]) -> np.ndarray:
    """int32 ids of all documents, the NUL character between two: T = total length + number of documents - 1."""
    return tokenizer.encode(SEPARATOR.encode().join(documents))


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
    return set().union(*map(_text, documents))


def _text(document: bytes) -> str:
    try:
        return document.decode("utf-8")
    except UnicodeDecodeError as error:
        near = document[max(error.start - 20, 0) : error.start + 20]
        raise errors.UserError(
            f"a document is not UTF-8 text (byte {error.start}, near {near!r}): use the 'bytes' tokenizer for it"
        ) from error

"""The words of a trained model in the place of those that a run makes for itself, so that its training can go on."""

import dataclasses
import json
import pathlib
from collections.abc import Sequence

import numpy as np

from experiments.data import tokenizer, vocabulary
from experiments.engine import disk, errors

COPIES = 240  # bytes in memory for each of a document while the library encodes it (measured: 177 and 238)


@dataclasses.dataclass(frozen=True)
class Borrowed:
    """A vocabulary with what `tokenizer.Tokenizer` offers a run; `files`: the content of its files, by name."""

    words: vocabulary.Vocabulary
    files: dict[str, bytes]

    @property
    def size(self) -> int:
        """W, the number of all ids."""
        return self.words.size

    @property
    def ordinary(self) -> int:
        """How many ids may stand for a hidden word that is replaced by another: all, as for BERT."""
        return self.words.size

    def special(self, name: str) -> int:
        """The id of [MASK]. Raises UserError where there is none."""
        if name != "[MASK]" or self.words.mask is None:
            raise errors.UserError(f"this tokenizer has no special {name!r}")
        return self.words.mask

    def encode(self, document: bytes) -> np.ndarray:
        """int32 ids; each of several joined documents with what belongs around a text. UserError for no UTF-8."""
        try:
            texts = str(document, "utf-8").split(tokenizer.SEPARATOR)
        except UnicodeDecodeError as error:
            raise errors.UserError(f"the text is not UTF-8, which this tokenizer needs: {error}") from error
        return np.concatenate([self.words.encode(text) for text in texts]).astype(np.int32)

    def join(self, documents: Sequence[bytes]) -> np.ndarray:
        """Ids of all documents, in the smallest integers that hold them. UserError as `encode`."""
        disk.check_memory("the text as words of this tokenizer", COPIES * max(map(len, documents)))
        least = np.min_scalar_type(self.size - 1)
        return np.concatenate([self.encode(document).astype(least) for document in documents])

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text, without specials."""
        return self.words.decode(ids)


def make(
    name: str, documents: Sequence[bytes], *, specials: tuple[str, ...], evaluation: Sequence[bytes]
) -> tokenizer.Tokenizer | Borrowed:
    """The tokenizer of the kind `name`, made from the documents; or the one in the file or folder of that name.

    UserError as `tokenizer.make` and `vocabulary.read`.
    """
    path = pathlib.Path(name).expanduser()
    if len(path.parts) > 1 and not path.exists():
        raise errors.UserError(f"text.tokenizer = {name} is a path, and nothing is there")
    if name in tokenizer.KINDS or not name or not path.exists():
        return tokenizer.make(name, documents, specials=specials, evaluation=evaluation)
    words = vocabulary.read(path)
    folder = path if path.is_dir() else path.parent
    found = path if path.is_file() else next(file for p in vocabulary.FILES for file in sorted(folder.glob(p)))
    beside = [folder / role for role in vocabulary.ROLE_FILES]
    kept = "tokenizer.json" if found.suffix == ".json" else f"tok{words.size}.bin"
    files = {kept: found.read_bytes()} | {file.name: file.read_bytes() for file in beside if file.is_file()}
    return Borrowed(words, files)


def files(made: tokenizer.Tokenizer | Borrowed) -> dict[str, bytes]:
    """What a run keeps of its tokenizer, by file name: `vocabulary.read` of its folder finds it."""
    if isinstance(made, Borrowed):
        return made.files
    return {"tokenizer.json": json.dumps(made.to_json()).encode()}

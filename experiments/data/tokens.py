"""Token ids of a text: in memory, or, for a large text, in a file that is written once and mapped into memory."""

import fcntl
import hashlib
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import tqdm

from experiments.config import disk, errors
from experiments.data import files as data_files, text, tokenization
from experiments.folder import log

VERSION = 4  # of the format of the cached files


class Mapped:
    """Integers in a file, indexed like an array.

    Each access maps the file again and copies the values, because every page that is read through a map counts as
    memory of this process until the map is closed.
    """

    def __init__(self, file: pathlib.Path, dtype: np.dtype):
        self.file, self.dtype = file, dtype
        self._length = file.stat().st_size // dtype.itemsize

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> np.ndarray:
        return np.array(np.memmap(self.file, self.dtype, "r")[index])


class Mixture:
    """Token ids of several texts, each repeated until it has its share of the tokens, indexed like an array.

    The text that needs it least is there once. separator: an id between two texts and two repetitions; None: no id.
    """

    def __init__(self, texts: Sequence[np.ndarray | Mapped], shares: Sequence[float], separator: int | None):
        self.texts, self.dtype, self.separator = texts, texts[0].dtype, separator
        self.periods = [len(id_T) + (separator is not None) for id_T in texts]
        total = max(period / share for period, share in zip(self.periods, shares, strict=True))
        self.lengths = [round(share * total) for share in shares]
        self._ends = np.cumsum(self.lengths)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: Any) -> np.ndarray:
        n = len(self)
        position = np.arange(*index.indices(n)) if isinstance(index, slice) else np.asarray(index) % n
        number = np.searchsorted(self._ends, position, side="right")  # of the text at each position
        id = np.full(position.shape, self.separator or 0, self.dtype)
        for i, id_T in enumerate(self.texts):
            place = (position - self._ends[i] + self.lengths[i]) % self.periods[i]
            is_inside = (number == i) & (place < len(id_T))
            id[is_inside] = id_T[place[is_inside]]
        return id


def encode_shares(
    tokenizer: tokenization.Tokenizer, sources: Sequence[tuple[text.Text, float]]
) -> tuple[Mixture, list[str]]:
    """Return the training ids of several texts with their shares, and a line about each. Raises UserError as `encode`.

    sources: of text.load_all.
    """
    texts, names = [encode(tokenizer, source.train) for source, _ in sources], [source.name for source, _ in sources]
    if empty := [name for name, id_T in zip(names, texts, strict=True) if not len(id_T)]:
        raise errors.UserError(f"{empty[0]} has no tokens. Give more text.")
    mixture, lines = Mixture(texts, [share for _, share in sources], tokenizer.document_start), []
    for name, id_T, length, period in zip(names, texts, mixture.lengths, mixture.periods, strict=True):
        share = f"{length / len(mixture):.1%} of the training tokens"
        lines.append(f"{name}: {share}, because its {len(id_T):,} tokens are read {length / period:.3g} times")
    return mixture, lines


def encode(tokenizer: tokenization.Tokenizer, part: text.Part) -> np.ndarray | Mapped:
    """Return the token ids of a part of a text.

    The ids of a part of at least text.LARGE bytes are in a file of the cache folder, which one process writes once.
    The file's name is a digest of the text and of the tokenizer's files, unless no file restores it: then the ids are
    in memory. Raises UserError if it cannot be written.
    """
    if part.size < text.LARGE or not tokenizer.can_restore:
        return tokenizer.join(part)
    digests = sorted((name, data_files.digest(content).hex()) for name, content in tokenizer.files.items())
    name = hashlib.sha256(repr([VERSION, part.digest, tokenizer.dtype.str, digests]).encode()).hexdigest()
    file = disk.cache_folder() / "tokens" / f"{name[:32]}.ids"
    with disk.writing(file, disk.OTHER_CACHE):
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        lock = disk.open_handle(disk.folder(file.parent) / f"{name[:32]}.lock", flags)
        with os.fdopen(lock, "wb"):
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not file.is_file():
                log.say(f"writing the token ids of a text to {file}, once", "\n")
                with disk.draft(file) as out, tqdm.tqdm(unit="B", unit_scale=True, disable=None) as bar:
                    for id_T in tokenizer.encode_text(part):
                        bar.update(out.write(id_T.data))
    return Mapped(file, tokenizer.dtype)

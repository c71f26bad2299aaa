"""Token ids of a text: in memory, or, for a large text, in a file that is written once and mapped to memory."""

import fcntl
import hashlib
import pathlib
from typing import Any

import numpy as np
import tqdm

from experiments.data import files, text, tokenizer
from experiments.engine import disk, log

VERSION = 4  # of the ids in such a file


class Mapped:
    """Integers in a file, indexed as an array.

    Each access maps the file anew and copies, since every page that is read through a map counts as memory of this
    process until the map ends."""

    def __init__(self, file: pathlib.Path, dtype: np.dtype):
        self.file, self.dtype = file, dtype
        self._length = file.stat().st_size // dtype.itemsize

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, at: Any) -> np.ndarray:
        return np.array(np.memmap(self.file, self.dtype, "r")[at])


def of(words: tokenizer.Tokenizer, part: text.Part) -> np.ndarray | Mapped:
    """Return the ids of a part of a text.

    If the part has text.LARGE bytes or more, they are in a file of the cache folder, which one process writes once. Its
    name is a digest of the text and of the tokenizer's files. Raises UserError if the file cannot be written."""
    if part.size < text.LARGE:
        return words.join(part)
    made_by = sorted((name, files.digest(content).hex()) for name, content in words.files.items())
    name = hashlib.sha256(repr([VERSION, part.digest, words.dtype.str, made_by]).encode()).hexdigest()
    file = disk.cache_folder() / "tokens" / f"{name[:32]}.ids"
    with disk.writing(file, disk.OTHER_CACHE):
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.with_suffix(".lock").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not file.is_file():
                write(file, words, part)
    return Mapped(file, words.dtype)


def write(file: pathlib.Path, words: tokenizer.Tokenizer, part: text.Part) -> None:
    """Write the ids of the text into the file, with a progress bar on a terminal."""
    log.say(f"the token ids of a text are written, once, to {file}", "\n")
    with disk.draft(file) as out, tqdm.tqdm(unit="B", unit_scale=True, disable=None) as bar:
        for id_T in words.encode_text(part):
            bar.update(out.write(id_T.data))

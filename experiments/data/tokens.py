"""Token ids of a text: in memory, or, for a large text, in a file that is written once and mapped into memory."""

import fcntl
import hashlib
import os
import pathlib
from typing import Any

import numpy as np
import tqdm

from experiments.config import disk
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


def encode(tokenizer: tokenization.Tokenizer, part: text.Part) -> np.ndarray | Mapped:
    """Return the token ids of a part of a text.

    The ids of a part of at least text.LARGE bytes are in a file of the cache folder, which one process writes once.
    The file's name is a digest of the text and of the tokenizer's files. Raises UserError if it cannot be written.
    """
    if part.size < text.LARGE:
        return tokenizer.join(part)
    digests = sorted((name, data_files.digest(content).hex()) for name, content in tokenizer.files.items())
    name = hashlib.sha256(repr([VERSION, part.digest, tokenizer.dtype.str, digests]).encode()).hexdigest()
    file = disk.cache_folder() / "tokens" / f"{name[:32]}.ids"
    with disk.writing(file, disk.OTHER_CACHE):
        file.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        with os.fdopen(disk.open_handle(file.with_suffix(".lock"), flags), "wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not file.is_file():
                write(file, tokenizer, part)
    return Mapped(file, tokenizer.dtype)


def write(file: pathlib.Path, tokenizer: tokenization.Tokenizer, part: text.Part) -> None:
    """Write the token ids of the text into the file, with a progress bar on a terminal."""
    log.say(f"writing the token ids of a text to {file}, once", "\n")
    with disk.draft(file) as out, tqdm.tqdm(unit="B", unit_scale=True, disable=None) as bar:
        for id_T in tokenizer.encode_text(part):
            bar.update(out.write(id_T.data))

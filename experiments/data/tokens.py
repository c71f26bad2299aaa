"""The ids of a text: in memory, or, of a large one, in a file that is made once and mapped where it is read."""

import contextlib
import fcntl
import hashlib
import itertools
import json
import mmap
import os
import pathlib
import weakref
import zlib
from typing import Any

import numpy as np
import tqdm

from experiments.data import files, text, tokenizer
from experiments.engine import disk, log

SAVED = 2**26  # bytes of ids, at most, that are made again after an interruption
VERSION = 3  # of the ids in such a file
NOTHING = {"parts": 0, "bytes": 0, "crc32": 0}


class Mapped:
    """Integers in a file, indexed as an array. What is asked for is copied, and the file mapped for so long only: each
    page that is read through a map counts as memory of this process until the map ends."""

    def __init__(self, file: pathlib.Path, dtype: np.dtype):
        self._file, self.dtype = open(file, "rb"), dtype
        weakref.finalize(self, self._file.close)
        self._length = os.fstat(self._file.fileno()).st_size // dtype.itemsize

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, at: Any) -> np.ndarray:
        return np.array(np.frombuffer(mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ), self.dtype)[at])


def of(words: tokenizer.Tokenizer, part: text.Part) -> np.ndarray | Mapped:
    """The ids of a part of a text; of text.LARGE bytes or more in the cache's folder `tokens`, by digests of the text
    and of the tokenizer's files: made once, by one process at a time, which goes on where another was interrupted,
    and made anew where the checksum is wrong. UserError for a disk that does not take them."""
    if part.size < text.LARGE:
        return words.join(part)
    made_by = sorted((name, files.digest(content).hex()) for name, content in words.files.items())
    name = hashlib.sha256(repr([VERSION, part.digest, words.dtype.str, made_by]).encode()).hexdigest()
    file = disk.cache_folder() / "tokens" / f"{name[:32]}.ids"
    with disk.writing(file, disk.OTHER_CACHE):
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.with_suffix(".lock").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            said = _said(file)
            if not said["bytes"] or said["bytes"] != file.stat().st_size:
                _make(file, words, part)
        return Mapped(file, words.dtype)


def _make(file: pathlib.Path, words: tokenizer.Tokenizer, part: text.Part) -> None:
    draft = file.with_suffix(".draft")
    said = _said(draft)
    again = f", from {disk.size(said['bytes'])} on" if said["bytes"] else ""
    log.say(f"the tokens of a text are written, once, to {file}{again}", "\n")
    line = tqdm.tqdm(initial=said["bytes"], unit="B", unit_scale=True, disable=None)  # on a terminal alone
    with line, draft.open("r+b" if said["bytes"] else "wb") as out:
        out.truncate(said["bytes"])
        out.seek(said["bytes"])
        saved = said["bytes"]
        with contextlib.closing(words.each(itertools.islice(words.parts(part), said["parts"], None))) as rows:
            for ids in rows:
                end = said["bytes"] + out.write(ids.data)
                line.update(end - said["bytes"])
                said = {"parts": said["parts"] + 1, "bytes": end, "crc32": zlib.crc32(ids.data, said["crc32"])}
                if end - saved >= SAVED:
                    out.flush()
                    disk.write_json(_beside(draft), said)
                    saved = end
    disk.write_json(_beside(file), said)
    os.replace(draft, file)
    _beside(draft).unlink(missing_ok=True)


def _beside(file: pathlib.Path) -> pathlib.Path:
    return file.with_name(f"{file.name}.json")


def _said(file: pathlib.Path) -> dict[str, int]:
    """Of how many parts of the text this file has the ids, in how many bytes, of which checksum; NOTHING where that is
    not so."""
    try:
        said = json.loads(_beside(file).read_bytes())
        with open(file, "rb") as content:
            left, crc32 = said["bytes"], 0
            while left and (piece := content.read(min(left, files.CHUNK))):
                left, crc32 = left - len(piece), zlib.crc32(piece, crc32)
        return said if (left, crc32) == (0, said["crc32"]) and said.keys() == NOTHING.keys() else NOTHING
    except (OSError, ValueError, LookupError, TypeError):
        return NOTHING

"""Byte-level BPE of much text. The library spends some 500 ns on each byte: here a word is asked of it only once."""

import collections
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tokenizers

from experiments.engine import errors

# GPT-2's rule ends a word wherever this one does, so that no token crosses such an end.
WORD = re.compile(r" ?\S+|\s+(?!\S)|\s+")
PIECE = re.compile(r"'(?:[stmd]|re|ve|ll)| ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+")  # that rule, of ASCII
STRANGE = "\x1c\x1d\x1e\x1f"  # whitespace to Python alone
REMEMBERED, LONG = 2**18, 99  # words, of some 260 bytes of memory each; characters of one that is not remembered
MOST_PROCESSES = 8
LENGTH = 8  # bytes of a number


def applies(library: tokenizers.Tokenizer) -> bool:
    """Whether the ids of a text are those of its words: BPE by GPT-2's rule, without normaliser or specials around."""
    said = json.loads(library.to_str())
    rule, model = said["pre_tokenizer"] or {}, said["model"]
    rules = rule.get("type") == "ByteLevel" and rule["use_regex"] and not rule["add_prefix_space"]
    alone = not library.num_special_tokens_to_add(False) and said["normalizer"] is None
    return rules and alone and model["type"] == "BPE" and not model["dropout"]


class Words(dict):
    """word -> its ids as bytes, asked of the library where it is missing."""

    def __init__(self, library: tokenizers.Tokenizer, dtype: np.dtype):
        self._library, self._dtype, self._pieces = library, dtype, {}
        added = (token.content for token in library.get_added_tokens_decoder().values())
        self._beyond = (*STRANGE, *added)  # what looks beyond a word, as an added token at the spaces beside it may

    def __missing__(self, word: str) -> bytes:
        pieces = PIECE.findall(word) if word.isascii() else [word]
        ids = b"".join([self._pieces.get(piece) or self._asked(piece) for piece in pieces])
        return _remember(self, word, ids)

    def _asked(self, text: str) -> bytes:
        ids = np.array(self._library.encode(text, add_special_tokens=False).ids, self._dtype).tobytes()
        return _remember(self._pieces, text, ids)

    def ids(self, texts: Iterable[str]) -> np.ndarray:
        """Those of all texts, in a row."""
        return np.frombuffer(b"".join(map(self._row, texts)), self._dtype)

    def _row(self, text: str) -> bytes:
        if any(map(text.__contains__, self._beyond)):
            return self._asked(text)
        return b"".join(map(self.__getitem__, WORD.findall(text)))


def _remember(known: dict[str, bytes], word: str, ids: bytes) -> bytes:
    if len(known) >= REMEMBERED:
        known.clear()
    if len(word) < LONG:
        known[word] = ids
    return ids


def encoded(library: tokenizers.Tokenizer, parts: Iterable[Sequence[str]], dtype: np.dtype) -> Iterator[np.ndarray]:
    """`Words.ids` of each of the parts, in order, by as many processes as this one may use processors. They end with
    this one, however it ends: then there is nothing more to read. UserError where one of them ends first."""
    how = {"library": library.to_str(), "specials_as_text": library.encode_special_tokens, "dtype": dtype.str}
    command = [sys.executable, "-c", "from experiments.data import byte_level; byte_level.serve()"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TOKENIZERS_PARALLELISM": "false"}
    with contextlib.ExitStack() as stack:
        waiting: collections.deque[subprocess.Popen] = collections.deque()  # for what they were sent, one part each
        for number, part in enumerate(parts):
            if number < min(_processors(), MOST_PROCESSES):
                pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
                process = stack.enter_context(subprocess.Popen(command, env=environment, **pipes))
                _send(process, how)
            else:
                process = waiting.popleft()
                yield _received(process, dtype)
            _send(process, part)
            waiting.append(process)
        for process in waiting:
            yield _received(process, dtype)


def serve() -> None:
    """What each process does: a line of JSON says how, each further one is a part; answers have their length first."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this one
    how = json.loads(sys.stdin.readline())
    library = tokenizers.Tokenizer.from_str(how["library"])
    library.encode_special_tokens = how["specials_as_text"]
    words = Words(library, np.dtype(how["dtype"]))
    with contextlib.suppress(BrokenPipeError):
        for line in sys.stdin:
            ids = words.ids(json.loads(line)).tobytes()
            sys.stdout.buffer.write(len(ids).to_bytes(LENGTH) + ids)
            sys.stdout.buffer.flush()
    os._exit(0)  # without a word about a pipe that nobody reads any more


def _send(process: subprocess.Popen, value: Any) -> None:
    with contextlib.suppress(BrokenPipeError):  # `_received` says it
        process.stdin.write(json.dumps(value).encode() + b"\n")
        process.stdin.flush()


def _received(process: subprocess.Popen, dtype: np.dtype) -> np.ndarray:
    length = process.stdout.read(LENGTH)
    content = process.stdout.read(int.from_bytes(length))
    if len(length) < LENGTH or len(content) < int.from_bytes(length):
        raise errors.UserError("a process that makes ids of words has ended: is there too little memory?")
    return np.frombuffer(content, dtype)


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

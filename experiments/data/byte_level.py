"""Byte-level BPE of much text. The library spends some 500 ns on each byte: here a word is asked of it only once."""

import functools
import itertools
import json
import os
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence

import joblib
import numpy as np
import tokenizers

# GPT-2's rule ends a word wherever this one does, so that no token crosses such an end.
WORD = re.compile(r" ?\S+|\s+(?!\S)|\s+")
STRANGE = "\x1c\x1d\x1e\x1f"  # whitespace to Python alone
REMEMBERED, LONG = 2**18, 99  # words, of some 260 bytes of memory each; characters of one that is not remembered
MOST_PROCESSES = 8


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
        self._library, self._dtype = library, dtype
        added = (token.content for token in library.get_added_tokens_decoder().values())
        self._beyond = (*STRANGE, *added)  # what looks beyond a word, as an added token at the spaces beside it may

    def __missing__(self, word: str) -> bytes:
        ids = np.array(self._library.encode(word, add_special_tokens=False).ids, self._dtype).tobytes()
        if len(self) >= REMEMBERED:
            self.clear()
        if len(word) < LONG:
            self[word] = ids
        return ids

    def ids(self, texts: Iterable[str]) -> np.ndarray:
        """Those of all texts, in a row."""
        words = ([text] if any(map(text.__contains__, self._beyond)) else WORD.findall(text) for text in texts)
        return np.frombuffer(b"".join(map(self.__getitem__, itertools.chain.from_iterable(words))), self._dtype)


def encoded(library: tokenizers.Tokenizer, parts: Iterable[Sequence[str]], dtype: np.dtype) -> Iterator[np.ndarray]:
    """`Words.ids` of each of the parts, in order, by as many processes as this one may use processors."""
    n = min(joblib.cpu_count(), MOST_PROCESSES)
    work = joblib.Parallel(n, backend="loky", idle_worker_timeout=5, batch_size=1, return_as="generator")
    as_it_is = library.to_str(), library.encode_special_tokens
    rows = work(joblib.delayed(_encoded)(*as_it_is, part, dtype) for part in parts)
    try:
        for ids in rows:  # noqa: UP028, as `yield from` would close it where warnings are not ignored
            yield ids
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # where this ends early: that some work was for nothing
            rows.close()


def _encoded(content: str, specials_as_text: bool, texts: Sequence[str], dtype: np.dtype) -> np.ndarray:
    return _words(content, specials_as_text, dtype).ids(texts)


@functools.lru_cache(1)
def _words(content: str, specials_as_text: bool, dtype: np.dtype) -> Words:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a word is too little for it
    library = tokenizers.Tokenizer.from_str(content)
    library.encode_special_tokens = specials_as_text
    return Words(library, dtype)

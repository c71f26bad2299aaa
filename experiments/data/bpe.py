"""Learn a byte-level BPE from the text of a run (Sennrich et al. 2016; on bytes: Radford et al. 2019, section 2.2)."""

import hashlib
import itertools
import pathlib
import re
import sys
from collections.abc import Iterable, Iterator, Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from experiments.config import disk, errors
from experiments.data import tokenization
from experiments.folder import log

BETWEEN = "<|endoftext|>"  # between two documents, and at the end of a sampled text
LEAST, MOST = 256 + 2, 2**20  # token ids: at least the bytes and the special tokens of an objective
LONG = 2**25  # bytes: learning from a text of this size takes 3 s on two cores, and a line announces it
LEARNED = 2**30  # bytes of text to learn from; of a longer text only every second, third ... document is used
RUN = 256  # the most letters (or digits, signs, spaces) in a row: the library's time grows with their square
RUNS = re.compile("|".join(f"{kind}{{{RUN}}}" for kind in (r"[^\W\d_]", r"\d", r"(?:[^\w\s]|_)", r"\s")))
VERSION = 2  # of the format of the cached files


def size(name: str) -> int:
    """Return the number of token ids in 'bpe:8192', or 0 for another name. Raises UserError for too few or too many."""
    match = re.fullmatch(r"bpe:(\d{1,9})", name)
    W = int(match[1]) if match else 0
    allowed = f"from {LEAST} (bytes and special tokens) to {MOST:,} token ids. Choose for example {tokenization.BPE}"
    errors.refuse((match and not LEAST <= W <= MOST, f"text.tokenizer = {name} must have {allowed}."))
    return W


def train(text: Iterable[bytes], *, W: int, specials: tuple[str, ...], every: int = 1) -> dict[str, bytes]:
    """Return the files, by name, of a tokenizer with W token ids, or fewer if the text has too few pairs to merge.

    The same text gives the same files, which `transformers` can read. text: the bytes of documents, separated by
    NUL, in pieces that end anywhere. every: learn from each document (1), every second document (2), ... Raises
    UserError if the text is not UTF-8.
    """
    # The space before a masked token belongs to it, like the space before any other token.
    added = [BETWEEN, *(AddedToken(special, lstrip=True, special=True) for special in specials)]
    documents = itertools.islice(tokenization.documents(text), 0, None, every)
    library = learn((document.text for document in documents), W=W, specials=added)
    config = dict.fromkeys(("bos_token", "eos_token", "between_token"), BETWEEN)
    config |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    config |= {"mask_token": tokenization.MASK} if tokenization.MASK in specials else {}
    return {"tokenizer_config.json": disk.as_json(config), "tokenizer.json": library.to_str().encode()}


def learn(texts: Iterable[str], *, W: int, specials: Sequence[str | AddedToken]) -> Tokenizer:
    """Return a byte-level BPE tokenizer. Its ids are first the special tokens, then all 256 bytes, then the merges.

    It has at most W ids, or only the special tokens and the bytes if these alone are more than W.
    """
    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    begin = {"special_tokens": [*specials], "initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}
    trainer = trainers.BpeTrainer(vocab_size=W, show_progress=sys.stderr.isatty(), **begin)
    library.train_from_iterator(cut(texts), trainer)
    return library


def cut(texts: Iterable[str]) -> Iterator[str]:
    """Yield the texts in pieces, cut after every RUN letters in a row, and after RUN digits, signs or spaces."""
    n = 0
    for text in texts:
        start = 0
        for run in RUNS.finditer(text):
            yield text[start : run.end()]
            start, n = run.end(), n + 1
        yield text[start:]
    if n:
        log.say(f"the BPE learns from the text cut in {n:,} places, after {RUN} letters (or signs) in a row", "\n")


def find_or_train(text: Iterable[bytes], *, W: int, specials: tuple[str, ...]) -> pathlib.Path:
    """Return a cached folder with the tokenizer's files (`train`), made once for equal arguments. text: a text.Part."""
    key = repr([VERSION, text.digest, W, specials]).encode()
    folder = disk.cache_folder() / "tokenizers" / hashlib.sha256(key).hexdigest()[:32]
    if (folder / "tokenizer.json").is_file():  # written last
        return folder
    every = 1 + text.size // LEARNED
    if text.size >= LONG:
        share = f", from one of every {every} documents" if every > 1 else ""
        log.say(f"learning a BPE of {W:,} tokens from {disk.size(text.size)} of text{share}", "\n")
    files = train(text, W=W, specials=specials, every=every)
    with disk.writing(folder, disk.OTHER_CACHE):
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            disk.write(folder / name, content)
    return folder

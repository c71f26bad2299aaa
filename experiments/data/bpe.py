"""Learn a byte-level BPE from a run's own text (Sennrich et al. 2016; of bytes: Radford et al. 2019, section 2.2)."""

import hashlib
import itertools
import pathlib
import re
import sys
from collections.abc import Iterable, Iterator, Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from experiments.data import tokenizer
from experiments.engine import disk, errors, log

BETWEEN = "<|endoftext|>"  # between two documents, and at the end of a sampled text
LEAST, MOST = 256 + 2, 2**20  # token ids: at least the bytes and the special tokens of an objective
LONG = 2**25  # bytes of text from which on a line announces that learning takes a while: 3 s on two cores
LEARNED = 2**30  # bytes of text to learn from; of a longer text, every second, third ... document
RUN = 256  # most letters (digits, signs, spaces) in a row: the library's time grows with the square of this length
RUNS = re.compile("|".join(f"{kind}{{{RUN}}}" for kind in (r"[^\W\d_]", r"\d", r"(?:[^\w\s]|_)", r"\s")))
VERSION = 2  # of the files in the cache


def size(name: str) -> int:
    """Return the number of token ids in 'bpe:8192', 0 for another form. Raises UserError for too few or too many."""
    match = re.fullmatch(r"bpe:(\d{1,9})", name)
    if match and not LEAST <= int(match[1]) <= MOST:
        raise errors.UserError(f"text.tokenizer = {name} needs {LEAST} (bytes, specials) to {MOST:,}: {tokenizer.BPE}")
    return int(match[1]) if match else 0


def train(text: Iterable[bytes], *, W: int, specials: tuple[str, ...], every: int = 1) -> dict[str, bytes]:
    """Return the files of a tokenizer with W token ids, or fewer if the text has too few pairs; by name.

    The same text gives the same files, which `transformers` reads too. text: as in Tokenizer.join. every: learn from
    every second, third ... document. Raises UserError if the text is not UTF-8.
    """
    # The space before a masked token belongs to it, like the space before any other token.
    added = [BETWEEN, *(AddedToken(special, lstrip=True, special=True) for special in specials)]
    documents = itertools.islice(tokenizer.documents(text), 0, None, every)
    library = learn((document.text for document in documents), W=W, specials=added)
    config = dict.fromkeys(("bos_token", "eos_token", "between_token"), BETWEEN)
    config |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    config |= {"mask_token": tokenizer.MASK} if tokenizer.MASK in specials else {}
    return {"tokenizer_config.json": disk.as_json(config), "tokenizer.json": library.to_str().encode()}


def learn(texts: Iterable[str], *, W: int, specials: Sequence[str | AddedToken]) -> Tokenizer:
    """Return a tokenizer with at most W token ids: first the special tokens, then the bytes, then the merges."""
    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    begin = {"special_tokens": [*specials], "initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}
    trainer = trainers.BpeTrainer(vocab_size=W, show_progress=sys.stderr.isatty(), **begin)
    library.train_from_iterator(cut(texts), trainer)
    return library


def cut(texts: Iterable[str]) -> Iterator[str]:
    """Yield the texts, cut after every RUN letters, digits, signs or spaces in a row."""
    n = 0
    for text in texts:
        start = 0
        for run in RUNS.finditer(text):
            yield text[start : run.end()]
            start, n = run.end(), n + 1
        yield text[start:]
    if n:
        log.say(f"the BPE is learned from text cut in {n:,} places, after {RUN} letters (or signs) in a row", "\n")


def find_or_train(text: Iterable[bytes], *, W: int, specials: tuple[str, ...]) -> pathlib.Path:
    """Return a folder of the cache with the files of `train`, created once for a text.Part and these arguments."""
    key = repr([VERSION, text.digest, W, specials]).encode()
    folder = disk.cache_folder() / "tokenizers" / hashlib.sha256(key).hexdigest()[:32]
    if (folder / "tokenizer.json").is_file():  # written last
        return folder
    every = 1 + text.size // LEARNED
    if text.size >= LONG:
        share = f", from one of every {every} documents" if every > 1 else ""
        log.say(f"a BPE of {W:,} tokens is learned from {disk.size(text.size)} of text{share}", "\n")
    files = train(text, W=W, specials=specials, every=every)
    with disk.writing(folder, disk.OTHER_CACHE):
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            disk.write(folder / name, content)
    return folder

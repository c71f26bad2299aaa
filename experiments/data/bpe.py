"""A byte-level BPE of a run's own text (Sennrich et al. 2016; of bytes: Radford et al. 2019, section 2.2)."""

import hashlib
import itertools
import pathlib
import re
import sys
from collections.abc import Iterable, Iterator, Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from experiments.data import tokenizer
from experiments.engine import disk, errors, log

BETWEEN = "<|endoftext|>"  # two documents, and after a text that is drawn
MOST = 2**20  # words
LONG = 2**25  # bytes of text, from which on it is told that it takes a while: 3 s on two cores
LEARNED = 2**30  # bytes of text from which it is learned, about; of more, every second, third ... document
RUN = 256  # characters of one kind without a break, of which a word is made at most: its time grows with the square
RUNS = re.compile("|".join(f"{kind}{{{RUN}}}" for kind in (r"[^\W\d_]", r"\d", r"(?:[^\w\s]|_)", r"\s")))
VERSION = 2  # of what is in the cache


def size(name: str) -> int:
    """The number of words in 'bpe:8192', 0 where the name is of another form. UserError for too few or many."""
    asked = re.fullmatch(r"bpe:(\d{1,9})", name)
    least = 256 + 2  # bytes, and the specials of any objective
    if asked and not least <= int(asked[1]) <= MOST:
        wrong = f"text.tokenizer = {name} must be of at least {least} words (the bytes, and specials)"
        raise errors.UserError(f"{wrong} and at most {MOST:,}: {tokenizer.BPE}")
    return int(asked[1]) if asked else 0


def train(text: Iterable[bytes], *, words: int, specials: tuple[str, ...], every: int = 1) -> dict[str, bytes]:
    """The files of a tokenizer of so many words, by name, as `transformers` reads them, too; fewer where the text has
    no more pairs. `text` as in Tokenizer.join. The same text gives the same files. UserError for text not in UTF-8.
    every: learned from each document so far behind the one before; a long one counts as several."""
    # The space before a hidden word belongs to it, as that before any other word does.
    added = [BETWEEN, *(AddedToken(special, lstrip=True, special=True) for special in specials)]
    some = itertools.islice(tokenizer.documents(text), 0, None, every)
    library = learned(some, words=words, specials=added)
    says = dict.fromkeys(("bos_token", "eos_token", "between_token"), BETWEEN)
    says |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    says |= {"mask_token": tokenizer.MASK} if tokenizer.MASK in specials else {}
    return {"tokenizer_config.json": disk.as_json(says), "tokenizer.json": library.to_str().encode()}


def learned(texts: Iterable[str], *, words: int, specials: Sequence[str | AddedToken]) -> Tokenizer:
    """The library's own, of so many words at most: first the specials, then the bytes, then what these merge into."""
    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    begin = {"special_tokens": [*specials], "initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}
    shown = sys.stderr.isatty()
    library.train_from_iterator(_cut(texts), trainers.BpeTrainer(vocab_size=words, show_progress=shown, **begin))
    return library


def _cut(texts: Iterable[str]) -> Iterator[str]:
    """Yield the texts; one with more than RUN letters, digits, signs or spaces in a row as several, cut there."""
    n = 0
    for text in texts:
        at = 0
        for run in RUNS.finditer(text):
            yield text[at : run.end()]
            at, n = run.end(), n + 1
        yield text[at:]
    if n:
        log.say(f"the words are learned from text cut in {n:,} places, behind {RUN} letters (or signs) in a row", "\n")


def cached(text: Iterable[bytes], *, words: int, specials: tuple[str, ...]) -> pathlib.Path:
    """The folder in the cache with the files of `train`, made once of a text (text.Part) and these numbers."""
    key = repr([VERSION, text.digest, words, specials]).encode()
    folder = disk.cache_folder() / "tokenizers" / hashlib.sha256(key).hexdigest()[:32]
    if (folder / "tokenizer.json").is_file():  # it is written last
        return folder
    every = 1 + text.size // LEARNED
    if text.size >= LONG:
        some = f", from one of each {every} documents" if every > 1 else ""
        log.say(f"a BPE of {words:,} words is learned from {disk.size(text.size)} of text{some}", "\n")
    files = train(text, words=words, specials=specials, every=every)
    with disk.writing(folder, disk.OTHER_CACHE):
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            disk.write(folder / name, content)
    return folder

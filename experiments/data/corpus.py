"""A text as token ids, split into training and held-out data, with the lines about it that a run prints.

The ids are in memory, or, for a large text, in a file that is written once and mapped into memory.
"""

import fcntl
import hashlib
import os
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tqdm

from experiments.config import disk, errors, settings as configs
from experiments.data import bpe, files as data_files, perplexity, pretrained_tokenizer, text, tokenization
from experiments.folder import log

PIECE = 2**20  # tokens that `count_tokens` counts at a time
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
    """Token ids of one text after another, each repeated until it has its share of the tokens, indexed like an array.

    The text with the most tokens for its share occurs once. The last repetition of another may be cut off. separator:
    an id after each whole repetition; None: no id.
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


class Corpus(NamedTuple):
    """The two parts of a text as token ids, in the smallest integers that hold them, and its tokenizer."""

    name: str
    tokenizer: tokenization.Tokenizer
    train_T: np.ndarray | Mapped | Mixture
    evaluation_T: np.ndarray | Mapped | Mixture
    lines: list[str]  # about the data; a run prints them
    sha256: str  # of the text
    size: perplexity.Size | None  # of the held-out text after its first token; None: no bits per byte


def read_corpus(section: configs.Settings, specials: tuple[str, ...]) -> Corpus:
    """Return the text of the section `text` as token ids. A tokenizer that is learned sees only the training data.

    specials: special tokens that the objective needs.
    """
    documents, sources = text.load_all(section.source, section.field)
    splits = documents.train, documents.evaluation
    tokenizer = pretrained_tokenizer.make(section.tokenizer, splits[0], specials=specials, evaluation=splits[1])
    if section.documents:
        _check_documents(section, splits[0], tokenizer)
    evaluation_T = encode(tokenizer, splits[1])
    train_T, shared = encode_shares(tokenizer, sources) if sources else (encode(tokenizer, splits[0]), [])
    smaller = tokenizer.size < bpe.size(section.tokenizer)
    remark = f" (fewer than in {section.tokenizer}, because the text has too few pairs to merge)" if smaller else ""
    lengths = f"{len(train_T):,} tokens to train on, {len(evaluation_T):,} to evaluate"
    lines = [*shared, f"{lengths}, vocabulary {tokenizer.size}{remark}", *_describe_separators(documents, tokenizer)]
    if section.documents:
        counts = [count_documents(id_T, tokenizer) for id_T in (train_T, evaluation_T)]
        lines.append("{:,} documents to train on, {:,} to evaluate, which do not see each other".format(*counts))
    if tokenizer.unknown is not None:
        ids = train_T, evaluation_T
        shares = [count_tokens(id_T, W=tokenizer.size)[tokenizer.unknown] / max(len(id_T), 1) for id_T in ids]
        lines.append("unknown tokens: {:.2%} of the training data, {:.2%} of the held-out data".format(*shares))
    size = None
    if section.tokenizer != "bytes":  # with bytes, the loss already is nats per byte
        size = perplexity.size(splits[1], first=tokenizer.decode(evaluation_T[:1]))
        if difference := perplexity.find_difference(tokenizer, splits[1]):
            lines.append(f"no bits per byte, because the tokenizer does not restore the text: {difference}")
            size = None
        elif size.bytes > perplexity.LONGEST * size.words:
            lines.append("no word perplexity, because no spaces separate the words")
    lines = data_files.join_lines(documents.name, documents.description, lines).splitlines()
    return Corpus(documents.name, tokenizer, train_T, evaluation_T, lines, documents.sha256, size)


def _check_documents(section: configs.Settings, train: text.Part, tokenizer: tokenization.Tokenizer) -> None:
    """Raise UserError unless the training text has several documents, and the tokenizer a token between them."""
    single = f"text.documents = True needs several documents, but text.source = {section.source} has one to train on"
    single += ". Give a folder of files or a table with text.field, or set text.documents = False"
    alone = f"text.documents = True, but text.tokenizer = {section.tokenizer} puts no token between two documents"
    alone += ". Choose bytes, characters or bpe:8192, or set text.documents = False"
    is_single = not any(text.SEPARATOR in piece for piece in train)
    errors.refuse((is_single, single), (tokenizer.document_start is None, alone))


def _describe_separators(documents: text.Text, tokenizer: tokenization.Tokenizer) -> list[str]:
    """Return a line that names the token between documents, and one if the training text itself contains this name.

    Return [] without a published tokenizer, or if there is a single document.
    """
    if not isinstance(tokenizer, pretrained_tokenizer.Published) or len(documents.train.sources) <= 1:
        return []
    ids = tokenizer.encode("") if tokenizer.between is None else [tokenizer.between]
    names = [tokenizer.name(token) for token in ids]
    lines = [f"{''.join(names) or 'no token'} separates documents"]
    for name in dict.fromkeys(names):
        if count := sum(piece.text.count(name) for piece in tokenization.documents(documents.train)):
            lines.append(f"the training text contains {name} {count:,} times, each read as the end of a document")
    return lines


def count_documents(token_T: np.ndarray | Mapped | Mixture, tokenizer: tokenization.Tokenizer) -> int:
    """Return the number of documents in a text whose tokenizer has document_start."""
    starts = count_tokens(token_T, W=tokenizer.size)[tokenizer.document_start]
    inner_starts = starts - sum(token_T[i] == tokenizer.document_start for i in (0, -1))
    return int(inner_starts) + 1


def count_tokens(token_T: np.ndarray | Mapped | Mixture, *, W: int) -> np.ndarray:
    """Return how often each of W tokens occurs. Count in pieces, because numpy copies a piece to 8 bytes per token."""
    pieces = (token_T[first : first + PIECE] for first in range(0, len(token_T), PIECE))
    return sum((np.bincount(piece, minlength=W) for piece in pieces), np.zeros(W, int))


def encode_shares(
    tokenizer: tokenization.Tokenizer, sources: Sequence[tuple[text.Text, float]]
) -> tuple[Mixture, list[str]]:
    """Return the training ids of several texts with their shares, and a line about each.

    sources: (text, share) pairs, as text.load_all returns them. Raises UserError as `encode`, and for a text without
    tokens.
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
    The file's name is a digest of the text and of the tokenizer's files. The ids of a user's tokenizer,
    which no file restores, are in memory. Raises UserError if the file cannot be written.
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

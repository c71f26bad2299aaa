"""A text as token ids, split into training and held-out data, with the lines about it that a run prints."""

from typing import NamedTuple

import numpy as np

from experiments.config import errors, settings as configs
from experiments.data import bpe, files as data_files, perplexity, pretrained_tokenizer, text, tokenization, tokens

PIECE = 2**20  # tokens that `count_tokens` counts at a time


class Corpus(NamedTuple):
    """A text as token ids, in the smallest integers that hold them."""

    name: str
    tokenizer: tokenization.Tokenizer
    train_T: np.ndarray | tokens.Mapped | tokens.Mixture
    evaluation_T: np.ndarray | tokens.Mapped | tokens.Mixture
    lines: list[str]  # about the data; a run prints them
    sha256: str  # of the text
    size: perplexity.Size | None  # of the held-out text after its first token; None: no bits per byte


def read_corpus(section: configs.Settings, specials: tuple[str, ...]) -> Corpus:
    """Return the text of the section `text` as token ids. The vocabulary comes from the training data.

    specials: special tokens that the objective needs.
    """
    documents, sources = text.load_all(section.source, section.field)
    splits = documents.train, documents.evaluation
    tokenizer = pretrained_tokenizer.make(section.tokenizer, splits[0], specials=specials, evaluation=splits[1])
    if section.documents:
        _check_documents(section, splits[0], tokenizer)
    evaluation_T = tokens.encode(tokenizer, splits[1])
    train_T, shared = tokens.encode_shares(tokenizer, sources) if sources else (tokens.encode(tokenizer, splits[0]), [])
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
    """Return lines about the tokens of a published tokenizer that separate documents, and their names in the text."""
    if not isinstance(tokenizer, pretrained_tokenizer.Published) or len(documents.train.sources) <= 1:
        return []
    ids = tokenizer.encode("") if tokenizer.between is None else [tokenizer.between]
    names = [tokenizer.name(token) for token in ids]
    lines = [f"{''.join(names) or 'no token'} separates documents"]
    for name in dict.fromkeys(names):
        if count := tokenization.count_name(name, documents.train):
            lines.append(f"the training text contains {name} {count:,} times, each read as the end of a document")
    return lines


def count_documents(token_T: np.ndarray | tokens.Mapped | tokens.Mixture, tokenizer: tokenization.Tokenizer) -> int:
    """Return the number of documents in a text whose tokenizer has document_start."""
    starts = count_tokens(token_T, W=tokenizer.size)[tokenizer.document_start]
    inner_starts = starts - sum(token_T[i] == tokenizer.document_start for i in (0, -1))
    return int(inner_starts) + 1


def count_tokens(token_T: np.ndarray | tokens.Mapped | tokens.Mixture, *, W: int) -> np.ndarray:
    """Return how often each of W tokens occurs. Count in pieces, because numpy copies a piece to 8 bytes per token."""
    pieces = (token_T[first : first + PIECE] for first in range(0, len(token_T), PIECE))
    return sum((np.bincount(piece, minlength=W) for piece in pieces), np.zeros(W, int))

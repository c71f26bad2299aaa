"""A text as token ids, split into training and held-out data, with what a reader should know about it."""

from typing import NamedTuple

import numpy as np

from experiments.data import bpe, files, perplexity, pretrained_tokenizer, text, tokenizer, tokens
from experiments.engine import config as configs

PIECE = 2**20  # tokens counted at a time


class Corpus(NamedTuple):
    """A text as token ids, in the smallest integers that hold them."""

    name: str
    tokenizer: tokenizer.Tokenizer
    train_T: np.ndarray | tokens.Mapped
    evaluation_T: np.ndarray | tokens.Mapped
    lines: list[str]  # facts about the data, which a run prints
    sha256: str  # of the text
    size: perplexity.Size | None  # of the held-out text after its first token; None: no bits per byte


def read_corpus(section: configs.Settings, specials: tuple[str, ...]) -> Corpus:
    """Return the text of the section `text` as token ids. The vocabulary comes from the training data.

    specials: special tokens that the objective needs.
    """
    documents = text.load(section.source, section.field)
    splits = documents.train, documents.evaluation
    chosen = pretrained_tokenizer.make(section.tokenizer, splits[0], specials=specials, evaluation=splits[1])
    train_T, evaluation_T = (tokens.encode(chosen, split) for split in splits)
    smaller = chosen.size < bpe.size(section.tokenizer)
    remark = f" ({section.tokenizer} asks for more, but the text has too few pairs)" if smaller else ""
    lengths = f"{len(train_T):,} tokens to train on, {len(evaluation_T):,} to evaluate"
    lines = [f"{lengths}, vocabulary {chosen.size}{remark}", *_describe_separators(documents, chosen)]
    if chosen.unknown is not None:
        ids = train_T, evaluation_T
        shares = [count_tokens(id_T, W=chosen.size)[chosen.unknown] / max(len(id_T), 1) for id_T in ids]
        lines.append("unknown tokens: {:.2%} of the training data, {:.2%} of the held-out data".format(*shares))
    size = None
    if section.tokenizer != "bytes":  # then the loss is nats per byte
        size = perplexity.size(splits[1], first=chosen.decode(evaluation_T[:1]))
        if difference := perplexity.find_difference(chosen, splits[1]):
            lines.append(f"no bits per byte: decoding does not give back the text: {difference}")
            size = None
        elif size.bytes > perplexity.LONGEST * size.words:
            lines.append("no word perplexity: no spaces separate the words")
    lines = files.join_lines(documents.name, documents.description, lines).splitlines()
    return Corpus(documents.name, chosen, train_T, evaluation_T, lines, documents.sha256, size)


def _describe_separators(documents: text.Text, chosen: tokenizer.Tokenizer) -> list[str]:
    """Return which tokens of a published tokenizer separate documents, and how often the text contains them."""
    if not isinstance(chosen, pretrained_tokenizer.Published) or len(documents.train.reads) <= 1:
        return []
    ids = chosen.encode("") if chosen.between is None else [chosen.between]
    names = [chosen.name(token) for token in ids]
    lines = [f"{''.join(names) or 'no token'} separates documents"]
    for name in dict.fromkeys(names):
        if count := tokenizer.count_name(name, documents.train):
            lines.append(f"the training text contains {name} {count:,} times, each read as the end")
    return lines


def count_tokens(token_T: np.ndarray | tokens.Mapped, *, W: int) -> np.ndarray:
    """Return how often each of W tokens occurs. Pieces are counted one by one: numpy copies them to 8 bytes a token."""
    pieces = (token_T[first : first + PIECE] for first in range(0, len(token_T), PIECE))
    return sum((np.bincount(piece, minlength=W) for piece in pieces), np.zeros(W, int))

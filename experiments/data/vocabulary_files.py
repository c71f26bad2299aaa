"""The tokenizer of older published models as its tokenizer.json would say it: WordPiece (vocab.txt, as of BERT), and a
byte-level BPE (vocab.json with merges.txt, as of GPT-2 and RoBERTa)."""

import pathlib

import tokenizers
from tokenizers import models

from experiments.engine import errors

NAMES = ("vocab.txt", "vocab.json")
FILES = (*NAMES, "merges.txt")
WORDPIECE = {"unk": "[UNK]", "sep": "[SEP]", "cls": "[CLS]", "pad": "[PAD]", "mask": "[MASK]"}
BPE = {"bos": "<s>", "eos": "</s>", "unk": "<unk>", "sep": "</s>", "cls": "<s>", "pad": "<pad>", "mask": "<mask>"}
CLASSES = {"vocab.txt": "BertTokenizer"}


def library(path: pathlib.Path) -> tokenizers.Tokenizer:
    """Return the model of such a file; what its class adds, tokenizer_config.py knows. Raises UserError if the
    file lacks a special token; Exception, as the library does, for a damaged file."""
    added = path.with_name("added_tokens.json")
    if added.is_file():
        raise errors.UserError(f"{added} is not read: save a tokenizer.json with transformers, which has these words")
    if path.suffix == ".txt":
        vocabulary = models.WordPiece.read_file(str(path))
        if missing := [WORDPIECE[role] for role in ("unk", "cls", "sep") if WORDPIECE[role] not in vocabulary]:
            raise errors.UserError(f"{path} is no vocabulary of a BERT: it has no {missing[0]}")
        return tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token=WORDPIECE["unk"]))
    vocabulary, merges = models.BPE.read_file(str(path), str(path.with_name("merges.txt")))
    return tokenizers.Tokenizer(models.BPE(vocabulary, merges))

"""Read the tokenizers of older published models: WordPiece (vocab.txt of BERT), and byte-level BPE (vocab.json with
merges.txt, of GPT-2 and RoBERTa).
"""

import pathlib

import tokenizers
from tokenizers import models

NAMES = ("vocab.txt", "vocab.json")
FILES = (*NAMES, "merges.txt")
WORDPIECE = {"unk": "[UNK]", "sep": "[SEP]", "cls": "[CLS]", "pad": "[PAD]", "mask": "[MASK]"}
BPE = {"bos": "<s>", "eos": "</s>", "unk": "<unk>", "sep": "</s>", "cls": "<s>", "pad": "<pad>", "mask": "<mask>"}
CLASSES = {"vocab.txt": "BertTokenizer"}


def read_library(path: pathlib.Path) -> tokenizers.Tokenizer:
    """Return a tokenizer with only the model in a vocab.txt or vocab.json; tokenizer_config.py adds all other parts.

    Raises ValueError if special tokens are missing or in a further file. The library raises Exception for a damaged
    file.
    """
    if path.with_name("added_tokens.json").is_file():
        raise ValueError("added_tokens.json next to it is not supported. Save a tokenizer.json with transformers.")
    if path.suffix == ".txt":
        vocabulary = models.WordPiece.read_file(str(path))
        if missing := [WORDPIECE[role] for role in ("unk", "cls", "sep") if WORDPIECE[role] not in vocabulary]:
            raise ValueError(f"not a vocabulary of BERT: it has no {missing[0]}")
        return tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token=WORDPIECE["unk"]))
    vocabulary, merges = models.BPE.read_file(str(path), str(path.with_name("merges.txt")))
    return tokenizers.Tokenizer(models.BPE(vocabulary, merges))

"""The tokenizer of older published models as its tokenizer.json would say it: WordPiece (vocab.txt, as of BERT), and a
byte-level BPE (vocab.json with merges.txt, as of GPT-2 and RoBERTa)."""

import pathlib
from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import models, processors

from experiments.engine import errors

NAMES = ("vocab.txt", "vocab.json")
FILES = (*NAMES, "merges.txt")
WORDPIECE = {"unk": "[UNK]", "sep": "[SEP]", "cls": "[CLS]", "pad": "[PAD]", "mask": "[MASK]"}
BPE = {"bos": "<s>", "eos": "</s>", "unk": "<unk>", "sep": "</s>", "cls": "<s>", "pad": "<pad>", "mask": "<mask>"}
# Fields of tokenizer_config.json, and the arguments of the library that they are.
NORMALIZING = {
    "do_lower_case": "lowercase",
    "strip_accents": "strip_accents",
    "tokenize_chinese_chars": "handle_chinese_chars",
}


def library(path: pathlib.Path, said: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """The tokenizer of such a file, as what is said in tokenizer_config.json and special_tokens_map.json makes it.
    UserError where it lacks what is put around a text; Exception, as of the library, for a damaged file."""
    added = path.with_name("added_tokens.json")
    if added.is_file():
        raise errors.UserError(f"{added} is not read: save a tokenizer.json with transformers, which has these words")
    usual = WORDPIECE if path.suffix == ".txt" else BPE
    names = {role: named(said.get(f"{role}_token"), name) for role, name in usual.items()}
    if path.suffix == ".txt":
        vocabulary = models.WordPiece.read_file(str(path))
        if missing := [names[role] for role in ("unk", "cls", "sep") if names[role] not in vocabulary]:
            raise errors.UserError(f"{path} is no vocabulary of a BERT: it has no {missing[0]}")
        if wrong := [name for name in NORMALIZING if said.get(name) not in (True, False, None)]:
            raise errors.UserError(f"tokenizer_config.json: {wrong[0]} must be true or false")
        how = {ours: said[theirs] for theirs, ours in NORMALIZING.items() if theirs in said}
        specials = {f"{role}_token": name for role, name in names.items()}
        return tokenizers.BertWordPieceTokenizer(vocabulary, **specials, **how)
    vocabulary, merges = models.BPE.read_file(str(path), str(path.with_name("merges.txt")))
    space = bool(said.get("add_prefix_space", False))
    made = tokenizers.ByteLevelBPETokenizer(vocabulary, merges, add_prefix_space=space)
    if names["mask"] not in vocabulary:  # GPT-2's
        end = named(said.get("eos_token"), "<|endoftext|>")
        made.add_special_tokens([end] if end in vocabulary else [])
        return made
    there = {role: name for role, name in names.items() if name in vocabulary}
    made.add_special_tokens([name for role, name in there.items() if role != "mask"])
    made.add_special_tokens([tokenizers.AddedToken(there["mask"], lstrip=True, normalized=False)])
    if {"sep", "cls"} <= there.keys():
        ends = [(there[role], vocabulary[there[role]]) for role in ("sep", "cls")]
        made.post_processor = processors.RobertaProcessing(*ends, add_prefix_space=space)
    return made


def named(said: Any, usual: str | None) -> str | None:
    """The name of a special, which is a text or an object with it."""
    said = said.get("content") if isinstance(said, dict) else said
    return said if isinstance(said, str) else usual

"""Find and read the files of a tokenizer, published or our own.

A published tokenizer gives the ids of AutoTokenizer in transformers. If tokenizer.json alone decides them, this module
reads it. Otherwise transformers reads the folder, and the result is written as a new tokenizer.json.
"""

import json
import os
import pathlib
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import tokenizers

from experiments.config import disk, errors
from experiments.data import files as data_files

JSON, CONFIG, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
FILES = (JSON, "vocab.txt", "vocab.json")  # in a folder; the first that exists is read
NEIGHBOURS = (CONFIG, "special_tokens_map.json", "added_tokens.json", "config.json")
FROM_FILE = "PreTrainedTokenizerFast"  # the class that uses tokenizer.json unchanged
PLAIN = ("PreTrainedTokenizer", "TokenizersBackend")  # its names, without "Fast"
MODEL_TYPES = {  # the class for a type of model, if tokenizer_config.json names none
    **dict.fromkeys(("bert", "distilbert"), "BertTokenizer"),
    "gpt2": "GPT2Tokenizer",
    "roberta": "RobertaTokenizer",
    **dict.fromkeys(("qwen2", "qwen3"), "Qwen2Tokenizer"),
    **dict.fromkeys((None, "llama", "mistral"), FROM_FILE),
}
# The special tokens of the classes whose parts `expect` knows; a class adds those that tokenizer.json does not have.
SPECIALS = {
    "BertTokenizer": {"unk": "[UNK]", "sep": "[SEP]", "pad": "[PAD]", "cls": "[CLS]", "mask": "[MASK]"},
    "GPT2Tokenizer": dict.fromkeys(("unk", "bos", "eos"), "<|endoftext|>"),
    "RobertaTokenizer": {"bos": "<s>", "eos": "</s>", "cls": "<s>", "sep": "</s>", "unk": "<unk>", "pad": "<pad>"}
    | {"mask": "<mask>"},
    "Qwen2Tokenizer": {"bos": None} | dict.fromkeys(("unk", "eos", "pad"), "<|endoftext|>"),
}
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# Fields of tokenizer_config.json that a tokenizer read by transformers keeps.
KEPT = ("split_special_tokens", "clean_up_tokenization_spaces", "chat_template", "truncation_side", "padding_side")
KEPT += ("model_input_names", "model_max_length")


def find(folder: pathlib.Path) -> pathlib.Path | None:
    """Return the file in the folder that `read` reads, or None."""
    return next((file for name in FILES if (file := folder / name).is_file()), None)


def read(path: pathlib.Path) -> dict[str, bytes]:
    """Return a tokenizer.json that gives the ids alone, and a tokenizer_config.json that names the special tokens.

    The second is left out for a tokenizer of bytes or characters. A file with another name than FILES is read without
    its neighbours. Raises UserError if a file is damaged, if the folder defines the tokenizer by code, and if
    transformers must read it and is not installed.
    """
    with disk.reading(path, TypeError, AttributeError):
        content = disk.read_bytes(path)
        library = json.loads(content) if path.name not in FILES[1:] else {"model": None}
        if "model" not in library:
            return {JSON: content}
    files = [path.with_name(name) for name in NEIGHBOURS] if path.name in FILES else []
    contents = {file.name: disk.read_json(file, says="") for file in files if file.is_file()}
    config, specials, additions, model = (contents.get(name, {}) for name in NEIGHBOURS)
    if "added_tokens_decoder" not in config:  # else transformers does not read special_tokens_map.json
        config |= {key: value.get("content") if isinstance(value, dict) else value for key, value in specials.items()}
    if files and (template := path.with_name(TEMPLATE)).is_file():
        with disk.reading(template):
            config["chat_template"] = disk.read_bytes(template).decode()
    if "auto_map" in config:
        raise errors.UserError(f"{path.with_name(CONFIG)}: auto_map names code, which is never executed")
    kind, model_type = config.get("tokenizer_class") or model.get("tokenizer_class"), model.get("model_type")
    kind = str(kind or MODEL_TYPES.get(model_type, f"that of {model_type}")).removesuffix("Fast")
    if model_type == "qwen2" and kind not in PLAIN:  # there transformers uses this class, whatever the file says
        kind = MODEL_TYPES[model_type]
    config = {f"{role}_token": name for role, name in SPECIALS.get(kind, {}).items()} | config
    with disk.reading(path, Exception):  # the library raises Exception for a damaged file
        fields = config | {"added_tokens.json": [*additions]}
        reason = find_difference(library, kind, fields) if library["model"] else path.name
    if reason:
        return convert(path, config, reason)
    return {JSON: content, CONFIG: disk.as_json(config | {"tokenizer_class": FROM_FILE})}


def find_difference(library: Mapping[str, Any], kind: str, fields: Mapping[str, Any]) -> str:
    """Return what may give other ids in transformers than tokenizer.json has alone, or '' if nothing does.

    library: the content of tokenizer.json. kind: the tokenizer's class in transformers, without "Fast". fields: of
    tokenizer_config.json.
    """
    tokens = {token["content"]: token["id"] for token in library.get("added_tokens", [])}
    fields = {f"{role}_token": name for role, name in SPECIALS.get(kind, {}).items()} | dict(fields)
    for name, value in fields.items():
        names_tokens = name.endswith(("_token", "_tokens", "_decoder", ".json")) and not isinstance(value, bool)
        if names_tokens and not all(token in (None, *tokens) for token in list_names(value)):
            return f"{name} = {str(value)[:60]}"
    names = {role: next(list_names(fields.get(f"{role}_token")), None) for role in ("bos", "eos", "cls", "sep")}
    around = make_empty(library).encode("").ids
    for role in ("bos", "eos"):
        adds = fields.get(f"add_{role}_token")
        if adds is not None and adds != (tokens.get(names[role]) in around):
            return f"add_{role}_token = {adds}"
    if kind in PLAIN:
        return ""
    adds_cls = kind in ("BertTokenizer", "RobertaTokenizer")
    decoder = {int(id): {"id": int(id)} | token for id, token in fields.get("added_tokens_decoder", {}).items()}
    is_equal = kind in SPECIALS and describe(library) == describe(expect(kind, fields))
    is_equal &= not adds_cls or around == [tokens[names["cls"]], tokens[names["sep"]]]
    is_equal &= not decoder or [*decoder.values()] == library["added_tokens"]
    return "" if is_equal else f"tokenizer_class = {kind}"


def make_empty(library: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Return a tokenizer without a vocabulary that has the other parts of a tokenizer.json."""
    parts = {name: library.get(name) for name in ("normalizer", "pre_tokenizer", "post_processor")}
    empty = {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": []}}
    return tokenizers.Tokenizer.from_str(json.dumps(empty | parts))


def describe(library: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return what decides the pieces of a text, except the vocabulary, in a form that can be compared."""
    saved = json.loads(make_empty(library).to_str())
    parts = json.dumps([saved["normalizer"], saved["pre_tokenizer"]]).replace(
        '"trim_offsets": false', '"trim_offsets": true'
    )
    model = {name: value for name, value in library["model"].items() if value and name not in ("vocab", "merges")}
    return parts, {"type": "BPE" if "merges" in library["model"] else "WordPiece"} | model


def expect(kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts that a class of SPECIALS gives to a tokenizer.json. fields: of tokenizer_config.json."""
    prefix, is_qwen = bool(fields.get("add_prefix_space")), kind == "Qwen2Tokenizer"
    model: dict[str, Any] = {"type": "BPE", "merges": []}
    if kind == "BertTokenizer":
        switches = {"lowercase": "do_lower_case", "handle_chinese_chars": "tokenize_chinese_chars"}
        switches = {name: fields.get(field, True) for name, field in switches.items()}
        normalizer = {"type": "BertNormalizer", "clean_text": True, "strip_accents": fields.get("strip_accents")}
        model = {"type": "WordPiece", "unk_token": next(list_names(fields["unk_token"]))}
        model |= {"continuing_subword_prefix": "##", "max_input_chars_per_word": 100}
        return {"normalizer": normalizer | switches, "pre_tokenizer": {"type": "BertPreTokenizer"}, "model": model}
    level = {"type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": True, "use_regex": not is_qwen}
    split = {"type": "Split", "pattern": {"Regex": QWEN}, "behavior": "Isolated", "invert": False}
    pieces = {"type": "Sequence", "pretokenizers": [split, level]}
    return {
        "normalizer": {"type": "NFC"} if is_qwen else None,
        "pre_tokenizer": pieces if is_qwen else level,
        "model": model,
    }


def list_names(value: Any) -> Iterator[Any]:
    """Yield the names of the tokens in a field: a name, an object with `content`, or a list or object of them."""
    if isinstance(value, dict) and "content" in value:
        yield value["content"]
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from list_names(item)
    else:
        yield value


def convert(path: pathlib.Path, config: Mapping[str, Any], reason: str) -> dict[str, bytes]:
    """Return the files of the tokenizer that transformers reads. reason: what only transformers reads."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # that there is no PyTorch
    with data_files.require_extra(f"{path} ({reason})"):
        import transformers
    with disk.reading(path, Exception), warnings.catch_warnings():
        # transformers 5.15 reads vocab.txt and vocab.json by a constructor of which the tokenizers library warns.
        warnings.filterwarnings("ignore", r"Deprecated in 0\.9\.0: \w+\.__init__ will not create", DeprecationWarning)
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            str(path.parent), local_files_only=True, trust_remote_code=False
        )
        content = tokenizer.backend_tokenizer.to_str().encode()
        roles = dict(tokenizer.special_tokens_map)
    fields = {name: value for name, value in config.items() if name in KEPT or value is None}
    return {JSON: content, CONFIG: disk.as_json(fields | roles | {"tokenizer_class": FROM_FILE})}

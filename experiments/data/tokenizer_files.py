"""Find and read the files of a tokenizer, published or our own.

A published tokenizer gives the ids of AutoTokenizer in transformers. If tokenizer.json alone decides them, this module
reads it. Otherwise transformers reads the folder, and the result is written as a new tokenizer.json.
"""

import json
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from experiments.data import files as data_files
from experiments.engine import disk, errors

JSON, CONFIG = "tokenizer.json", "tokenizer_config.json"
FILES = (JSON, "vocab.txt", "vocab.json")  # in a folder; the first that exists is read
NEIGHBOURS = (CONFIG, "special_tokens_map.json", "added_tokens.json", "config.json")
PLAIN = ("PreTrainedTokenizerFast", "TokenizersBackend")  # the classes that use tokenizer.json unchanged
# Types of models for which transformers uses the class in tokenizer_config.json. For others it may choose its own.
MODEL_TYPES = ("albert", "bert", "distilbert", "gemma", "gpt2", "llama", "mistral", "qwen3", "roberta", "xlm-roberta")
# Fields of tokenizer_config.json without an influence on ids, except `split_special_tokens`, which is not in JSON.
NEUTRAL = ("tokenizer_class", "split_special_tokens", "clean_up_tokenization_spaces", "chat_template", "name_or_path")
NEUTRAL += ("padding_side", "truncation_side", "model_input_names", "model_max_length", "special_tokens_map_file")
NEUTRAL += ("backend", "is_local", "local_files_only")


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
        content = path.read_bytes()
        library = json.loads(content) if path.name not in FILES[1:] else {"model": None}
        if "model" not in library:
            return {JSON: content}
        tokens = [token["content"] for token in library.get("added_tokens", [])]
    files = [path.with_name(name) for name in NEIGHBOURS] if path.name in FILES else []
    contents = {file.name: disk.read_json(file, says="") for file in files if file.is_file()}
    config, specials, additions, model = (contents.get(name, {}) for name in NEIGHBOURS)
    if "added_tokens_decoder" not in config:  # else transformers does not read special_tokens_map.json
        config |= {key: value.get("content") if isinstance(value, dict) else value for key, value in specials.items()}
    if "auto_map" in config:
        raise errors.UserError(f"{path.with_name(CONFIG)}: auto_map names code, which is never executed")
    kind, model_type = config.get("tokenizer_class") or model.get("tokenizer_class"), model.get("model_type")
    is_plain = kind in PLAIN and model_type in (None, *MODEL_TYPES) or kind is model_type is None
    reason = "" if is_plain else f"tokenizer_class = {kind}, model_type = {model_type}"
    for name, value in (config | {"added_tokens.json": [*additions]}).items():
        if name not in NEUTRAL and not all(token in (None, *tokens) for token in list_names(value)):
            reason = reason or f"{name} = {str(value)[:60]}"
    reason = reason if library["model"] else path.name
    if reason:
        return convert(path, config, reason)
    return {JSON: content, CONFIG: disk.as_json(config | {"tokenizer_class": kind or PLAIN[0]})}


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
    with disk.reading(path, Exception):
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            str(path.parent), local_files_only=True, trust_remote_code=False
        )
        content = tokenizer.backend_tokenizer.to_str().encode()
        roles = dict(tokenizer.special_tokens_map)
    fields = {name: value for name, value in config.items() if name in NEUTRAL or value is None}
    return {JSON: content, CONFIG: disk.as_json(fields | roles | {"tokenizer_class": PLAIN[0]})}

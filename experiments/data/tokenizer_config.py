"""Apply tokenizer_config.json and the files next to it to a tokenizer.json, as AutoTokenizer of transformers 5 does.

A class that these files name, or that follows from the model's type in config.json, replaces parts of the
tokenizer.json. Only the classes in ALIASES are supported.
"""

import base64
import json
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import tokenizers
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers, processors

from experiments.data import vocabulary_files
from experiments.engine import disk, errors

CONFIG, MAP, MODEL = "tokenizer_config.json", "special_tokens_map.json", "config.json"
FROM_FILE = "PreTrainedTokenizerFast"  # the class that uses tokenizer.json unchanged
ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")  # new tokens get their ids in this order
SWITCHES = ("do_lower_case", "strip_accents", "tokenize_chinese_chars", "add_prefix_space", "keep_accents")
SWITCHES += ("legacy", "split_special_tokens")
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
ALBERT = vocabulary_files.WORDPIECE | {"bos": "[CLS]", "eos": "[SEP]", "unk": "<unk>", "pad": "<pad>"}
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


class Rules(NamedTuple):
    """A tokenizer class: its type of model, and its special tokens. `make_parts` returns the parts that it replaces."""

    model: str
    names: Mapping[str, str]  # role -> name of a special token that the config does not name
    around: tuple[str, ...] = ()  # roles of the special tokens around a text; (): as in tokenizer.json


def read(folder: pathlib.Path, default: str = FROM_FILE) -> dict[str, Any]:
    """Return the fields of a folder's tokenizer_config.json, with its `tokenizer_class`.

    Fields of special_tokens_map.json have priority, unless the config lists added tokens. default: the class if no file
    names one. Raises UserError if the class is unknown or a switch is not a boolean.
    """
    config, specials = (
        disk.read_json(folder / name, says="how text becomes tokens") if (folder / name).is_file() else {}
        for name in (CONFIG, MAP)
    )
    for name in SWITCHES:  # "no" would count as true
        is_boolean = isinstance(config.get(name), bool | None)
        errors.refuse((not is_boolean, f"{folder / CONFIG}: {name} = {config.get(name)!r} must be true or false."))
    specials = {} if "added_tokens_decoder" in config else specials
    return config | specials | {"tokenizer_class": choose_class(folder, config, default)}


def choose_class(folder: pathlib.Path, config: Mapping[str, Any], default: str) -> str:
    """Return the class (of RULES, or FROM_FILE) that the config names, or else the model's config.json, or default.

    Raises UserError if the class is unknown.
    """
    name, file = config.get("tokenizer_class"), folder / CONFIG
    if not name and (folder / MODEL).is_file():
        file = folder / MODEL
        model = disk.read_json(file, says="the type of the model")
        kind = model.get("model_type")
        name = model.get("tokenizer_class") or (MODEL_TYPES.get(str(kind), f"of model_type {kind}") if kind else None)
    name = str(name or default).removesuffix("Fast")
    if name not in ALIASES:
        raise errors.UserError(
            f"{file}: tokenizer_class = {name!r} is not one of {', '.join(ALIASES)}. If tokenizer.json alone gives the "
            f"expected ids, set tokenizer_class in {CONFIG} to {FROM_FILE}."
        )
    return ALIASES[name]


def apply(content: bytes, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Return the tokenizer of a tokenizer.json, changed as tokenizer_config.json says.

    content: the bytes of tokenizer.json. config: the fields that `read` returns. Raises ValueError if the config's
    tokenizer_class needs another type of model than tokenizer.json has. The tokenizers library raises Exception for
    damaged content.
    """
    saved, name = json.loads(content), config["tokenizer_class"]
    byte_level = '"type": "ByteLevel"' in json.dumps([saved.get("pre_tokenizer"), saved.get("decoder")])
    rules = None if name == "LlamaTokenizer" and byte_level else RULES.get(name)
    library = tokenizers.Tokenizer.from_str(content.decode())
    kind = saved["model"].get("type")
    if rules and kind not in (rules.model, None):
        raise ValueError(
            f"tokenizer.json has a model of type {kind}, but tokenizer_class = {name!r} needs {rules.model}. If "
            f"tokenizer.json alone gives the expected ids, set tokenizer_class to {FROM_FILE}."
        )
    if rules and "added_tokens_decoder" in config:
        library = tokenizers.Tokenizer.from_str(json.dumps(saved | {"added_tokens": []}))
    if rules:
        precompiled = read_precompiled(saved.get("normalizer"))
        library.normalizer, library.pre_tokenizer, library.decoder = make_parts(name, config, precompiled)
    for token in list_added(config, rules.names if rules else {}):
        if token.content not in {added.content for added in library.get_added_tokens_decoder().values()}:
            library.add_tokens([token])
    if rules and rules.around:
        first, last = (name_special(config, role, rules.names) for role in rules.around)
        around = ((name, library.token_to_id(name)) for name in (last, first))
        library.post_processor = processors.BertProcessing(*around)
    library.encode_special_tokens = bool(config.get("split_special_tokens"))
    return library


def name_special(config: Mapping[str, Any], role: str, names: Mapping[str, str] = {}) -> str | None:
    """Return the name of the special token with this role (bos, eos, ...), or None. names: for roles not in config."""
    token = parse_token(config.get(f"{role}_token", names.get(role)))
    return token and token.content


def list_added(config: Mapping[str, Any], names: Mapping[str, str]) -> Iterator[AddedToken]:
    """Yield the tokens that a config adds, in the order of their new ids. names: for roles not in the config."""
    by_id = config.get("added_tokens_decoder", {})
    yield from (parse_token(by_id[id]) for id in sorted(by_id, key=int))
    roles = [f"{role}_token" for role in ROLES]
    values = [config.get(role, names.get(role.removesuffix("_token"))) for role in roles]
    other_roles = {name: value for name, value in config.items() if name.endswith("_token") and name not in roles}
    values += [value for value in other_roles.values() if isinstance(value, str)]
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    yield from filter(None, map(parse_token, [*values, *(extra.values() if isinstance(extra, dict) else extra)]))


def parse_token(value: Any) -> AddedToken | None:
    """Return the token that a name, or an object with content and flags, describes; None if it is empty."""
    content = value.get("content") if isinstance(value, dict) else value
    flags = {name: bool(value[name]) for name in FLAGS if name in value} if isinstance(value, dict) else {}
    return AddedToken(content, **{"special": True} | flags) if isinstance(content, str) and content else None


def make_parts(name: str, config: Mapping[str, Any], precompiled: list[Any]) -> tuple[Any, Any, Any]:
    """Return the normalizer, the pre-tokenizer and the decoder of a class. precompiled: from `read_precompiled`."""
    prefix, lowercase = config.get("add_prefix_space"), config.get("do_lower_case") is not False
    pieces_to_text = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if name == "BertTokenizer":
        chinese, accents = config.get("tokenize_chinese_chars") is not False, config.get("strip_accents")
        normalizer = normalizers.BertNormalizer(
            handle_chinese_chars=chinese, strip_accents=accents, lowercase=lowercase
        )
        return normalizer, pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    if name in ("GPT2Tokenizer", "RobertaTokenizer"):  # byte-level BPE
        return None, pre_tokenizers.ByteLevel(add_prefix_space=bool(prefix)), decoders.ByteLevel()
    if name == "Qwen2Tokenizer":
        level = pre_tokenizers.ByteLevel(add_prefix_space=bool(prefix), use_regex=False)
        rule = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(QWEN), "isolated"), level])
        return normalizers.NFC(), rule, decoders.ByteLevel()
    if name == "GemmaTokenizer":
        rule = pre_tokenizers.Split(" ", "merged_with_previous")
        return normalizers.Replace(" ", "▁"), rule, decoders.Sequence(pieces_to_text)
    if name == "LlamaTokenizer":
        scheme = "never" if prefix is False else "always" if config.get("legacy") else "first"
        steps = pieces_to_text + ([] if prefix is False else [decoders.Strip(" ", 1, 0)])
        return None, pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False), decoders.Sequence(steps)
    scheme = "always" if config.get("add_prefix_space", True) else "never"  # XLM-RoBERTa and ALBERT
    rule = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(prepend_scheme=scheme)])
    steps = []
    if name == "AlbertTokenizer":
        steps = [normalizers.Replace("``", '"'), normalizers.Replace("''", '"')]
        steps += [] if config.get("keep_accents") else [normalizers.NFKD(), normalizers.StripAccents()]
        steps += [normalizers.Lowercase()] * lowercase
    steps += precompiled
    return normalizers.Sequence(steps) if steps else None, rule, decoders.Metaspace(prepend_scheme=scheme)


def read_precompiled(normalizer: dict | None) -> list[Any]:
    """Return the steps with SentencePiece's table of characters in the normalizer of a tokenizer.json (one or none)."""
    steps = normalizer.get("normalizers", [normalizer]) if normalizer else []
    tables = [step["precompiled_charsmap"] for step in steps if step.get("type") == "Precompiled"]
    return [normalizers.Precompiled(base64.b64decode(table)) for table in tables[:1]]


RULES = {  # by class; `make_parts` has a case for each
    "BertTokenizer": Rules("WordPiece", vocabulary_files.WORDPIECE, ("cls", "sep")),
    "GPT2Tokenizer": Rules("BPE", dict.fromkeys(("bos", "eos", "unk"), "<|endoftext|>")),
    "RobertaTokenizer": Rules("BPE", vocabulary_files.BPE, ("cls", "sep")),
    "LlamaTokenizer": Rules("BPE", {"bos": "<s>", "eos": "</s>", "unk": "<unk>"}),
    "GemmaTokenizer": Rules("BPE", {role: f"<{role}>" for role in ("bos", "eos", "unk", "pad", "mask")}),
    "XLMRobertaTokenizer": Rules("Unigram", vocabulary_files.BPE, ("bos", "eos")),
    "AlbertTokenizer": Rules("Unigram", ALBERT, ("cls", "sep")),
    "Qwen2Tokenizer": Rules("BPE", dict.fromkeys(("eos", "unk", "pad"), "<|endoftext|>")),
}
ALIASES = {name: name for name in RULES} | {
    **dict.fromkeys(("PreTrainedTokenizer", "TokenizersBackend", "PythonBackend"), FROM_FILE),
    "DistilBertTokenizer": "BertTokenizer",
}
MODEL_TYPES = {
    **dict.fromkeys(("bert", "distilbert"), "BertTokenizer"),
    "gpt2": "GPT2Tokenizer",
    "roberta": "RobertaTokenizer",
    "xlm-roberta": "XLMRobertaTokenizer",
    "albert": "AlbertTokenizer",
    **dict.fromkeys(("qwen2", "qwen3"), "Qwen2Tokenizer"),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text"), "GemmaTokenizer"),
    **dict.fromkeys(("llama", "mistral"), FROM_FILE),
}

"""Apply tokenizer_config.json and the files next to it to a tokenizer.json, as AutoTokenizer of transformers 5 does.

A class that is named there, or by the model's type in config.json, replaces parts of the tokenizer.json; other classes
than those of ALIASES are refused, since what they replace is not known here.
"""

import base64
import json
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import tokenizers
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers, processors

from experiments.data import vocabulary_files
from experiments.engine import disk, errors

CONFIG, MAP, MODEL = "tokenizer_config.json", "special_tokens_map.json", "config.json"
FROM_FILE = "PreTrainedTokenizerFast"  # the class that takes tokenizer.json as it is
ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")  # in the order in which new ones get their ids
MORE = "extra_special_tokens", "additional_special_tokens"
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
SWITCHES = ("do_lower_case", "strip_accents", "tokenize_chinese_chars", "add_prefix_space", "keep_accents")
SWITCHES += ("legacy", "split_special_tokens")
ALBERT = vocabulary_files.WORDPIECE | {"bos": "[CLS]", "eos": "[SEP]", "unk": "<unk>", "pad": "<pad>"}
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


class Rules(NamedTuple):
    """What a class replaces: `parts` returns the normalizer, the pre-tokenizer and the decoder for a config."""

    model: str
    names: Mapping[str, str]  # of the specials, if the config does not name them
    parts: Callable[[Mapping[str, Any]], tuple[Any, Any, Any]]
    around: tuple[str, ...] = ()  # the roles of the specials before and after a text; (): as tokenizer.json has them


def read(folder: pathlib.Path, default: str = FROM_FILE) -> dict[str, Any]:
    """Return the fields of a folder's tokenizer_config.json, with its `tokenizer_class`; those of
    special_tokens_map.json come first, unless the config lists added tokens.

    default: the class, if no file names one. Raises UserError if the class is unknown or a switch is not a boolean."""
    config, specials = (
        disk.read_json(folder / name, says="how text becomes tokens") if (folder / name).is_file() else {}
        for name in (CONFIG, MAP)
    )
    for name in SWITCHES:
        if not isinstance(config.get(name), bool | None):
            raise errors.UserError(f"{folder / CONFIG}: {name} = {config[name]!r} must be true or false")
    specials = {} if "added_tokens_decoder" in config else specials
    return config | specials | {"tokenizer_class": choose_class(folder, config, default)}


def choose_class(folder: pathlib.Path, config: Mapping[str, Any], default: str) -> str:
    """Return the class of RULES, or FROM_FILE, that the config names, or else the model's config.json."""
    name, file = config.get("tokenizer_class"), folder / CONFIG
    if not name and (folder / MODEL).is_file():
        file = folder / MODEL
        model = disk.read_json(file, says="the type of the model")
        kind = model.get("model_type")
        name = model.get("tokenizer_class") or (MODEL_TYPES.get(str(kind), f"of model_type {kind}") if kind else None)
    name = str(name or default).removesuffix("Fast")
    if name not in ALIASES:
        wrong = f"{file}: the rules of the tokenizer_class {name!r} are not known here ({', '.join(ALIASES)} are)"
        right = f"Set tokenizer_class in {CONFIG} to {FROM_FILE}, if tokenizer.json alone makes the right ids"
        raise errors.UserError(f"{wrong}. {right}")
    return ALIASES[name]


def apply(content: bytes, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Return the tokenizer of a tokenizer.json with the fields of `read`. Raises ValueError for another kind of model,
    and as the library does for damaged content."""
    saved, name = json.loads(content), config["tokenizer_class"]
    byte_level = '"type": "ByteLevel"' in json.dumps([saved.get("pre_tokenizer"), saved.get("decoder")])
    rules = None if name == "LlamaTokenizer" and byte_level else RULES.get(name)
    made = tokenizers.Tokenizer.from_str(content.decode())
    kind = saved["model"].get("type")
    if rules and kind not in (rules.model, None):
        wrong = f"tokenizer.json has a model of type {kind}, and tokenizer_class = {name!r} needs {rules.model}"
        raise ValueError(f"{wrong}. Set tokenizer_class to {FROM_FILE}, if tokenizer.json makes the right ids")
    if rules and "added_tokens_decoder" in config:
        made = tokenizers.Tokenizer.from_str(json.dumps(saved | {"added_tokens": []}))
    if rules:
        precompiled = precompiled_of(saved.get("normalizer"))
        made.normalizer, made.pre_tokenizer, made.decoder = rules.parts({**config, "precompiled": precompiled})
    for token in added(config, rules.names if rules else {}):
        if token.content not in {known.content for known in made.get_added_tokens_decoder().values()}:
            made.add_tokens([token])
    if rules and rules.around:
        first, last = (named(config, role, rules.names) for role in rules.around)
        around = ((name, made.token_to_id(name)) for name in (last, first))
        made.post_processor = processors.BertProcessing(*around)
    made.encode_special_tokens = bool(config.get("split_special_tokens"))
    return made


def named(config: Mapping[str, Any], role: str, names: Mapping[str, str] = {}) -> str | None:
    """Return the name of the special with that role; None if there is none."""
    token = token_of(config.get(f"{role}_token", names.get(role)))
    return token and token.content


def added(config: Mapping[str, Any], names: Mapping[str, str]) -> Iterator[AddedToken]:
    """Yield the tokens that a config adds, in the order in which new ones get their ids."""
    listed = config.get("added_tokens_decoder", {})
    yield from (token_of(listed[id]) for id in sorted(listed, key=int))
    roles = [f"{role}_token" for role in ROLES]
    values = [config.get(role, names.get(role.removesuffix("_token"))) for role in roles]
    others = {name: value for name, value in config.items() if name.endswith("_token") and name not in roles}
    values += [value for value in others.values() if isinstance(value, str)]
    more = config.get(MORE[0]) or config.get(MORE[1]) or []
    yield from filter(None, map(token_of, [*values, *(more.values() if isinstance(more, dict) else more)]))


def token_of(value: Any) -> AddedToken | None:
    """Return the token that a name, or an object with its content and flags, describes."""
    content = value.get("content") if isinstance(value, dict) else value
    flags = {name: bool(value[name]) for name in FLAGS if name in value} if isinstance(value, dict) else {}
    return AddedToken(content, **{"special": True} | flags) if isinstance(content, str) and content else None


def of_bert(config: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    normalizer = normalizers.BertNormalizer(
        lowercase=config.get("do_lower_case") is not False,
        strip_accents=config.get("strip_accents"),
        handle_chinese_chars=config.get("tokenize_chinese_chars") is not False,
    )
    return normalizer, pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()


def of_bytes(config: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    rule = pre_tokenizers.ByteLevel(add_prefix_space=bool(config.get("add_prefix_space")))
    return None, rule, decoders.ByteLevel()


def of_qwen(config: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    level = pre_tokenizers.ByteLevel(add_prefix_space=bool(config.get("add_prefix_space")), use_regex=False)
    rule = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(QWEN), "isolated"), level])
    return normalizers.NFC(), rule, decoders.ByteLevel()


def of_llama(config: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    prefix = config.get("add_prefix_space") is not False
    scheme = ("always" if config.get("legacy") else "first") if prefix else "never"
    decoder = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    decoder += [decoders.Strip(" ", 1, 0)] if prefix else []
    return None, pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False), decoders.Sequence(decoder)


def of_gemma(config: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return normalizers.Replace(" ", "▁"), pre_tokenizers.Split(" ", "merged_with_previous"), decoder


def of_xlm_roberta(config: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    scheme = "always" if config.get("add_prefix_space", True) else "never"
    split = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(prepend_scheme=scheme)])
    normalizer = normalizers.Sequence(config["precompiled"]) if config["precompiled"] else None
    return normalizer, split, decoders.Metaspace(prepend_scheme=scheme)


def of_albert(config: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    _, *others = of_xlm_roberta(config)
    steps = [normalizers.Replace("``", '"'), normalizers.Replace("''", '"')]
    steps += [] if config.get("keep_accents") else [normalizers.NFKD(), normalizers.StripAccents()]
    steps += [] if config.get("do_lower_case") is False else [normalizers.Lowercase()]
    return normalizers.Sequence([*steps, *config["precompiled"]]), *others


def precompiled_of(normalizer: dict | None) -> list[Any]:
    """Return SentencePiece's table of characters in a tokenizer.json, which classes keep."""
    steps = normalizer.get("normalizers", [normalizer]) if normalizer else []
    tables = [step["precompiled_charsmap"] for step in steps if step.get("type") == "Precompiled"]
    return [normalizers.Precompiled(base64.b64decode(table)) for table in tables[:1]]


RULES = {
    "BertTokenizer": Rules("WordPiece", vocabulary_files.WORDPIECE, of_bert, ("cls", "sep")),
    "GPT2Tokenizer": Rules("BPE", dict.fromkeys(("bos", "eos", "unk"), "<|endoftext|>"), of_bytes),
    "RobertaTokenizer": Rules("BPE", vocabulary_files.BPE, of_bytes, ("cls", "sep")),
    "LlamaTokenizer": Rules("BPE", {"bos": "<s>", "eos": "</s>", "unk": "<unk>"}, of_llama),
    "GemmaTokenizer": Rules("BPE", {role: f"<{role}>" for role in ("bos", "eos", "unk", "pad", "mask")}, of_gemma),
    "XLMRobertaTokenizer": Rules("Unigram", vocabulary_files.BPE, of_xlm_roberta, ("bos", "eos")),
    "AlbertTokenizer": Rules("Unigram", ALBERT, of_albert, ("cls", "sep")),
    "Qwen2Tokenizer": Rules("BPE", dict.fromkeys(("eos", "unk", "pad"), "<|endoftext|>"), of_qwen),
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

"""tokenizer_config.json and other files next to tokenizer.json change ids as in transformers."""

import json
import os
import pathlib
from typing import Any

import pytest
from errors import raises
from libraries import LETTERS, bert, byte_level, gpt2, llama
from small_files import write
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors

from experiments.data import pretrained_tokenizer
from experiments.engine import errors


def roberta(**options: Any) -> Tokenizer:
    tokenizer = byte_level("<s>", "</s>", "<pad>", "<unk>", "<mask>", **options)
    ids = [(name, tokenizer.token_to_id(name)) for name in ("</s>", "<s>")]
    tokenizer.post_processor = processors.RobertaProcessing(*ids, add_prefix_space=False)
    return tokenizer


def unigram(names: list[str], specials: tuple[str, str], **options: Any) -> Tokenizer:
    pieces = [*((name, 0.0) for name in names), *((name, -3.0) for name in ["▁", *LETTERS, "ab", "▁a", "▁ab"])]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=names.index("<unk>")))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    ids = [(name, names.index(name)) for name in specials]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{specials[0]} $A {specials[1]}", special_tokens=ids
    )
    tokenizer.add_special_tokens(names)
    return tokenizer


os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test uses the network
TEXTS = (
    "",
    " ",
    "ab",
    " ab",
    "  ab a b ",
    "AB Ab É é e\u0301 ﬁ",
    "中ab中中",
    "😀 \u0120 \u2581a",
    "a\n\nb\tab",
    "a<s>b </s> ab<mask> a",
    "a [MASK] b[CLS]ab [SEP] [mask]",
    "a<|endoftext|> ab <|x|> new ab",
    "it's 12 ``ab'' ''",
)


def xlmr() -> Tokenizer:
    return unigram(["<s>", "<pad>", "</s>", "<unk>", "<mask>"], ("<s>", "</s>"))


def albert() -> Tokenizer:
    return unigram(["<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]"], ("[CLS]", "[SEP]"))


def qwen() -> Tokenizer:
    library = gpt2()
    digit = pre_tokenizers.Split(Regex(r"\p{N}"), "isolated")
    library.pre_tokenizer = pre_tokenizers.Sequence([digit, pre_tokenizers.ByteLevel(False, use_regex=False)])
    return library


def gemma() -> Tokenizer:
    names = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *LETTERS]
    library = Tokenizer(
        models.BPE({name: i for i, name in enumerate(names)}, [], unk_token="<unk>", byte_fallback=True)
    )
    library.normalizer = normalizers.Replace(" ", "▁")
    library.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
    library.add_special_tokens(names[:5])
    return library


def token(content: str, **changes: Any) -> dict:
    flags = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False, "special": True}
    return {"content": content} | flags | changes


def class_config(name: str, **fields: Any) -> dict:
    return {"tokenizer_config": {"tokenizer_class": name} | fields}


FAST = "PreTrainedTokenizerFast"
MASK = {"__type": "AddedToken"} | token("<mask>", lstrip=True)
SPECIALS_MAP = {"cls_token": "[MASK]"}
ADDED = {"259": token("<|endoftext|>"), "260": token("<|x|>", lstrip=True), "261": token("new", special=False)}
# {case: (function that makes tokenizer.json, the files next to it)}
READABLE = {
    "no config": (bert, {}),
    "BERT": (bert, class_config("BertTokenizer")),
    "BERT cased": (bert, class_config("BertTokenizer", do_lower_case=False)),
    "BERT cased without accents": (bert, class_config("BertTokenizer", do_lower_case=False, strip_accents=True)),
    "BERT Chinese": (bert, class_config("BertTokenizer", tokenize_chinese_chars=False)),
    "BERT without added tokens": (lambda: bert(specials=False), class_config("BertTokenizer")),
    "BERT other specials": (bert, class_config("BertTokenizer", cls_token="[PAD]", sep_token="[MASK]")),
    "BERT new mask": (bert, class_config("BertTokenizer", mask_token="<mask>")),
    "BERT decoder": (bert, class_config("BertTokenizer", added_tokens_decoder={"4": token("[MASK]", lstrip=True)})),
    "config.json": (bert, {"config": {"model_type": "bert"}, "tokenizer_config": {"do_lower_case": False}}),
    "config.json alone": (lambda: bert(False), {"config": {"model_type": "bert"}}),
    "config.json of GPT-2": (lambda: gpt2(prefix=True), {"config": {"model_type": "gpt2"}}),
    "config.json of Llama": (llama, {"config": {"model_type": "llama"}}),
    "fast ignores do_lower_case": (bert, class_config(FAST, do_lower_case=False, add_prefix_space=True)),
    "fast adds": (gpt2, class_config(FAST, added_tokens_decoder=ADDED)),
    "fast mask": (gpt2, class_config(FAST, mask_token="<mask>", pad_token="<pad>")),
    "fast split": (gpt2, class_config(FAST, split_special_tokens=True)),
    "map over config": (bert, class_config("BertTokenizer", cls_token="[SEP]") | {"special_tokens_map": SPECIALS_MAP}),
    "GPT-2 prefix": (gpt2, class_config("GPT2TokenizerFast", add_prefix_space=True)),
    "RoBERTa": (roberta, class_config("RobertaTokenizer")),
    "RoBERTa prefix": (roberta, class_config("RobertaTokenizer", add_prefix_space=True)),
    "Llama": (llama, class_config("LlamaTokenizer")),
    "Llama legacy": (llama, class_config("LlamaTokenizerFast", legacy=True)),
    "Llama new": (lambda: llama(False), class_config("LlamaTokenizer", legacy=False)),
    "Llama no prefix": (llama, class_config("LlamaTokenizer", add_prefix_space=False)),
    "Llama of bytes": (gpt2, class_config("LlamaTokenizerFast", add_prefix_space=True)),
    "XLM-R": (xlmr, class_config("XLMRobertaTokenizer")),
    "XLM-R no prefix": (xlmr, class_config("XLMRobertaTokenizer", add_prefix_space=False)),
    "ALBERT": (albert, class_config("AlbertTokenizer")),
    "ALBERT cased": (albert, class_config("AlbertTokenizer", do_lower_case=False, keep_accents=True)),
    "Qwen": (qwen, class_config("Qwen2Tokenizer")),
    "Gemma": (gemma, class_config("GemmaTokenizer", add_bos_token=True)),
}


def save_files(folder: pathlib.Path, make: Any, files: dict[str, dict]) -> pathlib.Path:
    make().save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("case", READABLE)
def test_ids_equal_those_of_transformers(tmp_path, case):
    transformers = pytest.importorskip(
        "transformers", minversion="5.24", reason="parity with its tokenizers: extra [parity]"
    )
    folder = save_files(tmp_path, *READABLE[case])
    reference, tokenizer = transformers.AutoTokenizer.from_pretrained(folder), pretrained_tokenizer.read(folder)
    assert {text: tokenizer.encode(text).tolist() for text in TEXTS} == {
        text: reference(text)["input_ids"] for text in TEXTS
    }
    assert tokenizer.size == len(reference)
    # The copy has no config.json of the model.
    copy = pretrained_tokenizer.read(write(tmp_path / "run", **tokenizer.files))
    assert [copy.encode(text).tolist() for text in TEXTS] == [tokenizer.encode(text).tolist() for text in TEXTS]
    assert copy.files == tokenizer.files


REFUSED = {
    "T5": (xlmr, class_config("T5TokenizerFast"), "T5Tokenizer"),
    "the user's class": (
        gpt2,
        class_config("MyTokenizer", auto_map={"AutoTokenizer": ["my.MyTokenizer", None]}),
        "MyT",
    ),
    "a type without a class": (gpt2, {"config": {"model_type": "t5"}}, "model_type t5"),
    "another model": (xlmr, class_config("BertTokenizer"), "Unigram"),
    "BERT of bytes": (gpt2, class_config("BertTokenizer"), "BPE"),
    "a switch of text": (bert, class_config("BertTokenizer", do_lower_case="no"), "do_lower_case = 'no'"),
    "a switch of Llama": (llama, class_config("LlamaTokenizer", legacy="no"), "legacy = 'no'"),
    "a switch of a number": (gpt2, class_config("GPT2Tokenizer", add_prefix_space=2), "add_prefix_space = 2"),
    "a class of no text": (gpt2, {"tokenizer_config": {"tokenizer_class": 5}}, "5"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_unknown_classes_are_refused_with_their_file_and_value(tmp_path, case):
    make, files, value = REFUSED[case]
    with raises(errors.UserError, value, ".json"):
        pretrained_tokenizer.read(save_files(tmp_path, make, files))


# Ids of transformers 5.24 for some of these folders, for environments without it: (case, text, ids).
EXPECTED = (
    ("BERT cased", "AB é", [2, 7, 22, 10, 3]),
    ("BERT new mask", "a<mask>", [2, 5, 37, 3]),
    ("BERT other specials", "ab", [0, 33, 4]),
    ("config.json alone", "AB", [2, 33, 3]),
    ("fast adds", "a <|x|>new", [64, 260, 261]),
    ("fast split", "<|x|>a", [27, 91, 87, 91, 29, 64]),
    ("map over config", "a", [4, 5, 3]),
    ("GPT-2 prefix", "ab", [258]),
    ("Llama", "a<s>a", [1, 275, 1, 260]),
    ("Llama legacy", "a<s>a", [1, 275, 1, 275]),
    ("XLM-R no prefix", " ab", [0, 20, 2]),
    ("ALBERT", "É ab", [2, 5, 10, 22, 3]),
    ("Qwen", "e\u0301 12", [127, 102, 220, 16, 17]),
)


@pytest.mark.parametrize(("case", "text", "ids"), EXPECTED)
def test_a_config_gives_the_expected_ids(tmp_path, case, text, ids):
    assert pretrained_tokenizer.read(save_files(tmp_path, *READABLE[case])).encode(text).tolist() == ids

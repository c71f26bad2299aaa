"""tokenizer_config.json and other files next to tokenizer.json change ids as in transformers."""

import json
import os
import pathlib
from typing import Any

import pytest
from errors import raises
from libraries import LETTERS, bert, gpt2, level, llama
from small_files import write
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors

from experiments.data import pretrained_tokenizer
from experiments.engine import errors


def roberta(**how: Any) -> Tokenizer:
    made = level("<s>", "</s>", "<pad>", "<unk>", "<mask>", **how)
    ids = [(name, made.token_to_id(name)) for name in ("</s>", "<s>")]
    made.post_processor = processors.RobertaProcessing(*ids, add_prefix_space=False)
    return made


def unigram(names: list[str], around: tuple[str, str], **how: Any) -> Tokenizer:
    pieces = [*((name, 0.0) for name in names), *((name, -3.0) for name in ["▁", *LETTERS, "ab", "▁a", "▁ab"])]
    made = Tokenizer(models.Unigram(pieces, unk_id=names.index("<unk>")))
    made.normalizer = normalizers.NFKC()
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    ids = [(name, names.index(name)) for name in around]
    made.post_processor = processors.TemplateProcessing(single=f"{around[0]} $A {around[1]}", special_tokens=ids)
    made.add_special_tokens(names)
    return made


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


def classed(name: str, **fields: Any) -> dict:
    return {"tokenizer_config": {"tokenizer_class": name} | fields}


FAST = "PreTrainedTokenizerFast"
MASK = {"__type": "AddedToken"} | token("<mask>", lstrip=True)
SPECIALS_MAP = {"cls_token": "[MASK]"}
ADDED = {"259": token("<|endoftext|>"), "260": token("<|x|>", lstrip=True), "261": token("new", special=False)}
# A function that makes tokenizer.json, and the files next to it.
SAME = {
    "no config": (bert, {}),
    "BERT": (bert, classed("BertTokenizer")),
    "BERT cased": (bert, classed("BertTokenizer", do_lower_case=False)),
    "BERT cased without accents": (bert, classed("BertTokenizer", do_lower_case=False, strip_accents=True)),
    "BERT Chinese": (bert, classed("BertTokenizer", tokenize_chinese_chars=False)),
    "BERT without added tokens": (lambda: bert(specials=False), classed("BertTokenizer")),
    "BERT other specials": (bert, classed("BertTokenizer", cls_token="[PAD]", sep_token="[MASK]")),
    "BERT new mask": (bert, classed("BertTokenizer", mask_token="<mask>")),
    "BERT decoder": (bert, classed("BertTokenizer", added_tokens_decoder={"4": token("[MASK]", lstrip=True)})),
    "config.json": (bert, {"config": {"model_type": "bert"}, "tokenizer_config": {"do_lower_case": False}}),
    "config.json alone": (lambda: bert(False), {"config": {"model_type": "bert"}}),
    "config.json of GPT-2": (lambda: gpt2(prefix=True), {"config": {"model_type": "gpt2"}}),
    "config.json of Llama": (llama, {"config": {"model_type": "llama"}}),
    "fast ignores do_lower_case": (bert, classed(FAST, do_lower_case=False, add_prefix_space=True)),
    "fast adds": (gpt2, classed(FAST, added_tokens_decoder=ADDED)),
    "fast mask": (gpt2, classed(FAST, mask_token="<mask>", pad_token="<pad>")),
    "fast split": (gpt2, classed(FAST, split_special_tokens=True)),
    "map over config": (bert, classed("BertTokenizer", cls_token="[SEP]") | {"special_tokens_map": SPECIALS_MAP}),
    "GPT-2 prefix": (gpt2, classed("GPT2TokenizerFast", add_prefix_space=True)),
    "RoBERTa": (roberta, classed("RobertaTokenizer")),
    "RoBERTa prefix": (roberta, classed("RobertaTokenizer", add_prefix_space=True)),
    "Llama": (llama, classed("LlamaTokenizer")),
    "Llama legacy": (llama, classed("LlamaTokenizerFast", legacy=True)),
    "Llama new": (lambda: llama(False), classed("LlamaTokenizer", legacy=False)),
    "Llama no prefix": (llama, classed("LlamaTokenizer", add_prefix_space=False)),
    "Llama of bytes": (gpt2, classed("LlamaTokenizerFast", add_prefix_space=True)),
    "XLM-R": (xlmr, classed("XLMRobertaTokenizer")),
    "XLM-R no prefix": (xlmr, classed("XLMRobertaTokenizer", add_prefix_space=False)),
    "ALBERT": (albert, classed("AlbertTokenizer")),
    "ALBERT cased": (albert, classed("AlbertTokenizer", do_lower_case=False, keep_accents=True)),
    "Qwen": (qwen, classed("Qwen2Tokenizer")),
    "Gemma": (gemma, classed("GemmaTokenizer", add_bos_token=True)),
}


def saved(folder: pathlib.Path, make: Any, files: dict[str, dict]) -> pathlib.Path:
    make().save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("case", SAME)
def test_ids_are_those_of_transformers(tmp_path, case):
    transformers = pytest.importorskip(
        "transformers", minversion="5.24", reason="parity with its tokenizers: extra [parity]"
    )
    folder = saved(tmp_path, *SAME[case])
    theirs, ours = transformers.AutoTokenizer.from_pretrained(folder), pretrained_tokenizer.read(folder)
    assert {text: ours.encode(text).tolist() for text in TEXTS} == {text: theirs(text)["input_ids"] for text in TEXTS}
    assert ours.size == len(theirs)
    copy = pretrained_tokenizer.read(write(tmp_path / "run", **ours.files))  # without the model's config.json
    assert [copy.encode(text).tolist() for text in TEXTS] == [ours.encode(text).tolist() for text in TEXTS]
    assert copy.files == ours.files


REFUSED = {
    "T5": (xlmr, classed("T5TokenizerFast"), "T5Tokenizer"),
    "the user's class": (gpt2, classed("MyTokenizer", auto_map={"AutoTokenizer": ["my.MyTokenizer", None]}), "MyT"),
    "a type without a class": (gpt2, {"config": {"model_type": "t5"}}, "model_type t5"),
    "another model": (xlmr, classed("BertTokenizer"), "Unigram"),
    "BERT of bytes": (gpt2, classed("BertTokenizer"), "BPE"),
    "a switch of text": (bert, classed("BertTokenizer", do_lower_case="no"), "do_lower_case = 'no'"),
    "a switch of Llama": (llama, classed("LlamaTokenizer", legacy="no"), "legacy = 'no'"),
    "a switch of a number": (gpt2, classed("GPT2Tokenizer", add_prefix_space=2), "add_prefix_space = 2"),
    "a class of no text": (gpt2, {"tokenizer_config": {"tokenizer_class": 5}}, "5"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_unknown_classes_are_refused_with_their_file_and_value(tmp_path, case):
    make, files, value = REFUSED[case]
    with raises(errors.UserError, value, ".json"):
        pretrained_tokenizer.read(saved(tmp_path, make, files))


# Ids by transformers 5.24 for some of these folders, for environments without it.
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
    assert pretrained_tokenizer.read(saved(tmp_path, *SAME[case])).encode(text).tolist() == ids

"""A tokenizer in the files of the hub gives the ids of transformers, or is refused where it is not installed."""

import json
import os
import pathlib
import socket
import sys
from typing import Any

import hypothesis
import numpy as np
import pytest
from errors import raises
from hypothesis import strategies as st
from libraries import BYTES, LETTERS, bert, byte_level, gpt2, llama
from small_files import write
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors

from experiments.config import errors
from experiments.data import corpus as corpora, pretrained_tokenizer, tokenization
from experiments.tools import export


def roberta(**options: Any) -> Tokenizer:
    tokenizer = byte_level("<s>", "</s>", "<pad>", "<unk>", "<mask>", **options)
    ids = [(name, tokenizer.token_to_id(name)) for name in ("</s>", "<s>")]
    tokenizer.post_processor = processors.RobertaProcessing(*ids, add_prefix_space=False)
    return tokenizer


os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test uses the network
REASON = "parity with its tokenizers: extra [hub]"
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
    names = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    pieces = [*((name, 0.0) for name in names), *((name, -3.0) for name in ["▁", *LETTERS, "ab", "▁a", "▁ab"])]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=3))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.NFKC(), pre_tokenizers.Metaspace()
    ids = [("<s>", 0), ("</s>", 2)]
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ids)
    tokenizer.add_special_tokens(names)
    return tokenizer


def qwen() -> Tokenizer:
    library, rule = gpt2(), pre_tokenizers.Split(Regex(export.QWEN), "isolated")
    library.normalizer = normalizers.NFC()
    library.pre_tokenizer = pre_tokenizers.Sequence([rule, pre_tokenizers.ByteLevel(False, use_regex=False)])
    return library


def token(content: str, **changes: Any) -> dict:
    flags = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False, "special": True}
    return {"content": content} | flags | changes


def class_config(name: str, **fields: Any) -> dict:
    return {"tokenizer_config": {"tokenizer_class": name} | fields}


FAST = "PreTrainedTokenizerFast"
MASK = {"__type": "AddedToken"} | token("<mask>", lstrip=True)
SPECIALS_MAP = {"cls_token": "[MASK]"}
UNKNOWN = {"0": token("<unk>")}
ADDED = {"259": token("<|endoftext|>"), "260": token("<|x|>", lstrip=True), "261": token("new", special=False)}
ROBERTA = ["<s>", "<pad>", "</s>", "<unk>", *BYTES, "<mask>"]


def word_pieces() -> dict[str, bytes]:
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *LETTERS, "##b", "##e", "##é", "##中", "ab"]
    return {"vocab.txt": "".join(f"{name}\n" for name in names).encode()}


def pairs(names: Any = (*BYTES, "<|endoftext|>")) -> dict[str, bytes]:
    vocabulary = json.dumps({name: i for i, name in enumerate(names)}).encode()
    return {"vocab.json": vocabulary, "merges.txt": "#version: 0.2\na b\nĠ a\nĠ ab\n".encode()}


# {case: (function that makes a tokenizer.json or the bytes of other files, the files next to it)}
READABLE = {
    "no config": (bert, {}),
    "BERT": (bert, class_config("BertTokenizer")),
    "BERT cased": (bert, class_config("BertTokenizer", do_lower_case=False)),
    "BERT new mask": (bert, class_config("BertTokenizer", mask_token="<mask>")),
    "config.json of GPT-2": (lambda: gpt2(prefix=True), {"config": {"model_type": "gpt2"}}),
    "config.json of Llama": (llama, {"config": {"model_type": "llama"}}),
    "fast ignores do_lower_case": (bert, class_config(FAST, do_lower_case=False, add_prefix_space=True)),
    "fast adds": (gpt2, class_config(FAST, added_tokens_decoder=ADDED)),
    "fast mask": (gpt2, class_config(FAST, mask_token="<mask>", pad_token="<pad>")),
    "fast split": (gpt2, class_config(FAST, split_special_tokens=True)),
    "map over config": (bert, class_config("BertTokenizer", cls_token="[SEP]") | {"special_tokens_map": SPECIALS_MAP}),
    "GPT-2 prefix": (gpt2, class_config("GPT2TokenizerFast", add_prefix_space=True)),
    "RoBERTa": (roberta, class_config("RobertaTokenizer")),
    "Llama": (llama, class_config("LlamaTokenizer")),
    "XLM-R": (xlmr, class_config("XLMRobertaTokenizer")),
    "fast backend": (gpt2, class_config("TokenizersBackend", add_bos_token=None, chat_template="{{ text }}")),
    "fast names": (llama, class_config(FAST, eos_token="</s>", bos_token=None, added_tokens_decoder=UNKNOWN)),
    "fast map": (llama, class_config(FAST, eos_token="<s>") | {"special_tokens_map": {"eos_token": token("</s>")}}),
    "fast flags": (gpt2, class_config(FAST, added_tokens_decoder={"259": token("<|endoftext|>", lstrip=True)})),
    "fast begins": (gpt2, class_config(FAST, bos_token="<|endoftext|>", add_bos_token=True)),
    "fast does not begin": (llama, class_config(FAST, bos_token="<s>", add_bos_token=False)),
    "fast of BERT": (gpt2, class_config(FAST) | {"config": {"model_type": "bert"}}),
    "Qwen published": (qwen, class_config("Qwen2Tokenizer", bos_token=None, split_special_tokens=False)),
    "config.json of Qwen": (qwen, {"config": {"model_type": "qwen2"}}),
    "a run": (gpt2, {"config": {"config": {"experiment": "language"}}}),
    "more tokens": (gpt2, {"added_tokens": {"new": 260}}),
    "vocab.txt": (word_pieces, class_config("BertTokenizer")),
    "vocab.json": (pairs, class_config("GPT2Tokenizer")),
    "vocab.json of RoBERTa": (lambda: pairs(ROBERTA), class_config("RobertaTokenizer", mask_token=MASK)),
}
# tokenizer.json is enough for these.
ALONE = {"no config", "a run", "fast split", "fast map", "config.json of Llama"}
ALONE |= {"fast backend", "fast names", "fast flags", "fast of BERT", "fast ignores do_lower_case"}


def save_files(folder: pathlib.Path, case: str) -> pathlib.Path:
    make, neighbours = READABLE[case]
    made = make()
    write(folder, **(made if isinstance(made, dict) else {"tokenizer.json": made.to_str().encode()}))
    return write(folder, **{f"{name}.json": json.dumps(content).encode() for name, content in neighbours.items()})


def encode(folder: pathlib.Path) -> dict[str, list[int]]:
    tokenizer = pretrained_tokenizer.read(folder)
    return {text: tokenizer.encode(text).tolist() for text in TEXTS}


@pytest.mark.filterwarnings("ignore:Deprecated in 0.9.0:DeprecationWarning")  # of the reference, transformers 5.15
@pytest.mark.parametrize("case", READABLE)
def test_ids_equal_those_of_transformers(tmp_path, case, monkeypatch):
    transformers = pytest.importorskip("transformers", minversion="5.15", reason=REASON)
    folder = save_files(tmp_path, case)
    reference, tokenizer = transformers.AutoTokenizer.from_pretrained(folder), pretrained_tokenizer.read(folder)
    ids = {text: reference(text)["input_ids"] for text in TEXTS}
    assert encode(folder) == ids and tokenizer.size == len(reference)
    names = {role: getattr(reference, f"{role}_token_id") for role in ("bos", "eos", "mask", "pad")}
    assert {role: getattr(tokenizer, role) for role in names} == {
        role: getattr(tokenizer, role) if id is None else id for role, id in names.items()
    }
    # What a run saves has no config.json of the model, and is read without transformers.
    copy = write(tmp_path / "run", **tokenizer.files)
    copied = transformers.AutoTokenizer.from_pretrained(copy)
    assert {text: copied(text)["input_ids"] for text in TEXTS} == ids
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert encode(copy) == ids and pretrained_tokenizer.read(copy).files == tokenizer.files


def test_a_role_without_a_token_stays_without_one(tmp_path):
    pytest.importorskip("transformers", minversion="5.15", reason=REASON)
    qwen().save(str(tmp_path / "tokenizer.json"))
    assert json.dumps(export.QWEN) in (tmp_path / "tokenizer.json").read_text()  # an export of it has no warning
    assert pretrained_tokenizer.read(tmp_path).bos == 259  # <|endoftext|>, the default of the vocabulary
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer", "bos_token": null}')
    chosen = pretrained_tokenizer.read(tmp_path)
    copy = pretrained_tokenizer.read(write(tmp_path / "run", **chosen.files))
    assert (chosen.bos, chosen.eos) == (copy.bos, copy.eos) == (None, 259)


@pytest.mark.parametrize("case", READABLE)
def test_without_transformers_only_what_tokenizer_json_says_alone_is_read(tmp_path, case, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    folder = save_files(tmp_path, case)
    if case not in ALONE:
        with raises(errors.UserError, folder, "transformers", 'pip install -e ".[hub]"'):
            pretrained_tokenizer.read(folder)
        return
    files = pretrained_tokenizer.read(folder).files
    assert files["tokenizer.json"] == (folder / "tokenizer.json").read_bytes()
    copy = write(tmp_path / "run", **files)
    assert encode(copy) == encode(folder) and pretrained_tokenizer.read(copy).files == files


def test_a_class_that_uses_tokenizer_json_unchanged_is_obeyed_also_for_qwen2(tmp_path):
    gpt2().save(str(tmp_path / "tokenizer.json"))
    alone = encode(tmp_path)
    write(tmp_path, **{"config.json": b'{"model_type": "qwen2"}'})
    write(tmp_path, **{"tokenizer_config.json": json.dumps({"tokenizer_class": FAST}).encode()})
    assert encode(tmp_path) == alone  # an export of ours; transformers would take the rules of Qwen2Tokenizer


@pytest.mark.parametrize(
    ("truncates_left", "config", "side"),
    [(False, {}, "right"), (True, {}, "left"), (True, {"truncation_side": "right"}, "right")],
)
def test_a_tokenizer_names_the_side_that_is_cut_and_its_chat_template(tmp_path, truncates_left, config, side):
    library = gpt2()
    if truncates_left:
        library.enable_truncation(5, direction="left")
    library.save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, **{"tokenizer_config.json": json.dumps(config).encode()})
    first = pretrained_tokenizer.read(tmp_path)
    assert (first.truncation_side, first.has_chat_template) == (side, False)
    write(tmp_path, **{"chat_template.jinja": b"{{ messages }}"})
    copy = pretrained_tokenizer.read(write(tmp_path / "run", **pretrained_tokenizer.read(tmp_path).files))
    assert (copy.truncation_side, copy.has_chat_template) == (side, True)
    write(tmp_path, **{"tokenizer_config.json": b'{"truncation_side": "top"}'})
    with raises(errors.UserError, tmp_path, "truncation_side", "top", "left or right"):
        pretrained_tokenizer.read(tmp_path)


# Ids of transformers 5.24 for environments without it: (case, text, ids).
EXPECTED = (
    ("no config", "AB é", [2, 33, 9, 3]),
    ("fast split", "<|x|>a", [27, 91, 87, 91, 29, 64]),
    ("fast names", "a<s>a", [1, 275, 1, 275]),
)


@pytest.mark.parametrize(("case", "text", "ids"), EXPECTED)
def test_a_tokenizer_json_gives_the_expected_ids(tmp_path, case, text, ids):
    assert pretrained_tokenizer.read(save_files(tmp_path, case)).encode(text).tolist() == ids


def test_a_file_of_another_name_is_read_without_its_neighbours(tmp_path):
    folder = save_files(tmp_path, "BERT cased")
    file = (folder / "tokenizer.json").rename(folder / "mine.json")
    assert pretrained_tokenizer.read(file).encode("AB").tolist() == [2, 33, 3]


RULES = {"type": "WordPiece", "vocab": {"a": 0}, "unk_token": "b", "continuing_subword_prefix": "#"}
WITHOUT_UNKNOWN = {"model": RULES | {"max_input_chars_per_word": 9}}
VALID = {"kind": "characters", "characters": "ab", "specials": ["[UNK]"]}
CONTENTS = [b"", b"\xff", b"[]", b"{}", b'{"model": null}']
CONTENTS += [json.dumps(x).encode() for x in (VALID | {"kind": "byte"}, {"kind": "bytes"}, WITHOUT_UNKNOWN)]
DAMAGED = [  # (files, words of the message next to the folder or file)
    *(({"tokenizer.json": content}, ["tokenizer.json"]) for content in CONTENTS),
    ({"tokenizer_config.json": b'{"auto_map": {"AutoTokenizer": ["my.Mine", null]}}'}, ["auto_map", "executed"]),
    ({"tokenizer_config.json": b"{"}, ["tokenizer_config.json"]),
    ({"special_tokens_map.json": b"[]"}, ["special_tokens_map.json"]),
    ({"tokenizer_config.json": b'{"tokenizer_class": 5}'}, ["tokenizer.json"]),
    ({"tokenizer.json": None, "vocab.json": b"{", "merges.txt": b""}, ["vocab.json"]),
    ({"tokenizer.json": None, "vocab.json": b'{"a": 0}'}, ["vocab.json"]),
    ({"tokenizer.json": None, "vocab.txt": b"\xff"}, ["vocab.txt"]),
    ({"tokenizer.json": None}, ["tokenizer.json", "vocab.json"]),  # a folder without a tokenizer
]


@pytest.mark.parametrize(("files", "words"), DAMAGED)
def test_damaged_files_and_code_are_refused(tmp_path, files, words):
    files = {"tokenizer.json": gpt2().to_str().encode()} | files
    write(tmp_path, **{name: content for name, content in files.items() if content is not None})
    with raises(errors.UserError, tmp_path, *words):
        pretrained_tokenizer.read(tmp_path)


def test_a_missing_file_and_a_lone_surrogate_are_refused(tmp_path):
    with raises(errors.UserError, "absent.json"):
        pretrained_tokenizer.read(tmp_path / "absent.json")
    assert pretrained_tokenizer.read(write(tmp_path, **{"tokenizer.json": json.dumps(VALID).encode()})).size == 3
    for chosen in (tokenization.make("bytes", [b"a"]), pretrained_tokenizer.Published(gpt2(), {})):
        with raises(errors.UserError, repr("a\udcff")):
            chosen.encode("a\udcff")


def test_nothing_asks_the_network(tmp_path, monkeypatch):
    pytest.importorskip("transformers", minversion="5.15", reason=REASON)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(socket.socket, "connect", lambda *arguments: pytest.fail("a connection"))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *arguments, **options: pytest.fail("a name of a host"))
    for case in ("config.json of GPT-2", "BERT new mask", "vocab.json"):
        pretrained_tokenizer.read(save_files(tmp_path / case, case))


# Encoding and streaming

TEXT = st.text(st.sampled_from("ab c<é€😀"), max_size=17)


def save_and_read(folder: pathlib.Path, chosen, **configs) -> tokenization.Tokenizer:
    chosen.save(str(folder / "tokenizer.json"))
    for name, value in configs.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return pretrained_tokenizer.read(folder)


def test_word_pieces_are_read_without_the_settings_for_batches(tmp_path):
    library = bert()
    library.enable_padding(length=11)
    library.enable_truncation(4)
    chosen = save_and_read(tmp_path, library)
    ids = chosen.encode("ab [MASK].")
    assert [*map(chosen.name, ids)] == ["[CLS]", "ab", "[MASK]", ".", "[SEP]"] and ids.dtype == np.int32
    assert [*map(chosen.name, chosen.encode("ab b ab b", specials=False))] == ["ab", "b"] * 2
    assert chosen.decode(np.array([*ids, chosen.pad, -1, chosen.size, 10**12])) == "ab."
    facts = chosen.size, chosen.bos, chosen.eos, chosen.mask, chosen.pad
    assert facts == (library.get_vocab_size(), None, None, 4, 0)


@pytest.mark.parametrize(
    ("make", "row", "start"),
    [
        (gpt2, ["a", "<|endoftext|>", "b"], "<|endoftext|>"),
        (llama, ["<s>", "▁a", "<s>", "▁", "b"], "<s>"),
        (bert, ["[CLS]", "a", "[SEP]", "[CLS]", "b", "[SEP]"], "[CLS]"),
    ],
)
def test_the_end_of_text_separates_documents_if_a_text_has_no_other_specials(tmp_path, make, row, start):
    chosen = save_and_read(tmp_path, make())
    for text in ([b"a\0b"], [b"a", b"\0b"]):
        assert [*map(chosen.name, chosen.join(text).tolist())] == row
    assert chosen.name(chosen.document_start) == start and corpora.count_documents(chosen.join([b"a\0b"]), chosen) == 2


@pytest.mark.parametrize("make", [gpt2, llama])
@hypothesis.given(first=TEXT, second=TEXT, ids=st.lists(st.integers(0, 258), max_size=23))
@hypothesis.settings(deadline=None, max_examples=25)
def test_the_library_streams_as_it_decodes(make, first, second, ids):
    """Streaming also works for bytes that are not text."""
    chosen = pretrained_tokenizer.Published(make(), {})
    assert make is llama or "".join(chosen.stream(ids)) == chosen.decode(ids)
    ids, continuation = chosen.encode(first), chosen.encode(second, specials=False)
    assert chosen.decode(ids) == "".join(chosen.stream(ids.tolist())) == first
    assert first + "".join(chosen.stream(iter(continuation), after=ids)) == chosen.decode([*ids, *continuation])
    for piece in chosen.stream(ids):
        assert piece and "\N{REPLACEMENT CHARACTER}" not in piece


ROLES = {"bos_token": None, "eos_token": "</s>", "mask_token": "<unk>", "more_token": "<s>"}
CONFIG, NEWER_CONFIG = {"tokenizer_config": ROLES}, {"tokenizer_config": ROLES | {"added_tokens_decoder": {}}}
SPECIALS = {"special_tokens_map": {"pad_token": "<unk>", "eos_token": {"content": "<s>"}}}


@pytest.mark.parametrize(
    ("make", "configs", "roles"),
    [
        (llama, {}, (1, 2, None, None)),
        (llama, SPECIALS, (1, 1, None, 0)),
        (llama, CONFIG, (None, 2, 0, None)),
        (llama, CONFIG | SPECIALS, (None, 1, 0, 0)),
        (llama, NEWER_CONFIG | SPECIALS, (None, 2, 0, None)),
        (gpt2, {"tokenizer_config": {"model_max_length": 1024}}, (259, 259, None, None)),  # as GPT-2 has it
    ],
)
def test_files_next_to_tokenizer_json_define_the_special_tokens(tmp_path, make, configs, roles):
    chosen = save_and_read(tmp_path, make(), **configs)
    assert (chosen.bos, chosen.eos, chosen.mask, chosen.pad) == roles
    assert {"tokenizer.json", "tokenizer_config.json"} == chosen.files.keys()
    (tmp_path / "tokenizer_config.json").write_text("{")
    with raises(errors.UserError, "tokenizer_config.json"):
        pretrained_tokenizer.read(tmp_path)

"""Older tokenizers (vocab.txt, or vocab.json with merges.txt) give the same ids as transformers."""

import json
import os

import hypothesis
import pytest
from errors import raises
from hypothesis import strategies as st
from small_files import write
from tokenizers import pre_tokenizers

from experiments.data import pretrained_tokenizer
from experiments.engine import errors

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test uses the network
PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "un", "##able", "Un", "e", "é", "##e", "中", "##中", "."]
BYTES = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", "Ġa"]
ROBERTA = ["<s>", "<pad>", "</s>", "<unk>", *BYTES, "<mask>"]
MASK = {"__type": "AddedToken", "content": "<mask>", "lstrip": True, "rstrip": False, "normalized": False}
# {class: (fields of tokenizer_config.json, vocabulary, text, its ids)}
CASES = {
    "BertTokenizer": ({}, PIECES, "Unable é[MASK]中.", [2, 5, 6, 8, 4, 11, 13, 3]),
    "BertTokenizer, cased": ({"do_lower_case": False}, PIECES, "Un un é中中", [2, 7, 5, 9, 11, 11, 3]),
    "BertTokenizer, whole": (
        {"tokenize_chinese_chars": False, "strip_accents": False, "do_lower_case": True},
        PIECES,
        "É中中 unable",
        [2, 9, 12, 12, 5, 6, 3],
    ),
    "GPT2Tokenizer": ({}, [*BYTES, "<|endoftext|>"], "ab a<|endoftext|>", [256, 257, 258]),
    "RobertaTokenizer": ({"mask_token": MASK}, ROBERTA, "ab <mask> a", [0, 260, 262, 261, 2]),
    "RobertaTokenizer, spaced": ({"add_prefix_space": True, "mask_token": MASK}, ROBERTA, "a<mask>", [0, 261, 262, 2]),
}


def save_files(folder, case: str):
    """Write the files of a case, and return their folder."""
    config, words, *_ = CASES[case]
    name = case.split(",")[0]
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name} | config))
    if name == "BertTokenizer":
        (folder / "vocab.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
    else:
        (folder / "vocab.json").write_text(json.dumps({word: i for i, word in enumerate(words)}))
        (folder / "merges.txt").write_text("#version: 0.2\na b\nĠ a\n", encoding="utf-8")
    return folder


@pytest.mark.parametrize("case", CASES)
def test_older_files_are_read_and_kept_as_a_tokenizer_json(tmp_path, case):
    *_, text, ids = CASES[case]
    chosen = pretrained_tokenizer.read(save_files(tmp_path, case))
    assert chosen.encode(text).tolist() == ids
    assert chosen.size == len(CASES[case][1])
    if "<mask>" in text or "[MASK]" in text:
        assert chosen.mask in ids
    copy = pretrained_tokenizer.read(write(tmp_path / "copy", **chosen.files))
    assert copy.encode(text).tolist() == ids and copy.files == chosen.files


@pytest.mark.parametrize("case", CASES)
def test_ids_equal_those_of_transformers(tmp_path, case):
    transformers = pytest.importorskip(
        "transformers", minversion="5.24", reason="parity with its tokenizers: extra [parity]"
    )
    folder = save_files(tmp_path, case)
    reference = getattr(transformers, case.split(",")[0]).from_pretrained(folder)
    tokenizer = pretrained_tokenizer.read(folder)

    @hypothesis.settings(max_examples=60, deadline=None, database=None)
    @hypothesis.given(st.text(st.sampled_from("aUunble éÉe\u0301中.<[]\t")) | st.just(CASES[case][2]))
    def compare(text):
        assert tokenizer.encode(text).tolist() == reference(text)["input_ids"]

    compare()


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"vocab.txt": "[UNK]\n[SEP]\n"}, ("vocab.txt", "[CLS]")),
        ({"vocab.json": "{", "merges.txt": ""}, ("vocab.json",)),
        ({"vocab.json": '{"a": 0}'}, ("vocab.json",)),
        ({"vocab.txt": "\n".join(PIECES), "added_tokens.json": "{}"}, ("added_tokens.json",)),
    ],
)
def test_files_without_a_tokenizer_are_refused(tmp_path, files, words):
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with raises(errors.UserError, *words):
        pretrained_tokenizer.read(tmp_path)

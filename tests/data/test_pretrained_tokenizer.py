"""Tokenizers of published models, read from their files: text to ids and back, and damaged files."""

import json
import pathlib

import hypothesis
import libraries
import numpy as np
import pytest
from errors import raises
from hypothesis import strategies as st

from experiments.config import errors
from experiments.data import corpus as corpora, pretrained_tokenizer, tokenization

TEXT = st.text(st.sampled_from("ab c<é€😀"), max_size=17)


def save_and_read(folder: pathlib.Path, chosen, **configs) -> tokenization.Tokenizer:
    chosen.save(str(folder / "tokenizer.json"))
    for name, value in configs.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return pretrained_tokenizer.read(folder)


def test_word_pieces_are_read_without_the_settings_for_batches(tmp_path):
    library = libraries.bert()
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
        (libraries.gpt2, ["a", "<|endoftext|>", "b"], "<|endoftext|>"),
        (libraries.llama, ["<s>", "▁a", "<s>", "▁", "b"], "<s>"),
        (libraries.bert, ["[CLS]", "a", "[SEP]", "[CLS]", "b", "[SEP]"], "[CLS]"),
    ],
)
def test_the_end_of_text_separates_documents_if_a_text_has_no_other_specials(tmp_path, make, row, start):
    chosen = save_and_read(tmp_path, make())
    for text in ([b"a\0b"], [b"a", b"\0b"]):
        assert [*map(chosen.name, chosen.join(text).tolist())] == row
    assert chosen.name(chosen.document_start) == start and corpora.count_documents(chosen.join([b"a\0b"]), chosen) == 2


@pytest.mark.parametrize("make", [libraries.gpt2, libraries.llama])
@hypothesis.given(first=TEXT, second=TEXT, ids=st.lists(st.integers(0, 258), max_size=23))
@hypothesis.settings(deadline=None, max_examples=25)
def test_the_library_streams_as_it_decodes(make, first, second, ids):
    """Streaming also works for bytes that are not text."""
    chosen = pretrained_tokenizer.Published(make(), {})
    assert make is libraries.llama or "".join(chosen.stream(ids)) == chosen.decode(ids)
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
        (libraries.llama, {}, (1, 2, None, None)),
        (libraries.llama, SPECIALS, (1, 1, None, 0)),
        (libraries.llama, CONFIG, (None, 2, 0, None)),
        (libraries.llama, CONFIG | SPECIALS, (None, 1, 0, 0)),
        (libraries.llama, NEWER_CONFIG | SPECIALS, (None, 2, 0, None)),
        (libraries.gpt2, {"tokenizer_config": {"model_max_length": 1024}}, (259, 259, None, None)),  # as GPT-2 has it
    ],
)
def test_files_next_to_tokenizer_json_define_the_special_tokens(tmp_path, make, configs, roles):
    chosen = save_and_read(tmp_path, make(), **configs)
    assert (chosen.bos, chosen.eos, chosen.mask, chosen.pad) == roles
    assert {"tokenizer.json", "tokenizer_config.json"} == chosen.files.keys()
    (tmp_path / "tokenizer_config.json").write_text("{")
    with raises(errors.UserError, "tokenizer_config.json"):
        pretrained_tokenizer.read(tmp_path)


# Damaged files

VALID = {"kind": "characters", "characters": "ab", "specials": ["[UNK]"]}
WORDS = {"type": "WordPiece", "vocab": {"a": 0}, "unk_token": "b", "continuing_subword_prefix": "#"}
DAMAGED = [b"", b"\xff", b"[]", b"{}", VALID | {"kind": "byte"}, {"kind": "bytes"}, {"model": None}]
DAMAGED += [{"model": WORDS | {"max_input_chars_per_word": 9}}]  # without a token for unknown words


@pytest.mark.parametrize("content", DAMAGED)
def test_a_damaged_file_is_refused_by_its_name(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(json.dumps(VALID))
    assert pretrained_tokenizer.read(tmp_path).size == 3
    (tmp_path / "tokenizer.json").write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    with raises(errors.UserError, tmp_path / "tokenizer.json"):
        pretrained_tokenizer.read(tmp_path)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    with raises(errors.UserError, tmp_path, "tokenizer.json"):
        pretrained_tokenizer.read(tmp_path)
    with raises(errors.UserError, "absent.json"):
        pretrained_tokenizer.read(tmp_path / "absent.json")


def test_a_lone_surrogate_is_refused():
    published = pretrained_tokenizer.Published(libraries.gpt2(), {})
    for chosen in (tokenization.make("bytes", [b"a"]), published):
        with raises(errors.UserError, repr("a\udcff")):
            chosen.encode("a\udcff")

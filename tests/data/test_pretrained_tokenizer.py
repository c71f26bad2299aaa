"""Tokenizers of trained models, read from their files: text to ids and back, and bad files."""

import json
import pathlib

import hypothesis
import libraries
import numpy as np
import pytest
from errors import raises
from hypothesis import strategies as st
from small_files import TABLE, pieces

from experiments.data import pretrained_tokenizer, tokenizer
from experiments.engine import errors

TEXT = st.text(st.sampled_from("ab c<é€😀"), max_size=17)


def saved(folder: pathlib.Path, made, **beside) -> tokenizer.Tokenizer:
    made.save(str(folder / "tokenizer.json"))
    for name, value in beside.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return pretrained_tokenizer.read(folder)


def test_word_pieces_are_read_without_the_settings_for_batches(tmp_path):
    library = libraries.bert()
    library.enable_padding(length=11)
    library.enable_truncation(4)
    made = saved(tmp_path, library)
    ids = made.encode("ab [MASK].")
    assert [*map(made.name, ids)] == ["[CLS]", "ab", "[MASK]", ".", "[SEP]"] and ids.dtype == np.int32
    assert [*map(made.name, made.encode("ab b ab b", specials=False))] == ["ab", "b"] * 2
    assert made.decode(np.array([*ids, made.pad, -1, made.size, 10**12])) == "ab."
    assert (made.size, made.bos, made.eos, made.mask, made.pad) == (library.get_vocab_size(), None, None, 4, 0)


@pytest.mark.parametrize(
    ("make", "row"),
    [
        (libraries.gpt2, ["a", "<|endoftext|>", "b"]),
        (libraries.llama, ["<s>", "▁a", "<s>", "▁", "b"]),
        (libraries.bert, ["[CLS]", "a", "[SEP]", "[CLS]", "b", "[SEP]"]),
    ],
)
def test_two_documents_have_the_end_of_text_between_them_if_nothing_else_is_put_around_a_text(tmp_path, make, row):
    words = saved(tmp_path, make())
    for text in ([b"a\0b"], [b"a", b"\0b"]):
        assert [*map(words.name, words.join(text).tolist())] == row


@pytest.mark.parametrize("make", [libraries.gpt2, libraries.llama])
@hypothesis.given(first=TEXT, second=TEXT, ids=st.lists(st.integers(0, 258), max_size=23))
@hypothesis.settings(deadline=None, max_examples=25)
def test_the_library_streams_as_it_decodes(make, first, second, ids):
    """Also bytes that are no text."""
    made = pretrained_tokenizer.Published(make(), {})
    assert make is libraries.llama or "".join(made.stream(ids)) == made.decode(ids)
    ids, more = made.encode(first), made.encode(second, specials=False)
    assert made.decode(ids) == "".join(made.stream(ids.tolist())) == first
    assert first + "".join(made.stream(iter(more), after=ids)) == made.decode([*ids, *more])
    for piece in made.stream(ids):
        assert piece and "\N{REPLACEMENT CHARACTER}" not in piece


SAID = {"bos_token": None, "eos_token": "</s>", "mask_token": "absent", "pad_token": 5, "more_token": "a"}
MAP = {"pad_token": "<unk>", "eos_token": {"content": "<s>"}}


@pytest.mark.parametrize(
    ("make", "beside", "roles"),
    [
        (libraries.llama, {}, (1, 2, None, None)),
        (libraries.llama, {"special_tokens_map": MAP}, (1, 1, None, 0)),
        (libraries.llama, {"tokenizer_config": SAID}, (None, 2, 277, None)),  # a special that is absent is added
        (libraries.llama, {"tokenizer_config": SAID, "special_tokens_map": MAP}, (None, 1, 277, 0)),
        (
            libraries.llama,
            {"tokenizer_config": SAID | {"added_tokens_decoder": {}}, "special_tokens_map": MAP},
            (None, 2, 277, None),
        ),
        (libraries.gpt2, {"tokenizer_config": {"model_max_length": 1024}}, (259, 259, None, None)),  # as of GPT-2
    ],
)
def test_the_files_beside_say_which_special_is_which(tmp_path, make, beside, roles):
    made = saved(tmp_path, make(), **beside)
    assert (made.bos, made.eos, made.mask, made.pad) == roles
    assert {f"{name}.json" for name in beside} | {"tokenizer.json"} == made.files.keys()
    (tmp_path / "tokenizer_config.json").write_text("{")
    with raises(errors.UserError, "tokenizer_config.json"):
        pretrained_tokenizer.read(tmp_path)


# Bad files.

SAVED = {"kind": "characters", "characters": "ab", "specials": ["[UNK]"]}
WORDS = {"type": "WordPiece", "vocab": {"a": 0}, "unk_token": "b", "continuing_subword_prefix": "#"}
DAMAGED = [b"", b"\xff", b"[]", b"{}", SAVED | {"kind": "byte"}, {"kind": "bytes"}, {"model": None}]
DAMAGED += [{"model": WORDS | {"max_input_chars_per_word": 9}}]  # without a token for the unknown


@pytest.mark.parametrize("content", DAMAGED)
def test_a_damaged_file_is_refused_by_its_name(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(json.dumps(SAVED))
    assert pretrained_tokenizer.read(tmp_path).size == 3
    (tmp_path / "tokenizer.json").write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    with raises(errors.UserError, tmp_path / "tokenizer.json"):
        pretrained_tokenizer.read(tmp_path)


def test_a_folder_has_one_tokenizer_or_says_so(tmp_path):
    with raises(errors.UserError, tmp_path, "tokenizer.json", "tok*.bin"):
        pretrained_tokenizer.read(tmp_path)
    with raises(errors.UserError, "absent.json"):
        pretrained_tokenizer.read(tmp_path / "absent.json")
    (tmp_path / "tok7.bin").write_bytes(pieces(TABLE))
    (tmp_path / "weights.bin").write_bytes(b"")
    assert pretrained_tokenizer.read(tmp_path).size == len(TABLE)
    (tmp_path / "tok11.bin").write_bytes(pieces(TABLE))
    with raises(errors.UserError, 2, "tok11.bin"):
        pretrained_tokenizer.read(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(tokenizer.make("bytes", [b"a"]).files["tokenizer.json"])
    assert pretrained_tokenizer.read(tmp_path).size == 256


def test_half_a_surrogate_is_no_text():
    made = pretrained_tokenizer.read_pieces(pieces(TABLE))
    for each in (made, tokenizer.make("bytes", [b"a"]), pretrained_tokenizer.Published(libraries.gpt2(), {})):
        with raises(errors.UserError, repr("a\udcff")):
            each.encode("a\udcff")

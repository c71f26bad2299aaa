"""Prompts of the tools that look inside a model: texts, and token ids of a model without a tokenizer."""

import numpy as np
import published
import pytest
from errors import raises
from small_files import KING

from experiments.config import errors
from experiments.pretrained import open_model
from experiments.tools import prompts


@pytest.fixture(scope="module")
def masked(tmp_path_factory):
    """Return an open run of 17 tokens at most that predicts masked bytes."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "king.txt").write_bytes(KING)
    fields = {"text.N": 17, "text.source": str(folder / "king.txt"), "text.objective": "masked"}
    return open_model.open(published.write_run(folder / "masked", "language", **fields))


def test_a_text_gives_its_ids_and_the_text_of_each(masked):
    id_N, names = prompts.read_prompt(masked, "A k[MASK]ö")
    assert id_N.dtype == np.int32 and id_N.tolist() == [*b"A k", masked.tokenizer.mask, *"ö".encode()]
    assert names[:4] == ["A", " ", "k", "[MASK]"] and len(names) == len(id_N)
    assert prompts.read_prompt(masked, "x" * 17)[0].size == 17


def test_special_tokens_of_a_published_tokenizer_surround_a_text(tmp_path):
    published.save_bert_with_tokenizer(tmp_path)
    id_N, names = prompts.read_prompt(open_model.open(tmp_path), "word0 [MASK]")
    assert id_N.tolist() == [2, 5, 4, 3] and names == ["[CLS]", "word0", "[MASK]", "[SEP]"]


def test_a_class_token_of_this_project_s_tokenizer_comes_first(tmp_path):
    rows = "".join(f"good {i},praise\nbad {i},blame\n" for i in range(50))
    (tmp_path / "reviews.csv").write_text(f"text,label\n{rows}")
    fields = {"text.N": 9, "text.source": str(tmp_path / "reviews.csv")}
    model = open_model.open(published.write_run(tmp_path / "run", "text_classification", **fields))
    _, names = prompts.read_prompt(model, "good day")
    assert names == ["[CLS]", *"good day"]
    with raises(errors.UserError, "10 tokens", "reads 9"):
        prompts.read_prompt(model, "good days")


def test_a_model_without_a_tokenizer_reads_ids(tmp_path):
    model = open_model.open(published.save(tmp_path, "gpt2"))
    id_N, names = prompts.read_prompt(model, " 5 3\n22 ")
    assert (id_N.dtype, id_N.tolist(), names) == (np.int32, [5, 3, 22], ["5", "3", "22"])
    for prompt in ("5 23", "5 -1", "5 x", "5,3", "99999999999999999999"):
        with raises(errors.UserError, "--prompt", repr(prompt.split()[-1]), "0 to 22", tmp_path):
            prompts.read_prompt(model, prompt)
    with raises(errors.UserError, "--other has 14 tokens", "reads 13"):
        prompts.read_prompt(model, "1 " * 14, "--other")


def test_a_text_without_a_known_letter_is_an_error(tmp_path):
    library = pytest.importorskip("tokenizers", reason="tokenizer.json needs the extra [text]")
    published.save(tmp_path, "gpt2")
    library.Tokenizer(library.models.BPE({"a": 0, "b": 1}, [])).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    model = open_model.open(tmp_path)
    assert prompts.read_prompt(model, "xba")[0].tolist() == [1, 0]
    with raises(errors.UserError, "--prompt has no token"):
        prompts.read_prompt(model, "xyz")


def test_an_empty_prompt_is_an_error(masked):
    for prompt in ("", " \n"):
        with raises(errors.UserError, "--clean is missing or empty", "--clean='A king"):
            prompts.read_prompt(masked, prompt, "--clean")
    with raises(errors.UserError, "18 tokens", "reads 17"):
        prompts.read_prompt(masked, "x" * 18)

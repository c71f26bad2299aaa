"""The tool sample: the text it draws, its end, and errors."""

import contextlib
import functools
import io
import json
import pathlib
import shutil

import jax
import numpy as np
import published
import pytest
import tiny
from errors import raises

from experiments.config import errors
from experiments.data import pretrained_tokenizer, tokenization
from experiments.devices import mesh as meshes
from experiments.folder import log
from experiments.model import checks
from experiments.pretrained import open_model
from experiments.tools import generation, sample
from tfm.attention import mask as masks
from tfm.decode import generate

N = 37
SMALL = {"text__N": N, "model__M": 1, "model__bias": "none", "model__norm": "rms", "model__mlp": "relu"}


def enlarge(folder) -> pathlib.Path:
    """Save large parameters in the run, so that a text depends on the whole context."""
    rng = np.random.default_rng(2)
    params = open_model.open(folder).params
    published.save_checkpoint(folder, 3, jax.tree.map(lambda x: 2 * rng.standard_normal(x.shape, np.float32), params))
    return folder


@pytest.fixture(scope="module")
def byte_run(tmp_path_factory) -> pathlib.Path:
    """Return the folder of a model of bytes."""
    return enlarge(published.write_run(tmp_path_factory.mktemp("causal"), "language", **SMALL))


@functools.cache
def load_forward(path):
    """Return the parameters of a run and its compiled forward pass."""
    model = open_model.open(path)
    return model.params, jax.jit(model.network().apply, static_argnames="mask")


def continue_slowly(path, w_N, *, mask=masks.causal, longest=N, context=N) -> list[int]:
    """Append the most likely tokens, each by a full forward pass over the last tokens, padded to one length."""
    (params, apply), w_N = load_forward(path), list(w_N)
    while len(w_N) < longest:
        last = w_N[-context:]
        w_1N = np.array([last + [0] * (context - len(last))])
        w_N.append(int(np.asarray(apply(params, w_1N, mask=mask)[0])[0, len(last) - 1].argmax()))
    return w_N


def test_text_equals_full_forward_passes_and_is_printed_token_by_token(byte_run, tmp_path, monkeypatch):
    """A prefix model reads its prompt in both directions."""
    folder, pieces = published.copy_with_changes(byte_run, tmp_path / "prefix", text__objective="prefix"), []
    monkeypatch.setattr(log, "say", pieces.append)
    monkeypatch.chdir(tmp_path)
    sample.run(folder, prompt="kings", temperature=0.0, max_new_tokens=N - 5)
    expected = continue_slowly(folder, b"kings", mask=masks.prefix(5))
    tokenizer = pretrained_tokenizer.read(folder)
    assert "".join(pieces) == "kings" + "".join(tokenizer.stream(expected[5:], after=expected[:5])) + "\n"
    assert pieces[0] == "kings" and len(pieces) > 4
    assert not (tmp_path / "runs").exists()  # nothing is written
    with raises(errors.UserError, "max_new_tokens = 33", "context of 37"):
        sample.run(folder, prompt="kings", max_new_tokens=N - 4)


def test_prompts_samples_and_lines_do_not_depend_on_each_other_or_on_the_cache(byte_run, tmp_path, monkeypatch):
    """A text depends only on the seed, and sample i is the first of seed + i."""
    draw = functools.partial(sample.run, byte_run, max_new_tokens=18, temperature=9.0)
    monkeypatch.setattr("sys.stdin", io.StringIO("A king\nA king"))
    with contextlib.redirect_stdout(io.StringIO()) as out:
        texts = draw(prompt=["A king", "w"], seed=4, workdir=tmp_path / "out")
        text = f"--- text 1 of 2 ---\n{texts[0]}\n\n--- text 2 of 2 ---\n{texts[1]}\n"
        assert out.getvalue() == text.translate(log.ESCAPED)
        assert (tmp_path / "out" / "sample.txt").read_bytes().decode() == text
        lines = draw(prompt="-", samples=2, seed=3)
    assert lines[1] == texts[0] and len({*lines}) == 4
    with raises(errors.UserError, tmp_path / "out" / "sample.txt"):
        draw(prompt="A", workdir=tmp_path / "out")
    model, ids, capacities = open_model.open(byte_run), [[*b"A king"], [*b"w"]], []
    options = {"temperature": 9.0, "stop": [], "mask": lambda length_B=None: masks.causal, "mesh": meshes.make(data=1)}
    monkeypatch.setattr(generation, "GROWS", 1)
    growing = generation.Generator(model.network(), model.params, context=N, **options)
    grow, growing.grow = growing.grow, lambda cache, places: (capacities.append(places), grow(cache, places))[1]
    key_B = jax.jit(jax.vmap(jax.random.fold_in, (None, 0)))(jax.random.key(4), np.arange(2))
    parts = zip(*generation.rounds(growing, ids, key_B, steps=18), strict=True)
    tokenizer = pretrained_tokenizer.read(byte_run)
    assert [tokenizer.decode(sum(part, row)) for row, part in zip(ids, parts, strict=True)] == texts
    assert capacities == [24]


def test_beyond_the_context_generation_uses_a_moving_window(byte_run, monkeypatch):
    """Inside the text and inside the prompt, on input lines; the first line is an error."""
    prompts = [b"A king who reads is", b"A king who reads is worth two kings who fight"]  # of 19 and 45 tokens
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(["", *map(bytes.decode, prompts)])))
    outcome = tiny.command(sample, checkpoint=byte_run, prompt="-", max_new_tokens=25, temperature=0.0)
    expected = [continue_slowly(byte_run, text, longest=len(text) + 25) for text in prompts]
    error, texts = outcome.out.split("\n", 1)
    assert error.startswith("error: ") and "--prompt" in error
    tokenizer = pretrained_tokenizer.read(byte_run)
    assert texts == "".join(tokenizer.decode(text).translate(log.ESCAPED) + "\n" for text in expected)


def test_relative_positions_with_a_window_have_no_limit_of_context(tmp_path, monkeypatch):
    monkeypatch.setattr(generate, "window", None)
    settings = {"model__window": 4, "model__position": "none", "model__relative_position": "rotary"}
    folder = enlarge(published.write_run(tmp_path / "run", "language", **SMALL, **settings))
    mask = masks.both(masks.causal, masks.window(4))
    expected = continue_slowly(folder, b"kings", mask=mask, longest=3 * N, context=3 * N)
    with contextlib.redirect_stdout(io.StringIO()):
        text = sample.run(folder, prompt="kings", max_new_tokens=3 * N - 5, temperature=0.0)
    assert text == pretrained_tokenizer.read(folder).decode(expected)
    learned_settings = tiny.settings("language", **settings | {"model__position": "learned"})  # a table of N positions
    assert not checks.has_unlimited_context(learned_settings.model, N=N)


def test_the_text_ends_before_the_stop_string_in_any_pieces():
    text, stop = "one two, twtwo and more", "two"
    for width in range(1, 9):
        pieces = [text[i : i + width] for i in range(0, len(text), width)]
        assert "".join(sample.until(iter(pieces), stop)) == "one "
        assert "".join(sample.until(iter(pieces), "")) == text == "".join(sample.until(iter(pieces), "none"))
        assert "".join(sample.until(iter(pieces), "more!")) == text  # the buffer comes at the end
    assert next(iter(sample.until(iter(["ab", "c"]), "bcd"))) == "a"
    assert next(iter(sample.until(iter(["ab", "c"]), ""))) == "ab"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"samples": 0}, "samples 0"),
        ({"samples": -1}, "samples -1"),
        ({"repetition_penalty": 0.0}, "penalty 0.0"),
        ({"max_new_tokens": -1}, "max_new_tokens -1"),
        ({"prompt": ""}, "--prompt"),
        ({"top_p": 1.5}, "top_p 1.5"),
        ({"seed": -1}, "seed -1"),
        ({"temperature": "nan"}, "temperature nan"),
        ({"propmt": "B"}, "propmt prompt"),
        ({"checkpoint": ""}, "--checkpoint"),
        ({"checkpoint": "absent"}, "absent"),
        ({"checkpoint": "."}, "config.json"),
    ],
)
def test_invalid_flags_are_errors(byte_run, tmp_path, monkeypatch, settings, words):
    monkeypatch.chdir(tmp_path)
    refusal = tiny.refusal(sample, **{"checkpoint": byte_run, "prompt": "A"} | settings)
    assert all(word in refusal for word in words.split())


def test_a_chat_template_is_not_used_and_this_is_said(byte_run, monkeypatch, capsys):
    for has_template in (False, True):
        monkeypatch.setattr(tokenization.Tokenizer, "has_chat_template", has_template)
        sample.run(byte_run, prompt="a", max_new_tokens=1)
        assert ("without the model's chat template" in capsys.readouterr().err) == has_template


def test_a_damaged_run_is_an_error(byte_run, tmp_path):
    def check_error(copy, *parts, trust=()):
        with raises(errors.UserError, *parts):
            sample.run(copy, prompt="A", trust=trust)

    copy = shutil.copytree(byte_run, tmp_path / "a")
    (copy / "tokenizer.json").unlink()
    check_error(copy, "tokenizer.json")
    (copy / "tokenizer.json").write_text(json.dumps({"kind": "bytes", "characters": "", "specials": ["[MASK]"]}))
    check_error(copy, 257, 256)
    copy = published.copy_with_changes(byte_run, tmp_path / "b", model__F=31)
    check_error(copy, "blocks/mlp/W1_FD", "(1, 32, 8)", "(1, 31, 8)")
    shutil.rmtree(tmp_path / "b" / "checkpoints")
    check_error(tmp_path / "b", "checkpoint")
    copy = published.copy_with_changes(byte_run, tmp_path / "c", model__score="no_such_file:s")
    check_error(copy, "model.score", "--trust=no_such_file:s")
    check_error(copy, "no_such_file:s", "import", trust=("no_such_file:s",))
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    check_error(tmp_path / "pytorch_model.bin", "pytorch_model.bin")

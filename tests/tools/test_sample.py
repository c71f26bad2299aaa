"""Text from trained models, from the command: what is drawn, where it ends, and what is refused."""

import contextlib
import functools
import io
import json
import os
import pathlib
import shutil

import jax
import numpy as np
import published
import pytest
import tiny

from experiments import model as models
from experiments.data import pretrained_tokenizer
from experiments.engine import errors, log
from experiments.pretrained import open_model
from experiments.tools import export, sample
from tfm.attention import mask as masks
from tfm.decode import generate

N = 37
SMALL = {"text__N": N, "model__M": 1, "model__bias": "none"}
STORIES = pathlib.Path(os.environ.get("TFM_DATA", "/nowhere")) / "stories260K"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a model of bytes, its parameters large enough to look at what comes later."""
    return published.run(tmp_path_factory.mktemp("causal"), "language", **SMALL)


def enlarged(folder) -> dict:
    """Large parameters, by which a text depends on all that it has: the run's newest from now on."""
    rng = np.random.default_rng(2)
    large = jax.tree.map(lambda x: 2 * rng.standard_normal(x.shape, np.float32), open_model.open(str(folder)).params)
    published.keep(folder, 3, large)
    return large


def use(**values) -> tiny.Outcome:
    return tiny.command(sample, **values)


def refusal(**values) -> str:
    return tiny.refusal(sample, **values)


def continued_slowly(path, w_N, *, mask=masks.causal, longest=N, context=N) -> list[int]:
    """The likeliest words, each by the whole forward pass over the last words before it, padded to one length."""
    made, w_N = open_model.open(str(path)), list(w_N)
    apply = jax.jit(made.network().apply, static_argnames="mask")
    while len(w_N) < longest:
        seen = w_N[-context:]
        padded = np.array([seen + [0] * (context - len(seen))])
        w_N.append(int(apply(made.params, padded, mask=mask)[0][0, len(seen) - 1].argmax()))
    return w_N


def test_text_is_that_of_the_full_forward_pass_and_is_told_as_it_is_drawn(tmp_path, monkeypatch):
    """The prompt is read both ways, as a model wants it that was trained behind prefixes."""
    folder = published.run(tmp_path / "run", "language", **SMALL)
    folder = published.changed(folder, tmp_path / "copy", text__objective="prefix")
    large = enlarged(folder)  # by which a prompt that is read one way is continued otherwise
    newest = open_model.open(str(folder)).params
    assert newest["embed"]["E_WD"][0, 0] == large["embed"]["E_WD"][0, 0]
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(newest))
    said = []
    monkeypatch.setattr(log, "say", said.append)
    monkeypatch.chdir(tmp_path)
    assert use(checkpoint=folder, prompt="kings", temperature=0.0, max_new_tokens=N - 5).code == 0
    slowly = continued_slowly(folder, b"kings", mask=masks.either(masks.causal, masks.prefix(5)))
    words = pretrained_tokenizer.read(folder)
    assert "".join(said) == "kings" + "".join(words.stream(slowly[5:], after=slowly[:5])) + "\n"
    assert said[0] == "kings" and len(said) > 4
    assert not (tmp_path / "runs").exists()  # nothing is written
    wrong = refusal(checkpoint=folder, prompt="kings", max_new_tokens=N - 4)
    assert "33 tokens after a prefix of 5 do not fit into the model's context of 37: 32 do" in wrong


def test_several_prompts_samples_and_lines_are_each_as_alone_also_in_a_cache_that_grows(run, tmp_path, monkeypatch):
    """Chance depends on the seed alone, and a sample is the first of its own one."""
    how = {"temperature": 9.0}
    draw = functools.partial(sample.run, run, max_new_tokens=18, **how)
    monkeypatch.setattr("sys.stdin", io.StringIO("A king\nA king"))
    with contextlib.redirect_stdout(io.StringIO()) as said:  # in a notebook
        texts = draw(prompt=["A king", "w"], seed=4, workdir=tmp_path / "out")
        whole = "\n\n".join(texts) + "\n"
        assert said.getvalue() == whole.translate(log.CONTROL)
        assert (tmp_path / "out" / "sample.txt").read_bytes().decode() == whole
        several = draw(prompt="A king", samples=2, seed=3)
        assert several[0] != several[1] == texts[0] == draw(prompt="A king", seed=4)
        lines = draw(prompt="-", samples=2, seed=3)
        assert lines[:2] == several and len({*lines}) == 4
    assert "is there already" in refusal(checkpoint=run, workdir=tmp_path / "out", prompt="A")
    model, ids, capacities = open_model.open(run), [[*b"A king"], [*b"w"]], []
    how |= {"steps": 18, "stop": [], "mask": lambda length_B=None: masks.causal}
    growing = sample.Generator(model.network(), model.params, context=N, grows=1, **how)
    grow, growing.grow = growing.grow, lambda cache, places: (capacities.append(places), grow(cache, places))[1]
    key_B = jax.numpy.stack([jax.random.fold_in(jax.random.key(4), b) for b in range(2)])
    parts = zip(*sample.rounds(growing, ids, key_B, set()), strict=True)
    words = pretrained_tokenizer.read(run)
    assert [words.decode(sum(part, one)) for one, part in zip(ids, parts, strict=True)] == texts
    assert capacities == [24]


def test_beyond_the_context_the_window_moves(run, tmp_path, monkeypatch):
    """In the midst of the text and from the prompt on, with lines that are typed, of which one cannot be read."""
    run = shutil.copytree(run, tmp_path / "run")
    enlarged(run)
    prompts = [b"A king who reads is", b"A king who reads is worth two kings who fight"]  # of 19 and 45
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(["", *map(bytes.decode, prompts)])))
    outcome = use(checkpoint=run, prompt="-", max_new_tokens=25, temperature=0.0)
    right = [continued_slowly(run, text, longest=len(text) + 25) for text in prompts]
    error, found = outcome.out.split("\n", 1)
    assert error == "error: this model needs a prompt of at least one token: --prompt='...'"
    assert found == "".join(pretrained_tokenizer.read(run).decode(text).translate(log.CONTROL) + "\n" for text in right)


def test_a_cache_goes_on_beyond_the_context_where_words_see_a_window_at_relative_positions(tmp_path, monkeypatch):
    monkeypatch.setattr(generate, "window", None)
    settings = {"model__window": 4, "model__position": "none", "model__relative_position": "rotary"}
    folder = published.run(tmp_path / "run", "language", **SMALL, **settings)
    enlarged(folder)
    near = masks.both(masks.causal, masks.window(4))
    right = continued_slowly(folder, b"kings", mask=near, longest=3 * N, context=3 * N)
    with contextlib.redirect_stdout(io.StringIO()):
        text = sample.run(folder, prompt="kings", max_new_tokens=3 * N - 5, temperature=0.0)
    assert text == pretrained_tokenizer.read(folder).decode(right)
    learned = tiny.settings("language", **settings | {"model__position": "learned"})  # which have an end
    assert not models.endless(learned.model, N=N)


def test_the_text_ends_before_the_stop_however_it_comes():
    text, stop = "one two, twtwo and more", "two"
    for width in range(1, 9):
        pieces = [text[i : i + width] for i in range(0, len(text), width)]
        assert "".join(sample.until(iter(pieces), stop)) == "one "
        assert "".join(sample.until(iter(pieces), "")) == text == "".join(sample.until(iter(pieces), "none"))
        assert "".join(sample.until(iter(pieces), "more!")) == text  # what was held back is told at the end
    assert next(iter(sample.until(iter(["ab", "c"]), "bcd"))) == "a"
    assert next(iter(sample.until(iter(["ab", "c"]), ""))) == "ab"


def test_control_characters_are_not_sent_to_the_terminal(capsys):
    log.say("a\x1b[2J\tb\n\x9b\x7f")
    assert capsys.readouterr().out == "a\ufffd[2J\tb\n\ufffd\ufffd"
    with io.TextIOWrapper(io.BytesIO(), encoding="ascii") as out, contextlib.redirect_stdout(out):
        log.say("a\xe9b\udc80")
        assert out.buffer.getvalue() == b"a?b?"


@pytest.mark.skipif(not STORIES.is_dir(), reason="TFM_DATA names no folder with stories260K")
def test_stories260k_tells_its_story_and_so_does_its_export(tmp_path):
    story = (STORIES / "greedy.txt").read_text(encoding="utf-8")
    path, stop = STORIES / "stories260K.bin", story[-12:-2]
    before = f"{story[: story.index(stop)]}\n"
    assert len(before) > len(story) - 14
    assert use(checkpoint=path, temperature=0.0, max_new_tokens=200, stop=stop) == (0, before, "")
    outcome = tiny.command(export, checkpoint=path, family="llama", workdir=tmp_path / "out")
    assert (outcome.code, outcome.err) == (0, "") and "tok512.bin" in outcome.out
    copy = open_model.open(tmp_path / "out")
    assert (
        open_model.words(copy).encode(story).tolist() == open_model.words(open_model.open(path)).encode(story).tolist()
    )
    made = open_model.open(str(path))
    words, text = open_model.words(made), story.removesuffix("\n")
    ids = words.encode(text)
    assert words.decode(ids) == text == "".join(words.stream(ids)) and ids[0] == words.bos
    assert len(ids) == 201  # <s> and 200 words


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"prompt": "A", "samples": 0}, "samples must be at least 1, and 0 is not"),
        ({"prompt": "A", "samples": 2, "temperature": 0.0}, "temperature = 0 all 2 samples would be the same"),
        ({"prompt": "A", "repetition_penalty": 0.0}, "penalty must be a positive number"),
        ({"prompt": "A king", "max_new_tokens": 1_000_001}, "max_new_tokens must be at most 1,000,000"),
        ({}, "a prompt of at least one token"),
        ({"prompt": "A", "json": "file"}, "--json is for --topology"),
        ({"prompt": "A", "top_p": 0.0}, "top_p must be above 0"),
        ({"prompt": "A", "seed": -1}, "the seed must lie between 0"),
        ({"prompt": "A", "temperature": "nan"}, "temperature = nan is no number that can be computed with"),
        ({"prompt": "A", "propmt": "B"}, "Unknown command line flag 'propmt'. Did you mean: prompt"),
    ],
)
def test_what_cannot_be_sampled_is_refused_in_a_sentence(run, settings, words):
    with pytest.raises(errors.UserError, match=words):
        raise errors.UserError(refusal(checkpoint=run, **settings))


def test_what_is_no_trained_model_is_refused_in_a_sentence(run, tmp_path):
    def told(checkpoint, **more):
        return refusal(prompt="A", checkpoint=checkpoint, **more)

    assert "--checkpoint=PATH" in refusal(prompt="A")
    assert "there is no" in told(tmp_path / "absent") and "config.json" in told(tmp_path)
    copy = shutil.copytree(run, tmp_path / "a")
    (copy / "tokenizer.json").unlink()
    assert "has neither tokenizer.json nor" in told(copy)
    (copy / "tokenizer.json").write_text(json.dumps({"kind": "bytes", "characters": "", "specials": ["[MASK]"]}))
    assert "has 257 words, and the model 256" in told(copy)
    copy = published.changed(run, tmp_path / "b", model__F=31)
    assert "blocks/mlp/W1_FD has shape (1, 32, 8) and not (1, 31, 8)" in told(copy)
    shutil.rmtree(copy / "checkpoints" / "2" / "state")
    assert "is damaged" in told(copy)
    shutil.rmtree(copy / "checkpoints")
    assert "has no checkpoint" in told(copy)
    saved = json.loads((copy / "config.json").read_text())
    del saved["config"]["text"]
    (copy / "config.json").write_text(json.dumps(saved))
    shutil.copytree(run / "checkpoints", copy / "checkpoints")
    assert 'damaged: it has no "text.' in told(copy)
    (copy / "config.json").write_text(json.dumps({"config": saved["config"] | {"experiment": []}}))
    assert '"experiment" must be of type str' in told(copy)
    assert "text.objective" in told(published.changed(run, tmp_path / "d", text__objective="x"))
    copy = published.changed(run, tmp_path / "c", model__score="no_such_file:s")
    assert "a program that would be run" in told(copy)
    assert 'score "no_such_file:s" cannot be imported' in told(copy, trust="no_such_file:s")
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    assert "can run any program" in told(tmp_path / "pytorch_model.bin")

"""Trained models in use, from the command: text, hidden words, classes, and other people's files."""

import contextlib
import dataclasses
import importlib
import io
import json
import os
import pathlib
import shutil
import struct
import time
import zlib

import jax
import numpy as np
import published
import pytest
import tiny

from configs import base
from experiments import language
from experiments import model as models
from experiments.data import image_file, images, pretrained_tokenizer, tokenizer
from experiments.engine import by_name, checkpoint, errors, log
from experiments.engine import run as engine_run
from experiments.pretrained import open_model
from experiments.tools import export, fill, sample
from tfm import embed, head
from tfm.attention import mask as masks
from tfm.decode import kv_cache

SMALL = {**tiny.MODEL, "train.steps": 2, "train.batch_size": 8, "optim.warmup_steps": 1, "train.evaluate_batch": 512}
SMALL |= {"optim.learning_rate": 0.05}
N = 17
BERT = {"text.objective": "masked", "text.transform": True, "model.segments": 1, "model.block": "post_norm"}
BERT |= {"model.embed_norm": True, "model.final_norm": False}
RUNS = {
    "causal": ("language", {"text.N": N}),
    "masked": ("language", {"text.N": N} | BERT),
    "image": ("vision", {"image.patch": 4, "image.head": "class_token"}),
}
STORIES = pathlib.Path(os.environ.get("TFM_DATA", "/nowhere")) / "stories260K"


@pytest.fixture(scope="module")
def run_of(tmp_path_factory):
    """A function from the name of a run to its folder: the causal one is trained, the others have drawn parameters."""
    folders = {}

    def run(name):
        if name not in folders:
            folder, (experiment, changes) = tmp_path_factory.mktemp(name), RUNS[name]
            (folder / "text.txt").write_bytes(tiny.TEXT)
            changes = SMALL | changes | ({"text.source": str(folder / "text.txt")} if experiment == "language" else {})
            folders[name] = (trained if name == "causal" else drawn)(folder, experiment, changes)
        return folders[name]

    return run


def trained(folder, experiment, changes):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("experiments.engine.compilation.measured_peak", lambda *, devices: 1e9)
        patch.setattr(language, "figures", lambda *_: [])
        outcome = tiny.run(
            "--config", tiny.config_file(folder, experiment, **changes), "--workdir", str(folder / "run")
        )
    assert (outcome.code, outcome.err) == (0, "")
    return folder / "run"


def drawn(folder, experiment, changes):
    """What a run leaves, its parameters normal numbers."""
    settings = tiny.settings(experiment, **changes)
    with contextlib.redirect_stdout(io.StringIO()):
        work = by_name.experiment(experiment).prepare(settings, engine_run.devices(settings))
    keep(folder, 2, tiny.drawn(work.task))
    (folder / "config.json").write_text(json.dumps({"config": settings.to_dict()}))
    for name, content in work.files.items():
        (folder / name).write_bytes(content)
    return folder


def keep(folder, step, params):
    """A checkpoint of these parameters."""
    (folder / "checkpoints").mkdir(exist_ok=True)
    saves = checkpoint.Checkpoints(folder / "checkpoints", keep=2)
    saves.save(step, {"params": params})
    saves.close()


def changed(folder, copy, **values):
    """A copy of a run whose config.json says something else."""
    shutil.copytree(folder, copy)
    saved = json.loads((copy / "config.json").read_text())
    for key, value in values.items():
        section, name = key.split("__")
        saved["config"][section][name] = value
    (copy / "config.json").write_text(json.dumps(saved))
    return copy


def use(name, *folder, **values):
    """The command of experiments/tools/<name>.py."""
    values |= {"workdir": folder[0]} if folder else {}
    return tiny.command(importlib.import_module(f"experiments.tools.{name}"), **values)


def refusal(name, *folder, **settings) -> str:
    outcome = use(name, *folder, **settings)
    assert outcome.code == 2 and outcome.out == "" and outcome.err.startswith("error: ")
    assert outcome.err.count("\n") == 1
    return outcome.err


def opened(path):
    """(apply, params) of a language model."""
    made = open_model.open(str(path))
    return jax.jit(made.network().apply, static_argnames="mask"), made.params


def continued_slowly(path, w_N, *, until: int, prefix: int = 0) -> list[int]:
    """The likeliest words, each by the whole forward pass over all words before it, padded to one length."""
    apply, params = opened(path)
    mask = masks.either(masks.causal, masks.prefix(prefix))
    w_N = list(w_N)
    while len(w_N) < until:
        padded = np.array([w_N + [0] * (until - len(w_N))])
        w_N.append(int(apply(params, padded, mask=mask)[0][0, len(w_N) - 1].argmax()))
    return w_N


def test_a_run_keeps_what_its_use_needs(run_of):
    kept = json.loads((run_of("causal") / "tokenizer.json").read_text())
    assert kept == {"kind": "bytes", "characters": "", "specials": []}
    assert pretrained_tokenizer.read(run_of("masked")).mask == 256
    described = json.loads((run_of("image") / "data.json").read_text())
    assert described["image"] == [8, 8, 1] and described["values"] == [0, 16]
    assert described["classes"] == [str(digit) for digit in range(10)]
    digits = images.load("digits")
    np.testing.assert_allclose(described["mean"], digits.train_image_BYXZ.mean(), rtol=1e-5)


def test_the_newest_checkpoint_is_opened_whatever_devices_wrote_it(run_of):
    folder = run_of("causal") / "checkpoints"
    assert checkpoint.newest(folder) == 2 and checkpoint.newest(folder / "absent") is None
    params = open_model.open(str(run_of("causal"))).params
    summary = json.loads((run_of("causal") / "summary.json").read_text())
    assert checkpoint.digest(params) == summary["params_sha256"]
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize("kind", ["causal", "prefix"])
def test_text_is_that_of_the_full_forward_pass_and_is_told_as_it_is_drawn(run_of, tmp_path, monkeypatch, kind):
    folder = changed(run_of("causal"), tmp_path / "copy", text__objective=kind)
    rng = np.random.default_rng(1)  # two steps do not teach a model to look at what comes later
    large = jax.tree.map(lambda x: rng.standard_normal(x.shape, np.float32), open_model.open(str(folder)).params)
    keep(folder, 3, large)
    monkeypatch.setattr(sample, "AT_ONCE", 3)
    said = []
    monkeypatch.setattr(log, "say", said.append)
    monkeypatch.chdir(tmp_path)
    assert use("sample", checkpoint=folder, prompt="kings", temperature=0.0).code == 0
    assert open_model.open(str(folder)).params["embed"]["E_WD"][0, 0] == large["embed"]["E_WD"][0, 0]  # the newest
    slowly = continued_slowly(folder, b"kings", until=N, prefix=5 if kind == "prefix" else 0)
    words = pretrained_tokenizer.read(folder)
    assert "".join(said) == "kings" + "".join(words.stream(slowly[5:], after=slowly[:5])) + "\n"
    assert said[0] == "kings" and len(said) > 4
    assert not (tmp_path / "runs").exists()  # nothing is written


def test_several_prompts_at_once_are_each_as_alone(run_of, tmp_path):
    greedy = {"checkpoint": run_of("causal"), "max_new_tokens": 7, "temperature": 0.0}
    together = use("sample", tmp_path / "out", **greedy, prompt=["A king", "w"])
    alone = [use("sample", **greedy, prompt=text).out for text in ("A king", "w")]
    assert together == (0, alone[0] + "\n" + alone[1], "")
    assert (tmp_path / "out" / "sample.txt").read_text(encoding="utf-8") == together.out
    assert "is there already" in refusal("sample", tmp_path / "out", **greedy, prompt="A")
    with contextlib.redirect_stdout(io.StringIO()) as said:  # in a notebook
        texts = sample.run(run_of("causal"), prompt=["A king", "w"], max_new_tokens=7, temperature=0.0)
    assert "\n\n".join(texts) + "\n" == together.out == said.getvalue()


def test_a_cache_that_grows_changes_no_text_and_chance_depends_on_the_seed_alone(run_of, monkeypatch):
    how = {"checkpoint": run_of("causal"), "prompt": ["A king", "w"], "temperature": 9.0}
    at_once = use("sample", **how, seed=1).out
    assert use("sample", **how, seed=2).out != at_once
    capacities, grow = [], kv_cache.grow
    monkeypatch.setattr(kv_cache, "grow", lambda cache, n: (capacities.append(n), grow(cache, n))[1])
    monkeypatch.setattr(sample, "GROWS", 1)
    monkeypatch.setattr(sample, "AT_ONCE", 2)
    assert use("sample", **how, seed=1).out == at_once and capacities == [10, 15, N + 2]


def test_the_text_ends_before_the_stop_however_it_comes():
    text, stop = "one two, twtwo and more", "two"
    for width in range(1, 9):
        pieces = [text[i : i + width] for i in range(0, len(text), width)]
        found = list(sample.until(iter(pieces), stop))
        assert "".join(found) == "one "
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
def test_stories260k_tells_its_story_through_the_cache_and_without_it():
    story = (STORIES / "greedy.txt").read_text(encoding="utf-8")
    path = STORIES / "stories260K.bin"
    outcome = use("sample", checkpoint=path, temperature=0.0, max_new_tokens=200)
    assert (outcome.code, outcome.err, outcome.out) == (0, "", story)
    begun = {"prompt": "Once upon a time", "stop": "the park", "temperature": 0.0}
    assert use("sample", checkpoint=path, **begun).out == story.split("the park")[0] + "\n"
    ids = open_model.words(open_model.open(str(path))).encode(story.removesuffix("\n"))
    apply, params = opened(path)
    np.testing.assert_array_equal(apply(params, ids[None, :-1], mask=masks.causal)[0][0].argmax(-1), ids[1:])
    assert len(ids) == 201  # <s> and 200 words


@pytest.mark.parametrize(
    ("kind", "settings", "words"),
    [
        ("causal", {"prompt": "A king who reads is"}, "prompt has 19 tokens, and the context of the model holds 17"),
        (
            "causal",
            {"prompt": "A king", "max_new_tokens": 12},
            "12 tokens after a prompt of 6 .* context of 17: 11 do",
        ),
        ("causal", {}, "a prompt of at least one token"),
        ("causal", {"prompt": "A", "top_p": 2.0}, "top_p must be a probability"),
        ("causal", {"prompt": "A", "top_p": 0.0}, "top_p must be above 0"),
        ("causal", {"prompt": "A", "seed": -1}, "the seed must lie between 0"),
        ("causal", {"prompt": "A", "temperature": "nan"}, "temperature = nan is no number that can be computed with"),
        ("causal", {"prompt": "A", "propmt": "B"}, "Unknown command line flag 'propmt'. Did you mean: prompt"),
        ("masked", {"prompt": "A"}, "a model that predicts the next word is needed .* fills hidden words in"),
        ("image", {"prompt": "A"}, "tells the classes of images"),
    ],
)
def test_what_cannot_be_sampled_is_refused_in_a_sentence(run_of, kind, settings, words):
    with pytest.raises(errors.UserError, match=words):
        raise errors.UserError(refusal("sample", checkpoint=run_of(kind), **settings))


def test_what_is_no_trained_model_is_refused_in_a_sentence(run_of, tmp_path):
    assert "--checkpoint=PATH" in refusal("sample", prompt="A")
    assert "there is no" in refusal("sample", prompt="A", checkpoint=tmp_path / "absent")
    assert "config.json" in refusal("sample", prompt="A", checkpoint=tmp_path)
    copy = shutil.copytree(run_of("causal"), tmp_path / "a")
    (copy / "tokenizer.json").unlink()
    assert "has neither tokenizer.json nor" in refusal("sample", prompt="A", checkpoint=copy)
    more = {"kind": "bytes", "characters": "", "specials": ["[MASK]"]}
    (copy / "tokenizer.json").write_text(json.dumps(more))
    assert "has 257 words, and the model 256" in refusal("sample", prompt="A", checkpoint=copy)
    copy = changed(run_of("causal"), tmp_path / "b", model__F=31)
    assert "blocks/mlp/W1_FD has shape (2, 32, 8) and not (2, 31, 8)" in refusal("sample", prompt="A", checkpoint=copy)
    saved = copy / "checkpoints" / "2" / "state"
    shutil.rmtree(saved)
    assert "is damaged" in refusal("sample", prompt="A", checkpoint=copy)
    shutil.rmtree(copy / "checkpoints")
    assert "has no checkpoint" in refusal("sample", prompt="A", checkpoint=copy)
    saved = json.loads((copy / "config.json").read_text())
    del saved["config"]["text"]
    (copy / "config.json").write_text(json.dumps(saved))
    shutil.copytree(run_of("causal") / "checkpoints", copy / "checkpoints")
    assert "damaged, or of an older version: no 'text'" in refusal("sample", prompt="A", checkpoint=copy)
    copy = changed(run_of("causal"), tmp_path / "c", model__score="payload:s")
    code = {"trust": "payload:s"}
    assert "a program that would be run" in refusal("sample", prompt="A", checkpoint=copy)
    assert 'score "payload:s" cannot be imported' in refusal("sample", prompt="A", checkpoint=copy, **code)
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    assert "can run any program" in refusal("sample", prompt="A", checkpoint=tmp_path / "pytorch_model.bin")


def test_a_cut_checkpoint_is_refused_in_a_sentence_alone(run_of, tmp_path, capfd):
    copy = shutil.copytree(run_of("causal"), tmp_path / "copy")
    for file in (copy / "checkpoints" / "2" / "state").rglob("d/*"):
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    assert "is damaged" in refusal("sample", prompt="A", checkpoint=copy)
    time.sleep(0.2)  # what reads in other threads would be done by then
    assert capfd.readouterr() == ("", "")


# Hidden words.


def test_hidden_words_are_filled_in_with_their_probabilities(run_of, tmp_path):
    outcome = use("fill", tmp_path / "out", checkpoint=run_of("masked"), prompt="A k[MASK]ng [MASK]")
    assert (outcome.code, outcome.err) == (0, "")
    apply, params = opened(run_of("masked"))
    id_N = np.array([*b"A k", 256, *b"ng ", 256])
    p_NW = np.asarray(jax.nn.softmax(apply(params, id_N[None], mask=None)[0][0]))
    text, first, second = outcome.out.splitlines()
    words = pretrained_tokenizer.read(run_of("masked"))
    last = words.decode([p_NW[7].argmax()])
    assert text == "A k" + words.decode([p_NW[3].argmax()]) + "ng " + (last.lstrip() or last)
    for line, n, p_W in ((first, 1, p_NW[3]), (second, 2, p_NW[7])):
        shown = ", ".join(f"{words.decode([w])!r} {p_W[w]:.3f}" for w in np.argsort(-p_W)[:5])
        assert line == f"  [MASK] {n}: {shown}"
    assert (tmp_path / "out" / "filled.txt").read_text(encoding="utf-8") == outcome.out
    assert "must have a [MASK]" in refusal("fill", checkpoint=run_of("masked"), prompt="A king")
    assert "fills hidden words in is needed" in refusal("fill", checkpoint=run_of("causal"), prompt="A [MASK]")
    assert "has 18 tokens" in refusal("fill", checkpoint=run_of("masked"), prompt="[MASK]" + "A" * N)
    assert "\x1b" not in use("fill", checkpoint=run_of("masked"), prompt="\x1b[2J[MASK]").out


def test_a_published_bert_fills_words_in(tmp_path):
    library = pytest.importorskip("tokenizers", reason="tokenizer.json needs the extra [text]")
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocab = {word: i for i, word in enumerate([*specials, *(f"word{i}" for i in range(published.W - 5))])}
    made = library.Tokenizer(library.models.WordLevel(vocab, unk_token="[UNK]"))
    made.pre_tokenizer = library.pre_tokenizers.Whitespace()
    made.add_special_tokens(specials)
    made.post_processor = library.processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    published.save(tmp_path, "bert")
    made.save(str(tmp_path / "tokenizer.json"))
    outcome = use("fill", checkpoint=tmp_path, prompt="word3   [MASK] word0")
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.startswith("word3   ") and outcome.out.splitlines()[0].endswith(" word0")
    apply, params = opened(tmp_path)
    l_W = np.asarray(apply(params, np.array([[2, 8, 4, 5, 3]]), mask=None)[0][0, 2])
    assert f"{made.decode([int(l_W.argmax())], skip_special_tokens=True)!r}" in outcome.out.splitlines()[1]
    assert f"{np.exp(l_W).max() / np.exp(l_W).sum():.3f}" in outcome.out
    bare = {name: array for name, array in published.tensors("bert").items() if not name.startswith("cls.")}
    published.save(tmp_path / "bare", "bert", bare)
    assert "ends before its head" in refusal("fill", checkpoint=tmp_path / "bare", prompt="[MASK]")
    assert "predicts the next word is needed" in refusal("sample", checkpoint=tmp_path, prompt="word3")


def test_the_words_of_a_text_stay_and_a_special_has_its_name():
    library = pytest.importorskip("tokenizers", reason="tokenizer.json needs the extra [text]")
    names = ["[UNK]", "[MASK]", "the", "king", "##dom"]
    made = library.Tokenizer(library.models.WordPiece({name: i for i, name in enumerate(names)}, unk_token="[UNK]"))
    made.normalizer = library.normalizers.Lowercase()
    made.pre_tokenizer = library.pre_tokenizers.Whitespace()
    made.decoder = library.decoders.WordPiece()
    made.add_special_tokens(names[:2])
    words = pretrained_tokenizer.Published(made, {"mask": "[MASK]"})
    p_NW = np.array([[0.1, 0.0, 0.2, 0.6, 0.1], [0.1, 0.0, 0.2, 0.1, 0.6]])
    text, first, _ = fill.table(words, "THE  (Old-[MASK][MASK])!", p_NW).splitlines()
    assert text == "THE  (Old-kingdom)!" and "'[UNK]' 0.100" in first and "''" not in first
    assert fill.table(words, "My [MASK] -[MASK]", p_NW).startswith("My king -dom\n")
    assert fill.table(words, "[MASK]", p_NW[:1, :1]).startswith("[UNK]\n")
    assert fill.filled(words, ["a ", "", ""], [3, 0]) == "a king[UNK]"
    with pytest.raises(errors.UserError, match="write <m> for each"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(fill, "MASK", "<m>")
        np.testing.assert_array_equal(fill.hidden(words, "The <m>"), [2, 1])
        fill.hidden(words, "<m> [MASK]")
    umlaut = tokenizer.Plain("bytes", "", ("[MASK]",))
    p_NW = np.eye(257)[[*"\xf6".encode(), ord(" ")]]
    assert fill.table(umlaut, "k[MASK][MASK]nig [MASK]", p_NW).startswith("k\xf6nig  \n")


# Classes of images.


def saved(folder, pixels, name="a.png"):
    from PIL import Image

    Image.fromarray(pixels).save(folder / name)
    return folder / name


def test_an_image_file_is_classified_as_the_same_pixels_are(run_of, tmp_path):
    digits = images.load("digits")
    image_YX = digits.evaluation_image_BYXZ[0, ..., 0]
    file = saved(tmp_path, (image_YX.astype(int) * 255 // 16).astype(np.uint8))
    outcome = use("classify", tmp_path / "out", checkpoint=run_of("image"), file=file)
    assert (outcome.code, outcome.err) == (0, "")
    made = open_model.open(str(run_of("image")))
    apply = made.network(Y=8, X=8).apply
    mean_Z, std_Z = images.statistics(digits.train_image_BYXZ)
    v_BNP = embed.cut((image_YX[None, ..., None] - mean_Z) / std_Z, size=4)
    p_C = np.asarray(jax.nn.softmax(apply(made.params, v_BNP, mask=None)[0][0]))
    line, *told = outcome.out.splitlines()
    assert line == f"{file}: 8 x 8 pixels, grey, made 8 x 8, grey, black 0 and white 16 as the model's own images"
    assert [text.split()[1] for text in told] == [str(c) for c in np.argsort(-p_C)[:5]]
    np.testing.assert_allclose([float(text.split()[0]) for text in told], np.sort(p_C)[:-6:-1], atol=6e-3)
    assert (tmp_path / "out" / "classes.txt").read_text(encoding="utf-8") == outcome.out
    assert "--file" in refusal("classify", checkpoint=run_of("image"))
    assert "tells the classes of images is needed" in refusal("classify", checkpoint=run_of("causal"), file=file)


def test_a_file_that_is_no_image_is_refused_in_a_sentence(run_of, tmp_path):
    def told(name):
        return refusal("classify", checkpoint=run_of("image"), file=tmp_path / name)

    (tmp_path / "text.png").write_text("no image")
    assert "is no image that can be read" in told("text.png")
    whole = saved(tmp_path, np.random.default_rng(0).integers(0, 255, (31, 17), np.uint8)).read_bytes()
    (tmp_path / "cut.png").write_bytes(whole[:150])
    assert "is no image that can be read" in told("cut.png")
    assert "there is no image file" in told("absent.png")
    saved(tmp_path, np.zeros((3, 3), np.uint16), "deep.png")
    assert "more than 8 bits" in told("deep.png")
    for side in (2**13 + 1, 2**15):  # announced, not there
        header = struct.pack(">II", side, side) + bytes([8, 0, 0, 0, 0])
        chunk = b"IHDR" + header
        start = whole[:8] + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk))
        (tmp_path / "bomb.png").write_bytes(start + whole[33:])
        assert "pixels" in told("bomb.png")
    image = np.zeros((3, 3), np.uint8)
    assert "\x1b" not in use("classify", checkpoint=run_of("image"), file=saved(tmp_path, image, "\x1b[2J.png")).out
    code = changed(run_of("image"), tmp_path / "code", image__head="payload:s")
    assert "a program that would be run" in refusal("classify", checkpoint=code, file=tmp_path / "a.png")
    copy = shutil.copytree(run_of("image"), tmp_path / "copy")
    (copy / "data.json").write_text("{}")
    file = {"file": tmp_path / "a.png"}
    assert "does not describe images" in refusal("classify", checkpoint=copy, **file)
    (copy / "data.json").unlink()
    assert "there is no" in refusal("classify", checkpoint=copy, **file)


@pytest.mark.parametrize("query_bias", [True, False])
def test_a_published_vit_classifies(tmp_path, query_bias):
    arrays = published.tensors("vit")
    sides = ("query.bias", "key.bias", "value.bias")
    kept = {name: array for name, array in arrays.items() if query_bias or not name.endswith(sides)}
    assert query_bias or len(kept) < len(arrays)
    published.save(tmp_path, "vit", kept, qkv_bias=query_bias)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.1, 0.2], "image_std": [0.3, 0.4]}))
    like = image_file.expected(tmp_path, open_model.open(str(tmp_path)).extras, Z=2, C=3)
    assert like["image"] == [15, 10, 2] and like["mean"] == [0.1, 0.2] and like["values"] == [0, pytest.approx(1)]
    file = saved(tmp_path, np.random.default_rng(0).integers(0, 255, (15, 10, 2), np.uint8))
    outcome = use("classify", checkpoint=tmp_path, file=file)
    assert (outcome.code, outcome.err) == (0, "")
    assert {line.split()[1] for line in outcome.out.splitlines()[1:]} == {"cat", "dog", "owl"}


# Other people's files.


@pytest.mark.parametrize(("family", "kind"), [("gpt2", "causal"), ("bert", "masked"), ("vit", "image")])
def test_a_run_is_exported_and_opened_again(run_of, tmp_path, family, kind):
    outcome = use("export", tmp_path / "out", checkpoint=run_of(kind), family=family)
    assert (outcome.code, outcome.err) == (0, "") and str(tmp_path / "out" / "config.json") in outcome.out
    ours, theirs = open_model.open(str(run_of(kind))), open_model.open(str(tmp_path / "out"))
    assert (theirs.kind, theirs.facts) == (ours.kind, ours.facts)
    jax.tree.map(np.testing.assert_array_equal, ours.params, theirs.params)
    assert {ours.model[field] == value for field, value in theirs.model.items()} == {True}
    if family != "vit":  # the export is used like the run
        assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (run_of(kind) / "tokenizer.json").read_bytes()
        assert str(tmp_path / "out" / "tokenizer.json") in outcome.out
        assert open_model.words(theirs).size == open_model.words(ours).size
    else:
        mine, read = (image_file.expected(made.path, made.extras, Z=1, C=10) for made in (ours, theirs))
        assert mine == read | {"values": [0.0, pytest.approx(16)]}
    again = refusal("export", tmp_path / "out", checkpoint=run_of(kind), family=family)
    assert "is there already" in again


def test_an_export_says_how_an_image_is_made_whatever_its_black_was(run_of, tmp_path):
    run = shutil.copytree(run_of("image"), tmp_path / "run")
    says = json.loads((run / "data.json").read_text()) | {"values": [-1.5, 3.0]}
    (run / "data.json").write_text(json.dumps(says))
    outcome = use("export", tmp_path / "out", checkpoint=run, family="vit")
    assert (outcome.code, outcome.err) == (0, "") and "preprocessor_config.json" in outcome.out
    file = saved(tmp_path, np.random.default_rng(0).integers(0, 255, (11, 9), np.uint8))
    of_both = [open_model.open(str(folder)) for folder in (run, tmp_path / "out")]
    mine, theirs = (image_file.expected(made.path, made.extras, Z=1, C=10) for made in of_both)
    np.testing.assert_allclose(image_file.read(file, theirs)[0], image_file.read(file, mine)[0], atol=1e-5)


def test_what_nobody_says_of_making_images_is_assumed_aloud_and_not_written(tmp_path):
    published.save(tmp_path / "vit", "vit")
    file = saved(tmp_path, np.zeros((15, 10, 2), np.uint8))
    outcome = use("classify", checkpoint=tmp_path / "vit", file=file)
    assert outcome.code == 0 and "(assumed: there is no preprocessor_config.json)" in outcome.out.splitlines()[0]
    outcome = use("export", tmp_path / "out", checkpoint=tmp_path / "vit", family="vit")
    assert (outcome.code, outcome.err) == (0, "") and "preprocessor" not in outcome.out
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]


def test_what_the_family_does_not_have_is_named(run_of, tmp_path):
    told = refusal("export", tmp_path / "out", checkpoint=run_of("causal"), family="llama")
    assert "model.norm is 'token' and not 'rms'" in told and not (tmp_path / "out").exists()
    assert "fills hidden words in is needed" in refusal("export", checkpoint=run_of("causal"), family="bert")
    assert "the right ones are: gpt2, bert" in refusal("export", checkpoint=run_of("causal"), family="gpt3")
    assert "--workdir=FOLDER" in refusal("export", checkpoint=run_of("causal"), family="gpt2")
    plain = changed(run_of("masked"), tmp_path / "plain", text__transform=False, model__segments=0)
    told = refusal("export", tmp_path / "out", checkpoint=plain, family="bert")
    assert "text.transform is False and not True; model.segments is 0 and not 1 or more" in told
    pooled = changed(run_of("image"), tmp_path / "pooled", image__head="pooled")
    told = refusal("export", tmp_path / "out", checkpoint=pooled, family="vit")
    assert "image.head is 'pooled' and not 'class_token'" in told


def of_rotary(folder) -> open_model.Trained:
    """A model as those of configs/llama.py, of random numbers."""
    fields = base.get_config().model
    fields.update(
        M=2, D=20, H=2, F=7, norm="rms", mlp="swiglu", position="none", relative_position="rotary", bias=False
    )
    facts = {"W": 23, "N": 13, "tied_output": False, "transform": False}
    fields.unroll = 1
    tree = jax.eval_shape(models.language(fields, answer=head.next_word, **facts).init, jax.random.key(0))
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: 0.3 * rng.standard_normal(leaf.shape, np.float32), tree)
    return open_model.Trained(folder, "causal", params, fields.to_dict(), facts, {}, "")


@pytest.fixture
def rotary_export(tmp_path, monkeypatch):
    """(a rotary model, the folder it was exported to as a Llama, what was told)."""
    made = of_rotary(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(open_model, "open", lambda path, trust: made)
        outcome = use("export", tmp_path / "out", checkpoint="it", family="llama")
    assert (outcome.code, outcome.err) == (0, "")
    return made, tmp_path / "out", outcome.out


def logits(made, w_BN) -> np.ndarray:
    return np.asarray(made.network().apply(made.params, w_BN, mask=masks.causal)[0])


def test_a_rotary_model_is_exported_as_a_llama_of_the_same_answers(rotary_export):
    made, folder, told = rotary_export
    read = open_model.open(str(folder))
    assert (made.model["relative_position"], read.model["relative_position"]) == ("rotary", "rotary_halves")
    assert told.count("out/") == 3  # there was no tokenizer
    w_BN = np.random.default_rng(1).integers(0, 23, (2, 11))
    np.testing.assert_allclose(logits(read, w_BN), logits(made, w_BN), atol=2e-5)
    turned = dataclasses.replace(read, model=read.model | {"relative_position": "rotary"})
    assert np.abs(logits(turned, w_BN) - logits(made, w_BN)).max() > 1e-2  # the order does matter


def test_transformers_opens_the_exported_rotary_model(rotary_export):
    torch = pytest.importorskip("torch", reason="parity with PyTorch's models needs the extra [parity]")
    transformers = pytest.importorskip("transformers", reason="parity with its models needs the extra [parity]")
    made, folder, _ = rotary_export
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    w_BN = np.random.default_rng(1).integers(0, 23, (2, 11))
    with torch.no_grad():
        np.testing.assert_allclose(theirs(torch.tensor(w_BN)).logits.numpy(), logits(made, w_BN), atol=1e-4)


@pytest.mark.skipif(not STORIES.is_dir(), reason="TFM_DATA names no folder with stories260K")
def test_stories260k_is_exported_and_goes_on_as_before(tmp_path):
    outcome = use("export", tmp_path / "out", checkpoint=STORIES / "stories260K.bin", family="llama")
    assert (outcome.code, outcome.err) == (0, "") and "tok512.bin" in outcome.out
    greedy = {"temperature": 0.0, "max_new_tokens": 40}
    again = use("sample", checkpoint=tmp_path / "out", **greedy)
    assert again.out == use("sample", checkpoint=STORIES / "stories260K.bin", **greedy).out != ""


def test_the_files_of_a_published_tokenizer_are_copied(rotary_export, tmp_path):
    made, folder, _ = rotary_export
    beside, out = tmp_path / "published", tmp_path / "copy"
    for one in (beside, out):
        one.mkdir()
    for name in ("tokenizer.json", "special_tokens_map.json", "weights.txt"):
        (beside / name).write_text(name)
    assert export.copied(dataclasses.replace(made, path=beside), out) == ["tokenizer.json", "special_tokens_map.json"]
    assert sorted(file.name for file in out.iterdir()) == ["special_tokens_map.json", "tokenizer.json"]


def test_transformers_opens_an_exported_run(run_of, tmp_path, monkeypatch):
    torch = pytest.importorskip("torch", reason="parity with PyTorch's models needs the extra [parity]")
    transformers = pytest.importorskip("transformers", reason="parity with its models needs the extra [parity]")
    assert use("export", tmp_path / "out", checkpoint=run_of("causal"), family="gpt2").code == 0
    theirs = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "out").eval()
    apply, params = opened(run_of("causal"))
    w_BN = np.random.default_rng(0).integers(0, 256, (2, 11))
    with torch.no_grad():
        expected = theirs(torch.tensor(w_BN)).logits.numpy()
    np.testing.assert_allclose(apply(params, w_BN, mask=masks.causal)[0], expected, atol=1e-4)

"""Translation from its command to its figures: learning, decoding, scores."""

import itertools
import json
import math
import pathlib
import sys
from typing import NamedTuple

import jax
import numpy as np
import published
import pytest
import tiny
from errors import raises

from experiments.config import errors
from experiments.data import pairs, translation_score
from experiments.folder import checkpoint, records
from experiments.model import build

pytest.importorskip("tokenizers", reason='the library tokenizers is missing: pip install -e ".[text]"')
pytest.importorskip("sacrebleu", reason='the library sacrebleu is missing: pip install -e ".[text]"')

from experiments import translation  # noqa: E402
from experiments.tools import translate  # noqa: E402

WORDS = dict(zip("one two three four five".split(), "uno dos tres cuatro cinco".split(), strict=True))
# The sentences of six words are too long. With these settings each of seven seeds translates all others exactly, so
# that the rounding of a processor decides nothing (120 steps at twice the rate: 5 to 20 of 20).
SOURCES = [*itertools.product(WORDS, repeat=4), *itertools.product(("one", "two"), repeat=6)]
PAIRS = [(" ".join(words), " ".join(map(WORDS.get, words))) for words in SOURCES]
STEPS, N, W = 200, 6, 300
SIZES = {"model.M": 1, "pairs.N": N, "pairs.vocabulary": W}
TRAIN = {"model.D": 32, "model.H": 2, "mesh.data": 1, "train.batch_size": 32, "train.steps": STEPS}
TRAIN |= {"train.evaluate_every": STEPS // 2, "optim.learning_rate": 0.01, "optim.warmup_steps": 20}
TRAIN |= {"model.bias": "none", "model.mlp": "relu", "model.norm": "rms"}  # compiles quickly


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("pairs") / "said.tsv"
    path.write_text("".join(f"{source}\t{target}\n" for source, target in PAIRS))
    return str(path)


class TrainedRun(NamedTuple):
    """A trained run: its folder, its stdout, and the blocks (source, truth, greedy, beam) of its sample.txt."""

    folder: pathlib.Path
    out: str
    blocks: list[list[str]]

    @property
    def summary(self) -> dict:
        return json.loads((self.folder / "summary.json").read_text())


@pytest.fixture(scope="module")
def trained_run(file, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    config = tiny.config_file(folder, "translation", **SIZES | TRAIN | {"pairs.source": file})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(translation, "SCORED", 11)
        outcome = tiny.run("--config", config, "--workdir", str(folder / "run"))
    assert (outcome.code, outcome.err) == (0, "")
    text = (folder / "run" / "sample.txt").read_text(encoding="utf-8").strip("\n")
    blocks = [[line.split(":", 1)[1].strip() for line in block.split("\n")] for block in text.split("\n\n")]
    return TrainedRun(folder / "run", outcome.out, blocks)


def test_a_run_learns_to_translate_held_out_sentences(trained_run):
    """No held-out sentence is in the training split, so the decoder must read the source."""
    files = [trained_run.folder / "figures" / f"{name}.png" for name in ("cross_attention", "loss")]
    assert sorted((trained_run.folder / "figures").iterdir()) == files
    text = (trained_run.folder / "sample.txt").read_text(encoding="utf-8")
    for part in (*files, text, "the first training pair is 'one", "11 held-out sentences, 1 of them"):
        assert str(part) in trained_run.out
    summary = trained_run.summary
    assert summary["bleu_words_by"] == "13a"
    for method in ("greedy", "beam"):
        assert summary[f"eval/chrf_{method}"] > 70 > 60 > summary["baseline/chrf"]
        assert summary[f"eval/bleu_{method}"] > 50 > 40 > summary["baseline/bleu"]
    losses = [row["eval/loss"] for row in records.read_metrics(trained_run.folder) if "eval/loss" in row]
    assert len(losses) == 2 and losses[1] < losses[0] < math.log(W)
    assert len(trained_run.blocks) == 11 and all((source, truth) in PAIRS for source, truth, _, _ in trained_run.blocks)
    assert sum((greedy == truth) + (beam == truth) for _, truth, greedy, beam in trained_run.blocks) >= 18


def test_greedy_translations_have_the_most_likely_tokens_of_the_model_without_a_cache(trained_run, file, monkeypatch):
    monkeypatch.setattr(translation, "SCORED", 11)
    settings = tiny.settings("translation", **SIZES | TRAIN | {"pairs.source": file})
    corpus, model = translation.read(settings), build.encoder_decoder(settings.model, W=W, N=N, tied_output=True)
    params = checkpoint.parameters(trained_run.folder / "checkpoints", STEPS)
    source_BS, fits_B = pairs.pad(corpus.subwords, corpus.sources, N=N)
    apply, w_BN = jax.jit(model.apply), np.full((len(source_BS), N + 1), pairs.BOS, np.int32)
    for n in range(N):
        w_BN[:, n + 1] = apply(params, source_BS, source_BS != pairs.PAD, w_BN[:, :-1])[0][:, n].argmax(-1)
    slow = [corpus.subwords.decode(w_N[: [*w_N, pairs.EOS].index(pairs.EOS)]) for w_N in w_BN[:, 1:].tolist()]
    expected = [text if fits else "" for text, fits in zip(slow, fits_B, strict=True)]
    assert [greedy for _, _, greedy, _ in trained_run.blocks] == expected
    assert len(set(expected)) > 5 and sum(fits_B) == 10


def test_the_tool_has_the_same_translations_and_scores_as_the_run(trained_run, tmp_path, monkeypatch):
    monkeypatch.setattr(translate, "BATCH", 4)  # the run translated all sentences in one batch
    contents = {f"test.{name}": [row[i] for row in trained_run.blocks] + [""] for i, name in enumerate(("en", "es"))}
    contents |= {"short.es": ["x"], "none.en": [""]}
    for name, lines in contents.items():
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    flags = {"checkpoint": trained_run.folder, "file": tmp_path / "test.en"}
    outcome = tiny.command(translate, **flags, reference=[tmp_path / "test.es"] * 2, workdir=tmp_path / "out")
    assert (outcome.code, outcome.err) == (0, "")
    beam = "".join(f"{row[3]}\n" for row in trained_run.blocks) + "\n"
    assert (tmp_path / "out" / "translations.txt").read_text() == beam
    first, _, *greedy, _, chrf, bleu = outcome.out.splitlines()
    assert first.startswith("12 sentences; 1 of more than 5 tokens") and len(greedy) == 2
    assert chrf.startswith("chrF2|nrefs:2|") and bleu.startswith("BLEU|nrefs:2|case:mixed|")
    assert f" = {trained_run.summary['eval/chrf_beam']:.2f}" in chrf
    assert f" = {trained_run.summary['eval/bleu_beam']:.2f}" in bleu
    texts = {"greedy": ["hola"] * 12, "beam": ["buenos", "dias"]}
    monkeypatch.setattr(translation, "make_translator", lambda *_, **options: lambda params, sentences: texts)
    assert tiny.command(translate, **flags).out == "buenos\ndias\n"
    for changes, *parts in (
        ({"reference": (tmp_path / "short.es",)}, "test.en", 12, "short.es", 1),
        ({"file": tmp_path / "none.en"}, "none.en"),
        ({"file": tmp_path / "absent"}, "absent"),
        ({"file": ""}, "--file"),
    ):
        with raises(errors.UserError, *parts):
            translate.run(**flags | changes)


# The task


def test_the_loss_depends_on_the_valid_tokens_of_the_source_and_earlier_tokens_of_the_target(file):
    task = tiny.task_of(tiny.settings("translation", **{"pairs.source": file} | SIZES | {"pairs.N": 8}))
    batch, params, measure = task.train[0], tiny.draw_params(task), tiny.measure(task)
    assert batch["source_BS"].shape == (16, 8) and task.tokens_per_example == 16
    real_B = batch["valid_BS"].sum(1)
    assert real_B.max() < 8

    def loss(name, at_B, **arrays):
        changed_BN = np.where(np.arange(8) == np.reshape(at_B, (-1, 1)), pairs.EOS + 5, batch[name])
        return float(measure(params, batch | arrays | {name: changed_BN}, None)["loss"][0])

    unchanged = loss("w_BN", -1)
    assert loss("source_BS", real_B) == unchanged != loss("source_BS", real_B - 1)
    early = {"weight_BN": batch["weight_BN"] * (np.arange(8) < 2)}
    assert loss("w_BN", 2, **early) == loss("w_BN", -1, **early) != loss("w_BN", 1, **early)
    full = {"valid_BS": np.ones((16, 8), bool)}
    assert loss("source_BS", real_B, **full) != loss("source_BS", -1, **full) != unchanged


def test_the_baseline_is_the_most_frequent_target_token(tmp_path):
    """Padding tokens do not count."""
    (tmp_path / "p.tsv").write_text("".join(f"{'abc'[i % 3]} {i}\t{'x' * (i % 7 + 1)}\n" for i in range(60)))
    changes = {"pairs.source": str(tmp_path / "p.tsv")} | SIZES | {"pairs.N": 9}
    task = tiny.task_of(tiny.settings("translation", **changes))
    train, held_out = [task.train[i] for i in range(9)], [task.evaluation[i] for i in range(len(task.evaluation))]
    tokens = np.concatenate([batch["target_BN"][batch["weight_BN"] > 0] for batch in train])
    most = np.bincount(tokens).argmax()
    correct = sum(((batch["target_BN"] == most) * batch["weight_BN"]).sum() for batch in held_out)
    assert tiny.baseline(task) == {
        "accuracy": pytest.approx(correct / sum(batch["weight_BN"].sum() for batch in held_out))
    }
    assert 0 < tiny.baseline(task)["accuracy"] < 1


def test_the_choice_of_scored_sentences_depends_on_the_sentences_alone_and_keeps_all_references():
    held_out = [(f"s{i}", f"t{i}") for i in range(97)] + [("s5", "another")]
    sources, references = translation.choose_scored(held_out, 13)
    sources_of_reversed, references_of_reversed = translation.choose_scored(held_out[::-1], 13)
    assert sources == sources_of_reversed and len(sources) == 13 and sources != [f"s{i}" for i in range(13)]
    assert list(map(sorted, references)) == list(map(sorted, references_of_reversed))
    sources, references = translation.choose_scored(held_out, 1000)
    assert len(sources) == 97 and references[sources.index("s5")] == ["t5", "another"]


@pytest.mark.parametrize(
    ("setting", "value", "part"),
    [
        ("pairs.N", 1, 1),
        ("pairs.N", 2, "N = 2"),
        ("pairs.vocabulary", 3, 259),
        ("pairs.source", "nowhere.tsv", "nowhere.tsv"),
        ("model.norm", "instance", "model.norm = instance"),
    ],
)
def test_invalid_settings_are_refused(file, setting, value, part):
    with raises(errors.UserError, part):
        tiny.task_of(tiny.settings("translation", **{"pairs.source": file} | SIZES | {setting: value}))


# Scores and figures


def test_scores_are_computed_over_the_corpus_with_any_number_of_references():
    references = [["the cat sat on the mat"], ["a dog ran away today", "one dog went off today"]]
    best = translation_score.scores(["the cat sat on the mat", "one dog went off today"], references)
    assert best == pytest.approx({"chrf": 100, "bleu": 100})
    worse = translation_score.scores(["the cat sat on a mat", "one dog went off today"], references)
    worst = translation_score.scores(["", "x"], references)
    assert all(worst[name] < 5 < 60 < worse[name] < 100 for name in ("chrf", "bleu"))
    # BLEU by hand: n-grams that match are 5/6 + 5/5, 3/5 + 4/4, 2/4 + 3/3, 1/3 + 2/2; lengths are equal.
    hand = 100 * math.exp(sum(map(math.log, ((5 + 5) / 11, (3 + 4) / 9, (2 + 3) / 7, (1 + 2) / 5))) / 4)
    assert worse["bleu"] == pytest.approx(hand)


@pytest.mark.parametrize(
    ("language", "expected", "sentence"),
    [
        ("Chinese", "zh", "猫坐在垫子上。"),
        ("Japanese", "char", "猫はマットの上に座った。"),
        ("Thai", "char", "แมวนั่งบนเสื่อ"),
        ("Burmese", "char", "ကြောင်က ဖျာပေါ်မှာ ထိုင်နေတယ်။"),
        ("Korean", "13a", "고양이가 매트 위에 앉았다."),
        ("no letters", "13a", "1 + 1 = 2"),
    ],
)
def test_bleu_uses_the_tokenizer_of_the_language(language, expected, sentence):
    assert translation_score.choose_tokenizer([[sentence], [sentence]]) == expected
    if expected != "13a":  # with a tokenizer of words, only the whole sentence would match
        half = [sentence[: len(sentence) * 2 // 3] + "x"]
        assert translation_score.scores(half, [[sentence]])["bleu"] > 20
        assert f"tok:{expected}" in translation_score.format_scores(half, [[sentence]])


def test_a_text_in_the_wrong_language_is_a_warning(tmp_path, monkeypatch):
    texts = {"greedy": [""] * 20, "beam": [""] * 20}
    monkeypatch.setattr(translation, "make_translator", lambda *_, **__: lambda *_: texts)
    for i in (0, 1):
        (tmp_path / f"test.{i}").write_text("".join(f"{pair[i]}\n" for pair in PAIRS[:20]), encoding="utf-8")
    for source in (0, 1):
        file = tmp_path / f"from_{source}.tsv"
        file.write_text("".join(f"{pair[source]}\t{pair[1 - source]}\n" for pair in PAIRS), encoding="utf-8")
        folder = published.write_run(tmp_path / f"run{source}", "translation", **SIZES, **{"pairs.source": str(file)})
        for side in (0, 1):
            outcome = tiny.command(translate, checkpoint=folder, file=tmp_path / f"test.{side}")
            assert outcome.code == 0 and ("target language" in outcome.err) == (side != source)


def test_the_baseline_of_scores_is_a_translation_that_ignores_the_source():
    references = [["the cat sat on the mat"], ["a dog ran away today"], ["it is so very hot in here"]]
    result = translation.score({"greedy": [texts[0] for texts in references]}, references)
    assert [result["eval/chrf_greedy"], result["eval/bleu_greedy"]] == pytest.approx([100, 100])
    assert result.keys() == {"eval/chrf_greedy", "eval/bleu_greedy", "baseline/chrf", "baseline/bleu"}
    assert 0 < result["baseline/chrf"] < 30


def test_a_missing_library_is_reported_with_its_extra_before_data_are_read(monkeypatch):
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    with raises(errors.UserError, "sacrebleu", "[text]"):
        tiny.task_of(tiny.settings("translation", **{"pairs.source": "nowhere.tsv"} | SIZES))

"""Translation from its command to its figures: what it learns, how it is decoded, scored and shown."""

import itertools
import json
import math
import sys
from unittest import mock

import jax
import numpy as np
import published
import pytest
import tiny

from experiments import model as models
from experiments.data import pairs, pretrained_tokenizer, translation_score
from experiments.engine import checkpoint, compilation, errors, log

pytest.importorskip("tokenizers", reason='the library tokenizers is missing: pip install -e ".[text]"')
pytest.importorskip("sacrebleu", reason='the library sacrebleu is missing: pip install -e ".[text]"')

from experiments import translation  # noqa: E402
from experiments.tools import translate  # noqa: E402

WORDS = dict(zip("one two three four five".split(), "uno dos tres cuatro cinco".split(), strict=True))
SOURCES = [*itertools.product(WORDS, repeat=4), *itertools.product(("one", "two"), repeat=6)]  # the last are too long
SAID = [(" ".join(some), " ".join(map(WORDS.get, some))) for some in SOURCES]
SIZES = {"model.M": 1, "pairs.N": 6, "pairs.vocabulary": 300}


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("pairs") / "said.tsv"
    path.write_text("".join(f"{source}\t{target}\n" for source, target in SAID))
    return str(path)


def greedy(model, params, id_S, N):
    """The most likely word each time, all of the target read anew for each of its words."""
    apply = jax.jit(model.apply)
    w_N = [pairs.BOS]
    while len(w_N) <= N and w_N[-1] != pairs.EOS:
        padded_N = np.array(w_N + [0] * (N - len(w_N)), np.int32)
        logits_BNW, _ = apply(params, id_S[None], (id_S != pairs.PAD)[None], padded_N[None])
        w_N.append(int(logits_BNW[0, len(w_N) - 1].argmax()))
    return w_N[1:]


def test_a_run_from_its_command_to_its_figures_translates_held_out_sentences(tmp_path, file, monkeypatch):
    """Word by word, but no held-out sentence was seen: the decoder must have found the words in the source.

    Greedy translations are those of the whole model.
    """
    monkeypatch.setattr(compilation, "measured_peak", lambda *, devices: 1e9)
    monkeypatch.setattr(translation, "SCORED", 11)
    changes = {"model.D": 32, "model.H": 2, "mesh.data": 1, "train.batch_size": 32, "train.steps": 120}
    changes |= {"train.evaluate_every": 60}
    changes |= {"model.bias": "none", "model.mlp": "relu", "model.norm": "rms"}  # which are soon compiled
    changes |= {"optim.learning_rate": 0.02, "optim.warmup_steps": 20, "pairs.source": file}
    config, folder = tiny.config_file(tmp_path, "translation", **SIZES | changes), tmp_path / "run"
    with mock.patch.object(translation.beam, "search", wraps=translation.beam.search) as search:
        outcome = tiny.run("--config", config, "--workdir", str(folder))
    assert (outcome.code, outcome.err) == (0, "")
    how = {"beam": 4, "steps": 6, "stop": (pairs.EOS,), "length_penalty": 0.6}
    assert {name: search.call_args.kwargs[name] for name in how} == how
    drawn = [folder / "figures" / f"{name}.png" for name in ("cross_attention", "loss")]
    assert sorted((folder / "figures").iterdir()) == drawn
    assert all(str(found) in outcome.out for found in (*drawn, folder / "sample.txt"))
    text = (folder / "sample.txt").read_text(encoding="utf-8")
    saved = pretrained_tokenizer.read(folder)
    assert saved.size == 300 and saved.decode(saved.encode("one two")) == "one two"
    for words in (text, "it learns to translate as 'one", "pairs to train on: 5", "11 held-out sentences, 1 of them"):
        assert words in outcome.out
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["bleu_words_by"] == "13a"
    for way in ("greedy", "beam"):
        assert summary[f"eval/chrf_{way}"] > 70 > 60 > summary["baseline/chrf"]
        assert summary[f"eval/bleu_{way}"] > 50 > 40 > summary["baseline/bleu"]
    losses = [row["eval/loss"] for row in log.read(folder) if "eval/loss" in row]
    assert len(losses) == 2 and losses[1] < losses[0] < math.log(300)
    blocks = [[line.split(":", 1)[1].strip() for line in one.split("\n")] for one in text.strip("\n").split("\n\n")]
    assert len(blocks) == 11 and all((source, truth) in SAID for source, truth, _, _ in blocks)
    assert sum((greedy == truth) + (beam == truth) for _, truth, greedy, beam in blocks) > 11
    settings = tiny.settings("translation", **SIZES | changes)
    corpus = translation.read(settings)
    model = models.encoder_decoder(settings.model, W=300, N=6, tied_output=True)
    params = checkpoint.parameters(folder / "checkpoints", 120)
    source_BS, fits_B = pairs.padded(corpus.subwords, corpus.sources, N=6)
    slow = [corpus.subwords.decode(greedy(model, params, id_S, 6)) for id_S in source_BS]
    expected = [words if fits else "" for words, fits in zip(slow, fits_B, strict=True)]
    assert [greedy for _, _, greedy, _ in blocks] == expected and len(set(expected)) > 5 and sum(fits_B) == 10
    check_tool(folder, tmp_path, blocks, summary, monkeypatch)


def check_tool(run, folder, blocks, summary, monkeypatch):
    """Of the same sentences, and an empty line, the tool makes what the run showed, and the same scores."""
    monkeypatch.setattr(translate, "BATCH", 4)  # the run had all at once
    write = {"test.en": [row[0] for row in blocks] + [""], "test.es": [row[1] for row in blocks] + [""]}
    write |= {"short.es": ["x"], "none.en": [""]}
    for name, lines in write.items():
        (folder / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    given = {"checkpoint": run, "file": folder / "test.en"}
    told = tiny.command(translate, **given, reference=[folder / "test.es"] * 2, workdir=folder / "out")
    assert (told.code, told.err) == (0, "")
    assert (folder / "out" / "translations.txt").read_text() == "".join(f"{row[3]}\n" for row in blocks) + "\n"
    first, _, *of_greedy, _, chrf, bleu = told.out.splitlines()
    assert first == "12 sentences; 1 of more than 5 tokens, which are translated by nothing" and len(of_greedy) == 2
    assert chrf.startswith("chrF2|nrefs:2|") and bleu.startswith("BLEU|nrefs:2|case:mixed|")
    assert f" = {summary['eval/chrf_beam']:.2f}" in chrf and f" = {summary['eval/bleu_beam']:.2f}" in bleu
    said = {"greedy": ["hola"] * 12, "beam": ["buenos", "dias"]}
    monkeypatch.setattr(translation, "translator", lambda *_, **how: lambda params, sentences: said)
    assert tiny.command(translate, **given).out == "buenos\ndias\n"
    for changes, sentence in (
        ({"reference": folder / "short.es"}, "test.en has 12 lines and "),
        ({"file": folder / "none.en"}, "none.en holds no sentence"),
        ({"file": folder / "absent"}, "absent cannot be read: No such file"),
        ({"file": ""}, "say what to translate: --file=test.en"),
    ):
        assert sentence in tiny.refusal(translate, **given | changes)


# The task.


def test_the_loss_sees_the_real_words_of_the_source_and_earlier_words_of_the_target(file):
    task = tiny.task_of(tiny.settings("translation", **{"pairs.source": file} | SIZES | {"pairs.N": 8}))
    batch, params, measure = task.train[0], tiny.drawn(task), tiny.measure(task)
    assert batch["source_BS"].shape == (16, 8) and task.tokens_per_example == 16
    real_B = batch["valid_BS"].sum(1)
    assert real_B.max() < 8

    def loss(changed, at_B, **other):
        changed_BN = np.where(np.arange(8) == np.reshape(at_B, (-1, 1)), pairs.EOS + 5, batch[changed])
        return float(measure(params, batch | other | {changed: changed_BN}, None)["loss"][0])

    same = loss("w_BN", -1)
    assert loss("source_BS", real_B) == same != loss("source_BS", real_B - 1)
    early = {"weight_BN": batch["weight_BN"] * (np.arange(8) < 2)}
    assert loss("w_BN", 2, **early) == loss("w_BN", -1, **early) != loss("w_BN", 1, **early)
    full = {"valid_BS": np.ones((16, 8), bool)}
    assert loss("source_BS", real_B, **full) != loss("source_BS", -1, **full) != same


def test_the_baseline_is_the_most_frequent_target_token(tmp_path):
    """Of the padding it knows nothing, and where the training part does not tell, the evaluation does not either."""
    (tmp_path / "p.tsv").write_text("".join(f"{'abc'[i % 3]} {i}\t{'x' * (i % 7 + 1)}\n" for i in range(60)))
    task = tiny.task_of(
        tiny.settings("translation", **{"pairs.source": str(tmp_path / "p.tsv")} | SIZES | {"pairs.N": 9})
    )
    train, asked = (
        [part[i] for i in range(n)] for part, n in ((task.train, 9), (task.evaluation, len(task.evaluation)))
    )
    words = np.concatenate([batch["target_BN"][batch["weight_BN"] > 0] for batch in train])
    most = np.bincount(words).argmax()
    right = sum(((batch["target_BN"] == most) * batch["weight_BN"]).sum() for batch in asked)
    assert task.baseline == {"accuracy": pytest.approx(right / sum(batch["weight_BN"].sum() for batch in asked))}
    assert 0 < task.baseline["accuracy"] < 1


def test_what_is_translated_depends_on_the_sentences_alone_and_keeps_all_references():
    held_out = [(f"s{i}", f"t{i}") for i in range(97)] + [("s5", "another")]
    sources, references = translation.asked(held_out, 13)
    again, their_references = translation.asked(held_out[::-1], 13)
    assert sources == again and len(sources) == 13 and sources != [f"s{i}" for i in range(13)]
    assert list(map(sorted, references)) == list(map(sorted, their_references))
    sources, references = translation.asked(held_out, 1000)
    assert len(sources) == 97 and references[sources.index("s5")] == ["t5", "another"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pairs.N": 1}, "pairs.N must be at least 2"),
        ({"pairs.N": 2}, "at most N = 2 tokens a side"),
        ({"pairs.vocabulary": 3}, "at least 259 ids"),
        ({"pairs.source": "nowhere.tsv"}, "nor a path that exists"),
        ({"model.norm": "instance"}, "needs all tokens"),
    ],
)
def test_wrong_settings_are_one_sentence(file, changes, words):
    with pytest.raises(errors.UserError, match=words):
        tiny.task_of(tiny.settings("translation", **{"pairs.source": file} | SIZES | changes))


# Scores and figures.


def test_scores_are_of_the_whole_corpus_with_any_number_of_references():
    references = [["the cat sat on the mat"], ["a dog ran away today", "one dog went off today"]]
    best = translation_score.scores(["the cat sat on the mat", "one dog went off today"], references)
    assert best == pytest.approx({"chrf": 100, "bleu": 100})
    worse = translation_score.scores(["the cat sat on a mat", "one dog went off today"], references)
    worst = translation_score.scores(["", "x"], references)
    assert all(worst[name] < 5 < 60 < worse[name] < 100 for name in ("chrf", "bleu"))
    # BLEU by hand: matches 5/6+4/4, 3/5+3/3, 2/4+2/2, 1/3+1/1 where "a mat" breaks the first; lengths are equal
    hand = 100 * math.exp(sum(map(math.log, ((5 + 5) / 11, (3 + 4) / 9, (2 + 3) / 7, (1 + 2) / 5))) / 4)
    assert worse["bleu"] == pytest.approx(hand)


@pytest.mark.parametrize(
    ("language", "expected", "sentence"),
    [
        ("Chinese", "zh", "猫坐在垫子上。"),
        ("traditional Chinese", "zh", "貓坐在 mat 上面。"),
        ("Japanese", "char", "猫はマットの上に座った。"),
        ("Japanese in katakana", "char", "ラーメンヲタベル"),
        ("Thai", "char", "แมวนั่งบนเสื่อ"),
        ("Khmer", "char", "ឆ្មាអង្គុយលើកន្ទេល"),
        ("Lao", "char", "ແມວນັ່ງຢູ່ເທິງເສື່ອ"),
        ("Burmese", "char", "ကြောင်က ဖျာပေါ်မှာ ထိုင်နေတယ်။"),
        ("Korean", "13a", "고양이가 매트 위에 앉았다."),
        ("Hindi", "13a", "बिल्ली चटाई पर बैठी।"),
        ("German", "13a", "Die Katze saß auf der Matte."),
        ("no letters", "13a", "1 + 1 = 2"),
    ],
)
def test_bleu_has_the_words_of_the_language(language, expected, sentence):
    assert translation_score.words_by([[sentence], [sentence]]) == expected
    if expected != "13a":  # of a sentence that is one "word" nothing but the whole would count
        half = [sentence[: len(sentence) * 2 // 3] + "x"]
        assert translation_score.scores(half, [[sentence]])["bleu"] > 20
        assert f"tok:{expected}" in translation_score.signed(half, [[sentence]])


def test_a_text_in_the_wrong_language_is_told(tmp_path, monkeypatch):
    ways = {"greedy": [""] * 20, "beam": [""] * 20}
    monkeypatch.setattr(translation, "translator", lambda *_, **__: lambda *_: ways)
    write = {"pairs.tsv": "".join(f"{source}\t{target}\n" for source, target in SAID)}
    write |= {f"test.{i}": "".join(f"{pair[i]}\n" for pair in SAID[:20]) for i in (0, 1)}
    for name, content in write.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    changes = {"pairs.source": str(tmp_path / "pairs.tsv")} | SIZES
    for reverse in (False, True):
        run = published.run(tmp_path / f"run{reverse}", "translation", **changes, **{"pairs.reverse": reverse})
        for side in (0, 1):
            told = tiny.command(translate, checkpoint=run, file=tmp_path / f"test.{side}")
            assert told.code == 0 and ("looks like what this model translates into" in told.err) == (side != reverse)


def test_a_translation_that_ignores_the_source_is_the_baseline():
    references = [["the cat sat on the mat"], ["a dog ran away today"], ["it is so very hot in here"]]
    found = translation.score({"greedy": [some[0] for some in references]}, references)
    assert [found["eval/chrf_greedy"], found["eval/bleu_greedy"]] == pytest.approx([100, 100])
    assert found.keys() == {"eval/chrf_greedy", "eval/bleu_greedy", "baseline/chrf", "baseline/bleu"}
    assert 0 < found["baseline/chrf"] < 30


def test_without_the_library_the_extra_is_named_before_anything_is_read(monkeypatch):
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    with pytest.raises(errors.UserError, match=r'sacrebleu: pip install -e "\.\[text\]"'):
        tiny.task_of(tiny.settings("translation", **{"pairs.source": "nowhere.tsv"} | SIZES))

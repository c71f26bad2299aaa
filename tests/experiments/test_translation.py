"""Translation from its command to its figures: what it learns, how it is decoded, scored and shown."""

import builtins
import functools
import itertools
import json
import math
from unittest import mock

import jax
import numpy as np
import pytest
import tiny

from experiments import model as models
from experiments.data import pairs, pretrained_tokenizer, subwords, translation_score
from experiments.engine import compilation, errors, log
from experiments.figures import translation as translation_figures

pytest.importorskip("tokenizers", reason='the library tokenizers is missing: pip install -e ".[text]"')
pytest.importorskip("sacrebleu", reason='the library sacrebleu is missing: pip install -e ".[text]"')

from experiments import translation  # noqa: E402

WORDS = dict(zip("one two three four five".split(), "uno dos tres cuatro cinco".split(), strict=True))
SAID = [(" ".join(some), " ".join(map(WORDS.get, some))) for some in itertools.product(WORDS, repeat=4)]
PNG = b"\x89PNG\r\n\x1a\n"
SIZES = {
    "pairs.N": 6,
    "pairs.vocabulary": 300,
    "pairs.score_sentences": 11,
    "train.evaluate_batch": 16,
}


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("pairs") / "said.tsv"
    path.write_text("".join(f"{source}\t{target}\n" for source, target in SAID))
    return str(path)


@pytest.fixture(scope="module")
def made(file):
    """Settings, corpus, model, and parameters that are drawn, not trained."""
    settings = tiny.settings("translation", **{"pairs.source": file} | SIZES)
    corpus = translation.read(settings)
    model = models.encoder_decoder(settings.model, W=corpus.subwords.size, N=6, tied_output=True)
    return settings, corpus, model, tiny.drawn(model)


# A whole run.


@pytest.fixture(scope="module")
def finished(tmp_path_factory, file):
    folder = tmp_path_factory.mktemp("run")
    sizes = {
        "model.M": 1,
        "model.D": 32,
        "model.H": 2,
        "mesh.data": 2,
        "train.batch_size": 64,
        "train.steps": 160,
        "train.evaluate_every": 80,
    }
    optim = {"optim.learning_rate": 0.01, "optim.warmup_steps": 20}
    changes = {"pairs.source": file} | SIZES | sizes | optim
    config = tiny.config_file(folder, "translation", **changes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compilation, "measured_peak", lambda *, devices: 1e9)
        outcome = tiny.run("--config", config, "--workdir", str(folder / "run"))
    return outcome, folder / "run"


def test_a_run_from_its_command_to_its_figures(finished):
    outcome, folder = finished
    assert (outcome.code, outcome.err) == (0, "")
    drawn = {found.stem: found for found in (folder / "figures").iterdir()}
    assert drawn.keys() == {"loss", "cross_attention"}
    assert all(found.read_bytes().startswith(PNG) for found in drawn.values())
    for found in (*drawn.values(), folder / "sample.txt"):
        assert str(found) in outcome.out
    assert (folder / "sample.txt").read_text(encoding="utf-8") in outcome.out
    saved = pretrained_tokenizer.read(folder)
    assert saved.size == 300 and saved.decode(saved.encode("one two")) == "one two"
    assert "pairs to train on: 5" in outcome.out and "11 held-out sentences, 0" in outcome.out


def test_held_out_sentences_are_translated(finished):
    """Word by word, but no held-out sentence was seen: the decoder must have found the words in the source."""
    outcome, folder = finished
    summary = json.loads((folder / "summary.json").read_text())
    for way in ("greedy", "beam"):
        assert summary[f"eval/chrf_{way}"] > 70 > 60 > summary["baseline/chrf"]
        assert summary[f"eval/bleu_{way}"] > 50 > 40 > summary["baseline/bleu"]
    losses = [row["eval/loss"] for row in log.read(folder) if "eval/loss" in row]
    assert len(losses) == 2 and losses[1] < losses[0] < math.log(300)
    blocks = (folder / "sample.txt").read_text(encoding="utf-8").strip().split("\n\n")
    assert len(blocks) == 11
    right = 0
    for block in blocks:
        source, truth, greedy, beam = (line.split(": ", 1)[1].strip() for line in block.split("\n"))
        assert (source, truth) in SAID
        right += (greedy == truth) + (beam == truth)
    assert right > 11


# The task.


def test_the_loss_sees_the_real_words_of_the_source_and_earlier_words_of_the_target(file):
    task = tiny.task_of(tiny.settings("translation", **{"pairs.source": file} | SIZES | {"pairs.N": 7}))
    batch, params, measure = task.train[0], tiny.drawn(task), jax.jit(task.loss_and_metrics)
    assert batch["source_BS"].shape == (16, 7) and task.tokens_per_example == 14
    real_B = batch["valid_BS"].sum(1)
    assert real_B.max() < 7

    def loss(changed, at_B, **other):
        changed_BN = np.where(np.arange(7) == np.reshape(at_B, (-1, 1)), subwords.EOS + 5, batch[changed])
        return float(measure(params, batch | other | {changed: changed_BN}, None)["loss"][0])

    same = loss("w_BN", -1)
    assert loss("source_BS", real_B) == same != loss("source_BS", real_B - 1)
    early = {"weight_BN": batch["weight_BN"] * (np.arange(7) < 2)}
    assert loss("w_BN", 2, **early) == loss("w_BN", -1, **early) != loss("w_BN", 1, **early)
    full = {"valid_BS": np.ones((16, 7), bool)}
    assert loss("source_BS", real_B, **full) != loss("source_BS", -1, **full) != same


def test_the_baseline_is_the_most_frequent_target_token(made):
    _, corpus, _, _ = made
    rows = pairs.Rows(np.zeros((2, 4), np.int32), np.array([[5, 5, 2, 0], [7, 2, 0, 0]], np.int32), 0)
    asked = pairs.Rows(np.zeros((1, 4), np.int32), np.array([[2, 5, 5, 2], [5, 2, 0, 0]], np.int32), 0)
    corpus = corpus._replace(train=rows, evaluation=asked)  # 5 and 2 are equally frequent: the smaller id answers
    assert translation.most_frequent(corpus) == pytest.approx(3 / 6)
    rows = rows._replace(target_BN=np.array([[5, 5, 5, 2], [7, 2, 0, 0]], np.int32))
    assert translation.most_frequent(corpus._replace(train=rows, evaluation=rows)) == pytest.approx(3 / 6)


def test_what_is_translated_depends_on_the_sentences_alone_and_keeps_all_references():
    held_out = [(f"s{i}", f"t{i}") for i in range(97)] + [("s5", "another")]
    sources, references = translation.asked(held_out, 13)
    again, their_references = translation.asked(held_out[::-1], 13)
    assert sources == again and len(sources) == 13 and sources != [f"s{i}" for i in range(13)]
    assert list(map(sorted, references)) == list(map(sorted, their_references))
    sources, references = translation.asked(held_out, 1000)
    assert len(sources) == 97 and references[sources.index("s5")] == ["t5", "another"]


# Decoding.


def greedy(model, params, id_S, N):
    """The most likely word each time, all of the target read anew for each of its words."""
    apply = jax.jit(model.apply)
    w_N = [subwords.BOS]
    while len(w_N) <= N and w_N[-1] != subwords.EOS:
        padded_N = np.array(w_N + [0] * (N - len(w_N)), np.int32)
        logits_BNW, _ = apply(params, id_S[None], (id_S != subwords.PAD)[None], padded_N[None])
        w_N.append(int(logits_BNW[0, len(w_N) - 1].argmax()))
    return w_N[1:]


def test_greedy_translations_are_those_of_the_whole_model_whatever_the_batch(made):
    settings, corpus, model, params = made
    cross = jax.tree.map(lambda leaf: 3 * leaf, params["decoder"]["blocks"]["value_cross"])
    blocks = params["decoder"]["blocks"] | {
        "value_cross": cross
    }  # strong, so that other sources are translated otherwise
    params = params | {"decoder": params["decoder"] | {"blocks": blocks}}
    sentences = [source for source, _ in SAID[::109]]
    small = tiny.settings(
        "translation", **{"pairs.source": settings.pairs.source} | SIZES | {"train.evaluate_batch": 4}
    )
    with mock.patch.object(translation.beam, "search", wraps=translation.beam.search) as search:
        found = translation.translator(small, corpus, model)(params, sentences)
    asked = search.call_args.kwargs
    assert {name: asked[name] for name in ("beam", "steps", "stop", "length_penalty")} == {
        "beam": 4,
        "steps": 6,
        "stop": (subwords.EOS,),
        "length_penalty": 0.6,
    }
    assert len(sentences) == 6 and list(found) == ["greedy", "beam"]  # six in batches of four
    source_BS, _ = pairs.padded(corpus.subwords, sentences, N=6)
    slow = [corpus.subwords.decode(greedy(model, params, id_S, 6)) for id_S in source_BS]
    assert found["greedy"] == slow and len(set(slow)) > 1
    assert len(found["beam"]) == 6


def test_a_sentence_that_is_too_long_is_translated_by_nothing(made):
    settings, corpus, model, params = made
    found = translation.translator(settings, corpus, model)(params, ["one two three", "one two three four five one"])
    assert [some[1] for some in found.values()] == ["", ""] and found["greedy"][0] != ""


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pairs.N": 1}, "pairs.N must be at least 2"),
        ({"pairs.N": 2}, "at most N = 2 tokens a side"),
        ({"pairs.vocabulary": 3}, "at least 259 ids"),
        ({"pairs.score_sentences": 0}, "pairs.score_sentences must be at least 2"),
        ({"pairs.share": 0.0}, "share of the pairs"),
        ({"pairs.source": "nowhere.tsv"}, "nor a path that exists"),
        ({"model.norm": "instance"}, "later tokens"),
    ],
)
def test_wrong_settings_are_one_sentence(file, changes, words):
    with pytest.raises(errors.UserError, match=words):
        tiny.task_of(tiny.settings("translation", **{"pairs.source": file} | SIZES | changes))


def test_settings_of_other_experiments_are_refused(tmp_path, file):
    config = tiny.config_file(tmp_path, "translation", **{"pairs.source": file, "text.N": 7} | SIZES)
    outcome = tiny.run("--config", config, "--workdir", str(tmp_path / "run"))
    assert outcome.code == 2 and 'the config of this experiment has no "text"' in outcome.err


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
    for found, wanted in (([], []), (["a"], []), (["a"], [[]])):
        with pytest.raises(ValueError, match="references"):
            translation_score.scores(found, wanted)


def test_a_translation_that_ignores_the_source_is_the_baseline():
    references = [["the cat sat on the mat"], ["a dog ran away today"], ["it is so very hot in here"]]
    found = translation.score({"greedy": [some[0] for some in references]}, references)
    assert [found["eval/chrf_greedy"], found["eval/bleu_greedy"]] == pytest.approx([100, 100])
    assert 0 < found["baseline/chrf"] < 30 and found.keys() == {
        "eval/chrf_greedy",
        "eval/bleu_greedy",
        "baseline/chrf",
        "baseline/bleu",
    }


def test_without_the_library_the_extra_is_named_before_anything_is_read(file):
    real = builtins.__import__

    def refuse(name, *rest, **more):
        if name.split(".")[0] == "sacrebleu":
            raise ImportError(name)
        return real(name, *rest, **more)

    with mock.patch.object(builtins, "__import__", refuse):
        with pytest.raises(errors.UserError, match=r'sacrebleu: pip install -e "\.\[text\]"'):
            tiny.task_of(tiny.settings("translation", **{"pairs.source": "nowhere.tsv"} | SIZES))


def test_cross_attention_has_the_words_of_both_sides(tmp_path):
    A_MHNS = np.random.default_rng(0).dirichlet(np.ones(5), (2, 3, 7))
    draw = functools.partial(translation_figures.cross_attention, tmp_path / "a.png", A_MHNS=A_MHNS)
    source, target = ["I", " $won", "!", "é", "[EOS]"], list("abcdefg")
    with mock.patch.object(translation_figures.plots, "write") as written:
        draw(source=source, target=target)
    axes = written.call_args.args[0].axes
    assert [label.get_text() for label in axes[0].get_yticklabels()] == target
    assert [label.get_text() for label in axes[4].get_xticklabels()] == ["I", "␣$won", "!", "é", "[EOS]"]
    assert np.allclose(axes[6].images[0].get_array(), A_MHNS[1, 1]) and axes[6].get_title() == ""
    assert np.allclose(axes[4].images[0].get_array(), A_MHNS[1].mean(0)) and axes[2].get_title() == "head 2"
    draw(source=source, target=target)
    assert (tmp_path / "a.png").read_bytes().startswith(PNG)
    with pytest.raises(ValueError, match="7 x 5 weights do not fit 5 target and 7 source"):
        draw(source=target, target=source)


def test_a_long_sentence_and_a_deep_model_are_cut_and_said(tmp_path):
    A_MHNS = np.ones((13, 9, 40, 35)) * np.linspace(0, 1, 13)[:, None, None, None]
    with mock.patch.object(translation_figures.plots, "write") as written:
        translation_figures.cross_attention(tmp_path / "a", A_MHNS=A_MHNS, source=["a"] * 35, target=["b"] * 40)
    title = written.call_args.args[0].get_suptitle()
    assert "12 of 13 layers, 8 of 9 heads, 32 of 40 rows, 32 of 35 columns" in title
    first = written.call_args.args[0].axes[0]
    assert first.get_ylabel() == "layer 2" and np.allclose(first.images[0].get_array(), np.full((32, 32), 1 / 12))

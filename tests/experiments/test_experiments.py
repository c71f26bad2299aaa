"""Every experiment of text and of classes, and every variant that a config can name, on eight devices."""

import functools
import json
import math

import jax
import numpy as np
import pytest
import tiny
from scipy import special
from small_files import idx, write

from experiments import language
from experiments.build import checks, model as models, splits
from experiments.data import corpus as corpora, tokenizer
from experiments.engine import by_name, disk, log
from experiments.figures import images
from tfm import block, embed, head, mlp, norm, position, transformer
from tfm.attention import implementations, mask as masks, relative_position, score, value

ROOMS = {"score": score, "value": value, "norm": norm, "mlp": mlp, "position": position}
ROOMS |= {"relative_position": relative_position}
OFFERED = {field: by_name.candidates(room) for field, room in ROOMS.items()}
OFFERED |= {"scale": score.SCALES, "block": block.ORDERS, "bias": block.BIASES, "outer_norm": checks.OUTER_NORMS}
OFFERED |= {"attention": implementations.NAMES, "remat": transformer.REMAT, "compute_dtype": models.DTYPES}


def answered(answer="pooled", **changes) -> jax.ShapeDtypeStruct:
    """What a model of images answers with, of which nothing is computed."""
    own = {"model__M": 1, "model__compute_dtype": "bfloat16", "model__attention": "flash"} | changes
    made = models.build_vision_model(tiny.settings("vision", **own).model, output=answer, Y=8, X=8, Z=1, patch=4, C=3)
    inputs = embed.cut(np.zeros((2, 8, 8, 1), np.float32), size=4)
    return jax.eval_shape(
        functools.partial(made.apply, mask=None), jax.eval_shape(made.init, jax.random.key(0)), inputs
    )[0]


@pytest.mark.parametrize("field", OFFERED)
def test_every_variant_that_a_config_can_name_makes_a_model(field):
    for name in OFFERED[field]:
        made = answered(**{f"model__{field}": name})
        assert (made.shape, made.dtype) == ((2, 3), np.float32), name


def test_every_head_of_classes_answers():
    for name in models.CLASS_HEADS:
        assert answered(name).shape == (2, 3), name


def text_settings(folder, **changes):
    (folder / "text.txt").write_bytes(tiny.TEXT * 3)
    return tiny.settings("language", text__source=str(folder / "text.txt"), model__M=1, **changes)


def test_a_run_from_its_command_to_its_figures_learns_and_writes_text(tmp_path, monkeypatch):
    """From a config made for one TPU: heads that share keys, bfloat16, microbatches; the sample uses the cache."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_bytes(tiny.TEXT * 3)
    file, folder = str(by_name.ROOT / "configs" / "colab_v5e.py"), tmp_path / "run"
    words = "text.source=text.txt text.N=16 model.M=1 model.D=32 model.F=16 train.batch_size=16 train.accumulation=2"
    words += " train.steps=40 train.log_every=10 train.evaluate_every=20 optim.warmup_steps=1 optim.learning_rate=0.01"
    words += " mesh.data=1"
    flags = ["--config", file, "--workdir", str(folder), *(f"--config.{word}" for word in words.split())]
    refused = tiny.run(*flags)
    assert refused.code == 2 and "text.tokenizer = gpt2/tokenizer.json" in refused.err
    own = tokenizer.make("bytes", [b"a"]).files["tokenizer.json"]
    disk.write(disk.folder(tmp_path, "gpt2") / "tokenizer.json", own)
    outcome = tiny.run(*flags)
    assert (outcome.code, outcome.err) == (0, "")
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["experiment"], summary["steps"], summary["devices"]) == ("language", 40, 1)
    assert summary["sources"].keys() >= {"colab_v5e.py"} and "cpu" in summary["device"]
    assert 0 < summary["baseline/accuracy"] < summary["eval/accuracy"] <= 1
    drawn = list((folder / "figures").iterdir())
    assert {file.name for file in drawn} == {"loss.png", "attention.png"}
    text = (folder / "sample.txt").read_text(encoding="utf-8")
    assert text.startswith("\n") and len(text.encode()) > 16
    for part in (*drawn, folder / "sample.txt", text, "FLOP per step", "tokens/s", "attention: flash", "eval/loss"):
        assert str(part) in outcome.out
    rows = log.read(folder)
    assert max(row["step"] for row in rows) == 40 and all(math.isfinite(x) for row in rows for x in row.values())
    for name in ("train/loss", "eval/loss"):
        losses = [row[name] for row in rows if name in row]
        assert losses[-1] < losses[0] and losses[-1] < 0.8 * math.log(256)


def test_hidden_words_are_filled_in(tmp_path):
    settings = text_settings(tmp_path, text__objective="masked", text__N=31)
    _, (files, _), out = tiny.shown(settings, tmp_path, [{"step": 1, "train/loss": 2.0}])
    assert [file.name for file in files] == ["sample.txt", "loss.png", "attention.png"]
    blocks = files[0].read_text(encoding="utf-8").strip().split("\n\n")
    assert len(blocks) == 4
    for text in blocks:
        hidden, filled, truth, right = text.split("\n")
        assert (hidden[:8], filled[:8], truth[:8]) == ("masked: ", "filled: ", "truth:  ") and text in out
        assert len(truth) == len(hidden) == 8 + 31
        differ = [at for at, (a, b) in enumerate(zip(hidden[8:], truth[8:], strict=True)) if a != b]
        assert all(hidden[8:][at] == "_" for at in differ)
        assert int(right.split()[0]) <= len(differ) <= int(right.split()[2]) <= hidden[8:].count("_")


def test_a_held_out_prefix_is_read_both_ways_and_continued_through_the_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(language, "TEMPERATURE", 0.0)
    own = {"text__objective": "prefix", "text__N": 32, "model__relative_position": "rotary_halves"}
    settings = text_settings(tmp_path, **own)
    work, w_N = tiny.work_of(settings), [*map(int, corpora.read_corpus(settings.text, ()).evaluation_T[:16])]
    params = tiny.drawn(work.task)  # by which a prompt that is read one way is continued otherwise
    sample, *_ = work.figures(params, tmp_path, [])
    model = models.build_language_model(settings.model, head=head.next_word, W=256, N=32)
    mask = masks.either(masks.causal, masks.prefix(16))
    apply = jax.jit(functools.partial(model.apply, mask=mask))
    while len(w_N) < 32:
        logits_BNW, _ = apply(params, np.array([w_N + [0] * (32 - len(w_N))]))
        w_N.append(int(logits_BNW[0, len(w_N) - 1].argmax()))
    assert sample.read_bytes() == f"{bytes(w_N).decode('utf-8', 'replace')}\n".encode()


def test_where_no_word_is_a_new_line_text_goes_on_from_the_first_that_was_held_out(tmp_path):
    (tmp_path / "text.txt").write_text("abc" * 60 + "cabcabcabcabcabcabca")
    changes = {"text__source": str(tmp_path / "text.txt"), "text__tokenizer": "characters", "text__N": 5}
    _, ((sample, *_), _), _ = tiny.shown(tiny.settings("language", **changes), tmp_path, [])
    assert len(sample.read_text()) == 5 + 1 and sample.read_text()[0] == "c"


EVALUATED = [  # batch, its microbatches, tokens of an example, examples -> those evaluated at once
    (64, 1, 64, 10**6, 256),
    (64, 8, 1024, 10**6, 16),
    (64, 2, 1024, 10**6, 32),  # a microbatch has more tokens
    (16, 1, 64, 29, 32),  # padded
]


@pytest.mark.parametrize(("batch", "parts", "tokens", "n", "found"), EVALUATED)
def test_so_many_examples_are_evaluated_at_once(batch, parts, tokens, n, found):
    of = tiny.settings("language", train__batch_size=batch, train__accumulation=parts).train
    assert splits.evaluation_batch_size(of, tokens, n) == found


def test_images_are_shown_with_their_classes(tmp_path, monkeypatch):
    """23 images in three classes 0, 1, 2, 2, 0, ...: the most frequent training class, 2, is 11 of them."""
    given, draw = {}, images.predictions
    monkeypatch.setattr(images, "predictions", lambda path, **some: draw(path, **given.update(some) or some))
    rng = np.random.default_rng(0)
    for part, n in (("train", 40), ("t10k", 23)):
        image, label = rng.integers(0, 256, (n, 6, 9), np.uint8), np.minimum(np.arange(n, dtype=np.uint8) % 4, 2)
        contents = {f"{part}-images-idx3-ubyte": idx(image), f"{part}-labels-idx1-ubyte": idx(label)}
        write(tmp_path, **contents)
    settings = tiny.settings("vision", image__source=str(tmp_path), image__patch=3, model__M=1)
    work, (files, numbers), _ = tiny.shown(settings, tmp_path, [{"step": 1, "train/loss": 2.0}])
    assert [file.stem for file in files] == ["loss", "predictions", "confusion", "attention"]
    assert work.task.baseline == {"accuracy": pytest.approx(11 / 23)} and "data.json" in work.files
    wrong_B = given["label_B"] != given["predicted_B"]
    logits_BC = jax.jit(work.apply)(tiny.drawn(work.task), work.task.evaluation[0])
    assert 0 < wrong_B.sum() < 23 and (np.diff(wrong_B.astype(int)) <= 0).all()  # these first
    assert f"; {wrong_B.sum()} of 23 test images wrong" in given["title"]
    assert sorted(given["predicted_B"]) == sorted(np.argmax(logits_BC, -1)[:23])


def test_the_baseline_of_text_is_the_most_frequent_training_token(tmp_path):
    (tmp_path / "text.txt").write_bytes(b"a" * 60 + b"b" * 30 + b"abbbaabbbb")  # the last ten are held out
    task = tiny.task_of(tiny.settings("language", text__source=str(tmp_path / "text.txt"), text__N=4))
    assert task.baseline["accuracy"] == pytest.approx(2 / 9)  # of "bbbaabbbb", what follows the first
    assert task.tokens_per_example == 4


def test_who_sees_what_comes_later_and_padding_is_seen_by_none(tmp_path):
    """Nobody in causal text; in the half that is given a prefix is seen both ways, and nothing is asked there."""
    (tmp_path / "text.txt").write_bytes(tiny.TEXT)
    losses, changes = {}, {"text__source": str(tmp_path / "text.txt"), "text__N": 7, "model__M": 1}
    for objective in ("causal", "prefix", "masked"):
        task = tiny.task_of(tiny.settings("language", **changes, text__objective=objective))
        measure, params, batch = tiny.measure(task), tiny.drawn(task), task.train[0]
        if objective != "masked":
            assert (batch["weight_BN"] == (np.arange(7) >= (2 if objective == "prefix" else 0))).all()
        batch = batch | {"weight_BN": np.float32(np.arange(7) < 2) * np.ones((16, 1), np.float32)}

        def loss(changed, measure=measure, params=params, batch=batch, **arrays):
            w_BN = np.where(np.arange(7) == changed, ord("#"), batch["w_BN"])
            return float(measure(params, batch | arrays | {"w_BN": w_BN}, None)["loss"][0])

        losses[objective] = [loss(changed) for changed in (None, 1, 2, 3, 6)]
    short = {"valid_BS": np.arange(7) < np.full((16, 1), 5)}
    assert loss(None, **short) == loss(5, **short) == loss(6, **short) != loss(None)
    nothing, at_1, *later = losses["causal"]
    assert nothing != at_1 and later == [nothing] * 3
    nothing, at_1, at_2, *later = losses["prefix"]  # of three words
    assert len({nothing, at_1, at_2}) == 3 and later == [nothing] * 2
    assert len(set(losses["masked"])) == 5


def test_of_two_mixed_images_each_label_counts_by_its_share_and_those_evaluated_are_not_changed():
    works = [tiny.work_of(tiny.settings("vision", image__patch=4, image__augment=some)) for some in ([], ["cutmix"])]
    still, mixed = (work.task.evaluation[0]["image_BYXZ"] for work in works)
    assert np.array_equal(still, mixed)
    batch, params = works[1].task.train[0], tiny.drawn(works[1].task)
    label_B, other_B, share_B = (batch[name] for name in ("label_B", "other_label_B", "other_share_B"))
    logits_BC = np.asarray(jax.jit(works[1].apply)(params, batch), np.float64)
    surprise_BC = special.logsumexp(logits_BC, axis=-1, keepdims=True) - logits_BC
    b, right_BC = np.arange(len(label_B)), np.eye(10)[logits_BC.argmax(-1)]
    found = tiny.measure(works[1].task)(params, batch, None)
    for name, x_BC in (("loss", surprise_BC), ("accuracy", right_BC)):
        expected = np.sum((1 - share_B) * x_BC[b, label_B] + share_B * x_BC[b, other_B])
        np.testing.assert_allclose(found[name], [expected, len(b)], rtol=1e-5)


def test_dropout_is_drawn_for_each_key_and_not_without_one():
    task = tiny.task_of(tiny.settings("vision", image__patch=4, model__dropout=0.5, model__M=1))
    measure, params, batch = tiny.measure(task), tiny.drawn(task), task.train[0]
    keys = [jax.random.split(jax.random.key(seed), 16) for seed in (0, 1)]
    assert len({float(measure(params, batch, key_B)["loss"][0]) for key_B in (*keys, None)}) == 3

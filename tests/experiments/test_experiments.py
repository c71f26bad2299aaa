"""The experiments language and vision, and a model of every variant that a config can name."""

import functools
import json
import math

import jax
import numpy as np
import pytest
import small_files
import tiny
from scipy import special
from sklearn import neighbors
from small_files import idx_folder

from experiments import language
from experiments.config import by_name, disk
from experiments.data import corpus as corpora, tokenization
from experiments.figures import images as image_figures
from experiments.folder import records
from experiments.model import baselines, build, checks, splits
from tfm import block as blocks, embed as embeds, head as heads, mlp, norm, position, transformer
from tfm.attention import implementations, mask as masks, relative_position, score, value

MODULES = {"score": score, "value": value, "norm": norm, "mlp": mlp, "position": position}
MODULES |= {"relative_position": relative_position}
VARIANTS = {field: by_name.candidates(room) for field, room in MODULES.items()}
VARIANTS |= {"scale": score.SCALES, "block": blocks.ORDERS, "bias": blocks.BIASES, "outer_norm": checks.OUTER_NORMS}
VARIANTS |= {"attention": implementations.NAMES, "remat": transformer.REMAT, "compute_dtype": build.DTYPES}
VARIANTS |= {"head": build.CLASS_HEADS}


@pytest.mark.parametrize("field", VARIANTS)
def test_every_variant_that_a_config_can_name_makes_a_model(field):
    inputs, key = embeds.cut(np.zeros((2, 8, 8, 1), np.float32), size=4), jax.random.key(0)
    for name in VARIANTS[field]:
        changes = {"model.M": 1, "model.compute_dtype": "bfloat16", "model.attention": "flash"}
        changes |= {f"model.{field}": name} if field != "head" else {}
        m, output = tiny.settings("vision", **changes).model, name if field == "head" else "pooled"
        model = build.vision_model(m, output=output, Y=8, X=8, Z=1, patch=4, C=3)
        logits, _ = jax.eval_shape(lambda key, model=model: model.apply(model.init(key), inputs, mask=None), key)
        assert (logits.shape, logits.dtype) == ((2, 3), np.float32), name


def text_settings(folder, **changes):
    (folder / "text.txt").write_bytes(tiny.TEXT * 3)
    return tiny.settings("language", text__source=str(folder / "text.txt"), model__M=1, **changes)


def test_a_run_of_the_command_learns_and_writes_figures_and_text(tmp_path, monkeypatch):
    """The config is for one TPU: grouped heads, bfloat16, microbatches. The sample uses the cache."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_bytes(tiny.TEXT * 3)
    file, folder = str(by_name.ROOT / "configs" / "colab_v5e.py"), tmp_path / "run"
    changes = "text.source=text.txt text.N=16 model.M=1 model.D=32 model.F=16 train.batch_size=16 train.accumulation=2"
    changes += " train.steps=40 train.log_every=10 train.evaluate_every=20 optim.warmup_steps=1"
    changes += " optim.learning_rate=0.01 mesh.data=1"
    flags = ["--config", file, "--workdir", str(folder), *(f"--config.{change}" for change in changes.split())]
    refusal = tiny.run(*flags)
    assert refusal.code == 2 and "text.tokenizer = gpt2/tokenizer.json" in refusal.err
    content = tokenization.make("bytes", [b"a"]).files["tokenizer.json"]
    disk.write(disk.folder(tmp_path, "gpt2") / "tokenizer.json", content)
    outcome = tiny.run(*flags)
    assert (outcome.code, outcome.err) == (0, "")
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["experiment"], summary["steps"], summary["devices"]) == ("language", 40, 1)
    assert summary["sources"].keys() >= {"colab_v5e.py"} and "cpu" in summary["device"]
    assert 0 < summary["baseline/accuracy"] < summary["eval/accuracy"] <= 1
    figures = list((folder / "figures").iterdir())
    assert {file.name for file in figures} == {"loss.png", "attention.png"}
    text = (folder / "sample.txt").read_text(encoding="utf-8")
    assert text.startswith("\n") and len(text.encode()) > 16
    for part in (*figures, folder / "sample.txt", "FLOP per step", "tokens/s", "attention: flash", "eval/loss"):
        assert str(part) in outcome.out
    assert all(line in outcome.out for line in text.splitlines())
    rows = records.read_metrics(folder)
    assert max(row["step"] for row in rows) == 40 and all(math.isfinite(x) for row in rows for x in row.values())
    for name in ("train/loss", "eval/loss"):
        losses = [row[name] for row in rows if name in row]
        assert losses[-1] < losses[0] and losses[-1] < 0.8 * math.log(256)


def test_masked_tokens_are_filled_in(tmp_path):
    settings = text_settings(tmp_path, text__objective="masked", text__N=31)
    _, (files, _), out = tiny.make_figures(settings, tmp_path, [{"step": 1, "train/loss": 2.0}])
    assert [file.name for file in files] == ["sample.txt", "loss.png", "attention.png"]
    blocks = files[0].read_text(encoding="utf-8").strip().split("\n\n")
    assert len(blocks) == 4
    for text in blocks:
        hidden, prediction, truth, correct = text.split("\n")
        assert (hidden[:8], prediction[:8], truth[:8]) == ("masked: ", "filled: ", "truth:  ") and text in out
        assert len(truth) == len(hidden) == 8 + 31
        different = [index for index, (a, b) in enumerate(zip(hidden[8:], truth[8:], strict=True)) if a != b]
        assert all(hidden[8:][index] == "_" for index in different)
        assert int(correct.split()[0]) <= len(different) <= int(correct.split()[2]) <= hidden[8:].count("_")


def test_a_held_out_prefix_is_read_in_both_directions_and_continued_with_the_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(language, "TEMPERATURE", 0.0)
    changes = {"text__objective": "prefix", "text__N": 32, "model__relative_position": "rotary_halves"}
    settings = text_settings(tmp_path, **changes)
    work, w_N = tiny.work_of(settings), [*map(int, corpora.read_corpus(settings.text, ()).evaluation_T[:16])]
    params = tiny.draw_params(work.task)  # a prompt with a causal mask would have another continuation
    sample = next(work.figures(work, params, tmp_path, []))
    model = build.language_model(settings.model, head=heads.next_word, W=256, N=32)
    mask = masks.prefix(16)
    apply = jax.jit(functools.partial(model.apply, mask=mask))
    while len(w_N) < 32:
        logits_BNW = np.asarray(apply(params, np.array([w_N + [0] * (32 - len(w_N))]))[0])
        w_N.append(int(logits_BNW[0, len(w_N) - 1].argmax()))
    assert sample.read_bytes() == f"{bytes(w_N).decode('utf-8', 'replace')}\n".encode()


def test_without_a_token_for_a_new_line_the_sample_begins_with_the_first_held_out_token(tmp_path):
    (tmp_path / "text.txt").write_text("abc" * 60 + "cabcabcabcabcabcabca")
    changes = {"text__source": str(tmp_path / "text.txt"), "text__tokenizer": "characters", "text__N": 5}
    work = tiny.work_of(tiny.settings("language", **changes, model__M=1))
    sample = next(work.figures(work, tiny.draw_params(work.task), tmp_path, []))
    assert len(sample.read_text()) == 5 + 1 and sample.read_text()[0] == "c"


def test_the_batch_size_of_an_evaluation_depends_on_tokens_and_microbatches():
    """The third has microbatches of more tokens than an evaluation needs. The last has only 29 examples."""
    sizes = {(64, 1, 64, 10**6): 256, (64, 8, 1024, 10**6): 16, (64, 2, 1024, 10**6): 32, (16, 1, 64, 29): 32}
    for (batch, microbatches, tokens, n), size in sizes.items():
        t = tiny.settings("language", train__batch_size=batch, train__accumulation=microbatches).train
        assert splits.evaluation_batch_size(t, tokens, n) == size


def test_the_figures_of_images_show_wrong_predictions_first(tmp_path, monkeypatch):
    """23 evaluation images have the classes 0, 1, 2, 2, 0, ...: 11 have the most frequent training class, 2."""
    values_of_figure, draw = {}, image_figures.predictions
    monkeypatch.setattr(
        image_figures, "predictions", lambda path, **values: draw(path, **values_of_figure.update(values) or values)
    )
    x = np.random.default_rng(0).integers(0, 256, (63, 6, 9), np.uint8)
    label = np.minimum(np.r_[:40, :23].astype(np.uint8) % 4, 2)
    idx_folder(tmp_path, x_train=x[:40], y_train=label[:40], x_test=x[40:], y_test=label[40:])
    settings = tiny.settings("vision", image__source=str(tmp_path), image__patch=3, model__M=1)
    work, (files, numbers), _ = tiny.make_figures(settings, tmp_path, [{"step": 1, "train/loss": 2.0}])
    assert [file.stem for file in files] == ["loss", "predictions", "confusion", "attention"]
    nearest = neighbors.KNeighborsClassifier(1).fit(x[:40].reshape(40, -1), label[:40])
    neighbour = nearest.score(x[40:].reshape(23, -1), label[40:])
    assert tiny.baseline(work.task) == {"accuracy": pytest.approx(11 / 23), "neighbour": pytest.approx(neighbour)}
    monkeypatch.setattr(baselines, "WORK", 40 * 23 * 54 - 1)
    assert tiny.baseline(work.task).keys() == {"accuracy"} and "data.json" in work.files
    is_wrong_B = values_of_figure["label_B"] != values_of_figure["predicted_B"]
    logits_BC = np.asarray(jax.jit(work.apply)(tiny.draw_params(work.task), work.task.evaluation[0]))
    assert 0 < is_wrong_B.sum() < 23 and (np.diff(is_wrong_B.astype(int)) <= 0).all()  # wrong predictions are first
    assert f"{is_wrong_B.sum()} of 23" in values_of_figure["title"]
    assert sorted(values_of_figure["predicted_B"]) == sorted(np.argmax(logits_BC, -1)[:23])


def test_a_tied_output_says_where_the_loss_begins(tmp_path):
    (tmp_path / "text.txt").write_bytes(b"abcde" * 30)
    for head, line in ("linear", ""), ("tied", "text.head = tied: the loss begins 0.3 to 1 nat above ln W = 5.55"):
        settings = tiny.settings("language", text__source=str(tmp_path / "text.txt"), text__N=4, text__head=head)
        assert [*language.describe_head(settings, 256)] == [line] * bool(line)
        assert {line}.issubset({"", *tiny.work_of(settings).lines})


def test_the_baseline_of_text_is_the_most_frequent_training_token(tmp_path):
    (tmp_path / "text.txt").write_bytes(b"a" * 60 + b"b" * 30 + b"abbbaabbbb")  # the last ten letters are held out
    task = tiny.task_of(tiny.settings("language", text__source=str(tmp_path / "text.txt"), text__N=4))
    assert tiny.baseline(task)["accuracy"] == pytest.approx(2 / 9)  # the targets are "bbbaabbbb"
    assert task.tokens_per_example == 4


def test_only_prefix_and_masked_objectives_attend_to_later_tokens_and_none_attends_to_padding(tmp_path):
    """In causal text, no token attends to later tokens. Tokens of a prefix attend to each other and are not targets."""
    (tmp_path / "text.txt").write_bytes(tiny.TEXT)
    losses, changes = {}, {"text__source": str(tmp_path / "text.txt"), "text__N": 7, "model__M": 1}
    for objective in ("causal", "prefix", "masked"):
        task = tiny.task_of(tiny.settings("language", **changes, text__objective=objective))
        measure, params, batch = tiny.measure(task), tiny.draw_params(task), task.train[0]
        if objective != "masked":
            assert (batch["weight_BN"] == (np.arange(7) >= (2 if objective == "prefix" else 0))).all()
        batch = batch | {"weight_BN": np.float32(np.arange(7) < 2) * np.ones((16, 1), np.float32)}

        def loss(position, measure=measure, params=params, batch=batch, **arrays):
            w_BN = np.where(np.arange(7) == position, ord("#"), batch["w_BN"])
            return float(measure(params, batch | arrays | {"w_BN": w_BN}, None)["loss"][0])

        losses[objective] = [loss(position) for position in (None, 1, 2, 3, 6)]
    short = {"valid_BS": np.arange(7) < np.full((16, 1), 5)}
    assert loss(None, **short) == loss(5, **short) == loss(6, **short) != loss(None)
    unchanged, changed_1, *later = losses["causal"]
    assert unchanged != changed_1 and later == [unchanged] * 3
    unchanged, changed_1, changed_2, *later = losses["prefix"]  # the prefix has three tokens
    assert len({unchanged, changed_1, changed_2}) == 3 and later == [unchanged] * 2
    assert len(set(losses["masked"])) == 5


@pytest.mark.parametrize(
    ("experiment", "changes"),
    [("language", {"text__objective": "masked"}), ("text_classification", {}), ("translation", {"pairs__N": 16})],
)
def test_padding_is_at_the_end_as_the_masks_promise(tmp_path, experiment, changes):
    """masks.padding(..., at_end=True) promises it to cuDNN's kernel, which gets only the number of valid keys."""
    if experiment == "translation":
        pytest.importorskip("sacrebleu", reason='the library sacrebleu is missing: pip install -e ".[text]"')
    sections = {"language": ["text"], "translation": ["pairs"], "text_classification": ["texts"]}[experiment]
    task = tiny.task_of(tiny.settings(experiment, **small_files.sources(tmp_path, sections, "one") | changes))
    valid_BS = np.concatenate([batch["valid_BS"] for batch in [task.train[0], *task.evaluation]])
    assert not valid_BS.all() and (valid_BS[:, 1:] <= valid_BS[:, :-1]).all() and valid_BS[:, 0].any()


def test_each_label_of_a_mixed_image_counts_by_its_share_and_evaluation_has_no_mixed_images():
    changes = {"image__patch": 4, "model__M": 1}
    works = [tiny.work_of(tiny.settings("vision", image__augment=names, **changes)) for names in ([], ["cutmix"])]
    np.testing.assert_array_equal(*(work.task.evaluation[0]["v_BNP"] for work in works))
    batch, params = works[1].task.train[0], tiny.draw_params(works[1].task)
    label_B, other_B, share_B = (batch[name] for name in ("label_B", "other_label_B", "other_share_B"))
    logits_BC = np.asarray(jax.jit(works[1].apply)(params, batch), np.float64)
    surprise_BC = special.logsumexp(logits_BC, axis=-1, keepdims=True) - logits_BC
    b, correct_BC = np.arange(len(label_B)), np.eye(10)[logits_BC.argmax(-1)]
    metrics = tiny.measure(works[1].task)(params, batch, None)
    for name, x_BC in (("loss", surprise_BC), ("accuracy", correct_BC)):
        expected = np.sum((1 - share_B) * x_BC[b, label_B] + share_B * x_BC[b, other_B])
        np.testing.assert_allclose(metrics[name], [expected, len(b)], rtol=1e-5)


def test_dropout_is_drawn_for_each_key_and_not_without_one():
    task = tiny.task_of(tiny.settings("vision", image__patch=4, model__dropout=0.5, model__M=1))
    measure, params, batch = tiny.measure(task), tiny.draw_params(task), task.train[0]
    keys = [jax.random.split(jax.random.key(seed), 16) for seed in (0, 1)]
    assert len({float(measure(params, batch, key_B)["loss"][0]) for key_B in (*keys, None)}) == 3

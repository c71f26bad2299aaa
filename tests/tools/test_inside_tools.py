"""The tools patch and heads equal single runs that are edited by hand, and refuse wrong inputs in one sentence."""

import csv
import json

import jax
import jax.numpy as jnp
import numpy as np
import published
import pytest
import tiny
from errors import raises

from experiments.config import errors
from experiments.pretrained import open_model
from experiments.tools import attention, heads, lens, patch
from tfm import inside

CLEAN, CORRUPTED, ANSWER, OTHER = "3 1 4 1 5", "3 2 4 1 5", "7", "9"
PAIR = dict(clean=CLEAN, corrupted=CORRUPTED, answer=ANSWER, other=OTHER)


def read_csv(file) -> list[dict[str, str]]:
    with open(file, newline="", encoding="utf-8") as content:
        return list(csv.DictReader(content))


def parse(text: str) -> np.ndarray:
    return np.array([text.split()], np.int32)


def difference(model, w_BN, **edit) -> float:
    logits_BNW, _ = model.run(w_BN, edit=edit)
    return float(logits_BNW[0, -1, int(ANSWER)] - logits_BNW[0, -1, int(OTHER)])


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    return published.save(tmp_path_factory.mktemp("gpt2"), "gpt2")


def test_patch_writes_the_effect_of_every_place(gpt2, tmp_path):
    files = {"output": tmp_path / "patch.csv", "figure": tmp_path / "patch.png"}
    outcome = tiny.command(patch, checkpoint=gpt2, **PAIR, **files)
    assert outcome.code == 0 and files["figure"].stat().st_size > 5000
    model = open_model.open(gpt2)
    clean, corrupted = difference(model, parse(CLEAN)), difference(model, parse(CORRUPTED))
    assert f"clean {clean:.3f}, corrupted {corrupted:.3f}" in outcome.out
    _, look = model.run(parse(CLEAN), look=("hidden", "y"))
    rows = read_csv(files["output"])
    M, H, N = model.fields.M, model.fields.H, 5
    assert len(rows) == M * (N + H)
    for row in rows[:: len(rows) // 6]:
        name, m, i = row["activation"], int(row["layer"]) - 1, int(row["index"]) - 1

        def edit(x, layer, m=m, i=i, clean_M=look[name]):
            return jnp.where(layer == m, x.at[:, i].set(clean_M[m][:, i]), x)

        value = difference(model, parse(CORRUPTED), **{name: edit})
        np.testing.assert_allclose(float(row["logit_difference"]), value, atol=1e-5)
        np.testing.assert_allclose(float(row["restored"]), (value - corrupted) / (clean - corrupted), atol=1e-3)


def test_pairs_of_a_file_are_averaged(gpt2, tmp_path):
    pairs = [PAIR, PAIR | {"clean": "8 6 4 2 1", "corrupted": "8 6 4 2 2"}]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    lines = [",".join(patch.FIELDS), *(",".join(pair[field] for field in patch.FIELDS) for pair in pairs)]
    (tmp_path / "pairs.csv").write_text("\n".join(lines) + "\n")
    values = []
    for name, options in {
        "jsonl": {"file": tmp_path / "pairs.jsonl"},
        "csv": {"file": tmp_path / "pairs.csv"},
        "one": pairs[0],
        "two": pairs[1],
    }.items():
        patch.run(gpt2, **options, output=tmp_path / f"{name}_out.csv")
        values.append([float(row["logit_difference"]) for row in read_csv(tmp_path / f"{name}_out.csv")])
    jsonl, table, one, two = np.array(values)
    np.testing.assert_array_equal(jsonl, table)
    np.testing.assert_allclose(jsonl, (one + two) / 2, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"clean": "1 2 3"}, ("--clean has 3 tokens", "--corrupted has 5", "same number")),
        ({"answer": "1 2"}, ("--answer", "2 tokens", "single")),
        ({"answer": "x"}, ("--answer", "'x'", "not a token id")),
        ({"other": ""}, ("--other", "missing")),
        ({"file": "pairs.txt"}, ("--clean", "--file", "a file or four texts")),
        ({"corrupted": CLEAN}, ("same logit difference",)),
        ({"other": ANSWER}, ("same logit difference",)),
    ],
)
def test_wrong_pairs_are_refused(change, parts, gpt2):
    with raises(errors.UserError, *parts):
        patch.run(gpt2, **(PAIR | change))


def test_wrong_files_of_pairs_are_refused(gpt2, tmp_path):
    for text, parts in {
        json.dumps(PAIR) + "\n" + json.dumps(PAIR | {"clean": "1 2", "corrupted": "1 3"}): ("line 2", "2 tokens", "5"),
        json.dumps(PAIR | {"answer": 0}): ("line 1", "answer", "text"),
        json.dumps({"clean": "1"}): ("line 1", "corrupted", "missing"),
        "": ("no pairs",),
    }.items():
        (tmp_path / "pairs.jsonl").write_text(text)
        with raises(errors.UserError, tmp_path / "pairs.jsonl", *parts):
            patch.run(gpt2, file=tmp_path / "pairs.jsonl")
    (tmp_path / "pairs.txt").write_text("1 2")
    with raises(errors.UserError, "pairs.txt", "not a table"):
        patch.run(gpt2, file=tmp_path / "pairs.txt")


@pytest.mark.parametrize("family", ["gpt2", "llama", "bert"])
def test_heads_of_published_models_are_worth_what_single_runs_lose(family, tmp_path):
    folder = published.save(tmp_path / family, family)
    output = tmp_path / "heads.csv"
    outcome = tiny.command(heads, checkpoint=folder, tokens=6, sequences=2, output=output, figure=tmp_path / "h.png")
    assert outcome.code == 0, outcome.err
    model, rows = open_model.open(folder), read_csv(output)
    M, H = model.fields.M, model.fields.H
    assert [(row["layer"], row["head"]) for row in rows] == [
        (f"{m + 1}", f"{h + 1}") for m in range(M) for h in range(H)
    ]
    key = jax.random.key(0)
    w_BN = np.asarray(inside.draw_repeated(key, W=model.facts["W"], B=2, period=3))
    plain, look = model.run(w_BN, look=("y", "A"))
    m, h = M - 1, H - 1
    mean_V = look["y"][m][:, h].mean((0, 1))
    edited, _ = model.run(w_BN, edit={"y": lambda y, layer: jnp.where(layer == m, y.at[:, h].set(mean_V), y)})
    p, q = (np.asarray(jax.nn.log_softmax(x)) for x in (plain, edited))
    if family == "bert":
        worth = (np.exp(p) * (p - q)).sum(-1).mean()
    else:
        target_BN = w_BN[:, 4:, None]
        worth = np.mean(np.take_along_axis(p[:, 3:-1], target_BN, -1) - np.take_along_axis(q[:, 3:-1], target_BN, -1))
    np.testing.assert_allclose(float(rows[-1]["worth"]), worth, atol=2e-5)
    np.testing.assert_allclose(float(rows[-1]["previous"]), np.diagonal(look["A"][m, :, h], -1, 1, 2).mean(), atol=1e-5)


def test_heads_of_an_image_classifier_read_images(tmp_path):
    from PIL import Image

    run = published.write_run(tmp_path / "run", "vision", **{"image.patch": 4})
    with raises(errors.UserError, "--file", "missing"):
        heads.run(run)
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (8, 8), dtype=np.uint8)).save(tmp_path / "a.png")
    text = heads.run(run, file=tmp_path / "a.png")
    assert text.startswith("1 image\n") and "worth" in text and "previous" not in text


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"tokens": 5}, ("--tokens = 5", "even")),
        ({"tokens": 10_000}, ("--tokens", "even")),
        ({"file": "a"}, ("--file",)),
    ],
)
def test_wrong_inputs_of_heads_are_refused(options, parts, gpt2):
    with raises(errors.UserError, *parts):
        heads.run(gpt2, **options)


def test_heads_needs_classes_of_which_one_is_right(tmp_path):
    folder = published.save_bert_classifier(tmp_path / "bert", problem_type="regression")
    with raises(errors.UserError, folder, "predicts numbers"):
        heads.run(folder, tokens=6)


def test_prefixes_are_refused(tmp_path):
    run = published.write_run(tmp_path / "run", "language", **{"text.objective": "prefix"})
    for tool, options in {heads: {}, patch: PAIR, attention: {"prompt": "a"}, lens: {"prompt": "a"}}.items():
        with raises(errors.UserError, run, "continues a prefix"):
            tool.run(run, **options)


@pytest.mark.parametrize(("tool", "options"), [(patch, PAIR), (heads, {"tokens": 6})])
def test_a_full_disk_is_one_sentence(tool, options, gpt2, tmp_path, monkeypatch):
    def fail(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("experiments.figures.plots.write", fail)
    with raises(errors.UserError, tmp_path / "a.png", "cannot be written"):
        tool.run(gpt2, **options, figure=tmp_path / "a.png")

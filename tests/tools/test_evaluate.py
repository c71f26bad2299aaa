"""A run with a BPE of its own text in use: what it makes of a named file; sampled, exported, opened by others."""

import contextlib
import io
import json
import pathlib

import numpy as np
import published
import pytest
import tiny
from scipy.special import log_softmax
from small_files import KING

from experiments.data import bpe, perplexity, pretrained_tokenizer, text
from experiments.pretrained import open_model
from experiments.tools import evaluate, export, sample

N = 7


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> pathlib.Path:
    """The folder of a model of 300 words at most, beside a test.txt."""
    folder = tmp_path_factory.mktemp("bpe")
    (folder / "text.txt").write_bytes(KING)
    (folder / "test.txt").write_bytes(b"Two kings\twho read fight\n" * 3 + "kingé".encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        return published.run(folder / "run", "language", **words(folder / "text.txt"))


def words(file: pathlib.Path) -> dict:
    return {"text.source": str(file), "text.tokenizer": "bpe:300", "text.N": N, "model.M": 1}


def counted_slowly(model: open_model.Trained, token_T: np.ndarray, stride: int) -> float:
    """The nats of all tokens but the first."""
    nats, end = 0.0, 1
    for start in range(0, len(token_T), stride):
        window = token_T[start : start + N + 1]
        if end < start + len(window):
            seen_N = np.pad(window[:-1], (0, N + 1 - len(window)))
            log_p_NW = log_softmax(np.float64(model(seen_N[None])[0]), axis=-1)
            log_p_N = log_p_NW[np.arange(len(window) - 1), window[1:]]
            nats, end = nats - log_p_N[end - start - 1 :].sum(), start + len(window)
    assert end == len(token_T) > 3 * N
    return nats


def test_every_token_is_counted_once_behind_those_of_its_window(run, tmp_path):
    file, model = run.with_name("test.txt"), open_model.open(run)
    token_T = open_model.words(model).encode(file.read_text())
    first, n = len(open_model.words(model).decode(token_T[:1]).encode()), len(token_T) - 1
    outcome = tiny.command(evaluate, checkpoint=run, file=file, workdir=tmp_path / "out")
    assert (outcome.code, outcome.err) == (0, "") and f"{81 - first} bytes, 16 words): {n} tokens" in outcome.out
    assert (tmp_path / "out" / "evaluation.txt").read_text() == outcome.out
    assert f"{counted_slowly(model, token_T, N) / n:.4f}" in outcome.out
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"said": file.read_text()}))
    with contextlib.redirect_stdout(io.StringIO()):
        found = evaluate.run(run, file=rows, field="said", stride=3)
    nats = counted_slowly(model, token_T, 3)
    right = {"nats_per_token": nats / n, "bits_per_byte": nats / np.log(2) / (81 - first)}
    right |= {"word_perplexity": np.exp(nats / 16), "token_perplexity": np.exp(nats / n)}
    assert {name: found[name] for name in right} == pytest.approx(right, rel=1e-4)


def test_what_begins_every_text_is_not_asked_for(run):
    model = open_model.open(run)
    token_T = open_model.words(model).encode(run.with_name("test.txt").read_text())
    often = int(np.bincount(token_T[1:]).argmax())
    asked = [
        sum(int(n) for _, _, n in evaluate.counts(model, token_T, N=N, stride=0, never=never)) for never in (-1, often)
    ]
    assert asked == [len(token_T) - 1, np.sum(token_T[1:] != often)] and asked[0] > asked[1]


def test_its_words_go_with_it_where_others_open_it(run, tmp_path):
    """Its text ends where a document does."""
    outcome = tiny.command(export, checkpoint=run, family="gpt2", workdir=tmp_path / "out")
    assert (outcome.code, outcome.err) == (0, "")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == 0
    with contextlib.redirect_stdout(io.StringIO()):
        told = sample.run(tmp_path / "out", prompt="A king", max_new_tokens=7, temperature=0.0)
        assert told == sample.run(run, prompt="A king", max_new_tokens=7, temperature=0.0)


def test_a_run_from_it_has_its_words_and_goes_on_with_no_others(run, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(run.parent))
    monkeypatch.setattr(bpe, "train", None)
    changes = tiny.TRAIN | tiny.MODEL | words(run.with_name("text.txt"))
    rows = [{"step": 1, "eval/loss": 2.0}]
    _, (_, found), _ = tiny.shown(tiny.settings("language", **changes), tmp_path, rows)
    part = text.load(str(run.with_name("text.txt"))).evaluation
    made = pretrained_tokenizer.read(run)
    token_T = made.join(part)
    nats, size = 2.0 * (len(token_T) - 1), perplexity.size(part, first=made.decode(token_T[:1]))
    right = {"bits_per_byte": nats / np.log(2) / size.bytes, "word_perplexity": np.exp(nats / size.words)}
    assert found == pytest.approx({f"eval/{name}": number for name, number in right.items()})
    folder = published.run(tmp_path / "run", "language", **changes)
    (folder / "tokenizer.json").write_text("{}")
    saved = json.loads((folder / "config.json").read_text()) | {"versions": {}, "devices": "", "commit": ""}
    (folder / "config.json").write_text(json.dumps(saved))
    outcome = tiny.run("--config", tiny.config_file(tmp_path, "language", **changes), "--workdir", str(folder))
    assert outcome.code == 2 and "tokenizer.json names other words than this config makes now" in outcome.err


def test_what_cannot_be_evaluated_is_refused_in_a_sentence(run, tmp_path):
    (tmp_path / "short.txt").write_text("A")
    (tmp_path / "image.txt").write_bytes(b"\x89PNG\0")
    for file, stride, sentence in (
        ("absent.txt", 0, "nor a path that exists"),
        ("short.txt", 0, "short.txt has 1 tokens"),
        ("image.txt", 0, "image.txt is not text"),
        ("", 0, "--file=test.txt"),
        (run.with_name("test.txt"), -1, "stride must be at least 0"),
    ):
        file = tmp_path / file if file else ""
        assert sentence in tiny.refusal(evaluate, checkpoint=run, file=file, stride=stride)

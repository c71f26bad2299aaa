"""A run with a BPE: evaluated on a file, sampled and exported."""

import contextlib
import io
import json
import pathlib
import shutil

import numpy as np
import published
import pytest
import tiny
from errors import raises
from open_once import open_once  # noqa: F401  a fixture
from scipy.special import log_softmax
from small_files import KING

from experiments.config import errors
from experiments.data import bpe, perplexity, pretrained_tokenizer, text
from experiments.pretrained import open_model
from experiments.tools import evaluate, export, sample

N = 7


@pytest.fixture(scope="module")
def bpe_run(tmp_path_factory) -> pathlib.Path:
    """Return the folder of a run with at most 300 tokens, next to a test.txt."""
    folder = tmp_path_factory.mktemp("bpe")
    (folder / "text.txt").write_bytes(KING)
    (folder / "test.txt").write_bytes(b"Two kings\twho read fight\n" * 3 + "kingé".encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        return published.write_run(folder / "run", "language", **text_settings(folder / "text.txt"))


def text_settings(file: pathlib.Path) -> dict:
    return {"text.source": str(file), "text.tokenizer": "bpe:300", "text.N": N, "model.M": 1}


def sum_nats(model: open_model.Trained, token_T: np.ndarray, stride: int) -> float:
    """Return the nats of all tokens except the first, window by window."""
    nats, end = 0.0, 1
    for start in range(0, len(token_T), stride):
        window = token_T[start : start + N + 1]
        if end < start + len(window):
            context_N = np.pad(window[:-1], (0, N + 1 - len(window)))
            log_p_NW = log_softmax(np.float64(model(context_N[None])[0]), axis=-1)
            log_p_N = log_p_NW[np.arange(len(window) - 1), window[1:]]
            nats, end = nats - log_p_N[end - start - 1 :].sum(), start + len(window)
    assert end == len(token_T) > 3 * N
    return nats


def test_every_token_counts_once(bpe_run, tmp_path):
    file, model = bpe_run.with_name("test.txt"), open_model.open(bpe_run)
    tokenizer = model.tokenizer
    token_T = tokenizer.encode(file.read_text())
    first, n = len(tokenizer.decode(token_T[:1]).encode()), len(token_T) - 1
    outcome = tiny.command(evaluate, checkpoint=bpe_run, file=file, workdir=tmp_path / "out")
    assert (outcome.code, outcome.err) == (0, "") and f"{81 - first} bytes, 16 words): {n} tokens" in outcome.out
    assert (tmp_path / "out" / "evaluation.txt").read_text() == outcome.out
    assert f"{sum_nats(model, token_T, N) / n:.4f}" in outcome.out
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"body": file.read_text()}))
    with contextlib.redirect_stdout(io.StringIO()):
        measures = evaluate.run(bpe_run, file=rows, field="body", stride=3)
    nats = sum_nats(model, token_T, 3)
    expected = {"nats_per_token": nats / n, "bits_per_byte": nats / np.log(2) / (81 - first)}
    expected |= {"word_perplexity": np.exp(nats / 16), "token_perplexity": np.exp(nats / n)}
    assert {name: measures[name] for name in expected} == pytest.approx(expected, rel=1e-4)


def test_the_token_that_begins_texts_is_no_target(bpe_run):
    tokenizer, model = pretrained_tokenizer.read(bpe_run), open_model.open(bpe_run)
    token_T = tokenizer.encode(bpe_run.with_name("test.txt").read_text())
    encode, tokenizer.bos = tokenizer.encode, int(np.bincount(token_T[1:]).argmax())
    tokenizer.encode = lambda text: np.array([tokenizer.bos, *encode(text)])
    n = evaluate.sum_windows(evaluate.make_measure(model, tokenizer), token_T, N=N, stride=0, batch=5)[2]
    assert n == np.sum(token_T[1:] != tokenizer.bos) < len(token_T) - 1


def test_an_export_has_the_tokenizer_and_the_same_text(bpe_run, tmp_path):
    outcome = tiny.command(export, checkpoint=bpe_run, family="gpt2", workdir=tmp_path / "out")
    assert (outcome.code, outcome.err) == (0, "")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == 0
    with contextlib.redirect_stdout(io.StringIO()):
        text = sample.run(tmp_path / "out", prompt="A king", max_new_tokens=7, temperature=0.0)
        assert text == sample.run(bpe_run, prompt="A king", max_new_tokens=7, temperature=0.0)


def test_another_run_of_the_config_reuses_the_tokenizer_and_reports_comparable_measures(bpe_run, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(bpe_run.parent))
    monkeypatch.setattr(bpe, "train", None)
    changes = tiny.TRAIN | tiny.MODEL | text_settings(bpe_run.with_name("text.txt"))
    work = tiny.work_of(tiny.settings("language", **changes))
    assert work.files["tokenizer.json"] == (bpe_run / "tokenizer.json").read_bytes()
    rows = [{"step": 1, "eval/loss": 2.0}]
    measures = next(work.figures(work, tiny.draw_params(work.task), tmp_path, rows))
    part, tokenizer = text.load(str(bpe_run.with_name("text.txt"))).evaluation, pretrained_tokenizer.read(bpe_run)
    token_T = tokenizer.join(part)
    nats, size = 2.0 * (len(token_T) - 1), perplexity.size(part, first=tokenizer.decode(token_T[:1]))
    expected = {"bits_per_byte": nats / np.log(2) / size.bytes, "word_perplexity": np.exp(nats / size.words)}
    assert measures == pytest.approx({f"eval/{name}": number for name, number in expected.items()})


def test_a_run_does_not_resume_with_another_tokenizer(bpe_run, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(bpe_run.parent))
    copy = shutil.copytree(bpe_run, tmp_path / "run")
    (copy / "tokenizer.json").write_text("{}")
    config = json.loads((copy / "config.json").read_text()) | {"versions": {}, "devices": "", "commit": ""}
    (copy / "config.json").write_text(json.dumps(config))
    changes = tiny.TRAIN | tiny.MODEL | text_settings(bpe_run.with_name("text.txt"))
    outcome = tiny.run("--config", tiny.config_file(tmp_path, "language", **changes), "--workdir", str(copy))
    assert outcome.code == 2 and "tokenizer.json" in outcome.err


def test_a_text_that_cannot_be_evaluated_is_an_error(bpe_run, tmp_path):
    (tmp_path / "short.txt").write_text("A")
    (tmp_path / "image.txt").write_bytes(b"\x89PNG")
    for file, stride, *parts in (
        (tmp_path / "absent.txt", 0, "absent.txt"),
        (tmp_path / "short.txt", 0, "short.txt", "1 token"),
        (tmp_path / "image.txt", 0, "image.txt", "PNG"),
        ("", 0, "--file"),
        (bpe_run.with_name("test.txt"), -1, "stride", -1),
    ):
        with raises(errors.UserError, *parts):
            evaluate.run(bpe_run, file=file, stride=stride)

"""text.documents: documents in a window are predicted as if each were alone, in training, evaluation and samples."""

import contextlib
import io
import pathlib
import sysconfig

import jax
import numpy as np
import published
import pytest
import tiny
from errors import raises
from small_files import KING, write

from experiments import language
from experiments.config import errors
from experiments.data import corpus as corpora, files as data_files, pretrained_tokenizer, text, tokenization, windows
from experiments.pretrained import open_model
from experiments.tools import evaluate, sample

N = 64


def test_tokens_number_their_documents_and_positions():
    token_T = np.array([5, 6, 0, 7, 8, 9, 0, 0, 4], np.uint8)
    fetch, _ = windows.causal(token_T, N=5, document_start=0)
    batch = fetch(np.array([0, 2]), np.random.default_rng(0))
    assert batch["document_BN"].tolist() == [[0, 0, 1, 1, 1], [1, 1, 1, 1, 2]]
    assert batch["n_BN"].tolist() == [[0, 1, 0, 1, 2], [0, 1, 2, 3, 0]]
    assert batch["weight_BN"].all() and batch["n_BN"].dtype == batch["document_BN"].dtype == np.int32
    assert not {"document_BN", "n_BN"} & windows.causal(token_T, N=5)[0](np.array([0]), None).keys()


def test_a_docstring_is_predicted_as_if_it_were_alone(tmp_path):
    """A window of the standard library's docstrings has the end of one module and the beginning of the next."""
    for file in sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("c*.py")):
        (tmp_path / file.name).write_bytes(b"".join(text.read_docstrings(data_files.on_disk(file))))
    changes = {"text__source": str(tmp_path), "text__N": N, "model__attention": "explicit"}
    packed, parts = tiny.settings("language", **changes, text__documents=True), text.load(str(tmp_path))
    corpus, counts = corpora.read_corpus(packed.text, ()), [len(part.sources) for part in parts[1:3]]
    assert any("{:,} documents to train on, {:,} to evaluate".format(*counts) in line for line in corpus.lines)
    end = int(np.flatnonzero(corpus.train_T == 0)[0])
    start, length = end - 20, 20
    fetch, _ = language.choose_windows(packed.text, corpus)(corpus.train_T)
    batch = fetch(np.array([start, end]), np.random.default_rng(0))
    assert batch["w_BN"][0, length] == 0 and batch["weight_BN"].all()
    work, plain_work = (tiny.work_of(settings) for settings in (packed, tiny.settings("language", **changes)))
    params, plain_batch = tiny.draw_params(work.task), {"w_BN": batch["w_BN"]}
    together_NW = np.asarray(jax.jit(work.apply)(params, batch))[0]
    seeing_NW, alone_NW = np.asarray(jax.jit(plain_work.apply)(params, plain_batch))
    np.testing.assert_allclose(together_NW[length:], alone_NW[: N - length], atol=1e-5)
    np.testing.assert_allclose(together_NW[:length], seeing_NW[:length], atol=1e-5)
    assert np.abs(together_NW[length:] - seeing_NW[length:]).max(-1).min() > 1e-3


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:300"])
def test_the_tool_evaluates_as_the_run_does_and_a_sample_is_drawn(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    contents = {f"corpus/{part}/{i}.txt": KING[i : 40 + 7 * i] for part in ("train", "valid") for i in range(5)}
    source = write(tmp_path, **contents) / "corpus"
    changes = {"text__source": str(source), "text__N": 16, "text__tokenizer": tokenizer, "text__documents": True}
    changes |= {"model__M": 1, "model__norm": "rms", "model__mlp": "relu", "model__bias": "none"}  # compiles quickly
    run = published.write_run(tmp_path / "run", "language", **changes)
    task = tiny.task_of(tiny.settings("language", **changes))
    params, measure = open_model.open(run).params, tiny.measure(task)
    nats, n = np.sum([measure(params, batch)["loss"] for batch in task.evaluation], axis=0)
    with contextlib.redirect_stdout(io.StringIO()):
        measures = evaluate.run(run, file=source / "valid")
        assert sample.run(run, prompt="A king", max_new_tokens=4).startswith("A king")
    assert measures["nats_per_token"] == pytest.approx(nats / n, rel=1e-5)
    plain = published.copy_with_changes(run, tmp_path / "plain", text__documents=False)
    with contextlib.redirect_stdout(io.StringIO()):
        assert abs(evaluate.run(plain, file=source / "valid")["nats_per_token"] - nats / n) > 1e-3


@pytest.mark.parametrize(
    ("changes", "value"),
    [
        ({"text__objective": "prefix"}, "text.objective = causal, not prefix"),
        ({"text__objective": "masked"}, "text.objective = causal, not masked"),
        ({"model__flax": "my_file:MyModule"}, "model.flax = my_file:MyModule"),
        ({"mesh__sequence": 2}, "mesh.sequence = 1, not 2"),
        ({"model__relative_position": "rotary:10000:dynamic:2:32"}, "model.relative_position = rotary:10000:dynamic"),
        ({"text__source": "one.txt"}, "text.source = one.txt"),
        ({"text__tokenizer": "run"}, "text.tokenizer = run"),
    ],
)
def test_settings_that_do_not_fit_are_refused(changes, value, tmp_path, monkeypatch):
    monkeypatch.chdir(write(tmp_path, **{f"many/{i}.txt": KING[i:] for i in range(20)}, **{"one.txt": KING}))
    write(tmp_path, **{"run/tokenizer.json": tokenization.make("bytes", []).files["tokenizer.json"]})
    assert isinstance(pretrained_tokenizer.read("run"), pretrained_tokenizer.OfRun)
    with raises(errors.UserError, "text.documents = True", value):
        tiny.work_of(tiny.settings("language", **{"text__source": "many", "text__documents": True} | changes))

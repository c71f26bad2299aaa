"""The experiment configs/arms/padded.py: windows, weights and metrics of padded documents."""

import numpy as np
import pytest
import small_files
import tiny
from errors import raises

from configs import base
from configs.arms import padded
from experiments.config import errors, settings as configs
from experiments.data import download
from experiments.devices import mesh as meshes

TOKENS = np.array([5, 6, 7, 0, 8, 0, 1, 2, 3, 4, 5, 6], np.uint8)  # three documents; the last is longer than N
TARGETS = np.array([[5, 6, 7, 0, 0], [8, 0, 0, 0, 0], [1, 2, 3, 4, 5]])
TEXT = np.array([[1, 1, 1, 1, 0], [1, 1, 0, 0, 0], [1, 1, 1, 1, 1]])


@pytest.mark.parametrize("in_loss", [False, True])
def test_a_window_has_a_document_its_end_and_padding(in_loss):
    fetch, n = padded.pad(TOKENS, N=5, in_loss=in_loss)
    batch = fetch(np.arange(n), None)
    np.testing.assert_array_equal(batch["target_BN"], TARGETS)
    np.testing.assert_array_equal(batch["w_BN"], np.pad(TARGETS, ((0, 0), (1, 0)))[:, :-1])
    np.testing.assert_array_equal(batch["weight_BN"], np.ones((3, 5)) if in_loss else TEXT)
    assert {array.dtype.name for array in batch.values()} == {"int32", "float32"}


def test_the_metrics_count_the_same_tokens_whatever_the_loss_counts():
    logits = np.random.default_rng(0).standard_normal((4, 5, 9)).astype(np.float32)
    nats = (
        np.log(np.exp(logits).sum(-1))
        - np.take_along_axis(logits, np.pad(TARGETS, ((0, 1), (0, 0)))[..., None], -1)[..., 0]
    )
    for weight in (TEXT, np.ones((3, 5))):
        weight = np.pad(weight, ((0, 1), (0, 0))).astype(np.float32)  # the last row fills the batch
        target = np.pad(TARGETS, ((0, 1), (0, 0)))
        np.testing.assert_allclose(padded.per_position(logits, target, weight), (nats[:3].sum(), 15), rtol=1e-5)
        np.testing.assert_allclose(
            padded.per_text_token(logits, target, weight), ((nats[:3] * TEXT).sum(), 11), rtol=1e-5
        )


def test_speeches_are_split_at_empty_lines_and_every_tenth_is_held_out(tmp_path, monkeypatch):
    text = "\n\n".join(f"A:\n{i}" for i in range(21)) + "\n\n"
    file = small_files.write(tmp_path, text=text.encode()) / "text"
    monkeypatch.setattr(download, "fetch", lambda *_: file)
    train, evaluation = padded.read_speeches()
    assert evaluation == ["A:\n0", "A:\n10", "A:\n20"] and train == [f"A:\n{i}" for i in range(21) if i % 10]


def test_the_evaluation_and_the_tuning_split_are_documents_and_other_tokenizers_are_refused(tmp_path):
    rows = "line\n" + "".join(f"word {i}\n" for i in range(2000))
    source = str(small_files.write(tmp_path, **{"rows.csv": rows.encode()}) / "rows.csv")
    config = base.get_config("configs.arms.padded")
    changes = {"text.source": source, "text.field": "line", "text.tokenizer": "characters", "text.N": 12}
    changes |= {"model.M": 1, "model.D": 8, "model.H": 2, "mesh.data": 1}
    config.update_from_flattened_dict(changes)
    task = tiny.task_of(configs.Settings(config))
    held_out = task.tuning()["evaluation"][0]
    assert len(held_out["w_BN"]) > 100 and (held_out["w_BN"][:, 0] == padded.END).all()
    config.update_from_flattened_dict(
        {"text.source": str(small_files.write(tmp_path, one=tiny.TEXT) / "one"), "text.field": ""}
    )
    with raises(errors.UserError, "text.tokenizer = characters does not end documents"):
        padded.prepare(configs.Settings(config), meshes.make(data=1))

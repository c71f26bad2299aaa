"""Each experiment learns, from its command on: what is held out it knows better than the guess that is its baseline.

Text is seen to learn in test_experiments.py, translation in test_translation.py.
"""

import json

import pytest
import tiny

from experiments.engine import compilation

# Of each run the experiment, what it changes, its steps, and how much of the guess's loss or errors it may have left.
RUNS = {
    "classes by a class token": ("vision", {"image.head": "class_token", "image.patch": 4}, 40, 0.7),
    "hidden words": ("language", {"text.objective": "masked", "text.N": 16}, 60, 0.7),
    "hidden patches": ("masked_image", {}, 150, 0.97),
    "ring": ("synthetic", {"synthetic.task": "ring", "synthetic.N": 4}, 60, 0.5),
    "convolution": ("convolution", {"model.H": 5, "optim.learning_rate": 0.1}, 60, 0.5),
}
FEW = {"model.norm": "rms", "model.mlp": "relu"}  # parameters, which are soon compiled
FEW |= {"model.bias": False, "model.attention": "explicit"}


@pytest.mark.parametrize("name", RUNS)
def test_an_experiment_learns(name, tmp_path, monkeypatch):
    experiment, own, steps, left = RUNS[name]
    monkeypatch.setattr(compilation, "measured_peak", lambda *, devices: 1e9)
    monkeypatch.setattr(f"experiments.{experiment}.figures", lambda *arguments: [])
    changes = {"mesh.data": 1, "train.steps": steps, "train.batch_size": 32}
    changes |= {"optim.learning_rate": 0.01, "optim.warmup_steps": 5}
    if experiment != "convolution":  # which has no layers
        changes |= {"model.M": 1, "model.H": 1, "model.D": 32} | FEW
    if experiment == "language":
        (tmp_path / "text.txt").write_bytes(b"abcde" * 400)
        changes |= {"text.source": str(tmp_path / "text.txt")}
    file = tiny.config_file(tmp_path, experiment, **changes | own)
    outcome = tiny.run("--config", file, "--workdir", str(tmp_path / "run"))
    assert (outcome.code, outcome.err) == (0, "")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    if "baseline/loss" in summary:
        assert 0 < summary["eval/loss"] < left * summary["baseline/loss"]
    else:
        assert 1 - summary["eval/accuracy"] < left * (1 - summary["baseline/accuracy"])

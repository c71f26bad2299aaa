"""Every file of configs/ runs: as it stands, but for a smaller model and few steps."""

import json
import math
import os
import pathlib

import pytest
import tiny

from configs import base
from experiments.engine import config as configs
from experiments.engine import config_file

ROOT = pathlib.Path(__file__).parents[2]
FILES = sorted(path for path in (ROOT / "configs").glob("*.py") if path.stem not in ("__init__", "base"))
SMALL = {"model.M": 1, "model.D": 8, "model.H": 2, "model.F": 12, "model.unroll": 1}
QUICK = {"train.steps": 2, "train.batch_size": 8, "train.evaluate_batch": 256, "optim.warmup_steps": 1}
QUICK |= {"train.evaluate_every": 0, "train.save_every": 0, "device": "any"}
SHORT = {"text.N": 48, "sample.max_new_tokens": 8, "sample.prompt": "A"}
RUN_ELSEWHERE = {"smoke", "vit", "causal_lm", "masked_lm"}  # what these name, test_experiments runs as well
NEEDS = {
    "shakespeare_char": "tinyshakespeare.txt",
    "vit_fashion": "fashion-mnist",
}


def changes(file: pathlib.Path, folder: pathlib.Path) -> list[str]:
    """The arguments that make the config of this file small."""
    config = config_file.load(str(file), base=base.get_config)
    small = dict(QUICK)
    if config.experiment == "language":
        (folder / "text.txt").write_bytes(tiny.TEXT * 5)
        small |= SMALL | SHORT | {"text.source": str(folder / "text.txt")}
        small |= {"text.prefix": 17} if config.text.objective == "prefix" else {}
        if config.text.objective == "masked":
            del small["sample.max_new_tokens"], small["sample.prompt"]
    if config.experiment in ("vision", "synthetic"):
        small |= SMALL
    return [f"--config.{key}={value}" for key, value in small.items() if value != configs.flat(config.to_dict())[key]]


TRAINED = [
    file
    for file in FILES
    if file.stem not in RUN_ELSEWHERE
    and config_file.load(str(file), base=base.get_config).experiment in ("language", "vision", "synthetic")
]


@pytest.mark.parametrize("file", TRAINED, ids=lambda file: file.stem)
def test_a_config_file_runs(file, tmp_path, monkeypatch):
    needed = NEEDS.get(file.stem)
    if needed and not (pathlib.Path(os.environ.get("TFM_DATA", "/nowhere")) / needed).exists():
        pytest.skip(f"$TFM_DATA names no folder with {needed}")
    monkeypatch.setattr("experiments.engine.compilation.measured_peak", lambda *, devices: 1e9)
    outcome = tiny.run("--config", str(file), "--workdir", str(tmp_path / "run"), *changes(file, tmp_path))
    assert (outcome.code, outcome.err) == (0, "")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps"] == 2 and math.isfinite(summary["eval/loss"])

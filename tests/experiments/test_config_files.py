"""Every file of configs/ has a plan and a loss: with its own sizes, in shapes and types, which compiles nothing."""

import pathlib

import jax
import numpy as np
import pytest
import tiny

from configs import base
from experiments.engine import config, config_file, mesh, run_plan
from experiments.studies import study

ROOT = pathlib.Path(__file__).parents[2]
FILES = sorted(path for path in (ROOT / "configs").glob("*.py") if path.stem not in ("__init__", "base"))


def settings_of(file: pathlib.Path, folder: pathlib.Path) -> config.Settings:
    """Those of the file's run, or of the first run of a study, with small data of ours and one layer."""
    made = config_file.load(str(file), base=base.get_config)
    if made.experiment != "convolution":  # which has no layers
        made.model.M = 1
    if made.experiment == "text_classification":
        (folder / "texts.csv").write_text("text,label\n" + "".join(f"word {i},{i % 3}\n" for i in range(99)))
        made.text.source = str(folder / "texts.csv")
    elif "text" in made:
        (folder / "text.txt").write_bytes((tiny.TEXT + b"\n") * 30)
        made.text.source = str(folder / "text.txt")
        if "/" in made.text.tokenizer:
            made.text.tokenizer = "bytes"
    if "pairs" in made:
        pytest.importorskip("sacrebleu", reason='the library sacrebleu is missing: pip install -e ".[text]"')
        (folder / "pairs.tsv").write_text("".join(f"word {i}\tpalabra {i * i}\n" for i in range(2000)))
        made.pairs.source = str(folder / "pairs.tsv")
    if "image" in made and made.image.source != "digits":
        np.savez(folder / "images.npz", x=np.random.default_rng(0).random((300, 28, 28)), y=np.arange(300) % 10)
        made.image.source = str(folder / "images.npz")
    settings = config.Settings(made, config_file.defaults(made, base.get_config))
    if made.experiment != "ablation":
        return settings
    every = study.read(settings)  # the other runs are made in test_ablation.py
    first = every._replace(conditions=every.conditions[:1], arms=every.arms[:1], seeds=every.seeds[:1])
    return study.runs(settings, first)[0].settings


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_config_file_can_be_trained_and_says_how_to_run_it(file, tmp_path):
    assert f"python launch.py --config configs/{file.name}" in file.read_text(encoding="utf-8").split('"""')[1]
    settings, devices = settings_of(file, tmp_path), mesh.make(data=1)
    work = tiny.work_of(settings, devices)
    assert (work.data_sha256 is None) == (settings.experiment == "synthetic")  # whose data are made
    run_plan.make_plan(settings, work.task, devices)
    for key in ("init_from", "init_fresh"):  # read by who makes the devices and starts the run
        getattr(settings, key)
    settings.refuse_unused()
    params = jax.eval_shape(work.task.init, jax.random.key(0))
    loss, count = jax.eval_shape(work.task.loss, params, work.task.train[0])[0]["loss"]
    assert loss.shape == count.shape == () and loss.dtype == np.float32

"""Every file of configs/ makes a training step: with its own sizes, in shapes and types, which compiles nothing."""

import os
import pathlib

import jax
import numpy as np
import pytest
import tiny

from configs import base
from experiments.engine import config, config_file, mesh, step
from experiments.engine import run as runs
from experiments.studies import study

ROOT = pathlib.Path(__file__).parents[2]
FILES = sorted(path for path in (ROOT / "configs").glob("*.py") if path.stem not in ("__init__", "base"))


def settings_of(file: pathlib.Path, folder: pathlib.Path) -> list[config.Settings]:
    """Those of the file's run, or of the first and the last run of a study, with small data of ours and two layers."""
    made = config_file.load(str(file), base=base.get_config)
    if made.experiment != "convolution":  # which has no layers
        made.model.M = min(made.model.M, 2)
    if "text" in made:
        (folder / "text.txt").write_bytes((tiny.TEXT + b"\n") * 30)
        made.text.source = str(folder / "text.txt")
    if "pairs" in made:
        (folder / "pairs.tsv").write_text("".join(f"word {i}\tpalabra {i * i}\n" for i in range(2000)))
        made.pairs.source = str(folder / "pairs.tsv")
    settings = config.Settings(made, config_file.defaults(made, base.get_config))
    if made.experiment != "ablation":
        return [settings]
    every = study.runs(settings, study.read(settings))
    return [every[0].settings, every[-1].settings]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_config_file_is_a_small_diff_that_has_a_training_step_and_says_how_to_run_it(file, tmp_path):
    made = config_file.load(str(file), base=base.get_config)
    found, defaults = (config.flat(one.to_dict()) for one in (made, config_file.defaults(made, base.get_config)))
    changed = {key for key in found if found[key] != defaults[key]}
    derived = {"model.K", "model.F"} if found["model.K"] == found["model.D"] // found["model.H"] else set()
    assert len(changed - derived) <= (30 if "speedrun" in file.stem else 14)
    assert f"python launch.py --config configs/{file.name}" in file.read_text(encoding="utf-8").split('"""')[1]
    for settings in settings_of(file, tmp_path):
        source = next((v["source"] for v in settings.to_dict().values() if isinstance(v, dict) and "source" in v), "")
        if source == "fashion_mnist" and not pathlib.Path(os.environ.get("TFM_DATA", ""), "fashion-mnist").is_dir():
            pytest.skip("$TFM_DATA names no folder with fashion-mnist")
        devices = mesh.make(data=1)
        task = tiny.work_of(settings, devices).task
        plan = runs.plan(settings, task, devices)
        for key in ("init_from", "init_fresh", "device"):  # read by who makes the devices and starts the run
            getattr(settings, key)
        settings.refuse_unused()
        state = step.abstract_state(task, plan.optimiser, mesh=devices)
        batch = mesh.abstract_batch(devices, task.train[0])
        after, metrics = jax.eval_shape(plan.step, state, batch, step.abstract_alive(devices))
        assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(lambda x: (x.shape, x.dtype), state)
        assert metrics["loss"].shape == () and metrics["loss"].dtype == np.float32

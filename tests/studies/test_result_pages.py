"""The scripts of docs/ladder.md and docs/positions.md on runs with chosen losses; the arms that are files of a user."""

import pathlib
import runpy

import jax
import numpy as np
import pytest
import study_folder
import tiny

from configs import base, ladder, positions
from experiments.engine import config as configs, config_file as config_files, mesh as meshes
from experiments.studies import figures as study_figures, results, study as studies

ROOT = pathlib.Path(__file__).parents[2]
FILES = ("multi_token", "stochastic_depth", "rotary")


def write_study(folder, config, losses):
    """Write the runs and the report of a study. losses: (condition, arm) -> the loss of each seed."""
    study = config.study
    design = study_folder.make_study(
        [name for name, _ in study.arms],
        conditions=[name for name, _ in study.conditions] or ["all"],
        seeds=study.seeds,
    )
    for condition in design.conditions:
        for arm in design.arms:
            for seed, loss in zip(design.seeds, losses(condition.name, arm.name), strict=True):
                study_folder.write_run(folder, condition.name, arm.name, seed, metrics={"eval/loss": loss})
    results.write(folder, design, session=study_folder.PROVENANCE)


@pytest.fixture(autouse=True)
def without_figures(monkeypatch):
    monkeypatch.setattr(study_figures, "draw", lambda *arguments, **options: [])
    monkeypatch.setattr(study_figures, "draw_across", lambda *arguments, **options: [])


def test_the_script_on_positions_prints_and_draws_the_differences(tmp_path, capsys, monkeypatch):
    draw = np.random.default_rng(0)

    def losses(condition, arm):
        gain = {"none": 0.3, "learned": 0.05, "alibi": -0.05 if condition == "D64_100" else 0.0}.get(arm, 0.0)
        return 2 + gain + draw.normal(0, 0.004, 10)

    write_study(tmp_path, positions.get_config(), losses)
    script = runpy.run_path(str(ROOT / "docs" / "positions.py"))
    monkeypatch.setitem(script["main"].__globals__, "__file__", str(tmp_path / "positions.py"))
    script["main"](tmp_path)
    rows = {line.split("|")[1].strip(): line.split("|")[2:-1] for line in capsys.readouterr().out.splitlines()[:-1]}
    assert len(rows) == 9 and all(len(row) == 5 for row in rows.values())
    assert all(" **+0.3" in cell or " **+0.29" in cell for cell in rows["no positions"])
    assert ["**" in cell for cell in rows["ALiBi"]] == [False, False, False, True, False]
    assert " **-0.0" in rows["ALiBi"][3] and all(1.98 < float(cell) < 2.02 for cell in rows["loss of rotary positions"])
    assert (tmp_path / "positions.png").stat().st_size > 10_000


def test_the_script_on_the_ladder_compares_each_rung_with_the_one_below(tmp_path, capsys, monkeypatch):
    draw, names = np.random.default_rng(0), [name for name, _ in ladder.arms()]

    def losses(condition, arm):
        return 3 - 0.1 * min(names.index(arm), 3) + draw.normal(0, 0.002, 5)  # the first three steps help

    write_study(tmp_path, ladder.get_config(), losses)
    script = runpy.run_path(str(ROOT / "docs" / "ladder.py"))
    monkeypatch.setitem(script["main"].__globals__, "__file__", str(tmp_path / "ladder.py"))
    script["main"]([tmp_path])
    rows = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines() if line.startswith("| `")]
    assert [row[0].strip(" `") for row in rows] == names
    assert ["**-0." in row[4] for row in rows] == [False, True, True, True, *[False] * 8]
    assert (tmp_path / "ladder.png").stat().st_size > 10_000


def test_the_arms_of_the_positions_study_that_are_files_train(tmp_path):
    """Stochastic depth changes only the training; multi-token prediction trains a second matrix."""
    (tmp_path / "text.txt").write_bytes(tiny.TEXT)
    config = positions.get_config()
    changes = {"text.source": str(tmp_path / "text.txt"), "text.N": 8, "model.M": 1, "model.H": 2, "mesh.data": 1}
    changes |= {"study.arms": [arm for arm in config.study.arms if arm[0] in FILES], "train.batch_size": 16}
    changes |= {"study.conditions": [["small", {"model.D": 8, "train.steps": 2, "optim.warmup_steps": 0}]]}
    config.update_from_flattened_dict(changes)
    settings = configs.Settings(config, config_files.defaults(config, base.get_config))
    runs = studies.runs(settings, studies.read(settings)._replace(seeds=[0]))
    tasks = {run.arm: tiny.task_of(run.settings) for run in runs}
    assert tuple(tasks) == FILES
    devices, params = meshes.make(data=1), {arm: tiny.draw_params(task) for arm, task in tasks.items()}

    @jax.jit
    def measure(params, batch, key):
        trained = {arm: tiny.gradient(task, devices)(params[arm], batch, key) for arm, task in tasks.items()}
        return trained, {arm: task.loss(params[arm], batch)[0] for arm, task in tasks.items()}

    batch = tasks["rotary"].train[0]
    trained, evaluated = jax.device_get(measure(params, batch, jax.random.key(0)))
    for arm, (gradient, metrics, _) in trained.items():
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((gradient, metrics))), arm
    gradient, metrics, _ = trained["multi_token"]
    assert np.abs(gradient["head"]["G2_WD"]).max() > 1e-3 and metrics["loss"] != metrics["loss_later"]
    assert "G2_WD" not in params["rotary"]["head"]
    assert abs(trained["stochastic_depth"][1]["loss"] - trained["rotary"][1]["loss"]) > 1e-4
    assert evaluated["stochastic_depth"] == evaluated["rotary"]


def test_positions_has_five_kinds_three_widths_ten_seeds_and_warm_ups_of_a_tenth():
    study = positions.get_config().study
    assert len(study.arms) == 9 and study.arms[-1][0] == "rotary" and len(study.seeds) == 10
    assert {changes["model.D"] for _, changes in study.conditions} == {32, 64, 128}
    assert all(10 * x["optim.warmup_steps"] == x["train.steps"] for _, x in study.conditions)

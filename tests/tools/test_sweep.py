"""Sweeps: every combination of some settings' values is a run of a study."""

import json

import dots
import numpy as np
import pytest
import tiny
from errors import raises

import launch
from experiments.config import errors
from experiments.engine import loop
from experiments.studies import figures as study_figures
from experiments.tools import compare, sweep

GRID = {"optim.learning_rate": [np.float64(1e-3), 0.01], "optim.weight_decay": [0.0, 0.1]}
NAMES = [f"learning_rate={rate},weight_decay={decay}" for rate in (0.001, 0.01) for decay in (0.0, 0.1)]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(study_figures, "draw", lambda *arguments: [])
    monkeypatch.setattr(compare, "draw", lambda runs, metric, file: file.write_bytes(b"curves"))


def make_config(folder, **changes):
    return tiny.config_file(folder, "dots", **(dots.CHANGES | {"seed": 3, "log": []} | changes))


def test_every_combination_is_a_run_and_the_same_call_trains_only_what_is_missing(tmp_path, monkeypatch, capsys):
    config, folder = make_config(tmp_path), tmp_path / "out"
    result = launch.sweep(config, GRID, folder, **{"train.steps": 5})
    summaries = sorted(folder.glob("all/*/seed_3/summary.json"))
    assert [file.parent.parent.name for file in summaries] == sorted(NAMES)
    for file in summaries:
        settings, summary = (json.loads((file.parent / f"{name}.json").read_text()) for name in ("config", "summary"))
        optim = settings["config"]["optim"]
        name = f"learning_rate={optim['learning_rate']},weight_decay={optim['weight_decay']}"
        assert name == file.parent.parent.name
        assert (summary["steps"], summary["together"], settings["config"]["seed"]) == (5, 4, 3)  # one program
        assert list(file.parent.glob("checkpoints/5"))
    assert result.figures == [folder / "compare.png"] and "No verdict" in result.summary["verdict"]
    out = capsys.readouterr().out
    labels = [f"{i} {name}/seed_3" for i, name in enumerate(NAMES, 1)]  # in the order of the grid
    assert [out.index(label) for label in labels] == sorted(out.index(label) for label in labels)

    train, programs = loop.train, []
    monkeypatch.setattr(loop, "train", lambda *arguments, **options: programs.append(1) or train(*arguments, **options))
    times = [file.stat().st_mtime_ns for file in summaries]
    command = ["--config", config, "--workdir", str(folder), "--config.train.steps=5"]
    command += ["--sweep", "optim.learning_rate=1e-3,0.01", "--sweep=optim.weight_decay=0,0.1"]
    assert tiny.run(*command).code == 0 and not programs
    assert tiny.run(*command, "--sweep=optim.learning_rate=0.03,0.05").code == 0 and len(programs) == 1
    assert len(list(folder.glob("all/*/seed_3/summary.json"))) == 8
    assert [file.stat().st_mtime_ns for file in summaries] == times
    assert json.loads((folder / "report.json").read_text())["reference"] == NAMES[0]


def test_values_of_the_seed_are_the_seeds_of_the_study(tmp_path):
    grid = {"seed": ["4", "5"], "model.D": [8, "16", 16]}
    settings = sweep.load_settings(tiny.config_file(tmp_path, "vision", seed=3), {}, grid)
    assert (settings.study.seeds, settings.study.arms) == ([4, 5], [("D=16", {"model.D": 16}), ("D=8", {"model.D": 8})])
    assert (settings.seed, settings.log, settings.study.keep_weights) == (0, ["tensorboard"], True)


def test_a_stopped_sweep_says_how_to_go_on(tmp_path, monkeypatch):
    def stop(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(launch, "train", stop)
    with pytest.raises(errors.Interrupted) as error:
        launch.sweep(make_config(tmp_path), GRID, tmp_path / "out")
    command = str(error.value).partition("launch.run(")[2]
    assert "'grid': {'optim.learning_rate': [0.001, 0.01], 'optim.weight_decay': [0.0, 0.1]}" in command


@pytest.mark.parametrize(
    ("grid", "names"),
    [
        ({}, ["no setting"]),
        ({"model.D": [8, "8"]}, ["model.D", "two"]),
        ({"seed": [0]}, ["seed", "two"]),
        ({"model.D": ["wide", 8]}, ["model.D", "wide"]),
        ({"model.width": [8, 16]}, ["model.width"]),
    ],
)
def test_an_invalid_sweep_is_refused(grid, names, tmp_path):
    with raises(errors.UserError, *names):
        sweep.load_settings(tiny.config_file(tmp_path, "vision"), {}, grid)


def test_a_sweep_of_a_study_and_a_flag_without_values_are_refused(tmp_path):
    config = tiny.config_file(tmp_path, "ablation", study__experiment="vision")
    with raises(errors.UserError, "study.arms"):
        sweep.load_settings(config, {}, {"model.D": [8, 16]})
    with raises(errors.UserError, "--sweep=model.D"):
        sweep.parse(["model.D"])

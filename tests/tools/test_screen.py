"""screen: one run of every arm, then fresh seeds for the arms that beat the reference."""

import json

import pytest
import tiny
import tiny_study
from errors import raises

import launch
from experiments.config import errors
from experiments.studies import figures as study_figures, statistics
from experiments.tools import screen

ARMS = [["slow", {"optim.learning_rate": 1e-5}], ["fast", {"optim.learning_rate": 0.1}], ["base", {}]]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(study_figures, "draw", lambda *arguments: [])


def run_command(*argv) -> tiny.Outcome:
    return tiny.call(screen.run, screen.HELP, *argv)


def fake_studies(monkeypatch, means, kinds, better="less"):
    """Let studies have these differences in the screen and kinds of verdicts. Return the list of their arguments."""
    calls = []

    def run(config, folder, device, **changes):
        calls.append((folder.name, changes))
        arms = [{"name": name, "difference": {"mean": means[name], "kind": kinds.get(name)}} for name in means]
        arms.append({"name": "base", "difference": None})
        return launch.runs.Result(folder, {"conditions": [{"better": better, "arms": arms}]})

    monkeypatch.setattr(launch, "run", run)
    return calls


def make_config(folder, names, **changes):
    return tiny_study.config_file(folder, study__arms=[[name, {}] for name in names], **changes)


def test_arms_that_beat_the_reference_are_trained_with_fresh_seeds(tmp_path):
    config, folder = tiny_study.config_file(tmp_path, study__arms=ARMS, study__seeds=[3, 5, 6]), tmp_path / "out"
    command = [f"--config={config}", f"--workdir={folder}", "--set=train.steps=7"]
    code, out, err = run_command(*command)
    assert (code, err) == (0, "")
    reports = {stage: json.loads((folder / stage / "report.json").read_text()) for stage in ("screen", "confirm")}
    names = {stage: [arm["name"] for arm in reports[stage]["conditions"][0]["arms"]] for stage in reports}
    assert names == {"screen": ["slow", "fast", "base"], "confirm": ["fast", "base"]}
    assert [report["seeds"] for report in reports.values()] == [[999], [3, 5, 6]]
    assert reports["confirm"]["conditions"][0]["comparisons"] == 1
    runs = [json.loads(file.read_text())["steps"] for file in folder.glob("*/all/*/seed_*/summary.json")]
    assert runs == [7] * (3 + 6)
    assert 'screened: 2 arms, one run each; passed: 1 ("fast")' in out and "better with 3 fresh seeds: " in out
    tiny_study.config_file(tmp_path, study__arms=[["late", {}], *ARMS], study__seeds=[3, 5, 6])
    code, out, err = run_command(*command)
    assert code == 2 and "a verdict on other arms" in err and not (folder / "screen" / "all" / "late").exists()


@pytest.mark.parametrize(("better", "passed"), [("less", ["a", "c"]), ("more", ["b"])])
def test_the_screen_passes_gains_only_and_the_verdict_decides(tmp_path, monkeypatch, better, passed):
    means = {"a": -1.0, "b": 0.5, "c": -0.1, "d": 0.0, "e": None}  # e diverged
    calls = fake_studies(monkeypatch, means, dict.fromkeys("ab", statistics.BETTER), better)
    result = screen.run(make_config(tmp_path, [*means, "base"]), tmp_path / "out", seed=7)
    assert [folder for folder, _ in calls] == ["screen", "confirm"] and calls[0][1] == {"study.seeds": [7]}
    assert calls[1][1] == {"study.arms": [[name, {}] for name in [*passed, "base"]]}
    assert result == ["a", "b"]  # the differences of both stages are the same here


def test_a_screen_that_no_arm_passes_trains_nothing_more(tmp_path, monkeypatch, capsys):
    calls = fake_studies(monkeypatch, {"a": 0.1, "b": 0.2}, {})
    assert screen.run(make_config(tmp_path, ["a", "b", "base"]), tmp_path / "out") == []
    assert len(calls) == 1 and "passed: 0 (none)" in capsys.readouterr().out


def test_seeds_that_are_not_fresh_and_configs_that_are_no_study_are_refused(tmp_path, monkeypatch):
    calls, config = fake_studies(monkeypatch, {}, {}), make_config(tmp_path, ["a", "base"])
    two = make_config(tmp_path / "two", ["a", "base"], study__conditions=[["x", {}], ["y", {}]])
    for file, options, word in (
        (config, {"seed": 5}, "--seed=5"),
        (two, {}, "2 conditions"),
        (tiny.config_file(tmp_path, "dots"), {}, "study.arms"),
        (config, {"set": ("train.steps",)}, "--set=train.steps"),
        ("", {}, "--config"),
    ):
        with raises(errors.UserError, word):
            screen.run(file, tmp_path / "out", **options)
    assert not calls

"""Searches: the replay of docs/search_noise.py, and the decisions of my_search.py in docs/guides/search.md."""

import importlib.util
import io
import json
import pathlib
import re
import sys

import numpy as np
import pytest
import study_folder
import tiny
from errors import raises

import launch
from experiments.config import errors
from experiments.studies import inference, results, statistics

ROOT = pathlib.Path(__file__).parents[2]


def load(file: pathlib.Path, name: str, patch: pytest.MonkeyPatch):
    """Import the file as a new module of this name."""
    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    patch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def noise(monkeypatch):
    """Return docs/search_noise.py with few orders."""
    module = load(ROOT / "docs" / "search_noise.py", "search_noise", monkeypatch)
    monkeypatch.setattr(module, "ORDERS", 40)
    return module


@pytest.fixture
def search(monkeypatch, tmp_path):
    """Return my_search.py of the guide, in a folder without runs/."""
    page = (ROOT / "docs" / "guides" / "search.md").read_text(encoding="utf-8")
    (tmp_path / "my_search.py").write_text(
        re.search(r"^```python\n(# my_search.py\n.*?)^```", page, flags=re.MULTILINE | re.DOTALL)[1], encoding="utf-8"
    )
    monkeypatch.chdir(tmp_path)
    return load(tmp_path / "my_search.py", "my_search", monkeypatch)


def test_keep_if_better_keeps_records_and_a_kept_gain_stays(noise):
    loss_OEI = np.array([3.0, 4.0, 2.5, 3.4, 2.4])[None, :, None]
    kept_OE, best_OE = noise.replay(loss_OEI, np.zeros((1, 4)))
    assert kept_OE.tolist() == [[False, True, False, True]] and best_OE.tolist() == [[3.0, 3.0, 2.5, 2.5, 2.4]]
    kept_OE, best_OE = noise.replay(loss_OEI, np.array([[0.5, 1.0, 0.0, 0.0]]))
    assert kept_OE.tolist() == [[False, True, False, True]]  # the first, with 3.5, was not kept, so its gain is lost
    np.testing.assert_allclose(best_OE, [[3.0, 3.0, 1.5, 1.5, 1.4]])


def test_the_verdict_of_the_replay_is_that_of_a_study(noise):
    loss_OEI = np.random.default_rng(0).normal(0, 0.01, (1, 31, 5))
    gain_OE = np.tile([0.0, 0.02, 0.06], (1, 10))
    kept_OE, _ = noise.replay(loss_OEI, gain_OE)
    best, gain, kinds, looks = dict(enumerate(loss_OEI[0, 0])), 0.0, [], noise.count_looks(30)
    for k, value_I in enumerate(loss_OEI[0, 1:], start=1):
        value = dict(enumerate(value_I - gain - gain_OE[0, k - 1]))
        kinds.append(statistics.compare(value, best, m=k * looks, better="less").kind == statistics.BETTER)
        if kinds[-1]:
            best, gain = value, gain + gain_OE[0, k - 1]
    assert kept_OE[0].tolist() == kinds and 0 < sum(kinds) < 20


def test_looks_are_just_enough(noise):
    for edits in (1, 2, 20, 100):
        together = sum(1 / k for k in range(1, edits + 1))
        assert noise.count_looks(edits) - 1 < together <= noise.count_looks(edits)


def test_null_edits_look_like_improvements_to_keep_if_better_only(noise, monkeypatch):
    monkeypatch.setattr(noise, "ORDERS", 400)
    loss_R = np.random.default_rng(0).normal(1.87, 0.008, 101)
    single, verdict = (noise.tabulate(loss_R, "none", rule).split("|") for rule in ("keep if better", "verdict"))
    assert 3.7 < float(single[4]) < 4.7 and float(single[7]) > 0.01  # 1/2 + 1/3 + ... + 1/101 = 4.2
    assert float(verdict[5]) < 5 and float(verdict[8]) == float(single[8]) == 0


def test_the_script_reads_the_report_of_a_study(noise, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(results.study_figures, "draw", lambda *_: [])
    losses = {"half_the_rate": [1.9, 1.7, 2.0, 1.8], "start": [2.1, 1.9, 2.3, 2.2]}
    study_folder.write_losses(tmp_path, "all", losses)
    results.write(tmp_path, study_folder.make_study(tuple(losses), seeds=range(4)), session={})
    noise.main(str(tmp_path), str(tmp_path / "figure.png"))
    lines = capsys.readouterr().out.splitlines()
    assert "4 runs: mean 2.1250, SD 0.1708" in lines
    rows = [line for line in lines if line.startswith("| ")]
    assert len(rows) == len(noise.GAINS) * len(noise.RULES) + 2 * 4 * len(noise.SIMULATED)  # simulated and real losses
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_a_screened_edit_is_judged_at_the_level_of_its_place(noise):
    difference_OI, m_O = np.random.default_rng(0).normal(-0.7, 1, (50, 6)), np.arange(50) % 7
    expected = [inference.interval(one, max(m, 1))[1] < 0 for one, m in zip(difference_OI, m_O, strict=True)]
    assert noise.is_below(difference_OI, m_O).tolist() == expected and 5 < sum(expected) < 45


def test_searches_draw_from_the_losses_of_real_runs(noise):
    drawn = noise.sample(np.random.default_rng(0), (50, 3), 1, np.array([1.0, 2.0, 6.0]))
    assert drawn.shape == (50, 3) and {*drawn.ravel()} == {-2.0, -1.0, 3.0}


@pytest.mark.parametrize("at_once", [False, True])
def test_a_screen_costs_a_run_for_each_edit_and_has_the_error_rate_of_a_verdict(noise, at_once):
    kept_OE, runs_O = noise.search(np.zeros((2000, 20)), 1, 5, at_once)
    assert 0.001 < kept_OE.any(1).mean() < 0.035  # the level is 2.5 %
    assert (runs_O - 21 - 5).min() >= 0 and ((runs_O - 21) % 5 == 0).all() and 60 < runs_O.mean() < 85
    large = np.tile([1.0, -1.0], (10, 10))  # a hundred SDs
    kept_OE, runs_O = noise.search(large, 1, 5, at_once)
    assert (kept_OE == (large > 0)).all() and (runs_O == 21 + 11 * 5).all()


def test_the_rules_without_a_screen_or_a_verdict_are_those_of_the_replay(noise):
    kept_OE, runs_O = noise.search(np.zeros((4000, 100)), 1, 0, False)
    assert kept_OE.sum(1).mean() == pytest.approx(4.2, abs=0.15) and (runs_O == 101).all()
    kept_OE, runs_O = noise.search(np.tile([1.0, -1.0], (10, 10)), 0, 5, False)
    assert kept_OE[:, ::2].all() and not kept_OE[:, 1::2].any() and (runs_O == 21 * 5).all()


def test_a_gate_of_one_size_is_keep_if_better_and_more_sizes_pass_less(noise, monkeypatch):
    monkeypatch.setattr(noise, "ORDERS", 2000)
    lines = [noise.simulate_gate(sizes) for sizes in (1, 4)]
    first = [float(re.search(r": ([\d.]+) %", line)[1]) for line in lines]
    kept = [float(re.search(r"pass, ([\d.]+)", line)[1]) for line in lines]
    assert first == pytest.approx([50, 6.25], rel=0.15) and kept == pytest.approx([4.2, 0.9], rel=0.08)


def test_the_page_has_the_rows_that_the_script_simulates(noise, capsys):
    page = (ROOT / "docs" / "search_noise.md").read_text(encoding="utf-8")
    noise.main()
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    names = [row.split("|")[1:3] for row in rows]
    table = page.partition("## Does a cheap screen help?")[2].splitlines()
    assert names == [line.split("|")[1:3] for line in table if line.startswith("| ")][1:]


def test_the_search_of_the_guide_decides_resumes_and_tests_once(search, monkeypatch, capsys):
    verdicts = {"a": "better", "b": "no difference found", "c": "better", "final": "worse"}
    rows, calls = [], []

    def run(config, folder, **changes):
        arm, reference = changes["study.arms"]
        calls.append((folder, arm, reference, changes.get("study.seeds")))
        errors.refuse((arm[0] == "bad", "model.X = 1 is unknown"))
        difference = {"kind": verdicts[arm[0]], "mean": -1.0, "interval": [-2.0, -0.5]}
        return launch.runs.Result(None, {"conditions": [{"arms": [{"difference": difference}]}]})

    monkeypatch.setattr(launch, "run", run)
    monkeypatch.setattr(search, "describe", lambda changes: {"steps": changes.get("train.steps", "9")})
    proposals = [["bad", {"model.X": 1}], ["a", {"x": 1}], ["b", {"y": 2}], ["c", {"z": 3}], ["final", {}], ["d", {}]]
    for n in (3, 6):  # the second time it goes on after the third proposal
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(json.dumps(line) + "\n" for line in proposals[:n])))
        search.main({})
        rows += [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    with raises(errors.UserError, "{'steps': '9'}", "{'steps': '8'}", "--anyway"):
        search.main({"train.steps": "8"})
    search.main({"train.steps": "8", "--anyway": "yes"})  # no proposal is left
    lines = search.LOG.read_text().splitlines()
    for line in (lines[1][:9], "[]", "{}"):
        search.LOG.write_text("\n".join([lines[0], line, *lines[2:]]))
        with raises(errors.UserError, f"{search.LOG}, line 2"):
            search.main({})
    seeds = search.FINAL["study.seeds"]
    assert calls == [
        ("runs/search", ["bad", {"model.X": 1}], ["start", {}], None),  # no folder runs/ yet
        ("runs/search", ["a", {"x": 1}], ["start", {}], None),
        ("runs/search", ["b", {"x": 1, "y": 2}], ["a", {"x": 1}], None),
        ("runs/search", ["c", {"x": 1, "z": 3}], ["a", {"x": 1}], None),
        ("runs/final", ["final", {"x": 1, "z": 3}], ["start", {}], seeds),
    ]
    assert not {*seeds} & {*search.SEEDS}
    assert [row["verdict"] for row in rows] == ["invalid", "better", "no difference found", "better", "worse"]


def test_the_search_of_the_guide_never_sees_the_validation_split(search, tmp_path):
    (tmp_path / "text.txt").write_bytes(tiny.TEXT * 4)
    settings = tiny.settings("language", text__source=str(tmp_path / "text.txt"), text__N=7)
    usual, devices = tiny.work_of(settings).task, launch.runs.make_mesh(settings)
    task = search.prepare(settings, devices).task
    tuning = usual.tuning()
    for mine, expected in ((task.evaluation, tuning["evaluation"]), (task.train, tuning["train"])):
        np.testing.assert_array_equal(mine[0]["w_BN"], expected[0]["w_BN"])
    assert not np.array_equal(task.evaluation[0]["w_BN"], usual.evaluation[0]["w_BN"])


def test_the_search_is_described_by_its_steps_and_its_text(search, tmp_path):
    changes = {"text.source": str(tmp_path / "text.txt"), "train.steps": "80"}
    (tmp_path / "text.txt").write_bytes(tiny.TEXT * 4)
    first = search.describe(changes)
    (tmp_path / "text.txt").write_bytes(tiny.TEXT * 5)
    assert first["steps"] == 80 and search.describe(changes)["data"] != first["data"]


def test_the_search_needs_the_looks_of_its_proposals(search, noise):
    assert search.LOOKS == noise.count_looks(search.PROPOSALS) == search.get_config().study.looks
    with raises(errors.UserError, "study.arms"):
        launch.run(str(ROOT / "configs" / "search_noise.py"), "runs/a", **{"study.arms": []})

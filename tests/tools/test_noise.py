"""noise: the SD of runs that differ only in the seed, and the differences that it allows to show."""

import json

import dots
import numpy as np
import pytest
import tiny
from errors import raises
from scipy import stats

import launch
from experiments.config import errors
from experiments.studies import figures as study_figures
from experiments.tools import noise

VALUES = [1.02, 0.97, 1.05, 0.99, 1.01, 0.95, 1.03, 0.98]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(study_figures, "draw", lambda *arguments: [])


def run_command(*argv) -> tiny.Outcome:
    return tiny.call(noise.run, noise.HELP, *argv)


def with_values(monkeypatch, values):
    """Let the runs of every sweep have these values, with the seeds 0, 1, ..."""
    summary = {"conditions": [{"arms": [{"values": dict(enumerate(values))}]}]}
    monkeypatch.setattr(launch, "sweep", lambda *_, **__: launch.runs.Result(None, summary))


def test_the_runs_are_one_program_and_the_same_command_trains_only_more_of_them(tmp_path):
    config = tiny.config_file(tmp_path, "dots", **(dots.CHANGES | {"log": []}))
    command = [f"--config={config}", f"--workdir={tmp_path / 'out'}", "--set=train.steps=5", "--metric=eval/accuracy"]
    first = run_command(*command, "--runs=3")
    files = [tmp_path / "out" / "all" / "run" / f"seed_{seed}" for seed in range(4)]
    summaries = [json.loads((file / "summary.json").read_text()) for file in files[:3]]
    assert first.code == 0 and [(x["steps"], x["together"]) for x in summaries] == [(5, 3)] * 3
    values = [x["eval/accuracy"] for x in summaries]
    assert f"eval/accuracy of 3 equal runs: mean {np.mean(values):.4f}, SD {np.std(values, ddof=1):.4f}" in first.out
    assert not list(files[0].glob("checkpoints/*")) and "compare.png" not in first.out
    times = [(file / "summary.json").stat().st_mtime_ns for file in files[:3]]
    assert "of 4 equal runs" in run_command(*command, "--runs=4").out and (files[3] / "summary.json").exists()
    assert [(file / "summary.json").stat().st_mtime_ns for file in files[:3]] == times


def test_the_sd_has_its_chi_squared_interval():
    measured = noise.measure(VALUES)
    (low, high), variance = measured.interval, np.var(VALUES, ddof=1)
    assert measured.sd == pytest.approx(variance**0.5)
    assert stats.chi2.cdf(7 * variance / low**2, 7) == pytest.approx(0.975)
    assert stats.chi2.cdf(7 * variance / high**2, 7) == pytest.approx(0.025)


def test_differences_by_chance_and_shown_differences_have_their_probabilities():
    """Simulated: R equal runs measure the SD, then two arms of n runs are compared, with and without a difference."""
    draw, repeats, R = np.random.default_rng(0), 40_000, 8
    sd_X = draw.normal(0, 1, (repeats, R)).std(axis=1, ddof=1)
    true = noise.measure(stats.norm.ppf((np.arange(R) + 0.5) / R))  # a sample, whose numbers are multiples of its SD
    for n in noise.SIZES:
        difference_XI = draw.normal(0, 2**0.5, (repeats, n))  # pairs that do not correlate
        judged_X = sd_X * (2 / n) ** 0.5 if n == 1 else difference_XI.std(axis=1, ddof=1) / n**0.5
        limit_X = true.by_chance[n] / true.sd / (2 / n) ** 0.5 * judged_X
        assert np.mean(np.abs(difference_XI.mean(1)) > limit_X) == pytest.approx(0.05, abs=0.005)
        shown = true.shown[n] / true.sd
        assert np.mean(difference_XI.mean(1) + shown > limit_X) == pytest.approx(0.8, abs=0.01)
        assert true.by_chance[n] < true.shown[n]


def test_diverged_runs_clusters_and_equal_runs_are_stated(monkeypatch):
    with_values(monkeypatch, VALUES[:6])
    out = run_command("--config=a.py").out
    assert "of 6 equal runs" in out and "left out, because they diverged: 2 runs" in out and "clusters" not in out
    with_values(monkeypatch, [1.0, 1.01, 1.02, 9.0, 9.01, 9.02, 1.0, 1.01])
    assert "two clusters" in run_command("--config=a.py").out
    with_values(monkeypatch, [1.0] * 8)
    out = run_command("--config=a.py").out
    assert "SD 0.0000" in out and "diverged" not in out


def test_too_few_runs_and_invalid_flags_are_refused(monkeypatch):
    with_values(monkeypatch, VALUES[:2])
    with raises(errors.UserError, "2 of 8 runs", "eval/loss"):
        noise.run("a.py")
    with raises(errors.UserError, "--runs=2"):
        noise.run("a.py", runs=2)
    with raises(errors.UserError, "--set=train.steps"):
        noise.run("a.py", set=("train.steps",))
    with raises(errors.UserError, "--config"):
        noise.run("")

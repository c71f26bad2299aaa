"""The timing of records: two trainings of each seed, with a cold and a warm cache, and the worst values."""

import json
import pathlib
import subprocess
import sys
import types

import dots
import pytest
import tiny

from benchmarks import records

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def runs(monkeypatch):
    """Replace the processes by ones that take no time. Return the list of (command, its cache, whether it is empty)."""
    commands = []

    def run(command, *, env, stdout):
        cache = pathlib.Path(env["JAX_COMPILATION_CACHE_DIR"])
        commands.append((command, cache, not any(cache.iterdir())))
        (cache / "program").touch()
        flags = dict(text.split("=") for text in command[2:])
        folder, seed = pathlib.Path(flags["--workdir"]), int(flags["--config.seed"])
        folder.mkdir(parents=True)
        summary = {"eval/loss": 1.8 + seed / 100, "eval/accuracy": 0.9 - seed / 100}
        (folder / "summary.json").write_text(json.dumps(summary))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", run)
    return commands


def test_each_seed_trains_cold_and_warm_and_the_worst_value_is_printed(runs, capsys):
    records.main(["shakespeare", "--seeds", "3", "--config.train.steps=2"])
    lines = capsys.readouterr().out.splitlines()
    assert [" ".join(line.split()[:2]) for line in lines[2:]] == ["0 1.8000", "1 1.8100", "2 1.8200", "worst 1.8200"]
    assert [cold for _, _, cold in runs] == [True, False] * 3 and len({cache for _, cache, _ in runs}) == 3
    assert all("--config.train.steps=2" in command and "shakespeare_record.py" in command[2] for command, _, _ in runs)
    records.main(["digits", "--seeds", "2", "--config=mine.py"])
    assert capsys.readouterr().out.splitlines()[-1].split()[1] == "0.8900"  # of accuracies the smallest is the worst
    assert runs[-1][0][2] == "--config=mine.py"
    assert all((ROOT / config).is_file() for config, _ in records.TRACKS.values())


def test_a_run_is_timed(tmp_path, monkeypatch):
    """The command runs in this process; the test below starts a real one."""

    def run(command, *, env, stdout):
        assert (command[0], env["JAX_COMPILATION_CACHE_DIR"]) == (sys.executable, "cache")
        assert (pathlib.Path(command[1]), stdout) == (ROOT / "launch.py", subprocess.DEVNULL)
        return subprocess.CompletedProcess(command, tiny.run(*command[2:]).code)

    monkeypatch.setattr(records, "subprocess", types.SimpleNamespace(run=run, DEVNULL=subprocess.DEVNULL))
    config = tiny.config_file(tmp_path, "dots", **dots.CHANGES)
    loss, seconds = records.train(config, "eval/loss", ["--config.train.steps=2", "--config.seed=3"], cache="cache")
    assert 0 < loss < 9 and 0.01 < seconds < 100


def test_no_seeds_or_a_run_that_fails_end_the_command_with_its_exit_code_and_message(capfd):
    for seeds, message in (("0", "--seeds 0 must be at least 1"), ("1", "train.steps")):
        with pytest.raises(SystemExit) as outcome:
            records.main(["digits", "--seeds", seeds, "--config.train.stepz=2"])
        error = capfd.readouterr().err
        assert outcome.value.code == 2 and message in error and "Traceback" not in error
    assert error.startswith("error: ")

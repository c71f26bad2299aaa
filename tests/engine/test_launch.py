"""The launcher: a config that is data runs no program, and how a command ends where nobody reads or waits for it."""

import contextlib
import json
import os
import pathlib
import re
import sys
import types

import pytest
import tiny

import launch
from experiments import language
from experiments.engine import by_name, disk, errors

CAUSAL = str(pathlib.Path(__file__).parents[2] / "configs" / "causal_lm.py")


@pytest.fixture
def with_experiment(monkeypatch):
    """A function that has the launcher run this function instead of an experiment."""

    def with_run(run, *, writes=False):
        monkeypatch.setattr(
            by_name, "experiment", lambda name: types.SimpleNamespace(config=language.config, run=run, WRITES=writes)
        )

    return with_run


def test_a_config_in_json_imports_nothing(tmp_path, monkeypatch, with_experiment):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "payload.py").write_text("open('ran', 'w').close()\ns = 1\n")
    (tmp_path / "a.json").write_text(
        json.dumps({"config": {"experiment": "language", "model": {"score": "payload:s", "D": 6}}})
    )
    used = []
    with_experiment(lambda settings, folder: used.append((settings.model.score, settings.model.D)))
    told = tiny.run("--config", "a.json")
    assert (
        told.code == 2 and 'has model.score = "payload:s"' in told.err and "--config.model.score=payload:s" in told.err
    )
    assert not used and not (tmp_path / "ran").exists()
    assert tiny.run("--config", "a.json", "--config.model.score=payload:s").code == 0
    assert tiny.run("--config", "a.json", "--config.model.score=tied").code == 0
    assert used == [("payload:s", 6), ("tied", 6)]
    for section, name in (("text", "objective"), ("optim", "schedule")):
        (tmp_path / "b.json").write_text(json.dumps({"experiment": "language", section: {name: "payload:s"}}))
        assert f'has {section}.{name} = "payload:s"' in tiny.run("--config", "b.json").err
    (tmp_path / "b.json").write_text(
        json.dumps({"experiment": "language", "text": {"source": "C:/text"}})
    )  # no variant
    assert tiny.run("--config", "b.json").code == 0


def test_a_reader_who_leaves_is_no_error(with_experiment, capfd):
    for run in (lambda settings, folder: print("much"), lambda settings, folder: print("much", flush=True)):
        with_experiment(run)
        reads, writes = os.pipe()
        os.close(reads)
        with open(writes, "w") as out, contextlib.redirect_stdout(out):
            tiny.forget_flags()
            assert launch.main(["launch.py", "--config", CAUSAL]) == 1
            print("more")  # what is still to come goes nowhere
        assert capfd.readouterr() == ("", "")
    assert sys.stdout.fileno() != writes


def test_a_person_who_stops_a_command_is_told_so(with_experiment, tmp_path):
    def stop(settings, folder):
        disk.new_file(folder, "sample.txt")
        raise KeyboardInterrupt

    where = str(tmp_path / "out")
    with_experiment(stop)
    assert tiny.run("--config", CAUSAL, "--workdir", where) == (130, "", "stopped\n")
    assert not (tmp_path / "out").exists()
    with_experiment(stop, writes=True)
    told = tiny.run("--config", CAUSAL, "--workdir", where, "--config.seed=3")
    command = f"python launch.py --config {CAUSAL} --workdir {where} --config.seed=3"
    assert told == (130, "", f"stopped; go on with: {command}\n")
    told = tiny.run("--config", CAUSAL, "--config.sample.prompt=a b")  # without --workdir, the one that was made
    assert re.search(
        r"go on with: python launch.py .* '--config.sample.prompt=a b' --workdir=runs/causal_lm/\S+\n$", told.err
    )


def test_a_new_file_is_made_where_it_is_written(tmp_path):
    file = disk.new_file(tmp_path / "a" / "b", "c.txt")
    assert not (tmp_path / "a").exists()
    disk.write_new(file, b"text")
    assert file.read_bytes() == b"text"
    file.chmod(0o755)
    for folder, words in ((file.parent, "is there already"), (file / "d", "c.txt is a file"), (file, "is a file")):
        with pytest.raises(errors.UserError, match=words):
            disk.new_file(folder, "c.txt")
    with pytest.raises(errors.UserError, match="cannot be written"):
        disk.write_new(file / "d", b"")

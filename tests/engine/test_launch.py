"""The launcher: its arguments, data that run no program, and how a command ends, also in the user's own code."""

import contextlib
import io
import json
import os
import re
import sys

import dots
import pytest
import tiny
from errors import raises

import launch
from experiments.engine import disk, errors, log
from experiments.tools import command

SPY = """
import json
import pathlib

from ml_collections import ConfigDict


def config():
    spy = ConfigDict()
    spy.text = ""
    return {"spy": spy}


def prepare(settings, devices):
    pathlib.Path("seen.json").write_text(json.dumps(settings.to_dict()))
    if settings.spy.text == "a fault":
        raise ValueError("a fault")
    raise KeyboardInterrupt
"""


@pytest.fixture
def spy(tmp_path, monkeypatch):
    """The config of an experiment that writes its settings to seen.json, and is stopped."""
    monkeypatch.delitem(sys.modules, "spy", raising=False)
    monkeypatch.setattr("sys.path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "spy.py").write_text(SPY)
    return tiny.config_file(tmp_path, "spy", model__H=8)


def test_the_command_line_takes_values_after_an_equals_sign_or_a_space(spy, tmp_path):
    words = ["--config.train.steps", "7", "--config.spy.text=a = b", "--config.model.D=64", "-config.seed=3"]
    outcome = tiny.run("--config", spy, *words)
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert (seen["train"]["steps"], seen["spy"]["text"], seen["seed"]) == (7, "a = b", 3)
    assert (seen["model"]["D"], seen["model"]["K"], seen["model"]["F"]) == (64, 8, 256)
    command = r"python launch.py --config \S+ .* '--config.spy.text=a = b' .*-config.seed=3"
    folder = r"runs/spy_config/\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d"
    assert outcome.code == 130 and re.fullmatch(f"stopped; go on with: {command} --workdir={folder}\n", outcome.err)


@pytest.mark.parametrize(
    ("words", "warmup"),
    [
        ("train.steps=60", 6),
        ("train.steps=60 optim.warmup_steps=100", None),  # refused, where there is a schedule
        ("train.steps=60 optim.warmup_steps=30", None),
    ],
)
def test_a_short_run_has_a_shorter_warm_up_than_the_usual_one_and_its_config_keeps_the_usual_one(
    spy, tmp_path, words, warmup
):
    outcome = tiny.run("--config", spy, *(f"--config.{word}" for word in words.split()))
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert seen["optim"]["warmup_steps"] == (30 if "=30" in words else 100)
    assert outcome.out.startswith(f"optim.warmup_steps = {warmup},") if warmup else "warm" not in outcome.out


def test_a_stopped_command_prints_how_to_resume_it(spy, tmp_path):
    words = ["--config", spy, "--workdir", "a/b", "--config.seed=3"]
    outcome = tiny.run(*words)
    assert (outcome.code, outcome.err) == (130, f"stopped; go on with: python launch.py {' '.join(words)}\n")
    assert tiny.run(*words, "--resume=3").err == outcome.err  # from here on the newest checkpoint is the right one
    assert tiny.run("--config", spy, "--dry_run").err == "stopped\n"
    assert not (tmp_path / "a").exists() and not (tmp_path / "runs").exists()


def test_in_a_notebook_settings_are_given_as_they_are(spy, tmp_path):
    with pytest.raises(errors.Interrupted) as stopped:
        launch.run(spy, tmp_path / "run", resume=3, **{"train.steps": 7, "spy.text": tmp_path})
    given = f"**{{'train.steps': 7, 'spy.text': '{tmp_path}'}}"  # from here on the newest checkpoint is the right one
    assert str(stopped.value).endswith(f"; go on with: launch.run({spy!r}, workdir='{tmp_path}/run', {given})")
    assert json.loads((tmp_path / "seen.json").read_text())["train"]["steps"] == 7
    with raises(errors.UserError, "train.steps", "7.0"):
        launch.run(spy, **{"train.steps": 7.0})


def test_any_other_error_is_not_hidden(spy, monkeypatch):
    """Only a mistake of the user is a sentence; an error of the program keeps its traceback."""
    monkeypatch.setattr("experiments.engine.by_name.is_user_code", lambda file: False)  # as if the spy were ours
    with raises(ValueError, "a fault"):
        tiny.run("--config", spy, "--config.spy.text=a fault")


def test_a_reader_who_leaves_is_no_error(spy, capfd):
    reads, writes = os.pipe()
    os.close(reads)
    with open(writes, "w") as out, contextlib.redirect_stdout(out):
        tiny.forget_flags()
        assert launch.main(["launch.py", "--config", spy]) == 1
        print("more")  # what is still to come goes nowhere
    assert capfd.readouterr() == ("", "") and sys.stdout.fileno() != writes


def test_a_config_in_json_imports_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "payload.py").write_text("open('ran', 'w').close()\ns = 1\n")
    (tmp_path / "a.json").write_text(json.dumps({"config": {"experiment": "vision", "model": {"score": "payload:s"}}}))
    outcome = tiny.run("--config", "a.json", "--dry_run")
    assert outcome.code == 2 and 'has model.score = "payload:s"' in outcome.err
    assert "--config.model.score=payload:s" in outcome.err and not (tmp_path / "ran").exists()
    outcome = tiny.run("--config", "a.json", "--dry_run", "--config.model.score=tied", "--config.image.patch=3")
    assert "do not divide into patches" in outcome.err and not (tmp_path / "ran").exists()
    assert "must be a tuple" in tiny.run("--config", "a.json", "--dry_run", "--config.model.score=payload:s").err
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ("--config=a.json train.steps=3", ["train.steps=3", "--config.train.steps=100"]),
        ("vit", ["vit", "--config configs/vit.py"]),
        ("--config=vit --steps=3", ["--config.train.steps=VALUE"]),
        ("--config=vit --dropout 3", ["'dropout'", "--config.model.dropout=VALUE"]),
        ("--config=vit --config.model.n_layer=3", ['"model.n_layer"', '"model.M"']),
        ("--config=vitt", ["vitt", '"vit"']),
        ("--config=vit --resume=newest", ["--resume=newest"]),
        ("--config=a/vit.py", ["a/vit.py", '"vit"']),
        ("--config=a.json --workdri=x", ["'workdri'"]),
        ("", ["--config", "configs/vit.py"]),
        ("--config=a.json --topology=v5e-1", ["--topology", "--dry_run"]),
        ("--config=a.json --dry_run --json=b", ["--json", "--dry_run"]),
        ("--config=a.json --distributed", ["--workdir"]),
        ("--config=a.json --workdir=b --distributed --dry_run", ["--workdir"]),
    ],
)
def test_invalid_arguments(tmp_path, monkeypatch, words, parts):
    monkeypatch.chdir(tmp_path)
    outcome = tiny.run(*words.split())
    assert outcome.code == 2 and outcome.err.startswith("error: ") and not list(tmp_path.iterdir())
    assert [part for part in parts if part not in outcome.err] == []


def test_help_lists_the_settings_with_their_comments(capsys):
    with pytest.raises(SystemExit):
        launch.main(["launch.py", "--help", "config"])
    printed = capsys.readouterr().out
    assert [name for name in tiny.fields() if f"\n{name} = " not in printed] == []
    assert "\nseed = 0  # of initial parameters" in printed and "\nof vision\nimage." in printed


def test_a_new_file_is_made_where_it_is_written(tmp_path):
    file = disk.new_file(tmp_path / "a" / "b", "c.txt")
    assert not (tmp_path / "a").exists()
    disk.write_new(file, b"text")
    assert file.read_bytes() == b"text"
    with raises(errors.UserError, "is there already"):
        disk.new_file(file.parent, "c.txt")
    with raises(errors.UserError, "cannot be written"):
        disk.write_new(file / "d", b"")


EXPERIMENT = """
import asyncio, os, sys
import dots

ENDS = {
    "exit": lambda: sys.exit(0),
    "sentence": lambda: sys.exit("enough"),
    "cancelled": lambda: (_ for _ in ()).throw(asyncio.CancelledError()),
}

def end(at):
    place, _, how = os.environ["QUITS"].partition(":")
    if at == place:
        ENDS[how]()

def config():
    end("config")
    return dots.config()

def prepare(settings, devices):
    work = dots.prepare(settings, devices)
    task = work.task
    end("prepare")

    def init(key):
        end("init")
        return task.init(key)

    def loss(*given, **named):
        end("loss")
        return task.loss(*given, **named)

    def figures(*given):
        end("figures")
        return []

    return work._replace(task=task._replace(init=init, loss=loss), figures=figures)
"""


@pytest.fixture
def quits(tmp_path, monkeypatch):
    """quits(place) is the path of a config whose experiment ends there."""
    (tmp_path / "quits.py").write_text(EXPERIMENT)
    sys.path.append(str(tmp_path))

    def config(place):
        monkeypatch.setenv("QUITS", place)
        sys.modules.pop("quits", None)
        return tiny.config_file(tmp_path, "quits", **dots.CHANGES | {"train.steps": 3})

    return config


@pytest.mark.parametrize(
    ("place", "how"), [("config", "exit"), ("prepare", "sentence"), ("init", "cancelled"), ("loss", "exit")]
)
def test_code_that_ends_the_process_is_a_sentence_with_its_file_and_line(quits, tmp_path, place, how):
    reason = {"exit": "SystemExit: 0", "sentence": "SystemExit: enough", "cancelled": "CancelledError"}[how]
    outcome = tiny.run("--config", quits(f"{place}:{how}"), "--workdir", str(tmp_path / "run"))
    assert outcome.code == 2 and outcome.err.count("\n") == 1
    assert "quits.py, line " in outcome.err.replace("quits_config.py", "quits.py") and reason in outcome.err
    if how != "cancelled" or place == "config":  # what else it raises, a notebook shows whole
        with raises(errors.UserError, reason):
            launch.run(quits(f"{place}:{how}"), tmp_path / "other")


def test_figures_that_end_the_process_end_no_run(quits, tmp_path):
    outcome = tiny.run("--config", quits("figures:exit"), "--workdir", str(tmp_path / "run"))
    assert outcome.code == 0 and "not all figures" in outcome.out and (tmp_path / "run" / "summary.json").is_file()


def test_control_characters_of_a_terminal_are_not_printed(capsys):
    log.say("a\x1b[31m b\rc \u202ed\u2066 \x9b1m\0\r\n\te", "\n")
    assert capsys.readouterr().out == "a\ufffd[31m b\ufffdc \ufffdd\ufffd \ufffd1m\ufffd\n\te\n"


def test_characters_that_a_terminal_cannot_show_are_escaped(monkeypatch):
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding="ascii"))
    assert command.exit_code(lambda: print("runs/好")) == 0 and shown.getvalue() == b"runs/\\u597d\n"

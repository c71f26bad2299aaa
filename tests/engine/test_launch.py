"""The launcher: arguments, configs that import no code, and how a command ends, also in the user's own code."""

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
from experiments import command as commands
from experiments.config import errors
from experiments.folder import log

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
    """Return the config of an experiment that writes its settings to seen.json and raises KeyboardInterrupt."""
    monkeypatch.delitem(sys.modules, "spy", raising=False)
    monkeypatch.setattr("sys.path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "spy.py").write_text(SPY)
    return tiny.config_file(tmp_path, "spy", model__H=8)


def test_the_command_line_takes_values_after_an_equals_sign_or_a_space(spy, tmp_path):
    flags = ["--config.train.steps", "7", "--config.spy.text=a = b", "--config.model.D=64", "-config.seed=3"]
    outcome = tiny.run("--config", spy, *flags)
    settings = json.loads((tmp_path / "seen.json").read_text())
    assert (settings["train"]["steps"], settings["spy"]["text"], settings["seed"]) == (7, "a = b", 3)
    assert (settings["model"]["D"], settings["model"]["K"], settings["model"]["F"]) == (64, 8, 256)
    command = r"python launch.py --config \S+ .* '--config.spy.text=a = b' .*-config.seed=3"
    folder = r"runs/spy_config/\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d"
    assert outcome.code == 130 and re.fullmatch(f"stopped; go on with: {command} --workdir={folder}\n", outcome.err)


@pytest.mark.parametrize(
    ("changes", "warmup"),
    [
        ("train.steps=60", 6),
        ("train.steps=60 optim.warmup_steps=100", None),  # an experiment with a schedule refuses it
        ("train.steps=60 optim.warmup_steps=30", None),
    ],
)
def test_a_short_run_shortens_the_default_warm_up_and_its_config_keeps_the_default(spy, tmp_path, changes, warmup):
    outcome = tiny.run("--config", spy, *(f"--config.{change}" for change in changes.split()))
    settings = json.loads((tmp_path / "seen.json").read_text())
    assert settings["optim"]["warmup_steps"] == (30 if "=30" in changes else 100)
    assert outcome.out.startswith(f"optim.warmup_steps = {warmup},") if warmup else "warm" not in outcome.out


def test_a_stopped_command_prints_how_to_resume_it(spy, tmp_path):
    flags = ["--config", spy, "--workdir", "a/b", "--config.seed=3"]
    outcome = tiny.run(*flags)
    assert (outcome.code, outcome.err) == (130, f"stopped; go on with: python launch.py {' '.join(flags)}\n")
    assert tiny.run(*flags, "--resume=3").err == outcome.err  # the printed command resumes from the newest checkpoint
    assert tiny.run("--config", spy, "--dry_run").err == "stopped\n"
    assert not (tmp_path / "a").exists() and not (tmp_path / "runs").exists()


def test_a_stopped_call_in_a_notebook_prints_the_call_that_resumes_it(spy, tmp_path):
    with pytest.raises(errors.Interrupted) as caught:
        launch.run(spy, tmp_path / "run", resume=3, **{"train.steps": 7, "spy.text": tmp_path})
    arguments = (
        f"**{{'train.steps': 7, 'spy.text': '{tmp_path}'}}"  # without resume: it resumes from the newest checkpoint
    )
    assert str(caught.value).endswith(f"; go on with: launch.run({spy!r}, workdir='{tmp_path}/run', {arguments})")
    assert json.loads((tmp_path / "seen.json").read_text())["train"]["steps"] == 7
    with raises(errors.UserError, "train.steps", "7.0"):
        launch.run(spy, **{"train.steps": 7.0})


def test_any_other_error_is_not_hidden(spy, monkeypatch):
    """Only a user's mistake is reduced to one sentence. An error of the program keeps its traceback."""
    # Treat the spy as code of the project.
    monkeypatch.setattr("experiments.config.by_name.is_user_code", lambda file: False)
    with raises(ValueError, "a fault"):
        tiny.run("--config", spy, "--config.spy.text=a fault")


def test_a_closed_output_pipe_ends_a_command_without_a_message(spy, capfd):
    read_end, write_end = os.pipe()
    os.close(read_end)
    with open(write_end, "w") as out, contextlib.redirect_stdout(out):
        tiny.forget_flags()
        assert launch.main(["launch.py", "--config", spy]) == 1
        print("more")  # later output is discarded
    assert capfd.readouterr() == ("", "") and sys.stdout.fileno() != write_end


def test_a_config_in_json_imports_no_code_unless_the_command_line_names_it(tmp_path, monkeypatch):
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
    ("flags", "parts"),
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
def test_invalid_arguments_are_refused(tmp_path, monkeypatch, flags, parts):
    monkeypatch.chdir(tmp_path)
    outcome = tiny.run(*flags.split())
    assert outcome.code == 2 and outcome.err.startswith("error: ") and not list(tmp_path.iterdir())
    assert [part for part in parts if part not in outcome.err] == []


def test_help_lists_the_settings_with_their_comments(capsys):
    with pytest.raises(SystemExit):
        launch.main(["launch.py", "--help", "config"])
    output = capsys.readouterr().out
    assert [name for name in tiny.fields() if f"\n{name} = " not in output] == []
    assert "\nseed = 0  # seed of" in output and "\nSettings of vision:\nimage." in output


def test_help_lists_every_flag_once_below_plain_headings(capsys):
    with pytest.raises(SystemExit):
        launch.main(["launch.py", "--help"])
    output = capsys.readouterr().out
    names = [line.partition(":")[0].removeprefix("[no]") for line in output.split("\n  --")[1:]]
    own = [flag.name for flag in launch.flags.FLAGS.flags_by_module_dict()[launch.__name__]]
    assert sorted(names) == sorted([*own, "config.KEY"]) and names[:3] == ["config", "config.KEY", "sweep"]
    assert output.startswith("Train the model") and "\n\nWhere:\n  --workdir: Folder of the run" in output
    assert "  --sweep: Train all values: optim.learning_rate=1e-3,3e-3. Repeat it: all combinations.\n" in output
    assert not [word for word in ("absl", "[]", "None", "specify") if word in output]


QUITTING_EXPERIMENT = """
import asyncio, os, sys
import dots

ENDS = {
    "exit": lambda: sys.exit(0),
    "sentence": lambda: sys.exit("enough"),
    "cancelled": lambda: (_ for _ in ()).throw(asyncio.CancelledError()),
}

def end(at):
    place, _, name = os.environ["QUITS"].partition(":")
    if at == place:
        ENDS[name]()

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

    def loss(*arguments, **options):
        end("loss")
        return task.loss(*arguments, **options)

    return work._replace(task=task._replace(init=init, loss=loss))
"""


@pytest.fixture
def config_that_quits(tmp_path, monkeypatch):
    """Return a function of "place:end". It returns the path of a config whose experiment ends the process there."""
    (tmp_path / "quits.py").write_text(QUITTING_EXPERIMENT)
    sys.path.append(str(tmp_path))

    def config(place):
        monkeypatch.setenv("QUITS", place)
        sys.modules.pop("quits", None)
        return tiny.config_file(tmp_path, "quits", **dots.CHANGES | {"train.steps": 3})

    return config


@pytest.mark.parametrize(
    ("place", "end"), [("config", "exit"), ("prepare", "sentence"), ("init", "cancelled"), ("loss", "exit")]
)
def test_code_that_ends_the_process_is_reported_with_its_file_and_line(config_that_quits, tmp_path, place, end):
    reason = {"exit": "SystemExit: 0", "sentence": "SystemExit: enough", "cancelled": "CancelledError"}[end]
    outcome = tiny.run("--config", config_that_quits(f"{place}:{end}"), "--workdir", str(tmp_path / "run"))
    assert outcome.code == 2 and outcome.err.count("\n") == 1
    assert "quits.py, line " in outcome.err.replace("quits_config.py", "quits.py") and reason in outcome.err
    if end != "cancelled" or place == "config":  # JAX may wrap other errors, which a notebook shows in full
        with raises(errors.UserError, reason):
            launch.run(config_that_quits(f"{place}:{end}"), tmp_path / "other")


def test_control_characters_of_a_terminal_are_not_printed(capsys):
    log.say("a\x1b[31m b\rc \u202ed\u2066 \x9b1m\0\r\n\te", "\n")
    assert capsys.readouterr().out == r"a\x1b[31m b\x0dc \u202ed\u2066 \x9b1m\x00" + "\n\te\n"


def test_characters_that_a_terminal_cannot_show_are_escaped(monkeypatch):
    output = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(output, encoding="ascii"))
    assert commands.exit_code(lambda: print("runs/好")) == 0 and output.getvalue() == b"runs/\\u597d\n"

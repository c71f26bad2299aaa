"""What a user's own code, a terminal or Ctrl-C at any time can do to a run: end it with a sentence, never silently."""

import io
import sys

import pytest
import tiny
from errors import raises

import launch
from experiments.engine import errors, log
from experiments.tools import command

EXPERIMENT = """
import asyncio, os, signal, sys
import dots
from errors import raises

ENDS = {
    "exit": lambda: sys.exit(0),
    "sentence": lambda: sys.exit("enough"),
    "cancelled": lambda: (_ for _ in ()).throw(asyncio.CancelledError()),
}

def interrupt():
    try:  # as a callback of JAX or a destructor does
        signal.raise_signal(signal.SIGINT)
    except BaseException:
        pass

def end(at):
    place, _, how = os.environ["QUITS"].partition(":")
    if at == place:
        ENDS.get(how, interrupt)()

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
        changes = {"train.batch_size": 16, "train.steps": 3, "mesh.data": 1, "optim.warmup_steps": 1}
        lines = [f"    config.{key} = {value!r}\n" for key, value in changes.items()]
        head = "from configs import base\n\n\ndef get_config():\n    config = base.get_config('quits')\n"
        (tmp_path / "quits_config.py").write_text(head + "".join(lines) + "    return config\n")
        return str(tmp_path / "quits_config.py")

    return config


@pytest.mark.parametrize(
    ("place", "how"), [("config", "exit"), ("prepare", "sentence"), ("init", "cancelled"), ("loss", "exit")]
)
def test_code_that_ends_the_process_is_a_sentence_with_its_file_and_line(quits, tmp_path, place, how):
    told = {"exit": "SystemExit: 0", "sentence": "SystemExit: enough", "cancelled": "CancelledError"}[how]
    outcome = tiny.run("--config", quits(f"{place}:{how}"), "--workdir", str(tmp_path / "run"))
    assert outcome.code == 2 and outcome.err.count("\n") == 1
    assert "quits.py, line " in outcome.err.replace("quits_config.py", "quits.py") and told in outcome.err
    if how != "cancelled" or place == "config":  # what else it raises, a notebook shows whole
        with raises(errors.UserError, told):
            launch.run(quits(f"{place}:{how}"), tmp_path / "other")


def test_figures_that_end_the_process_end_no_run(quits, tmp_path):
    outcome = tiny.run("--config", quits("figures:exit"), "--workdir", str(tmp_path / "run"))
    assert outcome.code == 0 and "not all figures" in outcome.out and (tmp_path / "run" / "summary.json").is_file()


def test_what_a_terminal_would_act_on_is_not_printed(capsys):
    log.say("a\x1b[31m b\rc \u202ed\u2066 \x9b1m\0\r\n\te", "\n")
    assert capsys.readouterr().out == "a\ufffd[31m b\ufffdc \ufffdd\ufffd \ufffd1m\ufffd\n\te\n"


def test_what_a_terminal_cannot_show_is_written_out(monkeypatch):
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding="ascii"))
    assert command.exit_code(lambda: print("runs/好")) == 0 and shown.getvalue() == b"runs/\\u597d\n"

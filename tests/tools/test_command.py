"""Tools: flags are a function's arguments, and an error is one message and an exit code."""

import io
import os
import sys

import pytest
import tiny

from configs import base
from experiments import command as commands
from experiments.config import errors
from experiments.pretrained import families
from experiments.tools import (
    attention,
    classify,
    evaluate,
    export,
    fill,
    lens,
    report,
    sample,
    symmetry as symmetry_tool,
    translate,
)

TOOLS = (sample, fill, classify, evaluate, export, report, symmetry_tool, translate, lens, attention)
HELP = {"size": "A size.", "share": "A share.", "names": "Several names."}


def tool(checkpoint: str, *, size: int = 3, share: float = 0.5, names: tuple[str, ...] = ()) -> None:
    print(checkpoint, size, share, names, sep="|")


def run_command(action, *argv) -> tiny.Outcome:
    return tiny.call(action, HELP, *argv)


def test_flags_are_the_arguments_with_their_defaults():
    assert run_command(tool) == (0, "|3|0.5|[]\n", "")
    argv = ("--checkpoint=a", "--size=7", "--share", "0.25", "--names=b", "--names=c")
    assert run_command(tool, *argv) == (0, "a|7|0.25|['b', 'c']\n", "")


def test_an_invalid_argument_is_an_error():
    for argument, words in (("--sise=7", "sise size"), ("--size=many", "size many"), ("7", '"7"')):
        code, out, err = run_command(tool, argument)
        assert (code, out) == (2, "") and err.startswith("error: ") and err.count("\n") == 1
        assert all(word in err for word in words.split())


@pytest.mark.parametrize(
    ("error", "code", "err"),
    [
        (errors.UserError("a\nb"), 2, "error: a\\nb\n"),
        (errors.RunError("full"), 1, "error: full\n"),
        (KeyboardInterrupt(), 130, "stopped\n"),
        (errors.Interrupted("stopped here", 143), 143, "stopped here\n"),
    ],
)
def test_each_kind_of_error_has_an_exit_code(error, code, err):
    def raise_error() -> None:
        raise error

    assert run_command(raise_error) == (code, "", err)


def test_a_closed_output_ends_the_command_without_a_traceback(monkeypatch):
    """The output is redirected, because Python flushes it again at exit."""

    class ClosedOutput(io.StringIO):
        def flush(self) -> None:
            raise BrokenPipeError

        def fileno(self) -> int:
            return 17

    def redirect(source: int, target: int) -> None:
        redirections.append((os.readlink(f"/proc/self/fd/{source}"), target))

    redirections = []
    monkeypatch.setattr(sys, "stdout", ClosedOutput())
    monkeypatch.setattr(os, "dup2", redirect)
    assert commands.exit_code(lambda: None) == 1 and redirections == [(os.devnull, 17)]


@pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool.__name__.rpartition(".")[2])
def test_a_tool_explains_all_its_arguments(tool, capsys):
    with pytest.raises(SystemExit) as end:
        commands.arguments(tool.run, tool.HELP, ["tool", "--help"])
    text = capsys.readouterr().out
    assert end.value.code == 0 and tool.__doc__.splitlines()[0] in text and "--workdir: " in text


def test_fields_missing_in_published_files_have_the_config_s_defaults():
    fields = base.get_config("language").model.to_dict()
    assert families.FREE == {name: fields[name] for name in families.FREE}

"""Tools: flags are a function's arguments, and an error is one message and an exit code."""

import importlib
import io
import os
import pathlib
import sys

import pytest
import tiny

from configs import base
from experiments import command as commands
from experiments.config import errors
from experiments.pretrained import families
from experiments.tools import __main__ as tools_main

TOOLS = [importlib.import_module(f"experiments.tools.{name}") for name in tools_main.list_tools()]
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
        positional = next((name for name in ("runs", "table") if name in commands.list_flags(tool.run)), "")
        commands.arguments(tool.run, tool.HELP, ["tool", "--help"], positional=positional)
    text = capsys.readouterr().out
    assert end.value.code == 0 and tool.__doc__.splitlines()[0] in text and "absl" not in text
    missing = [name for name in commands.list_flags(tool.run) if f"--{name}: " not in text]
    assert set(missing) <= {"table", "runs"} | {name for name in missing if f"--[no]{name}: " in text}


def test_flags_are_in_the_order_of_the_arguments_with_their_defaults():
    def run(own: int = 0, checkpoint: str = "", rows: tuple[str, ...] = (), flag: bool = False, rate: float = 0.5):
        pass

    help = commands.HELP | {"own": "A number.", "rows": "A row.", "flag": "A switch.", "rate": "A rate."}
    assert commands.describe_flags(commands.list_flags(run), help).splitlines() == [
        "Flags of this tool:",
        "  --own: A number. Default: 0.",
        "  --rows: A row. Repeat it for several.",
        "  --[no]flag: A switch.",
        "  --rate: A rate. Default: 0.5.",
        "",
        "Flags that most tools have:",
        "  --checkpoint: The model: a run's folder, or a published model's folder or file.",
    ]


def test_the_list_of_tools_has_a_line_for_each_command(capsys):
    tools_main.main()
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()[2:]]
    assert lines == [[tool.__name__.rpartition(".")[2], tool.__doc__.splitlines()[0]] for tool in TOOLS]
    folder = pathlib.Path(tools_main.__file__).parent
    commands_of = [file.stem for file in folder.glob("*.py") if "commands.main(" in file.read_text(encoding="utf-8")]
    assert sorted(commands_of) == [name for name, _ in lines]


def test_fields_missing_in_published_files_have_the_config_s_defaults():
    fields = base.get_config("language").model.to_dict()
    assert families.FREE == {name: fields[name] for name in families.FREE}

"""Shared parts of the tools: open a model, parse flags from a function's arguments, write the output, exit codes."""

import inspect
import io
import os
import pathlib
import sys
from collections.abc import Callable
from typing import Any

from absl import flags

from experiments.engine import by_name, compilation, config_file, disk, errors, log
from experiments.pretrained import open_model

DEFINE = {
    str: flags.DEFINE_string,
    int: flags.DEFINE_integer,
    float: flags.DEFINE_float,
    tuple: flags.DEFINE_multi_string,
}
Path = str | os.PathLike
HELP = {  # for the arguments that most tools have
    "checkpoint": "The model: a run's folder, or a published model's folder or file.",
    "trust": "Your code that the run's config names, such as my_file:my_score. It will be executed.",
    "device": "The required device: any, cpu, gpu or tpu.",
    "workdir": "A folder for the output. Without it nothing is written.",
}


def load(checkpoint: Path, trust: tuple[str, ...], device: str | None, *kinds: str) -> open_model.Trained:
    """Start the device (None: no device) and open the model. Raises UserError if it has another kind than these."""
    config_file.forget_user_modules(pathlib.Path())
    if device is not None:
        compilation.keep()
        compilation.start(device)
    model = open_model.open(checkpoint, trust=trust)
    if kinds:
        open_model.check_kind(model, *kinds)
    return model


def output(folder: Path, name: str) -> pathlib.Path | None:
    """Return the path of a new file in the folder, or None without a folder. Raises UserError if the file exists."""
    return disk.new_file(pathlib.Path(folder), name) if str(folder) else None


def report(text: str, file: pathlib.Path | None) -> str:
    """Print the text, write it into the file if there is one, and return it."""
    log.say(text, "\n")
    save(text, file)
    return text


def save(text: str, file: pathlib.Path | None) -> None:
    """Write the text into the file if there is one."""
    if file is not None:
        disk.write_new(file, f"{text}\n".encode())


def main(tool: Callable, help: dict[str, str], argv: list[str]) -> int:
    """Call the tool with the flags of this command line. Return the exit code."""
    return exit_code(lambda: tool(**arguments(tool, HELP | help, argv)))


def arguments(tool: Callable, help: dict[str, str], argv: list[str]) -> dict[str, Any]:
    """Parse the flags: one for each argument of the tool, with its default. A default of () takes several values."""
    values = flags.FlagValues()
    for name, parameter in inspect.signature(tool).parameters.items():
        default = "" if parameter.default is parameter.empty else parameter.default
        DEFINE[type(default)](name, default, help[name], flag_values=values)
    if "--help" in argv:
        print(f"{inspect.getmodule(tool).__doc__}\n{values.get_help()}")
        sys.exit(0)
    try:
        for argument in values(argv)[1:]:
            raise flags.Error(f'unexpected argument "{argument}". Write --NAME=VALUE, such as --checkpoint=PATH.')
    except flags.Error as error:
        raise errors.UserError(str(error)) from error
    return values.flag_values_dict()


def require(example: str, value: Path) -> None:
    """Raise UserError if the value of the flag in this example is empty."""
    if not str(value):
        raise errors.UserError(f"{example.partition('=')[0]} is missing. Add it to the command, such as {example}.")


def exit_code(action: Callable[[], Any]) -> int:
    """Run the action. Return 0, 2 for a UserError, 1 for a RunError or a closed output, or 130 for Ctrl-C."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal without UTF-8 prints other characters as \u597d
            stream.reconfigure(errors="backslashreplace")
    try:
        with by_name.user_errors("your own code", all_is_users=False):
            action()
        sys.stdout.flush()
    except (errors.UserError, errors.RunError) as error:
        print(f"error: {errors.line(error)}", file=sys.stderr)
        return 2 if isinstance(error, errors.UserError) else 1
    except errors.Interrupted as error:
        print(error, file=sys.stderr)
        return error.code
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:  # for example in `... | head -1`; Python flushes the output again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 0

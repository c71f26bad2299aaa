"""Shared parts of the tools: open a model, parse flags from a function's arguments, write the output, exit codes."""

import inspect
import io
import os
import pathlib
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from absl import flags

from experiments.config import by_name, disk, errors, files as config_files
from experiments.devices import compilation
from experiments.folder import log
from experiments.pretrained import open_model, trained

DEFINE = {
    str: flags.DEFINE_string,
    int: flags.DEFINE_integer,
    float: flags.DEFINE_float,
    bool: flags.DEFINE_bool,
    tuple: flags.DEFINE_multi_string,
}
Path = str | os.PathLike
HELP = {  # of the arguments that most tools have
    "checkpoint": "The model: a run's folder, or a published model's folder or file.",
    "trust": "Your code that the run's config names, such as my_file:my_score. It will be executed.",
    "device": "The required device: any, cpu, gpu or tpu.",
    "set": "A changed setting, such as train.steps=100. Repeat the flag for several.",
    "workdir": "A folder for the output. Without it nothing is written.",
    "file": "The inputs: a file with a text per line, a table (--field), an image, or a folder of texts or of images.",
    "field": "The column of a table with the texts; text,label: also the column with the labels.",
    "output": "A new .csv file for the results, a row for each input.",
}


def load(checkpoint: Path, trust: tuple[str, ...], device: str | None, *kinds: str) -> trained.Trained:
    """Start the device (None: no device) and open the model. trust: the names of user's code that may be executed.

    kinds: what the model may be for, as in trained.DOES ("causal", "image", ...); none: anything. Raises UserError for
    a model of another kind, and as `open_model.open` does.
    """
    config_files.forget_user_modules(pathlib.Path())
    if device is not None:
        compilation.enable_cache()
        compilation.start(device)
    model = open_model.open(checkpoint, trust=trust)
    if kinds:
        trained.check_kind(model, *kinds)
    return model


def output(folder: Path, name: str) -> pathlib.Path | None:
    """Return the path of the new file `name` in `folder`, or None if `folder` is "".

    Raises UserError if the file exists or cannot be written.
    """
    return disk.check_new(pathlib.Path(folder, name), "--workdir", is_file=True) if str(folder) else None


def report(text: str, file: pathlib.Path | None) -> str:
    """Print the text, write it into the file if there is one, and return it."""
    log.say(text, "\n")
    save(text, file)
    return text


def save(text: str, file: pathlib.Path | None) -> None:
    """Write or replace the file with the text and a line end. Do nothing if `file` is None.

    Raises UserError if the file cannot be written.
    """
    if file is not None:
        disk.write_new(file, f"{text}\n".encode())


def new_file(path: Path, flag: str, *ends: str) -> pathlib.Path | None:
    """Return the path of a new file, or None for ''.

    flag: the option with this path, for messages. Raises UserError if the file exists or cannot be written, or if its
    ending, such as ".npz", is not in `ends`.
    """
    if not str(path):
        return None
    file = pathlib.Path(path).expanduser()
    errors.refuse((file.suffix not in ends, f"{flag} = {path} must be a file that ends in {', '.join(ends)}"))
    return disk.check_new(file, flag, is_file=True)


class Files(NamedTuple):
    """The new files of a tool: its text, its table and its figure (`check_files`); None if not requested."""

    text: pathlib.Path | None
    table: pathlib.Path | None
    figure: pathlib.Path | None


def check_files(workdir: Path, name: str, table: Path, figure: Path = "") -> Files:
    """Return the paths of the new files workdir/name, --output (a CSV file) and --figure; None for an empty argument.

    Raises UserError if a file exists, or has another ending than its flag requires.
    """
    pictures = ".png", ".svg", ".pdf"
    return Files(output(workdir, name), new_file(table, "--output", ".csv"), new_file(figure, "--figure", *pictures))


def finish(
    files: Files,
    lines: Sequence[str],
    table: Callable[[], tuple[Sequence[str], Sequence[Sequence]]],
    draw: Callable[[pathlib.Path], pathlib.Path] | None = None,
) -> str:
    """Write the requested files. Print and return, as one text, the lines and a line about each table and figure.

    table() -> the header and the rows of the CSV file. draw(file) writes the figure and returns its path.
    """
    lines = list(lines)
    if files.table:
        lines.append(save_table(files.table, *table()))
    if draw and files.figure:
        with disk.writing(files.figure):
            lines.append(f"wrote {draw(files.figure)}")
    return report("\n".join(lines), files.text)


def save_arrays(file: pathlib.Path, arrays: Mapping[str, np.ndarray]) -> pathlib.Path:
    """Write the arrays into an .npz file, and return its path. An existing file is replaced, a missing folder created.

    Raises UserError if it cannot be written.
    """
    with disk.writing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        with disk.draft(file) as content:
            np.savez(content, **arrays)
    return file


def save_table(file: pathlib.Path, header: Sequence[str], rows: Sequence[Sequence]) -> str:
    """Write or replace a CSV file. Return a line about the file. Raises UserError if it cannot be written.

    Empty cells fill rows that are shorter than the header.
    """
    padded = ([*row, *[""] * (len(header) - len(row))] for row in rows)
    disk.write_new(file, disk.as_csv([header, *padded]))
    return f"wrote {len(rows):,} rows to {file}"


def main(tool: Callable, help: dict[str, str], *, positional: str = "") -> None:
    """Call the tool with the `arguments` of the command line (help, positional: see there), and exit with its code."""
    sys.exit(exit_code(lambda: tool(**arguments(tool, help, sys.argv, positional=positional))))


def list_flags(tool: Callable) -> dict[str, inspect.Parameter]:
    """Return the arguments of the tool by name, which are its flags. The fields of **options: Options are flags too."""
    parameters = dict(inspect.signature(tool).parameters)
    if "options" in parameters:
        parameters |= inspect.signature(parameters.pop("options").annotation).parameters
    return parameters


def arguments(tool: Callable, help: dict[str, str], argv: list[str], *, positional: str = "") -> dict[str, Any]:
    """Return {argument of the tool: value of its flag in argv, or else its default, or else ""}.

    A flag with default () may repeat. help: texts in addition to HELP. positional: the argument that gets all arguments
    without a flag; "": an error. With --help, print the flags and exit. Raises UserError for an unknown flag or an
    invalid value.
    """
    values = flags.FlagValues()
    parameters = list_flags(tool)
    parameters.pop(positional, None)
    for name, parameter in parameters.items():
        default = "" if parameter.default is parameter.empty else parameter.default
        DEFINE[type(default)](name, default, (HELP | help)[name], flag_values=values)
    if "--help" in argv:
        print(f"{inspect.getmodule(tool).__doc__}\n{describe_flags(parameters, HELP | help)}")
        sys.exit(0)
    try:
        extra = values(argv)[1:]
        for argument in extra if not positional else ():
            raise flags.Error(f'unexpected argument "{argument}". Write --NAME=VALUE, such as --checkpoint=PATH.')
    except flags.Error as error:
        raise errors.UserError(str(error)) from error
    return values.flag_values_dict() | ({positional: extra} if positional else {})


def describe_flags(parameters: Mapping[str, inspect.Parameter], help: Mapping[str, str]) -> str:
    """Return a line for each flag, with its default: those of this tool in its order, then those that most tools have.

    help: the texts by flag.
    """
    flags = [(name, parameter.default, help[name]) for name, parameter in parameters.items()]
    own = [flag for flag in flags if flag[2] != HELP.get(flag[0])]
    common = [flag for flag in flags if flag not in own]
    return list_groups({"Flags of this tool:": own, "Flags that most tools have:": common})


def list_groups(groups: Mapping[str, Sequence[tuple[str, Any, str]]]) -> str:
    """Return the flags (name, default, text) below the title of their group. Groups without a flag are left out."""
    lines = []
    for title, group in groups.items():
        lines += ["", title] * bool(group)
        for name, default, text in group:
            form = f"  --[no]{name}" if isinstance(default, bool) else f"  --{name}"
            unsaid = default in ("", None, (), []) or default is False or default is inspect.Parameter.empty
            end = "" if unsaid else f" Default: {default}."
            end += " Repeat it for several." if default == () else ""
            lines += textwrap.wrap(f"{form}: {text}{end}", 100, subsequent_indent=" " * 6)
    return "\n".join(lines[1:])


def require(example: str, value: Path) -> None:
    """Raise UserError if `value` is empty. example: the flag that gives it, with a right value: "--file=test.txt"."""
    if not str(value):
        raise errors.UserError(f"{example.partition('=')[0]} is missing. Add it to the command, such as {example}.")


def parse_changes(texts: Sequence[str]) -> dict[str, str]:
    """Return {KEY: VALUE} of the texts KEY=VALUE that follow --set=. Raises UserError for a text without "="."""
    errors.refuse(*(("=" not in text, f"--set={text} must have the form --set=train.steps=100") for text in texts))
    return dict(text.split("=", 1) for text in texts)


def exit_code(action: Callable[[], Any]) -> int:
    """Run the action, print its UserError or RunError, and return the exit code of the process.

    Return 0 for success, 2 for a UserError, and 1 for a RunError or a closed output. Return 130 for Ctrl-C, and
    128 + its number for another signal.
    """
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

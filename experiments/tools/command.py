"""What all tools share: the arguments of a function as flags, and one sentence and an exit code for what goes wrong."""

import contextlib
import errno
import functools
import inspect
import os
import pathlib
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

from absl import flags

from experiments.engine import by_name, compilation, config, config_file, disk, errors, log

FLAGS = {
    str: flags.DEFINE_string,
    int: flags.DEFINE_integer,
    float: flags.DEFINE_float,
    tuple: flags.DEFINE_multi_string,
}
COMMON = {
    "checkpoint": "The model: a run's folder, or a published model's folder or file.",
    "trust": "A program of yours that the config of the run names, as my_file:my_score; it is run.",
    "device": "any, cpu, gpu, tpu: what must be there.",
    "workdir": "A folder for what is said here; without it nothing is written.",
}

# What ended the newest command, and with it what its frames hold: nothing of JAX is freed between the sentence and the
# end of the process, while a program may be under way.
_ended: list[BaseException] = []


def tool(**help: str) -> Callable[[Callable], Callable]:
    """For a function: as a tool, in any process, which it leaves as it was but for what JAX has started and compiled.
    help: a line for each of its arguments that is not in COMMON. An argument with the default () may be given several
    times as a flag. The function's `main(argv)` is the command of these flags, and returns the exit code."""

    def decorate(function: Callable) -> Callable:
        @functools.wraps(function)
        def run(*given: Any, **named: Any) -> Any:
            with config_file.unchanged(pathlib.Path()):
                values = inspect.signature(function).bind(*given, **named)
                values.apply_defaults()
                config.check_numbers(values.arguments)
                compilation.keep()
                if not values.arguments.get("topology"):  # whose chips need not be there
                    compilation.start(values.arguments.get("device", "any"))
                return function(*values.args, **values.kwargs)

        run.main = lambda argv: exit_code(lambda: run(**arguments(function, COMMON | help, argv)))
        return run

    return decorate


def arguments(function: Callable, help: dict[str, str], argv: list[str]) -> dict[str, Any]:
    """What the words of a command, its name first, say for the arguments of this function. UserError for others."""
    values, about = flags.FlagValues(), inspect.getmodule(function).__doc__
    for name, parameter in inspect.signature(function).parameters.items():
        default = "" if parameter.default is inspect.Parameter.empty else parameter.default
        FLAGS[type(default)](name, default, help[name], flag_values=values)
    if "--help" in argv:
        print(f"{about}\n{values.get_help()}", flush=True)
        sys.exit(0)
    try:
        surplus = values(argv)[1:]
    except flags.Error as error:
        raise errors.UserError(str(error)) from error
    given = Counter(word.lstrip("-").partition("=")[0] for word in argv[1:] if word.startswith("-"))
    for name in (
        name for name, n in given.items() if n > 1 and name in values and not isinstance(values[name], flags.MultiFlag)
    ):
        raise errors.UserError(f"--{name} is given {given[name]} times, and one is used: give it once")
    if surplus:
        raise errors.UserError(f'what is "{surplus[0]}"? Each argument has its name: --checkpoint=PATH')
    return values.flag_values_dict()


def exit_code(action: Callable[[], Any]) -> int:
    """Do this as a command: 0, or 2 (UserError; too long a name of a file), 1 (RunError; nobody reads what is
    printed), 130 (Ctrl-C)."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # what a terminal cannot show is written out
            stream.reconfigure(errors="backslashreplace")
    try:
        try:
            with by_name.told("your own code", all_is_own=False):
                action()
        except BaseException as error:
            _ended[:] = [error]
            raise
        sys.stdout.flush()  # here, where it can be noticed that nobody reads it
    except (errors.UserError, errors.RunError) as error:
        print(f"error: {errors.line(error)}", file=sys.stderr)
        return 2 if isinstance(error, errors.UserError) else 1
    except KeyboardInterrupt as error:
        print(str(error) or "stopped", file=sys.stderr)
        return getattr(error, "code", 130)
    except BrokenPipeError:  # as in `... | head -1`
        with contextlib.suppress(OSError), open(os.devnull, "w") as nobody:
            os.dup2(nobody.fileno(), sys.stdout.fileno())  # for what is flushed at the end
        return 1
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        print(f"error: {str(error.filename)[:100]}... can be no name of a file: {error.strerror}", file=sys.stderr)
        return 2
    return 0


def output(folder: str | os.PathLike, name: str) -> Callable[[str], None]:
    """What writes a text into a new file of this name, where a folder was given. UserError: it is there already."""
    file = disk.new_file(pathlib.Path(folder), name) if folder else None
    return lambda text: disk.write_new(file, f"{text}\n".encode()) if file else None


def tell(text: str, folder: str | os.PathLike, name: str) -> str:
    """Print the text, write it as `output` does, and give it back."""
    write = output(folder, name)
    log.say(text, "\n")
    write(text)
    return text

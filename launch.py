"""python launch.py --config configs/vit.py [--workdir DIR] [--config.train.steps=100 ...] [--dry_run]

In a notebook or another program: launch.run("configs/vit.py", **{"train.steps": 300}).
"""

if __name__ == "__main__":
    from experiments.engine import signals

    signals.from_the_start()  # before what takes seconds to import

import datetime
import functools
import importlib
import os
import pathlib
import re
import shlex
import signal
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import ml_collections
from absl import flags

from experiments.compiler import report as compiler_report, topology as topologies
from experiments.engine import (
    by_name,
    compilation,
    config as configs,
    config_file,
    distributed,
    errors,
    log,
    optim,
    run as runs,
    signals,
)
from experiments.pretrained import adapters, warm_start
from experiments.tools import command as commands

CONFIG = flags.DEFINE_string("config", None, "The config: a .py file with get_config(), or a run's config.json.")
WORKDIR = flags.DEFINE_string("workdir", None, "The run's folder; the same resumes. Default: runs/<config>/<time>.")
DEVICE = flags.DEFINE_string("device", "any", "What must be there: any, cpu, gpu, tpu.")
RESUME = flags.DEFINE_string("resume", "latest", "Go on from: latest, latest_valid (checkpoint that is not damaged).")
DRY_RUN = flags.DEFINE_boolean("dry_run", False, "Show sizes, costs and memory of the compiled step, and stop.")
TOPOLOGY = flags.DEFINE_string("topology", None, "With --dry_run: compile for TPU chips that need not be there: v5e-1.")
JSON = flags.DEFINE_string("json", None, "With --topology: a file for what the compiler says.")
COORDINATOR = flags.DEFINE_string("coordinator", None, "Several processes: host:port of process 0, given to all.")
PROCESSES = flags.DEFINE_integer("processes", None, "Several processes: how many run this command.")
PROCESS = flags.DEFINE_integer("process", None, "Several processes: which one this is, from 0.")
DISTRIBUTED = flags.DEFINE_boolean("distributed", False, "Several processes: JAX asks the cluster (Slurm, TPU pod).")
Path, LATEST_VALID = str | os.PathLike, "latest_valid"


class Command(NamedTuple):
    """What is to be done, as the flags or the arguments of `run` say it."""

    config: str
    workdir: str | None
    changes: list[tuple[str, Any]]
    change: Callable[[ml_collections.ConfigDict, str, Any], None]
    dry_run: bool = False
    topology: tuple[str, str | None] | None = None  # its name, and the file for what the compiler says
    group: distributed.Group | None = None  # of several processes
    detect: bool = False  # the cluster says which they are
    device: str = "any"  # or cpu, gpu, tpu: what must be there
    resume: str = "latest"  # checkpoint, or LATEST_VALID, the newest that is not damaged


def main(argv: list[str]) -> int:
    """Load the config, and hand it to its experiment. Returns the exit code."""
    return commands.exit_code(functools.partial(attempt, argv))


def attempt(argv: list[str]) -> None:
    hint = ""
    try:
        command = asked(argv)
        action, folder = prepared(command)
        if folder is not None:
            given = any(word.lstrip("-").partition("=")[0] == "workdir" for word in argv[1:])
            hint = f"; go on with: {shlex.join(['python', *argv, *([] if given else [f'--workdir={folder}'])])}"
        with signals.at_once(hint), distributed.joined(command.group, detect=command.detect, how_to_go_on=hint):
            action()
    except KeyboardInterrupt as error:
        raise stopped(error, hint) from error


def run(
    config: Path, workdir: Path | None = None, *, device: str = "any", resume: str = "latest", **changes: Any
) -> runs.Result:
    """What `python launch.py --config CONFIG --workdir WORKDIR --config.KEY=VALUE ...` does, in this process.

    device, resume: as the flags. The same workdir again goes on with a run, or gives the result of a finished one. The
    process is left as it was, but for what JAX has started and compiled. Raises UserError and RunError where the
    command ends with one; Interrupted, a KeyboardInterrupt, for Ctrl-C or a notebook's stop button: what trains
    finishes its step and is saved before that, unless it comes a second time.
    """
    given = [(key, configs.plain(value)) for key, value in changes.items()]
    how = {"device": device, "resume": resume}
    command = Command(os.fspath(config), workdir and os.fspath(workdir), given, configs.assign, **how)
    shown = {name: value for name, value in how.items() if value != Command._field_defaults[name]} | dict(given)
    hint = ""
    try:
        with config_file.unchanged(pathlib.Path(command.config).parent):
            with signals.kept():
                action, folder = prepared(command)
                words = [repr(command.config), f"workdir={str(folder)!r}", *([f"**{shown!r}"] if shown else [])]
                hint = f"; go on with: launch.run({', '.join(words)})"
                return action()
    except (errors.UserError, errors.RunError) as error:
        end = type(error)(str(error))
    except SystemExit as error:  # of the user's own code: a program that calls this would end in silence
        end = errors.UserError(f"your own code: {by_name.fault(error)}")
    except KeyboardInterrupt as error:
        end = stopped(error, hint)
        if end.code != 128 + signal.SIGINT:  # for which there is an exception; another does what it would have done
            signal.raise_signal(end.code - 128)
    raise end  # anew: a notebook keeps what was raised, and with its frames the arrays on the devices


def stopped(error: KeyboardInterrupt, hint: str) -> errors.Interrupted:
    """The same, with how to go on."""
    return errors.Interrupted(f"{str(error) or 'stopped'}{hint}", getattr(error, "code", 130))


def asked(argv: list[str]) -> Command:
    """The command of these words; --config.KEY=VALUE changes a setting. UserError where they do not fit together."""
    if "--help" in argv:
        settings = "Settings, each with a comment: python launch.py --help config"
        print(
            fields() if "config" in argv else f"{__doc__}\n\n{flags.FLAGS.main_module_help()}\n{settings}", flush=True
        )
        sys.exit(0)
    changes, rest = [], []
    words = iter(argv)
    for word in words:
        if word.startswith(("--config.", "-config.")):
            key, equals, value = word.partition("config.")[2].partition("=")
            changes.append((key, value if equals else next(words, "")))
        else:
            rest.append(word)
    try:
        surplus = flags.FLAGS(rest)[1:]
    except flags.Error as error:
        unknown = re.match("Unknown command line flag '(.*?)'", str(error))
        right = by_name.ELSEWHERE | configs.flat(importlib.import_module("configs.base").common().to_dict())
        found = by_name.elsewhere(unknown[1], right) if unknown else []
        hint = f"; a setting is given as --config.{found[0]}=VALUE" if found else ""
        raise errors.UserError(f"{str(error).rstrip('.')}{hint}") from error
    group = distributed.given(COORDINATOR.value, PROCESSES.value, PROCESS.value)
    several = group or DISTRIBUTED.value
    if surplus:
        right = "Settings are given as --config.key=value, and a config as --config vit"
        raise errors.UserError(f'what is "{surplus[0]}"? {right}')
    if (TOPOLOGY.value and not DRY_RUN.value) or (JSON.value and not TOPOLOGY.value):
        raise errors.UserError("--topology and --json are for --dry_run, which compiles for chips and runs nothing")
    if not CONFIG.value:
        raise errors.UserError("say which config to run: python launch.py --config configs/vit.py")
    if several and (WORKDIR.value is None or DRY_RUN.value):
        raise errors.UserError("several processes train one run: all need the same --workdir, and no other task")
    chips = (TOPOLOGY.value, JSON.value) if TOPOLOGY.value else None
    how = DRY_RUN.value, chips, group, DISTRIBUTED.value, DEVICE.value, RESUME.value
    return Command(CONFIG.value, WORKDIR.value, changes, configs.override, *how)


def fields() -> str:
    """All settings as the code has them, with defaults and comments: those of all runs, and of each experiment."""
    base, rooms = pathlib.Path(by_name.ROOT, "configs", "base.py"), sorted((by_name.ROOT / "experiments").glob("*.py"))
    lines = []
    for file in (base, *rooms):
        found = re.findall(
            r"^    (?!#)(\w+\.\w+ = .*  # .*(?:\n    # .*)*)", file.read_text(encoding="utf-8"), re.MULTILINE
        )
        if found:
            lines += ["", "of all runs" if file is base else f"of {file.stem}", *found]
    text = re.sub(r"(ml_collections\.)?FieldReference\((.*), field_type=.*\)\)", r"\2", "\n".join(lines))
    return text.replace("\nconfig.", "\n")


def prepared(command: Command) -> tuple[Callable[[], runs.Result | None], pathlib.Path | None]:
    """What the command does, once its config is read and checked, and the folder in which it can be gone on with."""
    base = importlib.import_module("configs.base").get_config  # anew for each `run`, as the config's own import is
    file = config_file.place(command.config)
    config = config_file.load(file, base=base, given=dict(command.changes))
    for key, value in command.changes:
        command.change(config, key, value)
    given, defaults = [key for key, _ in command.changes], config_file.defaults(config, base)
    settings = configs.Settings(config, defaults, file=command.config, given=given)
    if (warmup := optim.warmup_steps(settings)) != (usual := config.optim.warmup_steps):
        print(f"the warm-up takes {warmup} steps, a tenth of all: optim.warmup_steps = {usual} would be all of them")
    experiment = by_name.experiment(settings.experiment)
    compilation.keep()
    if command.dry_run and not command.topology:
        compilation.simulate(settings.mesh.to_dict())
    by_name.choose("resume", str(command.resume), {"latest": False, LATEST_VALID: True})
    work = functools.partial(trained if hasattr(experiment, "prepare") else studied, command, experiment, settings)
    if command.topology:
        return functools.partial(topologies.of(*command.topology)(work), None), None
    if not (command.group or command.detect):
        compilation.of_cores(settings.mesh.to_dict())
    folder = None
    if not command.dry_run:
        when = datetime.datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
        folder = pathlib.Path(command.workdir or pathlib.Path("runs") / pathlib.Path(file).stem / when)
    return functools.partial(work, folder), folder


def trained(
    command: Command, experiment: ModuleType, settings: configs.Settings, folder: pathlib.Path | None
) -> runs.Result | None:
    """Train what an experiment prepares."""
    signals.heed()
    settings = warm_start.adopted(settings, folder)
    devices = runs.devices(settings, command.device)
    work = adapters.prepared(settings, experiment, devices)
    signals.heed()
    for line in work.lines:
        log.say(line, "\n")
    start = warm_start.load(settings, work.task.init, resumed=runs.begun(folder), files=work.files)
    work = work._replace(params={**work.params, **start})
    if folder is None:
        return compiler_report.dry_run(settings, work, devices)
    return runs.run(settings, folder, work, devices, fall_back=command.resume == LATEST_VALID)


def studied(
    command: Command, experiment: ModuleType, settings: configs.Settings, folder: pathlib.Path | None
) -> runs.Result | None:
    """What an experiment that does all by itself does."""
    earlier = pathlib.Path(command.workdir) if command.dry_run and command.workdir else None
    how = command.device, command.resume == LATEST_VALID
    return experiment.run(warm_start.adopted(settings, folder), folder, earlier, *how)


if __name__ == "__main__":
    distributed.leave(main(sys.argv))

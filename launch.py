"""python launch.py --config configs/vit.py [--workdir DIR] [--config.train.steps=100 ...] [--dry_run]

In a notebook or another program: launch.run("configs/vit.py", **{"train.steps": 300}).
"""

if __name__ == "__main__":
    from experiments import engine
    from experiments.engine import signals

    signals.from_the_start()
    engine.large_pages(__file__)  # starts this process again: before what takes seconds to import

import contextlib
import datetime
import functools
import importlib
import os
import pathlib
import shlex
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import ml_collections
from absl import flags

from experiments.compiler import report as compiler_report
from experiments.compiler import topology as topologies
from experiments.engine import (
    by_name,
    checkpoint,
    compilation,
    config_file,
    distributed,
    errors,
    replay,
    signals,
    workdir,
)
from experiments.engine import config as configs
from experiments.engine import (
    run as runs,
)
from experiments.pretrained import warm_start

CONFIG = flags.DEFINE_string("config", None, "The config: a .py file with get_config(), or a run's config.json.")
WORKDIR = flags.DEFINE_string("workdir", None, "The run's folder; the same resumes. Default: runs/<config>/<time>.")
DRY_RUN = flags.DEFINE_boolean("dry_run", False, "Show sizes, costs and memory of the compiled step, and stop.")
TOPOLOGY = flags.DEFINE_string("topology", None, "With --dry_run: compile for TPU chips that need not be there: v5e-1.")
JSON = flags.DEFINE_string("json", None, "With --topology: a file for what the compiler says.")
REPLAY = flags.DEFINE_string("replay", None, "A folder left by a run whose numbers went wrong: compute its step again.")
COORDINATOR = flags.DEFINE_string("coordinator", None, "Several processes: host:port of process 0, given to all.")
PROCESSES = flags.DEFINE_integer("processes", None, "Several processes: how many run this command.")
PROCESS = flags.DEFINE_integer("process", None, "Several processes: which one this is, from 0.")
DISTRIBUTED = flags.DEFINE_boolean("distributed", False, "Several processes: JAX asks the cluster (Slurm, TPU pod).")


def arguments(argv: list[str]) -> list[tuple[str, str]]:
    """Parse the flags; what begins with --config. is returned as (key, value)."""
    if "--help" in argv:
        print(
            f"{__doc__}\n\n{flags.FLAGS.main_module_help()}\n"
            "Settings, each with a comment: configs/base.py, and config() of experiments/NAME.py.",
            flush=True,
        )
        sys.exit(0)
    overrides, rest = [], []
    words = iter(argv)
    for word in words:
        if word.startswith(("--config.", "-config.")):
            key, equals, value = word.partition("config.")[2].partition("=")
            overrides.append((key, value if equals else next(words, "")))
        else:
            rest.append(word)
    try:
        surplus = flags.FLAGS(rest)[1:]
    except flags.Error as error:
        raise errors.UserError(str(error)) from error
    if surplus:
        raise errors.UserError(f'what is "{surplus[0]}"? Settings are given as --config.key=value')
    if REPLAY.value is not None and (CONFIG.value or WORKDIR.value or DRY_RUN.value):
        raise errors.UserError("--replay DIR takes its config from DIR and writes nothing: leave the other flags out")
    if (TOPOLOGY.value and not DRY_RUN.value) or (JSON.value and not TOPOLOGY.value):
        raise errors.UserError("--topology and --json are for --dry_run, which compiles for chips and runs nothing")
    if CONFIG.value is None and REPLAY.value is None:
        raise errors.UserError("say which config to run: python launch.py --config configs/vit.py")
    return overrides


def main(argv: list[str]) -> int:
    """Load the config, and hand it to its experiment. Returns the exit code."""
    try:
        code = attempt(argv)
        sys.stdout.flush()  # here, where it can be noticed that nobody reads it
    except BrokenPipeError:  # as in `... | head -1`
        with contextlib.suppress(OSError), open(os.devnull, "w") as nobody:
            os.dup2(nobody.fileno(), sys.stdout.fileno())  # for what is flushed at the end
        return 1
    return code


def attempt(argv: list[str]) -> int:
    """The same, for a reader who stays."""
    how_to_go_on = ""
    try:
        with signals.at_once():
            action, folder = prepared(asked(argv))
            how_to_go_on = f"; go on with: {same_command(argv, folder)}" if folder is not None else ""
            more = {"detect": DISTRIBUTED.value, "how_to_go_on": how_to_go_on}
            with signals.at_once(how_to_go_on), distributed.joined(together(), **more):
                action()
    except (errors.UserError, errors.RunError) as error:
        print(f"error: {errors.line(error)}", file=sys.stderr)
        return 2 if isinstance(error, errors.UserError) else 1
    except errors.Interrupted as error:
        print(f"{error}{how_to_go_on}", file=sys.stderr)
        return error.code
    except KeyboardInterrupt:
        print(f"stopped{how_to_go_on}", file=sys.stderr)
        return 130
    return 0


class Command(NamedTuple):
    """What is to be done, as the flags or the arguments of `run` say it."""

    config: str
    workdir: str | None
    changes: list[tuple[str, Any]]
    change: Callable[[ml_collections.ConfigDict, str, Any], None]
    dry_run: bool = False
    replay: pathlib.Path | None = None
    several: bool = False  # processes
    topology: tuple[str, str | None] | None = None  # its name, and the file for what the compiler says


def run(config: str | os.PathLike, workdir: str | os.PathLike | None = None, **changes: Any) -> runs.Result:
    """What `python launch.py --config CONFIG --workdir WORKDIR --config.KEY=VALUE ...` does, in this process.

    `launch.run("configs/vit.py", **{"train.steps": 300})`. The same workdir again goes on with a run, or gives the
    result of a finished one. The process is left as it was, but for what JAX has started and compiled. Raises UserError
    and RunError where the command ends with one; Interrupted, a KeyboardInterrupt, for Ctrl-C or a notebook's stop
    button: what trains finishes its step and is saved before that, unless it comes a second time.
    """
    given = [(key, configs.plain(value)) for key, value in changes.items()]
    command = Command(os.fspath(config), workdir and os.fspath(workdir), given, configs.assign)
    hint = ""
    try:
        with by_name.unchanged(pathlib.Path(command.config).parent):
            action, folder = prepared(command)
            words = [repr(command.config), f"workdir={str(folder)!r}", *([f"**{dict(given)!r}"] if given else [])]
            hint = f"; go on with: launch.run({', '.join(words)})" if folder is not None else ""
            return action()
    except (errors.UserError, errors.RunError) as error:
        end = type(error)(str(error))
    except KeyboardInterrupt as error:
        end = errors.Interrupted(f"{str(error) or 'stopped'}{hint}", getattr(error, "code", 130))
        signals.pass_on(end.code - 128)
    raise end  # anew: a notebook keeps what was raised, and with its frames the arrays on the devices


def asked(argv: list[str]) -> Command:
    """The command of these words. UserError where its flags do not fit together."""
    changes = arguments(argv)
    bundle = pathlib.Path(REPLAY.value) if REPLAY.value is not None else None
    if bundle is not None and not (bundle / "config.json").is_file():
        raise errors.UserError(f"{bundle} is no replay bundle: it has no config.json")
    config = str(bundle / "config.json") if bundle is not None else CONFIG.value
    several = bool(together() or DISTRIBUTED.value)
    chips = (TOPOLOGY.value, JSON.value) if TOPOLOGY.value else None
    return Command(config, WORKDIR.value, changes, configs.override, DRY_RUN.value, bundle, several, chips)


def prepared(command: Command) -> tuple[Callable[[], runs.Result | None], pathlib.Path | None]:
    """What the command does, once its config is read and checked, and the folder in which it can be gone on with."""
    base = importlib.import_module("configs.base").get_config  # anew for each `run`, as the config's own import is
    config = loaded(command, base)
    settings = configs.Settings(config, config_file.defaults(config, base), file=command.config)
    experiment = by_name.experiment(settings.experiment)
    compilation.keep()
    if command.dry_run and not command.topology:
        compilation.simulate(settings.mesh.to_dict())
    if command.replay is not None:
        if not hasattr(experiment, "prepare"):
            raise errors.UserError(f"{command.replay} is no replay bundle: {settings.experiment} leaves none")
        return functools.partial(trained, experiment, settings, None, command.replay), None
    trains = getattr(experiment, "WRITES", True)
    work = functools.partial(trained, experiment) if hasattr(experiment, "prepare") else experiment.run
    if command.topology and getattr(experiment, "COMPILES", trains):
        return functools.partial(topologies.of(*command.topology)(work), settings, None), None
    if command.dry_run and not trains:
        raise errors.UserError(f"--dry_run is for training: {settings.experiment} has nothing to try dry")
    if not trains and command.several:
        raise errors.UserError(f"several processes are for training: {settings.experiment} takes one")
    if not command.several:
        compilation.of_cores(settings.mesh.to_dict())
    folder = folder_of(command, trains)
    writes = folder if trains else None
    return functools.partial(workdir.outlive, functools.partial(work, settings, folder), writes), writes


def trained(
    experiment: ModuleType, settings: configs.Settings, folder: pathlib.Path | None, bundle: pathlib.Path | None = None
) -> runs.Result | None:
    """What an experiment prepares, trained; or the step of a replay bundle, computed again."""
    devices = runs.devices(settings)
    work = experiment.prepare(settings, devices)
    for line in work.lines:
        print(line, flush=True)
    if bundle is not None:
        return replay.again(bundle, runs.plan(settings, work.task, devices))
    resumed = folder is not None and checkpoint.newest(folder / "checkpoints") is not None
    start = warm_start.load(settings, work.task.init, resumed=resumed, files=work.files)
    work = work._replace(params={**work.params, **start})
    if folder is None:
        return compiler_report.dry_run(settings, work, devices)
    return runs.run(settings, folder, work, devices)


def together() -> distributed.Group | None:
    """The processes that this run has, None: one. UserError where several cannot do what is asked."""
    found = distributed.given(COORDINATOR.value, PROCESSES.value, PROCESS.value)
    if (found or DISTRIBUTED.value) and (WORKDIR.value is None or DRY_RUN.value or REPLAY.value is not None):
        raise errors.UserError("several processes train one run: all need the same --workdir, and no other task")
    return found


def loaded(command: Command, base: config_file.Base) -> ml_collections.ConfigDict:
    """The config, for one device where it is that of a replay bundle, with what the command changes."""
    config = config_file.load(command.config, base=base, given=dict(command.changes))
    for axis in config.mesh if command.replay is not None else ():
        config.mesh[axis] = 1
    for key, value in command.changes:
        command.change(config, key, value)
    return config


def same_command(argv: list[str], folder: pathlib.Path) -> str:
    """What to type for the same run in the same folder."""
    given = any(word.lstrip("-").partition("=")[0] == "workdir" for word in argv[1:])
    return shlex.join(["python", *argv, *([] if given else [f"--workdir={folder}"])])


def folder_of(command: Command, trains: bool) -> pathlib.Path | None:
    """Where to write; None: nowhere."""
    if command.dry_run or not (command.workdir or trains):
        return None
    when = datetime.datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    return pathlib.Path(command.workdir or pathlib.Path("runs") / pathlib.Path(command.config).stem / when)


if __name__ == "__main__":
    distributed.leave(main(sys.argv))

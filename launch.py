"""python launch.py --config configs/vit.py [--workdir DIR] [--config.train.steps=100 ...] [--dry_run]"""

if __name__ == "__main__":
    from experiments.engine import interruption, pages

    interruption.from_the_start()
    pages.large(__file__)  # starts this process again: before what takes seconds to import

import contextlib
import datetime
import functools
import os
import pathlib
import shlex
import sys
from collections.abc import Callable

import ml_collections
from absl import flags

from configs import base
from experiments.engine import compilation, errors, group, interruption, mesh, parting, replay, topology
from experiments.engine import config as configs

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
            f"{__doc__}\n\n{flags.FLAGS.main_module_help()}\nEvery setting, with a comment, is in configs/base.py.",
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
        with interruption.at_once():
            action, how_to_go_on = prepared(argv)
            more = {"detect": DISTRIBUTED.value, "how_to_go_on": how_to_go_on}
            with interruption.at_once(how_to_go_on), group.joined(together(), **more):
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


def prepared(argv: list[str]) -> tuple[Callable[[], None], str]:
    """What the command does, once its config is read and checked, and what to say where a person stops it."""
    overrides = arguments(argv)
    bundle = pathlib.Path(REPLAY.value) if REPLAY.value is not None else None
    settings = configs.Settings(loaded(overrides, bundle), defaults=base.get_config(), file=CONFIG.value)
    experiment = configs.experiment(settings.experiment)
    compilation.keep_in(settings.compilation_cache)
    if DRY_RUN.value and not TOPOLOGY.value:
        mesh.simulate(settings.mesh.to_dict())
    if bundle is not None:
        return functools.partial(replay.instead_of_training, bundle, experiment.run, settings, None), ""
    trains = getattr(experiment, "WRITES", True)
    if TOPOLOGY.value and getattr(experiment, "COMPILES", trains):
        place = TOPOLOGY.value, JSON.value
        return functools.partial(topology.instead_of_training, *place, experiment.run, settings, None), ""
    if DRY_RUN.value and not trains:
        raise errors.UserError(f"--dry_run is for training: {settings.experiment} has nothing to try dry")
    if not trains and (together() or DISTRIBUTED.value):
        raise errors.UserError(f"several processes are for training: {settings.experiment} takes one")
    if not (together() or DISTRIBUTED.value):
        mesh.of_cores(settings.mesh.to_dict())
    folder = folder_of(trains)
    hint = f"; go on with: {same_command(argv, folder)}" if trains and folder is not None else ""
    return functools.partial(experiment.run, settings, folder), hint


def together() -> group.Group | None:
    """The processes that this run has, None: one. UserError where several cannot do what is asked."""
    found = group.given(COORDINATOR.value, PROCESSES.value, PROCESS.value)
    if (found or DISTRIBUTED.value) and (WORKDIR.value is None or DRY_RUN.value or REPLAY.value is not None):
        raise errors.UserError("several processes train one run: all need the same --workdir, and no other task")
    return found


def loaded(overrides: list[tuple[str, str]], bundle: pathlib.Path | None) -> ml_collections.ConfigDict:
    """The config of --config, or that of a replay bundle, for one device; and what the command line changes."""
    if bundle is not None and not (bundle / "config.json").is_file():
        raise errors.UserError(f"{bundle} is no replay bundle: it has no config.json")
    path = str(bundle / "config.json") if bundle is not None else CONFIG.value
    config = configs.load(path, base=base.get_config(), given=[key for key, _ in overrides])
    for axis in config.mesh if bundle is not None else ():
        config.mesh[axis] = 1
    for key, value in overrides:
        configs.override(config, key, value)
    return config


def same_command(argv: list[str], folder: pathlib.Path) -> str:
    """What to type for the same run in the same folder."""
    given = any(word.lstrip("-").partition("=")[0] == "workdir" for word in argv[1:])
    return shlex.join(["python", *argv, *([] if given else [f"--workdir={folder}"])])


def folder_of(trains: bool) -> pathlib.Path | None:
    """Where to write; None: nowhere."""
    if DRY_RUN.value or not (WORKDIR.value or trains):
        return None
    when = datetime.datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    return pathlib.Path(WORKDIR.value or pathlib.Path("runs") / pathlib.Path(CONFIG.value).stem / when)


if __name__ == "__main__":
    parting.leave(main(sys.argv))

"""python launch.py --config configs/vit.py [--workdir DIR] [--config.train.steps=100 ...] [--dry_run]

In a notebook or another program: launch.run("configs/vit.py", **{"train.steps": 300}).
"""

if __name__ == "__main__":
    import signal

    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # until training starts, Ctrl-C ends it without a traceback

import datetime
import importlib
import os
import pathlib
import re
import shlex
import signal
import sys
from typing import Any

from absl import flags

from experiments.dry_run import dry_run as dry_runs, topology as topologies
from experiments.engine import by_name, compilation, config as configs, config_file, distributed, errors, run as runs
from experiments.pretrained import adapters, warm_start
from experiments.tools import command as commands

CONFIG = flags.DEFINE_string("config", None, "The config: a .py file with get_config(), or a run's config.json.")
WORKDIR = flags.DEFINE_string("workdir", None, "The run's folder; the same resumes. Default: runs/<config>/<time>.")
DEVICE = flags.DEFINE_string("device", "any", "The backend to use: any, cpu, gpu, tpu.")
RESUME = flags.DEFINE_integer("resume", None, "Resume from the checkpoint of this step, and delete later ones.")
DRY_RUN = flags.DEFINE_boolean("dry_run", False, "Show sizes, costs and memory of the compiled step, and stop.")
TOPOLOGY = flags.DEFINE_string("topology", None, "With --dry_run: compile for TPU chips without having them: v5e-1.")
JSON = flags.DEFINE_string("json", None, "With --topology: a file for the compiler's report.")
COORDINATOR = flags.DEFINE_string("coordinator", None, "Several processes: host:port of process 0, the same for all.")
PROCESSES = flags.DEFINE_integer("processes", None, "Several processes: their number.")
PROCESS = flags.DEFINE_integer("process", None, "Several processes: the index of this one, from 0.")
DISTRIBUTED = flags.DEFINE_boolean("distributed", False, "Several processes: JAX detects the cluster (Slurm, TPU pod).")
OPTIONS = (DEVICE, RESUME, DRY_RUN, TOPOLOGY, JSON)  # arguments of `train`
Path = str | os.PathLike


def main(argv: list[str]) -> int:
    """Run the command line, and return the exit code."""
    return commands.exit_code(lambda: execute(argv))


def execute(argv: list[str]) -> None:
    """Parse the command line, and train or report in the processes that it names."""
    changes = parse(argv)
    group = distributed.parse_group(COORDINATOR.value, PROCESSES.value, PROCESS.value)
    if (group or DISTRIBUTED.value) and (WORKDIR.value is None or DRY_RUN.value):
        raise errors.UserError("several processes train one run: set the same --workdir for all, without --dry_run")
    folder, hint = WORKDIR.value, ""
    if not DRY_RUN.value:
        folder = WORKDIR.value or new_folder(CONFIG.value)
        command = ["python", *(word for word in argv if not word.startswith("--resume="))]  # from now on: the newest
        command += [] if WORKDIR.value else [f"--workdir={folder}"]
        hint = f"; go on with: {shlex.join(command)}"
    try:
        with distributed.join(group, detect=DISTRIBUTED.value):
            train(CONFIG.value, folder, changes, **{flag.name: flag.value for flag in OPTIONS})
    except KeyboardInterrupt as error:
        raise make_interrupted(error, hint) from error


def run(
    config: Path, workdir: Path | None = None, *, device: str = "any", resume: int | None = None, **changes: Any
) -> runs.Result:
    """Run `python launch.py --config CONFIG --workdir WORKDIR --config.KEY=VALUE ...` in this process.

    device, resume: see the flags. Calling it again with the same workdir resumes a run, or returns a finished result.
    Raises UserError and RunError like the command. Ctrl-C or a notebook's stop button finishes the step, saves, and
    raises Interrupted, a KeyboardInterrupt; a second one does not save.
    """
    changes = {key: configs.to_plain(value) for key, value in changes.items()}
    config, folder = os.fspath(config), os.fspath(workdir or new_folder(config))
    options = {"device": device} if device != "any" else {}
    again = [repr(config), f"workdir={folder!r}", *([f"**{options | changes!r}"] if options | changes else [])]
    hint = f"; go on with: launch.run({', '.join(again)})"
    config_file.forget_user_modules(pathlib.Path(config).parent)
    try:
        return train(config, folder, changes, device=device, resume=resume)
    except (errors.UserError, errors.RunError) as error:
        end = type(error)(str(error))
    except SystemExit as error:  # from the user's code: it must not end the caller's process
        end = errors.UserError(f"your own code: {by_name.find_user_line(error)}{by_name.describe_error(error)}")
    except KeyboardInterrupt as error:
        end = make_interrupted(error, hint)
        if end.code != 128 + signal.SIGINT:  # another signal than Ctrl-C: call its usual handler
            signal.raise_signal(end.code - 128)
    raise end  # new, without frames: a notebook would keep these, and the arrays on the devices in them


def make_interrupted(error: KeyboardInterrupt, hint: str) -> errors.Interrupted:
    """Return the exception for a stopped command. hint: the command that resumes it."""
    return errors.Interrupted(f"{str(error) or 'stopped'}{hint}", getattr(error, "code", 130))


def new_folder(config: Path) -> str:
    """Return a new directory for a run of this config: runs/<config>/<time>."""
    return str(pathlib.Path("runs", pathlib.Path(config).stem, datetime.datetime.now().strftime("%Y-%m-%d_%H-%M-%S")))


def train(
    config: str,
    workdir: str | None,
    changes: dict[str, Any],
    *,
    device: str = "any",
    resume: int | None = None,
    dry_run: bool = False,
    topology: str | None = None,
    json: str | None = None,
) -> runs.Result | None:
    """Load the settings, prepare the experiment, and train it; for a dry run, report what it needs.

    changes: the values of settings by key, as values or as text.
    """
    folder = None if dry_run else pathlib.Path(workdir)
    settings = warm_start.adopt_architecture(config_file.load_settings(config, changes), folder)
    compilation.keep()
    experiment = by_name.load_experiment(settings.experiment)
    target = topologies.describe(topology) if topology else None
    chips = target.devices if target else compilation.split(settings.to_dict()["mesh"], device, fake=dry_run)
    if not hasattr(experiment, "prepare"):  # a study: it prepares and trains many runs
        if resume is not None:
            raise errors.UserError(f"--resume={resume}: a study always resumes from its newest checkpoints")
        earlier = pathlib.Path(workdir) if dry_run and workdir else None
        return experiment.run(settings, folder, earlier, device, chips, target, json)
    mesh = runs.make_mesh(settings, device, chips=chips)
    work = adapters.prepare_work(settings, experiment, mesh)  # data, initial parameters, loss, figures; optim.lora
    work = warm_start.add_parameters(settings, work, resumed=runs.has_checkpoint(folder))  # init_from
    if dry_run:
        return dry_runs.dry_run(settings, work, mesh, target, json)
    return runs.run(settings, folder, work, mesh, resume=resume)


def parse(argv: list[str]) -> dict[str, str]:
    """Parse the flags, and return the changes of settings, --config.KEY=VALUE. UserError for invalid arguments."""
    base = importlib.import_module("configs.base")
    if "--help" in argv:
        usage = [__doc__, flags.FLAGS.main_module_help(), "All settings: python launch.py --help config"]
        print("\n".join(base.list_settings() if "config" in argv else usage), flush=True)
        sys.exit(0)
    changes, rest, arguments = {}, [], iter(argv)
    for word in arguments:
        if word.startswith(("--config.", "-config.")):
            key, equals, value = word.partition("config.")[2].partition("=")
            changes[key] = value if equals else next(arguments, "")
        else:
            rest.append(word)
    try:
        surplus = flags.FLAGS(rest)[1:]
    except flags.Error as error:
        hint, unknown = "", re.match("Unknown command line flag '(.*?)'", str(error))
        if keys := unknown and by_name.translate_foreign(unknown[1], by_name.FOREIGN_NAMES | configs.flat(base.FIELDS)):
            hint = f"; a setting is given as --config.{keys[0]}=VALUE"
        raise errors.UserError(f"{str(error).rstrip('.')}{hint}") from error
    if surplus or not CONFIG.value:
        reason = f'invalid argument "{surplus[0]}"' if surplus else "--config is missing"
        raise errors.UserError(f"{reason}: write python launch.py --config configs/vit.py --config.train.steps=100")
    if (TOPOLOGY.value and not DRY_RUN.value) or (JSON.value and not TOPOLOGY.value):
        raise errors.UserError("--topology and --json need --dry_run, which compiles for chips and runs nothing")
    return changes


if __name__ == "__main__":
    sys.exit(main(sys.argv))

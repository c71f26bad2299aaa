"""Train the model, or run the study, of a config file.

python launch.py --config configs/vit.py
python launch.py --config configs/vit.py --workdir runs/mine --config.train.steps=100
python launch.py --config configs/norm_study.py --dry_run

In a notebook or another program: launch.run("configs/vit.py", **{"train.steps": 300}).
"""

if __name__ == "__main__":
    import gc
    import signal

    gc.disable()  # until the end of the imports, whose objects all stay: to look for garbage among them takes 0.3 s
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # until training starts, Ctrl-C ends launch.py without a traceback

import contextlib
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

from experiments import command as commands
from experiments.config import by_name, errors, files as config_files, settings as configs
from experiments.devices import compilation, distributed
from experiments.dry_run import dry_run as dry_runs, topology as topologies
from experiments.engine import run as runs, signals, train_step
from experiments.folder import workdir as workdirs
from experiments.pretrained import adapters, warm_start
from experiments.tools import sweep as sweeps

CONFIG = flags.DEFINE_string("config", None, "The config: a .py file with get_config(), or a run's config.json.")
WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run, new or to resume. Default: runs/<config>/<time>.")
DEVICE = flags.DEFINE_string("device", "any", "The backend to use: any, cpu, gpu or tpu.")
RESUME = flags.DEFINE_integer("resume", None, "Resume from the checkpoint of this step, and delete later ones.")
SWEEP = flags.DEFINE_multi_string("sweep", [], f"Train all values: {sweeps.EXAMPLE}. Repeat it: all combinations.")
DRY_RUN = flags.DEFINE_boolean("dry_run", False, "Show sizes, FLOPs and memory of the compiled step, without training.")
TOPOLOGY = flags.DEFINE_string("topology", None, "With --dry_run: compile for absent TPU chips, such as v5e-1.")
JSON = flags.DEFINE_string("json", None, "With --topology: write the compiler's report to this file.")
COORDINATOR = flags.DEFINE_string("coordinator", None, "host:port of process 0.")
PROCESSES = flags.DEFINE_integer("processes", None, "The number of processes.")
PROCESS = flags.DEFINE_integer("process", None, "The index of this process, from 0.")
DISTRIBUTED = flags.DEFINE_boolean("distributed", False, "Let JAX find the processes (Slurm, TPU pod).")
GROUPS = {  # of --help
    "What to train:": (CONFIG, SWEEP),
    "Where:": (WORKDIR, RESUME, DEVICE),
    "What it would cost:": (DRY_RUN, TOPOLOGY, JSON),
    "One run in several processes; all get the same --workdir:": (COORDINATOR, PROCESSES, PROCESS, DISTRIBUTED),
}
OPTIONS = (DEVICE, RESUME, DRY_RUN, TOPOLOGY, JSON)  # flags that are arguments of `train`
Path = str | os.PathLike


def main(argv: list[str]) -> int:
    """Execute the command line. Return the exit code."""
    return commands.exit_code(lambda: execute(argv))


def execute(argv: list[str]) -> None:
    """Parse the command line, join the other processes if there are any, and train (or report, with --dry_run)."""
    changes = parse(argv)
    group = distributed.parse_group(COORDINATOR.value, PROCESSES.value, PROCESS.value)
    if (group or DISTRIBUTED.value) and (WORKDIR.value is None or DRY_RUN.value):
        raise errors.UserError("several processes train one run: set the same --workdir for all, without --dry_run")
    folder, hint = WORKDIR.value, ""
    if not DRY_RUN.value:
        folder = WORKDIR.value or new_folder(CONFIG.value)
        # Without --resume, the command goes on from the newest checkpoint.
        command = ["python", *(argument for argument in argv if not argument.startswith("--resume="))]
        command += [] if WORKDIR.value else [f"--workdir={folder}"]
        hint = f"; go on with: {shlex.join(command)}"
    try:
        with distributed.join(group, detect=DISTRIBUTED.value):
            options = {flag.name: flag.value for flag in OPTIONS}
            train(CONFIG.value, folder, changes, grid=sweeps.parse(SWEEP.value), **options)
    except KeyboardInterrupt as error:
        raise make_interrupted(error, hint) from error


def sweep(config: Path, grid: sweeps.Grid, workdir: Path | None = None, **options: Any) -> runs.Result:
    """Train every combination of the values in `grid`, such as {"optim.learning_rate": [1e-3, 3e-3]}, as a study.

    The same call with the same workdir trains what is not finished. options: device and changes, as for `run`.
    """
    grid = {key: [configs.to_plain(value) for value in values] for key, values in grid.items()}
    return run(config, workdir, grid=grid, **options)


def run(
    config: Path,
    workdir: Path | None = None,
    *,
    device: str = "any",
    resume: int | None = None,
    grid: sweeps.Grid | None = None,
    **changes: Any,
) -> runs.Result:
    """Run `python launch.py --config CONFIG --workdir WORKDIR --config.KEY=VALUE ...` in this process.

    device, resume: as the flags. grid: see `sweep`. changes: settings by key. Another call with the same workdir
    resumes the run, or returns the result of a finished run. Raises UserError and RunError like the command. Ctrl-C or
    the stop button of a notebook finishes the stage or step, saves, and raises Interrupted, a KeyboardInterrupt. A
    second Ctrl-C does not save.
    """
    changes = {key: configs.to_plain(value) for key, value in changes.items()}
    config, folder = os.fspath(config), os.fspath(workdir or new_folder(config))
    options = ({"device": device} if device != "any" else {}) | ({} if grid is None else {"grid": grid})
    arguments = [repr(config), f"workdir={folder!r}", *([f"**{options | changes!r}"] if options | changes else [])]
    hint = f"; go on with: launch.run({', '.join(arguments)})"
    config_files.forget_user_modules(pathlib.Path(config).parent)
    requests = signals.Requests()
    try:
        with requests.collect(signal.SIGINT):
            result = train(config, folder, changes, device=device, resume=resume, grid=grid)
        requests.raise_if_requested()
        return result
    except (errors.UserError, errors.RunError) as error:
        outcome = type(error)(str(error))
    except SystemExit as error:  # raised by the user's code; it must not end the caller's process
        outcome = errors.UserError(f"your own code: {by_name.find_user_line(error)}{by_name.describe_error(error)}")
    except KeyboardInterrupt as error:
        outcome = make_interrupted(error, hint)
        if outcome.code != 128 + signal.SIGINT:  # a signal other than Ctrl-C: call its usual handler
            signal.raise_signal(outcome.code - 128)
    raise outcome  # a new exception, because a notebook keeps the frames of the old one, with their device arrays


def make_interrupted(error: KeyboardInterrupt, hint: str) -> errors.Interrupted:
    """Return the exception for a command that a signal stopped. hint: how to resume."""
    return errors.Interrupted(f"{str(error) or 'stopped'}{hint}", getattr(error, "code", 130))


def new_folder(config: Path) -> str:
    """Return the path of a new run of this config, runs/<config>/<time>. The directory is not created."""
    return str(pathlib.Path("runs", pathlib.Path(config).stem, datetime.datetime.now().strftime("%Y-%m-%d_%H-%M-%S")))


@train_step.device_errors()
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
    grid: sweeps.Grid | None = None,
) -> runs.Result | None:
    """Load the settings, prepare the experiment, and train. With dry_run, report sizes and costs instead.

    changes: settings by key, as values or as text. grid: see `sweep`. The other arguments are flags. Return None after
    a dry run.
    """
    folder, settings = None if dry_run else pathlib.Path(workdir), sweeps.load_settings(config, changes, grid)
    experiment = by_name.load_experiment(settings.experiment)
    is_study = not hasattr(experiment, "prepare")  # which prepares and trains many runs
    fault = f"--resume={resume} is not for studies, which resume by themselves. Leave it out"
    errors.refuse((is_study and resume is not None, fault))
    # An existing run is locked before its files are read. A refused run makes no folder.
    is_locked = not (dry_run or is_study or distributed.is_joined()) and folder.is_dir()
    with workdirs.lock(folder) if is_locked else contextlib.nullcontext():
        settings = warm_start.adopt_architecture(settings, folder)
        compilation.enable_cache()
        target = topologies.describe(topology) if topology else None
        devices = target.devices if target else compilation.split(settings.to_dict()["mesh"], device, fake=dry_run)
        signals.current().raise_if_requested()
        if is_study:
            earlier_study = pathlib.Path(workdir) if dry_run and workdir else None
            result = experiment.run(settings, folder, earlier_study, device, devices, target, json)
            return sweeps.compare(settings, result) if grid and result else result
        mesh = runs.make_mesh(settings, device, chips=devices)
        work = adapters.prepare_work(settings, experiment, mesh)  # data, parameters, loss, figures; also optim.lora
        work = warm_start.add_parameters(settings, work, resumed=workdirs.has_checkpoint(folder))  # init_from
        signals.current().raise_if_requested()
        if dry_run:
            return dry_runs.dry_run(settings, work, mesh, target, json)
        return runs.run(settings, folder, work, mesh, resume=resume, is_locked=is_locked)


def describe_usage() -> str:
    """Return the text of --help."""
    groups = {
        title: [(flag.name, flag.default, flags.FLAGS[flag.name].help.partition(";\n")[0]) for flag in group]
        for title, group in GROUPS.items()
    }  # absl adds a second line to the text of a flag that may be repeated
    change = "A changed setting, such as --config.train.steps=100. All settings: python launch.py --help config"
    groups["What to train:"].insert(1, ("config.KEY", None, change))
    return f"{__doc__}\n{commands.list_groups(groups)}"


def parse(argv: list[str]) -> dict[str, str]:
    """Parse the flags. Return the settings of --config.KEY=VALUE as {key: text}.

    --help prints the usage and ends the process. Raises UserError for invalid arguments.
    """
    base = importlib.import_module("configs.base")
    if "--help" in argv:
        print("\n".join(base.list_settings()) if "config" in argv else describe_usage(), flush=True)
        sys.exit(0)
    changes, flag_arguments, arguments = {}, [], iter(argv)
    for argument in arguments:
        if argument.startswith(("--config.", "-config.")):
            key, equals, value = argument.partition("config.")[2].partition("=")
            changes[key] = value if equals else next(arguments, "")
        else:
            flag_arguments.append(argument)
    try:
        extra_arguments = flags.FLAGS(flag_arguments)[1:]
    except flags.Error as error:
        name = "".join(re.findall("Unknown command line flag '(.*?)'", str(error)))
        keys = [*by_name.find_settings(name, configs.flat(base.FIELDS)), *by_name.translate(name)]
        hints = [f". Write settings as --config.{key}=VALUE" for key in keys if "=" not in key]
        raise errors.UserError(f"{str(error).rstrip('.')}{''.join(hints[:1])}") from error
    if extra_arguments or not CONFIG.value:
        reason = f'invalid argument "{extra_arguments[0]}"' if extra_arguments else "--config is missing"
        raise errors.UserError(f"{reason}. Write python launch.py --config configs/vit.py --config.train.steps=100")
    if (TOPOLOGY.value and not DRY_RUN.value) or (JSON.value and not TOPOLOGY.value):
        raise errors.UserError("--topology needs --dry_run, and --json needs both --dry_run and --topology: add them")
    return changes


if __name__ == "__main__":
    gc.freeze()  # later collections skip these objects
    gc.enable()
    sys.exit(main(sys.argv))

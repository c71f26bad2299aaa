"""python launch.py --config configs/vit.py [--workdir DIR] [--config.train.steps=100 ...] [--dry_run]"""

import contextlib
import datetime
import os
import pathlib
import sys

from absl import flags

from configs import base
from experiments.engine import config as configs
from experiments.engine import errors

CONFIG = flags.DEFINE_string("config", None, "The config: a .py file with get_config(), or a run's config.json.")
WORKDIR = flags.DEFINE_string("workdir", None, "The run's folder; the same resumes. Default: runs/<config>/<time>.")
DRY_RUN = flags.DEFINE_boolean("dry_run", False, "Show sizes, costs and memory of the compiled step, and stop.")


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
    if CONFIG.value is None:
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
    stopped = "stopped"
    try:
        overrides = arguments(argv)
        config = configs.load(CONFIG.value, base=base.get_config(), given=[key for key, _ in overrides])
        for key, value in overrides:
            configs.override(config, key, value)
        settings = configs.Settings(config, defaults=base.get_config())
        experiment = configs.experiment(settings.experiment)
        trains = getattr(experiment, "WRITES", True)
        if trains:
            stopped += "; a run goes on from its last checkpoint with the same command and --workdir"
        elif DRY_RUN.value:
            raise errors.UserError(f"--dry_run is for training: {settings.experiment} has nothing to try dry")
        experiment.run(settings, folder_of(trains))
    except errors.UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(stopped, file=sys.stderr)
        return 130
    return 0


def folder_of(trains: bool) -> pathlib.Path | None:
    """Where to write; None: nowhere."""
    if DRY_RUN.value or not (WORKDIR.value or trains):
        return None
    when = datetime.datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    return pathlib.Path(WORKDIR.value or pathlib.Path("runs") / pathlib.Path(CONFIG.value).stem / when)


if __name__ == "__main__":
    sys.exit(main(sys.argv))

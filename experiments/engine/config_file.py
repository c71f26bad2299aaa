"""Load a config: a `.py` file with get_config(), which is executed, or a `.json` file of a run, which is only read.

Strictly: no field is missing, none is unknown, each has its type. (ml_collections.config_flags reads no JSON, and does
not name the nearest setting or another project's name of one.)
"""

import importlib
import importlib.util
import json
import os
import pathlib
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import ml_collections

from experiments.engine import by_name, config as configs, errors, optim

Base = Callable[..., ml_collections.ConfigDict]  # get_config of configs/base.py: (experiment, of) -> the defaults


def load_settings(path: str, changes: Mapping[str, Any]) -> configs.Settings:
    """Return the settings of a config file with these changes, values or texts by whole keys."""
    base = importlib.import_module("configs.base").get_config  # executed again for each run in a process
    config = load(place(path), base=base, given=changes)
    for key, value in changes.items():
        configs.assign(config, key, value)
    settings = configs.Settings(config, defaults(config, base), file=path, given=changes)
    if (warmup := optim.warmup_steps(settings)) != (usual := config.optim.warmup_steps):
        print(f"the warm-up takes {warmup} steps, a tenth of all: optim.warmup_steps = {usual} would be all of them")
    return settings


def place(path: str) -> str:
    """Return the path of a config, which may be given without .py, and a config of configs/ by its name."""
    file, ours = pathlib.Path(path), by_name.ROOT / "configs"
    folders = [file.parent] + [ours] * (str(file.parent) in (".", "configs"))
    for one in (folder / f"{file.name}{end}" for folder in folders for end in ("", ".py")):
        if os.path.isfile(one):  # also False for a name that is too long
            return str(one)
    hint = by_name.suggest(file.stem, [one.stem for one in ours.glob("[a-z]*.py")])
    raise errors.UserError(f"there is no config file {path}{hint}")


def load(path: str, *, base: Base, given: Mapping[str, Any] | None = None) -> ml_collections.ConfigDict:
    """Return the config of a `.py` file (its get_config()) or of a `.json` file (its values, put into those of `base`).

    UserError for a `.json` that names code, except in the keys `given` on the command line. The user's modules are then
    imported from the folder of a `.py` too, after all other places; never from the folder of a `.json`.
    """
    file = pathlib.Path(path)
    if file.suffix == ".json":
        return _from_json(file, base, given or {})
    if file.suffix != ".py":
        raise errors.UserError(f"a config is a .py or a .json file, and {path} is neither")
    config = _from_python(file)
    try:
        defaults(config, base)
    except errors.UserError as error:
        raise errors.UserError(f"{file}: {error}") from error
    return config


def defaults(config: ml_collections.ConfigDict, base: Base) -> ml_collections.ConfigDict:
    """Return the defaults of the config's experiment. UserError unless the config has their fields and types."""
    found = configs.flat(configs.values_of(config))
    for key in configs.NAMED:
        configs.check_type(key, found.get(key, ""), str)
    default = base(config.experiment, of=found.get("study.experiment", ""))
    right = configs.flat(configs.values_of(default))
    for key in sorted(found.keys() ^ right.keys()):  # the config was unlocked, or begins with another experiment's
        of = ', of="language"' if "study.arms" in right else ""
        raise errors.UserError(
            f'the config {"has" if key in found else "lacks"} the key "{key}": a config of the experiment'
            f' {config.experiment} begins with base.get_config("{config.experiment}"{of})'
        )
    for key, value in found.items():  # a ConfigDict takes None for anything, and True for 1
        configs.check_type(key, value, type(right[key]))
    return default


def _from_json(file: pathlib.Path, base: Base, given: Mapping[str, Any]) -> ml_collections.ConfigDict:
    try:
        saved = json.loads(file.read_text(encoding="utf-8"))
        values = dict(saved.get("config", saved))
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise errors.UserError(f"{file} is not a config in JSON, an object of settings: {error}") from error
    config = base(*_experiments(file, values, given))
    right = configs.flat(configs.values_of(config))
    found = {configs.known(key, right): value for key, value in configs.leaves(values)}
    for key, value in sorted(found.items()):  # in this order, D and H come before F and K, derived from them
        if key in configs.NAMED:
            continue
        if (code := next(configs.codes(key, value), None)) is not None:
            if key not in given:
                raise distrust(file, *code, inside=key)
        elif value != configs.flat(configs.values_of(config)).get(key):  # a derived value stays derived
            configs.assign(config, key, value)
    return config


def _experiments(file: pathlib.Path, values: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    """Return the experiment, and that of a study's runs. UserError for a module that the user has not confirmed."""
    study = values.get("study")
    of = study.get("experiment", "") if isinstance(study, dict) else values.get("study.experiment", "")
    found = {"experiment": values.get("experiment", ""), "study.experiment": of}
    for key, name in (found | {key: given[key] for key in configs.NAMED if key in given}).items():
        configs.check_type(key, name, str)
        if key not in given and by_name.is_user_experiment(name):
            raise distrust(file, key, name, inside=key)
        found[key] = name
    return list(found.values())


def distrust(file: pathlib.Path, key: str, value: str, *, inside: str) -> errors.UserError:
    """Return the error for code that a file names. inside: the setting that contains this one, as study.arms."""
    where, how = ("", value) if inside == key else (f" in {inside}", "...")
    return errors.UserError(
        f'{file} has {key} = "{value}"{where}, a program that would be run: give it on the command line, '
        f"--config.{inside}={how}, if you trust it; if your files are gone, a run goes on with the ones that it keeps:"
        " --config WORKDIR/source/NAME.py"
    )


def _from_python(file: pathlib.Path) -> ml_collections.ConfigDict:
    spec = importlib.util.spec_from_file_location(f"config_file_{file.stem}", file)
    module = importlib.util.module_from_spec(spec)
    if (folder := str(file.parent.absolute())) not in sys.path:
        sys.path.append(folder)  # after all others: it hides nothing that is installed
    try:
        spec.loader.exec_module(module)
        config = module.get_config()
    except (errors.UserError, KeyboardInterrupt):
        raise
    except BaseException as error:  # the user's code may raise anything, also SystemExit
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
        where = f"{file}, line {frames[-1].lineno}" if frames else str(file)
        raise errors.UserError(f"{where}: {_sentence(error)}") from error
    if not isinstance(config, ml_collections.ConfigDict):
        raise errors.UserError(f'{file}: get_config() must return the ConfigDict of base.get_config("...")')
    return config


def _sentence(error: BaseException) -> str:
    """Return ml_collections' message without its print-out of the whole config."""
    if section := re.fullmatch(r"\W*(\w+)\W*", str(error)) if isinstance(error, AttributeError) else None:
        return f'the config of this experiment has no "{section.group(1)}"'
    if unknown := re.search(r'Key "(.*?)" does not exist', str(error)):
        name, meant = unknown.group(1), re.search(r'Did you mean "(.*?)"', str(error))
        found = by_name.translate_foreign(name)[:1] or ([meant.group(1)] if meant else [])
        return f'unknown config key "{name}"' + (f' (did you mean "{found[0]}"?)' if found else "")
    return by_name.describe_error(error)


def forget_own_modules(folder: pathlib.Path) -> None:
    """Forget the modules that were imported from the working directory, the project's folder or this one (of a config),
    so that a second run in the same process, as in a notebook, imports them as they are now."""
    importlib.invalidate_caches()
    folders = (os.getcwd(), str(folder.absolute()), str(by_name.ROOT))
    for name, module in [*sys.modules.items()]:
        file, path = str(getattr(module, "__file__", None)), name.replace(".", os.sep)
        own = {os.path.join(one, f"{path}{end}") for one in folders for end in (".py", f"{os.sep}__init__.py")}
        if file in own and by_name.is_user_code(file):
            del sys.modules[name]

"""Load a config: a `.py` file with get_config(), which is executed, or a `.json` file of a run, which is only read.

A config must have exactly the fields of its experiment, with their types. ml_collections.config_flags is not used: it
reads no JSON, and for an unknown name it does not suggest a similar setting, or our setting for another project's name.
"""

import importlib
import importlib.util
import json
import os
import pathlib
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

import ml_collections

from experiments.config import by_name, disk, errors, settings as configs

Base = Callable[..., ml_collections.ConfigDict]  # get_config of configs/base.py: (experiment, of) -> config of defaults


def load_settings(path: str, changes: Mapping[str, Any], wrap: Callable | None = None) -> configs.Settings:
    """Return the settings of a config file with changes: key -> a value, or its text from the command line.

    wrap: (config, base) -> the config to use in place of the file's, before the changes.
    """
    # Imported here, because `forget_user_modules` removes configs.base between two runs of a process.
    base = importlib.import_module("configs.base").get_config
    config = load(find_config(path), base=base, explicit=changes)
    config = wrap(config, base) if wrap else config
    for key, value in changes.items():
        configs.assign(config, key, value)
    settings = configs.Settings(config, defaults(config, base), file=path, explicit=changes)
    if (warmup := configs.warmup_steps(settings)) != (default := config.optim.warmup_steps):
        print(f"optim.warmup_steps = {warmup}, a tenth of train.steps, because the default {default} is not below it")
    return settings


def find_config(path: str) -> str:
    """Return the path of a config file. `path` may lack .py, and may be the name of a config in configs/.

    Raises UserError if there is no such file.
    """
    file, built_in = pathlib.Path(path), by_name.ROOT / "configs"
    folders = [file.parent] + [built_in] * (str(file.parent) in (".", "configs"))
    for candidate in (folder / f"{file.name}{end}" for folder in folders for end in ("", ".py")):
        if os.path.isfile(candidate):  # also False for a name that is too long
            return str(candidate)
    hint = by_name.suggest(file.stem, [config.stem for config in built_in.glob("[a-z]*.py")])
    raise errors.UserError(f"there is no config file {path}{hint}")


def load(path: str, *, base: Base, explicit: Mapping[str, Any] | None = None) -> ml_collections.ConfigDict:
    """Return the config of a `.py` file (its get_config()) or of a `.json` file (its values, in the fields of `base`).

    The folder of a `.py` is the last place from which the user's modules are imported; the folder of a `.json` is not
    searched. Raises UserError if a `.json` names code, except in `explicit`, the keys that the command line sets.
    """
    file = pathlib.Path(path)
    if file.suffix == ".json":
        return _from_json(file, base, explicit or {})
    if file.suffix != ".py":
        raise errors.UserError(f"{path} must be a .py or a .json file")
    config = _from_python(file)
    try:
        defaults(config, base)
    except errors.UserError as error:
        raise errors.UserError(f"{file}: {error}") from error
    return config


def defaults(config: ml_collections.ConfigDict, base: Base) -> ml_collections.ConfigDict:
    """Return the defaults of the config's experiment. Raises UserError if the config has other keys or types."""
    values = configs.flat(configs.values_of(config))
    for key in configs.EXPERIMENT_KEYS:
        configs.check_type(key, values.get(key, ""), str)
    default = base(config.experiment, of=values.get("study.experiment", ""))
    expected = configs.flat(configs.values_of(default))
    for key in sorted(values.keys() ^ expected.keys()):  # the file unlocked the config, or used another experiment's
        argument = ', of="language"' if "study.arms" in expected else ""
        raise errors.UserError(
            f'the config {"has the unknown" if key in values else "lacks the"} key "{key}". A config of the experiment'
            f' {config.experiment} must begin with base.get_config("{config.experiment}"{argument})'
        )
    for key, value in values.items():  # a ConfigDict accepts None for any type, and True for an int
        configs.check_type(key, value, type(expected[key]))
    return default


def _from_json(file: pathlib.Path, base: Base, explicit: Mapping[str, Any]) -> ml_collections.ConfigDict:
    """Return the config in a JSON file: {key: value}, or config.json of a run. Raises UserError if it is invalid."""
    try:
        saved = json.loads(disk.read_bytes(file))
        values = dict(saved.get("config", saved))
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise errors.UserError(f"{file} cannot be read as a config in JSON, an object of settings: {error}") from error
    config = base(*_experiments(file, values, explicit))
    settings = configs.flat(configs.values_of(config))
    saved_values = {configs.check_known(key, settings): value for key, value in configs.leaves(values)}
    for key, value in sorted(saved_values.items()):  # D and H come before F and K, which derive from them
        if key in configs.EXPERIMENT_KEYS:
            continue
        if (code := next(configs.find_code(key, value), None)) is not None:
            if key not in explicit:
                raise distrust(file, *code, inside=key, whole=value)
        elif value != configs.flat(configs.values_of(config)).get(key):  # a derived value stays derived
            configs.assign(config, key, value)
    return config


def _experiments(file: pathlib.Path, values: Mapping[str, Any], explicit: Mapping[str, Any]) -> list[str]:
    """Return the names of the experiment, and of the experiment of a study's runs ("" if there is none).

    Raises UserError if a name is that of a user's module and its key is not in `explicit`.
    """
    study = values.get("study")
    of_runs = study.get("experiment", "") if isinstance(study, dict) else values.get("study.experiment", "")
    names = {"experiment": values.get("experiment", ""), "study.experiment": of_runs}
    for key, name in (names | {key: explicit[key] for key in configs.EXPERIMENT_KEYS if key in explicit}).items():
        configs.check_type(key, name, str)
        if key not in explicit and by_name.is_user_experiment(name):
            raise distrust(file, key, name, inside=key, whole=name)
        names[key] = name
    return list(names.values())


def distrust(file: pathlib.Path, key: str, value: str, *, inside: str, whole: Any) -> errors.UserError:
    """Return the error for a JSON file that names code.

    inside: the setting that contains `key`, such as study.arms. whole: the value of this setting.
    """
    container, argument = "" if inside == key else f" in {inside}", whole if isinstance(whole, str) else "..."
    return errors.UserError(
        f'{file} has {key} = "{value}"{container}, which would execute code. If you trust it, repeat the setting on the'
        f" command line: --config.{inside}={argument}. Or use the run's copy of your config: --config"
        " WORKDIR/source/NAME.py"
    )


def _from_python(file: pathlib.Path) -> ml_collections.ConfigDict:
    """Execute a Python file and return the result of its get_config()."""
    spec = importlib.util.spec_from_file_location(f"config_file_{file.stem}", file)
    module = importlib.util.module_from_spec(spec)
    if (folder := str(file.parent.absolute())) not in sys.path:
        sys.path.append(folder)  # last, so that it hides no installed module
    with by_name.user_errors(str(file), explain=_explain):
        spec.loader.exec_module(module)
        config = module.get_config()
    if not isinstance(config, ml_collections.ConfigDict):
        raise errors.UserError(f'{file}: get_config() must return the ConfigDict of base.get_config("...")')
    return config


def _explain(error: BaseException) -> str:
    """Return one sentence for an exception of a config file, without the whole config, which ml_collections adds."""
    if section := re.fullmatch(r"\W*(\w+)\W*", str(error)) if isinstance(error, AttributeError) else None:
        return f'the config of this experiment has no "{section.group(1)}"'
    if unknown := re.search(r'Key "(.*?)" does not exist', str(error)):
        name, suggestion = unknown.group(1), re.search(r'Did you mean "(.*?)"', str(error))
        values = [entry for entry in by_name.translate_value(name) if entry[0] != "="]  # such as qk_norm
        similar = [*by_name.translate_foreign(name), *values, *(suggestion.groups() if suggestion else ())]
        return f'unknown config key "{name}"' + (f' (did you mean "{similar[0]}"?)' if similar else "")
    return by_name.describe_error(error)


def forget_user_modules(config_folder: pathlib.Path) -> None:
    """Remove the user's modules from sys.modules, so that the next run in this process (a notebook) imports them again.

    These are modules from the working directory, the project's folder, and the folder of a config.
    """
    importlib.invalidate_caches()
    folders = (os.getcwd(), str(config_folder.absolute()), str(by_name.ROOT))
    for name, module in [*sys.modules.items()]:
        file, path = str(getattr(module, "__file__", None)), name.replace(".", os.sep)
        files = {os.path.join(folder, f"{path}{end}") for folder in folders for end in (".py", f"{os.sep}__init__.py")}
        if file in files and by_name.is_user_code(file):
            del sys.modules[name]

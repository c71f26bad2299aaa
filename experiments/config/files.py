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
import types
from collections.abc import Callable, Mapping
from typing import Any

import ml_collections

from experiments.config import by_name, disk, errors, settings as configs


def load_settings(path: str, changes: Mapping[str, Any], wrap: Callable | None = None) -> configs.Settings:
    """Return the settings of a config file with changes: key -> a value, or its text from the command line.

    wrap: config -> the config to use in place of the file's, before the changes.
    """
    config = load(find_config(path), explicit=changes)
    config = wrap(config) if wrap else config
    for key, value in changes.items():
        configs.assign(config, key, value)
    settings = configs.Settings(config, file=path, explicit=changes)
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


def load(path: str, *, explicit: Mapping[str, Any] = types.MappingProxyType({})) -> ml_collections.ConfigDict:
    """Return the config of a `.py` file (its get_config()) or of a `.json` file (its values, and defaults).

    The folder of a `.py` is the last place from which the user's modules are imported; the folder of a `.json` is not
    searched. Raises UserError if a `.json` names code, except in `explicit`, the keys that the command line sets.
    """
    file = pathlib.Path(path)
    if file.suffix == ".json":
        return _from_json(file, explicit)
    if file.suffix != ".py":
        raise errors.UserError(f"{path} must be a .py or a .json file")
    config = _from_python(file)
    try:
        configs.load_defaults(config)
    except errors.UserError as error:
        raise errors.UserError(f"{file}: {error}") from error
    return config


def _from_json(file: pathlib.Path, explicit: Mapping[str, Any]) -> ml_collections.ConfigDict:
    """Return the config in a JSON file: {key: value}, or config.json of a run. Raises UserError if it is invalid.

    This includes code that the file names, except the values of the keys in `explicit`.
    """
    try:
        saved = json.loads(disk.read_bytes(file))
        values = configs.flat(dict(saved.get("config", saved)))
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise errors.UserError(f"{file} cannot be read as a config in JSON, an object of settings: {error}") from error
    code = {key: names for key, value in values.items() if (names := [*configs.find_code(key, value)])}
    for key in code:
        if key not in explicit:
            raise distrust(file, *code[key][0], inside=key)
    experiments = {key: {**values, **explicit}.get(key, "") for key in configs.EXPERIMENT_KEYS}
    for key, name in experiments.items():
        configs.check_type(key, name, str)
    config = configs.get_base(*experiments.values())
    settings = configs.flat(config)
    for key, value in sorted(values.items()):  # D and H come before F and K, which derive from them
        is_derived = configs.check_known(key, settings) and value == configs.flat(config)[key]
        if not (is_derived or key in code or key in experiments):
            configs.assign(config, key, value)
    return config


def distrust(file: pathlib.Path, key: str, value: str, *, inside: str) -> errors.UserError:
    """Return the error for a JSON file that names code. inside: the setting that contains `key`, such as study.arms."""
    container, argument = ("", value) if inside == key else (f" in {inside}", "...")
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
        return f'the config of this experiment has no "{section[1]}"'
    if unknown := re.search(r'Key "(.*?)" does not exist', str(error)):
        name, close = unknown[1], re.findall(r'Did you mean "(.*?)"', str(error))
        return f'unknown config key "{name}"{by_name.suggest(name, [*by_name.FOREIGN_NAMES, *close])}'
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

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

    wrap: config -> the config to use in place of the file's, before the changes. Raises UserError for a missing or
    invalid file, and for invalid changes.
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
    candidates = [str(folder / f"{file.name}{end}") for folder in folders for end in ("", ".py")]
    found = next(filter(os.path.isfile, candidates), "")  # isfile is also False for a name that is too long
    hint = by_name.suggest(file.stem, [config.stem for config in built_in.glob("[a-z]*.py")])
    errors.refuse((not found, f"there is no config file {path}{hint}"))
    return found


def load(path: str, *, explicit: Mapping[str, Any] = types.MappingProxyType({})) -> ml_collections.ConfigDict:
    """Return the config of a `.py` file (its get_config()) or of a `.json` file.

    A `.json` file has {key: value}, or is a run's config.json. The folder of a `.py` becomes the last place from which
    the user's modules are imported; the folder of a `.json` does not. explicit: the settings of the command line, {key:
    value}. Raises UserError for an invalid file, or if another setting of a `.json` names code.
    """
    file = pathlib.Path(path)
    errors.refuse((file.suffix not in (".py", ".json"), f"{path} must be a .py or a .json file"))
    config = _from_python(file) if file.suffix == ".py" else None
    try:
        if file.suffix == ".json":
            return _from_json(file, explicit)
        configs.load_defaults(config)
        return config
    except errors.UserError as error:
        raise errors.UserError(f"{file}: {error}") from error


def _from_json(file: pathlib.Path, explicit: Mapping[str, Any]) -> ml_collections.ConfigDict:
    """Return the config in a JSON file. Raises UserError if a key that is not in `explicit` names code."""
    try:
        saved = json.loads(disk.read_bytes(file))
        values = dict(saved.get("config", saved))
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise errors.UserError(f"it cannot be read as a config in JSON, an object of settings: {error}") from error
    values = configs.flat(values)
    code = {key: texts for key, value in values.items() if (texts := [*configs.find_code(key, value)])}
    for inside, [(key, value), *_] in code.items():
        if inside not in explicit:
            container, argument = "" if inside == key else f" in {inside}", values[inside]
            argument = argument if isinstance(argument, str) else "..."
            raise errors.UserError(
                f'the file has {key} = "{value}"{container}, which would execute code. If you trust it, repeat the '
                f"setting on the command line: --config.{inside}={argument}. Or use the run's copy of your config: "
                "--config WORKDIR/source/NAME.py"
            )
    values |= {key: explicit[key] for key in configs.EXPERIMENT_KEYS if key in explicit}
    config = configs.get_base(*(values.get(key, "") for key in configs.EXPERIMENT_KEYS))
    configs.update(config, {key: value for key, value in values.items() if key not in code})
    return config


def _from_python(file: pathlib.Path) -> ml_collections.ConfigDict:
    """Execute a Python file and return the result of its get_config()."""
    spec = importlib.util.spec_from_file_location(f"config_file_{file.stem}", file)
    module = importlib.util.module_from_spec(spec)
    if (folder := str(file.parent.absolute())) not in sys.path:
        sys.path.append(folder)  # last, so that it hides no installed module
    with by_name.user_errors(str(file), explain=_explain):
        spec.loader.exec_module(module)
        config = module.get_config()
    mistake = f'{file}: get_config() must return the ConfigDict of base.get_config("...")'
    errors.refuse((not isinstance(config, ml_collections.ConfigDict), mistake))
    return config


def _explain(error: BaseException) -> str:
    """Return one sentence for an exception of a config file, without the whole config, which ml_collections adds."""
    if section := re.fullmatch(r"\W*(\w+)\W*", str(error)) if isinstance(error, AttributeError) else None:
        return f'the config of this experiment has no "{section[1]}"'
    if unknown := re.search(r'Key "(.*?)" does not exist', str(error)):
        name, close = unknown[1], re.findall(r'Did you mean "(.*?)"', str(error))
        return f'unknown config key "{name}"{by_name.suggest(name, [*by_name.translate(name), *close])}'
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

"""Load a config: a `.py` file with get_config(), which is executed, or a `.json` file of a run, which is only read.

Every field must be known, present and of its type. (ml_collections.config_flags reads no JSON, and does not suggest the
nearest setting or our name of another project's setting.)
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

from experiments.engine import by_name, config as configs, errors, optim

Base = Callable[..., ml_collections.ConfigDict]  # get_config of configs/base.py: (experiment, of) -> the defaults


def load_settings(path: str, changes: Mapping[str, Any]) -> configs.Settings:
    """Return the settings of a config file with these changes, values or texts by key."""
    base = importlib.import_module("configs.base").get_config  # forgotten and executed again by each run of a process
    config = load(place(path), base=base, explicit=changes)
    for key, value in changes.items():
        configs.assign(config, key, value)
    settings = configs.Settings(config, defaults(config, base), file=path, explicit=changes)
    if (warmup := optim.warmup_steps(settings)) != (default := config.optim.warmup_steps):
        print(f"optim.warmup_steps = {warmup}, a tenth of train.steps, because the default {default} is not smaller")
    return settings


def place(path: str) -> str:
    """Return the path of a config, which may be given without .py; a config of configs/ may be given by its name."""
    file, ours = pathlib.Path(path), by_name.ROOT / "configs"
    folders = [file.parent] + [ours] * (str(file.parent) in (".", "configs"))
    for candidate in (folder / f"{file.name}{end}" for folder in folders for end in ("", ".py")):
        if os.path.isfile(candidate):  # also False for a name that is too long
            return str(candidate)
    hint = by_name.suggest(file.stem, [config.stem for config in ours.glob("[a-z]*.py")])
    raise errors.UserError(f"there is no config file {path}{hint}")


def load(path: str, *, base: Base, explicit: Mapping[str, Any] | None = None) -> ml_collections.ConfigDict:
    """Return the config of a `.py` file (its get_config()) or of a `.json` file (its values, in the fields of `base`).

    Raises UserError for a `.json` that names code, except in `explicit` keys, which the command line sets. The
    user's modules are
    imported from the folder of a `.py` after all other places, and never from the folder of a `.json`.
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
    """Return the defaults of the config's experiment. Raises UserError if fields or types differ."""
    values = configs.flat(configs.values_of(config))
    for key in configs.NAMED:
        configs.check_type(key, values.get(key, ""), str)
    default = base(config.experiment, of=values.get("study.experiment", ""))
    expected = configs.flat(configs.values_of(default))
    for key in sorted(values.keys() ^ expected.keys()):  # unlocked, or begun with another experiment's config
        of = ', of="language"' if "study.arms" in expected else ""
        raise errors.UserError(
            f'the config {"has" if key in values else "lacks"} the key "{key}": a config of the experiment'
            f' {config.experiment} begins with base.get_config("{config.experiment}"{of})'
        )
    for key, value in values.items():  # a ConfigDict accepts None for anything, and True for 1
        configs.check_type(key, value, type(expected[key]))
    return default


def _from_json(file: pathlib.Path, base: Base, explicit: Mapping[str, Any]) -> ml_collections.ConfigDict:
    """Return the config of a JSON file of a run."""
    try:
        saved = json.loads(file.read_text(encoding="utf-8"))
        values = dict(saved.get("config", saved))
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise errors.UserError(f"{file} is not a config in JSON, an object of settings: {error}") from error
    config = base(*_experiments(file, values, explicit))
    settings = configs.flat(configs.values_of(config))
    saved_values = {configs.check_known(key, settings): value for key, value in configs.leaves(values)}
    for key, value in sorted(saved_values.items()):  # D and H come before F and K, which are derived from them
        if key in configs.NAMED:
            continue
        if (code := next(configs.find_code(key, value), None)) is not None:
            if key not in explicit:
                raise distrust(file, *code, inside=key)
        elif value != configs.flat(configs.values_of(config)).get(key):  # a derived value stays derived
            configs.assign(config, key, value)
    return config


def _experiments(file: pathlib.Path, values: Mapping[str, Any], explicit: Mapping[str, Any]) -> list[str]:
    """Return the experiment, and that of a study's runs. Raises UserError for a user's module that was not
    confirmed.
    """
    study = values.get("study")
    of = study.get("experiment", "") if isinstance(study, dict) else values.get("study.experiment", "")
    names = {"experiment": values.get("experiment", ""), "study.experiment": of}
    for key, name in (names | {key: explicit[key] for key in configs.NAMED if key in explicit}).items():
        configs.check_type(key, name, str)
        if key not in explicit and by_name.is_user_experiment(name):
            raise distrust(file, key, name, inside=key)
        names[key] = name
    return list(names.values())


def distrust(file: pathlib.Path, key: str, value: str, *, inside: str) -> errors.UserError:
    """Return the error for code that a file names. inside: the setting that contains this one, such as study.arms."""
    place, argument = ("", value) if inside == key else (f" in {inside}", "...")
    return errors.UserError(
        f'{file} has {key} = "{value}"{place}, which would execute a program. If you trust it, repeat it on the command'
        f" line: --config.{inside}={argument}. The run has a copy of your files: --config WORKDIR/source/NAME.py"
    )


def _from_python(file: pathlib.Path) -> ml_collections.ConfigDict:
    """Execute a Python file and return its get_config()."""
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
    """Return an exception of the file as one sentence, without ml_collections' print-out of the whole config."""
    if section := re.fullmatch(r"\W*(\w+)\W*", str(error)) if isinstance(error, AttributeError) else None:
        return f'the config of this experiment has no "{section.group(1)}"'
    if unknown := re.search(r'Key "(.*?)" does not exist', str(error)):
        name, suggestion = unknown.group(1), re.search(r'Did you mean "(.*?)"', str(error))
        similar = by_name.translate_foreign(name)[:1] or ([suggestion.group(1)] if suggestion else [])
        return f'unknown config key "{name}"' + (f' (did you mean "{similar[0]}"?)' if similar else "")
    return by_name.describe_error(error)


def forget_user_modules(config_folder: pathlib.Path) -> None:
    """Forget the user's modules, so that a second run in the same process (a notebook) imports them again.

    These are modules from the working directory, the project's folder, and the folder of a config.
    """
    importlib.invalidate_caches()
    folders = (os.getcwd(), str(config_folder.absolute()), str(by_name.ROOT))
    for name, module in [*sys.modules.items()]:
        file, path = str(getattr(module, "__file__", None)), name.replace(".", os.sep)
        files = {os.path.join(folder, f"{path}{end}") for folder in folders for end in (".py", f"{os.sep}__init__.py")}
        if file in files and by_name.is_user_code(file):
            del sys.modules[name]

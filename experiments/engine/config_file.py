"""The config of a file: a `.py` with get_config(), which is executed, or a `.json` of a run, which is only read.

Strictly: no field is missing, none is unknown, each has its type.
"""

import contextlib
import importlib.util
import os
import pathlib
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import ml_collections
from jax.experimental.compilation_cache import compilation_cache

from experiments.engine import by_name, config as configs, disk, errors

Base = Callable[..., ml_collections.ConfigDict]  # get_config of configs/base.py: (experiment, of) -> the defaults
LONGEST = 2**20  # characters of one: a study of a thousand arms has fewer


def place(path: str) -> str:
    """The path of a config, which may be named without .py, and those of configs/ as vit. UserError: there is none."""
    file, ours = pathlib.Path(path), by_name.ROOT / "configs"
    folders = [file.parent] + [ours] * (str(file.parent) in (".", "configs"))
    for one in (folder / f"{file.name}{end}" for folder in folders for end in ("", ".py")):
        if one.is_file():
            return str(one)
    hint = by_name.nearest(file.stem, [one.stem for one in ours.glob("[a-z]*.py")])
    raise errors.UserError(f"there is no config file {path}{hint}")


def load(path: str, *, base: Base, given: Mapping[str, Any] | None = None) -> ml_collections.ConfigDict:
    """The config of a `.py` file (its get_config()) or of a `.json` file (its values laid over those of `base`).

    UserError for a `.json` that names code, except for the keys `given` on the command line, which has the last word.
    The user's own modules are then looked for beside a `.py` too, behind all other places; never beside a `.json`.
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
    """Those of the config's experiment. UserError where the config has not just their fields, each of its type."""
    found = configs.flat(configs.values_of(config))
    for key in configs.NAMED:
        configs.check_type(key, found.get(key, ""), str)
    default = base(config.experiment, of=found.get("study.experiment", ""))
    right = configs.flat(configs.values_of(default))
    for key in sorted(found.keys() ^ right.keys()):  # of a config that was unlocked, or is that of another experiment
        of = ', of="language"' if "study.arms" in right else ""
        raise errors.UserError(
            f'the config {"has" if key in found else "lacks"} the key "{key}": one of the experiment'
            f' {config.experiment} begins with base.get_config("{config.experiment}"{of})'
        )
    for key, value in found.items():  # a ConfigDict takes None for anything, and True for 1
        configs.check_type(key, value, type(right[key]))
    return default


def _from_json(file: pathlib.Path, base: Base, given: Mapping[str, Any]) -> ml_collections.ConfigDict:
    try:
        content = file.read_text(encoding="utf-8")
        if len(content) > LONGEST:
            raise ValueError(f"it has {len(content):,} characters, and {LONGEST:,} are allowed")
        saved = configs.shallow(content)
    except (OSError, ValueError) as error:
        raise errors.UserError(f"{file} is not a config in JSON: {error}") from error
    values = saved.get("config", saved) if isinstance(saved, dict) else None
    if not isinstance(values, dict):
        raise errors.UserError(f"{file} is not a config in JSON: it must hold an object of settings")
    config = base(*_experiments(file, values, given))
    right, found = configs.flat(configs.values_of(config)), {}
    for key, value in configs.leaves(values):
        found[configs.known(key, right)] = value
    for key, value in sorted(found.items()):  # in this order, D and H come before F and K, derived from them
        if key in configs.NAMED:
            continue
        if (code := next(configs.codes(key, value), None)) is not None:
            if key not in given:
                raise distrust(file, *code, inside=key)
        elif value != configs.flat(configs.values_of(config)).get(key):  # what is derived stays derived
            configs.assign(config, key, value)
    return config


def _experiments(file: pathlib.Path, values: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    """The experiment, and that of the runs of a study. UserError where one is a module that nobody has trusted."""
    study = values.get("study")
    of = study.get("experiment", "") if isinstance(study, dict) else values.get("study.experiment", "")
    found = {"experiment": values.get("experiment", ""), "study.experiment": of}
    for key, name in (found | {key: given[key] for key in configs.NAMED if key in given}).items():
        configs.check_type(key, name, str)
        if key not in given and by_name.own_experiment(name):
            raise distrust(file, key, name, inside=key)
        found[key] = name
    return list(found.values())


def distrust(file: pathlib.Path, key: str, value: str, *, inside: str) -> errors.UserError:
    """inside: the setting of the config that holds this one, study.arms for what an arm changes; or the same."""
    where, how = ("", value) if inside == key else (f" in {inside}", "...")
    return errors.UserError(
        f'{file} has {key} = "{value}"{where}, a program that would be run: give it on the command line, '
        f"--config.{inside}={how}, if you trust it; where your files are gone, a run goes on with those that it keeps:"
        " --config WORKDIR/source/NAME.py"
    )


def _from_python(file: pathlib.Path) -> ml_collections.ConfigDict:
    spec = importlib.util.spec_from_file_location(f"config_file_{file.stem}", file)
    module = importlib.util.module_from_spec(spec)
    if (folder := str(file.parent.absolute())) not in sys.path:
        sys.path.append(folder)  # behind all others: nothing that is installed is hidden by it
    try:
        spec.loader.exec_module(module)
        config = module.get_config()
    except (errors.UserError, KeyboardInterrupt):
        raise
    except BaseException as error:  # somebody's own code may raise anything, also SystemExit
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
        found = by_name.elsewhere(name)[:1] or ([meant.group(1)] if meant else [])
        return f'unknown config key "{name}"' + (f' (did you mean "{found[0]}"?)' if found else "")
    return by_name.sentence(error)


@contextlib.contextmanager
def unchanged(folder: pathlib.Path) -> Iterator[None]:
    """Within this, the user's own modules are imported anew: those of the working directory, of the project's folder
    and of that of the config. Behind it, all is as it was before; but what JAX has started and compiled stays.
    UserError where there is no working directory any more.
    """
    try:
        place = os.getcwd()
    except OSError as error:
        reason = disk.reason(error)
        raise errors.UserError(f"the working directory is gone ({reason}): os.chdir to one that is there") from error
    path, bytecode, flags = list(sys.path), sys.dont_write_bytecode, dict(jax.config.values)
    folders = (place, str(folder.absolute()), str(by_name.ROOT))
    before = {name: sys.modules.pop(name) for name in _edited(folders)}
    importlib.invalidate_caches()  # a file may have been written since the folder was last looked at
    unraisable = sys.unraisablehook
    sys.dont_write_bytecode = True  # it is told from a newer file by its seconds only
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stdout):
            yield
    finally:
        for name in _edited(folders):
            del sys.modules[name]
        sys.modules.update(before)
        sys.path[:], sys.dont_write_bytecode, sys.unraisablehook = path, bytecode, unraisable
        os.chdir(place)
        changed = {name: value for name, value in flags.items() if jax.config.values[name] != value}
        for name, value in changed.items():
            with contextlib.suppress(RuntimeError):  # of a flag that counts only before JAX has started
                jax.config.update(name, value)
        if changed:
            compilation_cache.reset_cache()  # whether, and where, compiled programs are kept is looked at anew


def _edited(folders: Iterable[str]) -> list[str]:
    """The modules that are imported from one of these folders, and that the user may edit."""
    found = []
    for name, module in sys.modules.items():
        paths = [os.path.join(folder, *name.split(".")) for folder in folders]
        file = str(getattr(module, "__file__", None))
        if by_name.own(file) and file in [path + end for path in paths for end in (".py", f"{os.sep}__init__.py")]:
            found.append(name)
    return found

"""Configs: load strictly, override from the command line, save as JSON, choose variants by name, notice what is unused.

A config is an `ml_collections.ConfigDict` made by a file's `get_config()`; a config file is code and is executed, a
`.json` one (what a run has saved) is data and is only read.
"""

import copy
import difflib
import importlib
import importlib.util
import json
import math
import os
import pathlib
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

import ml_collections
import numpy as np

from experiments.engine import disk, errors

# What the code of a config file raises where it is wrong; it is told in a sentence, not traced.
_FAULTS = (
    ArithmeticError,
    AttributeError,
    ImportError,
    LookupError,
    NameError,
    OSError,
    SyntaxError,
    TypeError,
    ValueError,
)
LARGEST, LARGEST_SEED, LARGEST_FLOAT = 2**31 - 1, 2**32 - 1, 3.4e38  # int32, uint32, float32
ROOT = pathlib.Path(__file__).parents[2]
SEEDS = ("seed", "study.seeds")
DEEPEST = 30  # levels of a config in JSON
LONGEST = 2**20  # characters of one: a study of a thousand arms has fewer
VARIED = ("study.arms", "study.conditions")  # pairs of a name and the settings that it changes
CACHE = "compilation_cache"  # a folder of compiled programs, which JAX loads and executes
CHOSEN = ("text.objective", "image.head", "optim.schedule", "family")  # what is chosen by name outside of `model`


def nearest(name: str, right: Iterable[str]) -> str:
    """' (did you mean "steps"?)' where a right name is near, else ''."""
    right = list(right)
    same = [other for other in right if other.lower() == name.lower()]  # d and D are as far apart as d and M
    found = same or difflib.get_close_matches(name, right, n=1, cutoff=0.5)
    return f' (did you mean "{found[0]}"?)' if found else ""


def load(path: str, *, base: ml_collections.ConfigDict, given: Iterable[str] = ()) -> ml_collections.ConfigDict:
    """The config of a `.py` file (its get_config()) or of a `.json` file (its values laid over `base`).

    UserError for a `.json` that names code, except for the keys `given` on the command line, which has the last word.
    The user's own modules are then looked for beside a `.py` too, behind all other places; never beside a `.json`.
    """
    file = pathlib.Path(path)
    if not file.is_file():
        raise errors.UserError(f"there is no config file {path}")
    if file.suffix == ".json":
        return _from_json(file, base, set(given))
    if file.suffix != ".py":
        raise errors.UserError(f"a config is a .py or a .json file, and {path} is neither")
    return _from_python(file, base)


def _from_json(file: pathlib.Path, base: ml_collections.ConfigDict, given: set[str]) -> ml_collections.ConfigDict:
    try:
        content = disk.read_text(file)
        if len(content) > LONGEST:
            raise ValueError(f"it has {len(content):,} characters, and {LONGEST:,} are allowed")
        saved = _shallow(content)
    except (OSError, ValueError) as error:
        raise errors.UserError(f"{file} is not a config in JSON: {error}") from error
    values = saved.get("config", saved) if isinstance(saved, dict) else None
    if not isinstance(values, dict):
        raise errors.UserError(f"{file} is not a config in JSON: it must hold an object of settings")
    config, right, found = copy.deepcopy(base), flat(values_of(base)), {}
    for key, value in _leaves(values):
        found[_known(key, right)] = value
    for key, value in sorted(found.items()):  # in this order, D and H come before F and K, derived from them
        if (code := next(_codes(key, value), None)) is not None:
            if key not in given:
                raise _distrust(file, *code, inside=key)
        elif key == CACHE and isinstance(value, str) and value not in ("", "user"):
            if key not in given:
                reason = f"what lies there would be run; a folder that you trust is given as --config.{CACHE}=..."
                print(f"{file}: {CACHE} = {shown(value)} does not count: {reason}", flush=True)
        elif value != flat(values_of(config)).get(key):  # what is derived stays derived
            assign(config, key, value)
    return config


def _shallow(text: str) -> Any:
    """What the JSON says. ValueError where it is none, or is nested more deeply than any setting is."""
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError(f"it is nested more than {DEEPEST} levels deep") from error
    inside = [value]
    for _ in range(DEEPEST):
        parts = [one.values() if isinstance(one, dict) else one for one in inside if isinstance(one, dict | list)]
        inside = [one for part in parts for one in part]
    if inside:
        raise ValueError(f"it is nested more than {DEEPEST} levels deep")
    return value


def _is_code(key: str, value: Any) -> bool:
    """Whether the setting would have a module imported (`choose`), and so executed."""
    return (key.startswith("model.") or key in CHOSEN) and isinstance(value, str) and ":" in value


def _codes(key: str, value: Any) -> Iterator[tuple[str, str]]:
    """The settings, and their values, that name code: this one, or those that an arm or a condition changes."""
    pairs = [(key, value)]
    if key in VARIED and isinstance(value, list):
        parts = [part for one in value if isinstance(one, list) for part in one]
        pairs = [pair for part in parts if isinstance(part, Mapping) for pair in flat(part).items()]
    return (pair for pair in pairs if _is_code(*pair))


def _distrust(file: pathlib.Path, key: str, value: str, *, inside: str) -> errors.UserError:
    """inside: the setting of the config that holds this one, study.arms for what an arm changes; or the same."""
    where, how = ("", value) if inside == key else (f" in {inside}", "...")
    return errors.UserError(
        f'{file} has {key} = "{value}"{where}, a program that would be run: give it on the command line, '
        f"--config.{inside}={how}, if you trust it; where your files are gone, a run goes on with those that it keeps:"
        " --config WORKDIR/source/NAME.py"
    )


def _from_python(file: pathlib.Path, base: ml_collections.ConfigDict) -> ml_collections.ConfigDict:
    spec = importlib.util.spec_from_file_location(f"config_file_{file.stem}", file)
    module = importlib.util.module_from_spec(spec)
    if (beside := str(file.parent.absolute())) not in sys.path:
        sys.path.append(beside)  # behind all others: nothing that is installed is hidden by it
    try:
        spec.loader.exec_module(module)
        config = module.get_config()
    except errors.UserError:
        raise
    except _FAULTS as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
        where = f"{file}, line {lines[-1]}" if lines else str(file)
        raise errors.UserError(f"{where}: {_sentence(error)}") from error
    if not isinstance(config, ml_collections.ConfigDict):
        raise errors.UserError(f"{file}: get_config() must return the ConfigDict of base.get_config()")
    found, right = flat(values_of(config)), flat(values_of(base))
    for key in found.keys() ^ right.keys():  # of a config that was unlocked, or is not that of base
        raise errors.UserError(f'{file}: the config {"has" if key in found else "lacks"} the key "{key}"')
    for key, value in found.items():  # a ConfigDict takes None for anything, and True for 1
        wanted = type(right[key])
        if type(value) is not wanted:
            raise errors.UserError(f'{file}: "{key}" must be of type {wanted.__name__}, and {shown(value)} is not')
    return config


def fault(error: Exception) -> str:
    """What somebody's own code raised, with the last line that is theirs: 'my_file.py, line 3: NameError: ...'."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if own(frame.filename)]
    return "".join(f"{f.filename}, line {f.lineno}: " for f in frames[-1:]) + _sentence(error)


def own(file: str) -> bool:
    """Whether a file of code is the user's own: neither installed nor part of this project."""
    installed = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    rooms = (f"{ROOT / room}{os.sep}" for room in ("tfm", "experiments", "benchmarks"))
    return not file.startswith(("<", *installed, *rooms, str(ROOT / "launch.py")))


def _sentence(error: Exception) -> str:
    """ml_collections' message without its print-out of the whole config."""
    unknown = re.search(r'Key "(.*?)" does not exist', str(error))
    if unknown:
        meant = re.search(r'Did you mean "(.*?)"', str(error))
        hint = f' (did you mean "{meant.group(1)}"?)' if meant else ""
        return f'unknown config key "{unknown.group(1)}"{hint}'
    return f"{type(error).__name__}: {error}".splitlines()[0]


def values_of(config: ml_collections.ConfigDict) -> dict[str, Any]:
    """The plain nested values, with what is derived (K = D // H) worked out."""
    try:
        return config.to_dict()
    except ZeroDivisionError as error:
        raise errors.UserError(
            "a size of the model that others are divided by is 0: model.H must be at least 1"
        ) from error


def flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """{'a': {'b': 1}} as {'a.b': 1}."""
    return dict(_leaves(values))


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, _lists(value)


def _lists(value: Any) -> Any:
    """The value with lists for tuples, as JSON has them."""
    return [_lists(one) for one in value] if isinstance(value, list | tuple) else value


def _known(key: str, right: Mapping[str, Any]) -> str:
    """The key. UserError where it is none of the right ones."""
    if key not in right:
        name = key if len(key) <= 100 else key[:97] + "..."
        raise errors.UserError(f'unknown config key "{name}"{nearest(name, right)}')
    return key


def assign(config: ml_collections.ConfigDict, key: str, value: Any) -> None:
    """config.<key> = value, strictly: an unknown key or a value of the wrong type is a UserError."""
    keys = flat(values_of(config))
    wanted = type(keys[_known(key, keys)])
    fits = isinstance(value, wanted) or (wanted is float and isinstance(value, int))
    if not fits or (isinstance(value, bool) and wanted is not bool):
        raise errors.UserError(f'"{key}" must be of type {wanted.__name__}, and {shown(value)} is not')
    try:
        config.update_from_flattened_dict({key: wanted(value)})
    except OverflowError as error:
        raise errors.UserError(f"{key} = {shown(value)} is too large a number") from error


def plain(value: Any) -> Any:
    """A setting that a program gives, as a config has it: paths as text, numbers of numpy and tuples as Python's."""
    value = os.fspath(value) if isinstance(value, os.PathLike) else value
    return list(value) if isinstance(value, tuple) else value.item() if isinstance(value, np.generic) else value


def override(config: ml_collections.ConfigDict, key: str, text: str) -> None:
    """config.<key> = the value that `text`, from the command line, stands for in the type of that field."""
    keys = flat(values_of(config))
    wanted = type(keys[_known(key, keys)])
    example = """, as '["One", "Two"]'""" if wanted is list else ""
    try:
        assign(config, key, _parse(text, wanted))
    except ValueError as error:
        raise errors.UserError(f'"{key}" must be of type {wanted.__name__}{example}, and "{text}" is not') from error


def _parse(text: str, wanted: type) -> Any:
    if wanted is str:
        return text
    if wanted is bool:
        return {"true": True, "1": True, "false": False, "0": False}.get(text.lower(), text)
    if wanted is list:
        return _shallow(text)
    return wanted(text)


def candidates(module: Any) -> dict[str, Any]:
    """The variants of a room: its public attributes that are tuples of functions, `init` among them."""
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and isinstance(value, tuple) and hasattr(value, "init")
    }


def choose(what: str, name: str, right: Mapping[str, Any]) -> Any:
    """The variant called `name`; 'my_module:my_variant' is imported from the user's own file."""
    if ":" not in name:
        if name not in right:
            listed = ", ".join(right)
            raise errors.UserError(f'unknown {what} "{name}"{nearest(name, right)}; the right ones are: {listed}')
        return right[name]
    module, _, attribute = name.partition(":")
    if module.startswith("."):
        raise errors.UserError(f'the {what} "{name}" cannot be imported: it begins with a dot')
    found = _imported(what, name, module, attribute)
    like = next(iter(right.values()))
    fields, defaults = getattr(like, "_fields", ()), getattr(like, "_field_defaults", {})
    if fields and type(found) is tuple and len(fields) - len(defaults) <= len(found) <= len(fields):
        found = type(like)(*found)
    # What has a default may be left out; none is needed where a variant is one function.
    parts = [part for part in fields if part not in defaults]
    if not all(hasattr(found, part) for part in parts) or (callable(like) and not callable(found)):
        right = f"a tuple ({', '.join(parts)})" if parts else "a function"
        raise errors.UserError(f'the {what} "{name}" must be {right}, and it is not')
    return found


def _imported(what: str, name: str, module: str, attribute: str) -> Any:
    """The attribute of a module of the user's own: in the working directory, installed, or beside the config."""
    if "" not in sys.path:
        sys.path.insert(0, "")
    known = module in sys.modules
    try:
        loaded = importlib.import_module(module)
    except Exception as error:  # somebody's own code may raise anything
        raise errors.UserError(f'the {what} "{name}" cannot be imported: {fault(error)}') from error
    file = getattr(loaded, "__file__", None)
    if not hasattr(loaded, attribute):
        raise errors.UserError(f'the {what} "{name}" cannot be imported: {file or module} has no {attribute}')
    alike = [pathlib.Path(folder, *module.split(".")).with_suffix(".py") for folder in sys.path if file and not known]
    others = [other for other in alike if other.is_file() and not other.samefile(file)]
    if others:
        print(f'{what} "{name}" is from {file}, not from {others[0].absolute()}', flush=True)
    return getattr(loaded, attribute)


def experiment(name: str) -> ModuleType:
    """The module experiments.<name>. UserError lists the right ones.

    It has prepare(settings, devices) -> run.Work, which is trained, or does all by itself, run(settings, folder) ->
    run.Result.
    """
    files = sorted((ROOT / "experiments").glob("*.py")) + sorted((ROOT / "experiments" / "tools").glob("*.py"))
    right = [one.stem for one in files if re.search(r"^def (run|prepare)\(", one.read_text(encoding="utf-8"), re.M)]
    if name not in right:
        raise errors.UserError(
            f'unknown experiment "{name}"{nearest(name, right)}; the right ones are: {", ".join(right)}'
        )
    room = "tools." if (ROOT / "experiments" / "tools" / f"{name}.py").exists() else ""
    return importlib.import_module(f"experiments.{room}{name}")


def check_seed(seed: int) -> None:
    """UserError for a seed that is none."""
    if not 0 <= seed < 2**32:
        raise errors.UserError(f"the seed must lie between 0 and 2**32 - 1, and {seed} does not")


def at_least(least: float, values: Mapping[str, float]) -> None:
    """UserError for the first of these settings, by their keys, that is smaller than `least` or no number."""
    for key, value in values.items():
        if not least <= value < math.inf:
            raise errors.UserError(f"{key} must be at least {least}, and {value} is not")


def check_numbers(values: Mapping[str, Any]) -> None:
    """UserError for the first number, by its key, that no array index or float32 can be: absurd, infinite or NaN."""
    for key, value in flat(values).items():
        for number in _numbers(value):
            most = LARGEST_SEED if key in SEEDS else LARGEST
            if isinstance(number, int) and abs(number) > most:
                raise errors.UserError(f"{key} = {shown(number)} is too large a number: at most {most} is possible")
            if isinstance(number, float) and not abs(number) <= LARGEST_FLOAT:
                raise errors.UserError(f"{key} = {number} is no number that can be computed with")


def _numbers(value: Any) -> list[int | float]:
    if isinstance(value, list):
        return [number for one in value for number in _numbers(one)]
    return [value] if isinstance(value, int | float) else []


def shown(value: Any) -> str:
    """For messages: a value may be long, and Python refuses to write numbers of thousands of digits."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        return f"a value of type {type(value).__name__} that is too long to show"
    return text if len(text) <= 200 else text[:197] + "..."


class Settings:
    """A read-only view of a config that remembers what was read, so that a setting nobody uses can be refused."""

    def __init__(
        self, config: ml_collections.ConfigDict, *, defaults: ml_collections.ConfigDict, file: str | None = None
    ):
        """file: where the config was loaded from."""
        self._config, self._base, self._file = config, defaults, file
        self._values, self._defaults = values_of(config), flat(values_of(defaults))
        check_numbers(self._values)
        self._prefix, self._read = "", set()

    def __getattr__(self, name: str) -> Any:
        value = self._values[name] if name in self._values else _no_such(self._prefix + name)
        if not isinstance(value, dict):
            self._read.add(self._prefix + name)
            return value
        inner = object.__new__(Settings)
        inner._values, inner._defaults = value, self._defaults
        inner._prefix, inner._read = f"{self._prefix}{name}.", self._read
        return inner

    def changed(self, changes: Mapping[str, Any]) -> "Settings":
        """The same with these values, by whole keys; what is derived follows, and nothing is read yet.

        Only of a whole config, not of a section. UserError as `assign` raises.
        """
        config = copy.deepcopy(self._config)
        for key, value in sorted(changes.items()):  # in this order, D and H come before F and K, derived from them
            assign(config, key, value)
        return Settings(config, defaults=self._base)

    def to_dict(self) -> dict[str, Any]:
        """The plain nested values."""
        return self._values

    def defaults(self) -> dict[str, Any]:
        """The defaults of all settings, by whole keys such as 'train.steps'."""
        return self._defaults

    def sources(self) -> dict[pathlib.Path, str]:
        """The user's own code behind these settings, as far as it was run, each file with a name for it: that of the
        config file, and of 'my_file:my_score' the file that was imported, as my_file.py."""
        named = [value for setting in flat(self._values).items() for _, value in _codes(*setting)]
        modules = {name: sys.modules.get(name) for name in (value.partition(":")[0] for value in named)}
        files = [(getattr(module, "__file__", None) or "", f"{name}.py") for name, module in modules.items()]
        files = [(self._file or "", pathlib.Path(self._file or "").name), *files]
        return {pathlib.Path(file).absolute(): name for file, name in files if file.endswith(".py")}

    def refuse_unused(self) -> None:
        """UserError for settings that were changed from their default but that this experiment never looked at."""
        values = flat(self._values)
        unused = [k for k in values if k not in self._read and values[k] != self._defaults.get(k)]
        if unused:
            verb = "is" if len(unused) == 1 else "are"
            raise errors.UserError(
                f"{', '.join(unused)} {verb} set, but this experiment does not use {'it' if verb == 'is' else 'them'}"
            )


def beside(section: Settings, saved: Mapping[str, Any], path: pathlib.Path, called: str = "model") -> dict[str, Any]:
    """The values of the section of this name, as defaults for those that were saved at `path`.

    UserError where a saved one names code and the section, which is the user's own, does not name the same.
    """
    for name, value in saved.items():
        if _is_code(f"{called}.{name}", value) and getattr(section, name, None) != value:
            raise _distrust(path, f"{called}.{name}", value, inside=f"{called}.{name}")
    return section.to_dict()


def _no_such(name: str) -> Any:
    raise AttributeError(f"there is no setting {name}")

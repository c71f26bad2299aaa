"""Settings: set and check the values of a config, and notice which of them nobody uses."""

import copy
import json
import math
import os
import pathlib
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import ml_collections
import numpy as np

from experiments.engine import by_name, errors

LARGEST, LARGEST_SEED, LARGEST_FLOAT = 2**31 - 1, 2**32 - 1, 3.4e38  # int32, uint32, float32
TEXTS = ("source", "init_from", "init_fresh", "lora")  # last parts of keys whose values name no code
TUNE = "study.tune"  # pairs of a setting and the values that are tried
NAMED = ("experiment", "study.experiment")  # their value may be a file of the user's
SOURCES = ("model.D", "model.H")  # other settings are derived from these
SEEDS = ("seed", "study.seeds")
TYPES = (bool, int, float, str, list)  # of settings
BOOLEANS = {"true": True, "1": True, "false": False, "0": False}
PARSERS = {bool: lambda text: BOOLEANS[text.lower()], int: int, float: float, list: json.loads}


def values_of(config: ml_collections.ConfigDict) -> dict[str, Any]:
    """Return the plain nested values, derived ones (K = D // H) included."""
    try:
        return config.to_dict()
    except ZeroDivisionError as error:
        raise errors.UserError("a size that others are divided by is 0: model.H must be at least 1") from error


def flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return {"a": {"b": 1}} as {"a.b": 1}."""
    return dict(leaves(values))


def leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the pairs of `flat`."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, _lists(value)


def _lists(value: Any) -> Any:
    """Return the value with lists in place of tuples, as in JSON."""
    return [_lists(one) for one in value] if isinstance(value, list | tuple) else value


def known(key: str, right: Mapping[str, Any]) -> str:
    """Return the key. UserError unless it is one of the right ones."""
    if key not in right:
        sections = ", ".join(dict.fromkeys(one.partition(".")[0] for one in right if "." in one))
        hint = f"; the sections of {right['experiment'] or 'a config'} are: {sections}" if "." in key else ""
        raise errors.UserError(f'unknown config key "{shorten(key)}"{by_name.suggest(key[:100], right) or hint}')
    return key


def assign(config: ml_collections.ConfigDict, key: str, value: Any) -> None:
    """Set config.<key> to this value, or to what this text stands for in the type of the setting. UserError for an
    unknown key, and for a value of another type."""
    values, value = flat(values_of(config)), plain(value)
    wanted = type(values[known(key, values)])
    example = """, as '["One", "Two"]'""" if wanted is list else ""
    try:
        if isinstance(value, str) and wanted in PARSERS:
            value = PARSERS[wanted](value)
        if wanted is float and type(value) is int:
            value = float(value)
    except (ValueError, KeyError, OverflowError, RecursionError) as error:
        wrong = f"must be of type {wanted.__name__}{example}, and {shown(value)} is not"
        raise errors.UserError(f'"{key}" {wrong}') from error
    check_type(key, value, wanted)
    config.update_from_flattened_dict({key: value})


def check_type(key: str, value: Any, wanted: type) -> None:
    """UserError for a value of another type than this setting has."""
    if type(value) is not wanted:
        raise errors.UserError(f'"{key}" must be of type {wanted.__name__}, and {shown(value)} is not')


def plain(value: Any) -> Any:
    """Return a value of a program as a config has it: paths as text, numpy's numbers and tuples as Python's."""
    value = os.fspath(value) if isinstance(value, os.PathLike) else value
    return list(value) if isinstance(value, tuple) else value.item() if isinstance(value, np.generic) else value


def codes(key: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield the settings and texts anywhere inside this setting's value that can have a module imported, and so
    executed ("my_file:my_score"). Only the settings of TEXTS are known to name no code."""
    if isinstance(value, Mapping):
        for name, one in leaves(value):
            yield from codes(name, one)
    elif isinstance(value, list | tuple):
        is_grid = key == TUNE and len(value) == 2 and isinstance(value[0], str)  # a setting and its values
        for one in value:
            yield from codes(value[0] if is_grid else key, one)
    elif isinstance(value, str) and by_name.CODE.fullmatch(value) and key.rpartition(".")[2] not in TEXTS:
        yield key, value


def section(fields: Mapping[str, Any]) -> ml_collections.ConfigDict:
    """Return a section of a config from its fields, name -> (default, comment) or a default or a section. A default
    that is a function of the section so far gives a value derived from it (K = D // H)."""
    made = ml_collections.ConfigDict()
    for name, field in fields.items():
        default = field[0] if isinstance(field, tuple) else field
        if isinstance(default, Mapping):
            made[name] = section(default)
        else:
            made[name] = default(made) if callable(default) else copy.deepcopy(default)
    return made


def listed(fields: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield 'train.steps = 1000  # updates of the parameters' for every field of a section."""
    values = values_of(section(fields))
    for name, field in fields.items():
        if isinstance(field, Mapping):
            yield from listed(field, f"{prefix}{name}.")
        else:
            comment = f"  # {field[1]}" if isinstance(field, tuple) else ""
            value = json.dumps(values[name]) if isinstance(values[name], str) else repr(values[name])
            line = f"{prefix}{name} = {value}{comment}"
            yield textwrap.fill(line, 120, subsequent_indent="    # ", break_on_hyphens=False, break_long_words=False)


def sections(name: str) -> dict[str, ml_collections.ConfigDict]:
    """Return the experiment's own sections of a config by their names. UserError if the user's are invalid."""
    module, called = by_name.load_experiment(name), f'config() of the experiment "{name}"'
    with by_name.user_errors(called):
        found = {key: section(fields) for key, fields in module.config().items()}
    for key, value in flat({key: values_of(fields) for key, fields in found.items()}).items():
        if not isinstance(value, TYPES):
            types = ", ".join(one.__name__ for one in TYPES)
            raise errors.UserError(f"{called}: {key} = {shown(value)} must be one of {types}")
    return found


def check_seed(seed: int) -> None:
    """Raise UserError unless 0 <= seed < 2**32."""
    at_least(0, {"seed": seed}, LARGEST_SEED)


def at_least(least: float, values: Mapping[str, float], most: float = math.inf) -> None:
    """UserError for the first of these settings, by their keys, that is not a number from `least` to `most`."""
    for key, value in values.items():
        if value > most:
            raise errors.UserError(f"{key} must be at most {most:,}, and {value:,} is not")
        if not least <= value < math.inf:
            raise errors.UserError(f"{key} must be at least {least}, and {value} is not")


def check_numbers(values: Mapping[str, Any]) -> None:
    """UserError for the first number, by its key, that is infinite, NaN or too large for an index or a float32."""
    for key, value in leaves(values):
        numbers = [one for one in value if not isinstance(one, Mapping)] if isinstance(value, list) else [value]
        for number in numbers:
            if isinstance(number, list):
                check_numbers({key: number})
            elif isinstance(number, int) and abs(number) > (LARGEST_SEED if key in SEEDS else LARGEST):
                raise errors.UserError(f"{key} = {shown(number)} is too large a number")
            elif isinstance(number, float) and not abs(number) <= LARGEST_FLOAT:
                raise errors.UserError(f"{key} = {number} must be a finite number")


def shown(value: Any) -> str:
    """Return a value for a message: Python refuses to write numbers of thousands of digits."""
    try:
        return shorten(repr(value))
    except (ValueError, RecursionError):
        return f"a value of type {type(value).__name__} that is too long to show"


def shorten(text: str) -> str:
    return text if len(text) <= 200 else text[:197] + "..."


class Settings:
    """A read-only view of a config that remembers what was read, so that a setting nobody uses can be refused."""

    def __init__(
        self,
        config: ml_collections.ConfigDict,
        defaults: ml_collections.ConfigDict,
        *,
        file: str | None = None,
        given: Iterable[str] = (),
    ):
        """defaults: of the same fields. file: where the config was loaded from. given: keys on the command line."""
        self._config, self._base, self._file, self._given = config, defaults, file, frozenset(given)
        self._values, self._defaults = values_of(config), flat(values_of(defaults))
        check_numbers(self._values)
        self._prefix, self._read = "", set()

    def __getattr__(self, name: str) -> Any:
        if name not in self._values:
            raise AttributeError(f"there is no setting {self._prefix}{name}")
        value = self._values[name]
        if not isinstance(value, dict):
            self._read.add(self._prefix + name)
            return value
        inner = object.__new__(Settings)
        inner._values, inner._defaults = value, self._defaults
        inner._prefix, inner._read = f"{self._prefix}{name}.", self._read
        return inner

    def changed(self, changes: Mapping[str, Any], *, without: str = "", given: Iterable[str] = ()) -> "Settings":
        """Return these settings with other values, by whole keys, and without a section; derived values follow, and
        nothing is read yet. given: keys that count as set by the user. Only for a whole config, not for a section."""
        config, defaults = copy.deepcopy(self._config), copy.deepcopy(self._base) if without else self._base
        for one in (config, defaults) if without else ():
            with one.unlocked():
                del one[without]
        for key, value in sorted(changes.items()):  # in this order, D and H come before F and K, derived from them
            assign(config, key, value)
        return Settings(config, defaults, file=self._file, given=self._given.union(given))

    def given(self, key: str) -> bool:
        """Return True if the command line, or an arm or condition of a study, sets this one."""
        return key in self._given

    def chosen(self) -> set[str]:
        """Return the keys that the user has chosen a value for: on the command line, or in the config another one than
        the default or than follows from other settings (F from D). Only for a whole config, not for a section."""
        usual, values, chosen = copy.deepcopy(self._base), flat(self._values), set(self._given)
        for key in sorted(values, key=lambda key: (key not in SOURCES, key)):
            if values[key] != flat(values_of(usual))[key]:
                assign(usual, key, values[key])
                chosen.add(key)
        return chosen

    def to_dict(self) -> dict[str, Any]:
        """Return the plain nested values."""
        return self._values

    def defaults(self) -> dict[str, Any]:
        """Return the defaults of all settings, by whole keys such as "train.steps"."""
        return self._defaults

    def sources(self) -> dict[pathlib.Path, str]:
        """Return the files of the user's code behind these settings, as far as it was imported, with their names: the
        config, the modules that settings name ("my_file:my_score"), and what these import from their folders."""
        values = flat(self._values)
        named = [text.partition(":")[0] for setting in values.items() for _, text in codes(*setting)]
        named += [values[key] for key in NAMED if by_name.is_user_experiment(values.get(key, ""))]
        imported = {name: getattr(module, "__file__", None) or "" for name, module in [*sys.modules.items()]}
        files = {self._file or "": pathlib.Path(self._file or "").name}
        files |= {imported[name]: f"{name}.py" for name in named if name in imported}
        folders = {str(pathlib.Path(file).absolute().parent) for file in files if file}
        for name, file in imported.items():
            if os.path.dirname(file) in folders and by_name.is_user_code(file) and name.partition(".")[0] != "configs":
                files.setdefault(file, f"{name}.py")
        return {pathlib.Path(file).absolute(): name for file, name in files.items() if file.endswith(".py")}

    def refuse_unused(self) -> None:
        """Raise UserError for settings that were changed from their default but that this experiment never read."""
        values = flat(self._values)
        unused = [k for k in values if k not in self._read and values[k] != self._defaults.get(k)]
        if unused:
            verb, them = ("is", "it") if len(unused) == 1 else ("are", "them")
            raise errors.UserError(f"{', '.join(unused)} {verb} set, but this experiment does not use {them}")

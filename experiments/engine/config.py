"""Settings: read and change them strictly, choose variants and experiments by name, notice what is unused."""

import contextlib
import copy
import json
import math
import os
import pathlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import ml_collections
import numpy as np

from experiments.engine import by_name, errors

LARGEST, LARGEST_SEED, LARGEST_FLOAT = 2**31 - 1, 2**32 - 1, 3.4e38  # int32, uint32, float32
DEEPEST = 30  # levels of a config in JSON
TEXTS = ("source", "init_from", "init_fresh", "lora")  # last parts of keys whose values name no code
TUNE = "study.tune"  # pairs of a setting and the values that are tried
NAMED = ("experiment", "study.experiment")  # what may be a file of the user's own
SOURCES = ("model.D", "model.H")  # from which others are derived
SEEDS = ("seed", "study.seeds")
TYPES = (bool, int, float, str, list)  # of settings
TRUTH = {"true": True, "1": True, "false": False, "0": False}


def values_of(config: ml_collections.ConfigDict) -> dict[str, Any]:
    """The plain nested values, with what is derived (K = D // H) worked out."""

    try:
        return config.to_dict()
    except ZeroDivisionError as error:
        raise errors.UserError("a size that others are divided by is 0: model.H must be at least 1") from error


def flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """{'a': {'b': 1}} as {'a.b': 1}."""
    return dict(leaves(values))


def leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The pairs of `flat`, one after the other."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, _lists(value)


def _lists(value: Any) -> Any:
    """The value with lists for tuples, as JSON has them."""
    return [_lists(one) for one in value] if isinstance(value, list | tuple) else value


def known(key: str, right: Mapping[str, Any]) -> str:
    """The key. UserError where it is none of the right ones."""
    if key not in right:
        name = key if len(key) <= 100 else key[:97] + "..."
        sections = ", ".join(dict.fromkeys(one.partition(".")[0] for one in right if "." in one))
        hint = f"; the sections of {right['experiment'] or 'a config'} are: {sections}" if "." in key else ""
        raise errors.UserError(f'unknown config key "{name}"{by_name.nearest(key[:97], right) or hint}')
    return key


def assign(config: ml_collections.ConfigDict, key: str, value: Any) -> None:
    """config.<key> = value, strictly: an unknown key or a value of the wrong type is a UserError."""
    keys, value = flat(values_of(config)), plain(value)
    wanted = type(keys[known(key, keys)])
    if not (wanted is float and type(value) is int):
        check_type(key, value, wanted)
    try:
        config.update_from_flattened_dict({key: wanted(value)})
    except OverflowError as error:
        raise errors.UserError(f"{key} = {shown(value)} is too large a number") from error


def check_type(key: str, value: Any, wanted: type) -> None:
    """UserError for a value of another type than this setting has."""
    if type(value) is not wanted:
        raise errors.UserError(f'"{key}" must be of type {wanted.__name__}, and {shown(value)} is not')


def plain(value: Any) -> Any:
    """A setting that a program gives, as a config has it: paths as text, numbers of numpy and tuples as Python's."""
    value = os.fspath(value) if isinstance(value, os.PathLike) else value
    return list(value) if isinstance(value, tuple) else value.item() if isinstance(value, np.generic) else value


def override(config: ml_collections.ConfigDict, key: str, text: str) -> None:
    """config.<key> = the value that `text`, from the command line, stands for in the type of that field."""
    keys = flat(values_of(config))
    wanted = type(keys[known(key, keys)])
    parse = {bool: lambda text: TRUTH.get(text.lower(), text), list: shallow}.get(wanted, wanted)
    example = """, as '["One", "Two"]'""" if wanted is list else ""
    try:
        assign(config, key, parse(text))
    except ValueError as error:
        raise errors.UserError(f'"{key}" must be of type {wanted.__name__}{example}, and "{text}" is not') from error


def shallow(text: str) -> Any:
    """What the JSON says. ValueError where it is none, or is nested more deeply than any setting is."""

    def depth(value: Any) -> int:
        inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        return 1 + max(map(depth, inside), default=0)

    with contextlib.suppress(RecursionError):
        value = json.loads(text)
        if depth(value) <= DEEPEST:
            return value
    raise ValueError(f"it is nested more than {DEEPEST} levels deep")


def codes(key: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield the settings and texts anywhere inside this setting's value that can have a module imported, and so
    executed ('my_file:my_score'). Only the settings of TEXTS are known to name no code."""
    if isinstance(value, Mapping):
        for name, one in leaves(value):
            yield from codes(name, one)
    elif isinstance(value, list | tuple):
        tried = key == TUNE and len(value) == 2 and isinstance(value[0], str)  # a setting and its values
        for one in value:
            yield from codes(value[0] if tried else key, one)
    elif isinstance(value, str) and by_name.CODE.fullmatch(value) and key.rpartition(".")[2] not in TEXTS:
        yield key, value


def sections(name: str) -> dict[str, ml_collections.ConfigDict]:
    """The experiment's own sections of a config, by their names. UserError where those of one's own are none."""
    module, called = by_name.experiment(name), f'config() of the experiment "{name}"'
    with by_name.told(called):
        found = {key: ml_collections.ConfigDict(fields) for key, fields in getattr(module, "config", dict)().items()}
    for key, value in flat({key: values_of(fields) for key, fields in found.items()}).items():
        if not isinstance(value, TYPES):
            types = ", ".join(one.__name__ for one in TYPES)
            raise errors.UserError(f"{called}: {key} = {shown(value)} is none of {types}")
    return found


def check_seed(seed: int) -> None:
    """UserError for a seed that is none."""
    if not 0 <= seed <= LARGEST_SEED:
        raise errors.UserError(f"the seed must lie between 0 and 2**32 - 1, and {seed} does not")


def at_least(least: float, values: Mapping[str, float], most: float = math.inf) -> None:
    """UserError for the first of these settings, by their keys, that is no number from `least` to `most`."""
    for key, value in values.items():
        if value > most:
            raise errors.UserError(f"{key} must be at most {most:,}, and {value:,} is not")
        if not least <= value < math.inf:
            raise errors.UserError(f"{key} must be at least {least}, and {value} is not")


def check_numbers(values: Mapping[str, Any]) -> None:
    """UserError for the first number, by its key, that no array index or float32 can be: absurd, infinite or NaN."""
    for key, value in leaves(values):
        most = LARGEST_SEED if key in SEEDS else LARGEST
        if isinstance(value, list):
            for one in value:
                check_numbers({} if isinstance(one, Mapping) else {key: one})
        elif isinstance(value, int) and abs(value) > most:
            raise errors.UserError(f"{key} = {shown(value)} is too large a number: at most {most} is possible")
        elif isinstance(value, float) and not abs(value) <= LARGEST_FLOAT:
            raise errors.UserError(f"{key} = {value} is no number that can be computed with")


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
        """The same with these values, by whole keys, and without a section; what is derived follows, and nothing is
        read yet. given: keys that count as set by somebody. Only of a whole config, not of a section. Raises UserError
        as `assign` does."""
        config, defaults = copy.deepcopy(self._config), copy.deepcopy(self._base) if without else self._base
        for one in (config, defaults) if without else ():
            with one.unlocked():
                del one[without]
        for key, value in sorted(changes.items()):  # in this order, D and H come before F and K, derived from them
            assign(config, key, value)
        return Settings(config, defaults, file=self._file, given=self._given.union(given))

    def given(self, key: str) -> bool:
        """Whether the command line, or an arm or condition of a study, sets this one."""
        return key in self._given

    def chosen(self) -> set[str]:
        """The keys that somebody has chosen a value for: on the command line, or another one in the config than the
        default is, or than follows from other settings (F from D). Only of a whole config, not of a section."""
        plain, values, chosen = copy.deepcopy(self._base), flat(self._values), set(self._given)
        for key in sorted(values, key=lambda key: (key not in SOURCES, key)):
            if values[key] != flat(values_of(plain))[key]:
                assign(plain, key, values[key])
                chosen.add(key)
        return chosen

    def to_dict(self) -> dict[str, Any]:
        """The plain nested values."""
        return self._values

    def defaults(self) -> dict[str, Any]:
        """The defaults of all settings, by whole keys such as 'train.steps'."""
        return self._defaults

    def sources(self) -> dict[pathlib.Path, str]:
        """The user's own code behind these settings, as far as it was run, each file with a name for it: that of the
        config file, of 'my_file:my_score' the file that was imported, as my_file.py, and what was imported from beside
        these."""
        values = flat(self._values)
        named = [value for setting in values.items() for _, value in codes(*setting)]
        named += [values[key] for key in NAMED if by_name.own_experiment(values.get(key, ""))]
        files = {self._file or "": pathlib.Path(self._file or "").name}
        for name in (value.partition(":")[0] for value in named):
            files[getattr(sys.modules.get(name), "__file__", None) or ""] = f"{name}.py"
        folders = {str(pathlib.Path(file).absolute().parent) for file in files if file}
        for name, module in [*sys.modules.items()]:
            file = getattr(module, "__file__", None) or ""
            if os.path.dirname(file) in folders and by_name.own(file) and name.partition(".")[0] != "configs":
                files.setdefault(file, f"{name}.py")
        return {pathlib.Path(file).absolute(): name for file, name in files.items() if file.endswith(".py")}

    def refuse_unused(self) -> None:
        """UserError for settings that were changed from their default but that this experiment never looked at."""
        values = flat(self._values)
        unused = [k for k in values if k not in self._read and values[k] != self._defaults.get(k)]
        if unused:
            verb, them = ("is", "it") if len(unused) == 1 else ("are", "them")
            raise errors.UserError(f"{', '.join(unused)} {verb} set, but this experiment does not use {them}")

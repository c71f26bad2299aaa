"""Settings: read, assign and check the values of a config, and reject settings that nothing reads."""

import ast
import contextlib
import copy
import importlib
import json
import math
import os
import pathlib
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import ml_collections
import numpy as np
from flax import traverse_util

from experiments.config import by_name, errors

LONGEST = 200  # letters of a value in a message
LARGEST, LARGEST_SEED, LARGEST_FLOAT = 2**31 - 1, 2**32 - 1, 3.4e38  # int32, uint32, float32
SEEDS = ("seed", "study.seeds", "study.tune_seeds")
# Ranges of numbers: those of the sections model, optim and train are at least 0, these at least 1, or less than 1.
FROM_ONE = ("model.M", "model.D", "model.H", "model.G", "model.K", "model.F", "train.steps", "train.batch_size")
FROM_ONE += ("train.accumulation",)
BELOW_ONE = ("model.dropout", "optim.momentum", "optim.betas", "optim.ema")
# Last parts of the keys whose texts never name code, except for SOURCE, which may name the user's reader.
TEXTS, SOURCE = ("source", "init_from", "init_fresh", "lora"), "text.source"
TUNE = "study.tune"  # its value is a list of pairs [setting, values to try]
EXPERIMENT_KEYS = ("experiment", "study.experiment")  # their values may name a file of the user's
BASE_KEYS = ("model.D", "model.H")  # other settings are derived from them
BOOLEANS = {"true": True, "1": True, "false": False, "0": False}
# The types of settings, and how the command line writes them.
PARSERS = {str: str, bool: lambda text: BOOLEANS[text.lower()], int: int, float: float, list: json.loads}


def flat(values: Mapping[str, Any] | ml_collections.ConfigDict) -> dict[str, Any]:
    """Return {"a": {"b": 1}} as {"a.b": 1}, with a ConfigDict's derived values (K = D // H), and lists for tuples.

    Raises UserError if model.H is 0, or if a section or list contains itself.
    """
    settings: dict[str, Any] = {}
    try:
        values = values.to_dict() if isinstance(values, ml_collections.ConfigDict) else values
        for name, value in values.items():
            settings |= traverse_util.flatten_dict({name: value}, sep=".")
        return {name: _lists(value) for name, value in settings.items()}
    except ZeroDivisionError as error:
        raise errors.UserError("model.H = 0: choose at least one head (model.K is model.D // model.H)") from error
    except RecursionError as error:
        raise errors.UserError(f"{name}, or a value in it, contains itself. Write plain values") from error


def _lists(value: Any) -> Any:
    """Return the value with lists in place of tuples, as in JSON."""
    return [_lists(item) for item in value] if isinstance(value, list | tuple) else value


def get_base(experiment: str = "", of: str | ml_collections.ConfigDict = "") -> ml_collections.ConfigDict:
    """Return get_config(experiment, of) of configs/base.py: an experiment's settings with their defaults.

    of: for a study, the experiment that its runs train, or a config of that experiment. Raises UserError as
    `get_config` does, and if a name is no text.
    """
    for key, name in zip(EXPERIMENT_KEYS, (experiment, of), strict=True):
        if not isinstance(name, ml_collections.ConfigDict):
            check_type(key, name, str)
    # Imported here, because `forget_user_modules` removes configs.base between two runs of a process.
    return importlib.import_module("configs.base").get_config(experiment, of=of)


def load_defaults(config: ml_collections.ConfigDict) -> ml_collections.ConfigDict:
    """Return the defaults of the config's experiment. Raises UserError if the config has other keys or types."""
    values = flat(config)
    defaults = get_base(*(values.get(key, "") for key in EXPERIMENT_KEYS))
    expected, of = flat(defaults), ', of="language"' * ("study" in defaults)
    begin = f'A config of the experiment {config.experiment} must begin with base.get_config("{config.experiment}"{of})'
    for key in sorted(values.keys() ^ expected.keys()):  # the file unlocked the config, or used another experiment's
        fault = "has the unknown" if key in values else "lacks the"
        raise errors.UserError(f'the config {fault} key "{key}". {begin}')
    for key, value in values.items():  # a ConfigDict accepts None for any type, and True for an int
        check_type(key, value, type(expected[key]))
    return defaults


def find_value(config: ml_collections.ConfigDict, key: str) -> Any:
    """Return the value of the setting `key`, such as "model.score". Raises UserError if there is no such setting."""
    settings = flat(config)
    if key not in settings:
        sections = ", ".join(dict.fromkeys(name.partition(".")[0] for name in settings if "." in name))
        hint = f"; the sections of {settings['experiment'] or 'a config'} are: {sections}" if "." in key else ""
        raise errors.UserError(f'unknown config key "{key[:LONGEST]}"{by_name.suggest(key[:100], settings) or hint}')
    return settings[key]


def assign(config: ml_collections.ConfigDict, key: str, value: Any) -> None:
    """Set config.<key> to a value. A text is parsed to the type of the setting.

    Raises UserError if the key is unknown, or if the value has another type.
    """
    kind, value = type(find_value(config, key)), to_plain(value)
    if isinstance(value, str) or (kind is float and type(value) is int):
        with contextlib.suppress(ValueError, KeyError, OverflowError, RecursionError):
            value = PARSERS[kind](value)
    check_type(key, value, kind)
    config.update_from_flattened_dict({key: value})


def update(config: ml_collections.ConfigDict, values: Mapping[str, Any]) -> list[str]:
    """Assign the values, such as {"model.D": 64}, that differ from the config's. Return their keys.

    A value that the config derives from others (K = D // H) stays derived if the new value is equal. Raises UserError
    for an unknown key, or a value of the wrong type.
    """
    changed = []
    for key in sorted(values, key=lambda key: (key not in BASE_KEYS, key)):
        current, value = find_value(config, key), to_plain(values[key])
        if type(value) is not type(current) or value != current:
            assign(config, key, value)
            changed.append(key)
    return changed


def check_type(key: str, value: Any, kind: type) -> None:
    """Raise UserError unless the value of the setting `key` has exactly the type `kind`: True is no int."""
    example = f", as '{_write_list(value)}'" if kind is list and isinstance(value, str) else ""
    fault = f"{key} = {format_value(value)} must be of type {kind.__name__}{example}"
    errors.refuse((type(value) is not kind, fault))


def _write_list(text: str) -> str:
    """Return the list, in JSON, that a text without brackets and quotes means: 0.9,.95 is [0.9, 0.95]."""
    text = text[:LONGEST].strip(" []()")
    try:
        return json.dumps(ast.literal_eval(f"[{text}]"))
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return json.dumps([item.strip(" '\"") for item in text.split(",")])


def to_plain(value: Any) -> Any:
    """Return a value in the types of a config: a path as text, a tuple as a list, a NumPy number as Python's.

    The elements of a tuple do not change.
    """
    value = os.fspath(value) if isinstance(value, os.PathLike) else value
    return list(value) if isinstance(value, tuple) else value.item() if isinstance(value, np.generic) else value


def find_code(key: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield (setting, text) for every text in a value that names the user's code. Loading it executes a module.

    A text names code if it has the form "my_file:my_score". In the settings TEXTS it does not, except for a reader in
    text.source. The name of a user's experiment, "my_file", is code too. key: the setting that has the value, or "".
    """
    if isinstance(value, Mapping):
        for name, item in flat(value).items():
            yield from find_code(name, item)
    elif isinstance(value, list | tuple):
        is_grid = key == TUNE and len(value) == 2 and isinstance(value[0], str)  # a setting and its values
        for item in value:
            yield from find_code(value[0] if is_grid else key, item)
    elif isinstance(value, str) and key == SOURCE:
        yield from ((key, name) for name, _ in by_name.split_sources(value) if by_name.is_reader(name))
    elif isinstance(value, str) and key.rpartition(".")[2] not in TEXTS:
        if by_name.CODE.fullmatch(value) or (key in EXPERIMENT_KEYS and by_name.is_user_experiment(value)):
            yield key, value


def section(fields: Mapping[str, Any]) -> ml_collections.ConfigDict:
    """Return a section of a config. fields: name -> a default, (default, comment), or the fields of a nested section.

    A callable default receives the section so far, and returns a derived value (K = D // H).
    """
    config = ml_collections.ConfigDict()
    for name, field in fields.items():
        default = field[0] if isinstance(field, tuple) else field
        if isinstance(default, Mapping):
            config[name] = section(default)
        else:
            config[name] = default(config) if callable(default) else copy.deepcopy(default)
    return config


def describe_fields(fields: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield 'train.steps = 1000  # updates of the parameters' for every field of a section.

    fields: name -> a default, (default, comment), or the fields of a nested section. prefix: such as 'train.'.
    """
    values = section(fields).to_dict()
    for name, field in fields.items():
        if isinstance(field, Mapping):
            yield from describe_fields(field, f"{prefix}{name}.")
        else:
            value = json.dumps(values[name]) if isinstance(values[name], str) else repr(values[name])
            line = f"{prefix}{name} = {value}" + (f"  # {field[1]}" if isinstance(field, tuple) else "")
            yield textwrap.fill(line, 120, subsequent_indent="    # ", break_on_hyphens=False, break_long_words=False)


def sections(name: str) -> dict[str, ml_collections.ConfigDict]:
    """Return {section: its settings} that the experiment `name` adds to a config.

    Raises UserError if the experiment is missing or its config() fails, and if a default is invalid.
    """
    module, label = by_name.load_experiment(name), f'config() of the experiment "{name}"'
    with by_name.user_errors(label):
        added = {key: section(fields) for key, fields in module.config().items()}
    types = ", ".join(kind.__name__ for kind in PARSERS)
    for key, value in flat(ml_collections.ConfigDict(added)).items():
        rule = f"{key} = {format_value(value)} must have one of the types {types}"
        errors.refuse((type(value) not in PARSERS, f"{label}: {rule}"))
    return added


def at_least(least: float, values: Mapping[str, Any], most: float | None = None) -> None:
    """Raise UserError unless each number in the value of each key is finite and from `least` to `most`.

    Without `most`, a number may be as large as an int32, or a float32.
    """
    for key, value in values.items():
        label = f"{key} = {format_value(value)}"
        for number in _list_numbers(value):
            largest = most if most is not None else LARGEST_FLOAT if isinstance(number, float) else LARGEST
            errors.refuse(
                (number > largest, f"{label} must be at most {largest:,}"),
                (number < max(least, -largest), f"{label} must be at least {max(least, -largest):,}"),
                (not abs(number) < math.inf, f"{label} must be a finite number"),
            )


def _list_numbers(value: Any) -> list[float]:
    """Return the numbers in a value, which may be a list of lists."""
    leaves = jax.tree.leaves(value, is_leaf=lambda item: isinstance(item, Mapping))
    return [leaf for leaf in leaves if isinstance(leaf, int | float)]


def check_numbers(values: Mapping[str, Any] | ml_collections.ConfigDict) -> None:
    """Raise UserError if a number is infinite, NaN, too large for int32 (a seed: uint32) or float32, or out of range.

    Seeds and numbers of the sections model, optim and train are at least 0, those of FROM_ONE at least 1, and those of
    BELOW_ONE less than 1.
    """
    for key, value in flat(values).items():
        is_ranged = key in SEEDS or key.startswith(("model.", "optim.", "train."))
        at_least(int(key in FROM_ONE) if is_ranged else -math.inf, {key: value}, LARGEST_SEED if key in SEEDS else None)
        too_large = key in BELOW_ONE and max(_list_numbers(value), default=0) >= 1
        errors.refuse((too_large, f"{key} = {format_value(value)} must be less than 1"))


def format_value(value: Any) -> str:
    """Return a value as a short text for a message, also if its repr fails (an integer of thousands of digits)."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        return f"a value of type {type(value).__name__} that is too long to show"
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


class Settings:
    """A read-only view of a config that records which settings are read, so that unused settings can be rejected.

    The methods are for a whole config, not for a section of it.
    """

    def __init__(
        self,
        config: ml_collections.ConfigDict,
        defaults: ml_collections.ConfigDict | None = None,
        *,
        file: str = "",
        explicit: Iterable[str] = (),
    ):
        """defaults: a config with the same keys; None: the experiment's, which may execute the user's code.

        file: the config file. explicit: keys set on the command line.
        """
        self._config, self._file, self._explicit = config, file, frozenset(explicit)
        check_numbers(config)
        self._base = load_defaults(config) if defaults is None else defaults
        self._defaults, self._values = flat(self._base), config.to_dict()
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

    def replace(self, changes: Mapping[str, Any], *, without: str = "", explicit: Iterable[str] = ()) -> "Settings":
        """Return a copy of these settings with the changes, key -> value. Derived values are recomputed.

        without: the name of a section to remove. explicit: keys that count as set by the user, besides those that count
        already. A key of `changes` counts if it is in `explicit` too, or its value is neither default nor derived.
        Raises UserError for an unknown key or an invalid value.
        """
        config, defaults = copy.deepcopy(self._config), copy.deepcopy(self._base)
        for part in (config, defaults) if without else ():
            with part.unlocked():
                del part[without]
        update(config, changes)
        return Settings(config, defaults, file=self._file, explicit=self._explicit.union(explicit))

    def list_chosen(self) -> set[str]:
        """Return the keys whose values the user chose.

        These are all keys that the command line, or an arm or condition of a study, sets. From the config
        file, they are the keys whose value is neither the default nor derived from other settings (F from D).
        """
        return {*self._explicit, *update(copy.deepcopy(self._base), flat(self._values))}

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as nested dicts."""
        return self._values

    def defaults(self) -> dict[str, Any]:
        """Return the defaults of all settings, by keys such as "train.steps"."""
        return self._defaults

    def sources(self) -> dict[pathlib.Path, str]:
        """Return {path: name for a copy} of the files of the user's code that these settings use.

        These are the config, the modules that settings name ("my_file:my_score"), and other imported modules from the
        folders of these.
        """
        modules = [text.partition(":")[0] for _, text in find_code("", self._values)]
        imported = {name: getattr(module, "__file__", None) or "" for name, module in [*sys.modules.items()]}
        files = {self._file: pathlib.Path(self._file).name}
        files |= {imported[name]: f"{name}.py" for name in modules if name in imported}
        folders = {str(pathlib.Path(file).absolute().parent) for file in files if file}
        for name, file in imported.items():
            if os.path.dirname(file) in folders and by_name.is_user_code(file) and name.partition(".")[0] != "configs":
                files.setdefault(file, f"{name}.py")
        return {pathlib.Path(file).absolute(): name for file, name in files.items() if file.endswith(".py")}

    def refuse_unused(self) -> None:
        """Raise UserError if the user chose a value of a setting other than its default, but nothing has read it."""
        values, chosen = flat(self._values), self.list_chosen() - self._read
        unused = [key for key in values if key in chosen and values[key] != self._defaults[key]]
        defaults = " ".join(f"--config.{key}={format_value(self._defaults[key])}" for key in unused)
        rule = f"Remove these settings, or set the defaults: {defaults}"
        errors.refuse((unused, f"this experiment does not use {', '.join(unused)}. {rule}"))


def warmup_steps(settings: Settings) -> int:
    """Return optim.warmup_steps; train.steps // 10 if the user did not set it and train.steps is not above it."""
    key, steps, warmup = "optim.warmup_steps", settings.train.steps, settings.optim.warmup_steps
    is_default = warmup == settings.defaults()[key] and key not in settings._explicit
    return max(steps, 0) // 10 if is_default and steps <= warmup else warmup

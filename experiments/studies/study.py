"""A study as its config describes it: conditions x arms x seeds, and the runs that one program trains together.

experiments/ablation.py uses the modules of this package in this order:
1. study reads the config, and groups the runs into programs; plan logs what was planned, in plan.jsonl.
2. tuning lists the runs that choose settings for the arms, and reads their choices.
3. run_folders makes or reopens the folders of the runs.
4. programs trains a program, whose runs are rows of the same arrays (vmapped_runs). progress shows the progress bar.
5. runs loads the finished runs. statistics compares the arms in each condition, scaling over several conditions;
   inference computes their intervals.
6. results writes the report from sentences, tables and figures; styles gives each arm its colour, line and marker.
"""

import contextlib
import hashlib
import itertools
import json
import pathlib
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType, UnionType
from typing import Any, NamedTuple

import numpy as np

from experiments.config import errors, settings as configs
from experiments.engine import run_plan, train_step
from experiments.folder import checkpoint, log, workdir as workdirs

# Settings that a compiled program takes as arrays: runs that differ only in these and in seeds share a program.
NUMBERS = ("optim.learning_rate", "optim.weight_decay", "model.score_std")
CONDITION_SETTINGS = ("study.metric", "study.threshold", "study.margin")  # of the study; a condition may change them
TUNE = "study.tune"  # the setting of the study that an arm may change
SHARED = ("study", "mesh", "seed", "experiment", "log")  # sections and settings that arms and conditions cannot change
VALUES = "@"  # separates the name of an arm from the values of a tuning run
ALONE = "run"  # the only arm of a sweep of the seed
ONLY = "all"  # the name of the only condition of a study without study.conditions
LOSS, METRIC = f"train.{train_step.LOSS}", f"{run_plan.EVAL}{train_step.LOSS}"  # of training; in evaluation
RESERVED = ("checkpoints", "figures", "source", "tuning")  # names of other folders in a study's folder
LONGEST = 100  # letters of the name of an arm or a condition; condition_arm fits into the 255 of a folder's name
_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9_+.,=-]{{0,{LONGEST - 1}}}")


class Arm(NamedTuple):
    """A name, and the settings that the arm changes, such as {"model.score": "tied"}."""

    name: str
    changes: dict[str, Any]


class Condition(NamedTuple):
    """A name, the settings that the condition changes, and its section `study`."""

    name: str
    changes: dict[str, Any]
    metric: str
    threshold: float = 0.0  # value of the metric that arms are timed to reach; 0: none
    margin: float = 0.0  # the largest difference that counts as equal; 0: equality is never claimed


class Study(NamedTuple):
    """The arms, the conditions of their comparisons, and the seeds that pair them."""

    experiment: str
    conditions: list[Condition]
    arms: list[Arm]  # the last one is the reference
    seeds: list[int]  # []: unknown. Then arms without a common seed are compared by Welch's t
    looks: int = 1  # planned analyses: how often a verdict may be read, each time with more seeds
    correction: str = "study"  # or "condition": the family of comparisons for which intervals hold together
    grid: Mapping[str, Mapping[str, Sequence]] = {}  # arm -> setting -> the values to try in tuning runs
    tune_seeds: Sequence[int] = ()
    also: Sequence[pathlib.Path] = ()  # other folders with finished runs of the study

    @property
    def reference(self) -> str:
        return self.arms[-1].name


class Run(NamedTuple):
    """One run of a study."""

    condition: str
    arm: str
    seed: int
    settings: configs.Settings

    @property
    def name(self) -> str:
        """The run's folder, relative to the study's."""
        return f"{self.condition}/{self.arm}/seed_{self.seed}"

    @property
    def place(self) -> tuple[str, str]:
        """The condition and the arm. Runs with the same place train on the same data."""
        return self.condition, self.arm


class Program(NamedTuple):
    """Runs that one compiled program trains together."""

    runs: list[Run]
    tuning: bool = False  # these are tuning runs, trained and evaluated on splits of the training data
    spread: int = 1  # number of devices that share the runs

    @property
    def rows(self) -> list[Run]:
        """The runs, padded with copies of the last one so that all devices have the same number of rows."""
        return self.runs + self.runs[-1:] * (-len(self.runs) % self.spread)

    @property
    def numbers(self) -> dict[str, np.ndarray]:
        """{"learning_rate": R values, ...} for the settings of NUMBERS that differ between the R runs of `rows`."""
        values = [configs.flat(run.settings.to_dict()) for run in self.rows]
        columns = {key: np.array([run_values[key] for run_values in values], np.float32) for key in NUMBERS}
        return {key.split(".")[1]: column_R for key, column_R in columns.items() if np.ptp(column_R) > 0}

    @property
    def name(self) -> str:
        """The label of these runs: condition (unless ONLY), arms and number of seeds, "rope (3 values) x 5 seeds"."""
        values = Counter(arm.partition(VALUES)[0] for arm in dict.fromkeys(run.arm for run in self.runs))
        arms = ", ".join(f"{arm} ({n} values)" if n > 1 else arm for arm, n in values.items())
        condition, n = self.runs[0].condition, len({run.seed for run in self.runs})
        return f"{f'{condition}: ' * (condition != ONLY)}{arms} x {n} seed{'s' * (n > 1)}"

    @property
    def folder(self) -> str:
        """The name of the checkpoint folder. It ends with a checksum of all settings that a resume must not change."""
        lasting: list = []
        for run in self.runs:
            items = configs.flat(run.settings.to_dict()).items()  # the learning rate depends on train.steps
            fixed = {key: x for key, x in items if key == "train.steps" or not workdirs.may_change(key)}
            lasting.append([run.name, fixed])
        lasting += [len(self.rows)] if len(self.rows) > len(self.runs) else []
        return f"{'_'.join(self.runs[0].place)}_{zlib.crc32(json.dumps(lasting, sort_keys=True).encode()):08x}"


@contextlib.contextmanager
def naming(owner: str) -> Iterator[None]:
    """Context manager: begin the message of a UserError with `owner`, the condition or arm that caused it."""
    try:
        yield
    except errors.UserError as error:
        raise errors.UserError(f"in {owner}: {error}") from error


def read(settings: configs.Settings) -> Study:
    """Read the study of a config. Raises UserError if an arm, condition, seed, metric or tuning value is invalid."""
    s = settings.study
    arms = [Arm(*entry) for entry in _read_named("study.arms", s.arms)]
    entries = _read_named("study.conditions", s.conditions) or [(ONLY, {})]
    configs.at_least(1, {"study.looks": s.looks})
    conditions = [_read_condition(settings, *entry) for entry in entries]
    common = _read_grid(TUNE, s.tune)
    grid = {arm.name: common | _read_grid(f"arm {arm.name}: {TUNE}", arm.changes.get(TUNE, [])) for arm in arms}
    grid = grid if any(grid.values()) else {}
    if fault := next(_find_faults(settings, conditions, arms, grid), None):
        raise errors.UserError(fault)
    tuning = {"grid": grid, "tune_seeds": list(s.tune_seeds) if grid else ()}
    return Study(s.experiment, conditions, arms, list(s.seeds), s.looks, **tuning)


def _read_condition(settings: configs.Settings, name: str, changes: dict[str, Any]) -> Condition:
    """Return a condition. Raises UserError if the metric or the margin is invalid."""
    own = {key: value for key, value in changes.items() if key in CONDITION_SETTINGS}
    with naming(f"condition {name}") if own else contextlib.nullcontext():
        changed = settings.replace(own)
        s, users = changed.study, {metric.rpartition(":")[2]: "more" for metric in changed.train.metrics}
        rule = f'study.metric = "{s.metric}" must begin with {run_plan.EVAL}: eval/loss, ...'
        errors.refuse((not s.metric.startswith(run_plan.EVAL), rule))
        checkpoint.choose_best(s.metric, users, key="study.metric")  # the runs record which values are better
        configs.at_least(0, {"study.margin": s.margin})
    return Condition(name, changes, s.metric, s.threshold, s.margin)


def _find_faults(
    settings: configs.Settings, conditions: Sequence[Condition], arms: Sequence[Arm], grid: Mapping[str, Mapping]
) -> Iterator[str]:
    """Yield a message for each fault of arms, seeds and tuning."""
    s = settings.study
    if len(arms) < 2 and [arm.name for arm in arms] != [ALONE]:
        example = '[["tied", {"model.score": "tied"}], ["none", {}]]'
        yield f"study.arms has {len(arms)} of the two or more arms that a study compares. Example: {example}"
    for key, seeds in {"study.seeds": s.seeds, "study.tune_seeds": s.tune_seeds if grid else [0]}.items():
        if not seeds or any(type(seed) is not int for seed in seeds) or len(set(seeds)) < len(seeds):
            yield f"{key} = {configs.format_value(seeds)} must be a list of different integers. Example: [0, 1, 2]"
    if not grid and [*s.tune_seeds] != settings.defaults()["study.tune_seeds"]:
        rule = f"Set {TUNE}, or leave study.tune_seeds out."
        yield f"study.tune_seeds = {s.tune_seeds} has no effect without {TUNE}. {rule}"
    for seed in sorted({*s.seeds} & {*s.tune_seeds}) if grid else ():
        yield f"seed {seed} is in study.seeds and in study.tune_seeds. Choose other seeds for tuning."
    for arm in arms:
        for key in sorted(grid.get(arm.name, {}).keys() & arm.changes.keys()):
            yield f"arm {arm.name} sets {key}, and {TUNE} lists values of it. Leave one of the two out."
    tuned = {loss for values in grid.values() for loss in values.get(LOSS, [])}
    common = configs.flat(settings.to_dict())[LOSS]
    training_losses = tuned | {arm.changes.get(LOSS, common) for arm in arms}
    if METRIC in {condition.metric for condition in conditions} and len(training_losses) > 1:
        rule = 'Choose eval/accuracy, or eval/cross_entropy with train.metrics = ["cross_entropy"].'
        names = ", ".join(sorted(training_losses))
        yield f"study.metric = {METRIC} has another meaning for each {LOSS}: {names}. {rule}"


def _pairs(key: str, values: Any, kind: type | UnionType, example: str) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) pairs. Raises UserError for an entry of another form or type, or with an empty list."""
    for value in values:
        is_pair = isinstance(value, list | tuple) and len(value) == 2
        is_valid = is_pair and isinstance(value[0], str) and isinstance(value[1], kind) and value[1] not in ([], ())
        rule = f"Each entry must be a pair such as {example}."
        errors.refuse((not is_valid, f"{key} has the entry {configs.format_value(value)}. {rule}"))
        yield value[0], value[1]


def _read_grid(key: str, pairs: Any) -> dict[str, list]:
    """Return setting -> its values to try, without duplicates. key: the name in messages. pairs: (setting, values)."""
    grid: dict[str, list] = {}
    for setting, values in _pairs(key, pairs, list | tuple, '["optim.learning_rate", [0.001, 0.003]]'):
        tried = grid.setdefault(setting, [])
        tried += [x for i, x in enumerate(values) if x not in [*tried, *values[:i]]]
    return grid


def _read_named(key: str, pairs: Any) -> list[tuple[str, dict[str, Any]]]:
    """Return (name, changes) of the arms or conditions. Raises UserError if a name is invalid or not unique."""
    entries: dict[str, tuple[str, dict]] = {}  # by names in lower case
    for name, changes in _pairs(key, pairs, Mapping, '["tied", {"model.score": "tied"}]'):
        rule = f"Choose at most {LONGEST} letters, digits and + - . , = _ (reserved: {', '.join(RESERVED)})."
        fault = f"{key}: {configs.format_value(name)} cannot be the name of a folder. {rule}"
        errors.refuse((not _NAME.fullmatch(name) or name.lower() in RESERVED, fault))
        if earlier := entries.get(name.lower()):
            rule = "Choose names that also differ in lower case: some systems have one folder for both."
            raise errors.UserError(f'{key} has "{earlier[0]}" and "{name}". {rule}')
        entries[name.lower()] = name, dict(changes)
    return list(entries.values())


def name_values(values: Mapping[str, Any], prefix: str = "", longest: int = LONGEST) -> str:
    """Return the name of a combination of settings, and of its folder: prefix + 'learning_rate=0.003,ema=0.9'.

    A name that is longer than `longest`, or may not be unique, is cut off and ends with a digest.
    """
    text = ",".join(f"{key.rpartition('.')[2]}={value}" for key, value in values.items())
    name = f"{prefix}{re.sub(r'[^A-Za-z0-9_+.,=-]', '-', text)}"
    plain = all(re.fullmatch(r"[a-z0-9_+.-]+|True|False", str(value)) for value in values.values())
    if plain and len(name) <= longest:
        return name
    digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:8]
    return f"{name[: longest - 9]}-{digest}"  # other values may give the same text, or differ in case only


def runs(settings: configs.Settings, study: Study, chosen: Mapping = MappingProxyType({})) -> list[Run]:
    """Return all runs, each with a complete config without the section `study`, as if the run were trained alone.

    chosen: (condition, arm) -> tuned settings. Raises UserError if a condition or an arm changes a setting or section
    of SHARED, or if both change the same setting.
    """
    plain = {"mesh.seed": settings.defaults()["mesh.seed"], "experiment": study.experiment}
    plain["log"] = [entry for entry in settings.log if entry != log.SYMMETRY]  # the study itself measures symmetry
    every = []
    for condition, arm, seed in itertools.product(study.conditions, study.arms, study.seeds):
        of_condition = {key: x for key, x in condition.changes.items() if key not in CONDITION_SETTINGS}
        of_arm = {key: x for key, x in arm.changes.items() if key != TUNE} | chosen.get((condition.name, arm.name), {})
        changes = of_condition | of_arm
        with naming(f"condition {condition.name}, arm {arm.name}"):
            for key in changes:
                shared = f"{key} must be the same in all runs of a study. Set it in the config itself."
                twice = f"the condition and the arm both set {key}. Leave one of the two out."
                errors.refuse((key.split(".")[0] in SHARED, shared), (key in of_condition and key in of_arm, twice))
            alone = settings.replace(plain | changes | {"seed": seed}, without="study", explicit=changes)
        every.append(Run(condition.name, arm.name, seed, alone))
    return every


def programs(runs: Iterable[Run], *, tuning: bool = False, spread: int = 1) -> list[Program]:
    """Return a Program for each group of runs of one condition that differ only in seeds and the settings NUMBERS.

    tuning: the runs are tuning runs, on splits of the training data. spread: the number of devices that share the runs
    of a program.
    """
    groups: dict[str, list[Run]] = {}
    for run in runs:
        values = configs.flat(run.settings.to_dict())
        kind = {key: value for key, value in values.items() if key != "seed" and key not in NUMBERS}
        groups.setdefault(f"{run.condition} {json.dumps(kind, sort_keys=True)}", []).append(run)
    return [Program(group, tuning, spread) for group in groups.values()]

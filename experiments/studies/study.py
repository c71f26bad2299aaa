"""A study as its config describes it: conditions x arms x seeds, and the runs that one program trains together.

experiments/ablation.py uses the modules of this package in this order:
1. study reads the config, and groups the runs into programs; plan logs what was planned, in plan.jsonl.
2. tuning lists the runs that choose settings for the arms, and reads their choices.
3. run_folders makes the folders of the runs.
4. programs trains a program, whose runs are rows of the same arrays (vmapped_runs), and measures the attention of the
   trained models (attention); progress shows how far it is.
5. runs loads the finished runs. statistics compares the arms in each condition, overall and scaling over several
   conditions; inference computes their intervals.
6. results writes the report from sentences, tables and figures; styles are the looks of the arms in the figures.
merge copies the folders of several machines into one, before step 5.
"""

import contextlib
import itertools
import json
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType, UnionType
from typing import Any, NamedTuple

import numpy as np

from experiments.engine import checkpoint, config, errors, log, run_plan, workdir

# Settings that are numbers inside a program, by their fields: runs that differ in these alone share a program.
NUMBERS = ("optim.learning_rate", "optim.weight_decay", "model.score_std")
OWN = ("study.metric", "study.threshold", "study.margin")  # settings of the study that a condition may change
TUNE = "study.tune"  # the setting of the study that an arm may change
SHARED = ("study", "mesh", "seed", "experiment", "log")  # sections and settings that arms and conditions cannot change
VALUES = "@"  # between the name of an arm and the values of a tuning run
ONLY = "all"  # the condition of a study that names none
RESERVED = ("checkpoints", "figures", "source", "tuning")  # other folders in the folder of a study
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_+.-]{0,99}")  # a folder's name; two of them still fit into one


class Named(NamedTuple):
    """An arm or a condition: settings, by whole keys, that differ from the study's."""

    name: str
    changes: dict[str, Any]


class Study(NamedTuple):
    """The arms, the conditions of their comparisons, and the seeds that pair them."""

    experiment: str
    conditions: list[Named]
    arms: list[Named]
    seeds: list[int]
    reference: str
    metric: dict[str, str]  # by the condition's name
    threshold: dict[str, float]  # 0: no threshold
    margin: dict[str, float]  # 0: equality is never claimed
    looks: int  # how often a verdict may be read, over more seeds each time
    correction: str = "study"  # or "condition": the family of comparisons for which intervals hold together
    grid: Mapping[str, Mapping[str, Sequence]] = {}  # arm -> setting -> the values from which the arm has the best
    tune_seeds: Sequence[int] = ()


class Run(NamedTuple):
    """One run of a study."""

    condition: str
    arm: str
    seed: int
    settings: config.Settings

    @property
    def name(self) -> str:
        """Its folder inside the study's."""
        return f"{self.condition}/{self.arm}/seed_{self.seed}"

    @property
    def place(self) -> tuple[str, str]:
        """The condition and the arm. Runs of one place share their data."""
        return self.condition, self.arm

    @property
    def kind(self) -> str:
        """The beginning of the names of its programs' checkpoints."""
        return f"{self.condition}_{self.arm}"


class Program(NamedTuple):
    """Runs that are trained together."""

    runs: list[Run]
    tuning: bool = False  # trained and evaluated on parts of the training part
    spread: int = 1  # devices that share its rows

    @property
    def rows(self) -> list[Run]:
        """The runs, and the last one again until all devices have the same number of rows."""
        return self.runs + self.runs[-1:] * (-len(self.runs) % self.spread)

    @property
    def numbers(self) -> dict[str, np.ndarray]:
        """The values of those NUMBERS that differ between rows."""
        values = [config.flat(run.settings.to_dict()) for run in self.rows]
        columns = {key: np.array([run_values[key] for run_values in values], np.float32) for key in NUMBERS}
        return {key.split(".")[1]: column_R for key, column_R in columns.items() if np.ptp(column_R) > 0}

    @property
    def name(self) -> str:
        """The condition (omitted if the study has only one), the arms and the number of seeds, as a label.

        An arm that occurs with several numbers is followed by their count: "rope (3 values) x 5 seeds".
        """
        values = Counter(arm.partition(VALUES)[0] for arm in dict.fromkeys(run.arm for run in self.runs))
        arms = ", ".join(f"{arm} ({n} values)" if n > 1 else arm for arm, n in values.items())
        condition = "" if self.runs[0].condition == ONLY else f"{self.runs[0].condition}: "
        n = len({run.seed for run in self.runs})
        return f"{condition}{arms} x {n} seed{'s' * (n > 1)}"

    @property
    def folder(self) -> str:
        """The name of its checkpoints' folder, with a checksum of all settings that must not change in a resume."""
        lasting: list = []
        for run in self.runs:
            values = config.flat(run.settings.to_dict())  # train.steps counts: the learning rate depends on it
            fixed = {key: x for key, x in values.items() if key == "train.steps" or not workdir.may_change(key)}
            lasting.append([run.name, fixed])
        lasting += [len(self.rows)] if len(self.rows) > len(self.runs) else []
        return f"{self.runs[0].kind}_{zlib.crc32(json.dumps(lasting, sort_keys=True).encode()):08x}"


@contextlib.contextmanager
def naming(owner: str) -> Iterator[None]:
    """Begin the message of a UserError with the condition or arm that has caused it."""
    try:
        yield
    except errors.UserError as error:
        raise errors.UserError(f"in {owner}: {error}") from error


def read(settings: config.Settings) -> Study:
    """Read the study of a config. Raises UserError for invalid arms, conditions, seeds, metrics or values to tune."""
    s = settings.study
    arms = _read_named("study.arms", s.arms)
    conditions = _read_named("study.conditions", s.conditions) or [Named(ONLY, {})]
    config.at_least(1, {"study.looks": s.looks})
    sections = {condition.name: _read_condition(settings, condition) for condition in conditions}
    common = _read_grid(TUNE, s.tune)
    grid = {arm.name: common | _read_grid(f"arm {arm.name}: {TUNE}", arm.changes.get(TUNE, [])) for arm in arms}
    if fault := next(_find_faults(settings, arms, grid), None):
        raise errors.UserError(fault)
    return Study(
        experiment=s.experiment,
        conditions=conditions,
        arms=arms,
        seeds=list(s.seeds),
        reference=arms[-1].name,
        metric={name: section.metric for name, section in sections.items()},
        threshold={name: section.threshold for name, section in sections.items()},
        margin={name: section.margin for name, section in sections.items()},
        looks=s.looks,
        grid=grid if any(grid.values()) else {},
        tune_seeds=list(s.tune_seeds) if any(grid.values()) else (),
    )


def _read_condition(settings: config.Settings, condition: Named) -> config.Settings:
    """Return the section `study` of the settings, with the metric, threshold and margin that this condition changes.

    Raises UserError for a wrong metric or margin.
    """
    changes = {key: value for key, value in condition.changes.items() if key in OWN}
    with naming(f"condition {condition.name}") if changes else contextlib.nullcontext():
        section = settings.replace(changes).study
        if not section.metric.startswith(run_plan.EVAL):
            raise errors.UserError(f'study.metric = "{section.metric}" must begin with {run_plan.EVAL}, as eval/loss')
        checkpoint.check_best(section.metric, key="study.metric")
        config.at_least(0, {"study.margin": section.margin})
    return section


def _find_faults(settings: config.Settings, arms: Sequence[Named], grid: Mapping[str, Mapping]) -> Iterator[str]:
    """Yield a sentence for each fault of arms, seeds and tuning. Raises UserError for seeds out of range."""
    s, tunes = settings.study, any(grid.values())
    if len(arms) < 2:
        yield 'a study compares at least two study.arms, as [["tied", {"model.score": "tied"}], ...]'
    for key, seeds in {"study.seeds": s.seeds, "study.tune_seeds": s.tune_seeds if tunes else [0]}.items():
        if not seeds or any(type(seed) is not int for seed in seeds) or len(set(seeds)) < len(seeds):
            yield f"{key} must be different integers, and {config.format_value(seeds)} are not"
        for seed in seeds:
            config.check_seed(seed)
    if not tunes and [*s.tune_seeds] != settings.defaults()["study.tune_seeds"]:
        yield f"study.tune_seeds = {s.tune_seeds} has no effect without values in {TUNE}"
    for seed in sorted({*s.seeds} & {*s.tune_seeds}) if tunes else ():
        yield f"study.tune_seeds must differ from study.seeds, and {seed} is in both"
    for arm in arms:
        for key in sorted(grid[arm.name].keys() & arm.changes.keys()):
            yield f"arm {arm.name} sets {key}, which {TUNE} would choose: leave one of them out"


def _pairs(key: str, values: Any, kind: type | UnionType, example: str) -> Iterator[tuple[str, Any]]:
    """Yield the pairs of a name and a value of this type. Raises UserError for anything else, and for an empty list."""
    for value in values:
        pair = isinstance(value, list | tuple) and len(value) == 2
        if not pair or not isinstance(value[0], str) or not isinstance(value[1], kind) or value[1] in ([], ()):
            raise errors.UserError(
                f"each entry of {key} must be a pair such as {example}, and {config.format_value(value)} is not"
            )
        yield value[0], value[1]


def _read_grid(key: str, pairs: Any) -> dict[str, list]:
    """Return setting -> the values that are tried, each once."""
    grid: dict[str, list] = {}
    for setting, values in _pairs(key, pairs, list | tuple, '["optim.learning_rate", [0.001, 0.003]]'):
        tried = grid.setdefault(setting, [])
        tried += [x for i, x in enumerate(values) if x not in [*tried, *values[:i]]]
    return grid


def _read_named(key: str, pairs: Any) -> list[Named]:
    """Return the arms or conditions of a config. Raises UserError if a name cannot be a folder's, or comes twice."""
    entries: dict[str, Named] = {}  # by names in lower case: some systems have one folder for "A" and "a"
    for name, changes in _pairs(key, pairs, Mapping, '["tied", {"model.score": "tied"}]'):
        if not _NAME.fullmatch(name) or name.lower() in RESERVED:
            rule = f"choose at most 100 letters, digits and + - . _, and none of {', '.join(RESERVED)}"
            raise errors.UserError(f"{key}: {config.format_value(name)} cannot be the name of a folder: {rule}")
        if earlier := entries.get(name.lower()):
            raise errors.UserError(f'{key} has "{earlier.name}" and "{name}": names must differ, also in lower case')
        entries[name.lower()] = Named(name, dict(changes))
    return list(entries.values())


def runs(
    settings: config.Settings, study: Study, chosen: Mapping[tuple[str, str], dict] = MappingProxyType({})
) -> list[Run]:
    """Return all runs, each with its own config, as it would be trained alone: the study's without its section study.

    chosen: the tuned settings of an arm in a condition.
    """
    plain = {"mesh.seed": settings.defaults()["mesh.seed"], "experiment": study.experiment}
    plain["log"] = [entry for entry in settings.log if entry != log.SYMMETRY]  # the study itself measures symmetry
    every = []
    for condition, arm, seed in itertools.product(study.conditions, study.arms, study.seeds):
        of_condition = {key: value for key, value in condition.changes.items() if key not in OWN}
        of_arm = {key: value for key, value in arm.changes.items() if key != TUNE}
        of_arm |= chosen.get((condition.name, arm.name), {})
        changes = of_condition | of_arm
        with naming(f"condition {condition.name}, arm {arm.name}"):
            shared = [
                f"{key} is the same for a whole study: set it in the config itself"
                for key in changes
                if key.split(".")[0] in SHARED
            ]
            twice = [
                f"the condition and the arm both set {key}: remove one of them" for key in of_condition if key in of_arm
            ]
            if faults := shared + twice:
                raise errors.UserError(faults[0])
            alone = settings.replace(plain | changes | {"seed": seed}, without="study", explicit=changes)
        every.append(Run(condition.name, arm.name, seed, alone))
    return every


def programs(runs: Iterable[Run], *, tuning: bool = False, spread: int = 1) -> list[Program]:
    """Group the runs into programs: those that differ in seeds and NUMBERS only, in their order.

    tuning, spread: of a Program.
    """
    groups: dict[str, list[Run]] = {}
    for run in runs:
        values = config.flat(run.settings.to_dict())
        kind = {key: value for key, value in values.items() if key != "seed" and key not in NUMBERS}
        groups.setdefault(f"{run.condition} {json.dumps(kind, sort_keys=True)}", []).append(run)
    return [Program(group, tuning, spread) for group in groups.values()]

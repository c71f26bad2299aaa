"""A study as its config says it: conditions x arms x seeds, and which of these runs one program trains together."""

import contextlib
import itertools
import json
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from experiments.engine import checkpoint, config, errors, log, loop, workdir

# Settings that are numbers inside a program, by their fields: runs that differ in these alone are runs of one.
NUMBERS = ("optim.learning_rate", "optim.weight_decay", "model.score_std")
OWN = ("study.metric", "study.threshold", "study.margin")  # what a condition may say of itself
TUNE = "study.tune"  # and an arm
VALUES = "@"  # between the name of an arm and the values of which it is to choose
ONLY = "all"  # the condition of a study that names none
TAKEN = (  # what the folder of a study or of a run holds otherwise
    *("checkpoints", "events", "figures", "lock", "config.json", "summary.json", "metrics.jsonl", "maps.npz"),
    *("source", "report.json", "report.md", "report.html", "report.tex", "runs.csv", "plan.jsonl", "tuning"),
)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_+.-]{0,99}")  # two such names still make one of a folder


class Named(NamedTuple):
    """An arm or a condition: settings, by whole keys, that differ from the study's."""

    name: str
    changes: dict[str, Any]


class Study(NamedTuple):
    """What is compared with what."""

    experiment: str
    conditions: list[Named]
    arms: list[Named]
    seeds: list[int]
    reference: str
    metric: dict[str, str]  # by the condition's name
    threshold: dict[str, float]  # 0: none
    margin: dict[str, float]  # 0: equality is never claimed
    looks: int  # how often a verdict may be read, over more seeds each time
    correction: str = "study"  # or "condition": the family of comparisons for which intervals hold together
    grid: Mapping[str, Mapping[str, Sequence]] = {}  # by the arm's name: of which values of a setting it has the best
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
    def kind(self) -> str:
        """What the names of its programs' checkpoints begin with."""
        return f"{self.condition}_{self.arm}"


class Program(NamedTuple):
    """Runs that are trained together."""

    runs: list[Run]
    tuning: bool = False  # trained and evaluated on parts of the training part
    spread: int = 1  # devices that share its rows

    @property
    def rows(self) -> list[Run]:
        """The runs, and the last one again until the devices have as many rows each."""
        return self.runs + self.runs[-1:] * (-len(self.runs) % self.spread)

    @property
    def numbers(self) -> dict[str, np.ndarray]:
        """Those of NUMBERS in which the rows differ."""
        values = [config.flat(run.settings.to_dict()) for run in self.rows]
        columns = {key: np.array([of[key] for of in values], np.float32) for key in NUMBERS}
        return {key.split(".")[1]: column_R for key, column_R in columns.items() if np.ptp(column_R) > 0}

    @property
    def name(self) -> str:
        """For people: arms may be several, where they differ in numbers only."""
        values = Counter(arm.partition(VALUES)[0] for arm in dict.fromkeys(run.arm for run in self.runs))
        arms = ", ".join(f"{arm} ({n} values)" if n > 1 else arm for arm, n in values.items())
        condition = "" if self.runs[0].condition == ONLY else f"{self.runs[0].condition}: "
        n = len({run.seed for run in self.runs})
        return f"{condition}{arms} x {n} seed{'s' * (n > 1)}"

    @property
    def folder(self) -> str:
        """The name of its checkpoints' folder: another one for other runs, the same where they may be resumed."""
        lasting = []
        for run in self.runs:
            every = config.flat(run.settings.to_dict())  # what goes on has its steps, with which the rate falls
            same = {key: x for key, x in every.items() if key == "train.steps" or not workdir.may_change(key)}
            lasting.append([run.name, same])
        lasting += [len(self.rows)] if len(self.rows) > len(self.runs) else []
        return f"{self.runs[0].kind}_{zlib.crc32(json.dumps(lasting, sort_keys=True).encode()):08x}"


@contextlib.contextmanager
def naming(where: str) -> Iterator[None]:
    """Within this, a UserError says whose it is."""
    try:
        yield
    except errors.UserError as error:
        raise errors.UserError(f"{where}: {error}") from error


def read(settings: config.Settings) -> Study:
    """The study of a config. UserError for arms, conditions, seeds or a metric that are none."""
    s = settings.study
    arms, conditions = _named("study.arms", s.arms), _named("study.conditions", s.conditions) or [Named(ONLY, {})]
    if len(arms) < 2:
        raise errors.UserError('a study compares at least two study.arms, as [["tied", {"model.score": "tied"}], ...]')
    if s.looks < 1:
        raise errors.UserError(f"study.looks must be at least 1, and {s.looks} is not")
    metric, threshold, margin = {}, {}, {}
    for condition in conditions:
        changes = {key: value for key, value in condition.changes.items() if key in OWN}
        with naming(f"condition {condition.name}") if changes else contextlib.nullcontext():
            own = settings.changed(changes).study
            if not own.metric.startswith(loop.EVAL):
                raise errors.UserError(f'study.metric = "{own.metric}" must be of an evaluation, as {loop.EVAL}loss')
            checkpoint.check_best(own.metric, key="study.metric")
            if own.margin < 0:
                raise errors.UserError(f"study.margin must be at least 0, and {own.margin:g} is not")
        metric[condition.name], threshold[condition.name] = own.metric, own.threshold
        margin[condition.name] = own.margin
    _check_seeds("study.seeds", s.seeds)
    own = metric, threshold, margin
    made = Study(s.experiment, conditions, arms, list(s.seeds), arms[-1].name, *own, s.looks)
    whole = _grid(TUNE, s.tune)
    grid = {arm.name: whole | _grid(f"arm {arm.name}: {TUNE}", arm.changes.get(TUNE, [])) for arm in arms}
    if not any(grid.values()):
        if [*s.tune_seeds] != settings.defaults()["study.tune_seeds"]:
            raise errors.UserError(f"study.tune_seeds = {s.tune_seeds} is for {TUNE}, which tries no values here")
        return made
    _check_seeds("study.tune_seeds", s.tune_seeds)
    if both := sorted({*s.seeds} & {*s.tune_seeds}):
        raise errors.UserError(f"study.tune_seeds must be others than study.seeds, and {both[0]} is in both")
    for arm in arms:
        if both := sorted(grid[arm.name].keys() & arm.changes.keys()):
            own = f'give this arm other values, {{"{TUNE}": [["{both[0]}", [...]]]}}, or leave one of the two out'
            raise errors.UserError(f"arm {arm.name} sets {both[0]}, which {TUNE} would choose: {own}")
    return made._replace(grid=grid, tune_seeds=list(s.tune_seeds))


def _check_seeds(key: str, seeds: Any) -> None:
    if not seeds or any(type(seed) is not int for seed in seeds) or len(set(seeds)) < len(seeds):
        raise errors.UserError(f"{key} must be different whole numbers, and {config.shown(seeds)} are not")
    for seed in seeds:
        config.check_seed(seed)


def _grid(key: str, given: Any) -> dict[str, list]:
    """The values that are tried, by the settings' names."""
    found: dict[str, list] = {}
    for one in given:
        pair = isinstance(one, list | tuple) and len(one) == 2 and isinstance(one[0], str)
        if not pair or not isinstance(one[1], list | tuple) or not one[1] or one[0] in found:
            example = '[["optim.learning_rate", [0.001, 0.003]], ...], each setting once'
            raise errors.UserError(f"{key} is a list of settings and values, {example}; {config.shown(one)} is wrong")
        found[one[0]] = [x for i, x in enumerate(one[1]) if x not in one[1][:i]]  # lists too
    return found


def _named(key: str, given: Any) -> list[Named]:
    """The arms or conditions of a config, checked."""
    found: dict[str, Named] = {}  # by their names in small letters, in which they must differ
    for one in given:
        whole = isinstance(one, list | tuple) and len(one) == 2 and isinstance(one[1], Mapping)
        if not whole or not all(isinstance(name, str) for name in (one[0], *one[1])):
            raise errors.UserError(
                f'{key} is a list of pairs [name, {{"model.score": "tied"}}], and {config.shown(one)} is none'
            )
        name = one[0]
        if not _NAME.fullmatch(name):
            reason = "cannot be the name of a folder: choose at most 100 letters, digits and + - . _"
            raise errors.UserError(f"{key}: {config.shown(name)} {reason}")
        if name.lower() in TAKEN:
            raise errors.UserError(f'{key}: "{name}" is what something else in the folder of a study is called')
        if other := found.get(name.lower()):
            twice = "twice" if other.name == name else f'and "{other.name}", which are one folder on some systems'
            raise errors.UserError(f'{key} has "{name}" {twice}')
        found[name.lower()] = Named(name, dict(one[1]))
    return list(found.values())


def runs(
    settings: config.Settings, study: Study, chosen: Mapping[tuple[str, str], dict] = MappingProxyType({})
) -> list[Run]:
    """All runs, each with a config of its own, as it would be trained alone: the study's without the study.

    chosen: settings of an arm in a condition that were tuned.
    """
    plain = {"mesh.seed": settings.defaults()["mesh.seed"], "experiment": study.experiment}
    plain["log"] = [one for one in settings.log if one != log.SYMMETRY]  # which the study itself looks at
    every = []
    for condition, arm, seed in itertools.product(study.conditions, study.arms, study.seeds):
        of_condition = {key: value for key, value in condition.changes.items() if key not in OWN}
        of_arm = {key: value for key, value in arm.changes.items() if key != TUNE}
        of_arm |= chosen.get((condition.name, arm.name), {})
        for where, changes in ((f"condition {condition.name}", of_condition), (f"arm {arm.name}", of_arm)):
            for key in changes:
                if key.split(".")[0] in ("study", "mesh", "seed", "experiment", "log"):
                    raise errors.UserError(f"{where}: {key} is the same for a whole study")
        if both := sorted(of_condition.keys() & of_arm.keys()):
            raise errors.UserError(f"condition {condition.name} and arm {arm.name} both set {', '.join(both)}")
        with naming(f"condition {condition.name}, arm {arm.name}"):
            own = of_condition | of_arm
            alone = settings.changed(plain | own | {"seed": seed}, without="study", given=own)
        every.append(Run(condition.name, arm.name, seed, alone))
    return every


def programs(runs: Iterable[Run], *, tuning: bool = False, spread: int = 1) -> list[Program]:
    """The runs, with those together that differ in seeds and NUMBERS only, in the order in which they come.

    tuning, spread: of a Program.
    """
    groups: dict[str, list[Run]] = {}
    for run in runs:
        values = config.flat(run.settings.to_dict())
        kind = {key: value for key, value in values.items() if key != "seed" and key not in NUMBERS}
        groups.setdefault(f"{run.condition} {json.dumps(kind, sort_keys=True)}", []).append(run)
    return [Program(group, tuning, spread) for group in groups.values()]

"""Sweeps: a study that trains every combination of some settings' values, with the seed of the config.

python launch.py --config configs/vit.py --sweep optim.learning_rate=1e-3,3e-3 --sweep model.D=64,128
"""

import copy
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import ml_collections

from experiments.config import errors, files as config_files, settings as configs
from experiments.engine import run as runs
from experiments.studies import study as studies

EXAMPLE = "optim.learning_rate=1e-3,3e-3"
Grid = Mapping[str, Sequence[Any]]  # setting -> its values, or their texts


def parse(texts: Sequence[str]) -> Grid | None:
    """Return {"optim.learning_rate": ["1e-3", "3e-3"]} for ["optim.learning_rate=1e-3,3e-3"]; None without texts.

    Raises UserError for a text without "=".
    """
    grid: dict[str, list] = {}
    for text in texts:
        key, equals, values = text.partition("=")
        errors.refuse((not equals, f"--sweep={text} has no values. Write --sweep={EXAMPLE}"))
        grid[key] = grid.get(key, []) + values.split(",")
    return grid or None


def load_settings(path: str, changes: Mapping[str, Any], grid: Grid | None) -> configs.Settings:
    """Return the settings of a config file with these changes; with a grid, the settings of the sweep, a study."""
    return config_files.load_settings(path, changes, functools.partial(make_study, grid) if grid is not None else None)


def make_study(grid: Grid, config: ml_collections.ConfigDict) -> ml_collections.ConfigDict:
    """Return the config of a study with an arm for each combination of the grid's values; values of seed are its seeds.

    Raises UserError if this is only one run, or if `config` is a study.
    """
    errors.refuse(("study" in config, "a sweep of a study is not possible: add arms to study.arms, or use study.tune"))
    values: dict[str, list] = {key: [] for key in grid}
    for key, texts in grid.items():
        for text in texts:
            changed = copy.deepcopy(config)
            configs.assign(changed, key, text)  # in the type of the setting
            value = configs.flat(changed)[key]
            values[key] += [value] * (value not in values[key])
    seeds = values.pop("seed", [config.seed])
    combinations = [dict(zip(values, row, strict=True)) for row in itertools.product(*values.values())]
    few = f"the sweep of {', '.join(grid) or 'no setting'} has fewer than two combinations"
    errors.refuse((len(combinations) * len(seeds) < 2, f"{few}. It needs two values of a setting: {EXAMPLE}"))
    study = configs.get_base("ablation", of=config)
    study.log, study.seed = config.log, configs.get_base().seed
    # The first combination is the reference, so that it stays when values are added.
    arms = [(studies.name_values(entry) or studies.ALONE, entry) for entry in [*combinations[1:], combinations[0]]]
    study.study.update(arms=arms, seeds=seeds, keep_weights=True)
    return study


def compare(settings: configs.Settings, result: runs.Result) -> runs.Result:
    """Compare the runs of a finished sweep, unless only their seeds differ. Return its result with the figure added."""
    from experiments.tools import compare as comparing  # imports matplotlib, which takes a second

    study = studies.read(settings)
    if len(study.arms) < 2:
        return result
    in_order = study._replace(arms=[study.arms[-1], *study.arms[:-1]])  # of the grid
    folders = [result.folder / run.name for run in studies.runs(settings, in_order)]
    print()
    figure = comparing.write(folders, settings.study.metric, result.folder / "compare.png")
    return result._replace(figures=[*result.figures, figure])

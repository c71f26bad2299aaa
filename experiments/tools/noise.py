"""Measure the noise of a config: how far apart are runs that differ only in the seed (an A/A test)?

python -m experiments.tools.noise --config=configs/shakespeare_speedrun.py --runs=8 --workdir=runs/noise
noise.run("configs/shakespeare_speedrun.py", runs=8, set=("train.steps=100",))

The runs are rows of one program, as those of `launch.py --sweep seed=0,1,...`. The same command with the same workdir
trains only the runs that are missing, also with more runs.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

import launch
from experiments import command as commands
from experiments.config import errors
from experiments.folder import log
from experiments.studies import inference, sentences, tables

SIZES = (1, 5, 10)  # runs of each arm
HELP = {
    "config": "The config file.",
    "runs": "The number of runs, at least three.",
    "metric": "The metric whose final values are measured.",
    "workdir": "The folder of the runs, new or to resume. Default: runs/<config>/<time>.",
}


NOTE = """\
by chance: the difference of two equal arms is larger in 5 % of comparisons. shown: a true difference of this size is
shown with probability 0.8; the last two columns are for the ends of the SD's interval. One run of each arm has no
interval of its own: it is judged by this SD. More are judged by theirs, with Welch's t or in pairs that do not
correlate. Pairs of the same seed with correlation r need sqrt(1 - r) times as much."""


class Noise(NamedTuple):
    """The sample SD of a metric over single runs, and what it means for arms with n = 1, 5, 10 runs each."""

    sd: float
    interval: tuple[float, float]  # 95 %, of the SD
    by_chance: dict[int, float]  # n -> the difference that two equal arms exceed in 5 % of comparisons
    shown: dict[int, float]  # n -> the true difference that a comparison detects with probability 0.8


def run(
    config: commands.Path,
    *,
    runs: int = 8,
    metric: str = "eval/loss",
    set: tuple[str, ...] = (),
    workdir: commands.Path = "",
    device: str = "any",
) -> Noise:
    """Train runs that differ by their seed alone, and print and return the SD of the metric and what it means.

    Raises UserError if fewer than three have a finite metric.
    """
    commands.require("--config=FILE", config)
    errors.refuse((runs < inference.FEWEST, f"--runs={runs} must be at least {inference.FEWEST}"))
    changes = commands.parse_changes(set) | {"study.metric": metric, "study.keep_weights": False}
    result = launch.sweep(config, {"seed": range(runs)}, workdir or None, device=device, **changes)
    values = [*result.summary["conditions"][0]["arms"][0]["values"].values()]
    few = f"{len(values)} of {runs} runs have a finite {metric}, and the SD needs {inference.FEWEST}"
    errors.refuse((len(values) < inference.FEWEST, few))
    noise = measure(values)
    log.say(f"\n{describe(metric, values, runs - len(values), noise)}", "\n")
    return noise


def measure(values: Sequence[float]) -> Noise:
    """Compute the noise of R >= 3 independent normal values.

    The mean of n runs minus that of n others has the SD sd sqrt(2 / n). Student's t judges this difference with n - 1
    degrees of freedom, as for n pairs. For n = 1, which has no SD of its own, t has the R - 1 degrees of `sd`.
    The interval of the SD is that of chi squared with R - 1 degrees.
    """
    R, sd = len(values), float(np.std(values, ddof=1))
    low, high = (sd * math.sqrt((R - 1) / stats.chi2.ppf(p, R - 1)) for p in (0.975, 0.025))
    by_chance, shown = {}, {}
    for n in SIZES:
        judged = R if n == 1 else n
        by_chance[n] = float(stats.t.isf((1 - inference.LEVEL) / 2, judged - 1)) * sd * math.sqrt(2 / n)
        shown[n] = inference.detectable(judged, 1) * math.sqrt(judged) * sd * math.sqrt(2 / n)
    return Noise(sd, (low, high), by_chance, shown)


def describe(metric: str, values: Sequence[float], n_diverged: int, noise: Noise) -> str:
    """Return the table of the noise, below the mean and the SD of the runs, and above NOTE, which explains it."""
    sd, low, high, mean = map(sentences.format_number, (noise.sd, *noise.interval, float(np.mean(values))))
    lines = [f"{metric} of {len(values)} equal runs: mean {mean}, SD {sd} (95 % interval {low} to {high})"]
    lines += [f"left out, because they diverged: {n_diverged} runs"] * bool(n_diverged)
    two = "the runs are in two clusters, which an SD does not describe: compare how many are in each"
    lines += [two] * (inference.plateau(values) is not None)
    head = ["runs of each arm", "by chance up to", "shown from", "if the SD is", "to"]
    rows = []
    for n in SIZES:
        ends = (noise.shown[n] * end / noise.sd if noise.sd else 0.0 for end in noise.interval)
        rows.append([str(n), *map(sentences.format_number, (noise.by_chance[n], noise.shown[n], *ends))])
    return "\n".join([*lines, "", tables.align(tables.Table(head, rows)), "", NOTE])


if __name__ == "__main__":
    commands.main(run, HELP)

"""Compare numbers that any program has measured, with the intervals, sentences and report of a study.

python -m experiments.tools.verdict results.csv --metric=loss --better=less --workdir=DIR
verdict.run(["results.csv"], metric="loss", better="less", workdir="DIR")

The table has a row for each run, with the columns arm, seed and metrics. The columns condition (separate comparisons),
steps (of training) and diverged_at are optional, so runs.csv of a study is such a table. Arms that share seeds with the
reference are compared by pairs of the same seed. Without a common seed, or with an empty column, Welch's t compares
their means. An empty or nan metric is a diverged run.
"""

import functools
import hashlib
import itertools
import math
import pathlib
import re
from collections.abc import Mapping, Sequence

from experiments import command as commands
from experiments.config import by_name, disk, errors, settings as configs
from experiments.data import files as data_files, tables as data_tables
from experiments.folder import log
from experiments.studies import plan, results, runs as study_runs, scaling, sentences, statistics, study as studies

HELP = {
    "metric": "The column to compare. Not needed if there is only one.",
    "better": "Which values of the metric are better: less or more. Names such as eval/loss or accuracy say it.",
    "reference": "The arm that the others are compared with. Default: the last one in the table.",
    "successive": "Compare each arm with the one before it in the table, in place of one reference.",
    "margin": "The verdict is equal if the interval of a difference lies within plus or minus this. 0: never.",
    "looks": "Planned number of verdicts, each over more runs than the last. More verdicts widen the intervals.",
    "correction": "Correct the intervals for all comparisons of the table, or of each condition: study or condition.",
    "workdir": "A new folder for the report. Without it the verdict is only printed.",
}
NO_METRIC = ("arm", "seed", "condition", "steps", "params", "flops_per_token", "seconds", "diverged_at")
BETTER = {"loss": "less", "error": "less", "perplexity": "less", "accuracy": "more"}  # word of a metric's name
# Words of a metric's name that do not change which values are better.
NEUTRAL = """train training val valid validation dev test eval evaluation held out final last best mean avg average
median top rate cross entropy token word class balanced relative absolute squared square mse rmse mae per""".split()
PERCENT = 20  # a value above 1 that is more than this times all values below 1 is a percentage among fractions
NEW, OLD = "new", "old"  # the arms of each condition of --successive


def run(
    table: Sequence[commands.Path],
    *,
    metric: str = "",
    better: str = "",
    reference: str = "",
    successive: bool = False,
    margin: float = 0.0,
    looks: int = 1,
    correction: str = "study",
    workdir: commands.Path = "",
) -> results.Analysis:
    """Print the verdict, write the report, and return the analysis of the one CSV file in `table`."""
    errors.refuse(
        (len(table) != 1, "name one table: python -m experiments.tools.verdict results.csv --metric=loss"),
        (successive and reference, f"--reference={reference} has no use with --successive. Leave one of them out"),
    )
    by_name.choose("correction", correction, {"study": None, "condition": None})
    configs.at_least(1, {"--looks": looks})
    configs.at_least(0, {"--margin": margin})
    file, folder = pathlib.Path(table[0]), disk.check_new(pathlib.Path(workdir), "--workdir") if str(workdir) else None
    runs, metric = read(file, metric, better)
    source = f"{len(runs)} rows of {file.name}, SHA-256 {hashlib.sha256(disk.read_bytes(file)).hexdigest()}"
    runs = pair_successive(runs) if successive else runs
    study = make_study(file.name, runs, metric, OLD if successive else reference, margin)
    study = study._replace(looks=looks, correction=correction)
    conditions = statistics.analyse(study, runs)
    laws = [] if successive else scaling.families(conditions)
    analysis = results.Analysis(runs, conditions, plan.NOTHING, laws)
    log.say(results.format_text(study, analysis), "\n")
    pairs = [(arm, condition.base) for condition in conditions for arm in condition.compared if arm.difference.by_seed]
    if count := sum(len(arm.values.keys() ^ base.values.keys()) for arm, base in pairs):
        log.say(f"\nleft out of the paired differences: {count} runs whose seed has no result in the other arm", "\n")
    if folder:
        with disk.writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            files = results.write_files(folder, study, analysis, session={"source": source})
        log.say("\n".join(["", *(f"  {path}" for path in files)]), "\n")
    return analysis


def read(file: pathlib.Path, metric: str, better: str) -> tuple[list[study_runs.Run], str]:
    """Return the rows as finished runs, and the metric ("": the only one). Print how the table is read."""
    runs: dict[tuple[str, str, int], study_runs.Run] = {}
    spellings: dict[str, set[str]] = {}  # arm -> its names in the table
    with disk.reading(file):
        for place, named_cells in data_tables.read_cells(data_files.on_disk(file)):
            cells = {read_name(name): cell for name, cell in named_cells.items()}
            names = [name for name in cells if name not in NO_METRIC]
            metric = metric or (names[0] if len(names) == 1 else "")
            if len(cells) < len(named_cells):
                raise ValueError(f"two columns are the same: {', '.join(named_cells)}. Rename one of them.")
            if "arm" not in cells or metric not in {*cells} - {"arm", "seed", "condition"}:
                problem = f"--metric={metric} must be one of the columns" if "arm" in cells else "no column arm among"
                raise ValueError(f"{problem} {', '.join(names)}")
            run = read_run(place, cells, metric, choose_direction(metric, better))
            if run[:3] in runs:
                raise ValueError(f"{place}: arm {run.arm} has seed {run.seed} twice in condition {run.condition}")
            runs[run[:3]] = run
            spellings.setdefault(run.arm, set()).add(cells["arm"])
    errors.refuse((len(spellings) < 2, f"{file} has {len(spellings)} of the two or more arms that a comparison needs"))
    check_scale(metric, [run.value(metric) for run in runs.values()])
    direction = choose_direction(metric, better)
    other = {"less": "more", "more": "less"}[direction]
    lines = [f"{metric}: {sentences.COMPARATIVES[direction]} is better. --better={other} would say the opposite."]
    diverged = sum(run.value(metric) is None for run in runs.values())
    lines += [f"rows without a finite {metric}, which count as diverged runs: {diverged:,}"] * bool(diverged)
    lines += [f"one arm, {arm!r}: {sorted(written)}" for arm, written in spellings.items() if len(written) > 1]
    log.say("\n".join([*lines, ""]), "\n")
    return [*runs.values()], metric


@functools.cache  # 400,000 rows have few names
def read_name(name: str) -> str:
    """Return the name of a column: one of NO_METRIC in any case and with spaces around it, or a metric."""
    known = name.strip().lower().removeprefix("random_").removeprefix("rng_")
    return known if known in NO_METRIC else name.strip()


@functools.cache
def choose_direction(metric: str, better: str) -> str:
    """Return "less" or "more". Raises UserError if neither --better nor the metric's name says it.

    The name says it by one whole word of BETTER, if all its other words are in NEUTRAL: accuracy_drop says nothing.
    """
    words = [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", metric)]
    known = [BETTER.get(word, "") for word in words if word not in NEUTRAL]
    better = better or (known[0] if len(known) == 1 else "")
    rule = f"--metric={metric} does not say which values are better. Add --better=less or --better=more"
    errors.refuse((better not in statistics.BEST, rule if not better else f"--better={better} must be less or more"))
    return better


def check_scale(metric: str, values: Sequence[float | None]) -> None:
    """Raise UserError if an accuracy or an error is a fraction in some rows and a percentage in others."""
    small = max((x for x in values if x and 0 < x <= 1), default=math.inf)
    large = min((x for x in values if x and x > 1), default=0.0)
    mixed = re.search("accuracy|error", metric.lower()) and large > PERCENT * small
    ranges = f"fractions, up to {small}, and percentages, from {large}"
    errors.refuse((mixed, f"{metric} has {ranges}. Write all of its values in one of the two"))


def read_run(place: str, cells: Mapping[str, str], metric: str, better: str) -> study_runs.Run:
    """Return the run in a row. Minus its line stands for a missing seed. Raises ValueError if a cell is invalid."""
    names = {"seed", "steps", "diverged_at", "params", "flops_per_token", metric} & cells.keys()
    numbers: dict[str, float] = {}
    for name in names | {name for name in cells if name.startswith("eval/")}:
        try:
            numbers[name] = float(cells[name] or "nan")
        except ValueError as error:
            raise ValueError(f"{place}: {name} = {cells[name]!r} is not a number") from error
    known = {name: int(x) if x.is_integer() else x for name, x in numbers.items() if not math.isnan(x)}
    counts = [known.get(name, 0) for name in ("seed", "steps", "diverged_at")]
    arm, condition = (" ".join(cells.get(name, "").split()) for name in ("arm", "condition"))
    if not arm or any(type(x) is not int or x < 0 for x in counts):
        raise ValueError(f"{place}: arm must be a name; seed, steps and diverged_at whole numbers from 0, or empty")
    seed = known.pop("seed", -int(re.sub(r"\D", "", place)))
    summary = {metric: None} | known | {"better": {metric.rpartition("/")[2]: better}}
    return study_runs.Run(condition or studies.ONLY, arm, seed, int(known.get("steps", 0)), summary, rows=[])


def pair_successive(runs: Sequence[study_runs.Run]) -> list[study_runs.Run]:
    """Return the runs in a condition for each arm (NEW) and the one before it (OLD): most of them twice."""
    paired, several = [], len({run.condition for run in runs}) > 1
    arms, conditions = dict.fromkeys(run.arm for run in runs), dict.fromkeys(run.condition for run in runs)
    for condition, (old, new) in itertools.product(conditions, itertools.pairwise(arms)):
        place, names = f"{new} after {old}" + f" in {condition}" * several, {old: OLD, new: NEW}
        subset = (run for run in runs if run.condition == condition and run.arm in names)
        paired += [run._replace(condition=place, arm=names[run.arm]) for run in subset]
    return paired


def make_study(name: str, runs: Sequence[study_runs.Run], metric: str, reference: str, margin: float) -> studies.Study:
    """Return the study that has these runs. Raises UserError if the reference ("": the last arm) is missing."""
    seeds: dict[tuple[str, str], set[int]] = {}
    for run in runs:
        seeds.setdefault((run.condition, run.arm), set()).add(run.seed)
    conditions, arms = (list(dict.fromkeys(names)) for names in zip(*seeds, strict=True))
    reference = reference or arms[-1]
    by_name.choose("reference", reference, dict.fromkeys(arms))
    common = set.intersection(*seeds.values())
    is_complete = len(seeds) == len(arms) * len(conditions) and all(common == each for each in seeds.values())
    conditions = [studies.Condition(condition, {}, metric, margin=margin) for condition in conditions]
    arms = [studies.Arm(arm, {}) for arm in sorted(arms, key=lambda arm: arm == reference)]
    return studies.Study(name, conditions, arms, seeds=sorted(common) if is_complete else [])


if __name__ == "__main__":
    commands.main(run, HELP, positional="table")

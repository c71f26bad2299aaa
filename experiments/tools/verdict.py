"""Compare numbers that any program has measured, with the intervals, sentences and report of a study.

python -m experiments.tools.verdict results.csv --metric=loss --better=less --workdir=DIR
verdict.run(["results.csv"], metric="loss", better="less", workdir="DIR")

The table has a row for each run, with the columns arm (or model, method, ...), seed and metrics. The columns condition
(separate comparisons), steps (of training), state and diverged_at are optional. With --wide, the table has a row for
each seed and a column for each arm. All that is read in another way than it is written is printed.

Arms that share seeds with the reference are compared by pairs of the same seed. Without common seeds, for example if
the column seed is empty, Welch's t compares the means of the arms. A metric that is nan or inf is a diverged run, an
empty cell a missing one.
"""

import hashlib
import itertools
import pathlib
from collections.abc import Sequence

from experiments import command as commands
from experiments.config import by_name, disk, errors, settings as configs
from experiments.folder import log
from experiments.studies import plan, results, run_table, runs as study_runs, scaling, statistics, study as studies

HELP = {
    "metric": "The column to compare. Not needed if there is only one.",
    "better": "Which values of the metric are better: less or more. Names such as eval/loss or accuracy say it.",
    "wide": "Each column except seed, condition and steps is an arm. --metric says what their cells are.",
    "reference": "The arm that the others are compared with. Default: baseline, reference or control; else the first.",
    "successive": "Compare each arm with the one before it in the table, in place of one reference.",
    "margin": "The verdict is equal if the interval of a difference lies within plus or minus this. 0: never.",
    "looks": "Planned number of verdicts, each over more runs than the last. More verdicts widen the intervals.",
    "correction": "Correct the intervals for all comparisons of the table, or of each condition: study or condition.",
    "workdir": "A new folder for the report. Without it the verdict is only printed.",
}
REFERENCES = ("baseline", "reference", "control")  # names of arms, in any case
NEW, OLD = "new", "old"  # the arms of each condition of --successive


def run(
    table: Sequence[commands.Path],
    *,
    metric: str = "",
    better: str = "",
    wide: bool = False,
    reference: str = "",
    successive: bool = False,
    margin: float = 0.0,
    looks: int = 1,
    correction: str = "study",
    workdir: commands.Path = "",
) -> results.Analysis:
    """Print the verdict on the one CSV file in `table`, and return its analysis. With workdir, write a report there.

    HELP explains the arguments. Raises UserError if they are invalid.
    """
    errors.refuse(
        (len(table) != 1, "name one table: python -m experiments.tools.verdict results.csv --metric=loss"),
        (successive and reference, f"--reference={reference} has no use with --successive. Leave one of them out"),
    )
    by_name.choose("correction", correction, {"study": None, "condition": None})
    configs.at_least(1, {"--looks": looks})
    configs.at_least(0, {"--margin": margin})
    file, folder = pathlib.Path(table[0]), disk.check_new(pathlib.Path(workdir), "--workdir") if str(workdir) else None
    runs, metric, is_of_study = run_table.read(file, metric, better, wide=wide)
    source = f"{len(runs)} runs of {file.name}, SHA-256 {hashlib.sha256(disk.read_bytes(file)).hexdigest()}"
    if successive:
        runs, reference = pair_successive(runs), OLD
        log.say("Each arm is compared with the one before it in the table.\n", "\n")
    reference = reference or choose_reference([*dict.fromkeys(run.arm for run in runs)], is_of_study)
    runs = sorted(runs, key=lambda run: run.arm == reference)  # so that it is the last arm of runs.csv, as in a study
    study = make_study(file.name, runs, metric, reference, margin)
    study = study._replace(looks=looks, correction=correction)
    conditions = statistics.analyse(study, runs)
    laws = [] if successive else scaling.families(conditions)
    analysis = results.Analysis(runs, conditions, plan.NOTHING, laws)
    log.say(results.format_text(study, analysis), "\n")
    if folder:
        with disk.writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            files = results.write_files(folder, study, analysis, session={"source": source})
        log.say("\n".join(["", *(f"  {path}" for path in files)]), "\n")
    return analysis


def choose_reference(arms: Sequence[str], is_of_study: bool) -> str:
    """Return the name of the arm that the others are compared with, and print why.

    This is the last arm of runs.csv of a study; else the only arm with a name in REFERENCES, or the first arm.
    """
    named, study = [arm for arm in arms if arm.lower() in REFERENCES], "the last arm, as in runs.csv of a study"
    arm, reason = (arms[0], "the first arm in the table") if len(named) != 1 else (named[0], "by its name")
    arm, reason = (arms[-1], study) if is_of_study else (arm, reason)
    log.say(f'reference: "{arm}", {reason}. --reference=ARM chooses another.\n', "\n")
    return arm


def pair_successive(runs: Sequence[study_runs.Run]) -> list[study_runs.Run]:
    """Return the runs in new conditions, "B after A" for each arm B (now called NEW) and the arm A before it (OLD).

    The runs of most arms are in two conditions.
    """
    paired, several = [], len({run.condition for run in runs}) > 1
    arms, conditions = dict.fromkeys(run.arm for run in runs), dict.fromkeys(run.condition for run in runs)
    for condition, (old, new) in itertools.product(conditions, itertools.pairwise(arms)):
        place, names = f"{new} after {old}" + f" in {condition}" * several, {old: OLD, new: NEW}
        subset = (run for run in runs if run.condition == condition and run.arm in names)
        paired += [run._replace(condition=place, arm=names[run.arm]) for run in subset]
    return paired


def make_study(name: str, runs: Sequence[study_runs.Run], metric: str, reference: str, margin: float) -> studies.Study:
    """Return the study that has these runs. Raises UserError if `reference` is none of their arms.

    margin: the largest difference that counts as equal. The study has no seeds unless all arms and conditions have the
    same ones.
    """
    seeds: dict[tuple[str, str], set[int]] = {}
    for run in runs:
        seeds.setdefault((run.condition, run.arm), set()).add(run.seed)
    conditions, arms = (list(dict.fromkeys(names)) for names in zip(*seeds, strict=True))
    by_name.choose("reference", reference, dict.fromkeys(arms))
    common = set.intersection(*seeds.values())
    is_complete = len(seeds) == len(arms) * len(conditions) and all(common == each for each in seeds.values())
    conditions = [studies.Condition(condition, {}, metric, margin=margin) for condition in conditions]
    arms = [studies.Arm(arm, {}) for arm in sorted(arms, key=lambda arm: arm == reference)]
    return studies.Study(name, conditions, arms, seeds=sorted(common) if is_complete else [])


if __name__ == "__main__":
    commands.main(run, HELP, positional="table")

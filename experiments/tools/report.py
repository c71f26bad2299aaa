"""Write the report of a study again without training, or one report of the folders from several machines.

python -m experiments.tools.report --workdir=A
python -m experiments.tools.report --workdir=A --also=B --also=C
python -m experiments.tools.report --workdir=A --correction=condition
report.run("A"), report.run("A", also=("B", "C"))

The folders must be parts of one study, with the same commit and data. Each machine may train a subset of the arms,
conditions and seeds. A run that is in two folders must have the same result in both.
--correction=condition corrects the intervals for the comparisons of each condition, not of the whole study.
"""

import pathlib

from experiments import command as commands
from experiments.config import by_name, disk
from experiments.folder import log
from experiments.studies import results, study as studies

HELP = {
    "workdir": "The study's folder, into which the report is written.",
    "also": "Another folder with a part of the study. Repeat the flag for each folder.",
    "correction": "Correct the intervals for all comparisons of the study, or of each condition: study or condition.",
}


def run(workdir: commands.Path, *, also: tuple[str, ...] = (), correction: str = "study") -> str:
    """Write the report of the study in `workdir`. Print and return its verdict.

    also: further folders with parts of this study. correction: the intervals hold together for all comparisons of the
    "study", or of each "condition".
    """
    folder, *parts = map(pathlib.Path, (workdir, *also))
    by_name.choose("correction", correction, {"study": None, "condition": None})
    study = studies.read(results.combine([folder, *parts]))._replace(correction=correction, also=parts)
    with disk.writing(folder):
        files = results.write_report(folder, correction=correction, also=parts)
    verdict = results.format_text(study, results.analyse(folder, study))
    log.say("\n".join([verdict, "", *(f"  {file}" for file in files)]), "\n")
    return verdict


if __name__ == "__main__":
    commands.main(run, HELP)

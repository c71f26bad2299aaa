"""Write the report of a study again without training, or one report of the folders from several machines.

python -m experiments.tools.report --workdir=DIR
python -m experiments.tools.report --workdir=NEW --merge=DIR --merge=DIR
python -m experiments.tools.report --workdir=DIR --correction=condition
report.run("DIR"), report.run("NEW", merge=("DIR", "DIR"))

The merged folders must be parts of one study, with the same commit and data. Each machine may train a subset of the
arms, conditions and seeds. A run that is in two folders must be equal in both.
"""

import pathlib
import sys

from experiments.engine import by_name, disk, log, workdir as workdirs
from experiments.studies import merge as merging, results, study as studies
from experiments.tools import command as commands

HELP = {
    "workdir": "The study's folder; with --merge a new one.",
    "merge": "A folder with a part of the study. Repeat the flag for each folder.",
    "correction": "Correct the intervals for all comparisons of the study, or of each condition: study or condition.",
}


def run(workdir: commands.Path, *, merge: tuple[str, ...] = (), correction: str = "study") -> str:
    """Write the report. Print and return its verdict."""
    folder = pathlib.Path(workdir)
    by_name.choose("correction", correction, {"study": None, "condition": None})
    with disk.writing(folder):
        if merge:
            merging.merge([pathlib.Path(part) for part in merge], folder)
        results.load_settings(folder)  # raises UserError before anything is written
        with workdirs.lock(folder):
            files = results.write_report(folder, correction=correction)
    verdict = results.format_text(folder, studies.read(results.load_settings(folder))._replace(correction=correction))
    log.say("\n".join([verdict, "", *(f"  {file}" for file in files)]), "\n")
    return verdict


if __name__ == "__main__":
    sys.exit(commands.main(run, HELP, sys.argv))

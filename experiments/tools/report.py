"""The report of a study's folder again, without training; or of the folders of several machines together.

python -m experiments.tools.report --workdir=DIR
python -m experiments.tools.report --workdir=NEW --merge=DIR --merge=DIR
python -m experiments.tools.report --workdir=DIR --correction=condition
report.run("DIR"), report.run("NEW", merge=("DIR", "DIR"))

The merged folders hold parts of one study, at the same commit and on the same data: each machine may train some of its
arms, conditions and seeds. A run that is in two folders must be the same in both.
"""

import pathlib
import sys

from experiments.engine import by_name, disk, log, workdir as workdirs
from experiments.studies import merge as merging, results, study as studies
from experiments.tools import command

HELP = {
    "workdir": "The study's folder; with --merge a new one.",
    "merge": "A folder of the study; several times.",
    "correction": "Intervals that hold for all comparisons of the study together, or of each condition.",
}


def run(workdir: command.Path, *, merge: tuple[str, ...] = (), correction: str = "study") -> str:
    """Write the report, and print and return its verdict."""
    folder = pathlib.Path(workdir)
    by_name.choose("correction", correction, {"study": None, "condition": None})
    with disk.writing(folder):
        if merge:
            merging.merge([pathlib.Path(part) for part in merge], folder)
        results.load_settings(folder)  # raises UserError before anything is written
        with workdirs.hold(folder):
            files = results.write_report(folder, correction=correction)
    verdict = results.format_text(folder, studies.read(results.load_settings(folder))._replace(correction=correction))
    log.say("\n".join([verdict, "", *(f"  {file}" for file in files)]), "\n")
    return verdict


if __name__ == "__main__":
    sys.exit(command.main(run, HELP, sys.argv))

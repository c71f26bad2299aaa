"""The report of a study's folder, written anew without training; or of the folders of several machines together.

python -m experiments.tools.report --workdir=DIR
python -m experiments.tools.report --workdir=NEW --merge=DIR --merge=DIR
python -m experiments.tools.report --workdir=DIR --correction=condition
report.run("DIR"), report.run("NEW", merge=("DIR", "DIR"))

What is merged is the same study, at the same commit and on the same data, but for its arms, conditions and seeds, of
which each machine may train some; a run that is in two folders must be the same in both.
"""

import os
import pathlib
import sys

from experiments.engine import by_name, disk, distributed, log, workdir as workdirs
from experiments.studies import merge as merging, results, study as studies
from experiments.tools import command


@command.tool(
    workdir="The study's folder; with --merge a new one.",
    merge="A folder of the study's; several times.",
    correction="Intervals hold for all comparisons of the study together, or of each condition.",
)
def run(workdir: str | os.PathLike, *, merge: tuple[str, ...] = (), correction: str = "study") -> str:
    """The verdict, which is also printed, with the files."""
    folder = pathlib.Path(workdir)
    by_name.choose("correction", correction, {"study": None, "condition": None})
    with disk.writing(folder):
        if merge:
            merging.merge([pathlib.Path(one) for one in merge], folder)
        results.saved(folder)  # before anything is made there
        with workdirs.hold(folder):
            files = results.write_again(folder, correction=correction)
    verdict = results.text(folder, studies.read(results.saved(folder))._replace(correction=correction))
    log.say("\n".join([verdict, "", *(f"  {file}" for file in files)]), "\n")
    return verdict


if __name__ == "__main__":
    distributed.leave(run.main(sys.argv))

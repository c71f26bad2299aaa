"""Make colab.ipynb of docs/colab.py, with the address that pyproject.toml says (also in README.md); or run the notebook
from its first cell to its last, as on a new machine.

python .ci/notebook.py
python .ci/notebook.py run [EXECUTED.ipynb]

A run clones the last commit of this checkout into a temporary folder and installs it there, so in a virtual
environment it comes last. TFM_STEPS, 120 here, is how long the notebook trains (vit warms up for 100 steps).
"""

import os
import pathlib
import re
import sys
import tempfile
import tomllib

import jupytext
import nbformat

ROOT = pathlib.Path(__file__).parents[1]
SOURCE, NOTEBOOK = ROOT / "docs" / "colab.py", ROOT / "colab.ipynb"
FIGURES = 4  # of vit


def address() -> None:
    """Write the repository's address, as pyproject.toml has it, into the files that say where to clone from."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    repository = project["urls"]["Repository"].partition("github.com/")[2]
    for file in (SOURCE, ROOT / "README.md"):
        content = file.read_text(encoding="utf-8")
        file.write_text(re.sub(r"(github\.com|/github)/[\w.-]+/tfm\b", rf"\1/{repository}", content), encoding="utf-8")


def text() -> str:
    """The notebook that the source says, always the same: cells have no ids, which would be drawn at random."""
    notebook = jupytext.read(SOURCE)
    del notebook.metadata["jupytext"]
    for cell in notebook.cells:
        del cell["id"]
    notebook.nbformat_minor = 4  # from 5 on a cell must have an id
    nbformat.validate(notebook)
    return nbformat.writes(notebook) + "\n"


def run(executed: str | None = None) -> None:
    """Run every cell in turn, and exit with a sentence where one fails or what it should show is not there."""
    import nbclient

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    os.environ.setdefault("TFM_REPOSITORY", str(ROOT))
    os.environ.setdefault("TFM_STEPS", "120")
    os.environ |= {"PIP_QUIET": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}  # `pip list` speaks, and of nothing else
    with tempfile.TemporaryDirectory() as folder:
        there = {"metadata": {"path": folder}}
        client = nbclient.NotebookClient(notebook, timeout=900, coalesce_streams=True, resources=there)
        try:
            client.execute()
        except nbclient.exceptions.CellExecutionError as error:
            sys.exit(f"colab.ipynb: {error}")
        finally:
            if executed:
                nbformat.write(notebook, executed)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    printed = "".join(output.text for output in outputs if output.get("name") == "stdout")
    shown = [output.data for output in outputs if "data" in output]
    there = {
        "a package of the image replaced": "every package of the image is as it was" in printed,
        f"{FIGURES} figures of vit": sum("image/png" in data for data in shown) == FIGURES,
        "the report of a study": any("Paired differences" in data.get("text/html", "") for data in shown),
        "a sample": "The function " in printed,
        "the speed of this machine": "is in results.json" in printed,
        "a run that goes on": "resuming " in printed,
        "warnings": not any(output.get("name") == "stderr" for output in outputs),
    }
    if missing := [what for what, good in there.items() if not good]:
        sys.exit(f"colab.ipynb ran to its end, but this is not as it should be: {', '.join(missing)}")


if __name__ == "__main__":
    match sys.argv[1:]:
        case []:
            address()
            NOTEBOOK.write_text(text(), encoding="utf-8")
        case ["run", *executed]:
            run(*executed)
        case _:
            sys.exit(__doc__)

"""Make colab.ipynb from docs/colab.py with the repository's address from pyproject.toml, or run the notebook.

python .ci/notebook.py
python .ci/notebook.py run [EXECUTED.ipynb]

The first command also writes the address into README.md. `run` executes all cells as on a new machine: it clones the
last commit of this checkout into a temporary folder and installs it from there. Run it last in a virtual environment.
TFM_STEPS (here 120) is the number of training steps; vit warms up for 100 steps. It runs on the CPU unless
JAX_PLATFORMS names another platform, because a libtpu without a TPU prints warnings.
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
    """Write the repository's address from pyproject.toml into the files with the address to clone from."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    repository = project["urls"]["Repository"].partition("github.com/")[2]
    for file in (SOURCE, ROOT / "README.md"):
        content = file.read_text(encoding="utf-8")
        file.write_text(re.sub(r"(github\.com|/github)/[\w.-]+/tfm\b", rf"\1/{repository}", content), encoding="utf-8")


def text() -> str:
    """Return the notebook of the source, without the random ids of cells."""
    notebook = jupytext.read(SOURCE)
    del notebook.metadata["jupytext"]
    for cell in notebook.cells:
        del cell["id"]
    notebook.nbformat_minor = 4  # from 5 on a cell must have an id
    nbformat.validate(notebook)
    return nbformat.writes(notebook) + "\n"


def run(executed: str | None = None) -> None:
    """Run all cells, and exit with a message if a cell fails or an expected output is missing."""
    import nbclient

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    os.environ.setdefault("TFM_REPOSITORY", str(ROOT))
    os.environ.setdefault("TFM_STEPS", "120")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ |= {"PIP_QUIET": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}  # `pip list` prints only packages
    with tempfile.TemporaryDirectory() as folder:
        resources = {"metadata": {"path": folder}}
        client = nbclient.NotebookClient(notebook, timeout=900, coalesce_streams=True, resources=resources)
        try:
            client.execute()
        except nbclient.exceptions.CellExecutionError as error:
            sys.exit(f"colab.ipynb: {error}")
        finally:
            if executed:
                nbformat.write(notebook, executed)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    printed = "".join(output.text for output in outputs if output.get("name") == "stdout")
    displays = [output.data for output in outputs if "data" in output]
    checks = {
        "no package of the image is replaced": "every package of the image is as it was" in printed,
        f"{FIGURES} figures of vit": sum("image/png" in data for data in displays) == FIGURES,
        "the report of a study": any("Each arm is compared with" in data.get("text/html", "") for data in displays),
        "a sample": "The function " in printed,
        "the speed of this machine": re.search(r"^colab_v5e +\d", printed, re.MULTILINE),
        "a run that resumes": "resuming " in printed,
        "no warnings": not any(output.get("name") == "stderr" for output in outputs),
    }
    if failures := [check for check, passed in checks.items() if not passed]:
        sys.exit(f"colab.ipynb ran to its end, but these checks fail: {', '.join(failures)}")


if __name__ == "__main__":
    match sys.argv[1:]:
        case []:
            address()
            NOTEBOOK.write_text(text(), encoding="utf-8")
        case ["run", *executed]:
            run(*executed)
        case _:
            sys.exit(__doc__)

"""Make colab.ipynb of docs/colab.py, or run it from top to bottom as it would run on a new machine.

python .ci/notebook.py
python .ci/notebook.py run [EXECUTED.ipynb]

A run clones this checkout's last commit into a temporary folder and installs it from there, so it takes a virtual
environment of its own or the last turn in one. TFM_STEPS shortens the training.
"""

import os
import pathlib
import sys
import tempfile

import jupytext
import nbclient
import nbformat

ROOT = pathlib.Path(__file__).parents[1]
NOTEBOOK, SOURCE = ROOT / "colab.ipynb", ROOT / "docs" / "colab.py"


def text() -> str:
    """The notebook that the source says, always the same: without the ids of cells, which are drawn at random."""
    notebook = jupytext.read(SOURCE)
    del notebook.metadata["jupytext"]
    for cell in notebook.cells:
        del cell["id"]
    notebook.nbformat_minor = 4  # 5 asks for ids
    nbformat.validate(notebook)
    return nbformat.writes(notebook)


def run(executed: str | None) -> None:
    """Every cell in turn; an error in one is an error here."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("TFM_REPOSITORY", str(ROOT))
        nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": folder}}).execute()
        if executed:
            nbformat.write(notebook, executed)
        check(notebook)


def check(notebook) -> None:
    pass


if __name__ == "__main__":
    if sys.argv[1:2] == ["run"]:
        run(*sys.argv[2:3] or [None])
    else:
        NOTEBOOK.write_text(text(), encoding="utf-8")

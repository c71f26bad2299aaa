"""Make colab.ipynb from docs/colab.py, write the repository's address into all pages, or run the notebook.

python .ci/notebook.py
python .ci/notebook.py OWNER/REPOSITORY
python .ci/notebook.py run [EXECUTED.ipynb]

The first command makes the notebook. The second also writes this address of GitHub into pyproject.toml, into the
notebook, and into README.md, with a badge that opens the notebook in Colab. `run` executes all cells as on a new
machine: it clones the last commit of this checkout into a temporary folder and installs it from there. Run it last in
a virtual environment. TFM_STEPS (here 120) is the number of training steps. It runs on the CPU unless JAX_PLATFORMS
names another platform, because a libtpu without a TPU prints warnings.
"""

import os
import pathlib
import re
import sys
import tempfile

import jupytext
import nbformat

ROOT = pathlib.Path(__file__).parents[1]
SOURCE, NOTEBOOK = ROOT / "docs" / "colab.py", ROOT / "colab.ipynb"
FIGURES = 4  # of vit


def write_address(repository: str) -> None:
    """Write the repository OWNER/NAME of GitHub into each file that has an address, in place of an earlier one."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repository):
        sys.exit(f"{repository} is not of the form OWNER/REPOSITORY")
    url, colab = f"https://github.com/{repository}", "https://colab.research.google.com"
    badge = f"[![Open in Colab]({colab}/assets/colab-badge.svg)]({colab}/github/{repository}/blob/main/colab.ipynb)"
    replace(SOURCE, r'(?<="TFM_REPOSITORY", )"[^"]*"', f'"{url}"')
    urls = f'[project.urls]\nRepository = "{url}"\n\n'
    replace(ROOT / "pyproject.toml", r"(\[project\.urls\]\n.*\n\n)?(?=\[project\.optional-dependencies\])", urls)
    replace(ROOT / "README.md", r"\A(# .*\n\n)(\[!\[Open in Colab\].*\n\n)?", rf"\1{badge}\n\n")
    replace(ROOT / "README.md", r"^(git clone \S+ tfm && )?cd tfm\b", f"git clone {url} tfm && cd tfm")


def replace(file: pathlib.Path, pattern: str, text: str) -> None:
    """Replace the one place in the file that matches. Exit with a message if there is none."""
    content, number = re.subn(pattern, text, file.read_text(encoding="utf-8"), count=1, flags=re.MULTILINE)
    if not number:
        sys.exit(f"{file} has no place for the address")
    file.write_text(content, encoding="utf-8")


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
            NOTEBOOK.write_text(text(), encoding="utf-8")
        case ["run", *executed]:
            run(*executed)
        case [repository]:
            write_address(repository)
            NOTEBOOK.write_text(text(), encoding="utf-8")
        case _:
            sys.exit(__doc__)

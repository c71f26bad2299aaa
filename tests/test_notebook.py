"""colab.ipynb is generated from docs/colab.py, has no outputs, and refers to files and fields that exist."""

import ast
import builtins
import json
import pathlib
import re
import runpy
import tomllib

import pytest
import tiny

from experiments.config import files as config_files, settings as configs
from experiments.studies import study as studies

ROOT = pathlib.Path(__file__).parents[1]
CELLS = json.loads((ROOT / "colab.ipynb").read_text(encoding="utf-8"))["cells"]
CODE = ["".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "code"]
FIRST = [(*source.partition("\n")[0].split(), source.partition("\n")[2]) for source in CODE]
FILES = {words[1]: words[-1] for words in FIRST if words[0] == "%%writefile"}
ARMS = ("one_matrix", "rotated", "two_matrices")
README = (ROOT / "README.md").read_text(encoding="utf-8")


def to_python(source: str) -> str:
    """Return the Python code of a cell: a line for IPython becomes `pass`, and a shell cell becomes empty."""
    first, _, rest = source.partition("\n")
    if first.startswith("%%"):
        return rest if "writefile" in first else ""
    return re.sub(r"^( *)[!%].*", r"\1pass", source, flags=re.MULTILINE)


def test_the_notebook_is_up_to_date_with_its_source() -> None:
    pytest.importorskip("jupytext", reason='makes colab.ipynb: pip install -e ".[notebook]"')
    notebook = runpy.run_path(str(ROOT / ".ci" / "notebook.py"))
    assert notebook["NOTEBOOK"].read_text(encoding="utf-8") == notebook["text"](), (
        "run python .ci/notebook.py to rebuild it"
    )


def test_cells_are_python_without_outputs_about_configs_and_fields_that_exist() -> None:
    """Configs of launch.run are files of the project or files that a cell writes. Fields are keys of dicts."""
    for cell in CELLS:
        assert not cell.get("outputs") and cell.get("execution_count") is None
    nodes = [node for source in CODE for node in ast.walk(ast.parse(to_python(source)))]
    calls = [node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func) == "launch.run"]
    files = {call.args[0].value for call in calls if isinstance(call.args[0], ast.Constant)}
    assert {"configs/vit.py", "my_study.py"} <= files
    assert all(file in FILES or (ROOT / file).is_file() for file in files)
    fields = {key for source in CODE for key in re.findall(r'"([a-z]+\.\w+)":', source)}
    assert "train.steps" in fields and fields <= tiny.fields().keys()


def test_the_last_section_runs_in_a_new_runtime_after_the_first_cells() -> None:
    """After Colab ends a runtime, the cells up to "Which chip?" and those under the last heading are sufficient."""
    parts, heading = {}, ""
    for cell in CELLS:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            heading = source.partition("\n")[0] if source.startswith("#") else heading
        else:
            parts.setdefault(heading, []).append(to_python(source))
    headings = list(parts)
    assert headings[2] == "## Which chip?" and headings[-1].startswith("## Keep it")
    tree = ast.parse("\n".join(source for heading in [*headings[:3], headings[-1]] for source in parts[heading]))
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    defined = {node.id for node in nodes if isinstance(node.ctx, ast.Store)} | set(dir(builtins))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    defined |= {alias.name for node in imports for alias in node.names}
    assert {node.id for node in nodes} <= defined


def test_the_notebook_writes_this_study_and_the_score_of_the_readme(tmp_path: pathlib.Path) -> None:
    """The study has these arms and seeds. The score equals the one in README.md, which another test checks."""
    for name, body in FILES.items():
        (tmp_path / name).write_text(body, encoding="utf-8")
    file = str(tmp_path / "my_study.py")
    changed = config_files.load(file)
    settings = configs.Settings(changed, file=file)
    runs = studies.runs(settings, studies.read(settings))
    assert {(run.arm, run.seed) for run in runs} == {(arm, seed) for arm in ARMS for seed in range(5)}
    (readme,) = re.findall(r"# my_score.py\n(.*?)```", README, re.DOTALL)
    assert dump_syntax(FILES["my_score.py"]) == dump_syntax(readme)


def dump_syntax(source: str) -> str:
    """Dump the syntax tree of a program without docstrings."""
    tree = ast.parse(source)
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef) and ast.get_docstring(function):
            del function.body[0]
    return ast.dump(tree)


def test_every_page_has_the_address_of_the_repository_in_pyproject() -> None:
    """`python .ci/notebook.py` writes this address into the badge, the notebook and its source."""
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]
    owner = urls["Repository"].removeprefix("https://github.com/").removesuffix("/tfm")
    files = [ROOT / "README.md", ROOT / "colab.ipynb", *ROOT.glob("docs/**/*.py"), *ROOT.glob("docs/**/*.md")]
    result = {file: re.findall(r"github(?:\.com)?/([\w.-]+)/tfm\b", file.read_text(encoding="utf-8")) for file in files}
    assert {file.name for file in result if result[file]} == {"README.md", "colab.ipynb", "colab.py"}
    assert {name for names in result.values() for name in names} == {owner}
    if owner != "OWNER":
        assert not [file for file in files if re.search(r"\bOWNER\b", file.read_text(encoding="utf-8"))]
    assert f"https://colab.research.google.com/github/{owner}/tfm/blob/main/colab.ipynb" in README

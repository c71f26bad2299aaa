"""colab.ipynb is generated from docs/colab.py, has no outputs, and refers to files and fields that exist."""

import ast
import builtins
import json
import pathlib
import re
import runpy
import shutil
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
ADDRESS = re.search(r'"TFM_REPOSITORY", ("[^"]*")', CODE[0])[1]
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


def test_an_address_is_written_into_every_file_that_has_one(tmp_path: pathlib.Path, monkeypatch) -> None:
    """Without an address there is no badge. A second address replaces the first."""
    pytest.importorskip("jupytext", reason='makes colab.ipynb: pip install -e ".[notebook]"')
    (tmp_path / "docs").mkdir()
    for name in ("README.md", "pyproject.toml", "docs/colab.py"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    write = runpy.run_path(str(ROOT / ".ci" / "notebook.py"))["write_address"]
    monkeypatch.setitem(write.__globals__, "ROOT", tmp_path)
    monkeypatch.setitem(write.__globals__, "SOURCE", tmp_path / "docs/colab.py")
    for repository in ("first/one", "second/two"):
        write(repository)
        readme = (tmp_path / "README.md").read_text(encoding="utf-8")
        assert readme.count("colab-badge.svg") == readme.count(f"/github/{repository}/blob/main/colab.ipynb)") == 1
        assert f"git clone https://github.com/{repository} tfm && cd tfm" in readme
        project = tomllib.loads((tmp_path / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        assert project["urls"] == {"Repository": f"https://github.com/{repository}"}
        line = f'REPOSITORY = os.environ.get("TFM_REPOSITORY", "https://github.com/{repository}")'
        assert line in (tmp_path / "docs/colab.py").read_text(encoding="utf-8")
    with pytest.raises(SystemExit, match="OWNER/REPOSITORY"):
        write("https://github.com/first/one")


@pytest.mark.parametrize("kind, folder", [("zip", "tfm-main/"), ("gztar", ""), ("tar", "tfm/")])
def test_the_notebook_starts_from_an_uploaded_archive(kind, folder, tmp_path: pathlib.Path, monkeypatch) -> None:
    """The archive has a folder, as GitHub's and `git archive --prefix=tfm/`, or none. The cell can run again."""
    (tmp_path / "made" / folder).mkdir(parents=True)
    (tmp_path / "made" / folder / "launch.py").write_text("launched = True")
    (tmp_path / "content").mkdir()
    monkeypatch.chdir(tmp_path / "content")
    monkeypatch.delenv("TFM_REPOSITORY", raising=False)
    first, second = CODE[0].replace(ADDRESS, '""'), CODE[1]
    with pytest.raises(FileNotFoundError, match="drop tfm.zip on the Files panel"):
        exec(f"{first}\n{second}", {})
    shutil.make_archive("tfm-main", kind, tmp_path / "made")
    for _ in range(2):
        exec(f"{first}\n{second}", {})
        assert pathlib.Path("launch.py").read_text() == "launched = True"
        pathlib.Path("launch.py").touch()
    monkeypatch.chdir(tmp_path / "content")  # as after a restart of Python
    pathlib.Path("tfm", folder, "launch.py").write_text("edited = True")
    exec(f"{first}\n{second}", {})
    assert pathlib.Path("launch.py").read_text() == "edited = True"


@pytest.mark.parametrize("steps, enough", [(84, True), (83, False)])
def test_the_smallest_number_of_steps_is_what_the_notebook_says(steps, enough, tmp_path: pathlib.Path) -> None:
    assert "at least 84:" in CODE[0]
    for name, body in FILES.items():
        (tmp_path / name).write_text(body, encoding="utf-8")
    nodes = [node for source in CODE for node in ast.walk(ast.parse(to_python(source)))]
    calls = [node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func) == "launch.run"]
    values = {"STEPS": steps, "changes": {"train.steps": steps}}
    results = []
    for call in calls:
        file = call.args[0].value
        changes = eval(ast.unparse(call.keywords[-1].value), values)
        config = configs.Settings(config_files.load(str(tmp_path / file if file in FILES else ROOT / file)))
        settings = config.replace({"train.steps": changes["train.steps"]})
        results.append(configs.warmup_steps(settings) < settings.train.steps)
    assert len(results) == 7 and all(results) == enough


def test_no_placeholder_stands_for_the_address() -> None:
    """What a reader cannot open is not on a page. Links between pages have a test in test_docs.py."""
    files = [ROOT / "README.md", ROOT / "colab.ipynb", *ROOT.glob("docs/**/*.py"), *ROOT.glob("docs/**/*.md")]
    for file in files:
        page = file.read_text(encoding="utf-8")
        assert not re.search(r"\b(OWNER|USERNAME|YOUR_NAME)\b|example\.(com|org)|TODO", page), file
    for target in re.findall(r"\]\(([^)#]+)", "".join("".join(cell["source"]) for cell in CELLS)):
        assert target.startswith("https://") or (ROOT / target).exists(), target
    mentioned = re.findall(r"`((?:docs|configs|tfm)/[\w./]*|\w+\.md)`", "".join("".join(c["source"]) for c in CELLS))
    assert mentioned and all((ROOT / name).exists() for name in mentioned)

"""colab.ipynb: made of docs/colab.py, without outputs, and about files and fields that exist."""

import ast
import builtins
import importlib.util
import json
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from configs import base
from experiments.engine import config, config_file
from experiments.studies import study

ROOT = pathlib.Path(__file__).parents[1]
CELLS = json.loads((ROOT / "colab.ipynb").read_text(encoding="utf-8"))["cells"]
CODE = ["".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "code"]
FILES = {
    first.split()[1]: body
    for first, _, body in (source.partition("\n") for source in CODE)
    if first.startswith("%%writefile")
}
ARMS = ("one_matrix", "turned", "two_matrices")


def python(source: str) -> str:
    """The Python of a cell: a line that is for IPython becomes `pass`, and what is for a shell nothing."""
    first, _, rest = source.partition("\n")
    if first.startswith("%%"):
        return rest if "writefile" in first else ""
    return re.sub(r"^( *)[!%].*", r"\1pass", source, flags=re.MULTILINE)


def test_it_is_what_the_source_says() -> None:
    pytest.importorskip("jupytext", reason='makes colab.ipynb: pip install -e ".[notebook]"')
    spec = importlib.util.spec_from_file_location("notebook", ROOT / ".ci" / "notebook.py")
    notebook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(notebook)
    assert notebook.NOTEBOOK.read_text(encoding="utf-8") == notebook.text(), "python .ci/notebook.py makes it anew"


def test_nothing_of_an_execution_is_kept() -> None:
    for cell in CELLS:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None


@pytest.mark.parametrize("source", CODE, ids=range(len(CODE)))
def test_cells_are_python(source: str) -> None:
    ast.parse(python(source))


def test_cells_are_short() -> None:
    for cell in CELLS:
        assert len(cell["source"]) <= 26


def test_configs_and_fields_exist() -> None:
    """Those that are given to launch.run: a file of the project or one that a cell writes, and the keys of a dict."""
    calls = [
        node
        for source in CODE
        for node in ast.walk(ast.parse(python(source)))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "launch.run"
    ]
    files = {call.args[0].value for call in calls}
    assert {"configs/vit.py", "my_study.py"} <= files
    assert all(file in FILES or (ROOT / file).is_file() for file in files)
    fields = {key for source in CODE for key in re.findall(r'"([a-z]+\.\w+)":', source)}
    assert "train.steps" in fields
    assert fields <= tiny.fields().keys()


def test_a_new_runtime_needs_no_other_cells_than_it_says() -> None:
    """After Colab took a runtime away: the cells up to the chip, and those under the last heading but one."""
    parts, heading = {}, ""
    for cell in CELLS:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            heading = source.partition("\n")[0] if source.startswith("#") else heading
        else:
            parts.setdefault(heading, []).append(python(source))
    headings = list(parts)
    assert headings[2] == "## Which chip?" and headings[-1].startswith("## Keep it")
    tree = ast.parse("\n".join(source for heading in [*headings[:3], headings[-1]] for source in parts[heading]))
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    known = {node.id for node in nodes if isinstance(node.ctx, ast.Store)} | set(dir(builtins))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    known |= {alias.name for node in imports for alias in node.names}
    assert {node.id for node in nodes} <= known


def test_the_study_that_it_writes(tmp_path: pathlib.Path) -> None:
    for name, body in FILES.items():
        (tmp_path / name).write_text(body, encoding="utf-8")
    file = str(tmp_path / "my_study.py")
    made = config_file.load(file, base=base.get_config)
    settings = config.Settings(made, config_file.defaults(made, base.get_config), file=file)
    rows = study.runs(settings, study.read(settings))
    assert {(row.arm, row.seed) for row in rows} == {(arm, seed) for arm in ARMS for seed in range(5)}


def test_the_score_that_it_writes_is_skew() -> None:
    """l_{n,s} = -l_{s,n}, as the cell before it says."""
    names = {}
    exec(FILES["my_score.py"], names)
    x_BND = jax.random.normal(jax.random.key(0), (2, 5, 7))
    params = names["turned"].init(jax.random.key(1), H=3, K=4, D=7, bias=False)
    logits_BHNS = jnp.einsum("bhnk,bhsk->bhns", *names["turned"].apply(params, x_BND, x_BND))
    assert float(jnp.abs(logits_BHNS).max()) > 0.1
    np.testing.assert_allclose(logits_BHNS, -logits_BHNS.swapaxes(2, 3), atol=1e-5)


def test_the_badge_opens_it_where_it_clones_from() -> None:
    (repository,) = re.findall(r"https://github\.com/[\w.-]+/[\w.-]+", CODE[0])
    badge = f"https://colab.research.google.com/github/{repository.partition('.com/')[2]}/blob/main/colab.ipynb"
    assert badge in (ROOT / "README.md").read_text(encoding="utf-8")

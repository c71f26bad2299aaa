"""Make docs/mathematics.md of what the files of tfm/ say of themselves: python docs/mathematics.py"""

import ast
import inspect
import pathlib

ROOT = pathlib.Path(__file__).parents[1]
FILE = ROOT / "docs" / "mathematics.md"
HEAD = """# The mathematics

<!-- Made of the docstrings of tfm/ by `python docs/mathematics.py`: edit those. -->

"""


def text() -> str:
    """The page: the letters and the table of equations, then for each file its docstring and what it has to offer."""
    files = sorted((ROOT / "tfm").rglob("*.py"), key=lambda file: (len(file.parts), file))
    parts = [_docstring(ast.parse((ROOT / "tfm" / "__init__.py").read_text(encoding="utf-8")))]
    for file in files:
        tree = ast.parse(file.read_text(encoding="utf-8"))
        offers = [line for node in tree.body for line in _offer(node)]
        if offers:
            name = file.relative_to(ROOT / "tfm").as_posix()
            parts.append("\n\n".join([f"## {name}", _docstring(tree), "\n".join(offers)]))
    return HEAD + "\n\n".join(parts) + "\n"


def _docstring(tree: ast.Module) -> str:
    return inspect.cleandoc(ast.get_docstring(tree) or "")


def _offer(node: ast.stmt) -> list[str]:
    """A line of the list for a public function or class: its name, and the first paragraph of its docstring."""
    if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("_"):
        return []
    says = inspect.cleandoc(ast.get_docstring(node) or "").split("\n\n")[0].replace("\n", " ")
    return [f"* **{node.name}**: {says}" if says else f"* **{node.name}**"]


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")

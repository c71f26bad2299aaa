"""Make docs/mathematics.md from the docstrings of tfm/: python docs/mathematics.py"""

import ast
import pathlib
import textwrap

ROOT = pathlib.Path(__file__).parents[1]
FILE = ROOT / "docs" / "mathematics.md"
HEAD = """# The mathematics

<!-- Made from the docstrings of tfm/ by `python docs/mathematics.py`: edit those. -->

"""
WIDTH = 120  # characters of a line
LEFT_OUT = ("platform.py",)  # forms of the same sums that compilers make fast


def text() -> str:
    """Return the page: the letters, the table of equations, and a section for each file.

    A section has the file's docstring and a list of its public functions and classes, each with its first paragraph.
    """
    files = [file for file in (ROOT / "tfm").rglob("*.py") if file.name not in LEFT_OUT]
    files = sorted(files, key=lambda file: (len(file.parts), file))
    parts = [ast.get_docstring(ast.parse((ROOT / "tfm" / "__init__.py").read_text(encoding="utf-8")))]
    for file in files:
        tree = ast.parse(file.read_text(encoding="utf-8"))
        if items := list_public(tree):
            name = file.relative_to(ROOT / "tfm").as_posix()
            parts.append("\n\n".join([f"## {name}", ast.get_docstring(tree) or "", "\n".join(items)]))
    return HEAD + "\n\n".join(parts) + "\n"


def list_public(tree: ast.Module) -> list[str]:
    """Return a list item for each public function and class of a module."""
    items = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            paragraph = (ast.get_docstring(node) or "").split("\n\n")[0]
            item = f"* **{node.name}**: {' '.join(paragraph.split())}" if paragraph else f"* **{node.name}**"
            items.append(textwrap.fill(item, WIDTH, subsequent_indent="  ", break_on_hyphens=False))
    return items


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")

"""Make docs/mathematics.md of what the files of tfm/ say of themselves: python docs/mathematics.py"""

import ast
import pathlib

ROOT = pathlib.Path(__file__).parents[1]
FILE = ROOT / "docs" / "mathematics.md"
HEAD = """# The mathematics

<!-- Made of the docstrings of tfm/ by `python docs/mathematics.py`: edit those. -->

"""


def text() -> str:
    """The page: the letters and the table of equations, then for each file its docstring and what it has to offer: a
    line for each public function or class, its name and the first paragraph of its docstring."""
    files = sorted((ROOT / "tfm").rglob("*.py"), key=lambda file: (len(file.parts), file))
    parts = [ast.get_docstring(ast.parse((ROOT / "tfm" / "__init__.py").read_text(encoding="utf-8")))]
    for file in files:
        tree, offers = ast.parse(file.read_text(encoding="utf-8")), []
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                says = (ast.get_docstring(node) or "").split("\n\n")[0].replace("\n", " ")
                offers.append(f"* **{node.name}**: {says}" if says else f"* **{node.name}**")
        if offers:
            name = file.relative_to(ROOT / "tfm").as_posix()
            parts.append("\n\n".join([f"## {name}", ast.get_docstring(tree) or "", "\n".join(offers)]))
    return HEAD + "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")

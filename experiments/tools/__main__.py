"""List the tools: python -m experiments.tools prints a line for each."""

import ast
import pkgutil

from experiments import tools


def list_tools() -> dict[str, str]:
    """Return {name: the first line of its documentation} of the modules of this package that have a function `run`.

    Their sources are read, not imported.
    """
    lines = {}
    for entry in pkgutil.iter_modules(tools.__path__, f"{tools.__name__}."):
        tree = ast.parse(entry.module_finder.find_spec(entry.name).loader.get_source(entry.name))
        if any(isinstance(node, ast.FunctionDef) and node.name == "run" for node in tree.body):
            lines[entry.name.rpartition(".")[2]] = ast.get_docstring(tree).partition("\n")[0]
    return lines


def main() -> None:
    """Print the name of each tool and the first line of its documentation."""
    found = list_tools()
    width = max(map(len, found))
    lines = [f"  {name:{width}}  {line}" for name, line in found.items()]
    print("python -m experiments.tools.NAME --help describes a tool:\n", *lines, sep="\n")


if __name__ == "__main__":
    main()

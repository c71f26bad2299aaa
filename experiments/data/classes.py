"""Names of classes: their order, and the lines that a run prints about them."""

import re
import unicodedata
from collections.abc import Iterable, Sequence

from experiments.data import files as data_files
from experiments.engine import errors

SHOWN = 12  # names in a line, and the most warnings
NUMBER = re.compile(r"[+-]?[0-9]{1,15}(\.0+)?")


def sort_names(names: Iterable[str]) -> tuple[str, ...]:
    """Return the distinct names, sorted as numbers if all are integers ("2" before "10"), else as text."""
    distinct = sorted({*names})
    return tuple(sorted(distinct, key=float) if all(map(NUMBER.fullmatch, distinct)) else distinct)


def read_names(splits: Sequence[data_files.File], column: str) -> tuple[str, ...]:
    """Return the class names of a data set's ClassLabel column, in its order; () for other columns and for files.

    Raises UserError if the splits of the data set have different names.
    """
    names = set()
    for split in splits:
        if split.version:  # a file on the disk has no ClassLabel columns
            kind = (split.open().features or {}).get(column)
            names.add(tuple(kind.names) if type(kind).__name__ == "ClassLabel" else ())
    if len(names) > 1:
        raise errors.UserError(
            f"the splits of {splits[0].name} have different classes in their column {column!r}. "
            "Choose another column or another data set."
        )
    return names.pop() if names else ()


def describe(names: Sequence[str]) -> list[str]:
    """Return a line with the names of the classes, and a warning for each group that differs only by spaces or case."""
    line = "classes: " + ", ".join(names[:SHOWN])
    if len(names) > SHOWN:
        line += f", ... ({len(names):,} in all)"
    names_by_key: dict[str, list[str]] = {}
    for name in names:
        names_by_key.setdefault("".join(unicodedata.normalize("NFKC", name).casefold().split()), []).append(repr(name))
    groups = [", ".join(group) for group in names_by_key.values() if len(group) > 1]
    lines = [line, *(f"warning: {group} differ only by spaces or case" for group in groups[:SHOWN])]
    return [errors.line(text) for text in lines]

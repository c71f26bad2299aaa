"""Names of classes: their order, and the lines that a run prints about them."""

import re
import unicodedata
from collections.abc import Iterable, Sequence

from experiments.data import files
from experiments.engine import errors

SHOWN = 12
NUMBER = re.compile(r"[+-]?[0-9]{1,15}(\.0+)?")


def sort_names(names: Iterable[str]) -> tuple[str, ...]:
    """Return the distinct names, sorted as numbers if all are integers ("2" before "10"), else as text."""
    distinct = sorted({*names})
    return tuple(sorted(distinct, key=float) if all(map(NUMBER.fullmatch, distinct)) else distinct)


def read_names(splits: Sequence[files.File], column: str) -> tuple[str, ...]:
    """Return the names of a data set's ClassLabel column in their order, () for a column of another kind.

    Raises UserError if its splits have different names.
    """
    names = set()
    for split in splits:
        if split.version:  # else a file on the disk: its columns have no kinds
            kind = (split.open().features or {}).get(column)
            names.add(tuple(kind.names) if type(kind).__name__ == "ClassLabel" else ())
    if len(names) > 1:
        raise errors.UserError(
            f"the splits of {splits[0].name} have different classes in their column {column!r}: choose another column, "
            "or another data set"
        )
    return names.pop() if names else ()


def describe(names: Sequence[str]) -> list[str]:
    """Return the line that names the classes, and one for each group of names that differ only by spaces or case."""
    line = "classes: " + ", ".join(names[:SHOWN])
    if len(names) > SHOWN:
        line += f", ... ({len(names):,} in all)"
    alike: dict[str, list[str]] = {}
    for name in names:
        alike.setdefault("".join(unicodedata.normalize("NFKC", name).casefold().split()), []).append(repr(name))
    groups = [", ".join(group) for group in alike.values() if len(group) > 1]
    lines = [line, *(f"warning: {group} differ only by spaces or case" for group in groups[:SHOWN])]
    return [errors.line(text) for text in lines]

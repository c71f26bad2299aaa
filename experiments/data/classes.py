"""Classes: the folders that are named after them, their order, and the lines that a run prints about them."""

import itertools
import pathlib
import re
import unicodedata
from collections.abc import Collection, Iterable, Sequence

from experiments.config import errors
from experiments.data import files as data_files

SHOWN = 12  # names in a line, and the most warnings
INTEGER = re.compile(r"[+-]?[0-9]{1,15}(\.0+)?")
NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?", re.IGNORECASE)
MISSING = {"nan", "na", "n/a", "<na>", "none", "null", "-", "?"}  # in place of a number
NEVER_NAMES = {"nan", "<na>"}  # also not the name of a class: pandas writes them for missing values
UNLABELLED = {"unsup", "unsupervised", "unlabeled", "unlabelled"}  # folders of examples without a class


def sort_names(names: Iterable[str]) -> tuple[str, ...]:
    """Return the distinct names, sorted as numbers if all are integers ("2" before "10"), else as text."""
    distinct = sorted({*names})
    return tuple(sorted(distinct, key=float) if all(map(INTEGER.fullmatch, distinct)) else distinct)


def check_trained(source: str, trained: Collection[str], evaluated: Collection[str]) -> None:
    """Raise UserError unless all classes that are evaluated are trained on."""
    if new := sort_names({*evaluated} - {*trained}):
        names = data_files.join_names([f'"{name}"' for name in new])
        problem = f"{len(new):,} of the classes that are evaluated have no training data: {names}"
        raise errors.UserError(f"{source}: {problem}. Train on examples of each class, or remove it.")


def divide(path: pathlib.Path, files: Sequence[data_files.File]) -> tuple[dict, list[tuple], list[str]]:
    """Return ({part: its files, labelled}, [(steps to the folders of classes, classes), ...], lines to print).

    There is one pair for each folder of a part: the names of the folders above its classes, and the set of its classes.
    path: a folder. files: its files. TRAIN is the first part, and the only one if folders define no parts.
    path/train/cat/2019/a.jpg gets the label cat, a file in no folder of a class ''. Files in folders of UNLABELLED are
    left out, unless there are no others. Raises UserError as `name_parts`.
    """
    inside = [{step.lower() for step in file.inside.parts[:-1]} & UNLABELLED for file in files]
    labelled, lines = [file for file, steps in zip(files, inside, strict=True) if not steps], []
    if 0 < len(labelled) < len(files):
        names, n = ", ".join(sorted(set().union(*inside))), len(files) - len(labelled)
        files, lines = labelled, [f"files left out, because they have no class (folders {names}): {n:,}"]
    at, parts, above = first_level(files, 0), {}, []  # the level of the parts or, without parts, of the classes
    tops = {top: [*group] for top, group in itertools.groupby(files, lambda file: file.inside.parts[at])}
    part_of_top = name_parts(path, tops, at)
    groups = [(part_of_top[top], group) for top, group in tops.items()] if part_of_top else [(data_files.TRAIN, files)]
    for part, group in sorted(groups, key=lambda pair: pair[0] != data_files.TRAIN):
        trained = {file.label for file in parts.get(data_files.TRAIN, [])}
        level = first_level(group, at + 1, trained) if part_of_top else at  # of the classes
        names = [file.inside.parts[level] if len(file.inside.parts) > level + 1 else "" for file in group]
        labelled = [file._replace(label=name) for file, name in zip(group, names, strict=True)]
        parts[part] = parts.get(part, []) + labelled
        above.append((group[0].inside.parts[:level], {*names}))
    return parts, above, lines


def first_level(files: Sequence[data_files.File], at: int, classes: Collection[str] = ()) -> int:
    """Return the first level, from `at` on (0: the top), on which the files are in several folders.

    A level with a single folder also counts if its name is in `classes`, or if it contains files itself. So there
    always is one.
    """
    names = {file.inside.parts[at] for file in files}
    single = len(names) == 1 and not names & {*classes}
    nested = single and all(file.inside.parts[at + 2 :] for file in files)
    return first_level(files, at + 1, classes) if nested else at


def part_of(name: str) -> str:
    """Return the part that a folder's name states: TRAIN for training_set or train2017, VALID, TEST; else OTHER."""
    stem = re.sub(r"(?<=[a-z])(set|data|images)\b", "", name.lower())
    return data_files.part_of_name(pathlib.PurePath(stem.replace(" ", "_")))


def name_parts(path: pathlib.Path, tops: dict[str, list[data_files.File]], at: int) -> dict[str, str]:
    """Return {folder: TRAIN, VALID, TEST or OTHER} for the folders of the level `at`, or {} if they are classes.

    tops: the files in each folder. Only folders whose files are all in folders inside them show that there are
    parts. A training part is recognised next to another part, or by its bare name (train). Raises UserError if folders
    may be parts or classes.
    """
    below = {}  # names of the folders inside each folder that have files
    for top, group in tops.items():
        below[top] = {file.inside.parts[at + 1] for file in group if file.inside.parts[at + 2 :]}
    flat = {top for top, group in tops.items() if min(len(file.inside.parts) for file in group) <= at + 2}
    kinds = {top: part_of(top) for top in tops}
    deep = {top: kind for top, kind in kinds.items() if kind and top not in flat}
    bare = any(kind == data_files.TRAIN and top.lower() in data_files.PARTS for top, kind in deep.items())
    if data_files.TRAIN in deep.values() and (len({*deep.values()}) > 1 or (bare and not flat)):
        return kinds
    alike = [top for top in deep if below[top] <= set().union(*(below[other] for other in tops if other != top))]
    split = [top for top in tops if {data_files.TRAIN} < {part_of(name) for name in below[top]} - {data_files.OTHER}]
    if bare or alike or split or all(kinds.values()):
        folders = data_files.join_names([path / top for top in alike or split or deep or kinds])
        remedy = "Use train/CLASS/ and test/CLASS/, or folders CLASS/ with other names."
        raise errors.UserError(f"{folders} may be parts or classes of {path}. {remedy}")
    return {}


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
        problem = f"the splits of {splits[0].name} have different classes in their column {column!r}"
        raise errors.UserError(f"{problem}. Choose another column or another data set.")
    return names.pop() if names else ()


def describe(names: Sequence[str]) -> list[str]:
    """Return a line of the first SHOWN classes, and up to SHOWN warnings of names equal up to spaces and case."""
    line = "classes: " + ", ".join(names[:SHOWN])
    if len(names) > SHOWN:
        line += f", ... ({len(names):,} in all)"
    names_by_key: dict[str, list[str]] = {}
    for name in names:
        names_by_key.setdefault("".join(unicodedata.normalize("NFKC", name).casefold().split()), []).append(repr(name))
    groups = [", ".join(group) for group in names_by_key.values() if len(group) > 1]
    lines = [line, *(f"warning: {group} differ only by spaces or case" for group in groups[:SHOWN])]
    return [errors.line(text) for text in lines]

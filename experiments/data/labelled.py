"""Texts with classes: files in folders named after the classes, tables with a column of classes, or docstrings."""

import os
import pathlib
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from experiments.data import classes as class_names, files as data_files, tables, text, tokenization
from experiments.engine import errors

DOCSTRINGS = "docstrings"
PACKAGES = ("asyncio", "email", "http", "importlib", "logging", "multiprocessing", "urllib", "xml")  # of Python
EVALUATION_SHARE = 0.1  # of the texts, unless file names define the splits
CLS = "[CLS]"  # begins every text; its output predicts the class
HINT = f"a folder DIR/class/*.txt, a table or a folder of tables ({', '.join(tables.KINDS)}), or {tables.HUB}NAME"

Row = tuple[str, str]  # a text, and the name of its class


class Labelled(NamedTuple):
    """Texts with the names of their classes, and these names in order."""

    name: str
    train: list[Row]
    evaluation: list[Row]
    description: str
    classes: tuple[str, ...]
    sha256 = data_files.Rows.sha256


def load(source: str, field: str = "text,label") -> Labelled:
    """Return texts with classes from 'docstrings' (Python's own; the class is the package), a path, or 'hub:NAME'.

    The class of a text file is the name of its folder. field: the columns of texts and of classes in tables. File names
    define the splits (`data_files.split_by_names`), or about 10 % of the texts are held out by content. Raises
    UserError if `field` does not name two columns, if there are no such texts, if there are fewer than two classes, or
    if a class is evaluated but not trained on.
    """
    names = [name.strip() for name in field.split(",")]
    if len(names) != 2 or not all(names):
        raise errors.UserError(f'text.field = {field!r} must name two columns, texts and classes: "text,label".')
    files, lines = find(source, names)
    names_of_file, unlabelled = class_names.read_names(files, names[1]), []

    def rows(file: data_files.File) -> Iterator[Row]:
        """Yield the texts of a file that are not empty, each with its class."""
        for content, label in read_rows(file, source, names):
            if names_of_file and int(label) < 0:
                unlabelled.append(file)
            elif content.strip():
                yield content, names_of_file[int(label)] if names_of_file else label

    section, form = "" if source == DOCSTRINGS else "text", f"texts with classes. Give {HINT}."
    data = data_files.split_rows(source, section, files, rows, form=form, share=EVALUATION_SHARE)
    trained = {name for _, name in data.train}
    new = sorted({name for _, name in data.evaluation} - trained)
    if new or len(trained) < 2:
        problem = f'the class "{new[0]}" is evaluated but not trained on' if new else f"only {len(trained)} class"
        raise errors.UserError(f"{source}: {problem}. Give texts of at least two classes, each in the training data.")
    if unlabelled:
        lines.append(f"texts left out, because they have no class: {len(unlabelled):,}")
    data = data._replace(description=data_files.join_lines(source, data.description, lines))
    return Labelled(*data, names_of_file or class_names.sort_names(trained))


def read_rows(file: data_files.File, source: str, names: Sequence[str]) -> Iterable[Row]:
    """Return the texts of a file, each with the name of its class, or with its number as text (ClassLabel)."""
    if source == DOCSTRINGS:
        return ((docstring, file.inside.parts[0]) for docstring in text.list_docstrings(file))
    return (
        tables.pairs(file, *names) if tables.kind(file) else [(data_files.read(file).decode(), file.inside.parts[-2])]
    )


def find(source: str, names: Sequence[str]) -> tuple[list[data_files.File], list[str]]:
    """Return the files with texts, and lines about the files that are left out."""
    if source == DOCSTRINGS:
        top = pathlib.Path(sysconfig.get_path("stdlib"))
        programs = (file for package in PACKAGES for file in sorted((top / package).rglob("*.py")))
        return [data_files.on_disk(file, file.relative_to(top)) for file in programs], []
    files = tables.find(source, *names, alternatives=DOCSTRINGS, hint=f". Give {HINT}.")
    in_folders = [file for file in files if ".txt" in file.inside.suffixes[-2:] and len(file.inside.parts) > 1]
    selected = tables.select(files, in_folders)
    return selected, data_files.describe_skipped(pathlib.Path(source).expanduser(), files, selected)


def encode(
    encoder: tokenization.Tokenizer, texts: Sequence[str], *, N: int, classifies: bool = True
) -> tuple[np.ndarray, np.ndarray, int]:
    """Return (id_BN, valid_BN, the number of truncated texts). The first token, such as [CLS], predicts the class.

    A text of more than N tokens keeps its special tokens ([CLS], [SEP]) and its beginning, or its end if the side of
    truncation is left. classifies: False if no class is predicted. Raises UserError if a class is, and no special token
    begins a text.
    """
    specials = encoder.encode("").tolist()  # such as [CLS] and [SEP] of BERT
    before = len(os.path.commonprefix([specials, encoder.encode("a").tolist()])) if specials else 0
    after = len(specials) - before
    first = [id for id in reversed(range(encoder.size)) if encoder.name(id) == CLS][:1] if classifies else []
    first = [] if before else first
    if classifies and not before and not first:
        raise errors.UserError(
            f"the tokenizer has no special token before a text, such as {CLS}, which predicts the class. "
            "Choose a tokenizer that has one."
        )
    before, cuts_left = before + len(first), encoder.truncation_side == "left"
    id_BN, valid_BN, truncated = np.zeros((len(texts), N), np.int32), np.zeros((len(texts), N), bool), 0
    for b, content in enumerate(texts):
        id_T = [*first, *encoder.encode(content).tolist()]
        if (extra := len(id_T) - N) > 0:
            truncated += 1
            start = before if cuts_left else max(len(id_T) - after - extra, 0)
            del id_T[start : start + extra]
        id_BN[b, : len(id_T)], valid_BN[b, : len(id_T)] = id_T, True
    return id_BN, valid_BN, truncated
